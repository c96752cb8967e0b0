// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/output_backward_sm80.cuh"

#include "common/launch.h"
#include "invariant_point_attention/frames_checks.h"

namespace fused_ops::invariant_point_attention {

void output_backward_sm80(const OutputBackwardProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  if (sizes.nodes() == 0) return;
  check_frame_sizes(sizes);
  check_16_bytes(problem.d_gathered, "d_gathered");
  OutputBackwardParams params;
  params.problem = problem;
  params.tasks = static_cast<unsigned>(sizes.nodes() * sizes.heads);
  auto* kernel = is_fp32(problem.mode)             ? output_backward_kernel<DType::kFloat32>
                 : problem.mode == Mode::kBFloat16 ? output_backward_kernel<DType::kBFloat16>
                                                   : output_backward_kernel<DType::kFloat16>;
  launch("invariant_point_attention: gradient of the gathered numbers", kernel,
         static_cast<unsigned>(ceil_div(params.tasks, kFrameWarps)), 32 * kFrameWarps,
         sizeof(OutputBackwardShared), stream, params);
}

}  // namespace fused_ops::invariant_point_attention
