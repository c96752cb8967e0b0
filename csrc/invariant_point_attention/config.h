// SPDX-License-Identifier: Apache-2.0
// What the kernels take, and how many queries at a time. Plain data, for the planner too.
#pragma once

#include <algorithm>

#include "invariant_point_attention/invariant_point_attention.h"

namespace fused_ops::invariant_point_attention {

constexpr int kMostHeads = 16;
constexpr int kMostDim = 256;
constexpr int kMostPoints = 16;
constexpr int kMostChannels = 1 << 16;
constexpr int kMostPairChannels = 512;
constexpr int kMostResidues = 1 << 20;

// Of the logits that exist at a time. They are written by one kernel and read by the next ones, so
// they should stay in the L2 cache (50 MB on an H200); and a launch must fill the device. The
// backward has dS beside them, half as large in 16 bits.
constexpr std::int64_t kLogitsBytes = std::int64_t{32} << 20;
constexpr std::int64_t kLogitsBytesBackward = std::int64_t{28} << 20;

// What is taken at a time: some batch elements, or some queries of one.
struct Parts {
  std::int64_t batch = 0;
  std::int64_t rows = 0;
};

constexpr Parts parts_of(const Sizes& sizes, bool backward) {
  const std::int64_t most = backward ? kLogitsBytesBackward : kLogitsBytes;
  const std::int64_t of_query = sizes.heads * pair_line(sizes.n) * 4;
  if (of_query == 0) return {sizes.batch, sizes.n};
  const std::int64_t whole = most / (of_query * sizes.n);
  if (whole > 0) return {whole < sizes.batch ? whole : sizes.batch, sizes.n};
  // Parts of one size, so that the last is no small one.
  const std::int64_t fits = most / of_query < 64 ? 64 : most / of_query;
  const std::int64_t count = ceil_div(sizes.n, fits);
  const std::int64_t even = round_up(ceil_div(sizes.n, count), 32);
  return {1, even < sizes.n ? even : sizes.n};
}

}  // namespace fused_ops::invariant_point_attention
