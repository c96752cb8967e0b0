// SPDX-License-Identifier: Apache-2.0
// What the launchers of the backward's kernels share.
#pragma once

#include <cmath>
#include <limits>

#include "common/launch.h"
#include "msa_row_attention/backward.h"
#include "msa_row_attention/backward_pieces.cuh"
#include "msa_row_attention/with_width.h"

namespace fused_ops::msa_row_attention {

inline BackwardParams params_of(const BackwardProblem& problem) {
  const Sizes& sizes = problem.sizes;
  BackwardParams p;
  p.projected = static_cast<const std::uint16_t*>(problem.projected);
  p.bias = problem.bias;
  p.present = problem.present;
  p.d_attended = static_cast<const std::uint16_t*>(problem.d_attended);
  p.log_sums = problem.log_sums;
  p.row_dots = problem.row_dots;
  p.d_projected = static_cast<std::uint16_t*>(problem.d_projected);
  p.rows = static_cast<unsigned>(sizes.rows);
  p.heads = static_cast<unsigned>(sizes.heads);
  p.n = static_cast<int>(sizes.n);
  p.tiles = static_cast<int>(mask_words(sizes.n));
  p.blocks = static_cast<int>(bias_blocks(sizes.n));
  p.dim = static_cast<unsigned>(sizes.dim);
  p.width = static_cast<unsigned>(sizes.width());
  p.dropout = problem.dropout;
  p.scale = 1.0f / std::sqrt(static_cast<float>(sizes.head_dim));
  p.logit_scale = kLog2E * p.scale;
  p.scale *= p.dropout.factor;
  return p;
}

// For kernels whose blocks have `rows` rows and of each `positions` queries or keys. Returns the
// number of blocks.
inline unsigned cut_rows(const char* what, const Sizes& sizes, int rows, int positions,
                         BackwardParams* p) {
  const std::int64_t row_blocks = ceil_div(sizes.rows, rows);
  const std::int64_t tiles = ceil_div(sizes.n, positions);
  const std::int64_t blocks = sizes.groups * row_blocks * sizes.heads * tiles;
  FO_CHECK_RUNTIME(blocks < std::numeric_limits<int>::max() && sizes.n <= kMostPositions, what,
                   " must be given less at a time");
  p->row_blocks = static_cast<unsigned>(row_blocks);
  p->block_tiles = static_cast<unsigned>(tiles);
  return static_cast<unsigned>(blocks);
}

// Calls `call` with mode, width and the number of a tile of kAttendTiles as types; `of_warp` says
// how many queries or keys a warp has.
template <int (*of_warp)(int), class Call>
void with_backward_tile(const char* what, const BackwardProblem& problem, Call call) {
  const Sizes& sizes = problem.sizes;
  if (sizes.positions() == 0 || sizes.heads == 0) return;
  with_mode_and_width(what, problem.mode, sizes.dim, [&](auto mode_of, auto width_of) {
    constexpr int kWidth = decltype(width_of)::value;
    const int tile = backward_tile_of(sizes.n, of_warp(kWidth), kWidth);
    if (tile == 0) return call(mode_of, width_of, std::integral_constant<int, 0>());
    if constexpr (kWidth <= 64) {
      if (tile == 1) return call(mode_of, width_of, std::integral_constant<int, 1>());
    }
    if constexpr (kWidth <= 48) call(mode_of, width_of, std::integral_constant<int, 2>());
  });
}

}  // namespace fused_ops::msa_row_attention
