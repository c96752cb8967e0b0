// SPDX-License-Identifier: Apache-2.0
// Adds the bias's gradients of the slabs of rows, in order.
#pragma once

#include <cstdint>

#include "common/cuda/device.h"

namespace fused_ops::msa_row_attention {

struct AddSlabsParams {
  const float* partial = nullptr;  // (slabs, size)
  float* sums = nullptr;           // (size)
  std::int64_t size = 0;
  int slabs = 0;
  bool accumulate = false;  // or the sums are stored
};

constexpr int kAddSlabsThreads = 256;

__global__ void __launch_bounds__(kAddSlabsThreads)
    add_slabs_kernel(const __grid_constant__ AddSlabsParams p) {
  const std::int64_t threads = std::int64_t{gridDim.x} * kAddSlabsThreads;
  std::int64_t at = std::int64_t{blockIdx.x} * kAddSlabsThreads + thread_index();
  for (; at < p.size; at += threads) {
    float sum = p.accumulate ? p.sums[at] : 0.0f;
    for (int slab = 0; slab < p.slabs; ++slab) sum += p.partial[slab * p.size + at];
    p.sums[at] = sum;
  }
}

}  // namespace fused_ops::msa_row_attention
