// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/attend_statistics_fp32_sm80.cuh"

#include "msa_row_attention/attend_fp32_launch.cuh"
#include "msa_row_attention/backward.h"

namespace fused_ops::msa_row_attention {

void attend_statistics_fp32_sm80(const BackwardProblem& problem, CUstream_st* stream) {
  StatisticsFp32Params p;
  p.projected = static_cast<const float*>(problem.projected);
  p.projection_bias = problem.projection_bias;
  p.bias = static_cast<const float*>(problem.bias);
  p.present = problem.present;
  p.out = static_cast<float*>(problem.gated);
  p.d_gated = static_cast<const float*>(problem.d_gated);
  p.d_attended = static_cast<float*>(problem.d_attended);
  p.d_projected = static_cast<float*>(problem.d_projected);
  p.log_sums = problem.log_sums;
  p.row_dots = problem.row_dots;
  launch_attend_fp32<StatisticsFp32>("msa_row_attention: launching attend_statistics_fp32_sm80",
                                     problem.sizes, problem.mode, p, stream);
}

}  // namespace fused_ops::msa_row_attention
