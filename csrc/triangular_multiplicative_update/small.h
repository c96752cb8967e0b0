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

constexpr bool small_fits(const Sizes& sizes) {
  if (sizes.channels > kSmallMostChannels || sizes.hidden > kSmallMostChannels) return false;
  // As they are computed: in sixteens. Floating, because the number of pairs may be anything.
  const double channels = (sizes.channels + 15) / 16 * 16;
  const double hidden = (sizes.hidden + 15) / 16 * 16;
  const double n = static_cast<double>(sizes.n);
  const double pair = 8 * channels * hidden + 2 * n * hidden + 2 * channels * (hidden + channels);
  return static_cast<double>(sizes.batch) * n * n * pair <= kSmallMostFlops;
}

// In floats: a and b, each (batch, line, k, hidden).
constexpr std::int64_t small_workspace(const Sizes& sizes) {
  return 2 * sizes.batch * sizes.n * sizes.n * sizes.hidden;
}

}  // namespace fused_ops::triangular_multiplicative_update
