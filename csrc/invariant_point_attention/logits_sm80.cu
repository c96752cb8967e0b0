// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/logits_launch.cuh"

namespace fused_ops::invariant_point_attention {

void logits_sm80(const LogitsProblem& problem, CUstream_st* stream) {
  if (problem.mode == Mode::kBFloat16) {
    launch_logits<Mode::kBFloat16>(problem, stream);
  } else {
    FO_CHECK_RUNTIME(problem.mode == Mode::kFloat16, "logits_sm80: mode must be of 16 bits");
    launch_logits<Mode::kFloat16>(problem, stream);
  }
}

}  // namespace fused_ops::invariant_point_attention
