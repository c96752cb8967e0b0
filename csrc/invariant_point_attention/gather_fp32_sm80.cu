// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/gather_fp32_sm80.cuh"

namespace fused_ops::invariant_point_attention {

void gather_tf32_sm80(const char* what, const GatherProblem& problem, CUstream_st* stream) {
  launch_gather<Product32<false>>(what, problem, stream);
}

void gather_fp32_sm80(const GatherProblem& problem, CUstream_st* stream) {
  constexpr const char* kWhat = "invariant_point_attention: launching gather_fp32_sm80";
  FO_CHECK_VALUE(is_fp32(problem.mode), kWhat, ": mode must be an fp32 one");
  if (problem.mode == Mode::kTf32) return gather_tf32_sm80(kWhat, problem, stream);
  launch_gather<Product32<true>>(kWhat, problem, stream);
}

}  // namespace fused_ops::invariant_point_attention
