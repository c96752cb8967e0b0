// SPDX-License-Identifier: Apache-2.0
// Tiles of the backward's kernels for fp32 tensors; those with queries or keys of a row have
// kAttendFp32Tiles. Plain data, for the planner too.
#pragma once

#include "msa_row_attention/config.h"

namespace fused_ops::msa_row_attention {

// Of queries or keys that are walked.
constexpr int backward_fp32_lines(int tile, int width) {
  return fp32_keys_of_tile(tile, width);
}

constexpr int backward_fp32_stages(int tile) {
  return tile > 0 ? 1 : 2;
}

// A block of the bias's gradient: a warp has 16 queries and all of the block's keys. What two
// blocks of Hopper's multiprocessors, one of the least, have of shared memory decides.
struct BiasFp32Tile {
  int query_warps;
  int keys;
  int stages;
  int blocks;  // that a multiprocessor holds at a time; three at 32 leave too few registers

  constexpr int queries() const { return 16 * query_warps; }
};

constexpr BiasFp32Tile bias_fp32_tile(int width, bool large) {
  return width > 64   ? BiasFp32Tile{4, 32, 1, 2}
         : !large     ? BiasFp32Tile{2, 32, width > 32 ? 1 : 2, 4}
         : width > 32 ? BiasFp32Tile{4, 64, 1, 2}
         : width > 16 ? BiasFp32Tile{4, 64, 2, 2}
                      : BiasFp32Tile{4, 64, 2, 3};
}

// With dropout all are.
constexpr bool is_large_fp32_bias(std::int64_t n, bool dropout) {
  return n > 32 || dropout;
}

// Blocks for all rows.
constexpr std::int64_t bias_fp32_grid(const Sizes& sizes, bool dropout) {
  const BiasFp32Tile tile =
      bias_fp32_tile(width_of(sizes.dim), is_large_fp32_bias(sizes.n, dropout));
  return sizes.groups * sizes.heads * ceil_div(sizes.n, tile.queries()) *
         ceil_div(sizes.n, tile.keys);
}

constexpr std::int64_t bias_fp32_slabs(const Sizes& sizes, int multiprocessors, bool dropout) {
  const BiasFp32Tile tile =
      bias_fp32_tile(width_of(sizes.dim), is_large_fp32_bias(sizes.n, dropout));
  return slabs_of_rows(bias_fp32_grid(sizes, dropout), sizes.rows,
                       std::int64_t{multiprocessors} * tile.blocks);
}

// Numbers of BackwardProblem::partial.
constexpr std::int64_t bias_fp32_partial_size(const Sizes& sizes, int multiprocessors,
                                              bool accumulate = false, bool dropout = false) {
  const std::int64_t slabs = bias_fp32_slabs(sizes, multiprocessors, dropout);
  return slabs == 1 && !accumulate ? 0 : slabs * sizes.groups * sizes.heads * sizes.n * sizes.n;
}

}  // namespace fused_ops::msa_row_attention
