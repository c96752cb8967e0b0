// SPDX-License-Identifier: Apache-2.0
// Sums over positions, in two steps: of many rows of numbers into few, and of these into the
// gradients of the parameters. Every sum has an order that only the sizes give.
#pragma once

#include "msa_row_attention/norm.cuh"
#include "msa_row_attention/parameters.h"

namespace fused_ops::msa_row_attention {

constexpr int kFinishThreads = 256;
constexpr int kFinishWarps = kFinishThreads / 32;
constexpr int kSumColumns = 64;  // of a block: two for each lane

struct ColumnSumsParams {
  ColumnSumsProblem problem;
  NormRows where;
  std::int64_t positions = 0;
  std::int64_t part_positions = 0;
  unsigned tiles = 0;  // of columns
  bool pairs = false;  // two columns may be read as one
};

struct ColumnSumsShared {
  float sums[2][kFinishWarps][kSumColumns];
};

// Two neighbouring numbers; zeros from `columns` on.
__device__ __forceinline__ float2 load_pair(const void* data, DType type, std::int64_t at,
                                            bool pairs, int left) {
  if (left <= 0) return make_float2(0.0f, 0.0f);
  if (pairs) {
    if (type == DType::kFloat32) {
      return *reinterpret_cast<const float2*>(static_cast<const float*>(data) + at);
    }
    const auto word =
        *reinterpret_cast<const std::uint32_t*>(static_cast<const std::uint16_t*>(data) + at);
    return type == DType::kBFloat16 ? sm80::unpack_bf16(word) : sm80::unpack_f16(word);
  }
  return make_float2(load_number(data, type, at),
                     left > 1 ? load_number(data, type, at + 1) : 0.0f);
}

// A block takes kSumColumns columns of a part of the positions; a warp every kFinishWarps-th one.
template <bool with_source>
__global__ void __launch_bounds__(kFinishThreads)
    column_sums_kernel(const __grid_constant__ ColumnSumsParams params) {
  const ColumnSumsProblem& p = params.problem;
  auto& shared = shared_memory<ColumnSumsShared>();
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  const std::int64_t part = blockIdx.x / params.tiles;
  const int column = static_cast<int>(blockIdx.x % params.tiles) * kSumColumns + lane * 2;
  const int left = p.columns - column;
  const std::int64_t first = part * params.part_positions;
  const std::int64_t last = min(first + params.part_positions, params.positions);
  float2 sum = make_float2(0.0f, 0.0f), products = sum;
#pragma unroll 8
  for (std::int64_t at = first + warp; at < last; at += kFinishWarps) {
    const float2 g =
        load_pair(p.grad, p.grad_type, at * p.grad_stride + column, params.pairs, left);
    sum.x += g.x;
    sum.y += g.y;
    if (with_source) {
      const float2 x = load_pair(p.source.data, p.source.type, params.where.offset(at) + column,
                                 params.pairs, left);
      const float4 of = reinterpret_cast<const float4*>(p.statistics)[at];
      products.x = fmaf(g.x, (x.x - of.x - of.y) * of.z, products.x);
      products.y = fmaf(g.y, (x.y - of.x - of.y) * of.z, products.y);
    }
  }
  shared.sums[0][warp][lane * 2] = sum.x;
  shared.sums[0][warp][lane * 2 + 1] = sum.y;
  if (with_source) {
    shared.sums[1][warp][lane * 2] = products.x;
    shared.sums[1][warp][lane * 2 + 1] = products.y;
  }
  __syncthreads();
  constexpr int kKinds = with_source ? 2 : 1;
  const int kind = thread / kSumColumns, mine = thread % kSumColumns;
  const int to = static_cast<int>(blockIdx.x % params.tiles) * kSumColumns + mine;
  if (kind >= kKinds || to >= p.columns) return;
  float all = 0.0f;
#pragma unroll
  for (int w = 0; w < kFinishWarps; ++w) all += shared.sums[kind][w][mine];
  p.sums[(part * kKinds + kind) * p.columns + to] = all;
}

struct FinishParams {
  FinishProblem problem;
  unsigned blocks[kSummands] = {};
};

// A thread takes one number.
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ FinishParams params) {
  unsigned block = blockIdx.x;
  int i = 0;
  while (block >= params.blocks[i]) block -= params.blocks[i++];
  const Summand& s = params.problem.summands[i];
  const std::int64_t at = std::int64_t{block} * kFinishThreads + thread_index();
  if (at >= s.count) return;
  const std::int64_t chunk = at / s.filled;
  const float* from = s.from + chunk * s.chunk + (at - chunk * s.filled);
  float sum = 0.0f;
#pragma unroll 16  // loads under way together
  for (std::int64_t slab = 0; slab < s.slabs; ++slab) sum += from[slab * s.slab_stride];
  store_number(s.result.data, s.result.type, at, sum);
}

}  // namespace fused_ops::msa_row_attention
