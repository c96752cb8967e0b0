// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/cuda/device.h"
#include "tensor_matmul/tensor_matmul.h"

namespace fused_ops::tensor_matmul {

// Where a row begins, in elements.
__device__ inline std::int64_t row_offset(const RowAxes& axes, std::int64_t row) {
  std::int64_t offset = 0;
  for (int i = axes.count - 1; i > 0; --i) {
    offset += row % axes.size[i] * axes.stride[i];
    row /= axes.size[i];
  }
  return offset + row * axes.stride[0];
}

}  // namespace fused_ops::tensor_matmul
