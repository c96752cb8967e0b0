// SPDX-License-Identifier: Apache-2.0
// Sums of columns. A block sums 32 columns over a slab of rows, and where there are several slabs,
// a second launch adds their sums.
#pragma once

#include "common/cuda/device.h"
#include "triangular_multiplicative_update/triangular_multiplicative_update.h"

namespace fused_ops::triangular_multiplicative_update {

struct ColumnSumsParams {
  const float* rows_of = nullptr;
  float* out = nullptr;  // (slabs, columns)
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t slab = 0;      // rows of a block
  unsigned column_tiles = 0;  // of 32
};

constexpr int kColumnSumsWarps = 8;

struct ColumnSumsShared {
  float sums[kColumnSumsWarps][32];
};

__global__ void __launch_bounds__(32 * kColumnSumsWarps)
    column_sums_kernel(const __grid_constant__ ColumnSumsParams params) {
  auto& shared = shared_memory<ColumnSumsShared>();
  const int lane = thread_index() % 32;
  const int warp = thread_index() / 32;
  const std::int64_t slab = blockIdx.x / params.column_tiles;
  const std::int64_t column = std::int64_t{blockIdx.x % params.column_tiles} * 32 + lane;
  const bool inside = column < params.columns;
  const std::int64_t last = min((slab + 1) * params.slab, params.rows);
  float sum = 0.0f;
  if (inside) {
    const float* from = params.rows_of + column;
#pragma unroll 8
    for (std::int64_t row = slab * params.slab + warp; row < last; row += kColumnSumsWarps) {
      sum += from[row * params.columns];
    }
  }
  shared.sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || !inside) return;
#pragma unroll
  for (int w = 1; w < kColumnSumsWarps; ++w) sum += shared.sums[w][lane];
  params.out[slab * params.columns + column] = sum;
}

}  // namespace fused_ops::triangular_multiplicative_update
