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

// Two more of the forward. Few blocks: a warp that is all but alone on its scheduler has half as
// many queries and asks for the bias a whole tile of keys ahead, for nothing but latency counts.
// Long rows of heads of 64: twice as many queries, for each of which keys need not be read again.
constexpr int kFewBlocksTile = 3, kLongRowsTile = 4;

constexpr AttendTile attend_tile(int tile) {
  return kAttendTiles[tile < kFewBlocksTile ? tile : 0];
}

// Of a warp. With 16 of heads of 64 as many warps fit a multiprocessor as of narrow ones.
constexpr int attend_queries(int width, int tile) {
  return tile == kFewBlocksTile ? 16 : tile == kLongRowsTile ? 32 : width > 48 ? 16 : 32;
}

// Steps of 16 keys that the bias is asked for ahead.
constexpr int attend_bias_ahead(int tile) {
  return tile == kFewBlocksTile ? 4 : 1;
}

constexpr int attend_tile_of(const Sizes& sizes, int multiprocessors) {
  const int width = width_of(sizes.dim);
  const std::int64_t n = sizes.n;
  // The threads of a row of wide heads copy no fewer than eight lines at a time.
  if (width > 64) return 0;
  if (width > 48) return n > 256 ? kLongRowsTile : n > 32 ? 0 : 1;
  if (n <= 64) return n > 32 ? 1 : 2;
  const std::int64_t blocks = sizes.all_rows() * sizes.heads * ceil_div(n, 128);
  return blocks <= std::int64_t{2} * multiprocessors ? kFewBlocksTile : 0;
}

// Of a multiprocessor.
constexpr int attend_threads(int width, int query_tiles, bool dropout) {
  if (dropout) return width <= 32 ? 384 : 256;
  if (query_tiles == 1) return width <= 64 ? 512 : 256;
  return width <= 32 ? 512 : width == 64 ? 384 : 256;
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
constexpr int backward_stages(int tile) {
  return tile > 0 ? 1 : 2;
}

// A block of the bias's gradient has so many queries, 16 to a warp, and keys. Larger blocks, which
// read less, were slower: four such with 128 registers a thread fit a multiprocessor where heads
// are narrow (three with dropout, whose hash has registers of its own).
constexpr int kBiasQueries = 64, kBiasKeys = 64;

struct BiasTile {
  int stages;  // one where heads are so wide that two take more than 99 KB of shared memory
  int blocks;  // that a multiprocessor holds at a time
};

constexpr BiasTile bias_tile(int width, bool dropout) {
  return {width > 64 ? 1 : 2, width > 32 ? 2 : dropout ? 3 : 4};
}

// Blocks for all rows.
constexpr std::int64_t bias_grid(const Sizes& sizes) {
  return sizes.groups * sizes.heads * ceil_div(sizes.n, kBiasQueries) *
         ceil_div(sizes.n, kBiasKeys);
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
  const BiasTile tile = bias_tile(width_of(sizes.dim), dropout);
  return slabs_of_rows(bias_grid(sizes), sizes.rows, std::int64_t{multiprocessors} * tile.blocks);
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
