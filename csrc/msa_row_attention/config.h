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
// share the bias, were slower; four such blocks fit a multiprocessor where heads are narrow. Short
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

// Likewise for fp32, a warp with 16 queries.
constexpr AttendTile kAttendFp32Tiles[] = {{1, 4}, {2, 2}};

constexpr int attend_fp32_tile_of(std::int64_t n) {
  return n > 32 ? 0 : 1;
}

constexpr int fp32_keys_of_tile(int tile, int width) {
  return tile > 0 || width > 64 ? 32 : 64;
}

// Exponents are of 2.
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLowest =
    -1e30f;                     // below all finite exponents, and no more is subtracted from -inf
constexpr float kSlack = 8.0f;  // of an exponent: weights may exceed 1 by so much before all shrink

}  // namespace fused_ops::msa_row_attention
