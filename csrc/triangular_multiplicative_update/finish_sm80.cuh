// SPDX-License-Identifier: Apache-2.0
// The parameters' gradients from sums over pairs, in three launches. Every sum has an order that
// only the sizes give.
#pragma once

#include "triangular_multiplicative_update/lines.cuh"

namespace fused_ops::triangular_multiplicative_update {

constexpr int kFinishWarps = 8;
constexpr int kFinishThreads = 32 * kFinishWarps;
constexpr int kMostParts = 32;  // of column sums: a lane of a warp adds one

struct FinishShared {
  float sums[2][kFinishWarps][32];
};

// 1. Column sums: a block takes 32 columns of a part of the rows.
struct ColumnSums {
  const float* from = nullptr;  // (rows, columns)
  float* to = nullptr;          // (parts, columns)
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t part_rows = 0;
  int tiles = 0;  // of 32 columns
  int parts = 0;  // 0: nothing to do
};

struct ColumnSumsParams {
  ColumnSums matrices[2];
};

// The sum of a column over the rows first, first + kFinishWarps, ... of the block's warps, in the
// first warp alone.
__device__ __forceinline__ float column_sum(const float* from, std::int64_t columns,
                                            std::int64_t column, std::int64_t first,
                                            std::int64_t last, float (&shared)[kFinishWarps][32]) {
  const int lane = thread_index() % 32;
  const int warp = thread_index() / 32;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 8
    for (std::int64_t row = first + warp; row < last; row += kFinishWarps) {
      sum += from[row * columns + column];
    }
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp == 0) {
#pragma unroll
    for (int w = 1; w < kFinishWarps; ++w) sum += shared[w][lane];
  }
  return sum;
}

__global__ void __launch_bounds__(kFinishThreads)
    column_sums_kernel(const __grid_constant__ ColumnSumsParams params) {
  sm80::griddepcontrol_launch_dependents();
  auto& shared = shared_memory<FinishShared>();
  const int of_first = params.matrices[0].tiles * params.matrices[0].parts;
  const int block = static_cast<int>(blockIdx.x);
  const ColumnSums& m = params.matrices[block >= of_first];
  const int at = block >= of_first ? block - of_first : block;
  const int part = at / m.tiles;
  const std::int64_t column = at % m.tiles * 32 + thread_index() % 32;
  const std::int64_t last = min((part + 1) * m.part_rows, m.rows);
  const float sum = column_sum(m.from, m.columns, column, part * m.part_rows, last, shared.sums[0]);
  if (thread_index() < 32 && column < m.columns) m.to[part * m.columns + column] = sum;
}

// 2. Gradients of the linears, and what their lines add to those of the LayerNorms: a block takes
// 32 columns of 8 lines, a warp a line.
struct FinishGroup {
  Products products;
  const float* sums = nullptr;  // of the group's first line; (parts, columns), or null
  std::int64_t sums_columns = 0;
  int parts = 0;
  int column_tiles = 0;
  int blocks = 0;
  Stored norm_weight, norm_bias;  // null: the input is not normalised
  float* of_norm[2] = {};         // of weight, bias: (line tiles, inner), or null
};

struct FinishParams {
  Sizes sizes;
  FinishGroup groups[kGroups];
  Linear linears[kLinears];
  LinearResult results[kLinears];
};

__global__ void __launch_bounds__(kFinishThreads)
    finish_lines_kernel(const __grid_constant__ FinishParams params) {
  sm80::griddepcontrol_launch_dependents();
  auto& shared = shared_memory<FinishShared>();
  const int lane = thread_index() % 32;
  const int warp = thread_index() / 32;
  int group = 0;
  int block = static_cast<int>(blockIdx.x);
  while (block >= params.groups[group].blocks) block -= params.groups[group++].blocks;
  const FinishGroup& g = params.groups[group];
  const int inner = inner_of(params.sizes, group);
  const int lines = lines_of(params.sizes, group);
  const int tile = block / g.column_tiles;
  const int column = block % g.column_tiles * 32 + lane;
  const int in_group = tile * kFinishWarps + warp;
  const bool inside = in_group < lines && column < inner;
  const Line line = line_of(params.sizes, group, in_group < lines ? in_group : 0);
  const LinearResult& result = params.results[line.linear];

  // The products are older than the launch before; only the sums are waited for.
  float product = 0.0f;
  if (g.products.data && inside) {
    const std::int64_t slab = std::int64_t{lines} * inner;
    const float* from = g.products.data + std::int64_t{in_group} * inner + column;
#pragma unroll 32  // loads under way together
    for (std::int64_t s = 0; s < g.products.slabs; ++s) product += from[s * slab];
  }
  sm80::griddepcontrol_wait();
  float bias = 0.0f;
  if (g.sums && in_group < lines) {  // all lanes of a warp alike
    bias = warp_sum(lane < g.parts ? g.sums[lane * g.sums_columns + in_group] : 0.0f);
    if (result.bias.data && block % g.column_tiles == 0 && lane == 0) {
      store_number(result.bias.data, result.bias.type, line.in_linear, bias);
    }
  }
  const std::int64_t at = std::int64_t{line.in_linear} * inner + column;
  if (result.weight.data && inside) {
    float grad = product;
    if (g.norm_weight.data) {
      grad = product * load_number(g.norm_weight.data, g.norm_weight.type, column) +
             bias * load_number(g.norm_bias.data, g.norm_bias.type, column);
    }
    store_number(result.weight.data, result.weight.type, at, grad);
  }

  if (!g.of_norm[0] && !g.of_norm[1]) return;
  const Stored& stored = params.linears[line.linear].weight;
  const float weight = inside ? load_number(stored.data, stored.type, at) : 0.0f;
  shared.sums[0][warp][lane] = weight * product;
  shared.sums[1][warp][lane] = weight * bias;
  __syncthreads();
  if (warp >= 2 || column >= inner || !g.of_norm[warp]) return;
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kFinishWarps; ++w) sum += shared.sums[warp][w][lane];
  g.of_norm[warp][std::int64_t{tile} * inner + column] = sum;
}

// 3. Gradients of the LayerNorms: a block takes 32 columns of one of the four vectors.
struct FinishNorm {
  const float* from = nullptr;  // (rows, size)
  int rows = 0;
  int size = 0;
  int blocks = 0;
  Result result;
};

struct FinishNormsParams {
  FinishNorm norms[4];
};

__global__ void __launch_bounds__(kFinishThreads)
    finish_norms_kernel(const __grid_constant__ FinishNormsParams params) {
  auto& shared = shared_memory<FinishShared>();
  int which = 0;
  int block = static_cast<int>(blockIdx.x);
  while (block >= params.norms[which].blocks) block -= params.norms[which++].blocks;
  const FinishNorm& norm = params.norms[which];
  const int column = block * 32 + thread_index() % 32;
  sm80::griddepcontrol_wait();
  const float sum = column_sum(norm.from, norm.size, column, 0, norm.rows, shared.sums[0]);
  if (thread_index() < 32 && column < norm.size) {
    store_number(norm.result.data, norm.result.type, column, sum);
  }
}

}  // namespace fused_ops::triangular_multiplicative_update
