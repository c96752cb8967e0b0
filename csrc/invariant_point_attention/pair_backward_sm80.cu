// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/pair_backward_sm80.cuh"

#include <algorithm>
#include <cstdint>

#include "invariant_point_attention/pair_backward_launch.cuh"

namespace fused_ops::invariant_point_attention {

// As many as run at once: with twelve warps on a multiprocessor (eight and sixteen were slower), of
// fp32 with eight.
int pair_sum_parts(const Sizes& sizes, Mode mode) {
  const std::int64_t tiles = sizes.batch * sizes.n * ceil_div(sizes.n, pair_keys(DType::kBFloat16));
  const int most =
      PairWarps::of(std::max(1, sizes.pair_channels)).parts_for(is_fp32(mode) ? 8 : 12);
  return static_cast<int>(std::clamp<std::int64_t>(tiles, 1, most));
}

void pair_backward_sm80(const PairBackwardProblem& problem, CUstream_st* stream) {
  constexpr const char* kWhat = "invariant_point_attention: launching pair_backward";
  if (!is_pair_backward(kWhat, problem)) return;
  FO_CHECK_RUNTIME(!is_fp32(problem.mode), kWhat, " must be given a 16-bit mode");
  if (problem.mode == Mode::kBFloat16) {
    launch_pair_backward<DType::kBFloat16>(kWhat, pair_backward_kernel<Mode::kBFloat16>, problem,
                                           stream);
  } else {
    launch_pair_backward<DType::kFloat16>(kWhat, pair_backward_kernel<Mode::kFloat16>, problem,
                                          stream);
  }
}

}  // namespace fused_ops::invariant_point_attention
