// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/frames_backward_sm80.cuh"

#include "common/launch.h"
#include "invariant_point_attention/frames_checks.h"

namespace fused_ops::invariant_point_attention {

void frames_backward_sm80(const FramesBackwardProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  if (sizes.nodes() == 0) return;
  check_frame_sizes(sizes);
  FramesBackwardParams params;
  params.problem = problem;
  auto* kernel = is_fp32(problem.mode)             ? frames_backward_kernel<DType::kFloat32>
                 : problem.mode == Mode::kBFloat16 ? frames_backward_kernel<DType::kBFloat16>
                                                   : frames_backward_kernel<DType::kFloat16>;
  launch("invariant_point_attention: gradients of projections and frames", kernel,
         static_cast<unsigned>(sizes.nodes()), 32 * static_cast<unsigned>(sizes.heads),
         sizeof(FramesBackwardShared), stream, params);
}

}  // namespace fused_ops::invariant_point_attention
