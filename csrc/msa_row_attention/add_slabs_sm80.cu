// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/add_slabs_sm80.cuh"

#include <algorithm>

#include "common/launch.h"
#include "msa_row_attention/backward.h"

namespace fused_ops::msa_row_attention {

void add_slabs_sm80(const BackwardProblem& problem, std::int64_t slabs, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  AddSlabsParams p;
  p.partial = problem.partial;
  p.sums = problem.d_bias;
  p.size = sizes.groups * sizes.heads * sizes.n * sizes.n;
  p.slabs = static_cast<int>(slabs);
  p.accumulate = problem.accumulate;
  const std::int64_t most = std::int64_t{8} * multiprocessors();
  launch("msa_row_attention: launching add_slabs_sm80", add_slabs_kernel,
         static_cast<unsigned>(std::min(ceil_div(p.size, kAddSlabsThreads), most)),
         kAddSlabsThreads, 0, stream, p);
}

}  // namespace fused_ops::msa_row_attention
