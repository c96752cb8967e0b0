// SPDX-License-Identifier: Apache-2.0
// The kernels of msa_row_attention for fp32 tensors, through their launchers. The mask as words of
// 64 bits.
#define FUSED_OPS_FEW_KERNELS
#include "common/add_bias_sm80.cu"
#include "emulation/driver.h"
#include "msa_row_attention/attend_fp32_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::AddBiasProblem;
using namespace fused_ops::msa_row_attention;

const emulation::Kernel attend("attend", [](Request& request) {
  AttendProblem p;
  Sizes& s = p.sizes;
  s.groups = request.integer("groups");
  s.rows = request.integer("rows");
  s.n = request.integer("n");
  s.heads = static_cast<int>(request.integer("heads"));
  s.dim = static_cast<int>(request.integer("dim"));
  s.head_dim = s.dim;
  p.mode = static_cast<Mode>(request.integer("mode"));
  p.projected = request.input<char>("projected");
  if (request.integer("biased")) p.projection_bias = request.input<float>("projection_bias");
  p.bias = request.input<char>("bias");
  if (request.integer("masked")) p.present = request.input<std::uint64_t>("present");
  p.out = request.output<float>("out", s.positions() * s.width());
  attend_fp32_sm80(p, nullptr);
});

const emulation::Kernel add_bias("add_bias", [](Request& request) {
  AddBiasProblem p;
  p.rows = request.integer("rows");
  p.channels = static_cast<int>(request.integer("channels"));
  p.product = request.input<float>("product");
  p.bias = request.input<float>("bias");
  p.out = request.output<float>("out", p.rows * p.channels);
  add_bias_sm80(p, nullptr);
});

}  // namespace
