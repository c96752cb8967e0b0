// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/split_plane_sm80.cuh"

#include "common/launch.h"

namespace fused_ops::triangular_multiplicative_update {

void split_plane_sm80(const SplitPlaneProblem& problem, CUstream_st* stream) {
  SplitPlaneParams params;
  params.problem = problem;
  params.pairs = problem.sizes.pairs();
  params.slabs = static_cast<unsigned>(ceil_div(params.pairs, kSplitPlaneSlab));
  const unsigned grid = params.slabs * static_cast<unsigned>(problem.sizes.hidden);
  if (grid == 0) return;
  launch("triangular_multiplicative_update: launching split_plane", split_plane_kernel, grid,
         kSplitPlaneThreads, 0, stream, params);
}

}  // namespace fused_ops::triangular_multiplicative_update
