// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/plan.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "common/check.h"
#include "triangular_multiplicative_update/config.h"
#include "triangular_multiplicative_update/packed.h"
#include "triangular_multiplicative_update/small.h"

namespace fused_ops::triangular_multiplicative_update {

Sizes sizes_of(std::int64_t batch, std::int64_t n, std::int64_t channels, std::int64_t hidden) {
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  Sizes sizes;
  sizes.batch = batch;
  sizes.n = n;
  sizes.pitch = ceil_div(n, kPlaces) * kPlaces;
  sizes.channels = static_cast<int>(std::min(channels, kMost));
  sizes.hidden = static_cast<int>(std::min(hidden, kMost));
  return sizes;
}

namespace {

Mode mode_of(const Problem& problem) {
  if (problem.result == DType::kBFloat16) return Mode::kBFloat16;
  if (problem.result == DType::kFloat16) return Mode::kFloat16;
  // Where the launches of a forward decide, accuracy is free.
  const bool few = !problem.backward && problem.sizes.pairs() < kFewPairs;
  return problem.precision == Precision::kTf32 && !few ? Mode::kTf32 : Mode::kSplit;
}

std::string name_of(const Choice& choice) {
  const std::string arch = choice.hopper_rows ? "sm90a" : "sm80";
  const char* contraction = choice.mode == Mode::kBFloat16  ? "cuBLAS (bf16)"
                            : choice.mode == Mode::kFloat16 ? "cuBLAS (fp16)"
                            : choice.mode == Mode::kTf32    ? "cuBLAS (scaled fp16)"
                            : choice.hopper                 ? "contract_sm90a"
                                                            : "contract_sm80";
  return "project_" + arch + ", " + contraction + ", output_" + arch;
}

// Bytes of o, and of 64 channels of a and b.
std::int64_t o_bytes(const Sizes& sizes, Mode mode) {
  return sizes.pairs() * sizes.hidden * (mode == Mode::kBFloat16 ? 2 : 4);
}
std::int64_t group_bytes(const Sizes& sizes, Mode mode, int channels) {
  return sizes.pairs() * channels * 2 * 2 * parts(mode);
}

// As many blocks of 64 channels at a time as memory allows, one at least. Without a wish: three
// planes of the result's dtype, which is the op's promise.
int choose_group(const Problem& problem, Mode mode, std::int64_t* bytes) {
  const Sizes& sizes = problem.sizes;
  const Packed packed = Packed::of(sizes, mode);
  const std::int64_t element = problem.result == DType::kFloat32 ? 4 : 2;
  const std::int64_t planes = 3 * sizes.pairs() * sizes.hidden * element;
  int group = packed.hidden_blocks;
  const auto needed = [&](int blocks) {
    const int channels = std::min(blocks * kPieceChannels, sizes.hidden);
    return o_bytes(sizes, mode) + group_bytes(sizes, mode, channels);
  };
  const auto fits = [&](int blocks) {
    if (needed(blocks) > planes) return false;
    return problem.max_workspace < 0 || needed(blocks) + packed.bytes <= problem.max_workspace;
  };
  while (group > 1 && !fits(group)) --group;
  *bytes = needed(group) + packed.bytes;
  return group;
}

std::vector<std::string> reasons_against(const Problem& problem) {
  std::vector<std::string> reasons;
  const Sizes& sizes = problem.sizes;
  if (!build_runs_on(problem.device)) reasons.push_back(build_reason(problem.device));
  const auto is_floating = [](DType type) {
    return type != DType::kFloat64 && type != DType::kOther;
  };
  if (!is_floating(problem.pair) || !is_floating(problem.result)) {
    reasons.push_back(std::string("kernels take float32, bfloat16 and float16, got ") +
                      name(is_floating(problem.pair) ? problem.result : problem.pair));
  }
  const int channels = std::max(sizes.channels, sizes.hidden);
  if (channels > kMostChannels || std::min(sizes.channels, sizes.hidden) < 1) {
    reasons.push_back("kernels take 1 to " + std::to_string(kMostChannels) +
                      " channels of pair and hidden, got " + std::to_string(sizes.channels) +
                      " and " + std::to_string(sizes.hidden));
  } else if (std::max(sizes.batch * sizes.n, sizes.batch * sizes.hidden) >
             std::numeric_limits<int>::max()) {
    reasons.push_back("there may be 2^31 - 1 lines of pairs and matrices of a channel, got " +
                      std::to_string(sizes.batch * sizes.n) + " and " +
                      std::to_string(sizes.batch * sizes.hidden));
  } else if (reasons.empty() && choose_tile(channels, mode_of(problem) == Mode::kSplit,
                                            sizes.pairs(), problem.device) < 0) {
    reasons.push_back(
        "a block of the device has " + std::to_string(shared_limit(problem.device) / 1024) +
        " KiB of shared memory, too little for " + std::to_string(channels) + " channels");
  }
  return reasons;
}

}  // namespace

Choice choose(const Problem& problem) {
  Choice choice;
  const Sizes& sizes = problem.sizes;
  const bool is_empty = sizes.batch * sizes.n * sizes.channels == 0;
  std::vector<std::string> reasons;
  if (!is_empty || problem.pair == DType::kFloat64) reasons = reasons_against(problem);
  if (!reasons.empty()) {
    choice.plan.path = Path::kComposition;
    choice.plan.reasons = std::move(reasons);
    return choice;
  }
  choice.mode = mode_of(problem);
  if (is_empty) {
    choice.kernels = Kernels::kSmall;
    choice.plan.kernel = "none for an empty result";
    return choice;
  }
  if (!problem.backward && small_fits(sizes)) {
    choice.kernels = Kernels::kSmall;
    choice.plan.kernel = "small_sm80";
    choice.plan.launches = 2;
    choice.plan.workspace_bytes = small_workspace(sizes) * 4;
    return choice;
  }
  choice.kernels = Kernels::kLarge;
  const bool split = choice.mode == Mode::kSplit;
  choice.tile =
      choose_tile(std::max(sizes.channels, sizes.hidden), split, sizes.pairs(), problem.device);
  choice.forward_tile =
      choose_forward_tile(choice.tile, sizes.channels, sizes.hidden, split, problem.device);
  choice.hopper = split && sizes.n > 64 && build_runs_sm90a_on(problem.device);
  choice.group = choose_group(problem, choice.mode, &choice.plan.workspace_bytes);
  choice.hopper_rows = choice.tile == 0 && build_runs_sm90a_on(problem.device);
  choice.plan.kernel = name_of(choice);
  const bool tall = !problem.backward && choice.forward_tile == kTallTileIndex;
  const Tile& tile = tall ? kTallTile : kTiles[choice.tile];
  choice.plan.tile = {tile.rows, tile.channels, kInner};
  const int groups =
      static_cast<int>(ceil_div(Packed::of(sizes, choice.mode).hidden_blocks, choice.group));
  choice.plan.launches = 2 + groups * (split ? 2 : 1);
  return choice;
}

namespace {

Plan answer(const Query& query) {
  const auto& shape = query.shape("pair", 3);
  const auto& hidden = query.shape("hidden", 1);
  if (!query.device) return composition("CPU tensors");
  Problem problem;
  std::int64_t batch = 1;
  for (std::size_t i = 0; i + 3 < shape.size(); ++i) batch *= shape[i];
  problem.sizes = sizes_of(batch, shape[shape.size() - 2], shape.back(), hidden[0]);
  problem.pair = query.dtype;
  problem.result = query.dtype;
  problem.precision = query.precision;
  problem.backward = query.backward;
  problem.device = *query.device;
  const auto wish = query.shapes.find("max_workspace");
  if (wish != query.shapes.end() && !wish->second.empty()) problem.max_workspace = wish->second[0];
  return choose(problem).plan;
}

const Registration registration("triangular_multiplicative_update", &answer);

}  // namespace
}  // namespace fused_ops::triangular_multiplicative_update
