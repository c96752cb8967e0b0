// SPDX-License-Identifier: Apache-2.0
// What the launchers of kernels over residues and heads ask of a problem.
#pragma once

#include <cstdint>

#include "common/check.h"
#include "invariant_point_attention/config.h"

namespace fused_ops::invariant_point_attention {

inline void check_frame_sizes(const Sizes& sizes) {
  FO_CHECK_VALUE(sizes.heads >= 1 && sizes.heads <= kMostHeads,
                 "invariant_point_attention: heads must be 1 to 16, got ", sizes.heads);
  FO_CHECK_VALUE(sizes.dim >= 8 && sizes.dim <= kMostDim && sizes.dim % 8 == 0,
                 "invariant_point_attention: dim must be a multiple of 8 up to 256, got ",
                 sizes.dim);
  FO_CHECK_VALUE(sizes.query_points >= 1 && sizes.query_points <= kMostPoints &&
                     sizes.value_points >= 1 && sizes.value_points <= kMostPoints,
                 "invariant_point_attention: points must be 1 to 16, got ", sizes.query_points,
                 " and ", sizes.value_points);
  FO_CHECK_VALUE(sizes.nodes() <= INT32_MAX / sizes.heads,
                 "invariant_point_attention: residues times heads must be below 2^31, got ",
                 sizes.nodes(), " times ", sizes.heads);
}

// Of tensors whose lines are multiples of 16 bytes.
inline void check_16_bytes(const void* data, const char* name) {
  FO_CHECK_VALUE(reinterpret_cast<std::uintptr_t>(data) % 16 == 0,
                 "invariant_point_attention: ", name,
                 " must begin at a multiple of 16 bytes, got address ", data);
}

}  // namespace fused_ops::invariant_point_attention
