// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/pair_dots_kernel.cuh"

namespace fused_ops::invariant_point_attention {

void pair_dots_fp32_sm80(const PairDotsProblem& problem, CUstream_st* stream) {
  if (problem.mode == Mode::kTf32) {
    launch_pair_dots<Mode::kTf32>(problem, stream);
  } else {
    FO_CHECK_RUNTIME(problem.mode == Mode::kSplit, "pair_dots_fp32_sm80: mode must be of fp32");
    launch_pair_dots<Mode::kSplit>(problem, stream);
  }
}

}  // namespace fused_ops::invariant_point_attention
