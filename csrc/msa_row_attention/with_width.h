// SPDX-License-Identifier: Apache-2.0
// From a problem's mode and the width of a head, numbers, to a kernel, which has them as types.
#pragma once

#include <type_traits>

#include "common/check.h"
#include "msa_row_attention/config.h"

namespace fused_ops::msa_row_attention {

// Calls `function` with the width that heads of `dim` are padded to.
template <class Function>
void with_width(int dim, Function function) {
  FO_CHECK_RUNTIME(dim > 0 && dim % 8 == 0 && dim <= kMostDim,
                   "msa_row_attention: a head's width must be a multiple of 8 up to ", kMostDim,
                   ", got ", dim);
  switch (width_of(dim)) {
    case 16:
      return function(std::integral_constant<int, 16>());
    case 32:
      return function(std::integral_constant<int, 32>());
    case 48:
      return function(std::integral_constant<int, 48>());
    case 64:
      return function(std::integral_constant<int, 64>());
    default:
      return function(std::integral_constant<int, 128>());
  }
}

// The emulation compiles a few kernels, for the time it takes.
constexpr bool is_compiled_16(Mode mode, int width) {
#ifdef FUSED_OPS_FEW_KERNELS
  return mode == Mode::kBFloat16 || width == 32;
#else
  return static_cast<int>(mode) < 2 && width <= kMostDim;
#endif
}

// Calls `function` with the mode, one of the 16-bit ones, and the width.
template <class Function>
void with_mode_and_width(const char* what, Mode mode, int dim, Function function) {
  FO_CHECK_RUNTIME(type_of(mode) != DType::kFloat32, what, " must be given 16-bit tensors");
  with_width(dim, [&](auto width_of) {
    constexpr int kWidth = decltype(width_of)::value;
    const auto call = [&](auto mode_of) {
      if constexpr (is_compiled_16(decltype(mode_of)::value, kWidth)) {
        function(mode_of, width_of);
      } else {
        FO_CHECK_RUNTIME(false, what, ": width ", dim, " must be compiled for the mode");
      }
    };
    if (mode == Mode::kBFloat16) return call(std::integral_constant<Mode, Mode::kBFloat16>());
    call(std::integral_constant<Mode, Mode::kFloat16>());
  });
}

}  // namespace fused_ops::msa_row_attention
