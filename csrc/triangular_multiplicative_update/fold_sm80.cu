// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/fold_sm80.cuh"

#include "common/launch.h"

namespace fused_ops::triangular_multiplicative_update {

void fold_sm80(const FoldProblem& problem, CUstream_st* stream) {
  FoldParams params;
  params.sizes = problem.sizes;
  list_linears(problem.weights, params.linears);
  params.norms[0] = problem.weights.norm_in_weight;
  params.norms[1] = problem.weights.norm_out_weight;
  if (problem.weights.gate_normalized) params.norms[2] = problem.weights.norm_in_weight;
  params.type = problem.type;
  params.out[0] = problem.input;
  params.out[1] = problem.out_proj;
  params.out[2] = problem.out_gate;
  params.largest = problem.largest;
  const std::int64_t lines = first_line(params.sizes, kGroups);
  launch("triangular_multiplicative_update: launching fold", fold_kernel,
         static_cast<unsigned>(ceil_div(lines, kFoldWarps)), kFoldThreads, 0, stream, params);
}

}  // namespace fused_ops::triangular_multiplicative_update
