// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/logits_launch.cuh"

namespace fused_ops::invariant_point_attention {

void logits_fp32_sm80(const LogitsProblem& problem, CUstream_st* stream) {
  if (problem.mode == Mode::kTf32) {
    launch_logits<Mode::kTf32>(problem, stream);
  } else {
    FO_CHECK_RUNTIME(problem.mode == Mode::kSplit, "logits_fp32_sm80: mode must be of fp32");
    launch_logits<Mode::kSplit>(problem, stream);
  }
}

}  // namespace fused_ops::invariant_point_attention
