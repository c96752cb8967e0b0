// SPDX-License-Identifier: Apache-2.0
// The backward of msa_row_attention's attention for fp32 tensors: its launchers one after the
// other.
#define FUSED_OPS_FEW_KERNELS
#include "emulation/driver.h"
#include "msa_row_attention/add_slabs_sm80.cu"
#include "msa_row_attention/attend_fp32_sm80.cu"
#include "msa_row_attention/backward_bias_fp32_sm80.cu"
#include "msa_row_attention/backward_gate_sm80.cu"
#include "msa_row_attention/backward_keys_fp32_sm80.cu"
#include "msa_row_attention/backward_queries_fp32_sm80.cu"

namespace {

using emulation::Request;
using namespace fused_ops::msa_row_attention;

const emulation::Kernel backward("backward", [](Request& request) {
  BackwardProblem p;
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
  p.d_gated = request.input<char>("d_gated");
  const std::int64_t size = s.positions() * s.width();
  const std::int64_t queries = s.all_rows() * s.heads * s.n;
  AttendProblem attend;
  attend.sizes = s;
  attend.mode = p.mode;
  attend.projected = p.projected;
  attend.projection_bias = p.projection_bias;
  attend.bias = p.bias;
  attend.present = p.present;
  attend.out = request.output<float>("gated", size);
  attend.log_sums = request.output<float>("log_sums", queries);
  attend.factors = request.output<float>("factors", queries);
  attend_fp32_sm80(attend, nullptr);
  p.gated = attend.out;
  p.log_sums = attend.log_sums;
  p.factors = attend.factors;
  p.d_attended = request.output<float>("d_attended", size);
  p.d_projected = request.output<float>("d_projected", 4 * size);
  p.row_dots = request.output<float>("row_dots", queries);
  backward_gate_sm80(p, nullptr);
  backward_keys_fp32_sm80(p, nullptr);
  backward_queries_fp32_sm80(p, nullptr);
  p.d_bias = request.output<float>("d_bias", s.groups * s.heads * s.n * s.n);
  const std::int64_t partial = bias_fp32_partial_size(s, fused_ops::multiprocessors());
  if (partial > 0) p.partial = request.output<float>("partial", partial);
  backward_bias_fp32_sm80(p, nullptr);
});

}  // namespace
