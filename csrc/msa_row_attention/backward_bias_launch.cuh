// SPDX-License-Identifier: Apache-2.0
// Launches backward_bias_kernel, with or without dropout.
#pragma once

#include "msa_row_attention/backward_bias_sm80.cuh"
#include "msa_row_attention/backward_launch.cuh"

namespace fused_ops::msa_row_attention {

template <Mode mode, int width, bool dropout>
void launch_bias(const char* what, const BackwardProblem& problem, CUstream_st* stream) {
  using Kernel = BackwardBias<mode, width, dropout>;
  static_assert(sizeof(typename Kernel::Shared) <= 99 * 1024, "what the least of our devices have");
  const Sizes& sizes = problem.sizes;
  BackwardBiasParams p;
  static_cast<BackwardParams&>(p) = params_of(problem);
  const std::int64_t slabs = bias_slabs(sizes, multiprocessors(), dropout);
  const std::int64_t blocks = slabs * bias_grid(sizes);
  FO_CHECK_RUNTIME(blocks < std::numeric_limits<int>::max() && sizes.n <= kMostPositions, what,
                   " must be given less at a time");
  const bool direct = slabs == 1 && !problem.accumulate;
  FO_CHECK_RUNTIME(direct || problem.partial, what, " must be given room for sums of slabs");
  p.sums = direct ? problem.d_bias : problem.partial;
  p.attended_stride = sizes.n * sizes.width();
  p.projected_stride = 4 * p.attended_stride;
  p.statistic_stride = sizes.n * sizes.heads;
  p.slabs = static_cast<unsigned>(slabs);
  p.rows_of_slab = static_cast<unsigned>(ceil_div(sizes.rows, slabs));
  launch(what, backward_bias_kernel<mode, width, dropout>, static_cast<unsigned>(blocks),
         Kernel::kThreads, sizeof(typename Kernel::Shared), stream, p);
  if (!direct) add_slabs_sm80(problem, slabs, stream);
}

}  // namespace fused_ops::msa_row_attention
