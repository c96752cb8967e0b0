// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/plan.h"

namespace fused_ops::tensor_matmul {

struct Problem {
  std::int64_t rows = 0;
  std::int64_t inner = 0;
  std::int64_t columns = 0;
  int row_axes = 1;                // of A, as merge_axes() counts them
  DType a = DType::kFloat32;       // as stored
  DType b = DType::kFloat32;       // as stored
  DType output = DType::kFloat32;  // the product's: A's own, or what autocast asked for
  Precision precision = Precision::kIeee;
  Capability device;
  bool backward = false;
};

Plan plan(const Problem& problem);

}  // namespace fused_ops::tensor_matmul
