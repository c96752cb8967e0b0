// SPDX-License-Identifier: Apache-2.0
// Small problems in two launches: which they are, and what the launches are told. Plain data, for
// the planner too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

// Of the MSA, the pair tensor and all heads: a quarter of a line of weights lies in registers.
constexpr int kSmallMostChannels = 256;
constexpr int kSmallMostKeys = 128;                // a lane has four of them
constexpr int kSmallMostLogits = 1024;             // of a query, all heads, keys in whole warps
constexpr std::int64_t kSmallMostLines = 1 << 12;  // positions; pairs may be 32 times as many

// About 10 us at half the FFMA rate of an H200. Below, launches and latency decide, which are
// fewest here; above, tensor cores are faster.
constexpr double kSmallMostFlops = 3e8;

// What lines are padded to: kernels are compiled for so many.
constexpr int small_line(const Sizes& sizes) {
  const int most = std::max({sizes.channels, sizes.pair_channels, sizes.width()});
  return most <= 64 ? 64 : most <= 128 ? 128 : 256;
}

constexpr bool small_fits(const Sizes& sizes) {
  if (sizes.channels > kSmallMostChannels || sizes.pair_channels > kSmallMostChannels ||
      std::int64_t{sizes.heads} * sizes.dim > kSmallMostChannels || sizes.n > kSmallMostKeys ||
      sizes.heads * ceil_div(sizes.n, 32) * 32 > kSmallMostLogits) {
    return false;
  }
  // One by one: there may be any number of each.
  if (sizes.groups > kSmallMostLines || sizes.rows > kSmallMostLines ||
      sizes.positions() > kSmallMostLines ||
      sizes.groups * sizes.n * sizes.n > 32 * kSmallMostLines) {
    return false;
  }
  const double line = small_line(sizes), width = sizes.width();
  const double of_position =
      2 * line * (4 * width + sizes.channels) + 4 * static_cast<double>(sizes.n) * width;
  const double of_pair = sizes.pair_channels * (2.0 * sizes.heads + 20);
  const double pairs = static_cast<double>(sizes.groups * sizes.n * sizes.n);
  return static_cast<double>(sizes.positions()) * of_position + pairs * of_pair <= kSmallMostFlops;
}

// In floats: query, key, value and gate, and the bias.
constexpr std::int64_t small_workspace(const Sizes& sizes) {
  return 4 * sizes.positions() * sizes.width() + sizes.groups * sizes.heads * sizes.n * sizes.n;
}

// Tensors as the large kernels get them, whose results are not asked for here.
struct SmallProblem {
  PrepareProblem prepare;  // the sizes, the MSA, its mask, the parameters
  BiasProblem bias;        // the pair tensor and its parameters
  float* workspace = nullptr;
  void* out = nullptr;  // (positions, channels) of type_of(prepare.mode)
};

// All modes: products are of fp32 numbers, exactly, on the fp32 units.
void small_forward_sm80(const SmallProblem& problem, CUstream_st* stream);

}  // namespace fused_ops::msa_row_attention
