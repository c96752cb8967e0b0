// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/queries_backward_fp32_sm80.cuh"

#include "common/launch.h"

namespace fused_ops::invariant_point_attention {
namespace {

constexpr const char* kQueriesFp32What =
    "invariant_point_attention: launching queries_backward_fp32_sm80";

template <Mode mode>
void start_queries_fp32(const ScoresBackwardProblem& problem, CUstream_st* stream) {
  using Kernel = QueriesBackwardFp32<mode>;
  ScoresParams p = scores_params(problem);
  p.moments = problem.k_moments;
  p.d_moments = problem.d_queries;
  p.moment_pitch = scores_fp32_pitch(std::min(p.moment_line, kFp32Columns));
  p.moment_room = room_of(p.moment_pitch / 16 - 2);
  const std::int64_t chunks = ceil_div(p.moment_line, kFp32Columns);
  const unsigned blocks =
      cut_scores(kQueriesFp32What, problem.sizes, p.rows, Kernel::kQueries, chunks, &p);
  launch(kQueriesFp32What, queries_backward_fp32_kernel<mode>, blocks, kScoresThreads,
         static_cast<std::size_t>(Kernel::shared_bytes(p)), stream, p);
}

}  // namespace

void queries_backward_fp32_sm80(const ScoresBackwardProblem& problem, CUstream_st* stream) {
  if (problem.sizes.nodes() == 0 || problem.block.rows == 0) return;
  FO_CHECK_VALUE(is_fp32(problem.mode), kQueriesFp32What, ": mode must be one of fp32");
  problem.mode == Mode::kSplit ? start_queries_fp32<Mode::kSplit>(problem, stream)
                               : start_queries_fp32<Mode::kTf32>(problem, stream);
}

}  // namespace fused_ops::invariant_point_attention
