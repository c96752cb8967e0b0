// SPDX-License-Identifier: Apache-2.0
// The CUDA implementation of fused_ops::triangular_multiplicative_update_forward, whose schema
// Python has defined: check, plan, then launch or hand over to the PyTorch composition.
#include <algorithm>

#include "triangular_multiplicative_update/arguments.h"
#include "triangular_multiplicative_update/contraction.h"
#include "triangular_multiplicative_update/large.h"
#include "triangular_multiplicative_update/small.h"

namespace fused_ops::triangular_multiplicative_update {
namespace {

void run_small(const Choice& chosen, const Problem& problem, bool outgoing, const Pairs& pair,
               const Mask& mask, const Weights& weights, Tensor& out) {
  const Tensor workspace = empty(out, {chosen.plan.workspace_bytes / 4}, ScalarType::Float);
  SmallProblem small;
  small.sizes = problem.sizes;
  small.outgoing = outgoing;
  small.pair = pair;
  small.mask = mask;
  small.weights = weights;
  small.output_type = problem.result;
  small.out = out.mutable_data_ptr();
  small.workspace = workspace.mutable_data_ptr<float>();
  small_forward_sm80(small, current_stream(out));
}

void run_large(const Choice& chosen, const Problem& problem, bool outgoing, const Pairs& pair,
               const Mask& mask, const Weights& weights, Tensor& out) {
  const Sizes& sizes = problem.sizes;
  const Mode mode = chosen.mode;
  CUstream_st* stream = current_stream(out);
  const Packed packed = Packed::of(sizes, mode);
  const Tensor workspace = empty(out, {packed.bytes}, ScalarType::Byte);

  PackProblem pack;
  pack.sizes = sizes;
  pack.mode = mode;
  pack.weights = weights;
  pack.mask = mask;
  pack.workspace = workspace.mutable_data_ptr();
  pack_sm80(pack, stream);

  ProjectProblem project;
  project.sizes = sizes;
  project.mode = mode;
  project.outgoing = outgoing;
  project.eps = weights.eps;
  project.tile = chosen.forward_tile;
  project.pair = pair;
  project.mask = mask;
  project.packed = pack.workspace;

  const std::int64_t pairs = sizes.pairs();
  Tensor o = empty(out, {sizes.hidden, pairs},
                   mode == Mode::kBFloat16 ? ScalarType::BFloat16 : ScalarType::Float);
  {
    const int most = std::min(chosen.group * kPieceChannels, sizes.hidden);
    const Tensor planes =
        empty(out, {2 * parts(mode) * most * pairs + room_behind(sizes)}, ScalarType::Half);
    auto* plane = static_cast<std::uint16_t*>(planes.mutable_data_ptr());
    for (int part = 0; part < parts(mode); ++part) {
      project.a[part] = plane + part * most * pairs;
      project.b[part] = plane + (parts(mode) + part) * most * pairs;
    }
    for (int first = 0; first < packed.hidden_blocks; first += chosen.group) {
      project.first_block = first;
      project.blocks = std::min(chosen.group, packed.hidden_blocks - first);
      FUSED_OPS_RUN(project, project, chosen, stream);
      const int from = first * kPieceChannels;
      const int channels = std::min(project.blocks * kPieceChannels, sizes.hidden - from);
      contract_planes(problem, chosen, packed, project, from, channels, o, stream);
    }
  }

  OutputProblem output;
  output.sizes = sizes;
  output.mode = mode;
  output.gate_normalized = weights.gate_normalized;
  output.eps = weights.eps;
  output.tile = chosen.forward_tile;
  output.pair = pair;
  output.packed = pack.workspace;
  output.o = o.const_data_ptr();
  output.out = out.mutable_data_ptr();
  FUSED_OPS_RUN(output, output, chosen, stream);
}

Tensor forward(const Tensor& pair, const MaybeTensor& mask, const Tensor& layer_norm_in_weight,
               const Tensor& layer_norm_in_bias, const Tensor& proj_a_weight,
               const MaybeTensor& proj_a_bias, const Tensor& gate_a_weight,
               const MaybeTensor& gate_a_bias, const Tensor& proj_b_weight,
               const MaybeTensor& proj_b_bias, const Tensor& gate_b_weight,
               const MaybeTensor& gate_b_bias, const Tensor& layer_norm_out_weight,
               const Tensor& layer_norm_out_bias, const Tensor& out_proj_weight,
               const MaybeTensor& out_proj_bias, const Tensor& out_gate_weight,
               const MaybeTensor& out_gate_bias, bool outgoing, bool gate_normalized, double eps,
               std::optional<std::int64_t> max_workspace, std::string_view precision,
               std::optional<ScalarType> dtype) {
  Problem problem;
  problem.pair = floating_type(kOp, pair, "pair");
  const std::int64_t axes = pair.dim();
  FO_CHECK_VALUE(axes >= 3 && pair.size(-2) == pair.size(-3), kOp,
                 ": pair must have shape (..., N, N, pair_dim), got ", shape_text(pair.sizes()));
  const std::int64_t n = pair.size(-2), channels = pair.size(-1);
  std::vector<std::int64_t> lead;
  std::int64_t batch = 1;
  for (std::int64_t i = 0; i + 3 < axes; ++i) {
    lead.push_back(pair.size(i));
    batch *= lead.back();
  }
  FO_CHECK_VALUE(proj_a_weight.defined() && proj_a_weight.dim() == 2, kOp,
                 ": proj_a_weight must have shape (hidden_dim, pair_dim)");
  const std::int64_t hidden = proj_a_weight.size(0);
  FO_CHECK_VALUE(max_workspace.value_or(0) >= 0, kOp,
                 ": max_workspace must be None or a number of bytes, got ",
                 max_workspace.value_or(0));
  problem.sizes = sizes_of(batch, n, channels, hidden);
  problem.result = dtype ? dtype_of(*dtype) : problem.pair;
  FO_CHECK_VALUE(problem.result != DType::kOther &&
                     (problem.pair != DType::kFloat64 || problem.result == DType::kFloat64),
                 kOp, ": dtype must be a floating dtype, and float64 for float64 tensors");
  problem.precision = precision_from(kOp, precision);
  problem.max_workspace = max_workspace.value_or(-1);
  problem.device = device_capability(pair.get_device_index());

  std::vector<Tensor> kept;
  const Storer store(kOp, pair, "pair", problem.pair == DType::kFloat64, &kept);
  const Parameters parameters{
      layer_norm_in_weight, layer_norm_in_bias, proj_a_weight,         proj_a_bias,
      gate_a_weight,        gate_a_bias,        proj_b_weight,         proj_b_bias,
      gate_b_weight,        gate_b_bias,        layer_norm_out_weight, layer_norm_out_bias,
      out_proj_weight,      out_proj_bias,      out_gate_weight,       out_gate_bias};
  const DeviceGuard guard(pair.get_device_index());
  Weights weights = weights_of(parameters, channels, hidden, store);
  weights.eps = static_cast<float>(eps);
  weights.gate_normalized = gate_normalized;
  Tensor kept_mask = pair, kept_pair = pair;
  const Mask factors = mask_of(mask, pair, lead, n, &kept_mask);

  const Choice chosen = choose(problem);
  if (chosen.kernels == Kernels::kNone) {
    std::string reason;
    for (const std::string& one : chosen.plan.reasons) reason += (reason.empty() ? "" : "; ") + one;
    return call_operator("fused_ops::triangular_multiplicative_update_composition", pair, mask,
                         layer_norm_in_weight, layer_norm_in_bias, proj_a_weight, proj_a_bias,
                         gate_a_weight, gate_a_bias, proj_b_weight, proj_b_bias, gate_b_weight,
                         gate_b_bias, layer_norm_out_weight, layer_norm_out_bias, out_proj_weight,
                         out_proj_bias, out_gate_weight, out_gate_bias, outgoing, gate_normalized,
                         eps, max_workspace, std::string(precision), dtype, reason);
  }

  const auto sizes = pair.sizes();
  Tensor out = empty(pair, {sizes.begin(), sizes.end()}, scalar_type_of(problem.result));
  if (batch * n * channels == 0) return out;
  const Pairs pairs = pairs_of(pair, lead, &kept_pair);
  const auto run = chosen.kernels == Kernels::kSmall ? run_small : run_large;
  run(chosen, problem, outgoing, pairs, factors, weights, out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, m) {
  m.impl("triangular_multiplicative_update_forward", TORCH_BOX(&forward));
}

}  // namespace fused_ops::triangular_multiplicative_update
