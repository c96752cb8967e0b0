// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/output_launch.cuh"

namespace fused_ops::triangular_multiplicative_update {

void output_backward_sm80(const OutputBackwardProblem& problem, CUstream_st* stream) {
  OutputParams params;
  params.sizes = problem.sizes;
  params.eps = problem.eps;
  params.gate_normalized = problem.gate_normalized;
  params.pair = problem.pair;
  params.workspace = static_cast<unsigned char*>(const_cast<void*>(problem.packed));
  params.packed = Packed::of(problem.sizes, problem.mode);
  params.o = problem.o;
  params.out_grad = problem.out_grad;
  params.first_pair = problem.first_pair;
  params.count = problem.count;
  params.out_proj_grad = problem.out_proj_grad;
  params.gate_grad = problem.gate_grad;
  params.normalised = problem.normalised;
  params.gate_input = problem.gate_input;
  params.sums = problem.sums;
  launch_output<true>("triangular_multiplicative_update: launching output_backward_sm80", problem.mode,
                problem.tile, params, stream);
}

}  // namespace fused_ops::triangular_multiplicative_update
