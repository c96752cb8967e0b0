// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/attend_fp32_launch.cuh"

namespace fused_ops::msa_row_attention {

// Of short rows, too, with the tile for long ones.
void attend_fp32_dropout_sm80(const AttendProblem& problem, CUstream_st* stream) {
  constexpr const char* kWhat = "msa_row_attention: launching attend_fp32_dropout_sm80";
  AttendFp32Params p = attend_fp32_params_of(problem);
  with_fp32_mode_and_width(kWhat, problem.sizes, problem.mode, [&](auto mode_of, auto width_of) {
    launch_attend_fp32<decltype(mode_of)::value, decltype(width_of)::value, 0, true>(
        kWhat, problem.sizes, p, stream);
  });
}

}  // namespace fused_ops::msa_row_attention
