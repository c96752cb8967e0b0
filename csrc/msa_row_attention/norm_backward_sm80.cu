// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/norm_backward_sm80.cuh"

#include <cstdint>

#include "common/launch.h"
#include "msa_row_attention/parameters.h"

namespace fused_ops::msa_row_attention {
namespace {

bool aligned(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
}

template <DType type, DType grad_type, int kRepeats>
void launch_norm_backward(NormBackwardParams& p, CUstream_st* stream) {
  std::int64_t rows_of_block = kNormBackwardThreads / 32;
  if constexpr (kRepeats > 0) {
    using Kernel = NormBackward<type, grad_type, kRepeats>;
    while ((kRepeats * Kernel::kPiece << p.lanes_log2) < p.channels) ++p.lanes_log2;
    rows_of_block = (kNormBackwardThreads >> p.lanes_log2) * Kernel::kRows;
  }
  const std::int64_t blocks = ceil_div(p.rows, rows_of_block);
  FO_CHECK_RUNTIME(blocks < std::int64_t{1} << 31,
                   "msa_row_attention: norm_backward must have fewer than 2^31 blocks, got ",
                   blocks);
  launch("msa_row_attention: launching norm_backward_sm80",
         norm_backward_kernel<type, grad_type, kRepeats>, static_cast<unsigned>(blocks),
         kNormBackwardThreads, 0, stream, p);
}

template <DType type, DType grad_type>
void choose_norm_backward(NormBackwardParams& p, CUstream_st* stream) {
  constexpr int kPiece = NormBackward<type, grad_type, 1>::kPiece;
  const bool vector = p.channels % 8 == 0 && aligned(p.source.data) && aligned(p.grad) &&
                      aligned(p.weight.data) && aligned(p.out) && p.where.steps_by(kPiece);
  if (vector && p.channels <= 32 * kPiece) {
    launch_norm_backward<type, grad_type, 1>(p, stream);
  } else if (vector && p.channels <= 4 * 32 * kPiece) {
    launch_norm_backward<type, grad_type, 4>(p, stream);
  } else {
    launch_norm_backward<type, grad_type, 0>(p, stream);
  }
}

template <DType grad_type>
void with_source(NormBackwardParams& p, CUstream_st* stream) {
  if (p.source.type == DType::kFloat32) {
    choose_norm_backward<DType::kFloat32, grad_type>(p, stream);
  } else if (p.source.type == DType::kBFloat16) {
    choose_norm_backward<DType::kBFloat16, grad_type>(p, stream);
  } else {
    choose_norm_backward<DType::kFloat16, grad_type>(p, stream);
  }
}

}  // namespace

void norm_backward_sm80(const NormBackwardProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  if (sizes.positions() == 0 || sizes.channels == 0) return;
  NormBackwardParams p;
  p.source = problem.source;
  p.where = NormRows::of(sizes, problem.source);
  p.shares = NormShares::of(sizes.channels);
  p.weight = problem.weight;
  p.grad = problem.grad;
  p.out = problem.out;
  p.statistics = reinterpret_cast<float4*>(problem.statistics);
  p.rows = sizes.positions();
  p.channels = sizes.channels;
  p.eps = problem.eps;
  if (problem.grad_type == DType::kFloat32) return with_source<DType::kFloat32>(p, stream);
  if (problem.grad_type == DType::kBFloat16) return with_source<DType::kBFloat16>(p, stream);
  with_source<DType::kFloat16>(p, stream);
}

}  // namespace fused_ops::msa_row_attention
