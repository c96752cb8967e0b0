// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/output_sm90a.cuh"

#include "triangular_multiplicative_update/output_launch.cuh"

namespace fused_ops::triangular_multiplicative_update {
namespace {

template <bool kBackward>
void launch_sm90a(const char* what, Mode mode, const OutputParams& params, CUstream_st* stream) {
  if (params.count == 0) return;
  with_mode(mode, [&](auto mode_of) {
    constexpr Mode kMode = decltype(mode_of)::kMode;
    constexpr std::size_t kShared = sizeof(typename OutputSm90a<kMode, kBackward>::Shared);
    const auto blocks = static_cast<unsigned>(ceil_div(params.count, 128));
    launch(what, output_sm90a_kernel<kMode, kBackward>, blocks, kThreads, kShared, stream, params);
  });
}

}  // namespace

void output_sm90a(const OutputProblem& problem, CUstream_st* stream) {
  launch_sm90a<false>("triangular_multiplicative_update: launching output_sm90a", problem.mode,
                      params_of(problem), stream);
}

void output_backward_sm90a(const OutputBackwardProblem& problem, CUstream_st* stream) {
  launch_sm90a<true>("triangular_multiplicative_update: launching output_backward_sm90a",
                     problem.mode, params_of(problem), stream);
}

}  // namespace fused_ops::triangular_multiplicative_update
