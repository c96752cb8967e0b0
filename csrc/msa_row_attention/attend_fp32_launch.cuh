// SPDX-License-Identifier: Apache-2.0
// Launches attend_fp32_kernel, of a tile, with or without dropout.
#pragma once

#include <limits>

#include "common/launch.h"
#include "msa_row_attention/attend_fp32_sm80.cuh"
#include "msa_row_attention/with_fp32.h"

namespace fused_ops::msa_row_attention {

inline AttendFp32Params attend_fp32_params_of(const AttendProblem& problem) {
  AttendFp32Params p;
  p.projected = static_cast<const float*>(problem.projected);
  p.projection_bias = problem.projection_bias;
  p.bias = static_cast<const float*>(problem.bias);
  p.present = problem.present;
  p.out = static_cast<float*>(problem.out);
  p.log_sums = problem.log_sums;
  p.factors = problem.factors;
  p.dropout = problem.dropout;
  return p;
}

template <Mode mode, int width, int tile, bool dropout = false>
void launch_attend_fp32(const char* what, const Sizes& sizes, AttendFp32Params& p,
                        CUstream_st* stream) {
  constexpr int kRows = kAttendFp32Tiles[tile].rows;
  constexpr int kQueryWarps = kAttendFp32Tiles[tile].query_warps;
  constexpr int kKeysOfTile = fp32_keys_of_tile(tile, width);
  constexpr int kStages = tile > 0 ? 1 : width <= 32 ? 3 : 2;
  using Kernel = AttendFp32<mode, width, kRows, kQueryWarps, kKeysOfTile, kStages, dropout>;
  static_assert(sizeof(typename Kernel::Shared) <= 99 * 1024);
  const std::int64_t row_blocks = ceil_div(sizes.rows, kRows);
  const std::int64_t query_tiles = ceil_div(sizes.n, Kernel::kQueries);
  const std::int64_t blocks = sizes.groups * row_blocks * sizes.heads * query_tiles;
  FO_CHECK_RUNTIME(blocks < std::numeric_limits<int>::max() && sizes.n <= kMostPositions, what,
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
  const auto scale = Fp32Scale::of(sizes.head_dim);
  p.logit_scale = scale.most;
  p.logit_rest = scale.rest;
  p.slack_scale = 1.0f / p.logit_scale;
  launch(what, attend_fp32_kernel<mode, width, kRows, kQueryWarps, kKeysOfTile, kStages, dropout>,
         static_cast<unsigned>(blocks), Kernel::kThreads, sizeof(typename Kernel::Shared), stream,
         p);
}

}  // namespace fused_ops::msa_row_attention
