// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/project_sm90a.cuh"

#include "triangular_multiplicative_update/project_launch.cuh"

namespace fused_ops::triangular_multiplicative_update {
namespace {

template <bool kBackward>
void launch_sm90a(const char* what, Mode mode, const ProjectParams& params, CUstream_st* stream) {
  if (params.count == 0) return;
  with_mode(mode, [&](auto mode_of) {
    constexpr Mode kMode = decltype(mode_of)::kMode;
    constexpr std::size_t kShared = sizeof(typename ProjectSm90a<kMode, kBackward>::Shared);
    const auto blocks = static_cast<unsigned>(ceil_div(params.count, 128));
    if constexpr (kBackward) {
      launch(what, project_sm90a_kernel<kMode, true>, blocks, kThreads, kShared, stream, params);
    } else {  // behind the kernel that packs
      launch_dependent<project_sm90a_kernel<kMode, false>>(what, blocks, kThreads, kShared, stream,
                                                           params);
    }
  });
}

}  // namespace

void project_sm90a(const ProjectProblem& problem, CUstream_st* stream) {
  launch_sm90a<false>("triangular_multiplicative_update: launching project_sm90a", problem.mode,
                      params_of(problem), stream);
}

void project_backward_sm90a(const ProjectBackwardProblem& problem, CUstream_st* stream) {
  launch_sm90a<true>("triangular_multiplicative_update: launching project_backward_sm90a",
                     problem.mode, params_of(problem), stream);
}

}  // namespace fused_ops::triangular_multiplicative_update
