// SPDX-License-Identifier: Apache-2.0
// project_sm80.cuh with the products of warpgroups, for the tile of 128 rows.
#pragma once

#include "triangular_multiplicative_update/group_product_sm90a.cuh"
#include "triangular_multiplicative_update/project_sm80.cuh"

namespace fused_ops::triangular_multiplicative_update {

template <Mode mode, bool kBackward>
using ProjectSm90a =
    Project<mode, Shape<128, 128>, kBackward, GroupProduct<mode, 128, kProjectLines>>;

template <Mode mode, bool kBackward>
__global__ void __launch_bounds__(kThreads, project_blocks(mode))
    project_sm90a_kernel(const __grid_constant__ ProjectParams params) {
  ProjectSm90a<mode, kBackward>::run(params);
}

}  // namespace fused_ops::triangular_multiplicative_update
