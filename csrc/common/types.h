// SPDX-License-Identifier: Apache-2.0
// Plain data that planner, launchers and kernels share. No torch, no CUDA.
#pragma once

#include <cstdint>
#include <string_view>

namespace fused_ops {

enum class DType : std::uint8_t { kFloat32, kFloat64, kFloat16, kBFloat16, kOther };

// How products of fp32 numbers may be taken: to fp32 accuracy, or with the error of one TF32
// product.
enum class Precision : std::uint8_t { kIeee, kTf32 };

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kOther:
      break;
  }
  return "not a supported floating dtype";
}

// Of fp32 and the 16-bit types.
constexpr int bytes_of(DType type) {
  return type == DType::kFloat32 ? 4 : 2;
}

constexpr DType dtype_from_name(std::string_view text) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    if (text == name(dtype)) return dtype;
  }
  return DType::kOther;
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace fused_ops
