// SPDX-License-Identifier: Apache-2.0
#include "common/cuda/sm80/norm_backward.cuh"

#include <algorithm>
#include <cstdint>

#include "common/launch.h"
#include "common/parameters.h"

namespace fused_ops {
namespace {

bool aligned(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
}

constexpr const char* kNormBackward = "launching norm_backward_sm80";

// `blocks`: as many sums as are wanted, 0 for none.
template <DType type, DType grad_type, int kRepeats>
void launch_norm_backward(NormBackwardParams& p, int blocks, CUstream_st* stream) {
  using Kernel = NormBackward<type, grad_type, kRepeats>;
  while ((kRepeats * Kernel::kPiece << p.lanes_log2) < p.channels) ++p.lanes_log2;
  const std::int64_t rows_of_block = (kNormBackwardThreads >> p.lanes_log2) * Kernel::kRows;
  const std::int64_t most = std::min<std::int64_t>(ceil_div(p.rows, rows_of_block), 1 << 30);
  launch(kNormBackward, norm_backward_kernel<type, grad_type, kRepeats>,
         static_cast<unsigned>(blocks > 0 ? blocks : most), kNormBackwardThreads,
         sizeof(NormBackwardShared<Kernel::kMost>), stream, p);
}

// Rows of any length. Sums are another kernel's.
template <DType type, DType grad_type>
void launch_any(NormBackwardParams& p, const NormBackwardProblem& problem, CUstream_st* stream) {
  p.sums = nullptr;
  p.statistics = reinterpret_cast<float4*>(problem.statistics);
  const std::int64_t blocks = ceil_div(p.rows, kNormBackwardThreads / 32);
  FO_CHECK_RUNTIME(blocks < std::int64_t{1} << 31, kNormBackward, " must be given less at a time");
  launch(kNormBackward, norm_backward_kernel<type, grad_type, 0>, static_cast<unsigned>(blocks),
         kNormBackwardThreads, 0, stream, p);
  if (!problem.sums) return;
  ColumnSumsProblem sums;
  sums.rows = p.rows;
  sums.columns = p.channels;
  sums.grad = problem.grad;
  sums.grad_type = problem.grad_type;
  sums.grad_stride = p.channels;
  sums.source = problem.source;
  sums.statistics = problem.statistics;
  sums.parts = problem.parts;
  sums.sums = problem.sums;
  column_sums_sm80(sums, stream);
}

template <DType type, DType grad_type>
void choose_norm_backward(NormBackwardParams& p, const NormBackwardProblem& problem,
                          CUstream_st* stream) {
  constexpr int kPiece = NormBackward<type, grad_type, 1>::kPiece;
  const bool vector = p.channels % 8 == 0 && aligned(p.source.data) && aligned(p.grad) &&
                      aligned(p.weight.data) && aligned(p.out) && p.where.steps_by(kPiece);
  const int blocks = problem.sums ? problem.parts : 0;
  if (vector && p.channels <= 32 * kPiece) {
    launch_norm_backward<type, grad_type, 1>(p, blocks, stream);
  } else if (vector && p.channels <= 4 * 32 * kPiece) {
    launch_norm_backward<type, grad_type, 4>(p, blocks, stream);
  } else {
    launch_any<type, grad_type>(p, problem, stream);
  }
}

template <DType grad_type>
void with_source(NormBackwardParams& p, const NormBackwardProblem& problem, CUstream_st* stream) {
  if (p.source.type == DType::kFloat32) {
    choose_norm_backward<DType::kFloat32, grad_type>(p, problem, stream);
  } else if (p.source.type == DType::kBFloat16) {
    choose_norm_backward<DType::kBFloat16, grad_type>(p, problem, stream);
  } else {
    choose_norm_backward<DType::kFloat16, grad_type>(p, problem, stream);
  }
}

}  // namespace

int norm_sum_parts(std::int64_t rows) {
  const std::int64_t most = ceil_div(rows, kNormBackwardThreads / 8);
  return static_cast<int>(
      std::max<std::int64_t>(1, std::min<std::int64_t>(most, 4 * multiprocessors())));
}

void norm_backward_sm80(const NormBackwardProblem& problem, CUstream_st* stream) {
  const std::int64_t rows = problem.source.count();
  if (rows == 0 || problem.channels == 0) return;
  NormBackwardParams p;
  p.source = problem.source;
  p.where = RowOffsets::of(problem.source);
  p.shares = NormShares::of(problem.channels);
  p.weight = problem.weight;
  p.grad = problem.grad;
  p.out = problem.out;
  p.sums = problem.sums;
  p.rows = rows;
  p.channels = problem.channels;
  p.eps = problem.eps;
  if (problem.grad_type == DType::kFloat32) return with_source<DType::kFloat32>(p, problem, stream);
  if (problem.grad_type == DType::kBFloat16)
    return with_source<DType::kBFloat16>(p, problem, stream);
  with_source<DType::kFloat16>(p, problem, stream);
}

}  // namespace fused_ops
