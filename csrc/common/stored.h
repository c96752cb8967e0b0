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

constexpr int bytes_of(MaskType type) {
  switch (type) {
    case MaskType::kUInt8:
    case MaskType::kInt8:
      return 1;
    case MaskType::kInt16:
    case MaskType::kFloat16:
    case MaskType::kBFloat16:
      return 2;
    case MaskType::kInt32:
    case MaskType::kFloat32:
      return 4;
    case MaskType::kInt64:
    case MaskType::kFloat64:
      return 8;
  }
  return 0;
}

}  // namespace fused_ops
