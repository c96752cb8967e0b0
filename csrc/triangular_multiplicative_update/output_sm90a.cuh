// SPDX-License-Identifier: Apache-2.0
// output_sm80.cuh with the products of warpgroups, for the tile of 128 rows.
#pragma once

#include "triangular_multiplicative_update/group_product_sm90a.cuh"
#include "triangular_multiplicative_update/output_sm80.cuh"

namespace fused_ops::triangular_multiplicative_update {

template <Mode mode, bool kBackward>
using OutputSm90a =
    Output<mode, Shape<128, 128>, kBackward, GroupProduct<mode, 128, kPieceChannels>>;

template <Mode mode, bool kBackward>
__global__ void __launch_bounds__(kThreads, output_blocks(mode, 128, kBackward))
    output_sm90a_kernel(const __grid_constant__ OutputParams params) {
  OutputSm90a<mode, kBackward>::run(params);
}

}  // namespace fused_ops::triangular_multiplicative_update
