// SPDX-License-Identifier: Apache-2.0
// with_width.h for fp32 tensors: from mode, width and length of rows to a kernel.
#pragma once

#include <cmath>

#include "msa_row_attention/with_width.h"

namespace fused_ops::msa_row_attention {

// log2(e) / sqrt(dim).
struct Fp32Scale {
  float most;  // cut off
  float rest;  // above zero, so that it makes no NaN of -inf

  static Fp32Scale of(int head_dim) {
    const double scale = 1.4426950408889634 / std::sqrt(static_cast<double>(head_dim));
    auto most = static_cast<float>(scale);
    if (most >= scale) most = std::nextafter(most, 0.0f);
    return {most, static_cast<float>(scale - most)};
  }
};

// The emulation compiles a few kernels, for the time it takes.
constexpr bool is_compiled_fp32(Mode mode, int width) {
#ifdef FUSED_OPS_FEW_KERNELS
  return mode == Mode::kSplit || width == 32;
#else
  return static_cast<int>(mode) >= 2 && width <= kMostDim;
#endif
}

// Calls `function` with the mode, kTf32 or kSplit, and the width.
template <class Function>
void with_fp32_mode_and_width(const char* what, const Sizes& sizes, Mode mode, Function function) {
  if (sizes.positions() == 0 || sizes.heads == 0) return;
  FO_CHECK_RUNTIME(type_of(mode) == DType::kFloat32, what, " must be given fp32 tensors");
  with_width(sizes.dim, [&](auto width_of) {
    constexpr int kWidth = decltype(width_of)::value;
    const auto call = [&](auto mode_of) {
      if constexpr (is_compiled_fp32(decltype(mode_of)::value, kWidth)) {
        function(mode_of, width_of);
      } else {
        FO_CHECK_RUNTIME(false, what, ": width ", kWidth, " must be compiled for the mode");
      }
    };
    if (mode == Mode::kSplit) return call(std::integral_constant<Mode, Mode::kSplit>());
    call(std::integral_constant<Mode, Mode::kTf32>());
  });
}

// And with the number of a tile of kAttendFp32Tiles.
template <class Function>
void with_fp32_tile(const char* what, const Sizes& sizes, Mode mode, Function function) {
  with_fp32_mode_and_width(what, sizes, mode, [&](auto mode_of, auto width_of) {
    if (attend_fp32_tile_of(sizes.n) == 0) {
      return function(mode_of, width_of, std::integral_constant<int, 0>());
    }
    function(mode_of, width_of, std::integral_constant<int, 1>());
  });
}

}  // namespace fused_ops::msa_row_attention
