// SPDX-License-Identifier: Apache-2.0
// What the launchers of the backward's kernels for fp32 tensors share.
#pragma once

#include "msa_row_attention/backward_fp32_config.h"
#include "msa_row_attention/backward_fp32_pieces.cuh"
#include "msa_row_attention/backward_launch.cuh"
#include "msa_row_attention/with_fp32.h"

namespace fused_ops::msa_row_attention {

inline void fill_fp32_params(const BackwardProblem& problem, BackwardFp32Params* p) {
  static_cast<BackwardParams&>(*p) = params_of(problem);
  p->projected = static_cast<const float*>(problem.projected);
  p->bias = static_cast<const float*>(problem.bias);
  p->d_attended = static_cast<const float*>(problem.d_attended);
  p->d_projected = static_cast<float*>(problem.d_projected);
  const auto scale = Fp32Scale::of(problem.sizes.head_dim);
  p->logit_scale = scale.most;
  p->logit_rest = scale.rest;
}

}  // namespace fused_ops::msa_row_attention
