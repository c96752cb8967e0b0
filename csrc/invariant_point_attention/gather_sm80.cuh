// SPDX-License-Identifier: Apache-2.0
// Pair values times weights. A block has a query, of which it takes up to 128 channels (64 of fp32
// ones): heads are the rows of the product, so that the pair-value tensor is read once.
#pragma once

#include "common/check.h"
#include "common/launch.h"
#include "invariant_point_attention/weighted_sums.cuh"

namespace fused_ops::invariant_point_attention {

struct GatherParams {
  GatherProblem problem;
  unsigned chunks = 0;  // of channels
};

template <class Product, bool aligned>
struct Gather {
  static constexpr int kColumns = Product::kType == DType::kFloat32 ? 64 : 128;
  using Sum = WeightedSums<Product, kColumns, kColumns, aligned>;

  // The chunks of a query are neighbours: they share its logits.
  static __device__ __forceinline__ void run(const GatherParams& params) {
    const GatherProblem& problem = params.problem;
    const Sizes& sizes = problem.sizes;
    const int thread = thread_index();
    const int first_column = static_cast<int>(blockIdx.x % params.chunks) * kColumns;
    const std::int64_t query = blockIdx.x / params.chunks;
    const std::int64_t batch = query / problem.block.rows, row = query % problem.block.rows;
    const std::int64_t residue = problem.block.first_row + row;
    auto& shared = shared_memory<typename Sum::Shared>();
    if (thread < kRows) {
      const std::int64_t line = (batch * sizes.heads + thread) * sizes.n + residue;
      shared.shifts[thread] =
          thread < sizes.heads ? problem.log_sums[line] - Product::kShift : 0.0f;
    }
    __syncthreads();
    const auto logits = [&](int head) -> const float* {
      if (head >= sizes.heads) return nullptr;
      return problem.logits +
             ((batch * sizes.heads + head) * problem.block.rows + row) * pair_line(sizes.n);
    };
    const int bytes = bytes_of(problem.pair.type);
    const std::int64_t first = batch * problem.pair.batch_stride + residue * problem.pair.i_stride;
    const Lines lines = {static_cast<const char*>(problem.pair.data) + first * bytes,
                         problem.pair.type, problem.pair.j_stride, static_cast<int>(sizes.n),
                         sizes.value_channels};
    const float* const rows[2] = {logits(thread % 32 / 4), logits(thread % 32 / 4 + 8)};
    Sum{shared, lines, thread}.add_up(rows, first_column, 0, sizes.value_channels);
    const int width = min(kColumns, sizes.value_channels - first_column);
    const std::int64_t to =
        (batch * sizes.n + residue) * sizes.features() + sizes.pair_values_at() + first_column;
    for (int i = thread; i < sizes.heads * width; i += kThreads) {
      const int head = i / width, column = i % width;
      // Weights of a softmax add up to 1, but for their rounding. Where no key is there, zero.
      const bool dead = shared.shifts[head] == __builtin_huge_valf();
      const float x = dead ? 0.0f : shared.totals[head][column] / shared.sums[head].rounded;
      store_number(problem.features, type_of(problem.mode),
                   to + std::int64_t{head} * sizes.value_channels + column, x);
    }
  }
};

template <class Product, bool aligned>
__global__ void __launch_bounds__(kThreads, 3)
    gather_kernel(const __grid_constant__ GatherParams params) {
  Gather<Product, aligned>::run(params);
}

template <class Product>
void launch_gather(const char* what, const GatherProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  if (sizes.nodes() == 0 || problem.block.rows == 0 || sizes.heads == 0) return;
  if (sizes.value_channels == 0) return;
  const Pairs& pair = problem.pair;
  const int numbers = 16 / bytes_of(Product::kType);  // of 16 bytes
  const bool aligned = pair.type == Product::kType && sizes.value_channels % numbers == 0 &&
                       pair.batch_stride % numbers == 0 && pair.i_stride % numbers == 0 &&
                       pair.j_stride % numbers == 0 &&
                       reinterpret_cast<std::uintptr_t>(pair.data) % 16 == 0;
  GatherParams params;
  params.problem = problem;
  const std::int64_t chunks = ceil_div(sizes.value_channels, Gather<Product, true>::kColumns);
  const std::int64_t blocks = sizes.batch * problem.block.rows * chunks;
  FO_CHECK_VALUE(blocks < std::int64_t{1} << 31, what, ": too many queries for one launch, got ",
                 blocks, " blocks");
  params.chunks = static_cast<unsigned>(chunks);
  using Shared = typename Gather<Product, true>::Sum::Shared;
  launch(what, aligned ? gather_kernel<Product, true> : gather_kernel<Product, false>,
         static_cast<unsigned>(blocks), kThreads, sizeof(Shared), stream, params);
}

}  // namespace fused_ops::invariant_point_attention
