// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/plan.h"
#include "triangular_multiplicative_update/triangular_multiplicative_update.h"

namespace fused_ops::triangular_multiplicative_update {

struct Problem {
  Sizes sizes;
  DType pair = DType::kFloat32;
  DType result = DType::kFloat32;
  Precision precision = Precision::kIeee;
  std::int64_t max_workspace = -1;  // bytes; negative: no wish
  bool backward = false;
  Capability device;
};

enum class Kernels : std::uint8_t {
  kNone,   // the composition
  kSmall,  // two launches, on the fp32 units
  kLarge,  // packing, projections, contraction, output, on the tensor cores
};

struct Choice {
  Plan plan;
  Kernels kernels = Kernels::kNone;
  Mode mode = Mode::kBFloat16;
  int tile = 0;
  int forward_tile = 0;  // what the forward has in its place
  int group = 0;         // blocks of 64 hidden channels that are projected and contracted together
  bool hopper = false;   // the contraction is that of sm_90a
  bool hopper_rows = false;  // and projections and output are
};

Sizes sizes_of(std::int64_t batch, std::int64_t n, std::int64_t channels, std::int64_t hidden);

Choice choose(const Problem& problem);

}  // namespace fused_ops::triangular_multiplicative_update
