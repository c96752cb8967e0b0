// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/backward_gate_sm80.cuh"

#include "common/launch.h"
#include "msa_row_attention/backward.h"

namespace fused_ops::msa_row_attention {

void backward_gate_sm80(const BackwardProblem& problem, CUstream_st* stream) {
  const char* what = "msa_row_attention: launching backward_gate_sm80";
  const Sizes& sizes = problem.sizes;
  if (sizes.positions() == 0 || sizes.heads == 0) return;
  const DType type = type_of(problem.mode);
  BackwardGateParams p;
  p.projected = problem.projected;
  p.projection_bias = problem.projection_bias;
  p.gated = problem.gated;
  p.d_gated = problem.d_gated;
  p.d_attended = problem.d_attended;
  p.d_projected = problem.d_projected;
  p.row_dots = problem.row_dots;
  p.factors = problem.factors;
  p.dot_scale = problem.dropout.kept;
  p.lines = sizes.positions() * sizes.heads;
  p.heads = static_cast<unsigned>(sizes.heads);
  p.n = static_cast<unsigned>(sizes.n);
  p.dim = static_cast<unsigned>(sizes.dim);
  p.pieces = static_cast<unsigned>(sizes.dim * bytes_of(type) / 16);
  p.lines_of_block = kBackwardGateThreads / p.pieces;
  const std::int64_t blocks = ceil_div(p.lines, p.lines_of_block);
  FO_CHECK_RUNTIME(blocks < std::int64_t{1} << 31, what, " must be given less at a time");
  const auto run = [&](auto kernel) {
    launch(what, kernel, static_cast<unsigned>(blocks), kBackwardGateThreads,
           sizeof(BackwardGateShared), stream, p);
  };
  if (type == DType::kFloat32) return run(backward_gate_kernel<DType::kFloat32>);
  if (type == DType::kBFloat16) return run(backward_gate_kernel<DType::kBFloat16>);
  run(backward_gate_kernel<DType::kFloat16>);
}

}  // namespace fused_ops::msa_row_attention
