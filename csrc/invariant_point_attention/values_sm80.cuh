// SPDX-License-Identifier: Apache-2.0
// Columns of 16-bit values at a time, and at most.
#pragma once

#include "invariant_point_attention/values_kernel.cuh"

namespace fused_ops::invariant_point_attention {

constexpr int kValueColumns = 96;
constexpr int kMostValueColumns = 384;  // 256 + 2 * 48, in passes

}  // namespace fused_ops::invariant_point_attention
