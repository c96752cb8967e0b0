// SPDX-License-Identifier: Apache-2.0
// The pair-value tensor times the gradient of what was gathered from it: for a query and 256 keys,
// all heads, from weights that are the query's own. Four lanes of a head's neighbouring keys write
// whole sectors of 32 bytes.
#pragma once

#include "common/launch.h"
#include "invariant_point_attention/backward.h"
#include "invariant_point_attention/pair_products.cuh"

namespace fused_ops::invariant_point_attention {

constexpr int kDotUnits = 4;  // of 16 keys, for each warp
constexpr int kDotKeys = kDotUnits * 16 * kPairThreads / 32;

struct PairDotsParams {
  PairDotsProblem problem;
  std::int64_t key_tiles;
  bool whole, whole_weights;
};

template <Mode mode>
__global__ void __launch_bounds__(kPairThreads, 4)
    pair_dots_kernel(const __grid_constant__ PairDotsParams params) {
  using Operands = PairOperands<mode>;
  const PairDotsProblem& p = params.problem;
  const Sizes& s = p.sizes;
  const std::int64_t index = blockIdx.x;
  const std::int64_t batch = index / params.key_tiles / p.block.rows;
  const std::int64_t row = index / params.key_tiles % p.block.rows;
  const std::int64_t query = p.block.first_row + row;
  const int thread = thread_index();
  const int lane = thread % 32;
  const int channels = s.value_channels;
  PairTable& table = shared_memory<PairTable>();
  const Stored weights = {p.d_features, Operands::kType};
  const std::int64_t first = (batch * s.n + query) * s.features() + s.pair_values_at();
  const std::int64_t length = pair_line(s.n);
  const std::int64_t line = batch * p.pair.batch_stride + query * p.pair.i_stride;
#pragma unroll 1
  for (int unit = 0; unit < kDotUnits; ++unit) {
    const std::int64_t first_of_unit =
        index % params.key_tiles * kDotKeys + (unit * (kPairThreads / 32) + thread / 32) * 16;
    const std::int64_t key = first_of_unit + lane / 4;
    const std::int64_t key_first = key < s.n ? key : s.n - 1;
    const std::int64_t key_second = key + 8 < s.n ? key + 8 : s.n - 1;
    PairSums sum = {};
#pragma unroll 1
    for (int from = 0; from < channels; from += Operands::kChunk) {
      if (unit == 0 || channels > Operands::kChunk) {
        __syncthreads();
        table.fill<mode>(weights, first, s.heads, channels, from, params.whole_weights, thread);
        __syncthreads();
      }
      multiply_pairs<mode>(table, {p.pair.data, p.pair.type}, line + key_first * p.pair.j_stride,
                           line + key_second * p.pair.j_stride, channels, from, params.whole, lane,
                           sum);
    }
    // pair_line() is even: two neighbouring keys are both in the line, or neither is.
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const int head = lane / 4 + e % 4 / 2 * 8;
      const std::int64_t j = first_of_unit + e / 4 * 8 + lane % 4 * 2;
      if (head >= s.heads || j >= length) continue;
      const std::int64_t to = (batch * s.heads + head) * p.block.rows + row;
      *reinterpret_cast<float2*>(p.pair_dots + to * length + j) = make_float2(
          j < s.n ? sum[e / 4][e % 4] : 0.0f, j + 1 < s.n ? sum[e / 4][e % 4 + 1] : 0.0f);
    }
  }
}

template <Mode mode>
void launch_pair_dots(const PairDotsProblem& problem, CUstream_st* stream) {
  const Sizes& s = problem.sizes;
  if (s.nodes() == 0 || problem.block.rows == 0) return;
  FO_CHECK_VALUE(s.heads >= 1 && s.heads <= kMostHeads,
                 "invariant_point_attention: heads must be 1 to ", kMostHeads, ", got ", s.heads);
  PairDotsParams params;
  params.problem = problem;
  params.key_tiles = ceil_div(s.n, kDotKeys);
  params.whole = whole_lines(problem.pair, s, s.value_channels);
  params.whole_weights = s.value_channels % 8 == 0 && s.pair_values_at() % 8 == 0 &&
                         reinterpret_cast<std::uintptr_t>(problem.d_features) % 16 == 0;
  const std::int64_t blocks = s.batch * problem.block.rows * params.key_tiles;
  FO_CHECK_VALUE(blocks < std::int64_t{1} << 31,
                 "invariant_point_attention: tiles of pairs must be fewer than 2^31, got ", blocks);
  launch("launching the pair dots of invariant_point_attention", pair_dots_kernel<mode>,
         static_cast<unsigned>(blocks), kPairThreads, sizeof(PairTable), stream, params);
}

}  // namespace fused_ops::invariant_point_attention
