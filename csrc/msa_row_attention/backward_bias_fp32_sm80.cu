// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/backward_bias_fp32_sm80.cuh"

#include "msa_row_attention/backward_fp32_launch.cuh"

namespace fused_ops::msa_row_attention {
namespace {

constexpr const char* kBiasFp32 = "msa_row_attention: launching backward_bias_fp32_sm80";

template <Mode mode, int width, bool large>
void launch_bias_fp32(const BackwardProblem& problem, CUstream_st* stream) {
  constexpr BiasFp32Tile kTile = bias_fp32_tile(width, large);
  using Kernel = BackwardBiasFp32<mode, width, kTile.query_warps, kTile.keys, kTile.stages>;
  static_assert(sizeof(typename Kernel::Shared) <= 99 * 1024, "what the least of our devices have");
  const Sizes& sizes = problem.sizes;
  BackwardBiasFp32Params p;
  fill_fp32_params(problem, &p);
  const std::int64_t slabs = bias_fp32_slabs(sizes, multiprocessors());
  const std::int64_t blocks = slabs * bias_fp32_grid(sizes);
  FO_CHECK_RUNTIME(blocks < std::numeric_limits<int>::max() && sizes.n <= kMostPositions, kBiasFp32,
                   " must be given less at a time");
  const bool direct = slabs == 1 && !problem.accumulate;
  FO_CHECK_RUNTIME(direct || problem.partial, kBiasFp32, " must be given room for sums of slabs");
  p.sums = direct ? problem.d_bias : problem.partial;
  p.key_tiles = static_cast<unsigned>(ceil_div(sizes.n, Kernel::kBlockKeys));
  p.query_tiles = static_cast<unsigned>(ceil_div(sizes.n, Kernel::kBlockQueries));
  p.slabs = static_cast<unsigned>(slabs);
  p.rows_of_slab = static_cast<unsigned>(ceil_div(sizes.rows, slabs));
  launch(kBiasFp32,
         backward_bias_fp32_kernel<mode, width, kTile.query_warps, kTile.keys, kTile.stages,
                                   kTile.blocks>,
         static_cast<unsigned>(blocks), Kernel::kThreads, sizeof(typename Kernel::Shared), stream,
         p);
  if (!direct) add_slabs_sm80(problem, slabs, stream);
}

}  // namespace

void backward_bias_fp32_sm80(const BackwardProblem& problem, CUstream_st* stream) {
  with_fp32_mode_and_width(kBiasFp32, problem.sizes, problem.mode,
                           [&](auto mode_of, auto width_of) {
                             constexpr Mode kMode = decltype(mode_of)::value;
                             constexpr int kWidth = decltype(width_of)::value;
                             if (is_large_fp32_bias(problem.sizes.n)) {
                               return launch_bias_fp32<kMode, kWidth, true>(problem, stream);
                             }
                             launch_bias_fp32<kMode, kWidth, false>(problem, stream);
                           });
}

}  // namespace fused_ops::msa_row_attention
