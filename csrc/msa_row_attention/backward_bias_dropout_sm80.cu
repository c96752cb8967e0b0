// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/backward_bias_launch.cuh"

namespace fused_ops::msa_row_attention {

void backward_bias_dropout_sm80(const BackwardProblem& problem, CUstream_st* stream) {
  constexpr const char* kBias = "msa_row_attention: launching backward_bias_dropout_sm80";
  const Sizes& sizes = problem.sizes;
  if (sizes.positions() == 0 || sizes.heads == 0) return;
  with_mode_and_width(kBias, problem.mode, sizes.dim, [&](auto mode_of, auto width_of) {
    constexpr Mode kMode = decltype(mode_of)::value;
    launch_bias<kMode, decltype(width_of)::value, true>(kBias, problem, stream);
  });
}

}  // namespace fused_ops::msa_row_attention
