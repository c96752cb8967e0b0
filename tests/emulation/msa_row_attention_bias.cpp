// SPDX-License-Identifier: Apache-2.0
// The bias of MSA row attention from the pair tensor, through its launcher.
#include "emulation/driver.h"
#include "msa_row_attention/bias_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::DType;
using fused_ops::Stored;
using namespace fused_ops::msa_row_attention;

DType type(Request& request, const char* name) {
  return static_cast<DType>(request.integer(name));
}

const emulation::Kernel bias("bias", [](Request& request) {
  BiasProblem p;
  p.sizes.groups = request.integer("groups");
  p.sizes.n = request.integer("n");
  p.sizes.heads = static_cast<int>(request.integer("heads"));
  p.sizes.pair_channels = static_cast<int>(request.integer("channels"));
  p.mode = static_cast<Mode>(request.integer("mode"));
  p.eps = 1e-5f;
  p.scale = static_cast<float>(request.integer("scale_percent")) / 100.0f;
  p.pair.type = type(request, "pair_type");
  p.pair.data = request.input<char>("pair") + request.integer("pair_offset");
  p.pair.group_stride = request.integer("group_stride");
  p.pair.i_stride = request.integer("i_stride");
  p.pair.j_stride = request.integer("j_stride");
  if (request.integer("normed")) {
    p.norm_weight = {request.input<char>("norm_weight"), type(request, "norm_weight_type")};
    p.norm_bias = {request.input<char>("norm_bias"), type(request, "norm_bias_type")};
  }
  p.weight = {request.input<char>("weight"), type(request, "weight_type")};
  const std::int64_t size = bias_size(p.sizes);
  if (type_of(p.mode) == DType::kFloat32) {
    p.bias = request.output<float>("bias", size);
  } else {
    p.bias = request.output<std::uint16_t>("bias", size);
  }
  bias_sm80(p, nullptr);
});

}  // namespace
