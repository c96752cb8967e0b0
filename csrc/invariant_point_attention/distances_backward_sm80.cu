// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/distances_backward_sm80.cuh"

#include <algorithm>

#include "common/launch.h"
#include "invariant_point_attention/frames_checks.h"

namespace fused_ops::invariant_point_attention {

int distance_sum_parts(const Sizes& sizes) {
  const std::int64_t tiles =
      sizes.batch * ceil_div(sizes.n, kDistanceRows) * ceil_div(sizes.n, kDistanceKeys);
  return static_cast<int>(std::clamp<std::int64_t>(tiles, 1, kMostDistanceParts));
}

void distances_backward_sm80(const DistancesBackwardProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  DistancesBackwardParams params;
  params.problem = problem;
  params.row_tiles = ceil_div(problem.block.rows, kDistanceRows);
  params.key_tiles = ceil_div(sizes.n, kDistanceKeys);
  // Without a pair there are still sums to be set to zero.
  const bool empty = sizes.batch * params.row_tiles * params.key_tiles == 0;
  if (problem.parts == 0 || (empty && problem.add_sums)) return;
  check_frame_sizes(sizes);
  check_16_bytes(problem.d_logits, "d_logits");
  check_16_bytes(problem.q_points, "q_points");
  check_16_bytes(problem.k_points, "k_points");
  auto* kernel = is_fp32(problem.mode)             ? distances_backward_kernel<DType::kFloat32>
                 : problem.mode == Mode::kBFloat16 ? distances_backward_kernel<DType::kBFloat16>
                                                   : distances_backward_kernel<DType::kFloat16>;
  launch("invariant_point_attention: gradient of the head weights", kernel,
         static_cast<unsigned>(problem.parts * sizes.heads), kDistanceThreads,
         sizeof(DistancesBackwardShared), stream, params);
}

}  // namespace fused_ops::invariant_point_attention
