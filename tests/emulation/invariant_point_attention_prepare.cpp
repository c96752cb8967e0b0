// SPDX-License-Identifier: Apache-2.0
// The preparation of invariant_point_attention, through its launcher.
#include <string>

#include "emulation/driver.h"
#include "invariant_point_attention/prepare_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::DType;
using fused_ops::Linear;
using fused_ops::MaskType;
using fused_ops::Stored;
using namespace fused_ops::invariant_point_attention;

// Null where the request has none.
Stored stored(Request& request, const std::string& name) {
  Stored s;
  if (request.integer(name + "_type", -1) < 0) return s;
  s.type = static_cast<DType>(request.integer(name + "_type"));
  s.data = request.input<char>(name) + request.integer(name + "_offset", 0);
  return s;
}

Linear linear(Request& request, const std::string& name) {
  return {stored(request, name + "_weight"), stored(request, name + "_bias")};
}

const emulation::Kernel prepare("prepare", [](Request& request) {
  const auto integer = [&](const char* name) { return static_cast<int>(request.integer(name)); };
  PrepareProblem p;
  Sizes& s = p.sizes;
  s.batch = request.integer("batch");
  s.n = request.integer("n");
  s.channels = integer("channels");
  s.value_channels = integer("value_channels");
  s.heads = integer("heads");
  s.head_dim = integer("head_dim");
  s.dim = integer("dim");
  s.query_points = integer("query_points");
  s.value_points = integer("value_points");
  s.norms = integer("norms") != 0;
  p.mode = static_cast<Mode>(request.integer("mode"));
  p.eps = 1e-5f;
  const auto type = static_cast<DType>(request.integer("node_type"));
  p.node = {request.input<char>("node") + request.integer("node_offset"), type,
            request.integer("node_stride0"), request.integer("node_stride1")};
  const std::int64_t bytes = fused_ops::bytes_of(type_of(p.mode));
  if (request.integer("with_mask") != 0) {
    p.mask.data = request.input<char>("mask") + request.integer("mask_offset");
    p.mask.type = static_cast<MaskType>(request.integer("mask_type"));
    p.mask.batch_stride = request.integer("mask_stride0");
    p.mask.stride = request.integer("mask_stride1");
    p.present = request.output<std::uint64_t>("present", s.batch * mask_words(s.n));
  }
  p.frames.translations = stored(request, "translations");
  p.frames.translations_stride = request.integer("translations_stride");
  p.norm_weight = stored(request, "norm_weight");
  p.norm_bias = stored(request, "norm_bias");
  if (request.integer("with_nodes") != 0) {
    p.normalised = request.output<char>("normalised", s.nodes() * s.channels * bytes);
  }
  p.centres = request.output<Centre>("centres", s.batch);
  if (request.integer("with_weights") != 0) {
    p.q = linear(request, "q");
    p.k = linear(request, "k");
    p.v = linear(request, "v");
    p.q_points = linear(request, "q_points");
    p.k_points = linear(request, "k_points");
    p.v_points = linear(request, "v_points");
    p.out = linear(request, "out");
    const std::int64_t lines = s.projected(), channels = s.channels;
    p.projections = request.output<char>("projections", lines * channels * bytes);
    p.projection_bias = request.output<char>("projection_bias", lines * bytes);
    p.out_weight = request.output<char>("out_weight", channels * s.features() * bytes);
    p.out_bias = request.output<char>("out_bias", channels * bytes);
  }
  prepare_sm80(p, nullptr);
});

}  // namespace
