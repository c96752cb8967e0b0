// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/attend_statistics_sm80.cuh"

#include "msa_row_attention/attend_launch.cuh"
#include "msa_row_attention/backward.h"

namespace fused_ops::msa_row_attention {

void attend_statistics_sm80(const BackwardProblem& problem, CUstream_st* stream) {
  StatisticsParams p;
  p.projected = static_cast<const std::uint16_t*>(problem.projected);
  p.bias = problem.bias;
  p.present = problem.present;
  p.out = static_cast<std::uint16_t*>(problem.gated);
  p.d_gated = static_cast<const std::uint16_t*>(problem.d_gated);
  p.d_attended = static_cast<std::uint16_t*>(problem.d_attended);
  p.d_projected = static_cast<std::uint16_t*>(problem.d_projected);
  p.log_sums = problem.log_sums;
  p.row_dots = problem.row_dots;
  launch_attend<Statistics>("msa_row_attention: launching attend_statistics_sm80", problem.sizes,
                            problem.mode, p, stream);
}

}  // namespace fused_ops::msa_row_attention
