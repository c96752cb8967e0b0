// SPDX-License-Identifier: Apache-2.0
// The attention of msa_row_attention, through its launcher. The mask as words of 64 bits.
#define FUSED_OPS_FEW_KERNELS
#include "emulation/driver.h"
#include "msa_row_attention/attend_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::DType;
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
  p.bias = request.input<char>("bias");
  if (request.integer("masked")) p.present = request.input<std::uint64_t>("present");
  p.out = request.output<char>("out", s.positions() * s.width() * 2);
  fused_ops::emulated_multiprocessors = static_cast<int>(request.integer("multiprocessors"));
  attend_sm80(p, nullptr);
});

}  // namespace
