// SPDX-License-Identifier: Apache-2.0
// What launchers of the logits share.
#pragma once

#include "common/launch.h"
#include "invariant_point_attention/logits_kernel.cuh"

namespace fused_ops::invariant_point_attention {

template <Mode mode, int queries>
void launch_tiles(LogitsParams params, CUstream_st* stream) {
  const LogitsProblem& problem = params.problem;
  params.query_tiles = ceil_div(problem.block.rows, queries);
  params.key_tiles = ceil_div(problem.sizes.n, kTileKeys);
  const std::int64_t blocks = problem.sizes.batch * params.query_tiles * params.key_tiles;
  FO_CHECK_VALUE(blocks < std::int64_t{1} << 31,
                 "invariant_point_attention: tiles of logits must be fewer than 2^31, got ",
                 blocks);
  launch("launching the logits of invariant_point_attention", logits_kernel<mode, queries>,
         static_cast<unsigned>(blocks), kPairThreads, sizeof(LogitsShared<queries>), stream,
         params);
}

template <Mode mode>
void launch_logits(const LogitsProblem& problem, CUstream_st* stream) {
  const Sizes& s = problem.sizes;
  if (s.nodes() == 0 || problem.block.rows == 0) return;
  FO_CHECK_VALUE(s.heads >= 1 && s.heads <= kMostHeads,
                 "invariant_point_attention: heads must be 1 to ", kMostHeads, ", got ", s.heads);
  LogitsParams params;
  params.problem = problem;
  params.whole = whole_lines(problem.pair, s, s.pair_channels);
  params.whole_weights = s.pair_channels % 8 == 0 &&
                         reinterpret_cast<std::uintptr_t>(problem.bias.weight.data) % 16 == 0;
  params.streams = params.whole && problem.pair.type == type_of(mode) &&
                   s.pair_channels <= PairOperands<mode>::kChunk;
  // Large tiles where they come near to filling the device, which holds four for each
  // multiprocessor.
  const std::int64_t large = s.batch * ceil_div(problem.block.rows, 16) * ceil_div(s.n, kTileKeys);
  if (large >= std::int64_t{3} * multiprocessors()) {
    launch_tiles<mode, 16>(params, stream);
  } else {
    launch_tiles<mode, 8>(params, stream);
  }
}

}  // namespace fused_ops::invariant_point_attention
