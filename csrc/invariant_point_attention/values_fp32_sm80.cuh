// SPDX-License-Identifier: Apache-2.0
// Columns of fp32 values at a time, and at most.
#pragma once

#include "invariant_point_attention/values_kernel.cuh"

namespace fused_ops::invariant_point_attention {

constexpr int kFp32ValueColumns = 64;
constexpr int kMostFp32ValueColumns = 320;  // 256 + 48, in passes

}  // namespace fused_ops::invariant_point_attention
