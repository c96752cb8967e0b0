// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/pair_dots_kernel.cuh"

namespace fused_ops::invariant_point_attention {

void pair_dots_sm80(const PairDotsProblem& problem, CUstream_st* stream) {
  if (problem.mode == Mode::kBFloat16) {
    launch_pair_dots<Mode::kBFloat16>(problem, stream);
  } else {
    FO_CHECK_RUNTIME(problem.mode == Mode::kFloat16, "pair_dots_sm80: mode must be of 16 bits");
    launch_pair_dots<Mode::kFloat16>(problem, stream);
  }
}

}  // namespace fused_ops::invariant_point_attention
