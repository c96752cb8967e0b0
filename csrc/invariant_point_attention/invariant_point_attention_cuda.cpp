// SPDX-License-Identifier: Apache-2.0
// The CUDA implementation of fused_ops::invariant_point_attention_forward, whose schema Python has
// defined: check, plan, then launch or hand over to the PyTorch composition.
#include <type_traits>

#include "common/add_bias.h"
#include "invariant_point_attention/small.h"
#include "invariant_point_attention/stages.h"

namespace fused_ops::invariant_point_attention {
namespace {

void run_small(const Call& call, Tensor& out) {
  SmallProblem p;
  p.prepare = call.prepare;
  p.pair = call.pair;
  p.bias = call.bias;
  p.head_weights = call.head_weights;
  p.scalar_scale = call.scalar_scale;
  p.point_scale = call.point_scale;
  p.bias_scale = call.bias_scale;
  p.pair_values = call.pair_value;
  p.norm_eps = call.norm_eps;
  const Tensor workspace = empty(out, {call.chosen.plan.workspace_bytes / 4}, ScalarType::Float);
  p.workspace = workspace.mutable_data_ptr<float>();
  p.out = out.mutable_data_ptr();
  small_forward_sm80(p, current_stream(out));
}

// What the backward need not compute again.
struct Left {
  Tensor saved;
  Tensor projected;
};

// The result into `out`. With `saves` what the backward need not compute again.
std::optional<Left> run(const Call& call, bool saves, Tensor& out) {
  CUstream_st* stream = current_stream(out);
  const Sizes& sizes = call.sizes();
  Workspace memory;
  Stages stages(call, memory, false);
  stages.reserve();
  Saved saved(call);
  const std::int64_t at_saved = memory.take(saves ? 0 : saved.bytes());
  memory.allocate(out);
  MaybeTensor left;
  if (saves) left = empty(out, {saved.bytes()}, ScalarType::Byte);
  saved.set(left ? left->mutable_data_ptr() : memory.at(at_saved));

  stages.prepare(saved, true, stream);
  const Tensor projected = stages.project();
  stages.place(projected, saved, true, stream);
  stages.for_parts([&](std::int64_t batch, const Sizes& part, const Block& block) {
    stages.logits(batch, part, block, projected, saved, stream);
    stages.gather(batch, part, block, saved, saves, stream);
  });
  const Tensor features = call.matrix(saved.features(), sizes.nodes(), sizes.features());
  void* weight = stages.out_weight();
  if (call.is_fp32()) {
    const Tensor product = multiply_fp32(
        features, call.turned(weight, sizes.channels, sizes.features()), call.settings.precision);
    AddBiasProblem add;
    add.rows = sizes.nodes();
    add.channels = sizes.channels;
    add.product = static_cast<const float*>(product.const_data_ptr());
    add.bias = static_cast<const float*>(stages.out_bias().const_data_ptr());
    add.out = static_cast<float*>(out.mutable_data_ptr());
    add_bias_sm80(add, stream);
  } else {
    multiply(features, call.matrix(weight, sizes.channels, sizes.features()), stages.out_bias(),
             call.matrix(out.mutable_data_ptr(), sizes.nodes(), sizes.channels));
  }
  if (!left) return {};
  return Left{*left, projected};
}

bool has_backward(const Call& call) {
  Problem problem = call.problem;
  problem.backward = true;
  return choose(problem).plan.path == Path::kKernel;
}

// The result; with `saves` also what the backward need not compute again, if it can do with it.
template <bool saves>
std::conditional_t<saves, std::vector<Tensor>, Tensor> forward(
    const Tensor& node, const Tensor& pair, const Tensor& translations, const Tensor& rotations,
    const MaybeTensor& node_mask, const MaybeTensor& pair_value,
    const MaybeTensor& layer_norm_weight, const MaybeTensor& layer_norm_bias,
    const Tensor& q_proj_weight, const MaybeTensor& q_proj_bias, const Tensor& k_proj_weight,
    const MaybeTensor& k_proj_bias, const Tensor& v_proj_weight, const MaybeTensor& v_proj_bias,
    const Tensor& q_pts_weight, const MaybeTensor& q_pts_bias, const Tensor& k_pts_weight,
    const MaybeTensor& k_pts_bias, const Tensor& v_pts_weight, const MaybeTensor& v_pts_bias,
    const Tensor& pair_bias_weight, const MaybeTensor& pair_bias_bias, const Tensor& head_weights,
    const Tensor& out_proj_weight, const MaybeTensor& out_proj_bias, std::int64_t num_heads,
    std::int64_t num_query_points, std::int64_t num_value_points,
    std::optional<double> scalar_scale, double point_scale, double bias_scale, bool gathers_pair,
    std::optional<double> norm_eps, double eps, std::string_view precision,
    std::optional<ScalarType> dtype) {
  const Inputs inputs{node,
                      pair,
                      translations,
                      rotations,
                      node_mask,
                      pair_value,
                      layer_norm_weight,
                      layer_norm_bias,
                      q_proj_weight,
                      q_proj_bias,
                      k_proj_weight,
                      k_proj_bias,
                      v_proj_weight,
                      v_proj_bias,
                      q_pts_weight,
                      q_pts_bias,
                      k_pts_weight,
                      k_pts_bias,
                      v_pts_weight,
                      v_pts_bias,
                      pair_bias_weight,
                      pair_bias_bias,
                      head_weights,
                      out_proj_weight,
                      out_proj_bias};
  const Settings settings{
      num_heads,  num_query_points, num_value_points, scalar_scale, point_scale,
      bias_scale, gathers_pair,     norm_eps,         eps,          std::string(precision),
      dtype};
  const Call call(inputs, settings, false);
  if (call.chosen.plan.path != Path::kKernel) {
    std::string reason;
    for (const std::string& one : call.chosen.plan.reasons) {
      reason += (reason.empty() ? "" : "; ") + one;
    }
    return {call_operator("fused_ops::invariant_point_attention_composition", node, pair,
                          translations, rotations, node_mask, pair_value, layer_norm_weight,
                          layer_norm_bias, q_proj_weight, q_proj_bias, k_proj_weight, k_proj_bias,
                          v_proj_weight, v_proj_bias, q_pts_weight, q_pts_bias, k_pts_weight,
                          k_pts_bias, v_pts_weight, v_pts_bias, pair_bias_weight, pair_bias_bias,
                          head_weights, out_proj_weight, out_proj_bias, num_heads, num_query_points,
                          num_value_points, scalar_scale, point_scale, bias_scale, gathers_pair,
                          norm_eps, eps, std::string(precision), dtype, reason)};
  }
  const DeviceGuard guard(node.get_device_index());
  const auto shape = node.sizes();
  Tensor out = empty(node, {shape.begin(), shape.end()}, scalar_type_of(call.problem.result));
  std::optional<Left> left;
  if (out.numel() > 0) {
    if (call.chosen.small) {
      run_small(call, out);
    } else {
      left = run(call, saves && has_backward(call), out);
    }
  }
  if constexpr (saves) {
    if (left) return {out, left->saved, left->projected};
  }
  return {out};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fused_ops, m) {
  m.def("invariant_point_attention_forward_saving(" FO_IPA_ARGUMENTS ") -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, m) {
  m.impl("invariant_point_attention_forward", TORCH_BOX(&forward<false>));
  m.impl("invariant_point_attention_forward_saving", TORCH_BOX(&forward<true>));
}

}  // namespace fused_ops::invariant_point_attention
