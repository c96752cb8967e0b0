// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/attend_launch.cuh"

namespace fused_ops::msa_row_attention {

void attend_sm80(const AttendProblem& problem, CUstream_st* stream) {
  constexpr const char* kWhat = "msa_row_attention: launching attend_sm80";
  const Sizes& sizes = problem.sizes;
  if (sizes.positions() == 0 || sizes.heads == 0) return;
  AttendParams p = attend_params_of(problem);
  with_mode_and_width(kWhat, problem.mode, sizes.dim, [&](auto mode_of, auto width_of) {
    constexpr Mode kMode = decltype(mode_of)::value;
    constexpr int kWidth = decltype(width_of)::value;
    const int tile = attend_tile_of(sizes, multiprocessors());
    const auto call = [&](auto tile_of) {
      launch_attend<kMode, kWidth, decltype(tile_of)::value>(kWhat, sizes, p, stream);
    };
    if (tile == 0) return call(std::integral_constant<int, 0>());
    if constexpr (kWidth <= 64) {
      if (tile == 1) return call(std::integral_constant<int, 1>());
    }
    if constexpr (kWidth <= 48) {
      if (tile == 2) return call(std::integral_constant<int, 2>());
      call(std::integral_constant<int, kFewBlocksTile>());
    }
    if constexpr (kWidth == 64) call(std::integral_constant<int, kLongRowsTile>());
  });
}

}  // namespace fused_ops::msa_row_attention
