// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/queries_backward_sm80.cuh"

#include "common/launch.h"

namespace fused_ops::invariant_point_attention {
namespace {

constexpr const char* kQueriesWhat = "invariant_point_attention: launching queries_backward_sm80";

template <Mode mode, int tiles, int query_warps>
void start_queries(const ScoresBackwardProblem& problem, CUstream_st* stream) {
  using Kernel = QueriesBackward<mode, tiles, query_warps>;
  ScoresParams p = scores_params(problem);
  p.moments = problem.k_moments;
  p.d_moments = problem.d_queries;
  p.moment_pitch = scores_pitch(std::min(p.moment_line, tiles * 8));
  p.moment_room = room_of(p.moment_pitch / 16 - 1);
  const std::int64_t chunks = ceil_div(p.moment_line, tiles * 8);
  const unsigned blocks =
      cut_scores(kQueriesWhat, problem.sizes, p.rows, Kernel::kQueries, chunks, &p);
  launch(kQueriesWhat, queries_backward_kernel<mode, tiles, query_warps>, blocks, kScoresThreads,
         static_cast<std::size_t>(Kernel::shared_bytes(p)), stream, p);
}

template <Mode mode>
void choose_queries(const ScoresBackwardProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  if (moment_line(sizes, mode) > 64) return start_queries<mode, 16, 2>(problem, stream);
  // Tiles of 64 queries read keys half as often, but want blocks enough for the whole device.
  const std::int64_t large = sizes.batch * sizes.heads * ceil_div(problem.block.rows, 64);
  if (large >= std::int64_t{2} * multiprocessors())
    return start_queries<mode, 8, 4>(problem, stream);
  start_queries<mode, 8, 2>(problem, stream);
}

}  // namespace

void queries_backward_sm80(const ScoresBackwardProblem& problem, CUstream_st* stream) {
  if (problem.sizes.nodes() == 0 || problem.block.rows == 0) return;
  FO_CHECK_VALUE(!is_fp32(problem.mode), kQueriesWhat, ": mode must be one of 16 bits");
  problem.mode == Mode::kBFloat16 ? choose_queries<Mode::kBFloat16>(problem, stream)
                                  : choose_queries<Mode::kFloat16>(problem, stream);
}

}  // namespace fused_ops::invariant_point_attention
