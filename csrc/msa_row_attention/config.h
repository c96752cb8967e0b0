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

// Of a warp: 32, or 16 where a head is wide. With 16 of heads of 64 as many warps fit a
// multiprocessor as of narrow ones.
constexpr int queries_of_warp(int width) {
  return width > 48 ? 16 : 32;
}

// The threads of a row of wide heads copy no fewer than eight lines at a time.
constexpr int attend_tile_of(std::int64_t n, int width) {
  return width > 64 ? 0 : width > 48 ? (n > 32 ? 0 : 1) : n > 64 ? 0 : n > 32 ? 1 : 2;
}

// Of a multiprocessor.
constexpr int attend_threads(int width, bool dropout) {
  if (dropout) return width <= 32 ? 384 : 256;
  return width <= 32 || width == 64 ? 512 : 256;
}

// Likewise for fp32, a warp with 16 queries.
constexpr AttendTile kAttendFp32Tiles[] = {{1, 4}, {2, 2}};

constexpr int attend_fp32_tile_of(std::int64_t n) {
  return n > 32 ? 0 : 1;
}

constexpr int fp32_keys_of_tile(int tile, int width) {
  return tile > 0 || width > 64 ? 32 : 64;
}

// The backward has the same tiles, of queries or of keys. With keys a warp has two operands and two
// sums in registers, so that fewer heads are narrow.
constexpr int backward_queries_of_warp(int width) {
  return width > 64 ? 16 : 32;
}

constexpr int keys_of_warp(int width) {
  return width > 48 ? 16 : 32;
}

constexpr int backward_tile_of(std::int64_t n, int of_warp, int width) {
  return width > 64 || n > 2 * of_warp ? 0 : width > 48 || n > of_warp ? 1 : 2;
}

// Of the ring. One where short rows have a single tile to walk.
constexpr int backward_stages(int width, int tile) {
  return tile > 0 ? 1 : 2;
}

// A block of the bias's gradient: warps of 16 * query_tiles queries and 64 keys. The larger it is
// the less is read. Heads up to 32 wide: 16 warps, alone on a multiprocessor with 128 registers a
// thread. Beyond, what two stages take of 99 KB of shared memory decides, and at 128 a single one.
struct BiasTile {
  int query_warps;
  int key_warps;
  int query_tiles;
  int stages;
  int blocks;  // that a multiprocessor holds at a time

  constexpr int queries() const { return 16 * query_tiles * query_warps; }
  constexpr int keys() const { return 64 * key_warps; }
};

constexpr BiasTile bias_tile(int width, bool large) {
  return width > 64   ? BiasTile{4, 1, 1, 1, 2}
         : !large     ? BiasTile{4, 1, 1, 2, width > 32 ? 2 : 3}
         : width > 32 ? BiasTile{4, 2, 1, 2, 1}
                      : BiasTile{8, 2, 1, 2, 1};
}

constexpr bool is_large_bias(std::int64_t n) {
  return n > 64;
}

// With dropout one tile, whatever the length: the large one of narrow heads would spill 48 bytes
// and more of 128 registers, and of wide ones leaves no shared memory for keys of the hash.
constexpr bool kLargeDropoutBias = false;

constexpr BiasTile dropout_bias_tile(int width) {
  return bias_tile(width, kLargeDropoutBias && width <= 32);
}

constexpr BiasTile bias_tile_of(const Sizes& sizes, bool dropout) {
  const int width = width_of(sizes.dim);
  return dropout ? dropout_bias_tile(width) : bias_tile(width, is_large_bias(sizes.n));
}

// Blocks for all rows.
constexpr std::int64_t bias_grid(const Sizes& sizes, bool dropout) {
  const BiasTile tile = bias_tile_of(sizes, dropout);
  return sizes.groups * sizes.heads * ceil_div(sizes.n, tile.queries()) *
         ceil_div(sizes.n, tile.keys());
}

// Into how many slabs the rows are cut: the fewest that keep nine tenths of the device busy, if
// there are any, each of a few rows at least. All rows have `grid` blocks, of which `at_a_time` are
// under way.
constexpr std::int64_t slabs_of_rows(std::int64_t grid, std::int64_t all_rows,
                                     std::int64_t at_a_time) {
  constexpr std::int64_t kFewestRows = 4, kMostSlabs = 64;
  std::int64_t best = 1;
  double most_busy = 0.0;
  for (std::int64_t slabs = 1; slabs <= kMostSlabs; ++slabs) {
    const std::int64_t rows = ceil_div(all_rows, slabs);
    if (slabs > 1 && rows < kFewestRows) break;
    if (slabs > 1 && (slabs - 1) * rows >= all_rows) continue;  // the last would have none
    const std::int64_t rounds = ceil_div(grid * slabs, at_a_time) * rows;
    const double busy =
        static_cast<double>(grid * all_rows) / static_cast<double>(rounds * at_a_time);
    if (busy > most_busy) {
      best = slabs;
      most_busy = busy;
    }
    if (most_busy >= 0.9) break;
  }
  return best;
}

constexpr std::int64_t bias_slabs(const Sizes& sizes, int multiprocessors, bool dropout) {
  const BiasTile tile = bias_tile_of(sizes, dropout);
  return slabs_of_rows(bias_grid(sizes, dropout), sizes.rows,
                       std::int64_t{multiprocessors} * tile.blocks);
}

// Numbers of BackwardProblem::partial.
constexpr std::int64_t bias_partial_size(const Sizes& sizes, int multiprocessors,
                                         bool accumulate = false, bool dropout = false) {
  const std::int64_t slabs = bias_slabs(sizes, multiprocessors, dropout);
  return slabs == 1 && !accumulate ? 0 : slabs * sizes.groups * sizes.heads * sizes.n * sizes.n;
}

// Exponents are of 2.
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLowest =
    -1e30f;                     // below all finite exponents, and no more is subtracted from -inf
constexpr float kSlack = 8.0f;  // of an exponent: weights may exceed 1 by so much before all shrink

}  // namespace fused_ops::msa_row_attention
