// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/attend_sm80.cuh"

#include <cmath>
#include <limits>

#include "common/launch.h"
#include "msa_row_attention/config.h"
#include "msa_row_attention/with_width.h"

namespace fused_ops::msa_row_attention {
namespace {

constexpr const char* kWhat = "msa_row_attention: launching attend_sm80";

// The emulation compiles a few kernels, for the time it takes.
constexpr bool is_compiled(Mode mode, int width) {
#ifdef FUSED_OPS_FEW_KERNELS
  return mode == Mode::kBFloat16 || width == 32;
#else
  return static_cast<int>(mode) < 2 && width <= kMostDim;
#endif
}

template <Mode mode, int width, int tile>
void run(const AttendProblem& problem, CUstream_st* stream) {
  constexpr int kRows = kAttendTiles[tile].rows;
  constexpr int kQueryWarps = kAttendTiles[tile].query_warps;
  constexpr int kQueryTiles = queries_of_warp(width) / 16;
  constexpr bool kOneTile = tile > 0 && width <= 64;  // of keys
  constexpr int kStages = kOneTile ? 1 : 2;
  using Kernel = Attend<mode, width, kRows, kQueryWarps, kQueryTiles, kStages>;
  const Sizes& sizes = problem.sizes;
  AttendParams p;
  p.projected = static_cast<const std::uint16_t*>(problem.projected);
  p.bias = problem.bias;
  p.present = problem.present;
  p.out = static_cast<std::uint16_t*>(problem.out);
  const std::int64_t row_blocks = ceil_div(sizes.rows, kRows);
  const std::int64_t query_tiles = ceil_div(sizes.n, Kernel::kQueries);
  const std::int64_t blocks = sizes.groups * row_blocks * sizes.heads * query_tiles;
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  FO_CHECK_RUNTIME(blocks < kMost && sizes.all_rows() < kMost && sizes.n <= kMostPositions, kWhat,
                   " must be given less at a time");
  p.rows = static_cast<unsigned>(sizes.rows);
  p.row_blocks = static_cast<unsigned>(row_blocks);
  p.query_tiles = static_cast<unsigned>(query_tiles);
  p.heads = static_cast<unsigned>(sizes.heads);
  p.n = static_cast<int>(sizes.n);
  p.tiles = static_cast<unsigned>(mask_words(sizes.n));
  p.blocks = static_cast<int>(bias_blocks(sizes.n));
  p.dim = sizes.dim;
  p.width = sizes.width();
  p.logit_scale = kLog2E / std::sqrt(static_cast<float>(sizes.head_dim));
  p.slack_scale = 1.0f / p.logit_scale;
  launch(kWhat, attend_kernel<mode, width, kRows, kQueryWarps, kQueryTiles, kStages>,
         static_cast<unsigned>(blocks), Kernel::kThreads, sizeof(typename Kernel::Shared), stream,
         p);
}

template <Mode mode, int width>
void with_tile(const AttendProblem& problem, CUstream_st* stream) {
  if constexpr (!is_compiled(mode, width)) {
    FO_CHECK_RUNTIME(false, "msa_row_attention: width ", width, " must be compiled for the mode");
  } else {
    switch (attend_tile_of(problem.sizes.n, width)) {
      case 0:
        return run<mode, width, 0>(problem, stream);
      case 1:
        return run<mode, width, 1>(problem, stream);
      default:
        if constexpr (width <= 64) return run<mode, width, 2>(problem, stream);
    }
  }
}

template <Mode mode>
void with_mode(const AttendProblem& problem, CUstream_st* stream) {
  with_width(problem.sizes.dim,
             [&](auto width_of) { with_tile<mode, decltype(width_of)::kWidth>(problem, stream); });
}

}  // namespace

void attend_sm80(const AttendProblem& problem, CUstream_st* stream) {
  if (problem.sizes.positions() == 0 || problem.sizes.heads == 0) return;
  if (problem.mode == Mode::kBFloat16) return with_mode<Mode::kBFloat16>(problem, stream);
  FO_CHECK_RUNTIME(problem.mode == Mode::kFloat16,
                   "msa_row_attention: attend_sm80 must be given 16-bit tensors");
  with_mode<Mode::kFloat16>(problem, stream);
}

}  // namespace fused_ops::msa_row_attention
