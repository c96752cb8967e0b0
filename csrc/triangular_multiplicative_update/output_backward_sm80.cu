// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/output_launch.cuh"

namespace fused_ops::triangular_multiplicative_update {

void output_backward_sm80(const OutputBackwardProblem& problem, CUstream_st* stream) {
  launch_output<true>("triangular_multiplicative_update: launching output_backward_sm80",
                      problem.mode, problem.tile, params_of(problem), stream);
}

}  // namespace fused_ops::triangular_multiplicative_update
