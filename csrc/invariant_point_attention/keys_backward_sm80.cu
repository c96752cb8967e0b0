// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/keys_backward_sm80.cuh"

#include "common/launch.h"

namespace fused_ops::invariant_point_attention {
namespace {

constexpr const char* kKeysWhat = "invariant_point_attention: launching keys_backward_sm80";

template <Mode mode, int tiles, int key_warps, int queries>
void start_keys(const ScoresBackwardProblem& problem, CUstream_st* stream) {
  using Kernel = KeysBackward<mode, tiles, key_warps, queries>;
  ScoresParams p = scores_params(problem);
  p.moments = problem.q_moments;
  p.d_moments = problem.d_keys;
  p.value_pitch = scores_pitch(p.value_line);
  const int columns = std::min(p.moment_line, tiles * 8);
  p.moment_pitch = scores_pitch(columns);
  p.value_room = room_of(p.value_pitch / 16 - 1);
  p.moment_room = room_of(p.moment_pitch / 16 - 1);
  const std::int64_t chunks = ceil_div(std::max(p.d_value_line, p.moment_line), tiles * 8);
  const unsigned blocks = cut_scores(kKeysWhat, problem.sizes, p.n, Kernel::kKeys, chunks, &p);
  const int bytes = Kernel::shared_bytes(p);
  FO_CHECK_RUNTIME(bytes <= kMostScoresShared, kKeysWhat, ": shared memory must fit, got ", bytes);
  launch(kKeysWhat, keys_backward_kernel<mode, tiles, key_warps, queries>, blocks, kScoresThreads,
         static_cast<std::size_t>(bytes), stream, p);
}

template <Mode mode>
void choose_keys(const ScoresBackwardProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  if (std::max(d_value_line(sizes), moment_line(sizes, mode)) > 64) {
    return start_keys<mode, 16, 2, 32>(problem, stream);
  }
  // Tiles of 64 keys read queries half as often, but want blocks enough for the whole device.
  const std::int64_t large = sizes.batch * sizes.heads * ceil_div(sizes.n, 64);
  if (large >= std::int64_t{2} * multiprocessors()) {
    return start_keys<mode, 8, 4, 64>(problem, stream);
  }
  start_keys<mode, 8, 2, 64>(problem, stream);
}

}  // namespace

void keys_backward_sm80(const ScoresBackwardProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  if (sizes.nodes() == 0) return;
  if (problem.block.rows == 0 && problem.accumulate) return;
  FO_CHECK_VALUE(!is_fp32(problem.mode), kKeysWhat, ": mode must be one of 16 bits");
  problem.mode == Mode::kBFloat16 ? choose_keys<Mode::kBFloat16>(problem, stream)
                                  : choose_keys<Mode::kFloat16>(problem, stream);
}

}  // namespace fused_ops::invariant_point_attention
