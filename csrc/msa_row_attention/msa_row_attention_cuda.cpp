// SPDX-License-Identifier: Apache-2.0
// The CUDA implementation of fused_ops::msa_row_attention_forward, whose schema Python has defined:
// check, plan, then launch or hand over to the PyTorch composition.
#include <algorithm>
#include <type_traits>

#include "common/add_bias.h"
#include "msa_row_attention/call.h"
#include "msa_row_attention/small.h"

namespace fused_ops::msa_row_attention {
namespace {

void run_small(const Call& call, Tensor& out) {
  SmallProblem small;
  small.prepare = call.part(call.sizes(), 0, 0);
  small.bias = call.bias;
  const Tensor workspace = empty(out, {call.chosen.plan.workspace_bytes / 4}, ScalarType::Float);
  small.workspace = workspace.mutable_data_ptr<float>();
  small.out = out.mutable_data_ptr();
  small_forward_sm80(small, current_stream(out));
}

// What the backward need not compute again: the gated attention and log_sums, in fp32 with factors
// behind.
struct Saving {
  Tensor gated;
  Tensor log_sums;

  Saving(const Call& call, const Tensor& like)
      : gated(empty(like, {call.sizes().positions(), call.sizes().width()}, call.scalar())),
        log_sums(empty(
            like,
            {call.is_fp32() ? 2 : 1, call.sizes().all_rows(), call.sizes().heads, call.sizes().n},
            ScalarType::Float)) {}
};

// Some rows at a time.
void run(const Call& call, const std::optional<Saving>& saving, Tensor& out) {
  CUstream_st* stream = current_stream(out);
  const Sizes& sizes = call.sizes();
  const Choice& chosen = call.chosen;
  const DType type = call.type();
  const ScalarType scalar = call.scalar();
  const bool is_fp32 = call.is_fp32();
  Sizes part = sizes;
  part.groups = chosen.groups;
  part.rows = chosen.rows;
  const std::int64_t positions = part.positions(), width = sizes.width();
  const std::int64_t channels = sizes.channels, size = bytes_of(type);

  Workspace memory;
  const std::int64_t at_bias = memory.take(bias_size(sizes) * size);
  const std::int64_t at_projections = memory.take(4 * width * channels * size);
  const std::int64_t at_projection_bias = memory.take(4 * width * size);
  const std::int64_t at_out_weight = memory.take(channels * width * size);
  const std::int64_t at_out_bias = memory.take(channels * size);
  const std::int64_t at_present =
      memory.take(call.mask.data ? part.all_rows() * mask_words(sizes.n) * 8 : 0);
  const std::int64_t at_normalised = memory.take(positions * channels * size);
  const std::int64_t at_projected = memory.take(is_fp32 ? 0 : positions * 4 * width * size);
  const std::int64_t at_attended = memory.take(saving ? 0 : positions * width * size);
  const std::int64_t at_keys = memory.take(call.seed ? positions * sizes.heads * 8 : 0);
  memory.allocate(out);
  const auto matrix = [&](void* data, std::int64_t rows, std::int64_t columns) {
    return view_of(out, data, {rows, columns}, {columns, 1}, scalar);
  };
  const auto turned = [&](void* data, std::int64_t rows, std::int64_t columns) {
    return view_of(out, data, {columns, rows}, {1, columns}, scalar);
  };
  const auto vector = [&](std::int64_t at, std::int64_t count) {
    return view_of(out, memory.at(at), {count}, {1}, scalar);
  };

  BiasProblem bias = call.bias;
  bias.bias = memory.at(at_bias);
  bias_sm80(bias, stream);
  void* const projections = memory.at(at_projections);
  void* const out_weight = memory.at(at_out_weight);
  for (std::int64_t group = 0; group < sizes.groups; group += chosen.groups) {
    part.groups = std::min(chosen.groups, sizes.groups - group);
    for (std::int64_t row = 0; row < sizes.rows; row += chosen.rows) {
      part.rows = std::min(chosen.rows, sizes.rows - row);
      const std::int64_t count = part.positions();
      PrepareProblem prepare = call.part(part, group, row);
      prepare.normalised = memory.at(at_normalised);
      if (call.mask.data) prepare.present = memory.at<std::uint64_t>(at_present);
      if (group == 0 && row == 0) {  // once is enough
        prepare.projections = projections;
        prepare.projection_bias = memory.at(at_projection_bias);
        prepare.out_weight = out_weight;
        prepare.out_bias = memory.at(at_out_bias);
      }
      prepare_sm80(prepare, stream);

      AttendProblem attend;
      attend.sizes = part;
      attend.mode = call.mode();
      attend.bias = memory.at(at_bias + group * (bias_size(sizes) / sizes.groups) * size);
      attend.present = prepare.present;
      const std::int64_t first_row = group * sizes.rows + row;
      attend.dropout = call.draw(part, first_row, memory.at<std::uint64_t>(at_keys), stream);
      if (saving) {
        attend.out = further(saving->gated.mutable_data_ptr(), type, first_row * sizes.n * width);
        attend.log_sums =
            saving->log_sums.mutable_data_ptr<float>() + first_row * sizes.heads * sizes.n;
        if (is_fp32) attend.factors = attend.log_sums + saving->log_sums.numel() / 2;
      } else {
        attend.out = memory.at(at_attended);
      }
      const Tensor normalised = matrix(prepare.normalised, count, channels);
      const Tensor attended = matrix(attend.out, count, width);
      void* results = further(out.mutable_data_ptr(), type, first_row * sizes.n * channels);
      if (is_fp32) {
        {  // its memory is free again before the next product needs some
          const Tensor projected =
              multiply_fp32(normalised, turned(projections, 4 * width, channels), call.precision);
          attend.projected = projected.const_data_ptr();
          attend.projection_bias = memory.at<float>(at_projection_bias);
          call.attend(attend, stream);
        }
        const Tensor product =
            multiply_fp32(attended, turned(out_weight, channels, width), call.precision);
        AddBiasProblem add;
        add.rows = count;
        add.channels = sizes.channels;
        add.product = static_cast<const float*>(product.const_data_ptr());
        add.bias = memory.at<float>(at_out_bias);
        add.out = static_cast<float*>(results);
        add_bias_sm80(add, stream);
      } else {
        const Tensor projected = matrix(memory.at(at_projected), count, 4 * width);
        multiply(normalised, matrix(projections, 4 * width, channels),
                 vector(at_projection_bias, 4 * width), projected);
        attend.projected = projected.const_data_ptr();
        call.attend(attend, stream);
        multiply(attended, matrix(out_weight, channels, width), vector(at_out_bias, channels),
                 matrix(results, count, channels));
      }
    }
  }
}

bool has_backward(const Call& call) {
  Problem problem = call.problem;
  problem.backward = true;
  return choose(problem).plan.path == Path::kKernel;
}

// The result; with `saves` also what the backward need not compute again, if it can do with it.
template <bool saves>
std::conditional_t<saves, std::vector<Tensor>, Tensor> forward(
    const Tensor& msa, const Tensor& pair, const MaybeTensor& mask, const MaybeTensor& dropout_seed,
    const Tensor& layer_norm_weight, const Tensor& layer_norm_bias, const Tensor& query_weight,
    const Tensor& key_weight, const Tensor& value_weight, const Tensor& gate_weight,
    const MaybeTensor& gate_bias, const MaybeTensor& pair_norm_weight,
    const MaybeTensor& pair_norm_bias, const Tensor& pair_bias_weight,
    const Tensor& out_proj_weight, const MaybeTensor& out_proj_bias, std::int64_t num_heads,
    double dropout, double eps, std::string_view precision, std::optional<ScalarType> dtype) {
  const Parameters parameters{layer_norm_weight, layer_norm_bias,  query_weight,
                              key_weight,        value_weight,     gate_weight,
                              gate_bias,         pair_norm_weight, pair_norm_bias,
                              pair_bias_weight,  out_proj_weight,  out_proj_bias};
  const Call call(msa, pair, mask, parameters, num_heads, dropout, eps, precision, dtype,
                  dropout_seed, false);
  if (call.chosen.plan.path != Path::kKernel) {
    std::string reason;
    for (const std::string& one : call.chosen.plan.reasons) {
      reason += (reason.empty() ? "" : "; ") + one;
    }
    return {call_operator("fused_ops::msa_row_attention_composition", msa, pair, mask, dropout_seed,
                          layer_norm_weight, layer_norm_bias, query_weight, key_weight,
                          value_weight, gate_weight, gate_bias, pair_norm_weight, pair_norm_bias,
                          pair_bias_weight, out_proj_weight, out_proj_bias, num_heads, dropout, eps,
                          std::string(precision), dtype, reason)};
  }
  const DeviceGuard guard(msa.get_device_index());
  const auto shape = msa.sizes();
  Tensor out = empty(msa, {shape.begin(), shape.end()}, scalar_type_of(call.problem.result));
  std::optional<Saving> saving;
  if (out.numel() > 0) {
    if (saves && !call.chosen.small && has_backward(call)) saving.emplace(call, out);
    call.chosen.small ? run_small(call, out) : run(call, saving, out);
  }
  if constexpr (saves) {
    if (saving) return {out, saving->gated, saving->log_sums};
  }
  return {out};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fused_ops, m) {
  m.def(
      "msa_row_attention_forward_saving(Tensor msa, Tensor pair, Tensor? mask, "
      "Tensor? dropout_seed, Tensor layer_norm_weight, Tensor layer_norm_bias, "
      "Tensor query_weight, Tensor key_weight, Tensor value_weight, Tensor gate_weight, "
      "Tensor? gate_bias, Tensor? pair_norm_weight, Tensor? pair_norm_bias, "
      "Tensor pair_bias_weight, Tensor out_proj_weight, Tensor? out_proj_bias, int num_heads, "
      "float dropout, float eps, str precision, ScalarType? dtype) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, m) {
  m.impl("msa_row_attention_forward", TORCH_BOX(&forward<false>));
  m.impl("msa_row_attention_forward_saving", TORCH_BOX(&forward<true>));
}

}  // namespace fused_ops::msa_row_attention
