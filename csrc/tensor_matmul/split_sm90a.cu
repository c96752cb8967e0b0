// SPDX-License-Identifier: Apache-2.0
#include "common/launch.h"
#include "tensor_matmul/split_forward_sm90a.cuh"
#include "tensor_matmul/split_launch.cuh"
#include "tensor_matmul/split_reduce.cuh"

namespace fused_ops::tensor_matmul {
namespace {

template <int tile>
using Forward = SplitForwardSpecialised<kHopperTiles[tile].rows, kHopperTiles[tile].columns,
                                        hopper_stages(kHopperTiles[tile])>;

template <int tile>
__global__ void __launch_bounds__(Forward<tile>::kThreads, kHopperTiles[tile].min_blocks)
    split_forward_specialised_kernel(const __grid_constant__ SplitParams params) {
  Forward<tile>::run(params);
}

template <int tile>
using Reduce = SplitReduce<
    kHopperReduceTiles[tile].rows, kHopperReduceTiles[tile].columns, kSplitWarps,
    sm90a::SplitWarpgroups<kHopperReduceTiles[tile].rows, kHopperReduceTiles[tile].columns>>;

template <int tile>
__global__ void __launch_bounds__(Reduce<tile>::kThreads, kHopperReduceTiles[tile].min_blocks)
    split_reduce_sm90a_kernel(const __grid_constant__ SplitReduceParams params) {
  using Registers = sm90a::SharedRegisters<Reduce<tile>::kProducers, Reduce<tile>::kConsumers, 88>;
  Reduce<tile>::run(params, [](bool splits) {
    if (splits) {
      sm90a::give_registers<Registers::kGivers>();
    } else {
      sm90a::take_registers<Registers::kTakers>();
    }
  });
}

template <int tile>
void launch_forward(const ForwardParams& problem, const void* workspace, CUstream_st* stream) {
  constexpr std::size_t kShared = sizeof(typename Forward<tile>::Shared);
  static_assert(kShared <= kHopperTiles[tile].shared_bytes);
  launch_split("tensor_matmul: launching split_forward_sm90a",
               split_forward_specialised_kernel<tile>, problem, kHopperTiles[tile],
               Forward<tile>::kThreads, kShared, workspace, stream);
}

template <int tile>
void launch_reduce_tile(const ReduceProblem& problem, int slabs, float* partial,
                        CUstream_st* stream) {
  constexpr std::size_t kShared = sizeof(typename Reduce<tile>::Shared);
  static_assert(kShared <= kHopperReduceTiles[tile].shared_bytes);
  launch_reduce("tensor_matmul: launching split_reduce_sm90a", split_reduce_sm90a_kernel<tile>,
                problem, kHopperReduceTiles[tile], slabs, partial, Reduce<tile>::kThreads, kShared,
                stream);
}

}  // namespace

void split_forward_sm90a(const ForwardParams& problem, int tile, const void* workspace,
                         CUstream_st* stream) {
  if (tile == kWideHopperTile) {
    launch_forward<kWideHopperTile>(problem, workspace, stream);
  } else {
    launch_forward<kNarrowHopperTile>(problem, workspace, stream);
  }
}

void split_reduce_sm90a(const ReduceProblem& problem, int tile, int slabs, float* partial,
                        CUstream_st* stream) {
  if (tile == kWideHopperTile) {
    launch_reduce_tile<kWideHopperTile>(problem, slabs, partial, stream);
  } else {
    launch_reduce_tile<kNarrowHopperTile>(problem, slabs, partial, stream);
  }
}

}  // namespace fused_ops::tensor_matmul
