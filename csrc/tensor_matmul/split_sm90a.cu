// SPDX-License-Identifier: Apache-2.0
#include "common/launch.h"
#include "tensor_matmul/split_forward_sm90a.cuh"
#include "tensor_matmul/split_launch.cuh"

namespace fused_ops::tensor_matmul {

void split_forward_sm90a(const ForwardParams& problem, const void* workspace, CUstream_st* stream) {
  constexpr SplitTile kTile = kSpecialisedTile;
  using Forward = SplitForwardSpecialised<kTile.rows, kTile.columns, kTile.warp_rows,
                                          kTile.warp_columns, kSpecialisedStages>;
  launch_split("tensor_matmul: launching split_forward_sm90a",
               split_forward_specialised_kernel<kTile.rows, kTile.columns, kTile.warp_rows,
                                                kTile.warp_columns, kSpecialisedStages>,
               problem, kTile, Forward::kThreads, sizeof(typename Forward::Shared), workspace,
               stream);
}

}  // namespace fused_ops::tensor_matmul
