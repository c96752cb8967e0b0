// SPDX-License-Identifier: Apache-2.0
// Dropout of attention weights: what host op, launchers and kernels say to each other. Which
// weights are kept is a hash of their position (docs/ops/ has it); nothing else is stored for it
// than the keys of all queries, and these are drawn again for the backward.
#pragma once

#include <cmath>
#include <cstdint>

#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

// Of a probability. The fields of Dropout but the keys.
inline Dropout dropout_of(double probability) {
  constexpr double kNumbers = 65536.0;
  const double dropped = std::nearbyint(probability * kNumbers);  // halves to the even number
  Dropout dropout;
  // Where all are dropped the factor is zero, and it does not matter that the last number is not.
  dropout.threshold = static_cast<std::uint32_t>(std::fmin(dropped, kNumbers - 1)) << 16;
  dropout.kept = static_cast<float>((kNumbers - dropped) / kNumbers);
  dropout.factor = dropped < kNumbers ? static_cast<float>(kNumbers / (kNumbers - dropped)) : 0.0f;
  return dropout;
}

struct DropoutKeysProblem {
  const std::int64_t* seed = nullptr;  // one, on the device
  std::int64_t first_row = 0;          // of these in the whole call
  std::int64_t rows = 0;
  std::int64_t n = 0;
  int heads = 0;
  std::uint64_t* keys = nullptr;  // (rows, heads, N)
};

void dropout_keys_sm80(const DropoutKeysProblem& problem, CUstream_st* stream);

}  // namespace fused_ops::msa_row_attention
