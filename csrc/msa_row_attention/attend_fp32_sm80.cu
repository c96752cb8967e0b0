// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/attend_fp32_launch.cuh"

namespace fused_ops::msa_row_attention {

void attend_fp32_sm80(const AttendProblem& problem, CUstream_st* stream) {
  AttendFp32Params p;
  p.projected = static_cast<const float*>(problem.projected);
  p.projection_bias = problem.projection_bias;
  p.bias = static_cast<const float*>(problem.bias);
  p.present = problem.present;
  p.out = static_cast<float*>(problem.out);
  launch_attend_fp32<GatedFp32>("msa_row_attention: launching attend_fp32_sm80", problem.sizes,
                                problem.mode, p, stream);
}

}  // namespace fused_ops::msa_row_attention
