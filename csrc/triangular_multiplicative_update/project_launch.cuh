// SPDX-License-Identifier: Apache-2.0
// Forward and backward are compiled apart, for the time it takes.
#pragma once

#include "triangular_multiplicative_update/project_sm80.cuh"
#include "triangular_multiplicative_update/with_kernel.cuh"

namespace fused_ops::triangular_multiplicative_update {

inline ProjectParams params_of(const ProjectProblem& problem) {
  ProjectParams params;
  params.sizes = problem.sizes;
  params.every_thread_arrives = every_thread_arrives();
  params.turned = !problem.outgoing;
  params.eps = problem.eps;
  params.pair = problem.pair;
  params.mask = problem.mask;
  params.needs_largest = needs_largest(problem.mask, problem.mode);
  params.workspace = static_cast<unsigned char*>(const_cast<void*>(problem.packed));
  params.packed = Packed::of(problem.sizes, problem.mode);
  params.first_block = problem.first_block;
  params.blocks = problem.blocks;
  for (int part = 0; part < 2; ++part) {
    params.plane[0][part] = problem.a[part];
    params.plane[1][part] = problem.b[part];
  }
  params.count = problem.sizes.pairs();
  return params;
}

inline ProjectParams params_of(const ProjectBackwardProblem& problem) {
  ProjectParams params;
  params.sizes = problem.sizes;
  params.every_thread_arrives = every_thread_arrives();
  params.turned = !problem.outgoing;
  params.eps = problem.eps;
  params.pair = problem.pair;
  params.mask = problem.mask;
  params.workspace = static_cast<unsigned char*>(const_cast<void*>(problem.packed));
  params.packed = Packed::of(problem.sizes, problem.mode);
  params.blocks = params.packed.hidden_blocks;
  params.first_pair = problem.first_pair;
  params.count = problem.count;
  params.plane_grad[0] = problem.da;
  params.plane_grad[1] = problem.db;
  params.grad_undo = problem.grad_undo;
  params.grad = problem.grad;
  params.normalised = problem.normalised;
  params.sums = problem.sums;
  return params;
}

template <Mode mode, int kRows, int kChannels, bool kBackward>
void launch_project_tile(const char* what, const ProjectParams& params, CUstream_st* stream) {
  using Kernel = Project<mode, Shape<kRows, kChannels>, kBackward>;
  const auto blocks = static_cast<unsigned>(ceil_div(params.count, kRows));
  constexpr std::size_t kShared = sizeof(typename Kernel::Shared);
  if constexpr (kBackward) {
    launch(what, project_kernel<mode, kRows, kChannels, true>, blocks, kThreads, kShared, stream,
           params);
  } else {  // behind the kernel that packs
    launch_dependent<project_kernel<mode, kRows, kChannels, false>>(what, blocks, kThreads, kShared,
                                                                    stream, params);
  }
}

template <bool kBackward>
void launch_project(const char* what, Mode mode, int tile, const ProjectParams& params,
                    CUstream_st* stream) {
  if (params.count == 0) return;
  if (!kBackward && tile == kTallTileIndex) {
    return with_tall_kernel(mode, [&](auto mode_of) {
      constexpr Mode kMode = decltype(mode_of)::kMode;
      constexpr int kRows = kTallTile.rows, kChannels = kTallTile.channels;
      static_assert(sizeof(typename Project<kMode, Shape<kRows, kChannels>, false>::Shared) <=
                    kTallTile.shared_bytes);
      launch_project_tile<kMode, kRows, kChannels, false>(what, params, stream);
    });
  }
  with_kernel(mode, tile, [&](auto mode_of, auto tile_of) {
    constexpr Mode kMode = decltype(mode_of)::kMode;
    constexpr Tile kTile = kTiles[decltype(tile_of)::kIndex];
    static_assert(
        sizeof(typename Project<kMode, Shape<kTile.rows, kTile.channels>, kBackward>::Shared) <=
        (parts(kMode) == 2 ? kTile.shared_bytes_split : kTile.shared_bytes));
    launch_project_tile<kMode, kTile.rows, kTile.channels, kBackward>(what, params, stream);
  });
}

}  // namespace fused_ops::triangular_multiplicative_update
