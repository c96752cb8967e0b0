// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/project_launch.cuh"

namespace fused_ops::triangular_multiplicative_update {

void project_backward_sm80(const ProjectBackwardProblem& problem, CUstream_st* stream) {
  ProjectParams params;
  params.sizes = problem.sizes;
  params.turned = !problem.outgoing;
  params.eps = problem.eps;
  params.pair = problem.pair;
  params.mask = problem.mask;
  params.workspace = static_cast<unsigned char*>(const_cast<void*>(problem.packed));
  params.packed = Packed::of(problem.sizes, problem.mode);
  params.blocks = params.packed.hidden_blocks;
  params.first_pair = problem.first_pair;
  params.count = problem.count;
  params.plane_grad[0] = problem.da;
  params.plane_grad[1] = problem.db;
  params.grad_undo = problem.grad_undo;
  params.grad = problem.grad;
  params.normalised = problem.normalised;
  params.sums = problem.sums;
  launch_project<true>("triangular_multiplicative_update: launching project_backward_sm80",
                       problem.mode, problem.tile, params, stream);
}

}  // namespace fused_ops::triangular_multiplicative_update
