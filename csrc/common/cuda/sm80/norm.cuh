// SPDX-License-Identifier: Apache-2.0
// What LayerNorms forward and backward share: where rows begin, and their mean and variance.
#pragma once

#include "common/cuda/sm80/numbers.cuh"
#include "common/cuda/sm80/stored.cuh"
#include "common/rows.h"

namespace fused_ops {

// Where rows begin: axes that follow each other without a gap are one.
struct RowOffsets {
  RowAxis axes[3];  // the innermost first
  int axis_count = 0;

  // Axes of one element have any stride.
  static RowOffsets of(const Rows& rows) {
    RowOffsets offsets;
    int count = 0;
    for (const RowAxis& axis : rows.axes) {
      if (axis.count == 1) continue;
      RowAxis* inner = count > 0 ? &offsets.axes[count - 1] : nullptr;
      if (inner && axis.stride == inner->count * inner->stride) {
        inner->count *= axis.count;
      } else {
        offsets.axes[count++] = axis;
      }
    }
    offsets.axis_count = count > 0 ? count : 1;
    return offsets;
  }

  // Whether all begin at pieces of so many elements.
  bool steps_by(int piece) const {
    for (const RowAxis& axis : axes) {
      if (axis.stride % piece != 0) return false;
    }
    return true;
  }

  // Where a row begins, in elements.
  __device__ __forceinline__ std::int64_t offset(std::int64_t row) const {
    if (axis_count == 1) return row * axes[0].stride;
    const std::int64_t line = row / axes[0].count;
    const std::int64_t outer = line / axes[1].count;
    return (row - line * axes[0].count) * axes[0].stride +
           (line - outer * axes[1].count) * axes[1].stride + outer * axes[2].stride;
  }
};

// The mean is a sum of numbers times `share`, which is finite where they are, divided by `rest`.
// For 16-bit numbers of about equal size the sum is exact, and so the mean of equal ones. For fp32
// numbers it may be off by more than what they differ by; so the mean of what they differ from it
// by is taken too.
struct NormShares {
  float inverse = 0.0f;  // 1 / channels
  float share = 0.0f;    // a power of two, not above that
  float rest = 0.0f;     // channels * share
  float rest_inverse = 0.0f;

  static NormShares of(int channels) {
    NormShares shares;
    shares.inverse = 1.0f / static_cast<float>(channels);
    shares.share = 1.0f;
    while (shares.share > shares.inverse) shares.share /= 2;
    shares.rest = static_cast<float>(channels) * shares.share;
    shares.rest_inverse = 1.0f / shares.rest;
    return shares;
  }

  // The sum divided by `rest`: rounded correctly, in fewer instructions than the compiler takes.
  // NaN for an infinite one, as all results of such a row are.
  __device__ __forceinline__ float over_rest(float sum) const {
    const float about = sum * rest_inverse;
    return fmaf(fmaf(-about, rest, sum), rest_inverse, about);
  }
};

template <DType type>
constexpr bool kCorrects = type == DType::kFloat32;

// From the mean of the squares of what numbers differ by from their mean, and the correction of the
// latter. Both may be infinite.
template <DType type>
__device__ __forceinline__ float variance(float squares, float correction) {
  if (!kCorrects<type>) return squares;
  const float less = squares - correction * correction;
  return less >= 0.0f ? less : squares;
}

}  // namespace fused_ops
