// SPDX-License-Identifier: Apache-2.0
#include "common/launch.h"
#include "tensor_matmul/add_slabs_sm80.cuh"
#include "tensor_matmul/prepare_sm80.cuh"
#include "tensor_matmul/split_forward_sm80.cuh"
#include "tensor_matmul/split_launch.cuh"
#include "tensor_matmul/split_reduce.cuh"

namespace fused_ops::tensor_matmul {
namespace {

template <int tile>
void launch_tile(const ForwardParams& problem, const void* workspace, CUstream_st* stream) {
  constexpr SplitTile kTile = kSplitTiles[tile];
  using Forward = SplitForward<kTile.rows, kTile.columns, kTile.warp_rows, kTile.warp_columns>;
  static_assert(sizeof(typename Forward::Shared) <= kTile.shared_bytes);
  launch_split("tensor_matmul: launching split_forward_sm80",
               split_forward_kernel<kTile.rows, kTile.columns, kTile.warp_rows, kTile.warp_columns,
                                    kTile.min_blocks>,
               problem, kTile, Forward::kThreads, sizeof(typename Forward::Shared), workspace,
               stream);
}

using ReduceSm80 =
    SplitReduce<kReduceTileSm80.rows, kReduceTileSm80.columns, kSplitWarps,
                sm80::SplitWarps<kReduceTileSm80.rows, kReduceTileSm80.columns,
                                 kReduceTileSm80.warp_rows, kReduceTileSm80.warp_columns>>;
static_assert(sizeof(ReduceSm80::Shared) <= kReduceTileSm80.shared_bytes);

__global__ void __launch_bounds__(ReduceSm80::kThreads, kReduceTileSm80.min_blocks)
    split_reduce_sm80_kernel(const __grid_constant__ SplitReduceParams params) {
  ReduceSm80::run(params, [](bool) {});
}

}  // namespace

void prepare_b_sm80(const ForwardParams& problem, void* workspace, CUstream_st* stream) {
  PrepareParams params;
  params.b = problem.b;
  params.inner = problem.inner;
  params.columns = problem.columns;
  params.inner_stride = problem.b_inner_stride;
  params.column_stride = problem.b_column_stride;
  params.prepared = PreparedB::of(problem.inner, problem.columns);
  params.workspace = static_cast<unsigned char*>(workspace);
  const std::int64_t column_slabs = params.prepared.columns / kPrepareColumns;
  // As many blocks as keep a GPU busy, and a chunk each at least.
  params.slab = static_cast<int>(
      std::max<std::int64_t>(1, ceil_div(params.prepared.chunks * column_slabs, 1024)));
  const auto grid =
      static_cast<unsigned>(column_slabs * ceil_div(params.prepared.chunks, params.slab));
  launch("tensor_matmul: launching prepare_rows", prepare_rows_kernel,
         static_cast<unsigned>(params.prepared.chunks * PreparedB::kInner / kPrepareRows),
         kPrepareThreads, 0, stream, params);
  launch("tensor_matmul: launching prepare_columns", prepare_columns_kernel, grid, kPrepareThreads,
         0, stream, params);
  launch("tensor_matmul: launching prepare_split", prepare_split_kernel, grid, kPrepareThreads, 0,
         stream, params);
}

void split_forward_sm80(const ForwardParams& problem, int tile, const void* workspace,
                        CUstream_st* stream) {
  if (tile == kLargeSplitTile) {
    launch_tile<kLargeSplitTile>(problem, workspace, stream);
  } else {
    launch_tile<kSmallSplitTile>(problem, workspace, stream);
  }
}

void split_reduce_sm80(const ReduceProblem& problem, int slabs, float* partial,
                       CUstream_st* stream) {
  launch_reduce("tensor_matmul: launching split_reduce_sm80", split_reduce_sm80_kernel, problem,
                kReduceTileSm80, slabs, partial, ReduceSm80::kThreads, sizeof(ReduceSm80::Shared),
                stream);
}

void add_slabs_sm80(const ReduceProblem& problem, int slabs, const float* partial,
                    CUstream_st* stream) {
  AddSlabsParams params;
  params.partial = partial;
  params.out = problem.c;
  params.count = problem.lines * problem.columns;
  params.slabs = slabs;
  launch("tensor_matmul: launching add_slabs", add_slabs_kernel,
         static_cast<unsigned>(ceil_div(params.count, kAddSlabsThreads)), kAddSlabsThreads, 0,
         stream, params);
}

}  // namespace fused_ops::tensor_matmul
