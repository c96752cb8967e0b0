// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/output_launch.cuh"

namespace fused_ops::triangular_multiplicative_update {

void output_sm80(const OutputProblem& problem, CUstream_st* stream) {
  OutputParams params;
  params.sizes = problem.sizes;
  params.eps = problem.eps;
  params.gate_normalized = problem.gate_normalized;
  params.pair = problem.pair;
  params.workspace = static_cast<unsigned char*>(const_cast<void*>(problem.packed));
  params.packed = Packed::of(problem.sizes, problem.mode);
  params.o = problem.o;
  params.count = problem.sizes.pairs();
  params.out = problem.out;
  launch_output<false>("triangular_multiplicative_update: launching output_sm80", problem.mode,
                problem.tile, params, stream);
}

}  // namespace fused_ops::triangular_multiplicative_update
