// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/attend_sm80.cuh"

#include <cmath>
#include <limits>

#include "common/launch.h"
#include "msa_row_attention/with_width.h"

namespace fused_ops::msa_row_attention {
namespace {

constexpr const char* kWhat = "msa_row_attention: launching attend_sm80";

template <Mode mode, int width, int tile>
void launch_attend(const Sizes& sizes, AttendParams& p, CUstream_st* stream) {
  constexpr int kRows = kAttendTiles[tile].rows;
  constexpr int kQueryWarps = kAttendTiles[tile].query_warps;
  constexpr int kQueryTiles = queries_of_warp(width) / 16;
  constexpr bool kOneTile = tile > 0 && width <= 64;  // of keys
  constexpr int kStages = kOneTile ? 1 : 2;
  using Kernel = Attend<mode, width, kRows, kQueryWarps, kQueryTiles, kStages>;
  const std::int64_t row_blocks = ceil_div(sizes.rows, kRows);
  const std::int64_t query_tiles = ceil_div(sizes.n, Kernel::kQueries);
  const std::int64_t blocks = sizes.groups * row_blocks * sizes.heads * query_tiles;
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  FO_CHECK_RUNTIME(blocks < kMost && sizes.all_rows() < kMost && sizes.n <= kMostPositions, kWhat,
                   " must be given less at a time");
  p.rows = static_cast<unsigned>(sizes.rows);
  p.row_blocks = static_cast<unsigned>(row_blocks);
  p.query_tiles = static_cast<unsigned>(query_tiles);
  p.heads = static_cast<unsigned>(sizes.heads);
  p.n = static_cast<int>(sizes.n);
  p.tiles = static_cast<unsigned>(mask_words(sizes.n));
  p.blocks = static_cast<int>(bias_blocks(sizes.n));
  p.dim = sizes.dim;
  p.width = sizes.width();
  p.logit_scale = kLog2E / std::sqrt(static_cast<float>(sizes.head_dim));
  p.slack_scale = 1.0f / p.logit_scale;
  launch(kWhat, attend_kernel<mode, width, kRows, kQueryWarps, kQueryTiles, kStages>,
         static_cast<unsigned>(blocks), Kernel::kThreads, sizeof(typename Kernel::Shared), stream,
         p);
}

}  // namespace

void attend_sm80(const AttendProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  if (sizes.positions() == 0 || sizes.heads == 0) return;
  AttendParams p;
  p.projected = static_cast<const std::uint16_t*>(problem.projected);
  p.bias = problem.bias;
  p.present = problem.present;
  p.out = static_cast<std::uint16_t*>(problem.out);
  p.log_sums = problem.log_sums;
  with_mode_and_width(kWhat, problem.mode, sizes.dim, [&](auto mode_of, auto width_of) {
    constexpr Mode kMode = decltype(mode_of)::value;
    constexpr int kWidth = decltype(width_of)::value;
    const int tile = attend_tile_of(sizes.n, kWidth);
    if (tile == 0) return launch_attend<kMode, kWidth, 0>(sizes, p, stream);
    if constexpr (kWidth <= 64) {
      if (tile == 1) return launch_attend<kMode, kWidth, 1>(sizes, p, stream);
    }
    if constexpr (kWidth <= 48) launch_attend<kMode, kWidth, 2>(sizes, p, stream);
  });
}

}  // namespace fused_ops::msa_row_attention
