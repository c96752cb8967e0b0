// SPDX-License-Identifier: Apache-2.0
// Small problems in two launches: which they are, and what the launches are told. Plain data, for
// the planner too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "invariant_point_attention/invariant_point_attention.h"

namespace fused_ops::invariant_point_attention {

constexpr int kSmallMostChannels = 256;  // of nodes and pairs: a part of a line lies in registers
constexpr int kSmallMostKeys = 128;      // a lane has four of them
constexpr int kSmallMostHeads = 16;
constexpr int kSmallMostLogits = 1024;             // of a query, all heads, keys in whole warps
constexpr int kSmallMostFeatures = 960;            // of a query, in shared memory
constexpr std::int64_t kSmallMostNodes = 1 << 12;  // pairs may be 32 times as many

// About 10 us at half the FFMA rate of an H200. Below, launches and latency decide, which are
// fewest here; above, tensor cores are faster.
constexpr double kSmallMostFlops = 3e8;

// What lines of nodes and pairs are padded to: kernels are compiled for so many.
constexpr int small_line(const Sizes& sizes) {
  const int most = std::max(sizes.channels, sizes.pair_channels);
  return most <= 64 ? 64 : most <= 128 ? 128 : 256;
}

// Numbers of a line that values are gathered from: v (heads, dim), value points (heads, points,
// xyz).
constexpr int small_value_line(const Sizes& sizes) {
  return sizes.width() + sizes.heads * sizes.value_numbers();
}

constexpr bool small_fits(const Sizes& sizes) {
  if (sizes.channels > kSmallMostChannels || sizes.pair_channels > kSmallMostChannels ||
      sizes.n > kSmallMostKeys || sizes.heads > kSmallMostHeads ||
      sizes.heads * round_up(sizes.n, 32) > kSmallMostLogits || sizes.dim > kSmallMostFeatures ||
      sizes.query_points > kSmallMostFeatures || sizes.value_points > kSmallMostFeatures ||
      sizes.value_channels > kSmallMostFeatures || sizes.features_filled() > kSmallMostFeatures ||
      sizes.width() > kSmallMostFeatures) {
    return false;
  }
  // One by one: there may be any number of each.
  if (sizes.batch > kSmallMostNodes || sizes.nodes() > kSmallMostNodes ||
      sizes.nodes() * sizes.n > 32 * kSmallMostNodes) {
    return false;
  }
  const double of_node = 2.0 * small_line(sizes) * sizes.projected_filled() +
                         2.0 * sizes.channels * sizes.features_filled();
  const double of_pair =
      2.0 * sizes.heads *
          (sizes.pair_channels + sizes.dim + 2.0 * sizes.query_numbers() + sizes.value_channels) +
      2.0 * small_value_line(sizes);
  const double nodes = static_cast<double>(sizes.nodes());
  return nodes * of_node + nodes * static_cast<double>(sizes.n) * of_pair <= kSmallMostFlops;
}

// In floats: q, k, points of both as fours, values, and the bias of all heads.
constexpr std::int64_t small_workspace(const Sizes& sizes) {
  return sizes.nodes() * (2 * sizes.width() + 8 * sizes.heads * sizes.query_points +
                          small_value_line(sizes) + sizes.heads * sizes.n);
}

// Tensors as the large kernels get them. Of `prepare` no results are asked for, and the rotations
// are read too.
struct SmallProblem {
  PrepareProblem prepare;
  Pairs pair;
  Linear bias;          // (heads, pair_channels)
  Stored head_weights;  // (heads)
  float scalar_scale = 1.0f;
  float point_scale = 1.0f;
  float bias_scale = 1.0f;
  Pairs pair_values;  // with value_channels
  float norm_eps = 0.0f;
  float* workspace = nullptr;  // aligned to 16 bytes
  void* out = nullptr;         // (nodes(), channels) of type_of(prepare.mode)
};

// All modes: products are of fp32 numbers, exactly, on the fp32 units.
void small_forward_sm80(const SmallProblem& problem, CUstream_st* stream);

}  // namespace fused_ops::invariant_point_attention
