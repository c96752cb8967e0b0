// SPDX-License-Identifier: Apache-2.0
// What makes head weights positive.
#pragma once

#include "common/cuda/device.h"

namespace fused_ops::invariant_point_attention {

// log(1 + e^x), accurate for numbers of any size; NaN stays.
__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

}  // namespace fused_ops::invariant_point_attention
