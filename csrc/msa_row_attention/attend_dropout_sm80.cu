// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/attend_launch.cuh"

namespace fused_ops::msa_row_attention {

// Of short rows, too, with the tile for long ones: training with dropout hardly ever has any.
void attend_dropout_sm80(const AttendProblem& problem, CUstream_st* stream) {
  constexpr const char* kWhat = "msa_row_attention: launching attend_dropout_sm80";
  const Sizes& sizes = problem.sizes;
  if (sizes.positions() == 0 || sizes.heads == 0) return;
  AttendParams p = attend_params_of(problem);
  with_mode_and_width(kWhat, problem.mode, sizes.dim, [&](auto mode_of, auto width_of) {
    launch_attend<decltype(mode_of)::value, decltype(width_of)::value, 0, true>(kWhat, sizes, p,
                                                                                stream);
  });
}

}  // namespace fused_ops::msa_row_attention
