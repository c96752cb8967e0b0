// SPDX-License-Identifier: Apache-2.0
// From the width of a head, a number, to a kernel, which has it as a type.
#pragma once

#include "common/check.h"
#include "msa_row_attention/config.h"

namespace fused_ops::msa_row_attention {

template <int width>
struct WidthOf {
  static constexpr int kWidth = width;
};

// Calls `function` with the width that heads of `dim` are padded to.
template <class Function>
void with_width(int dim, Function function) {
  FO_CHECK_RUNTIME(dim > 0 && dim % 8 == 0 && dim <= kMostDim,
                   "msa_row_attention: a head's width must be a multiple of 8 up to ", kMostDim,
                   ", got ", dim);
  switch (width_of(dim)) {
    case 16:
      return function(WidthOf<16>());
    case 32:
      return function(WidthOf<32>());
    case 48:
      return function(WidthOf<48>());
    case 64:
      return function(WidthOf<64>());
    default:
      return function(WidthOf<128>());
  }
}

}  // namespace fused_ops::msa_row_attention
