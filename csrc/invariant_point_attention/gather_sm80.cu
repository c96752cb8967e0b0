// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/gather_fp32_sm80.cuh"

namespace fused_ops::invariant_point_attention {

// The product is one of the type that pair values have, if it is as accurate as the mode's: then
// nothing is converted.
void gather_sm80(const GatherProblem& problem, CUstream_st* stream) {
  constexpr const char* kWhat = "invariant_point_attention: launching gather_sm80";
  FO_CHECK_VALUE(!is_fp32(problem.mode), kWhat, ": mode must be a 16-bit one");
  switch (problem.pair.type) {
    case DType::kBFloat16:
      // Weights of that type would be too coarse for the mode.
      if (problem.mode == Mode::kFloat16) return gather_tf32_sm80(kWhat, problem, stream);
      return launch_gather<Product16<DType::kBFloat16>>(kWhat, problem, stream);
    case DType::kFloat16:
      return launch_gather<Product16<DType::kFloat16>>(kWhat, problem, stream);
    default:
      return gather_tf32_sm80(kWhat, problem, stream);
  }
}

}  // namespace fused_ops::invariant_point_attention
