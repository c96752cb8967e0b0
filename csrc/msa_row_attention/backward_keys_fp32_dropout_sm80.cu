// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/backward_keys_fp32_sm80.cuh"

#include "msa_row_attention/backward_fp32_launch.cuh"

namespace fused_ops::msa_row_attention {

// Of short rows, too, with the tile for long ones.
void backward_keys_fp32_dropout_sm80(const BackwardProblem& problem, CUstream_st* stream) {
  const char* what = "msa_row_attention: launching backward_keys_fp32_dropout_sm80";
  with_fp32_mode_and_width(what, problem.sizes, problem.mode, [&](auto mode_of, auto width_of) {
    constexpr Mode kMode = decltype(mode_of)::value;
    constexpr int kWidth = decltype(width_of)::value;
    constexpr AttendTile kTile = kAttendFp32Tiles[0];
    constexpr int kLines = backward_fp32_lines(0, kWidth);
    constexpr int kStages = backward_fp32_stages(0);
    using Kernel =
        BackwardKeysFp32<kMode, kWidth, kTile.rows, kTile.query_warps, kLines, kStages, true>;
    static_assert(sizeof(typename Kernel::Shared) <= 99 * 1024);
    BackwardFp32Params p;
    fill_fp32_params(problem, &p);
    const unsigned blocks = cut_rows(what, problem.sizes, kTile.rows, Kernel::kBlockKeys, &p);
    launch(what,
           backward_keys_fp32_kernel<kMode, kWidth, kTile.rows, kTile.query_warps, kLines, kStages,
                                     true>,
           blocks, Kernel::kThreads, sizeof(typename Kernel::Shared), stream, p);
  });
}

}  // namespace fused_ops::msa_row_attention
