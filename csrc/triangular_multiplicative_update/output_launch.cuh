// SPDX-License-Identifier: Apache-2.0
// Forward and backward are compiled apart, for the time it takes.
#pragma once

#include "triangular_multiplicative_update/output_sm80.cuh"
#include "triangular_multiplicative_update/with_kernel.cuh"

namespace fused_ops::triangular_multiplicative_update {

inline OutputParams params_of(const OutputProblem& problem) {
  OutputParams params;
  params.sizes = problem.sizes;
  params.every_thread_arrives = every_thread_arrives();
  params.eps = problem.eps;
  params.gate_normalized = problem.gate_normalized;
  params.pair = problem.pair;
  params.workspace = static_cast<unsigned char*>(const_cast<void*>(problem.packed));
  params.packed = Packed::of(problem.sizes, problem.mode);
  params.o = problem.o;
  params.count = problem.sizes.pairs();
  params.out = problem.out;
  return params;
}

inline OutputParams params_of(const OutputBackwardProblem& problem) {
  OutputParams params;
  params.sizes = problem.sizes;
  params.every_thread_arrives = every_thread_arrives();
  params.eps = problem.eps;
  params.gate_normalized = problem.gate_normalized;
  params.pair = problem.pair;
  params.workspace = static_cast<unsigned char*>(const_cast<void*>(problem.packed));
  params.packed = Packed::of(problem.sizes, problem.mode);
  params.o = problem.o;
  params.out_grad = problem.out_grad;
  params.first_pair = problem.first_pair;
  params.count = problem.count;
  params.out_proj_grad = problem.out_proj_grad;
  params.gate_grad = problem.gate_grad;
  params.normalised = problem.normalised;
  params.gate_input = problem.gate_input;
  params.sums = problem.sums;
  return params;
}

template <bool kBackward>
void launch_output(const char* what, Mode mode, int tile, const OutputParams& params,
                   CUstream_st* stream) {
  if (params.count == 0) return;
  if (!kBackward && tile == kTallTileIndex) {
    return with_tall_kernel(mode, [&](auto mode_of) {
      using Kernel = TallOutput<decltype(mode_of)::kMode>;
      static_assert(sizeof(typename Kernel::Shared) <= kTallTile.shared_bytes);
      launch(what, tall_output_kernel<decltype(mode_of)::kMode>,
             static_cast<unsigned>(ceil_div(params.count, Kernel::kRows)), kThreads,
             sizeof(typename Kernel::Shared), stream, params);
    });
  }
  with_kernel(mode, tile, [&](auto mode_of, auto tile_of) {
    constexpr Mode kMode = decltype(mode_of)::kMode;
    constexpr Tile kTile = kTiles[decltype(tile_of)::kIndex];
    constexpr int kRows = kTile.rows, kChannels = kTile.channels;
    using Kernel = Output<kMode, Shape<kRows, kChannels>, kBackward>;
    static_assert(sizeof(typename Kernel::Shared) <=
                  (parts(kMode) == 2 ? kTile.shared_bytes_split : kTile.shared_bytes));
    launch(what, output_kernel<kMode, kRows, kChannels, kBackward>,
           static_cast<unsigned>(ceil_div(params.count, kRows)), kThreads,
           sizeof(typename Kernel::Shared), stream, params);
  });
}

}  // namespace fused_ops::triangular_multiplicative_update
