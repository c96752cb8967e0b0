// SPDX-License-Identifier: Apache-2.0
// Tiles of the attention kernels. Plain data, for the planner too.
#pragma once

#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

constexpr int kMostDim = 128;
constexpr int kMostPositions = 1 << 24;

// The widths that heads are padded to in shared memory, multiples of 16.
constexpr int kWidths[] = {16, 32, 48, 64, 128};

constexpr int width_of(int dim) {
  for (int width : kWidths) {
    if (dim <= width) return width;
  }
  return 0;
}

// A block's rows, and warps along the queries of each. Four warps: larger blocks, whose rows would
// share the bias, were slower; three such blocks fit a multiprocessor where heads are narrow. Short
// rows leave no warp without queries, and have one tile of keys.
struct AttendTile {
  int rows;
  int query_warps;
};

constexpr AttendTile kAttendTiles[] = {{1, 4}, {2, 2}, {4, 1}};

// Of a warp: 32, or 16 where a head is wide.
constexpr int queries_of_warp(int width) {
  return width > 64 ? 16 : 32;
}

constexpr int attend_tile_of(std::int64_t n, int width) {
  return width > 64 ? (n > 32 ? 0 : 1) : n > 64 ? 0 : n > 32 ? 1 : 2;
}

// The backward has the same tiles, of queries or of keys. With keys a warp has two operands and two
// sums in registers, so that fewer heads are narrow.
constexpr int keys_of_warp(int width) {
  return width > 48 ? 16 : 32;
}

constexpr int backward_tile_of(std::int64_t n, int of_warp) {
  return n > 2 * of_warp ? 0 : n > of_warp || of_warp == 16 ? 1 : 2;
}

// Of the ring. One where short rows have a single tile to walk.
constexpr int backward_stages(int width, int tile) {
  return tile > 0 ? 1 : width <= 32 ? 3 : 2;
}

}  // namespace fused_ops::msa_row_attention
