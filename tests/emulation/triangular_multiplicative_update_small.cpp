// SPDX-License-Identifier: Apache-2.0
// The triangular multiplicative update of small problems, through its launcher.
#include <cstddef>
#include <string>

#include "emulation/driver.h"
#include "triangular_multiplicative_update/small.h"
#include "triangular_multiplicative_update/small_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::DType;
using fused_ops::Linear;
using fused_ops::MaskType;
using fused_ops::Stored;
using namespace fused_ops::triangular_multiplicative_update;

std::size_t bytes(DType type) {
  return type == DType::kFloat32 ? 4 : 2;
}

// Tensors of type `<name>_type` begin `<name>_offset` elements behind an address that is aligned;
// without a type they are missing.
Stored stored(Request& request, const std::string& name) {
  Stored result;
  const std::int64_t type = request.integer(name + "_type", -1);
  if (type < 0) return result;
  result.type = static_cast<DType>(type);
  result.data = request.input<char>(name) +
                static_cast<std::size_t>(request.integer(name + "_offset", 0)) * bytes(result.type);
  return result;
}

Linear linear(Request& request, const std::string& name) {
  return {stored(request, name + "_weight"), stored(request, name + "_bias")};
}

const emulation::Kernel forward("forward", [](Request& request) {
  SmallProblem p;
  p.sizes.batch = request.integer("batch");
  p.sizes.n = request.integer("n");
  p.sizes.pitch = fused_ops::ceil_div(p.sizes.n, kPlaces) * kPlaces;
  p.sizes.channels = static_cast<int>(request.integer("channels"));
  p.sizes.hidden = static_cast<int>(request.integer("hidden"));
  p.outgoing = request.integer("outgoing") != 0;
  const Stored pair = stored(request, "pair");
  p.pair = {pair.data, pair.type, request.integer("pair_stride0"), request.integer("pair_stride1"),
            request.integer("pair_stride2")};
  if (request.integer("mask_kind", -1) >= 0) {
    p.mask.type = static_cast<MaskType>(request.integer("mask_kind"));
    p.mask.data = request.input<char>("mask") + request.integer("mask_offset_bytes");
    p.mask.batch_stride = request.integer("mask_stride0");
    p.mask.i_stride = request.integer("mask_stride1");
    p.mask.j_stride = request.integer("mask_stride2");
  }
  p.weights.norm_in_weight = stored(request, "layer_norm_in_weight");
  p.weights.norm_in_bias = stored(request, "layer_norm_in_bias");
  p.weights.norm_out_weight = stored(request, "layer_norm_out_weight");
  p.weights.norm_out_bias = stored(request, "layer_norm_out_bias");
  p.weights.proj_a = linear(request, "proj_a");
  p.weights.gate_a = linear(request, "gate_a");
  p.weights.proj_b = linear(request, "proj_b");
  p.weights.gate_b = linear(request, "gate_b");
  p.weights.out_proj = linear(request, "out_proj");
  p.weights.out_gate = linear(request, "out_gate");
  p.weights.eps = 1e-5f;
  p.weights.gate_normalized = request.integer("gate_normalized", 0) != 0;
  p.output_type = static_cast<DType>(request.integer("output_type"));
  const std::int64_t count = p.sizes.batch * p.sizes.n * p.sizes.n * p.sizes.channels;
  // Results are handed over in words of four bytes; where a half is left over, the first is not
  // written.
  const bool odd = p.output_type != DType::kFloat32 && count % 2 != 0;
  char* out = request.output<char>(
      "out", static_cast<std::int64_t>(bytes(p.output_type)) * (count + (odd ? 1 : 0)));
  p.out = out + (odd ? 2 : 0);
  const emulation::Buffer workspace(static_cast<std::size_t>(small_workspace(p.sizes)) * 4);
  emulation::poison(workspace.data(), workspace.bytes());
  p.workspace = reinterpret_cast<float*>(workspace.data());
  small_forward_sm80(p, nullptr);
});

// What the planner asks.
const emulation::Kernel fits("fits", [](Request& request) {
  Sizes sizes;
  sizes.batch = request.integer("batch");
  sizes.n = request.integer("n");
  sizes.channels = static_cast<int>(request.integer("channels"));
  sizes.hidden = static_cast<int>(request.integer("hidden"));
  *request.output<float>("fits", 1) = small_fits(sizes) ? 1.0f : 0.0f;
});

}  // namespace
