// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/cuda/device.h"

namespace fused_ops::tensor_matmul {

// Adds the partial results of all slabs, in their order.
struct AddSlabsParams {
  const float* partial = nullptr;
  float* out = nullptr;
  std::int64_t count = 0;
  int slabs = 0;
};

constexpr int kAddSlabsThreads = 256;

__global__ void __launch_bounds__(kAddSlabsThreads) add_slabs_kernel(const AddSlabsParams params) {
  const std::int64_t i =
      static_cast<std::int64_t>(blockIdx.x) * kAddSlabsThreads + static_cast<int>(threadIdx.x);
  if (i >= params.count) return;
  float sum = params.partial[i];
#pragma unroll 8
  for (int slab = 1; slab < params.slabs; ++slab) sum += params.partial[slab * params.count + i];
  params.out[i] = sum;
}

}  // namespace fused_ops::tensor_matmul
