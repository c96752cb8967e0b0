// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/keys_backward_fp32_sm80.cuh"

#include "common/launch.h"

namespace fused_ops::invariant_point_attention {
namespace {

constexpr const char* kKeysFp32What =
    "invariant_point_attention: launching keys_backward_fp32_sm80";

template <Mode mode, int queries>
bool start_keys_fp32(const ScoresBackwardProblem& problem, CUstream_st* stream) {
  using Kernel = KeysBackwardFp32<mode, queries>;
  ScoresParams p = scores_params(problem);
  p.moments = problem.q_moments;
  p.d_moments = problem.d_keys;
  p.value_pitch = scores_fp32_pitch(p.value_line);
  p.moment_pitch = scores_fp32_pitch(std::min(p.moment_line, kFp32Columns));
  p.value_room = room_of(p.value_pitch / 16 - 2);
  p.moment_room = room_of(p.moment_pitch / 16 - 2);
  const int bytes = Kernel::shared_bytes(p);
  if (bytes > kMostScoresShared) return false;
  const std::int64_t chunks = ceil_div(std::max(p.d_value_line, p.moment_line), kFp32Columns);
  const unsigned blocks = cut_scores(kKeysFp32What, problem.sizes, p.n, Kernel::kKeys, chunks, &p);
  launch(kKeysFp32What, keys_backward_fp32_kernel<mode, queries>, blocks, kScoresThreads,
         static_cast<std::size_t>(bytes), stream, p);
  return true;
}

template <Mode mode>
void choose_keys_fp32(const ScoresBackwardProblem& problem, CUstream_st* stream) {
  // Of wide heads a stage has fewer queries.
  const bool fits =
      start_keys_fp32<mode, 32>(problem, stream) || start_keys_fp32<mode, 16>(problem, stream);
  FO_CHECK_RUNTIME(fits, kKeysFp32What, ": heads must fit shared memory");
}

}  // namespace

void keys_backward_fp32_sm80(const ScoresBackwardProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  if (sizes.nodes() == 0) return;
  if (problem.block.rows == 0 && problem.accumulate) return;
  FO_CHECK_VALUE(is_fp32(problem.mode), kKeysFp32What, ": mode must be one of fp32");
  problem.mode == Mode::kSplit ? choose_keys_fp32<Mode::kSplit>(problem, stream)
                               : choose_keys_fp32<Mode::kTf32>(problem, stream);
}

}  // namespace fused_ops::invariant_point_attention
