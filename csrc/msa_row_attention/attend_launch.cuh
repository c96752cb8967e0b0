// SPDX-License-Identifier: Apache-2.0
// Launches attend_kernel, of a tile, with or without dropout.
#pragma once

#include <cmath>
#include <limits>

#include "common/launch.h"
#include "msa_row_attention/attend_sm80.cuh"
#include "msa_row_attention/with_width.h"

namespace fused_ops::msa_row_attention {

inline AttendParams attend_params_of(const AttendProblem& problem) {
  AttendParams p;
  p.projected = static_cast<const std::uint16_t*>(problem.projected);
  p.bias = problem.bias;
  p.present = problem.present;
  p.out = static_cast<std::uint16_t*>(problem.out);
  p.log_sums = problem.log_sums;
  p.dropout = problem.dropout;
  return p;
}

template <Mode mode, int width, int tile, bool dropout = false>
void launch_attend(const char* what, const Sizes& sizes, AttendParams& p, CUstream_st* stream) {
  constexpr int kRows = attend_tile(tile).rows;
  constexpr int kQueryWarps = attend_tile(tile).query_warps;
  constexpr int kQueryTiles = attend_queries(width, tile) / 16;
  constexpr int kStages = kRows > 1 ? 1 : 2;
  constexpr int kAhead = attend_bias_ahead(tile);
  using Kernel = Attend<mode, width, kRows, kQueryWarps, kQueryTiles, kStages, kAhead, dropout>;
  const std::int64_t row_blocks = ceil_div(sizes.rows, kRows);
  const std::int64_t query_tiles = ceil_div(sizes.n, Kernel::kQueries);
  const std::int64_t blocks = sizes.groups * row_blocks * sizes.heads * query_tiles;
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  FO_CHECK_RUNTIME(blocks < kMost && sizes.all_rows() < kMost && sizes.n <= kMostPositions, what,
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
  launch(
      what, attend_kernel<mode, width, kRows, kQueryWarps, kQueryTiles, kStages, kAhead, dropout>,
      static_cast<unsigned>(blocks), Kernel::kThreads, sizeof(typename Kernel::Shared), stream, p);
}

}  // namespace fused_ops::msa_row_attention
