// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/attend_launch.cuh"

namespace fused_ops::msa_row_attention {

void attend_sm80(const AttendProblem& problem, CUstream_st* stream) {
  AttendParams p;
  p.projected = static_cast<const std::uint16_t*>(problem.projected);
  p.bias = problem.bias;
  p.present = problem.present;
  p.out = static_cast<std::uint16_t*>(problem.out);
  launch_attend<GatedResult>("msa_row_attention: launching attend_sm80", problem.sizes,
                             problem.mode, p, stream);
}

}  // namespace fused_ops::msa_row_attention
