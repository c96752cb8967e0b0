// SPDX-License-Identifier: Apache-2.0
// Sums of dS over the keys of a query, added to its row dot. A warp has a query of a head.
#pragma once

#include "common/cuda/sm80/stored.cuh"
#include "invariant_point_attention/backward.h"

namespace fused_ops::invariant_point_attention {

constexpr int kSettleThreads = 128;

__global__ void __launch_bounds__(kSettleThreads)
    settle_dots_kernel(const __grid_constant__ SettleDotsProblem problem) {
  const Sizes& sizes = problem.sizes;
  const int thread = thread_index(), lane = thread % 32;
  const std::int64_t line = std::int64_t{blockIdx.x} * (kSettleThreads / 32) + thread / 32;
  if (line >= sizes.batch * sizes.heads * problem.block.rows) return;
  const std::int64_t count = pair_line(sizes.n);
  const float* from = problem.d_logits + line * count;
  float sum = 0.0f;
  for (std::int64_t at = lane * 4; at < count; at += 128) {
    const float4 four = *reinterpret_cast<const float4*>(from + at);
    sum += (four.x + four.y) + (four.z + four.w);
  }
  sum = warp_sum(sum);
  if (lane != 0) return;
  const std::int64_t batch_head = line / problem.block.rows;
  const std::int64_t row = line - batch_head * problem.block.rows;
  problem.row_dots[batch_head * sizes.n + problem.block.first_row + row] += sum;
}

}  // namespace fused_ops::invariant_point_attention
