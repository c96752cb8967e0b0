// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/output_sm90a.cuh"

#include <algorithm>

#include "triangular_multiplicative_update/output_backward_resident_sm90a.cuh"
#include "triangular_multiplicative_update/output_launch.cuh"

namespace fused_ops::triangular_multiplicative_update {
namespace {

template <Mode mode, bool kBackward>
void launch_groups(const char* what, const OutputParams& params, CUstream_st* stream) {
  if (params.count == 0) return;
  launch(what, output_sm90a_kernel<mode, kBackward>,
         static_cast<unsigned>(ceil_div(params.count, 128)), kThreads,
         sizeof(typename OutputSm90a<mode, kBackward>::Shared), stream, params);
}

template <bool wide>
void launch_resident(const char* what, const OutputParams& params, CUstream_st* stream) {
  using Kernel = OutputResident<wide>;
  if (params.count == 0) return;
  const std::int64_t tiles = ceil_div(params.count, Kernel::kRows);
  launch(what, output_resident_kernel<wide>,
         static_cast<unsigned>(std::min<std::int64_t>(tiles, multiprocessors())), kResidentThreads,
         sizeof(typename Kernel::Shared), stream, params);
}

}  // namespace

void output_sm90a(const OutputProblem& problem, CUstream_st* stream) {
  constexpr const char* kWhat = "triangular_multiplicative_update: launching output_sm90a";
  const OutputParams params = params_of(problem);
  switch (problem.mode) {
    case Mode::kBFloat16:
      if (!is_walkable(problem.pair, problem.sizes, problem.mode)) {
        return output_sm80(problem, stream);
      }
      return problem.pair.type == DType::kFloat32 ? launch_resident<true>(kWhat, params, stream)
                                                  : launch_resident<false>(kWhat, params, stream);
    case Mode::kFloat16:
      return launch_groups<Mode::kFloat16, false>(kWhat, params, stream);
    case Mode::kTf32:
      return launch_groups<Mode::kTf32, false>(kWhat, params, stream);
    case Mode::kSplit:
      return launch_groups<Mode::kSplit, false>(kWhat, params, stream);
  }
}

void output_backward_sm90a(const OutputBackwardProblem& problem, CUstream_st* stream) {
  constexpr const char* kWhat = "triangular_multiplicative_update: launching output_backward_sm90a";
  const OutputParams params = params_of(problem);
  if (problem.resident_blocks > 0) {
    FO_CHECK_RUNTIME(is_walkable(problem.out_grad, problem.sizes, problem.mode) &&
                         problem.out_grad.type == DType::kBFloat16,
                     kWhat, ": out_grad must have aligned rows of bf16");
    return launch(kWhat, output_backward_resident_kernel,
                  static_cast<unsigned>(problem.resident_blocks), kResidentThreads,
                  sizeof(OutputBackwardResident::Shared), stream, params);
  }
  with_mode(problem.mode, [&](auto mode_of) {
    launch_groups<decltype(mode_of)::kMode, true>(kWhat, params, stream);
  });
}

}  // namespace fused_ops::triangular_multiplicative_update
