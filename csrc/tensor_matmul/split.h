// SPDX-License-Identifier: Apache-2.0
// The fp32-accurate kernels on the tensor cores: tiles, workspace and launchers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/types.h"
#include "tensor_matmul/tensor_matmul.h"

namespace fused_ops::tensor_matmul {

// One block computes (rows, columns) of C at a time, one warp (warp_rows, warp_columns) of those.
struct SplitTile {
  int rows;
  int columns;
  int warp_rows;
  int warp_columns;
  int min_blocks;    // per multiprocessor
  int shared_bytes;  // at most; the launchers know exactly

  constexpr std::array<int, 3> size() const { return {rows, columns, 32}; }
};

// Of the kernel for compute capability 8.0 and later.
constexpr SplitTile kSplitTiles[] = {
    // As large as the registers allow: 128 sums a thread, 255 registers.
    {128, 256, 64, 64, 1, 140 * 1024},
    // Fits into the shared memory of 8.6, 8.9 and 12.0, and gives four times as many tiles.
    {64, 128, 32, 64, 2, 70 * 1024},
};
constexpr int kLargeSplitTile = 0;
constexpr int kSmallSplitTile = 1;

// Of the kernels for compute capability 9.0, whose warps are specialised: of the product, and of
// the sum over rows (lines of A and columns of G), by the same index.
constexpr SplitTile kHopperTiles[] = {
    {128, 256, 16, 256, 1, 205 * 1024},
    {128, 128, 16, 128, 1, 205 * 1024},  // for few columns, or few tiles
};
constexpr SplitTile kHopperReduceTiles[] = {
    {128, 256, 16, 256, 1, 201 * 1024},
    {128, 128, 16, 128, 1, 201 * 1024},
};
constexpr int kWideHopperTile = 0;
constexpr int kNarrowHopperTile = 1;
constexpr int hopper_stages(const SplitTile& tile) {
  return tile.columns == 256 ? 3 : 4;
}

// Of the sum over rows for compute capability 8.0. Four warps more split.
constexpr SplitTile kReduceTileSm80 = {128, 128, 32, 64, 1, 135 * 1024};
constexpr int kSplitWarps = 4;

// B, prepared once per call: scaled, split, and in the order in which shared memory holds it.
// A's column l is multiplied by 2^r_l, the mean magnitude of row l of B, and that row divided by
// it, so that neither operand's scale along the inner axis matters; then each column of B has its
// own scale.
struct PreparedB {
  std::int64_t chunks;   // of the inner axis
  std::int64_t columns;  // rounded up to whole tiles

  static constexpr int kInner = 32;
  static constexpr int kColumns = 256;  // a multiple of every tile's columns

  static constexpr PreparedB of(std::int64_t inner, std::int64_t columns) {
    return {ceil_div(inner, kInner), ceil_div(columns, kColumns) * kColumns};
  }
  // The parts of the workspace, in bytes from its start; each is aligned to 16.
  constexpr std::int64_t lines() const { return 0; }  // (chunks, columns, 128 bytes)
  constexpr std::int64_t row_scales() const { return chunks * columns * 128; }  // float
  constexpr std::int64_t row_exponents() const { return row_scales() + chunks * kInner * 4; }
  constexpr std::int64_t column_scales() const { return row_exponents() + chunks * kInner * 4; }
  constexpr std::int64_t column_exponents() const { return column_scales() + columns * 4; }
  constexpr std::int64_t bytes() const { return column_exponents() + columns * 4; }
};

// Fills the workspace, PreparedB::bytes() long and aligned to 16 bytes.
void prepare_b_sm80(const ForwardParams& problem, void* workspace, CUstream_st* stream);

// C of a problem whose sizes are none 0, from a prepared B. `tile` indexes kSplitTiles.
void split_forward_sm80(const ForwardParams& problem, int tile, const void* workspace,
                        CUstream_st* stream);
// `tile` indexes kHopperTiles.
void split_forward_sm90a(const ForwardParams& problem, int tile, const void* workspace,
                         CUstream_st* stream);

// C of a problem whose sizes are none 0: partial results of so many slabs of rows, (slabs, lines,
// columns), and their sum. With one slab `partial` is C and there is nothing to add.
void split_reduce_sm80(const ReduceProblem& problem, int slabs, float* partial,
                       CUstream_st* stream);
void split_reduce_sm90a(const ReduceProblem& problem, int tile, int slabs, float* partial,
                        CUstream_st* stream);
void add_slabs_sm80(const ReduceProblem& problem, int slabs, const float* partial,
                    CUstream_st* stream);

}  // namespace fused_ops::tensor_matmul
