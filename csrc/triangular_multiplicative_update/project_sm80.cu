// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/project_launch.cuh"

namespace fused_ops::triangular_multiplicative_update {

void project_sm80(const ProjectProblem& problem, CUstream_st* stream) {
  launch_project<false>("triangular_multiplicative_update: launching project_sm80", problem.mode,
                        problem.tile, params_of(problem), stream);
}

}  // namespace fused_ops::triangular_multiplicative_update
