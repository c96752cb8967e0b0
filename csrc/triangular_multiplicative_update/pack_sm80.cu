// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/pack_sm80.cuh"

#include "common/launch.h"
#include "triangular_multiplicative_update/large.h"

namespace fused_ops::triangular_multiplicative_update {

void pack_sm80(const PackProblem& problem, CUstream_st* stream) {
  PackParams params;
  params.sizes = problem.sizes;
  params.mode = problem.mode;
  params.weights = problem.weights;
  params.mask = problem.mask;
  params.needs_largest = needs_largest(problem.mask, problem.mode);
  params.packed = Packed::of(problem.sizes, problem.mode);
  params.workspace = static_cast<unsigned char*>(problem.workspace);
  const int blocks =
      pack_lines(params.packed) / kPackWarps + (params.needs_largest ? kMaskBlocks : 0);
  launch("triangular_multiplicative_update: launching pack_sm80", pack_kernel,
         static_cast<unsigned>(blocks), kPackThreads, sizeof(PackShared), stream, params);
}

}  // namespace fused_ops::triangular_multiplicative_update
