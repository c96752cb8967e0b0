// SPDX-License-Identifier: Apache-2.0
// Reading the mask.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/stored.cuh"
#include "triangular_multiplicative_update/triangular_multiplicative_update.h"

namespace fused_ops::triangular_multiplicative_update {

__device__ __forceinline__ float load_mask(const Mask& mask, std::int64_t at) {
  return load_mask(mask.data, mask.type, at);
}

__device__ __forceinline__ float load_mask(const Mask& mask, std::int64_t batch, std::int64_t i,
                                           std::int64_t j) {
  return load_mask(mask, batch * mask.batch_stride + i * mask.i_stride + j * mask.j_stride);
}

}  // namespace fused_ops::triangular_multiplicative_update
