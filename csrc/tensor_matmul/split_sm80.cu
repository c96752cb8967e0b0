// SPDX-License-Identifier: Apache-2.0
#include "common/launch.h"
#include "tensor_matmul/prepare_sm80.cuh"
#include "tensor_matmul/split_forward_sm80.cuh"
#include "tensor_matmul/split_launch.cuh"

namespace fused_ops::tensor_matmul {
namespace {

template <int tile>
void launch_tile(const ForwardParams& problem, const void* workspace, CUstream_st* stream) {
  constexpr SplitTile kTile = kSplitTiles[tile];
  using Forward = SplitForward<kTile.rows, kTile.columns, kTile.warp_rows, kTile.warp_columns>;
  launch_split("tensor_matmul: launching split_forward_sm80",
               split_forward_kernel<kTile.rows, kTile.columns, kTile.warp_rows, kTile.warp_columns,
                                    kTile.min_blocks>,
               problem, kTile, Forward::kThreads, sizeof(typename Forward::Shared), workspace,
               stream);
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

}  // namespace fused_ops::tensor_matmul
