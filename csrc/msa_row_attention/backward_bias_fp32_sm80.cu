// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/backward_bias_fp32_launch.cuh"

namespace fused_ops::msa_row_attention {

void backward_bias_fp32_sm80(const BackwardProblem& problem, CUstream_st* stream) {
  constexpr const char* kBiasFp32 = "msa_row_attention: launching backward_bias_fp32_sm80";
  with_fp32_mode_and_width(
      kBiasFp32, problem.sizes, problem.mode, [&](auto mode_of, auto width_of) {
        constexpr Mode kMode = decltype(mode_of)::value;
        constexpr int kWidth = decltype(width_of)::value;
        if (is_large_fp32_bias(problem.sizes.n, false)) {
          return launch_bias_fp32<kMode, kWidth, true>(kBiasFp32, problem, stream);
        }
        launch_bias_fp32<kMode, kWidth, false>(kBiasFp32, problem, stream);
      });
}

}  // namespace fused_ops::msa_row_attention
