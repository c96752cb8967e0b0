// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/project_sm90a.cuh"

#include <algorithm>

#include "triangular_multiplicative_update/project_backward_resident_sm90a.cuh"
#include "triangular_multiplicative_update/project_launch.cuh"

namespace fused_ops::triangular_multiplicative_update {
namespace {

void launch_split(const ProjectParams& params, CUstream_st* stream) {
  if (params.count == 0) return;
  launch_dependent<project_sm90a_kernel<Mode::kSplit, false>>(
      "triangular_multiplicative_update: launching project_sm90a",
      static_cast<unsigned>(ceil_div(params.count, 128)), kThreads,
      sizeof(typename ProjectSm90a<Mode::kSplit, false>::Shared), stream, params);
}

void launch_backward(Mode mode, const ProjectParams& params, CUstream_st* stream) {
  if (params.count == 0) return;
  with_mode(mode, [&](auto mode_of) {
    constexpr Mode kMode = decltype(mode_of)::kMode;
    launch("triangular_multiplicative_update: launching project_backward_sm90a",
           project_sm90a_kernel<kMode, true>, static_cast<unsigned>(ceil_div(params.count, 128)),
           kThreads, sizeof(typename ProjectSm90a<kMode, true>::Shared), stream, params);
  });
}

template <Mode mode, bool wide>
void launch_resident(ProjectParams params, CUstream_st* stream) {
  using Kernel = ProjectResident<mode, wide>;
  params.pair = in_planes(params.pair, params.turned);
  params.mask = in_planes(params.mask, params.turned);
  if (params.count == 0) return;
  const std::int64_t tiles = ceil_div(params.count, Kernel::kRows);
  launch_dependent<project_resident_kernel<mode, wide>>(
      "triangular_multiplicative_update: launching project_sm90a",
      static_cast<unsigned>(std::min<std::int64_t>(tiles, multiprocessors())), kResidentThreads,
      sizeof(typename Kernel::Shared), stream, params);
}

}  // namespace

void project_sm90a(const ProjectProblem& problem, CUstream_st* stream) {
  if (problem.mode != Mode::kSplit && !is_walkable(problem.pair, problem.sizes, problem.mode)) {
    return project_sm80(problem, stream);
  }
  const ProjectParams params = params_of(problem);
  const bool wide = problem.pair.type == DType::kFloat32;
  switch (problem.mode) {
    case Mode::kBFloat16:
      return wide ? launch_resident<Mode::kBFloat16, true>(params, stream)
                  : launch_resident<Mode::kBFloat16, false>(params, stream);
    case Mode::kFloat16:
      return wide ? launch_resident<Mode::kFloat16, true>(params, stream)
                  : launch_resident<Mode::kFloat16, false>(params, stream);
    case Mode::kTf32:
      return launch_resident<Mode::kTf32, true>(params, stream);
    case Mode::kSplit:
      return launch_split(params, stream);
  }
}

void project_backward_sm90a(const ProjectBackwardProblem& problem, CUstream_st* stream) {
  if (problem.resident_blocks > 0) {
    ProjectParams params = params_of(problem);
    params.pair = in_planes(params.pair, params.turned);
    params.mask = in_planes(params.mask, params.turned);
    return launch("triangular_multiplicative_update: launching project_backward_sm90a",
                  project_backward_resident_kernel, static_cast<unsigned>(problem.resident_blocks),
                  ProjectBackwardResident::kThreads, sizeof(ProjectBackwardResident::Shared),
                  stream, params);
  }
  launch_backward(problem.mode, params_of(problem), stream);
}

}  // namespace fused_ops::triangular_multiplicative_update
