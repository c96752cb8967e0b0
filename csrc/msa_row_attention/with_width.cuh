// SPDX-License-Identifier: Apache-2.0
// From a problem's mode and a head's width to template arguments.
#pragma once

#include <type_traits>

#include "common/check.h"
#include "msa_row_attention/config.h"

namespace fused_ops::msa_row_attention {

// The emulation compiles a few kernels, for the time it takes.
constexpr bool is_compiled(Mode mode, int width) {
#ifdef FUSED_OPS_FEW_KERNELS
  return mode == Mode::kBFloat16 || width == 32;
#else
  return static_cast<int>(mode) < 2 && width <= kMostDim;
#endif
}

template <Mode mode, int width, class Call>
void call_if_compiled(Call call) {
  if constexpr (is_compiled(mode, width)) {
    call(std::integral_constant<Mode, mode>(), std::integral_constant<int, width>());
  } else {
    FO_CHECK_RUNTIME(false, "msa_row_attention: width ", width, " must be compiled for the mode");
  }
}

template <Mode mode, class Call>
void with_width(int dim, Call call) {
  switch (width_of(dim)) {
    case 16:
      return call_if_compiled<mode, 16>(call);
    case 32:
      return call_if_compiled<mode, 32>(call);
    case 48:
      return call_if_compiled<mode, 48>(call);
    case 64:
      return call_if_compiled<mode, 64>(call);
    default:
      return call_if_compiled<mode, 128>(call);
  }
}

// Calls `call` with the mode, one of the 16-bit ones, and the width, both as types.
template <class Call>
void with_mode_and_width(const char* what, Mode mode, int dim, Call call) {
  FO_CHECK_RUNTIME(dim % 8 == 0 && dim <= kMostDim, what,
                   ": a head's width must be a multiple of 8 up to ", kMostDim, ", got ", dim);
  if (mode == Mode::kBFloat16) return with_width<Mode::kBFloat16>(dim, call);
  FO_CHECK_RUNTIME(mode == Mode::kFloat16, what, " must be given 16-bit tensors");
  with_width<Mode::kFloat16>(dim, call);
}

}  // namespace fused_ops::msa_row_attention
