// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/settle_dots_sm80.cuh"

#include "common/launch.h"

namespace fused_ops::invariant_point_attention {

void settle_dots_sm80(const SettleDotsProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  const std::int64_t lines = sizes.batch * sizes.heads * problem.block.rows;
  if (lines == 0 || sizes.n == 0) return;
  launch("launching settle_dots of invariant_point_attention", settle_dots_kernel,
         static_cast<unsigned>(ceil_div(lines, kSettleThreads / 32)), kSettleThreads, 0, stream,
         problem);
}

}  // namespace fused_ops::invariant_point_attention
