// SPDX-License-Identifier: Apache-2.0
// MSA row attention of small problems, through its launcher.
#include <string>

#include "emulation/driver.h"
#include "msa_row_attention/small_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::DType;
using fused_ops::MaskType;
using fused_ops::Stored;
using namespace fused_ops::msa_row_attention;

// Tensors of type `<name>_type` begin `<name>_offset` bytes behind an address that is aligned;
// without a type they are missing.
Stored stored(Request& request, const std::string& name) {
  const std::int64_t type = request.integer(name + "_type", -1);
  if (type < 0) return {};
  return {request.input<char>(name) + request.integer(name + "_offset", 0),
          static_cast<DType>(type)};
}

Sizes sizes_in(Request& request) {
  Sizes s;
  s.groups = request.integer("groups");
  s.rows = request.integer("rows");
  s.n = request.integer("n");
  s.channels = static_cast<int>(request.integer("channels"));
  s.pair_channels = static_cast<int>(request.integer("pair_channels"));
  s.heads = static_cast<int>(request.integer("heads"));
  s.head_dim = static_cast<int>(request.integer("head_dim"));
  s.dim = (s.head_dim + 7) / 8 * 8;
  return s;
}

const emulation::Kernel forward("forward", [](Request& request) {
  SmallProblem p;
  PrepareProblem& prepare = p.prepare;
  prepare.sizes = p.bias.sizes = sizes_in(request);
  prepare.mode = p.bias.mode = static_cast<Mode>(request.integer("mode"));
  prepare.eps = 1e-5f;
  const Stored msa = stored(request, "msa"), pair = stored(request, "pair");
  prepare.msa = {msa.data, msa.type, request.integer("msa_stride0"), request.integer("msa_stride1"),
                 request.integer("msa_stride2")};
  p.bias.pair = {pair.data, pair.type, request.integer("pair_stride0"),
                 request.integer("pair_stride1"), request.integer("pair_stride2")};
  if (request.integer("mask_type", -1) >= 0) {
    prepare.mask = {request.input<char>("mask") + request.integer("mask_offset"),
                    static_cast<MaskType>(request.integer("mask_type")),
                    request.integer("mask_stride0"), request.integer("mask_stride1"),
                    request.integer("mask_stride2")};
  }
  prepare.norm_weight = stored(request, "layer_norm_weight");
  prepare.norm_bias = stored(request, "layer_norm_bias");
  prepare.query = stored(request, "query_weight");
  prepare.key = stored(request, "key_weight");
  prepare.value = stored(request, "value_weight");
  prepare.gate = stored(request, "gate_weight");
  prepare.gate_bias = stored(request, "gate_bias");
  prepare.out_proj = stored(request, "out_proj_weight");
  prepare.out_proj_bias = stored(request, "out_proj_bias");
  p.bias.norm_weight = stored(request, "pair_norm_weight");
  p.bias.norm_bias = stored(request, "pair_norm_bias");
  p.bias.weight = stored(request, "pair_bias_weight");
  const emulation::Buffer workspace(static_cast<std::size_t>(small_workspace(prepare.sizes)) * 4);
  emulation::poison(workspace.data(), workspace.bytes());
  p.workspace = reinterpret_cast<float*>(workspace.data());
  p.out = request.output<char>("out", prepare.sizes.positions() * prepare.sizes.channels *
                                          fused_ops::bytes_of(type_of(prepare.mode)));
  small_forward_sm80(p, nullptr);
});

// What the planner asks.
const emulation::Kernel fits("fits", [](Request& request) {
  *request.output<float>("fits", 1) = small_fits(sizes_in(request)) ? 1.0f : 0.0f;
});

}  // namespace
