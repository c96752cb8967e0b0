// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/backward_bias_fp32_launch.cuh"

namespace fused_ops::msa_row_attention {

void backward_bias_fp32_dropout_sm80(const BackwardProblem& problem, CUstream_st* stream) {
  constexpr const char* kBiasFp32 = "msa_row_attention: launching backward_bias_fp32_dropout_sm80";
  with_fp32_mode_and_width(
      kBiasFp32, problem.sizes, problem.mode, [&](auto mode_of, auto width_of) {
        static_assert(is_large_fp32_bias(1, true));
        launch_bias_fp32<decltype(mode_of)::value, decltype(width_of)::value, true, true>(
            kBiasFp32, problem, stream);
      });
}

}  // namespace fused_ops::msa_row_attention
