// SPDX-License-Identifier: Apache-2.0
// The model's tensors as kernels get them: where they lie and what type they are. Plain data.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace fused_ops {

// A tensor of the model as it is stored: contiguous parameters. Null where a linear has no bias.
struct Stored {
  const void* data = nullptr;
  DType type = DType::kFloat32;
};

struct Linear {
  Stored weight;  // (out, in)
  Stored bias;    // (out), or null
};

enum class MaskType : std::uint8_t {
  kUInt8,  // and bool
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
};

}  // namespace fused_ops
