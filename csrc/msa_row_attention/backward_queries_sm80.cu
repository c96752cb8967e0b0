// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/backward_queries_sm80.cuh"

#include "msa_row_attention/backward_launch.cuh"

namespace fused_ops::msa_row_attention {

void backward_queries_sm80(const BackwardProblem& problem, CUstream_st* stream) {
  const char* what = "msa_row_attention: launching backward_queries_sm80";
  with_backward_tile<backward_queries_of_warp>(
      what, problem, [&](auto mode_of, auto width_of, auto tile_of) {
        constexpr Mode kMode = decltype(mode_of)::value;
        constexpr int kWidth = decltype(width_of)::value;
        constexpr int kTile = decltype(tile_of)::value;
        constexpr int kRows = kAttendTiles[kTile].rows;
        constexpr int kWarps = kAttendTiles[kTile].query_warps;
        constexpr int kM = backward_queries_of_warp(kWidth) / 16;
        constexpr int kStages = backward_stages(kTile);
        using Kernel = BackwardQueries<kMode, kWidth, kRows, kWarps, kM, kStages>;
        BackwardParams p = params_of(problem);
        const unsigned blocks = cut_rows(what, problem.sizes, kRows, Kernel::kBlockQueries, &p);
        launch(what, backward_queries_kernel<kMode, kWidth, kRows, kWarps, kM, kStages>, blocks,
               Kernel::kThreads, sizeof(typename Kernel::Shared), stream, p);
      });
}

}  // namespace fused_ops::msa_row_attention
