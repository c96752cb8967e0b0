// SPDX-License-Identifier: Apache-2.0
#include "invariant_point_attention/plan.h"

#include <limits>
#include <utility>

#include "common/check.h"
#include "invariant_point_attention/backward.h"
#include "invariant_point_attention/small.h"

namespace fused_ops::invariant_point_attention {

Sizes sizes_of(const ModelSizes& model) {
  constexpr std::int64_t kMost =
      std::numeric_limits<int>::max() / (1 << 10);  // beyond it no plan has a kernel
  const auto bounded = [](std::int64_t size) {
    return static_cast<int>(size < kMost ? size : kMost);
  };
  Sizes sizes;
  sizes.batch = model.batch;
  sizes.n = model.n;
  sizes.channels = bounded(model.channels);
  sizes.pair_channels = bounded(model.pair_channels);
  sizes.value_channels = bounded(model.value_channels);
  sizes.heads = static_cast<int>(std::min<std::int64_t>(model.heads, 1 << 10));
  sizes.head_dim = model.heads > 0 ? std::min(bounded(model.width / model.heads), 1 << 10) : 0;
  sizes.dim = static_cast<int>(round_up(sizes.head_dim, 8));
  sizes.query_points = static_cast<int>(std::min<std::int64_t>(model.query_points, 1 << 8));
  sizes.value_points = static_cast<int>(std::min<std::int64_t>(model.value_points, 1 << 8));
  sizes.norms = model.norms;
  return sizes;
}

namespace {

std::vector<std::string> reasons_against(const Problem& problem) {
  std::vector<std::string> reasons;
  const Sizes& sizes = problem.sizes;
  const auto within = [&](std::int64_t size, int most, const char* what) {
    if (size >= 1 && size <= most) return;
    reasons.push_back(std::string("kernels have 1 to ") + std::to_string(most) + " " + what +
                      ", got " + std::to_string(size));
  };
  if (!build_runs_on(problem.device)) reasons.push_back(build_reason(problem.device));
  if (problem.result == DType::kFloat64 || problem.result == DType::kOther) {
    reasons.push_back(std::string("there is no kernel for ") + name(problem.result));
  }
  if (problem.node == DType::kFloat64 || problem.node == DType::kOther) {
    reasons.push_back(std::string("kernels read float32, bfloat16 and float16, got ") +
                      name(problem.node));
  }
  within(sizes.heads, kMostHeads, "heads");
  within(sizes.head_dim, kMostDim, "channels of a head");
  within(sizes.query_points, kMostPoints, "query points");
  within(sizes.value_points, kMostPoints, "value points");
  within(sizes.channels, kMostChannels, "channels of a node");
  within(sizes.pair_channels, kMostPairChannels, "channels of a pair");
  if (sizes.value_channels > kMostPairChannels) {
    within(sizes.value_channels, kMostPairChannels, "channels of a pair value");
  }
  if (sizes.n > kMostResidues) within(sizes.n, kMostResidues, "residues");
  return reasons;
}

Mode mode_of(const Problem& problem) {
  if (problem.result == DType::kBFloat16) return Mode::kBFloat16;
  if (problem.result == DType::kFloat16) return Mode::kFloat16;
  return problem.precision == Precision::kTf32 ? Mode::kTf32 : Mode::kSplit;
}

// In bytes, of a node: all that is linear in N.
std::int64_t bytes_of_node(const Sizes& sizes, Mode mode, bool backward) {
  const std::int64_t size = bytes_of(type_of(mode));
  const std::int64_t lines = sizes.heads * value_line(sizes, mode) * size;
  std::int64_t bytes = (sizes.channels + sizes.projected() + sizes.features()) * size + lines +
                       2 * sizes.heads * point_line(sizes) * 4;
  if (backward) {
    bytes += (sizes.channels + sizes.projected() + sizes.features()) * size + lines +
             2 * sizes.heads * moment_line(sizes, mode) * (size + 4) +
             sizes.heads * (d_value_line(sizes) + sizes.value_numbers() + 2) * 4;
  }
  return bytes;
}

}  // namespace

Choice choose(const Problem& problem) {
  Choice choice;
  const Sizes& sizes = problem.sizes;
  const bool is_empty = sizes.nodes() == 0 || sizes.channels == 0;
  std::vector<std::string> reasons;
  if (!is_empty || !build_runs_on(problem.device) || problem.node == DType::kFloat64) {
    reasons = reasons_against(problem);
  }
  if (!reasons.empty()) {
    choice.plan.path = Path::kComposition;
    choice.plan.reasons = std::move(reasons);
    return choice;
  }
  choice.mode = mode_of(problem);
  if (is_empty) {
    choice.plan.kernel = "none, the result is empty";
    return choice;
  }
  if (!problem.backward && small_fits(sizes)) {
    choice.small = true;
    choice.plan.kernel = "small_sm80";
    choice.plan.launches = 2;
    choice.plan.workspace_bytes = small_workspace(sizes) * 4;
    return choice;
  }
  choice.parts = parts_of(sizes, problem.backward);
  const bool fp32 = is_fp32(choice.mode), values = sizes.value_channels > 0;
  const std::string kind = fp32 ? "_fp32_sm80, " : "_sm80, ";
  const std::string product = fp32 ? "tensor_matmul" : "cublas";
  const auto blocks = static_cast<int>(ceil_div(sizes.batch, choice.parts.batch) *
                                       ceil_div(sizes.n, choice.parts.rows));
  std::string& kernel = choice.plan.kernel;
  if (problem.backward) {
    kernel = "frames_sm80, output_backward_sm80, logits" + kind +
             (values ? "pair_dots" + kind : std::string()) + "keys_backward" + kind +
             (fp32 ? "settle_dots_sm80, " : "") + "queries_backward" + kind + "pair_backward" +
             kind + "distances_backward_sm80, frames_backward_sm80, " + product;
    // Of fp32 settle_dots, and keys_backward once more.
    choice.plan.launches = 10 + ((values ? 6 : 5) + (fp32 ? 2 : 0)) * blocks;
  } else {
    kernel = "prepare_sm80, " + product + ", frames_sm80, logits" + kind + "values" + kind +
             (values ? "gather" + kind : std::string()) + product;
    choice.plan.launches = 2 + (values ? 3 : 2) * blocks + (fp32 ? 1 : 0);
  }
  const std::int64_t pairs =
      choice.parts.batch * sizes.heads * choice.parts.rows * pair_line(sizes.n);
  const std::int64_t of_pair =
      4 + (problem.backward ? bytes_of(type_of(choice.mode)) + (values ? 4 : 0) : 0);
  choice.plan.workspace_bytes =
      pairs * of_pair + sizes.nodes() * bytes_of_node(sizes, choice.mode, problem.backward);
  if (problem.backward && fp32) {  // what the first keys_backward gives beside dS
    const int numbers = moment_line(sizes, choice.mode) + d_value_line(sizes);
    choice.plan.workspace_bytes += choice.parts.batch * sizes.n * sizes.heads * numbers * 4;
  }
  return choice;
}

namespace {

std::int64_t number_of(const Query& query, const char* name) {
  const auto at = query.shapes.find(name);
  return at == query.shapes.end() || at->second.empty() ? 0 : at->second[0];
}

Plan answer(const Query& query) {
  const auto& node = query.shape("node", 2);
  const auto& pair = query.shape("pair", 3);
  if (!query.device) return composition("CPU tensors");
  ModelSizes model{};
  model.heads = query.shape("num_heads", 1)[0];
  model.width = model.heads * query.shape("head_dim", 1)[0];
  model.query_points = query.shape("num_query_points", 1)[0];
  model.value_points = query.shape("num_value_points", 1)[0];
  model.batch = 1;
  for (std::size_t i = 0; i + 2 < node.size(); ++i) model.batch *= node[i];
  model.n = node[node.size() - 2];
  model.channels = node.back();
  model.pair_channels = pair.back();
  const auto values = query.shapes.find("pair_value");
  if (values != query.shapes.end() && !values->second.empty()) {
    model.value_channels = values->second.back();
  } else if (number_of(query, "gathers_pair") != 0) {
    model.value_channels = pair.back();
  }
  model.norms = number_of(query, "has_norms") != 0;
  Problem problem;
  problem.sizes = sizes_of(model);
  problem.node = query.dtype;
  problem.result = query.dtype;
  problem.precision = query.precision;
  problem.backward = query.backward;
  problem.device = *query.device;
  return choose(problem).plan;
}

const Registration registration("invariant_point_attention", &answer);

}  // namespace
}  // namespace fused_ops::invariant_point_attention
