// SPDX-License-Identifier: Apache-2.0
// Which problems the two launches for small ones take. Plain data, for the planner too.
#pragma once

#include <cstdint>

#include "triangular_multiplicative_update/triangular_multiplicative_update.h"

namespace fused_ops::triangular_multiplicative_update {

// Lines of weights lie in shared memory as a whole.
constexpr int kSmallMostChannels = 128;  // and hidden

// About 10 us at half the FFMA rate of an H200. Below, launches and latency decide, which are
// fewest here; above, tensor cores are faster.
constexpr double kSmallMostFlops = 3e8;

constexpr int kSmallPlaces = 4;  // lines of a and b are padded to a multiple of so many places

constexpr bool small_fits(const Sizes& sizes) {
  if (sizes.channels > kSmallMostChannels || sizes.hidden > kSmallMostChannels) return false;
  // As they are computed, padding included. Floating, because there may be any number of pairs.
  const double channels = (sizes.channels + 15) / 16 * 16;
  const double hidden = (sizes.hidden + 15) / 16 * 16;
  const double n = static_cast<double>((sizes.n + kSmallPlaces - 1) / kSmallPlaces * kSmallPlaces);
  const double pair = 8 * channels * hidden + 2 * n * hidden + 2 * channels * (hidden + channels);
  return static_cast<double>(sizes.batch) * n * n * pair <= kSmallMostFlops;
}

// In floats, for a and b.
constexpr std::int64_t small_workspace(const Sizes& sizes) {
  const std::int64_t padded = ceil_div(sizes.n, kSmallPlaces) * kSmallPlaces;
  return 2 * sizes.batch * sizes.n * padded * sizes.hidden;
}

}  // namespace fused_ops::triangular_multiplicative_update
