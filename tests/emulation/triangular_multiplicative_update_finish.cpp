// SPDX-License-Identifier: Apache-2.0
// The two ends of the backward of triangular_multiplicative_update at the parameters, through their
// launchers. Parameters that are not given are null, as are results of type -1.
#include <string>

#include "emulation/driver.h"
#include "triangular_multiplicative_update/finish_sm80.cu"
#include "triangular_multiplicative_update/fold_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::DType;
using fused_ops::Linear;
using fused_ops::Stored;
using namespace fused_ops::triangular_multiplicative_update;

Sizes sizes(Request& request) {
  Sizes s;
  s.channels = static_cast<int>(request.integer("channels"));
  s.hidden = static_cast<int>(request.integer("hidden"));
  return s;
}

Stored stored(Request& request, const std::string& name) {
  const std::int64_t type = request.integer(name + "_type", -1);
  if (type < 0) return {};
  return {request.input<char>(name), static_cast<DType>(type)};
}

Linear linear(Request& request, const std::string& name) {
  return {stored(request, name + "_weight"), stored(request, name + "_bias")};
}

Weights weights(Request& request) {
  Weights w;
  w.norm_in_weight = stored(request, "layer_norm_in_weight");
  w.norm_in_bias = stored(request, "layer_norm_in_bias");
  w.norm_out_weight = stored(request, "layer_norm_out_weight");
  w.norm_out_bias = stored(request, "layer_norm_out_bias");
  w.proj_a = linear(request, "proj_a");
  w.gate_a = linear(request, "gate_a");
  w.proj_b = linear(request, "proj_b");
  w.gate_b = linear(request, "gate_b");
  w.out_proj = linear(request, "out_proj");
  w.out_gate = linear(request, "out_gate");
  w.gate_normalized = request.integer("gate_normalized") != 0;
  return w;
}

void* output(Request& request, const std::string& name, std::int64_t size, DType type) {
  return request.output<char>(name, size * (type == DType::kFloat32 ? 4 : 2));
}

Result result(Request& request, const std::string& name, std::int64_t size) {
  const std::int64_t type = request.integer("d_" + name, -1);
  if (type < 0) return {};
  const auto as = static_cast<DType>(type);
  return {output(request, name, size, as), as};
}

LinearResult linear_result(Request& request, const std::string& name, std::int64_t lines,
                           std::int64_t inner) {
  return {result(request, name + "_weight", lines * inner), result(request, name + "_bias", lines)};
}

Products products(Request& request, const std::string& name) {
  const std::int64_t slabs = request.integer(name + "_slabs", 0);
  if (slabs == 0) return {};
  return {request.input<float>(name), slabs};
}

LineSums line_sums(Request& request, const std::string& name) {
  const std::int64_t rows = request.integer(name + "_rows", 0);
  if (rows == 0) return {};
  return {request.input<float>(name), rows};
}

const emulation::Kernel finish("finish", [](Request& request) {
  FinishProblem p;
  p.sizes = sizes(request);
  p.weights = weights(request);
  p.input = products(request, "input");
  p.out_proj = products(request, "out_proj");
  p.out_gate = products(request, "out_gate");
  p.input_sums = line_sums(request, "input_sums");
  p.output_sums = line_sums(request, "output_sums");
  const std::int64_t channels = p.sizes.channels, hidden = p.sizes.hidden;
  p.norm_in_weight = result(request, "layer_norm_in_weight", channels);
  p.norm_in_bias = result(request, "layer_norm_in_bias", channels);
  p.norm_out_weight = result(request, "layer_norm_out_weight", hidden);
  p.norm_out_bias = result(request, "layer_norm_out_bias", hidden);
  p.proj_a = linear_result(request, "proj_a", hidden, channels);
  p.gate_a = linear_result(request, "gate_a", hidden, channels);
  p.proj_b = linear_result(request, "proj_b", hidden, channels);
  p.gate_b = linear_result(request, "gate_b", hidden, channels);
  p.out_proj_result = linear_result(request, "out_proj", channels, hidden);
  p.out_gate_result = linear_result(request, "out_gate", channels, channels);
  const emulation::Buffer workspace(static_cast<std::size_t>(finish_workspace(p)) * sizeof(float));
  emulation::poison(workspace.data(), workspace.bytes());
  p.workspace = reinterpret_cast<float*>(workspace.data());
  finish_sm80(p, nullptr);
});

const emulation::Kernel fold("fold", [](Request& request) {
  FoldProblem p;
  p.sizes = sizes(request);
  p.weights = weights(request);
  p.type = static_cast<DType>(request.integer("type"));
  const std::int64_t channels = p.sizes.channels, hidden = p.sizes.hidden;
  if (request.integer("input")) p.input = output(request, "input", 4 * hidden * channels, p.type);
  if (request.integer("out")) {
    p.out_proj = output(request, "out_proj", channels * hidden, p.type);
    p.largest = request.output<unsigned>("largest", hidden);
  }
  if (request.integer("gate")) {
    p.out_gate = output(request, "out_gate", channels * channels, p.type);
  }
  fold_sm80(p, nullptr);
});

}  // namespace
