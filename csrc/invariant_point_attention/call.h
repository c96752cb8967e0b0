// SPDX-License-Identifier: Apache-2.0
// A call of the op as its kernels take it: checked, and chosen for.
#pragma once

#include <cmath>
#include <string>

#include "common/products.h"
#include "common/workspace.h"
#include "invariant_point_attention/arguments.h"
#include "invariant_point_attention/backward.h"

namespace fused_ops::invariant_point_attention {

// The tensors of the op, in the order of its schema.
struct Inputs {
  const Tensor& node;
  const Tensor& pair;
  const Tensor& translations;
  const Tensor& rotations;
  const MaybeTensor& node_mask;
  const MaybeTensor& pair_value;
  const MaybeTensor& layer_norm_weight;
  const MaybeTensor& layer_norm_bias;
  const Tensor& q_proj_weight;
  const MaybeTensor& q_proj_bias;
  const Tensor& k_proj_weight;
  const MaybeTensor& k_proj_bias;
  const Tensor& v_proj_weight;
  const MaybeTensor& v_proj_bias;
  const Tensor& q_pts_weight;
  const MaybeTensor& q_pts_bias;
  const Tensor& k_pts_weight;
  const MaybeTensor& k_pts_bias;
  const Tensor& v_pts_weight;
  const MaybeTensor& v_pts_bias;
  const Tensor& pair_bias_weight;
  const MaybeTensor& pair_bias_bias;
  const Tensor& head_weights;
  const Tensor& out_proj_weight;
  const MaybeTensor& out_proj_bias;
};

// Its other arguments.
struct Settings {
  std::int64_t num_heads, num_query_points, num_value_points;
  std::optional<double> scalar_scale;
  double point_scale, bias_scale;
  bool gathers_pair;
  std::optional<double> norm_eps;
  double eps;
  std::string precision;
  std::optional<ScalarType> dtype;
};

// The schema of what Inputs and Settings hold, for ops that Python does not define.
#define FO_IPA_ARGUMENTS                                                                   \
  "Tensor node, Tensor pair, Tensor translations, Tensor rotations, Tensor? node_mask, "   \
  "Tensor? pair_value, Tensor? layer_norm_weight, Tensor? layer_norm_bias, "               \
  "Tensor q_proj_weight, Tensor? q_proj_bias, Tensor k_proj_weight, Tensor? k_proj_bias, " \
  "Tensor v_proj_weight, Tensor? v_proj_bias, Tensor q_pts_weight, Tensor? q_pts_bias, "   \
  "Tensor k_pts_weight, Tensor? k_pts_bias, Tensor v_pts_weight, Tensor? v_pts_bias, "     \
  "Tensor pair_bias_weight, Tensor? pair_bias_bias, Tensor head_weights, "                 \
  "Tensor out_proj_weight, Tensor? out_proj_bias, int num_heads, int num_query_points, "   \
  "int num_value_points, float? scalar_scale, float point_scale, float bias_scale, "       \
  "bool gathers_pair, float? norm_eps, float eps, str precision, ScalarType? dtype"

// Tensors of strides that kernels do not walk are copied, and kept here.
struct Call {
  const Inputs& inputs;
  const Settings& settings;
  Lead lead;
  Problem problem;
  Choice chosen;
  PrepareProblem prepare;  // the arguments of it
  Pairs pair;
  Pairs pair_value;  // that is gathered; null data: none
  Linear bias;
  Stored head_weights;
  float scalar_scale, point_scale, bias_scale, norm_eps;
  std::vector<Tensor> kept;

  Call(const Inputs& given, const Settings& with, bool backward)
      : inputs(given), settings(with), lead((check_ranks(given), given.node)) {
    const Tensor& node = given.node;
    const std::int64_t n = node.size(-2), channels = node.size(-1), heads = with.num_heads;
    problem.node = floating_type(kOp, node, "node");
    const bool is_double = problem.node == DType::kFloat64;
    check_of_node(given.pair, "pair", node, lead, {n, n, given.pair.size(-1)});
    check_of_node(given.translations, "translations", node, lead, {n, 3});
    check_of_node(given.rotations, "rotations", node, lead, {n, 3, 3});
    if (given.node_mask) check_of_node(*given.node_mask, "node_mask", node, lead, {n});
    check_type(given.pair, "pair");
    if (given.pair_value) {
      FO_CHECK_VALUE(given.pair_value->dim() >= 3, kOp,
                     ": pair_value must have shape (..., N, N, value_dim), got ",
                     shape_text(given.pair_value->sizes()));
      check_of_node(*given.pair_value, "pair_value", node, lead,
                    {n, n, given.pair_value->size(-1)});
      check_type(*given.pair_value, "pair_value");
    }
    FO_CHECK_VALUE(!(with.gathers_pair && given.pair_value), kOp,
                   ": pair_value must be None when gathers_pair is true");
    FO_CHECK_VALUE(given.layer_norm_weight.has_value() == given.layer_norm_bias.has_value(), kOp,
                   ": layer_norm_weight and layer_norm_bias must be given together");
    const std::int64_t width = given.q_proj_weight.size(0);
    FO_CHECK_VALUE(heads >= 1 && width % heads == 0, kOp,
                   ": q_proj_weight must have a multiple of num_heads = ", heads, " rows, got ",
                   width);
    FO_CHECK_VALUE(with.num_query_points >= 1 && with.num_value_points >= 1, kOp,
                   ": there must be a query point and a value point at least");

    FO_CHECK_VALUE(!with.norm_eps || *with.norm_eps >= 0.0, kOp,
                   ": norm_eps must be 0 or more, got ", *with.norm_eps);

    ModelSizes model{};
    model.batch = lead.batch;
    model.n = n;
    model.channels = channels;
    model.pair_channels = given.pair.size(-1);
    model.value_channels = given.pair_value    ? given.pair_value->size(-1)
                           : with.gathers_pair ? given.pair.size(-1)
                                               : 0;
    model.heads = heads;
    model.width = width;
    model.query_points = with.num_query_points;
    model.value_points = with.num_value_points;
    model.norms = with.norm_eps.has_value();
    problem.sizes = sizes_of(model);
    problem.result = with.dtype ? dtype_of(*with.dtype) : problem.node;
    FO_CHECK_VALUE(
        problem.result != DType::kOther && (!is_double || problem.result == DType::kFloat64), kOp,
        ": dtype must be a floating dtype, and float64 for float64 tensors");
    problem.precision = precision_from(kOp, with.precision);
    problem.backward = backward;
    problem.device = device_capability(node.get_device_index());

    const DeviceGuard guard(node.get_device_index());
    const Storer store(kOp, node, "node", is_double, &kept);
    const auto linear = [&](const Tensor& weight, const char* weight_name, const MaybeTensor& with,
                            const char* bias_name, std::int64_t rows, std::int64_t columns) {
      return Linear{store(weight, weight_name, rows, columns), store(with, bias_name, rows)};
    };
    const std::int64_t query_rows = 3 * heads * model.query_points;
    const std::int64_t value_rows = 3 * heads * model.value_points;
    const std::int64_t features = width + value_rows +
                                  (model.norms ? heads * model.value_points : 0) +
                                  heads * model.value_channels;
    prepare.norm_weight = store(given.layer_norm_weight, "layer_norm_weight", channels);
    prepare.norm_bias = store(given.layer_norm_bias, "layer_norm_bias", channels);
    prepare.q = linear(given.q_proj_weight, "q_proj_weight", given.q_proj_bias, "q_proj_bias",
                       width, channels);
    prepare.k = linear(given.k_proj_weight, "k_proj_weight", given.k_proj_bias, "k_proj_bias",
                       width, channels);
    prepare.v = linear(given.v_proj_weight, "v_proj_weight", given.v_proj_bias, "v_proj_bias",
                       width, channels);
    prepare.q_points = linear(given.q_pts_weight, "q_pts_weight", given.q_pts_bias, "q_pts_bias",
                              query_rows, channels);
    prepare.k_points = linear(given.k_pts_weight, "k_pts_weight", given.k_pts_bias, "k_pts_bias",
                              query_rows, channels);
    prepare.v_points = linear(given.v_pts_weight, "v_pts_weight", given.v_pts_bias, "v_pts_bias",
                              value_rows, channels);
    prepare.out = linear(given.out_proj_weight, "out_proj_weight", given.out_proj_bias,
                         "out_proj_bias", channels, features);
    bias = linear(given.pair_bias_weight, "pair_bias_weight", given.pair_bias_bias,
                  "pair_bias_bias", heads, model.pair_channels);
    head_weights = store(given.head_weights, "head_weights", heads);
    FO_CHECK_VALUE(
        (floating_type(kOp, given.translations, "translations") == DType::kFloat64) == is_double &&
            (floating_type(kOp, given.rotations, "rotations") == DType::kFloat64) == is_double,
        kOp, ": frames must be float64 when node is, and only then");
    scalar_scale = static_cast<float>(
        with.scalar_scale.value_or(1.0 / std::sqrt(static_cast<double>(width / heads))));
    point_scale = static_cast<float>(with.point_scale);
    bias_scale = static_cast<float>(with.bias_scale);
    norm_eps = static_cast<float>(with.norm_eps.value_or(0.0));

    const Walker walker(lead, &kept);
    if (given.node_mask) prepare.mask = walker.mask(*given.node_mask);
    chosen = choose(problem);
    if (chosen.plan.path != Path::kKernel) return;
    prepare.sizes = problem.sizes;
    prepare.mode = chosen.mode;
    prepare.eps = static_cast<float>(with.eps);
    prepare.node = walker.nodes(node);
    Frames& frames = prepare.frames;
    frames.translations =
        walker.frames(given.translations, 2, "translations", &frames.translations_stride);
    frames.rotations = walker.frames(given.rotations, 3, "rotations", &frames.rotations_stride);
    pair = walker.pairs(given.pair);
    if (with.gathers_pair) pair_value = pair;
    if (given.pair_value) pair_value = walker.pairs(*given.pair_value);
  }

  const Sizes& sizes() const { return problem.sizes; }
  Mode mode() const { return chosen.mode; }
  DType type() const { return type_of(chosen.mode); }
  ScalarType scalar() const { return scalar_type_of(type()); }
  bool is_fp32() const { return type() == DType::kFloat32; }

  // A contiguous matrix of type(), or its transpose, in memory of ours.
  Tensor matrix(void* data, std::int64_t rows, std::int64_t columns) const {
    return view_of(inputs.node, data, {rows, columns}, {columns, 1}, scalar());
  }
  Tensor turned(void* data, std::int64_t rows, std::int64_t columns) const {
    return view_of(inputs.node, data, {columns, rows}, {1, columns}, scalar());
  }

 private:
  static void check_ranks(const Inputs& given) {
    const auto at_least = [](const Tensor& tensor, std::int64_t axes, const char* name) {
      FO_CHECK_VALUE(tensor.defined() && tensor.dim() >= axes, kOp, ": ", name,
                     " must be a tensor of ", axes, " axes or more");
    };
    at_least(given.node, 2, "node");
    at_least(given.pair, 3, "pair");
    at_least(given.translations, 2, "translations");
    at_least(given.rotations, 3, "rotations");
    at_least(given.q_proj_weight, 2, "q_proj_weight");
  }

  void check_type(const Tensor& tensor, const char* name) const {
    const DType type = floating_type(kOp, tensor, name);
    FO_CHECK_VALUE((type == DType::kFloat64) == (problem.node == DType::kFloat64), kOp, ": ", name,
                   " must be float64 when node is, and only then, got ",
                   dtype_text(tensor.scalar_type()));
    FO_CHECK_VALUE(settings.dtype || type == problem.node, kOp, ": ", name,
                   " must have the dtype of node outside autocast, expected ",
                   dtype_text(inputs.node.scalar_type()), ", got ",
                   dtype_text(tensor.scalar_type()));
  }
};

}  // namespace fused_ops::invariant_point_attention
