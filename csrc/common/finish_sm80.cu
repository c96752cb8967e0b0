// SPDX-License-Identifier: Apache-2.0
#include "common/cuda/sm80/finish.cuh"

#include <algorithm>
#include <cstdint>

#include "common/launch.h"

namespace fused_ops {
namespace {

bool holds_pairs(const void* data, DType type) {
  return reinterpret_cast<std::uintptr_t>(data) % (2 * bytes_of(type)) == 0;
}

}  // namespace

int column_sum_parts(std::int64_t rows, int columns) {
  const std::int64_t tiles = ceil_div(columns, kSumColumns);
  const std::int64_t most = ceil_div(rows, 8 * kFinishWarps);
  return static_cast<int>(
      std::max<std::int64_t>(1, std::min(most, ceil_div(8 * multiprocessors(), tiles))));
}

namespace {

constexpr const char* kColumnSums = "launching column_sums_sm80";

template <DType grad_type, bool with_source, DType source_type>
void launch_column_sums(const ColumnSumsParams& p, CUstream_st* stream) {
  launch(kColumnSums, column_sums_kernel<grad_type, with_source, source_type>,
         p.tiles * static_cast<unsigned>(p.problem.parts), kFinishThreads, sizeof(ColumnSumsShared),
         stream, p);
}

template <DType grad_type>
void with_source(const ColumnSumsParams& p, CUstream_st* stream) {
  const Rows& source = p.problem.source;
  if (!source.data) return launch_column_sums<grad_type, false, grad_type>(p, stream);
  if (source.type == DType::kFloat32) {
    launch_column_sums<grad_type, true, DType::kFloat32>(p, stream);
  } else if (source.type == DType::kBFloat16) {
    launch_column_sums<grad_type, true, DType::kBFloat16>(p, stream);
  } else {
    launch_column_sums<grad_type, true, DType::kFloat16>(p, stream);
  }
}

}  // namespace

void column_sums_sm80(const ColumnSumsProblem& problem, CUstream_st* stream) {
  if (problem.columns == 0) return;
  ColumnSumsParams p;
  p.problem = problem;
  p.part_rows = ceil_div(problem.rows, problem.parts);
  p.tiles = static_cast<unsigned>(ceil_div(problem.columns, kSumColumns));
  p.pairs = problem.columns % 2 == 0 && problem.grad_stride % 2 == 0 &&
            holds_pairs(problem.grad, problem.grad_type);
  if (problem.source.data) {
    p.where = RowOffsets::of(problem.source);
    p.pairs =
        p.pairs && p.where.steps_by(2) && holds_pairs(problem.source.data, problem.source.type);
  }
  if (problem.grad_type == DType::kFloat32) return with_source<DType::kFloat32>(p, stream);
  if (problem.grad_type == DType::kBFloat16) return with_source<DType::kBFloat16>(p, stream);
  with_source<DType::kFloat16>(p, stream);
}

void finish_sm80(const FinishProblem& problem, CUstream_st* stream) {
  FinishParams p;
  p.problem = problem;
  unsigned blocks = 0;
  for (int i = 0; i < problem.count; ++i) {
    p.blocks[i] = static_cast<unsigned>(
        ceil_div(problem.summands[i].count, finish_numbers(problem.summands[i].slabs)));
    blocks += p.blocks[i];
  }
  if (blocks == 0) return;
  launch("launching finish_sm80", finish_kernel, blocks, kFinishThreads, sizeof(FinishShared),
         stream, p);
}

}  // namespace fused_ops
