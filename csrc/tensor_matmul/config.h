// SPDX-License-Identifier: Apache-2.0
// The tiles of the fp32 kernel and how one is chosen.
#pragma once

#include <array>
#include <cstdint>

#include "common/types.h"

namespace fused_ops::tensor_matmul {

// One block computes a (rows, columns) piece of C, reading A and B `inner` columns and rows at a
// time; a thread computes thread_rows x thread_columns of it, in groups of four for float4 access.
struct Tile {
  int rows;
  int columns;
  int inner;
  int thread_rows;
  int thread_columns;
  // After so many elements of the inner axis the running sum is added to a second one. Long sums
  // lose fewer digits so; it costs a second set of accumulator registers. 0: one sum only.
  int chain;
  int min_blocks;  // per multiprocessor, a bound for the compiler's register use

  constexpr std::array<int, 3> size() const { return {rows, columns, inner}; }
  constexpr int threads() const { return (rows / thread_rows) * (columns / thread_columns); }
};

// Registers are those of nvcc 13.0 for sm_90a. Times are of one H200, in ms, with cuBLAS's SGEMM
// beside ours: (8,256,512,256)x(256,768) 12.7 against 10.5, 4096x256x768 0.072 against 0.045,
// 8192^3 32.3 against 21.4.
constexpr Tile kTiles[] = {
    // 8x8 results a thread: 16 shared-memory loads feed 64 FFMA. 167 registers, no spills, so one
    // block a multiprocessor. Forcing two (128 registers, 92 bytes of spills) was 3 to 8 percent
    // faster; the way there is to free the registers, not to spill them.
    {128, 128, 16, 8, 8, 0, 1},
    // Four times as many blocks, for problems too small to fill a GPU with the large tile, and for
    // few columns. 103 registers (sm_120: 128 and an 8-byte spill). The second sum is free, and
    // here cuBLAS may split a long inner axis over blocks, which helps its accuracy.
    {64, 64, 16, 4, 4, 256, 2},
};
constexpr int kLargeTile = 0;
constexpr int kSmallTile = 1;

constexpr std::int64_t blocks(const Tile& tile, std::int64_t rows, std::int64_t columns) {
  return ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns);
}

constexpr int choose_tile(std::int64_t rows, std::int64_t columns) {
  // 128 blocks are about one a multiprocessor on the GPUs we build for (A100 108, H100 132).
  const bool fills_the_gpu = blocks(kTiles[kLargeTile], rows, columns) >= 128;
  return fills_the_gpu && columns > kTiles[kSmallTile].columns ? kLargeTile : kSmallTile;
}

// All blocks ride on grid.x, whose limit this is.
constexpr std::int64_t kMaxBlocks = (std::int64_t{1} << 31) - 1;

}  // namespace fused_ops::tensor_matmul
