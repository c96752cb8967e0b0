// SPDX-License-Identifier: Apache-2.0
#include "common/launch.h"
#include "tensor_matmul/split_forward_sm90a.cuh"
#include "tensor_matmul/split_launch.cuh"
#include "tensor_matmul/split_reduce.cuh"

namespace fused_ops::tensor_matmul {
namespace {

using ReduceSm90a =
    SplitReduce<kReduceTileSm90a.rows, kReduceTileSm90a.columns, kSplitWarps,
                sm90a::SplitWarpgroups<kReduceTileSm90a.rows, kReduceTileSm90a.columns>>;

// What the block was launched with, 168 registers a thread, is all that its warps can have.
constexpr int kSplittersRegisters = 88;
constexpr int kMultipliersRegisters = 208;
static_assert(ReduceSm90a::kProducers * kSplittersRegisters +
                  ReduceSm90a::kConsumers * kMultipliersRegisters <=
              65536 / ReduceSm90a::kThreads / 8 * 8 * ReduceSm90a::kThreads);

__global__ void __launch_bounds__(ReduceSm90a::kThreads, kReduceTileSm90a.min_blocks)
    split_reduce_sm90a_kernel(const __grid_constant__ SplitReduceParams params) {
  ReduceSm90a::run(params, [](bool splits) {
    if (splits) {
      sm90a::give_registers<kSplittersRegisters>();
    } else {
      sm90a::take_registers<kMultipliersRegisters>();
    }
  });
}

}  // namespace

void split_forward_sm90a(const ForwardParams& problem, const void* workspace, CUstream_st* stream) {
  constexpr SplitTile kTile = kSpecialisedTile;
  using Forward = SplitForwardSpecialised<kTile.rows, kTile.columns, kSpecialisedStages>;
  launch_split("tensor_matmul: launching split_forward_sm90a",
               split_forward_specialised_kernel<kTile.rows, kTile.columns, kSpecialisedStages>,
               problem, kTile, Forward::kThreads, sizeof(typename Forward::Shared), workspace,
               stream);
}

void split_reduce_sm90a(const ReduceProblem& problem, int slabs, float* partial,
                        CUstream_st* stream) {
  launch_reduce("tensor_matmul: launching split_reduce_sm90a", split_reduce_sm90a_kernel, problem,
                kReduceTileSm90a, slabs, partial, ReduceSm90a::kThreads,
                sizeof(ReduceSm90a::Shared), stream);
}

}  // namespace fused_ops::tensor_matmul
