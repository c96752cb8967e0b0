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

// A block's rows, and queries of each. Rows that a block has together share the bias in shared
// memory; short rows leave no warp without queries. Widths above 64 have half as many rows, for the
// shared memory of keys and values.
struct AttendTile {
  int rows;
  int query_warps;  // of 32 queries
};

constexpr AttendTile kAttendTiles[] = {{2, 4}, {4, 2}, {4, 1}};

constexpr int attend_tile_of(std::int64_t n) {
  return n > 64 ? 0 : n > 32 ? 1 : 2;
}

}  // namespace fused_ops::msa_row_attention
