// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/pair_backward_fp32_sm80.cuh"

#include "invariant_point_attention/pair_backward_launch.cuh"

namespace fused_ops::invariant_point_attention {

void pair_backward_fp32_sm80(const PairBackwardProblem& problem, CUstream_st* stream) {
  constexpr const char* kWhat = "invariant_point_attention: launching pair_backward_fp32";
  if (!is_pair_backward(kWhat, problem)) return;
  FO_CHECK_RUNTIME(is_fp32(problem.mode), kWhat, " must be given a mode of fp32 tensors");
  if (problem.mode == Mode::kSplit) {
    launch_pair_backward<DType::kFloat32>(kWhat, pair_backward_fp32_kernel<Mode::kSplit>, problem,
                                          stream);
  } else {
    launch_pair_backward<DType::kFloat32>(kWhat, pair_backward_fp32_kernel<Mode::kTf32>, problem,
                                          stream);
  }
}

}  // namespace fused_ops::invariant_point_attention
