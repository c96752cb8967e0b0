// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/backward_keys_fp32_sm80.cuh"

#include "msa_row_attention/backward_fp32_launch.cuh"

namespace fused_ops::msa_row_attention {

void backward_keys_fp32_sm80(const BackwardProblem& problem, CUstream_st* stream) {
  constexpr const char* kKeysFp32 = "msa_row_attention: launching backward_keys_fp32_sm80";
  with_fp32_tile(
      kKeysFp32, problem.sizes, problem.mode, [&](auto mode_of, auto width_of, auto tile_of) {
        constexpr Mode kMode = decltype(mode_of)::value;
        constexpr int kWidth = decltype(width_of)::value, kTile = decltype(tile_of)::value;
        constexpr int kRows = kAttendFp32Tiles[kTile].rows;
        constexpr int kWarps = kAttendFp32Tiles[kTile].query_warps;
        constexpr int kLines = backward_fp32_lines(kTile, kWidth);
        constexpr int kStages = backward_fp32_stages(kTile);
        using Kernel = BackwardKeysFp32<kMode, kWidth, kRows, kWarps, kLines, kStages>;
        static_assert(sizeof(typename Kernel::Shared) <= 99 * 1024);
        BackwardFp32Params p;
        fill_fp32_params(problem, &p);
        const unsigned blocks = cut_rows(kKeysFp32, problem.sizes, kRows, Kernel::kBlockKeys, &p);
        launch(kKeysFp32, backward_keys_fp32_kernel<kMode, kWidth, kRows, kWarps, kLines, kStages>,
               blocks, Kernel::kThreads, sizeof(typename Kernel::Shared), stream, p);
      });
}

}  // namespace fused_ops::msa_row_attention
