// SPDX-License-Identifier: Apache-2.0
// Dropout of msa_row_attention: its keys, and attention with its backward, one launcher after the
// other.
#define FUSED_OPS_FEW_KERNELS
#include "emulation/driver.h"
#include "msa_row_attention/add_slabs_sm80.cu"
#include "msa_row_attention/attend_dropout_sm80.cu"
#include "msa_row_attention/backward_bias_dropout_sm80.cu"
#include "msa_row_attention/backward_gate_sm80.cu"
#include "msa_row_attention/backward_keys_dropout_sm80.cu"
#include "msa_row_attention/backward_queries_dropout_sm80.cu"
#include "msa_row_attention/dropout_keys_sm80.cu"

namespace {

using emulation::Request;
using namespace fused_ops::msa_row_attention;

const emulation::Kernel keys("keys", [](Request& request) {
  DropoutKeysProblem p;
  p.seed = request.input<std::int64_t>("seed");
  p.first_row = request.integer("first_row");
  p.rows = request.integer("rows");
  p.n = request.integer("n");
  p.heads = static_cast<int>(request.integer("heads"));
  p.keys = request.output<std::uint64_t>("keys", p.rows * p.heads * p.n);
  dropout_keys_sm80(p, nullptr);
});

// `dropped`: of 65536 numbers.
const emulation::Kernel all("all", [](Request& request) {
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
  p.bias = request.input<char>("bias");
  if (request.integer("masked")) p.present = request.input<std::uint64_t>("present");
  p.d_gated = request.input<char>("d_gated");
  p.dropout = dropout_of(static_cast<double>(request.integer("dropped")) / 65536);
  const std::int64_t size = s.positions() * s.width() * 2;  // in bytes
  const std::int64_t queries = s.all_rows() * s.heads * s.n;
  DropoutKeysProblem keys;
  keys.seed = request.input<std::int64_t>("seed");
  keys.first_row = request.integer("first_row");
  keys.rows = s.all_rows();
  keys.n = s.n;
  keys.heads = s.heads;
  keys.keys = request.output<std::uint64_t>("keys", queries);
  dropout_keys_sm80(keys, nullptr);
  p.dropout.keys = keys.keys;
  AttendProblem attend;
  attend.sizes = s;
  attend.mode = p.mode;
  attend.projected = p.projected;
  attend.bias = p.bias;
  attend.present = p.present;
  attend.out = request.output<char>("gated", size);
  attend.log_sums = request.output<float>("log_sums", queries);
  attend.dropout = p.dropout;
  attend_dropout_sm80(attend, nullptr);
  p.gated = attend.out;
  p.log_sums = attend.log_sums;
  p.d_attended = request.output<char>("d_attended", size);
  p.d_projected = request.output<char>("d_projected", 4 * size);
  p.row_dots = request.output<float>("row_dots", queries);
  backward_gate_sm80(p, nullptr);
  backward_keys_dropout_sm80(p, nullptr);
  backward_queries_dropout_sm80(p, nullptr);
  p.d_bias = request.output<float>("d_bias", s.groups * s.heads * s.n * s.n);
  const std::int64_t partial = bias_partial_size(s, fused_ops::multiprocessors(), false, true);
  if (partial > 0) p.partial = request.output<float>("partial", partial);
  backward_bias_dropout_sm80(p, nullptr);
});

}  // namespace
