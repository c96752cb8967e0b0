// SPDX-License-Identifier: Apache-2.0
// Invariant point attention of small problems, through its launcher.
#include <string>

#include "emulation/driver.h"
#include "invariant_point_attention/small_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::DType;
using fused_ops::Linear;
using fused_ops::MaskType;
using fused_ops::Stored;
using namespace fused_ops::invariant_point_attention;

// Tensors of type `<name>_type` begin `<name>_offset` bytes behind an address that is aligned;
// without a type they are missing.
Stored stored(Request& request, const std::string& name) {
  const std::int64_t type = request.integer(name + "_type", -1);
  if (type < 0) return {};
  return {request.input<char>(name) + request.integer(name + "_offset", 0),
          static_cast<DType>(type)};
}

Linear linear(Request& request, const std::string& name) {
  return {stored(request, name + "_weight"), stored(request, name + "_bias")};
}

Pairs pairs(Request& request, const std::string& name) {
  const Stored pair = stored(request, name);
  if (pair.data == nullptr) return {};
  return {pair.data, pair.type, request.integer(name + "_stride0"),
          request.integer(name + "_stride1"), request.integer(name + "_stride2")};
}

Sizes sizes_in(Request& request) {
  const auto number = [&](const char* name) { return static_cast<int>(request.integer(name)); };
  Sizes s;
  s.batch = request.integer("batch");
  s.n = request.integer("n");
  s.channels = number("channels");
  s.pair_channels = number("pair_channels");
  s.value_channels = number("value_channels");
  s.heads = number("heads");
  s.head_dim = number("head_dim");
  s.dim = (s.head_dim + 7) / 8 * 8;
  s.query_points = number("query_points");
  s.value_points = number("value_points");
  s.norms = number("norms") != 0;
  return s;
}

float thousandths(Request& request, const char* name) {
  return static_cast<float>(static_cast<double>(request.integer(name)) / 1000);
}

const emulation::Kernel forward("forward", [](Request& request) {
  SmallProblem p;
  PrepareProblem& prepare = p.prepare;
  prepare.sizes = sizes_in(request);
  prepare.mode = static_cast<Mode>(request.integer("mode"));
  prepare.eps = 1e-5f;
  const Stored node = stored(request, "node");
  prepare.node = {node.data, node.type, request.integer("node_stride0"),
                  request.integer("node_stride1")};
  if (request.integer("mask_type", -1) >= 0) {
    prepare.mask = {request.input<char>("mask"),
                    static_cast<MaskType>(request.integer("mask_type")),
                    request.integer("mask_stride0"), request.integer("mask_stride1")};
  }
  prepare.frames = {stored(request, "translations"), request.integer("translations_stride0"),
                    stored(request, "rotations"), request.integer("rotations_stride0")};
  prepare.norm_weight = stored(request, "norm_weight");
  prepare.norm_bias = stored(request, "norm_bias");
  prepare.q = linear(request, "q");
  prepare.k = linear(request, "k");
  prepare.v = linear(request, "v");
  prepare.q_points = linear(request, "q_points");
  prepare.k_points = linear(request, "k_points");
  prepare.v_points = linear(request, "v_points");
  prepare.out = linear(request, "out");
  p.pair = pairs(request, "pair");
  p.bias = linear(request, "pair_bias");
  p.head_weights = stored(request, "head_weights");
  p.scalar_scale = thousandths(request, "scalar_scale");
  p.point_scale = thousandths(request, "point_scale");
  p.bias_scale = thousandths(request, "bias_scale");
  p.pair_values = pairs(request, "pair_values");
  p.norm_eps = 1e-8f;
  const emulation::Buffer workspace(static_cast<std::size_t>(small_workspace(prepare.sizes)) * 4);
  emulation::poison(workspace.data(), workspace.bytes());
  p.workspace = reinterpret_cast<float*>(workspace.data());
  p.out = request.output<char>("result", prepare.sizes.nodes() * prepare.sizes.channels *
                                             fused_ops::bytes_of(type_of(prepare.mode)));
  small_forward_sm80(p, nullptr);
});

// What the planner asks.
const emulation::Kernel fits("fits", [](Request& request) {
  *request.output<float>("fits", 1) = small_fits(sizes_in(request)) ? 1.0f : 0.0f;
});

}  // namespace
