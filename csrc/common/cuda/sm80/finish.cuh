// SPDX-License-Identifier: Apache-2.0
// Sums over rows, in two steps: of many rows of numbers into few, and of these into the
// gradients of the parameters. Every sum has an order that only the sizes give.
#pragma once

#include "common/cuda/sm80/norm.cuh"
#include "common/parameters.h"

namespace fused_ops {

constexpr int kFinishThreads = 256;
constexpr int kFinishWarps = kFinishThreads / 32;
constexpr int kSumColumns = 64;  // of a block: two for each lane

struct ColumnSumsParams {
  ColumnSumsProblem problem;
  RowOffsets where;
  std::int64_t part_rows = 0;
  unsigned tiles = 0;  // of columns
  bool pairs = false;  // two columns may be read as one
};

struct ColumnSumsShared {
  float sums[2][kFinishWarps][kSumColumns];
};

// Two neighbouring numbers; zeros from `left` on.
template <DType type>
__device__ __forceinline__ float2 load_pair(const void* data, std::int64_t at, bool pairs,
                                            int left) {
  if (pairs) {
    if (left <= 0) return make_float2(0.0f, 0.0f);
    if constexpr (type == DType::kFloat32) {
      return *reinterpret_cast<const float2*>(static_cast<const float*>(data) + at);
    } else {
      return unpack_two<type>(
          *reinterpret_cast<const std::uint32_t*>(static_cast<const std::uint16_t*>(data) + at));
    }
  }
  return make_float2(left > 0 ? load_number(data, type, at) : 0.0f,
                     left > 1 ? load_number(data, type, at + 1) : 0.0f);
}

// Of the rows first, first + kFinishWarps, ... before `last`; loads under way eight at a time.
template <DType type>
__device__ __forceinline__ float2 sum_pairs(const ColumnSumsProblem& p, int column,
                                            std::int64_t first, std::int64_t last) {
  constexpr int kAtOnce = 8;
  const std::int64_t step = kFinishWarps * p.grad_stride;
  std::int64_t from = first * p.grad_stride + column;
  float2 sum = make_float2(0.0f, 0.0f);
  std::int64_t at = first;
  for (; at + (kAtOnce - 1) * kFinishWarps < last; at += kAtOnce * kFinishWarps) {
    float2 some[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) some[i] = load_pair<type>(p.grad, from + i * step, true, 2);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      sum.x += some[i].x;
      sum.y += some[i].y;
    }
    from += kAtOnce * step;
  }
  for (; at < last; at += kFinishWarps) {
    const float2 one = load_pair<type>(p.grad, from, true, 2);
    sum.x += one.x;
    sum.y += one.y;
    from += step;
  }
  return sum;
}

// A block takes kSumColumns columns of a part of the rows; a warp every kFinishWarps-th one.
template <DType grad_type, bool with_source, DType source_type>
__global__ void __launch_bounds__(kFinishThreads)
    column_sums_kernel(const __grid_constant__ ColumnSumsParams params) {
  const ColumnSumsProblem& p = params.problem;
  auto& shared = shared_memory<ColumnSumsShared>();
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  const std::int64_t part = blockIdx.x / params.tiles;
  const int column = static_cast<int>(blockIdx.x % params.tiles) * kSumColumns + lane * 2;
  const int left = p.columns - column;
  const std::int64_t first = part * params.part_rows;
  const std::int64_t last = min(first + params.part_rows, p.rows);
  float2 sum = make_float2(0.0f, 0.0f), products = sum;
  const bool plain = !with_source && params.pairs;
  if (plain && left > 0) sum = sum_pairs<grad_type>(p, column, first + warp, last);
  for (std::int64_t at = first + warp; !plain && at < last; at += kFinishWarps) {
    const float2 g = load_pair<grad_type>(p.grad, at * p.grad_stride + column, params.pairs, left);
    sum.x += g.x;
    sum.y += g.y;
    if (with_source) {
      const float2 x = load_pair<source_type>(p.source.data, params.where.offset(at) + column,
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

// Of a block: where there are few slabs each thread has a number of its own.
constexpr int kFewSlabs = 4;

__host__ __device__ constexpr int finish_numbers(std::int64_t slabs) {
  return slabs <= kFewSlabs ? kFinishThreads : 32;
}

struct FinishShared {
  float sums[kFinishWarps][32];
};

struct FinishParams {
  FinishProblem problem;
  unsigned blocks[kSummands] = {};
};

// A block takes 32 numbers, a warp every kFinishWarps-th slab of them; or, of few slabs, a thread
// all of them.
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ FinishParams params) {
  auto& shared = shared_memory<FinishShared>();
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  unsigned block = blockIdx.x;
  int i = 0;
  while (block >= params.blocks[i]) block -= params.blocks[i++];
  const Summand& s = params.problem.summands[i];
  const bool few = s.slabs <= kFewSlabs;
  const std::int64_t at = std::int64_t{block} * finish_numbers(s.slabs) + (few ? thread : lane);
  float sum = 0.0f;
  if (at < s.count) {
    const std::int64_t chunk = at / s.filled;
    const float* from = s.from + chunk * s.chunk + (at - chunk * s.filled);
#pragma unroll 8  // loads under way together
    for (std::int64_t slab = few ? 0 : warp; slab < s.slabs; slab += few ? 1 : kFinishWarps) {
      sum += from[slab * s.slab_stride];
    }
  }
  if (few) {
    if (at < s.count) store_number(s.result.data, s.result.type, at, s.factor * sum);
    return;
  }
  shared.sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || at >= s.count) return;
#pragma unroll
  for (int w = 1; w < kFinishWarps; ++w) sum += shared.sums[w][lane];
  store_number(s.result.data, s.result.type, at, s.factor * sum);
}

}  // namespace fused_ops
