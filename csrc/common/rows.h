// SPDX-License-Identifier: Apache-2.0
// Rows of numbers that follow each other, which lie along three axes. Plain data.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace fused_ops {

struct RowAxis {
  std::int64_t count = 1;
  std::int64_t stride = 0;  // in elements; any where the count is one
};

struct Rows {
  const void* data = nullptr;
  DType type = DType::kFloat32;
  RowAxis axes[3];  // the innermost first

  constexpr std::int64_t count() const { return axes[0].count * axes[1].count * axes[2].count; }
};

}  // namespace fused_ops
