// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/frames_sm80.cuh"

#include "common/launch.h"
#include "invariant_point_attention/frames_checks.h"

namespace fused_ops::invariant_point_attention {

void frames_sm80(const FramesProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  if (sizes.nodes() == 0) return;
  check_frame_sizes(sizes);
  check_16_bytes(problem.projected, "projected");
  check_16_bytes(problem.projection_bias, "projection_bias");
  check_16_bytes(problem.values, "values");
  check_16_bytes(problem.q_moments, "q_moments");
  check_16_bytes(problem.k_moments, "k_moments");
  FO_CHECK_VALUE(problem.projection_bias == nullptr || is_fp32(problem.mode),
                 "invariant_point_attention: projection_bias must be null in 16-bit modes");
  FramesParams params;
  params.problem = problem;
  params.tasks = static_cast<unsigned>(sizes.nodes() * sizes.heads);
  auto* kernel = is_fp32(problem.mode)             ? frames_kernel<DType::kFloat32>
                 : problem.mode == Mode::kBFloat16 ? frames_kernel<DType::kBFloat16>
                                                   : frames_kernel<DType::kFloat16>;
  launch("invariant_point_attention: points to the global frame", kernel,
         static_cast<unsigned>(ceil_div(params.tasks, kFrameWarps)), 32 * kFrameWarps,
         sizeof(FramesShared), stream, params);
}

}  // namespace fused_ops::invariant_point_attention
