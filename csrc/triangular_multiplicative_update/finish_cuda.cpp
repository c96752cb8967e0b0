// SPDX-License-Identifier: Apache-2.0
// The last step of the backward as a dispatcher op, beside those of stages_cuda.cpp and for the
// same caller: the parameters' gradients.
#include "triangular_multiplicative_update/arguments.h"
#include "triangular_multiplicative_update/finish.h"

namespace fused_ops::triangular_multiplicative_update {
namespace {

// How many matrices of `lines` x `inner` a tensor of whatever shape holds.
std::int64_t matrices_in(const Tensor& tensor, std::int64_t lines, std::int64_t inner) {
  const std::int64_t size = lines * inner;
  FO_CHECK_RUNTIME(tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous() &&
                       tensor.numel() > 0 && tensor.numel() % size == 0,
                   kOp, ": sums must be contiguous fp32 matrices of ", lines, " by ", inner,
                   ", got ", shape_text(tensor.sizes()));
  return tensor.numel() / size;
}

Products products_of(const MaybeTensor& tensor, std::int64_t lines, std::int64_t inner) {
  if (!tensor) return {};
  return {tensor->const_data_ptr<float>(), matrices_in(*tensor, lines, inner)};
}

LineSums line_sums_of(const MaybeTensor& tensor, std::int64_t lines) {
  if (!tensor) return {};
  return {tensor->const_data_ptr<float>(), matrices_in(*tensor, 1, lines)};
}

Result result_of(const MaybeTensor& tensor) {
  if (!tensor) return {};
  return {tensor->mutable_data_ptr(), dtype_of(tensor->scalar_type())};
}

// Parameters in the order of the schema, then sums (finish.h), then results, None where not wanted.
void finish(const Tensor& pair, const Tensor& layer_norm_in_weight,
            const Tensor& layer_norm_in_bias, const Tensor& proj_a_weight,
            const MaybeTensor& proj_a_bias, const Tensor& gate_a_weight,
            const MaybeTensor& gate_a_bias, const Tensor& proj_b_weight,
            const MaybeTensor& proj_b_bias, const Tensor& gate_b_weight,
            const MaybeTensor& gate_b_bias, const Tensor& layer_norm_out_weight,
            const Tensor& layer_norm_out_bias, const Tensor& out_proj_weight,
            const MaybeTensor& out_proj_bias, const Tensor& out_gate_weight,
            const MaybeTensor& out_gate_bias, bool gate_normalized, const MaybeTensor& input,
            const MaybeTensor& out_proj, const MaybeTensor& out_gate, const MaybeTensor& input_sums,
            const MaybeTensor& output_sums, const MaybeTensor& d_norm_in_weight,
            const MaybeTensor& d_norm_in_bias, const MaybeTensor& d_proj_a_weight,
            const MaybeTensor& d_proj_a_bias, const MaybeTensor& d_gate_a_weight,
            const MaybeTensor& d_gate_a_bias, const MaybeTensor& d_proj_b_weight,
            const MaybeTensor& d_proj_b_bias, const MaybeTensor& d_gate_b_weight,
            const MaybeTensor& d_gate_b_bias, const MaybeTensor& d_norm_out_weight,
            const MaybeTensor& d_norm_out_bias, const MaybeTensor& d_out_proj_weight,
            const MaybeTensor& d_out_proj_bias, const MaybeTensor& d_out_gate_weight,
            const MaybeTensor& d_out_gate_bias) {
  const DeviceGuard guard(pair.get_device_index());
  const std::int64_t channels = pair.size(-1), hidden = proj_a_weight.size(0);
  const Parameters parameters{
      layer_norm_in_weight, layer_norm_in_bias, proj_a_weight,         proj_a_bias,
      gate_a_weight,        gate_a_bias,        proj_b_weight,         proj_b_bias,
      gate_b_weight,        gate_b_bias,        layer_norm_out_weight, layer_norm_out_bias,
      out_proj_weight,      out_proj_bias,      out_gate_weight,       out_gate_bias};
  std::vector<Tensor> kept;
  FinishProblem p;
  p.sizes.channels = static_cast<int>(channels);
  p.sizes.hidden = static_cast<int>(hidden);
  p.weights = weights_of(parameters, channels, hidden, Storer(pair, false, &kept));
  p.weights.gate_normalized = gate_normalized;
  p.input = products_of(input, 4 * hidden, channels);
  p.out_proj = products_of(out_proj, channels, hidden);
  p.out_gate = products_of(out_gate, channels, channels);
  p.input_sums = line_sums_of(input_sums, 4 * hidden);
  p.output_sums = line_sums_of(output_sums, 2 * channels);
  p.norm_in_weight = result_of(d_norm_in_weight);
  p.norm_in_bias = result_of(d_norm_in_bias);
  p.norm_out_weight = result_of(d_norm_out_weight);
  p.norm_out_bias = result_of(d_norm_out_bias);
  p.proj_a = {result_of(d_proj_a_weight), result_of(d_proj_a_bias)};
  p.gate_a = {result_of(d_gate_a_weight), result_of(d_gate_a_bias)};
  p.proj_b = {result_of(d_proj_b_weight), result_of(d_proj_b_bias)};
  p.gate_b = {result_of(d_gate_b_weight), result_of(d_gate_b_bias)};
  p.out_proj_result = {result_of(d_out_proj_weight), result_of(d_out_proj_bias)};
  p.out_gate_result = {result_of(d_out_gate_weight), result_of(d_out_gate_bias)};
  const Tensor workspace = empty(pair, {finish_workspace(p)}, ScalarType::Float);
  p.workspace = workspace.mutable_data_ptr<float>();
  finish_sm80(p, current_stream(pair));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fused_ops, m) {
  m.def(
      "triangular_multiplicative_update_stage_finish(Tensor pair, Tensor layer_norm_in_weight, "
      "Tensor layer_norm_in_bias, Tensor proj_a_weight, Tensor? proj_a_bias, Tensor gate_a_weight, "
      "Tensor? gate_a_bias, Tensor proj_b_weight, Tensor? proj_b_bias, Tensor gate_b_weight, "
      "Tensor? gate_b_bias, Tensor layer_norm_out_weight, Tensor layer_norm_out_bias, "
      "Tensor out_proj_weight, Tensor? out_proj_bias, Tensor out_gate_weight, "
      "Tensor? out_gate_bias, bool gate_normalized, Tensor? input, Tensor? out_proj, "
      "Tensor? out_gate, Tensor? input_sums, Tensor? output_sums, "
      "Tensor(a!)? d_layer_norm_in_weight, Tensor(b!)? d_layer_norm_in_bias, "
      "Tensor(c!)? d_proj_a_weight, Tensor(d!)? d_proj_a_bias, Tensor(e!)? d_gate_a_weight, "
      "Tensor(f!)? d_gate_a_bias, Tensor(g!)? d_proj_b_weight, Tensor(h!)? d_proj_b_bias, "
      "Tensor(i!)? d_gate_b_weight, Tensor(j!)? d_gate_b_bias, "
      "Tensor(k!)? d_layer_norm_out_weight, Tensor(l!)? d_layer_norm_out_bias, "
      "Tensor(m!)? d_out_proj_weight, Tensor(n!)? d_out_proj_bias, "
      "Tensor(o!)? d_out_gate_weight, Tensor(p!)? d_out_gate_bias) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, m) {
  m.impl("triangular_multiplicative_update_stage_finish", TORCH_BOX(&finish));
}

}  // namespace fused_ops::triangular_multiplicative_update
