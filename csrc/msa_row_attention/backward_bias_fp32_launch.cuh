// SPDX-License-Identifier: Apache-2.0
// Launches backward_bias_fp32_kernel, of a tile, with or without dropout.
#pragma once

#include "msa_row_attention/backward_bias_fp32_sm80.cuh"
#include "msa_row_attention/backward_fp32_launch.cuh"

namespace fused_ops::msa_row_attention {

template <Mode mode, int width, bool large, bool dropout = false>
void launch_bias_fp32(const char* what, const BackwardProblem& problem, CUstream_st* stream) {
  constexpr BiasFp32Tile kTile = bias_fp32_tile(width, large);
  using Kernel =
      BackwardBiasFp32<mode, width, kTile.query_warps, kTile.keys, kTile.stages, dropout>;
  static_assert(sizeof(typename Kernel::Shared) <= 99 * 1024, "what the least of our devices have");
  const Sizes& sizes = problem.sizes;
  BackwardBiasFp32Params p;
  fill_fp32_params(problem, &p);
  const std::int64_t slabs = bias_fp32_slabs(sizes, multiprocessors(), dropout);
  const std::int64_t blocks = slabs * bias_fp32_grid(sizes, dropout);
  FO_CHECK_RUNTIME(blocks < std::numeric_limits<int>::max() && sizes.n <= kMostPositions, what,
                   " must be given less at a time");
  const bool direct = slabs == 1 && !problem.accumulate;
  FO_CHECK_RUNTIME(direct || problem.partial, what, " must be given room for sums of slabs");
  p.sums = direct ? problem.d_bias : problem.partial;
  p.key_tiles = static_cast<unsigned>(ceil_div(sizes.n, Kernel::kBlockKeys));
  p.query_tiles = static_cast<unsigned>(ceil_div(sizes.n, Kernel::kBlockQueries));
  p.slabs = static_cast<unsigned>(slabs);
  p.rows_of_slab = static_cast<unsigned>(ceil_div(sizes.rows, slabs));
  launch(what,
         backward_bias_fp32_kernel<mode, width, kTile.query_warps, kTile.keys, kTile.stages,
                                   kTile.blocks, dropout>,
         static_cast<unsigned>(blocks), Kernel::kThreads, sizeof(typename Kernel::Shared), stream,
         p);
  if (!direct) add_slabs_sm80(problem, slabs, stream);
}

}  // namespace fused_ops::msa_row_attention
