// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/attend_fp32_sm80.cuh"

#include <cmath>
#include <limits>

#include "common/launch.h"
#include "msa_row_attention/with_width.h"

namespace fused_ops::msa_row_attention {
namespace {

constexpr const char* kFp32 = "msa_row_attention: launching attend_fp32_sm80";

// The emulation compiles a few kernels, for the time it takes.
constexpr bool is_fp32_compiled(Mode mode, int width) {
#ifdef FUSED_OPS_FEW_KERNELS
  return mode == Mode::kSplit || width == 32;
#else
  return static_cast<int>(mode) >= 2 && width <= kMostDim;
#endif
}

template <Mode mode, int width, int tile>
void run_fp32(const AttendProblem& problem, CUstream_st* stream) {
  constexpr int kRows = kAttendFp32Tiles[tile].rows;
  constexpr int kQueryWarps = kAttendFp32Tiles[tile].query_warps;
  constexpr int kKeysOfTile = fp32_keys_of_tile(tile, width);
  constexpr int kStages = tile > 0 ? 1 : width <= 32 ? 3 : 2;
  using Kernel = AttendFp32<mode, width, kRows, kQueryWarps, kKeysOfTile, kStages>;
  static_assert(sizeof(typename Kernel::Shared) <= 99 * 1024);
  const Sizes& sizes = problem.sizes;
  AttendFp32Params p;
  p.projected = static_cast<const float*>(problem.projected);
  p.projection_bias = problem.projection_bias;
  p.bias = static_cast<const float*>(problem.bias);
  p.present = problem.present;
  p.out = static_cast<float*>(problem.out);
  const std::int64_t row_blocks = ceil_div(sizes.rows, kRows);
  const std::int64_t query_tiles = ceil_div(sizes.n, Kernel::kQueries);
  const std::int64_t blocks = sizes.groups * row_blocks * sizes.heads * query_tiles;
  FO_CHECK_RUNTIME(blocks < std::numeric_limits<int>::max() && sizes.n <= kMostPositions, kFp32,
                   " must be given less at a time");
  p.rows = static_cast<unsigned>(sizes.rows);
  p.row_blocks = static_cast<unsigned>(row_blocks);
  p.query_tiles = static_cast<unsigned>(query_tiles);
  p.heads = static_cast<unsigned>(sizes.heads);
  p.n = static_cast<int>(sizes.n);
  p.tiles = static_cast<int>(ceil_div(sizes.n, kKeysOfTile));
  p.words = static_cast<int>(mask_words(sizes.n));
  p.blocks = static_cast<int>(bias_blocks(sizes.n));
  p.dim = sizes.dim;
  p.width = sizes.width();
  const double scale = 1.4426950408889634 / std::sqrt(static_cast<double>(sizes.head_dim));
  p.logit_scale = static_cast<float>(scale);
  if (p.logit_scale >= scale) p.logit_scale = std::nextafter(p.logit_scale, 0.0f);
  p.logit_rest = static_cast<float>(scale - p.logit_scale);
  p.slack_scale = 1.0f / p.logit_scale;
  launch(kFp32, attend_fp32_kernel<mode, width, kRows, kQueryWarps, kKeysOfTile, kStages>,
         static_cast<unsigned>(blocks), Kernel::kThreads, sizeof(typename Kernel::Shared), stream,
         p);
}

template <Mode mode, int width>
void with_fp32_tile(const AttendProblem& problem, CUstream_st* stream) {
  if constexpr (!is_fp32_compiled(mode, width)) {
    FO_CHECK_RUNTIME(false, "msa_row_attention: width ", width, " must be compiled for the mode");
  } else if (attend_fp32_tile_of(problem.sizes.n) == 0) {
    run_fp32<mode, width, 0>(problem, stream);
  } else {
    run_fp32<mode, width, 1>(problem, stream);
  }
}

template <Mode mode>
void with_fp32_mode(const AttendProblem& problem, CUstream_st* stream) {
  with_width(problem.sizes.dim, [&](auto width_of) {
    with_fp32_tile<mode, decltype(width_of)::value>(problem, stream);
  });
}

}  // namespace

void attend_fp32_sm80(const AttendProblem& problem, CUstream_st* stream) {
  if (problem.sizes.positions() == 0 || problem.sizes.heads == 0) return;
  if (problem.mode == Mode::kSplit) return with_fp32_mode<Mode::kSplit>(problem, stream);
  FO_CHECK_RUNTIME(problem.mode == Mode::kTf32,
                   "msa_row_attention: attend_fp32_sm80 must be given fp32 tensors");
  with_fp32_mode<Mode::kTf32>(problem, stream);
}

}  // namespace fused_ops::msa_row_attention
