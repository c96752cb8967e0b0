// SPDX-License-Identifier: Apache-2.0
// The last step of the backward: the parameters' gradients.
#include "triangular_multiplicative_update/backward.h"

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

}  // namespace

void finish(const Call& call, const Sums& sums, const Inputs& grads) {
  const Sizes& sizes = call.sizes();
  const std::int64_t channels = sizes.channels, hidden = sizes.hidden;
  FinishProblem p;
  p.sizes = sizes;
  p.weights = call.weights;
  p.input = products_of(sums.input, 4 * hidden, channels);
  p.out_proj = products_of(sums.out_proj, channels, hidden);
  p.out_gate = products_of(sums.out_gate, channels, channels);
  p.input_sums = line_sums_of(sums.input_lines, 4 * hidden);
  p.output_sums = line_sums_of(sums.output_lines, 2 * channels);
  const auto linear = [&](Input weight, Input bias) {
    return LinearResult{result_of(grads[weight]), result_of(grads[bias])};
  };
  p.norm_in_weight = result_of(grads[kNormInWeight]);
  p.norm_in_bias = result_of(grads[kNormInBias]);
  p.norm_out_weight = result_of(grads[kNormOutWeight]);
  p.norm_out_bias = result_of(grads[kNormOutBias]);
  p.proj_a = linear(kProjAWeight, kProjABias);
  p.gate_a = linear(kGateAWeight, kGateABias);
  p.proj_b = linear(kProjBWeight, kProjBBias);
  p.gate_b = linear(kGateBWeight, kGateBBias);
  p.out_proj_result = linear(kOutProjWeight, kOutProjBias);
  p.out_gate_result = linear(kOutGateWeight, kOutGateBias);
  const Tensor workspace = empty(call.pair, {finish_workspace(p)}, ScalarType::Float);
  p.workspace = workspace.mutable_data_ptr<float>();
  finish_sm80(p, call.stream);
}

}  // namespace fused_ops::triangular_multiplicative_update
