// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/plan.h"
#include "invariant_point_attention/config.h"

namespace fused_ops::invariant_point_attention {

struct Problem {
  Sizes sizes;
  DType node = DType::kFloat32;
  DType result = DType::kFloat32;
  Precision precision = Precision::kIeee;
  bool backward = false;
  Capability device;
};

struct Choice {
  Plan plan;
  Mode mode = Mode::kBFloat16;
  bool small = false;  // two launches, on the fp32 units; else large kernels
  Parts parts;
};

// Of a model: `width` is of all heads, `value_channels` 0 where no pair values are gathered.
struct ModelSizes {
  std::int64_t batch, n, channels, pair_channels, value_channels, heads, width, query_points,
      value_points;
  bool norms;
};

Sizes sizes_of(const ModelSizes& model);

Choice choose(const Problem& problem);

}  // namespace fused_ops::invariant_point_attention
