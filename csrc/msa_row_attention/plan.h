// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/plan.h"
#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

struct Problem {
  Sizes sizes;
  DType msa = DType::kFloat32;
  DType result = DType::kFloat32;
  Precision precision = Precision::kIeee;
  bool dropout = false;
  bool backward = false;
  Capability device;
};

struct Choice {
  Plan plan;
  Mode mode = Mode::kBFloat16;
  bool small = false;  // two launches, on the fp32 units; else large kernels
  // What is taken at a time: some groups, or some rows of one.
  std::int64_t groups = 0;
  std::int64_t rows = 0;
};

// `width` is of all heads, as the model has it.
Sizes sizes_of(std::int64_t groups, std::int64_t rows, std::int64_t n, std::int64_t channels,
               std::int64_t pair_channels, std::int64_t heads, std::int64_t width);

Choice choose(const Problem& problem);

}  // namespace fused_ops::msa_row_attention
