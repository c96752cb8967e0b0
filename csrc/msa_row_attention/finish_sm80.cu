// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/finish_sm80.cuh"

#include <algorithm>
#include <cstdint>

#include "common/launch.h"

namespace fused_ops::msa_row_attention {
namespace {

bool holds_pairs(const void* data, DType type) {
  return reinterpret_cast<std::uintptr_t>(data) % (2 * bytes_of(type)) == 0;
}

}  // namespace

int column_sum_parts(std::int64_t positions, int columns) {
  const std::int64_t tiles = ceil_div(columns, kSumColumns);
  const std::int64_t most = ceil_div(positions, 8 * kFinishWarps);
  return static_cast<int>(
      std::max<std::int64_t>(1, std::min(most, ceil_div(8 * multiprocessors(), tiles))));
}

void column_sums_sm80(const ColumnSumsProblem& problem, CUstream_st* stream) {
  if (problem.columns == 0) return;
  ColumnSumsParams p;
  p.problem = problem;
  p.positions = problem.sizes.positions();
  p.part_positions = ceil_div(p.positions, problem.parts);
  p.tiles = static_cast<unsigned>(ceil_div(problem.columns, kSumColumns));
  p.pairs = problem.columns % 2 == 0 && problem.grad_stride % 2 == 0 &&
            holds_pairs(problem.grad, problem.grad_type);
  const char* what = "msa_row_attention: launching column_sums_sm80";
  const unsigned blocks = p.tiles * static_cast<unsigned>(problem.parts);
  if (!problem.source.data) {
    return launch(what, column_sums_kernel<false>, blocks, kFinishThreads, sizeof(ColumnSumsShared),
                  stream, p);
  }
  p.where = NormRows::of(problem.sizes, problem.source);
  p.pairs = p.pairs && p.where.steps_by(2) && holds_pairs(problem.source.data, problem.source.type);
  launch(what, column_sums_kernel<true>, blocks, kFinishThreads, sizeof(ColumnSumsShared), stream,
         p);
}

void finish_sm80(const FinishProblem& problem, CUstream_st* stream) {
  FinishParams p;
  p.problem = problem;
  unsigned blocks = 0;
  for (int i = 0; i < problem.count; ++i) {
    p.blocks[i] = static_cast<unsigned>(ceil_div(problem.summands[i].count, kFinishThreads));
    blocks += p.blocks[i];
  }
  if (blocks == 0) return;
  launch("msa_row_attention: launching finish_sm80", finish_kernel, blocks, kFinishThreads, 0,
         stream, p);
}

}  // namespace fused_ops::msa_row_attention
