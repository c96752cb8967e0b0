// SPDX-License-Identifier: Apache-2.0
// The preparation of msa_row_attention, through its launcher.
#include <string>

#include "emulation/driver.h"
#include "msa_row_attention/prepare_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::DType;
using fused_ops::MaskType;
using fused_ops::Stored;
using namespace fused_ops::msa_row_attention;

Stored stored(Request& request, const std::string& name) {
  Stored s;
  s.type = static_cast<DType>(request.integer(name + "_type"));
  s.data = request.input<char>(name) + request.integer(name + "_offset", 0);
  return s;
}

const emulation::Kernel prepare("prepare", [](Request& request) {
  PrepareProblem p;
  p.sizes.groups = request.integer("groups");
  p.sizes.rows = request.integer("rows");
  p.sizes.n = request.integer("n");
  p.sizes.channels = static_cast<int>(request.integer("channels"));
  p.sizes.heads = static_cast<int>(request.integer("heads", 1));
  p.sizes.head_dim = static_cast<int>(request.integer("width")) / p.sizes.heads;
  p.sizes.dim = static_cast<int>(request.integer("dim", p.sizes.head_dim));
  p.mode = static_cast<Mode>(request.integer("mode"));
  p.eps = 1e-5f;
  p.msa.data = request.input<char>("msa") + request.integer("msa_offset");
  p.msa.type = static_cast<DType>(request.integer("msa_type"));
  p.msa.group_stride = request.integer("msa_stride0");
  p.msa.row_stride = request.integer("msa_stride1");
  p.msa.position_stride = request.integer("msa_stride2");
  if (request.integer("with_mask") != 0) {
    p.mask.data = request.input<char>("mask") + request.integer("mask_offset");
    p.mask.type = static_cast<MaskType>(request.integer("mask_type"));
    p.mask.group_stride = request.integer("mask_stride0");
    p.mask.row_stride = request.integer("mask_stride1");
    p.mask.position_stride = request.integer("mask_stride2");
    p.present =
        request.output<std::uint64_t>("present", p.sizes.all_rows() * mask_words(p.sizes.n));
  }
  p.norm_weight = stored(request, "norm_weight");
  p.norm_bias = stored(request, "norm_bias");
  p.query = stored(request, "query");
  p.key = stored(request, "key");
  p.value = stored(request, "value");
  p.gate = stored(request, "gate");
  const std::int64_t bytes = fused_ops::bytes_of(type_of(p.mode));
  const std::int64_t size = std::int64_t{p.sizes.width()} * p.sizes.channels;
  p.normalised = request.output<char>("normalised", p.sizes.positions() * p.sizes.channels * bytes);
  p.projections = request.output<char>("projections", 4 * size * bytes);
  if (request.integer("with_gate_bias", 0) != 0) {
    p.gate_bias = stored(request, "gate_bias");
    p.projection_bias = request.output<char>("projection_bias", 4 * p.sizes.width() * bytes);
  }
  if (request.integer("with_out") != 0) {
    p.out_proj = stored(request, "out_proj");
    p.out_weight = request.output<char>("out_weight", size * bytes);
    if (request.integer("with_out_bias") != 0) p.out_proj_bias = stored(request, "out_proj_bias");
    p.out_bias = request.output<char>("out_bias", p.sizes.channels * bytes);
  }
  prepare_sm80(p, nullptr);
});

}  // namespace
