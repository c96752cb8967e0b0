// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/backward_keys_sm80.cuh"

#include "msa_row_attention/backward_launch.cuh"

namespace fused_ops::msa_row_attention {

// Of short rows, too, with the tile for long ones.
void backward_keys_dropout_sm80(const BackwardProblem& problem, CUstream_st* stream) {
  const char* what = "msa_row_attention: launching backward_keys_dropout_sm80";
  const Sizes& sizes = problem.sizes;
  if (sizes.positions() == 0 || sizes.heads == 0) return;
  with_mode_and_width(what, problem.mode, sizes.dim, [&](auto mode_of, auto width_of) {
    constexpr Mode kMode = decltype(mode_of)::value;
    constexpr int kWidth = decltype(width_of)::value;
    constexpr AttendTile kTile = kAttendTiles[0];
    constexpr int kM = keys_of_warp(kWidth) / 16;
    constexpr int kStages = backward_stages(0);
    using Kernel = BackwardKeys<kMode, kWidth, kTile.rows, kTile.query_warps, kM, kStages, true>;
    BackwardParams p = params_of(problem);
    const unsigned blocks = cut_rows(what, sizes, kTile.rows, Kernel::kBlockKeys, &p);
    launch(what,
           backward_keys_kernel<kMode, kWidth, kTile.rows, kTile.query_warps, kM, kStages, true>,
           blocks, Kernel::kThreads, sizeof(typename Kernel::Shared), stream, p);
  });
}

}  // namespace fused_ops::msa_row_attention
