// SPDX-License-Identifier: Apache-2.0
// gather_sm80.cuh in fp32; also of fp32 pair values of a 16-bit mode, with products of TF32.
#pragma once

#include "invariant_point_attention/gather_sm80.cuh"

namespace fused_ops::invariant_point_attention {

void gather_tf32_sm80(const char* what, const GatherProblem& problem, CUstream_st* stream);

}  // namespace fused_ops::invariant_point_attention
