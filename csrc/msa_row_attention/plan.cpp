// SPDX-License-Identifier: Apache-2.0
#include "msa_row_attention/plan.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "common/check.h"
#include "msa_row_attention/config.h"
#include "msa_row_attention/small.h"

namespace fused_ops::msa_row_attention {

Sizes sizes_of(std::int64_t groups, std::int64_t rows, std::int64_t n, std::int64_t channels,
               std::int64_t pair_channels, std::int64_t heads, std::int64_t width) {
  constexpr std::int64_t kMost =
      std::numeric_limits<int>::max() / 16;  // beyond it no plan has a kernel
  const auto bounded = [](std::int64_t size) {
    return static_cast<int>(size < kMost ? size : kMost);
  };
  Sizes sizes;
  sizes.groups = groups;
  sizes.rows = rows;
  sizes.n = n;
  sizes.channels = bounded(channels);
  sizes.pair_channels = bounded(pair_channels);
  sizes.heads = bounded(heads);
  sizes.head_dim = heads > 0 ? bounded(width / heads) : 0;
  sizes.dim = (sizes.head_dim + 7) / 8 * 8;
  return sizes;
}

namespace {

std::vector<std::string> reasons_against(const Problem& problem) {
  std::vector<std::string> reasons;
  const Sizes& sizes = problem.sizes;
  if (!build_runs_on(problem.device)) reasons.push_back(build_reason(problem.device));
  if (problem.result == DType::kFloat64 || problem.result == DType::kOther) {
    reasons.push_back(std::string("there is no kernel for ") + name(problem.result));
  }
  if (problem.msa == DType::kFloat64 || problem.msa == DType::kOther) {
    reasons.push_back(std::string("kernels read float32, bfloat16 and float16, got ") +
                      name(problem.msa));
  }
  if (sizes.head_dim < 1 || sizes.head_dim > kMostDim) {
    reasons.push_back("kernels have heads of width 1 to " + std::to_string(kMostDim) + ", got " +
                      std::to_string(sizes.head_dim));
  }
  constexpr int kMostWide = 1 << 16;
  if (sizes.channels > kMostWide || sizes.pair_channels > kMostWide ||
      std::int64_t{sizes.heads} * sizes.dim > kMostWide) {
    reasons.push_back("kernels have up to " + std::to_string(kMostWide) + " channels");
  }
  if (sizes.n > kMostPositions) {
    reasons.push_back("kernels have up to " + std::to_string(kMostPositions) + " positions");
  }
  if (sizes.pair_channels < 1) reasons.push_back("kernels need a pair tensor with channels");
  return reasons;
}

Mode mode_of(const Problem& problem) {
  if (problem.result == DType::kBFloat16) return Mode::kBFloat16;
  if (problem.result == DType::kFloat16) return Mode::kFloat16;
  return problem.precision == Precision::kTf32 ? Mode::kTf32 : Mode::kSplit;
}

// So many bytes of projections and the like exist at a time: enough that a launch never runs out of
// work, and little beside what a model of that size keeps.
constexpr std::int64_t kMostBytes = std::int64_t{3} << 29;
// The backward has twice as much of a position.
constexpr std::int64_t kMostBytesBackward = std::int64_t{3} << 30;

}  // namespace

Choice choose(const Problem& problem) {
  Choice choice;
  const Sizes& sizes = problem.sizes;
  const bool is_empty = sizes.positions() == 0 || sizes.channels == 0;
  std::vector<std::string> reasons;
  if (!is_empty || !build_runs_on(problem.device) || problem.msa == DType::kFloat64) {
    reasons = reasons_against(problem);
  }
  if (!reasons.empty()) {
    choice.plan.path = Path::kComposition;
    choice.plan.reasons = std::move(reasons);
    return choice;
  }
  choice.mode = mode_of(problem);
  if (is_empty) {
    choice.plan.kernel = "none for an empty result";
    return choice;
  }
  if (!problem.backward && !problem.dropout && small_fits(sizes)) {
    choice.small = true;
    choice.plan.kernel = "small_sm80";
    choice.plan.launches = 2;
    choice.plan.workspace_bytes = small_workspace(sizes) * 4;
    return choice;
  }
  const bool is_fp32 = type_of(choice.mode) == DType::kFloat32;
  const std::int64_t size = bytes_of(type_of(choice.mode));
  // Bytes of a position: its projections, LayerNorm and attention. Of fp32, products are tensors of
  // their own, one after the other.
  const std::int64_t line = 4 * sizes.width() * size;
  const std::int64_t product = is_fp32 ? std::max(line, sizes.channels * size) : line;
  const std::int64_t keys = problem.dropout ? 8 * sizes.heads : 0;
  const std::int64_t forward = product + (sizes.channels + sizes.width()) * size + keys;
  // Gradients of the projections, and of and in front of the gate; of fp32 a product more.
  const std::int64_t backward =
      line + (is_fp32 ? product : 0) + 2 * sizes.width() * size + 8 * sizes.heads;
  const std::int64_t of_position = forward + (problem.backward ? backward : 0);
  const std::int64_t most_bytes = problem.backward ? kMostBytesBackward : kMostBytes;
  const std::int64_t of_row = sizes.n * of_position, of_group = sizes.rows * of_row;
  if (of_group > most_bytes) {
    const std::int64_t most = std::max<std::int64_t>(most_bytes / of_row, 1);
    choice.groups = 1;
    choice.rows = ceil_div(sizes.rows, ceil_div(sizes.rows, most));  // parts of equal size
  } else {
    choice.groups = std::min(sizes.groups, most_bytes / of_group);
    choice.rows = sizes.rows;
  }
  const std::int64_t rows = choice.groups * choice.rows;
  const std::string kind =
      std::string(is_fp32 ? "_fp32" : "") + (problem.dropout ? "_dropout" : "") + "_sm80, ";
  const std::string product_of = is_fp32 ? "tensor_matmul" : "cuBLAS";
  std::string& kernel = choice.plan.kernel;
  if (problem.dropout) kernel = "dropout_keys_sm80, ";
  if (problem.backward) {
    kernel += "backward_gate_sm80, backward_keys" + kind + "backward_queries" + kind +
              "backward_bias" + kind + "norm_backward_sm80, " + product_of;
    choice.plan.launches = 14;
  } else {
    kernel += "prepare_sm80, bias_sm80, " + product_of + ", attend" + kind + product_of +
              (is_fp32 ? ", add_bias_sm80" : "");
    choice.plan.launches = is_fp32 ? 4 : 3;
  }
  choice.plan.launches += problem.dropout ? 1 : 0;
  const int head = width_of(sizes.dim);
  if (is_fp32) {
    const int index = problem.dropout ? 0 : attend_fp32_tile_of(sizes.n);
    const AttendTile& tile = kAttendFp32Tiles[index];
    choice.plan.tile = {tile.rows, tile.query_warps * 16, fp32_keys_of_tile(index, head)};
  } else {
    constexpr int kUsual = 132;  // multiprocessors: the planner has no device to ask
    const int index = problem.dropout ? 0 : attend_tile_of(sizes, kUsual);
    const AttendTile tile = attend_tile(index);
    choice.plan.tile = {tile.rows, tile.query_warps * attend_queries(head, index), 64};
  }
  choice.plan.workspace_bytes = bias_size(sizes) * size + rows * sizes.n * of_position;
  if (problem.backward) {
    choice.plan.workspace_bytes += sizes.groups * sizes.heads * sizes.n * sizes.n * 4;
  }
  return choice;
}

namespace {

Plan answer(const Query& query) {
  const auto& msa = query.shape("msa", 3);
  const auto& pair = query.shape("pair", 3);
  const std::int64_t heads = query.shape("num_heads", 1)[0];
  const std::int64_t head_dim = query.shape("head_dim", 1)[0];
  if (!query.device) return composition("CPU tensors");
  Problem problem;
  std::int64_t rows = 1, groups = 1;
  for (std::size_t i = 0; i + 2 < msa.size(); ++i) rows *= msa[i];
  for (std::size_t i = 0; i + 3 < pair.size(); ++i) groups *= pair[i];
  rows /= std::max<std::int64_t>(groups, 1);
  problem.sizes =
      sizes_of(groups, rows, msa[msa.size() - 2], msa.back(), pair.back(), heads, heads * head_dim);
  problem.msa = query.dtype;
  problem.result = query.dtype;
  problem.precision = query.precision;
  problem.backward = query.backward;
  const auto dropout = query.shapes.find("dropout");
  problem.dropout =
      dropout != query.shapes.end() && dropout->second != std::vector<std::int64_t>{0};
  problem.device = *query.device;
  return choose(problem).plan;
}

const Registration registration("msa_row_attention", &answer);

}  // namespace
}  // namespace fused_ops::msa_row_attention
