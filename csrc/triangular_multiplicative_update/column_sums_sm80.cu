// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/column_sums_sm80.cuh"

#include <algorithm>

#include "common/launch.h"

namespace fused_ops::triangular_multiplicative_update {
namespace {

std::int64_t tiles_of(std::int64_t columns) {
  return ceil_div(columns, 32);
}

// Enough blocks to keep a GPU busy, of 64 rows at least. Not asked of the device: sums are the same
// on all of them.
std::int64_t slab_rows(std::int64_t rows, std::int64_t columns) {
  const std::int64_t slabs = std::max<std::int64_t>(1, 1024 / tiles_of(columns));
  return std::max<std::int64_t>(64, ceil_div(rows, slabs));
}

void sum_slabs(const float* rows_of, float* out, std::int64_t rows, std::int64_t columns,
               std::int64_t slab, CUstream_st* stream) {
  ColumnSumsParams params;
  params.rows_of = rows_of;
  params.out = out;
  params.rows = rows;
  params.columns = columns;
  params.slab = slab;
  params.column_tiles = static_cast<unsigned>(tiles_of(columns));
  const auto slabs = static_cast<unsigned>(std::max<std::int64_t>(1, ceil_div(rows, slab)));
  launch("triangular_multiplicative_update: launching column_sums", column_sums_kernel,
         slabs * params.column_tiles, 32 * kColumnSumsWarps, sizeof(ColumnSumsShared), stream,
         params);
}

}  // namespace

std::int64_t column_sums_workspace(std::int64_t rows, std::int64_t columns) {
  if (columns == 0) return 0;
  const std::int64_t slabs = ceil_div(rows, slab_rows(rows, columns));
  return slabs > 1 ? slabs * columns : 0;
}

void column_sums_sm80(const ColumnSumsProblem& problem, CUstream_st* stream) {
  const std::int64_t rows = problem.rows;
  const std::int64_t columns = problem.columns;
  if (columns == 0) return;
  const std::int64_t slab = slab_rows(rows, columns);
  const std::int64_t slabs = std::max<std::int64_t>(1, ceil_div(rows, slab));
  if (slabs == 1) {
    sum_slabs(problem.partial, problem.out, rows, columns, slab, stream);
    return;
  }
  sum_slabs(problem.partial, problem.workspace, rows, columns, slab, stream);
  sum_slabs(problem.workspace, problem.out, slabs, columns, slabs, stream);
}

}  // namespace fused_ops::triangular_multiplicative_update
