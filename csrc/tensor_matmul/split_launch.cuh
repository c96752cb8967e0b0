// SPDX-License-Identifier: Apache-2.0
// Host code that the launchers of the split kernels share.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "common/sanitizers.h"
#include "tensor_matmul/split_reduce.cuh"
#include "tensor_matmul/split_tile.cuh"

namespace fused_ops::tensor_matmul {

inline bool aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

// Whether 16 bytes of A can be read at a time, along the inner axis.
inline bool rows_are_vectors(const float* a, const RowAxes& rows, std::int64_t inner_stride) {
  bool vectors = aligned(a, 16) && inner_stride == 1;
  for (int i = 0; i < rows.count; ++i) vectors &= rows.stride[i] % 4 == 0;
  return vectors;
}

// Launches a kernel whose blocks walk over tiles of `rows` x `columns` of C, blocks_per_processor
// of them at a time on each multiprocessor.
inline void launch_split(const char* what, void (*kernel)(SplitParams),
                         const ForwardParams& problem, const SplitTile& tile, unsigned threads,
                         std::size_t shared_bytes, const void* workspace, CUstream_st* stream) {
  SplitParams params;
  params.problem = problem;
  params.prepared = PreparedB::of(problem.inner, problem.columns);
  params.workspace = static_cast<const unsigned char*>(workspace);
  params.row_tiles = static_cast<int>(ceil_div(problem.rows, tile.rows));
  params.column_tiles = static_cast<int>(ceil_div(problem.columns, tile.columns));
  params.vector = rows_are_vectors(problem.a, problem.a_rows, problem.a_inner_stride);
  params.along_rows = problem.a_inner_stride != 1;
  params.c_vector = aligned(problem.c, 16) && problem.columns % 4 == 0;
  params.every_thread_arrives = every_thread_arrives();
  const std::int64_t tiles = static_cast<std::int64_t>(params.row_tiles) * params.column_tiles;
  const std::int64_t alive = static_cast<std::int64_t>(multiprocessors()) * tile.min_blocks;
  const int grid = static_cast<int>(std::min(tiles, alive));
  params.row_step = grid / params.column_tiles;
  params.column_step = grid % params.column_tiles;
  launch(what, kernel, static_cast<unsigned>(grid), threads, shared_bytes, stream, params);
}

// Launches a kernel of which each block sums one tile over one slab of the rows.
inline void launch_reduce(const char* what, void (*kernel)(SplitReduceParams),
                          const ReduceProblem& problem, const SplitTile& tile, int slabs,
                          float* partial, unsigned threads, std::size_t shared_bytes,
                          CUstream_st* stream) {
  SplitReduceParams params;
  params.problem = problem;
  params.partial = partial;
  params.line_tiles = static_cast<int>(ceil_div(problem.lines, tile.rows));
  params.column_tiles = static_cast<int>(ceil_div(problem.columns, tile.columns));
  params.slabs = slabs;
  params.a_vector = rows_are_vectors(problem.a, problem.a_rows, problem.a_line_stride);
  params.g_vector = rows_are_vectors(problem.g, problem.g_rows, problem.g_column_stride);
  params.out_vector = aligned(partial, 16) && problem.columns % 4 == 0;
  params.every_thread_arrives = every_thread_arrives();
  launch(what, kernel, static_cast<unsigned>(params.line_tiles) * params.column_tiles * slabs,
         threads, shared_bytes, stream, params);
}

}  // namespace fused_ops::tensor_matmul
