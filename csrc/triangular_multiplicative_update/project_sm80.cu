// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/project_launch.cuh"

namespace fused_ops::triangular_multiplicative_update {

void project_sm80(const ProjectProblem& problem, CUstream_st* stream) {
  ProjectParams params;
  params.sizes = problem.sizes;
  params.turned = !problem.outgoing;
  params.eps = problem.eps;
  params.pair = problem.pair;
  params.mask = problem.mask;
  params.needs_largest = needs_largest(problem.mask, problem.mode);
  params.workspace = static_cast<unsigned char*>(const_cast<void*>(problem.packed));
  params.packed = Packed::of(problem.sizes, problem.mode);
  params.first_block = problem.first_block;
  params.blocks = problem.blocks;
  for (int part = 0; part < 2; ++part) {
    params.plane[0][part] = problem.a[part];
    params.plane[1][part] = problem.b[part];
  }
  params.count = problem.sizes.pairs();
  launch_project<false>("triangular_multiplicative_update: launching project_sm80", problem.mode,
                        problem.tile, params, stream);
}

}  // namespace fused_ops::triangular_multiplicative_update
