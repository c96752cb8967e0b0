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
};

enum class Kernel : std::uint8_t {
  kNone,
  kForwardSm80,       // FP32 units, any shape
  kSplitForwardSm80,  // tensor cores on split operands
  kSplitForwardSm90a,
  kSplitReduceSm80,
  kSplitReduceSm90a,
};

// The plan and what only the launchers need of it.
struct Choice {
  Plan plan;
  Kernel kernel = Kernel::kNone;
  int tile = 0;   // index into the kernel's tile table
  int slabs = 1;  // of the rows, for a sum over them
};

// A (rows, inner) times B (inner, columns).
Choice choose_forward(const Problem& problem);

// A^T (inner, rows) times G (rows, columns), the gradient of B; row_axes counts those of A or G,
// whichever has more.
Choice choose_reduce(const Problem& problem);

}  // namespace fused_ops::tensor_matmul
