// SPDX-License-Identifier: Apache-2.0
// From a problem to the grid and the shared memory of the pair gradient's kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.h"
#include "invariant_point_attention/pair_backward_pieces.cuh"

namespace fused_ops::invariant_point_attention {

// How the channels are shared out: `chunks` blocks of `warps` warps.
struct PairWarps {
  int warps, chunks;

  static PairWarps of(int channels) {
    const auto columns = static_cast<int>(ceil_div(channels, kPairChannels));
    const auto chunks = static_cast<int>(ceil_div(columns, kPairMostWarps));
    return {static_cast<int>(ceil_div(columns, chunks)), chunks};
  }

  // Blocks of a chunk for so many warps of a multiprocessor.
  int parts_for(int warps_of_multiprocessor) const {
    return multiprocessors() * std::max(1, warps_of_multiprocessor / (warps * chunks));
  }
};

inline PairAccess pair_access(const PairBackwardProblem& problem) {
  const Pairs& pair = problem.pair;
  const std::int64_t size = bytes_of(pair.type);
  // All whose multiples are added to an address; those of axes of length 1 are not.
  auto steps = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(pair.data));
  if (problem.sizes.batch > 1) steps |= static_cast<std::uint64_t>(pair.batch_stride * size);
  if (problem.sizes.n > 1) {
    steps |= static_cast<std::uint64_t>(pair.i_stride * size);
    steps |= static_cast<std::uint64_t>(pair.j_stride * size);
  }
  if (steps % 16 != 0 || problem.channels % 8 != 0) return PairAccess::kNumbers;
  return pair.type == type_of(problem.mode) ? PairAccess::kCopied : PairAccess::kConverted;
}

inline bool writes_whole_lines(const PairBackwardProblem& problem) {
  const int line = problem.channels * bytes_of(problem.grad_type);
  return (reinterpret_cast<std::uintptr_t>(problem.grad) | static_cast<std::uintptr_t>(line)) %
             16 ==
         0;
}

template <DType type>
void launch_pair_backward(const char* what, void (*kernel)(PairBackwardParams),
                          const PairBackwardProblem& problem, CUstream_st* stream) {
  using Block = PairBackwardBlock<type>;
  const Sizes& sizes = problem.sizes;
  const PairWarps warps = PairWarps::of(problem.channels);
  PairBackwardParams params;
  params.problem = problem;
  params.n = static_cast<int>(sizes.n);
  params.key_tiles = static_cast<int>(ceil_div(sizes.n, Block::kPairKeys));
  params.warps = warps.warps;
  params.chunks = warps.chunks;
  params.access = pair_access(problem);
  params.whole_lines = writes_whole_lines(problem);
  params.logits_at = problem.d_logits ? Block::kScoreBytes : 0;
  params.log_sums_at = params.logits_at + (problem.d_features ? Block::kLogitBytes : 0);
  params.pairs_at = params.log_sums_at + (problem.d_features ? Block::kLogSumBytes : 0);
  params.stage_bytes = params.pairs_at + (problem.sums ? warps.warps * Block::kPairBytes : 0);

  const std::int64_t tiles = sizes.batch * problem.block.rows * params.key_tiles;
  // Without sums as many parts as run at once, for which registers decide.
  const int most = warps.parts_for(type == DType::kFloat32 ? 8 : 12);
  const std::int64_t parts = problem.sums ? problem.parts : std::min<std::int64_t>(tiles, most);
  params.share = tiles / parts;
  params.longer = tiles % parts;
  launch(what, kernel, static_cast<unsigned>(parts * warps.chunks), warps.warps * 32,
         kPairStages * params.stage_bytes, stream, params);
}

// Whether there is something to do. Throws where the problem makes no sense.
inline bool is_pair_backward(const char* what, const PairBackwardProblem& problem) {
  const Sizes& sizes = problem.sizes;
  if (sizes.heads == 0 || problem.channels == 0) return false;
  FO_CHECK_RUNTIME(sizes.heads <= kPairHeads, what, " must be given up to ", kPairHeads,
                   " heads, got ", sizes.heads);
  FO_CHECK_RUNTIME(!problem.sums || (problem.d_logits && problem.parts > 0), what,
                   " must be given dS and parts with the sums");
  FO_CHECK_RUNTIME(!problem.d_features || problem.channels == sizes.value_channels, what,
                   " must be given as many channels as pair values have, got ", problem.channels);
  FO_CHECK_RUNTIME(!problem.accumulate || problem.grad_type == DType::kFloat32, what,
                   " must be given fp32 sums to add to");
  const bool empty = sizes.batch == 0 || sizes.n == 0 || problem.block.rows == 0;
  // Sums of nothing are zeros, which somebody must write.
  if (empty) return problem.sums && !problem.add_sums;
  return problem.sums || (problem.grad && (problem.d_logits || problem.d_features));
}

}  // namespace fused_ops::invariant_point_attention
