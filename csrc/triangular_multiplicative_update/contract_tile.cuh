// SPDX-License-Identifier: Apache-2.0
// What the kernels of the contraction share: their parameters, which tile lies where, and how
// results leave.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/split.cuh"
#include "triangular_multiplicative_update/triangular_multiplicative_update.h"

namespace fused_ops::triangular_multiplicative_update {

struct ContractParams {
  ContractProblem problem;
  std::int64_t first_tile = 0;  // of this launch
  std::int64_t end_tile = 0;
  int row_tiles = 0;  // of a matrix
  int column_tiles = 0;
  int chunks = 0;                     // of k
  int stages = 0;                     // 2 or 3, of the kernel for 8.0
  bool every_thread_arrives = false;  // at the barriers of the one for Hopper
};

// Of a launch for all tiles of so many rows and columns.
inline ContractParams contract_params(const ContractProblem& problem, int rows, int columns) {
  ContractParams params;
  params.problem = problem;
  params.row_tiles = static_cast<int>(ceil_div(problem.sizes.n, rows));
  params.column_tiles = static_cast<int>(ceil_div(problem.sizes.n, columns));
  params.end_tile = problem.channels * problem.sizes.batch * params.row_tiles * params.column_tiles;
  params.chunks = static_cast<int>(ceil_div(problem.sizes.n, sm80::kSplitInner));
  return params;
}

// The number of a tile says where it lies. All tiles of a matrix are neighbours and share its
// operands in L2.
struct TilePlace {
  std::int64_t matrix;
  int row;
  int column;

  __device__ __forceinline__ TilePlace(const ContractParams& params, std::int64_t tile) {
    const std::int64_t tiles_of_matrix = std::int64_t{params.row_tiles} * params.column_tiles;
    matrix = tile / tiles_of_matrix;
    const int rest = static_cast<int>(tile % tiles_of_matrix);
    row = rest / params.column_tiles;
    column = rest % params.column_tiles;
  }
};

// The undo factors of both operands. Each alone is in fp32's range and so is what they give in the
// end, but their product need not be; the smaller one first neither overflows nor loses digits that
// count.
struct Undo {
  float first;
  float second;

  __device__ __forceinline__ Undo(float a, float b) {
    const bool a_first = fabsf(a) < fabsf(b);
    first = a_first ? a : b;
    second = a_first ? b : a;
  }
  __device__ __forceinline__ float operator()(float x) const { return x * first * second; }
};

// Stores a warp's results at (row, column) of a matrix (n, n) with lines of `pitch`; `whole`: all
// of them lie inside.
template <bool whole, class Product>
__device__ __forceinline__ void store_results(const Product& product, const Undo& undo,
                                              float* matrix, std::int64_t n, std::int64_t pitch,
                                              std::int64_t row, std::int64_t column, int lane) {
  // Two lanes exchange halves of two column tiles, so that each has four columns of one.
  const bool odd = lane % 2 == 1;
  row += lane / 4;
  column += lane % 4 / 2 * 4 + (odd ? 8 : 0);
  const auto x = [&](int i, int j) { return product.total[i / 2][j][i % 2 * 2]; };
  const auto y = [&](int i, int j) { return product.total[i / 2][j][i % 2 * 2 + 1]; };
  float* at = matrix + row * pitch + column;
#pragma unroll
  for (int i = 0; i < Product::kRowTiles * 2; ++i) {
#pragma unroll
    for (int j = 0; j < Product::kColumnTiles; j += 2) {
      const float take_x = undo(__shfl_xor_sync(0xffffffffu, odd ? x(i, j) : x(i, j + 1), 1));
      const float take_y = undo(__shfl_xor_sync(0xffffffffu, odd ? y(i, j) : y(i, j + 1), 1));
      const float keep_x = undo(odd ? x(i, j + 1) : x(i, j));
      const float keep_y = undo(odd ? y(i, j + 1) : y(i, j));
      const float4 four = odd ? make_float4(take_x, take_y, keep_x, keep_y)
                              : make_float4(keep_x, keep_y, take_x, take_y);
      const std::int64_t left = whole ? 4 : row + i * 8 < n ? n - column - j * 8 : 0;
      if (left >= 4) {
        __stcs(reinterpret_cast<float4*>(at + j * 8), four);
      } else {
        if (left > 0) at[j * 8] = four.x;
        if (left > 1) at[j * 8 + 1] = four.y;
        if (left > 2) at[j * 8 + 2] = four.z;
      }
    }
    at += pitch * 8;
  }
}

// The same of a warp at (row, column) of the block's tile of kRows x kColumns. Tests for each store
// take their time, so there is one for the whole tile.
template <int kRows, int kColumns, class Product>
__device__ __forceinline__ void store_tile(const Product& product, const ContractProblem& problem,
                                           const TilePlace& place, int row, int column, int lane) {
  const std::int64_t n = problem.sizes.n;
  const std::int64_t pitch = problem.sizes.pitch;
  const std::int64_t channel = place.matrix / problem.sizes.batch;
  const Undo undo(problem.a.undo[channel], problem.b.undo[channel]);
  float* matrix = problem.out + place.matrix * n * pitch;
  const std::int64_t first_row = std::int64_t{place.row} * kRows;
  const std::int64_t first_column = std::int64_t{place.column} * kColumns;
  if (first_row + kRows <= n && first_column + kColumns <= n) {
    store_results<true>(product, undo, matrix, n, pitch, first_row + row, first_column + column,
                        lane);
  } else {
    store_results<false>(product, undo, matrix, n, pitch, first_row + row, first_column + column,
                         lane);
  }
}

}  // namespace fused_ops::triangular_multiplicative_update
