// SPDX-License-Identifier: Apache-2.0
// The CUDA implementation of fused_ops::msa_row_attention_forward, whose schema Python has defined:
// check, plan, then launch or hand over to the PyTorch composition.
#include <algorithm>
#include <cmath>

#include "common/sanitizers.h"
#include "msa_row_attention/arguments.h"

namespace fused_ops::msa_row_attention {
namespace {

// out = a * b^T, and a bias of as many columns.
void multiply(const Tensor& a, const Tensor& b, const MaybeTensor& bias, const Tensor& out) {
  if (fills_products()) call_operator("aten::zero_", out);
  call_overload("aten::linear", "out", a, b, bias, out);
}

template <class T>
T* offset(T* data, DType type, std::int64_t numbers) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return static_cast<Byte*>(data) + numbers * (type == DType::kFloat32 ? 4 : 2);
}

struct Forward {
  const Choice& chosen;
  Sizes sizes;
  float eps;
  Msa msa;
  Pairs pair;
  Mask mask;
  PrepareProblem weights;  // the parameters of it
  BiasProblem bias;        // likewise
  Stored gate_bias;
  CUstream_st* stream;

  void run(const Tensor& out) {
    const DType type = type_of(chosen.mode);
    const ScalarType scalar = scalar_type_of(type);
    const Tensor biases = empty(out, {bias_size(sizes)}, scalar);
    bias.sizes = sizes;
    bias.mode = chosen.mode;
    bias.eps = eps;
    bias.pair = pair;
    bias.scale = std::sqrt(static_cast<float>(sizes.head_dim));
    bias.bias = biases.mutable_data_ptr();
    bias_sm80(bias, stream);

    Sizes part = sizes;
    part.groups = chosen.groups;
    part.rows = chosen.rows;
    const std::int64_t positions = part.positions(), width = sizes.width();
    const Tensor packed = empty(
        out, {4 * width + sizes.channels, std::max<std::int64_t>(sizes.channels, width)}, scalar);
    const Tensor out_bias = empty(out, {sizes.channels}, scalar);
    const Tensor normalised = empty(out, {positions, sizes.channels}, scalar);
    const Tensor projected = empty(out, {positions, 4 * width}, scalar);
    const Tensor attended = empty(out, {positions, width}, scalar);
    const std::int64_t words = mask_words(sizes.n);
    const Tensor present = empty(out, {mask.data ? part.all_rows() * words : 0}, ScalarType::Long);

    PrepareProblem prepare = weights;
    prepare.mode = chosen.mode;
    prepare.eps = eps;
    prepare.normalised = normalised.mutable_data_ptr();
    if (mask.data) prepare.present = static_cast<std::uint64_t*>(present.mutable_data_ptr());
    prepare.projections = packed.mutable_data_ptr();
    prepare.out_weight = offset(packed.mutable_data_ptr(), type, 4 * width * sizes.channels);
    prepare.out_bias = out_bias.mutable_data_ptr();
    const Tensor projections = view_of(out, packed.mutable_data_ptr(), {4 * width, sizes.channels},
                                       {sizes.channels, 1}, scalar);
    const Tensor out_weight =
        view_of(out, prepare.out_weight, {sizes.channels, width}, {width, 1}, scalar);

    AttendProblem attend;
    attend.mode = chosen.mode;
    attend.projected = projected.const_data_ptr();
    attend.present = prepare.present;
    attend.gate_bias = gate_bias;
    attend.out = attended.mutable_data_ptr();

    for (std::int64_t group = 0; group < sizes.groups; group += chosen.groups) {
      part.groups = std::min(chosen.groups, sizes.groups - group);
      for (std::int64_t row = 0; row < sizes.rows; row += chosen.rows) {
        part.rows = std::min(chosen.rows, sizes.rows - row);
        const std::int64_t count = part.positions();
        prepare.sizes = attend.sizes = part;
        prepare.msa = msa;
        prepare.msa.data =
            offset(msa.data, msa.type, group * msa.group_stride + row * msa.row_stride);
        prepare.mask = mask;
        if (mask.data) {
          prepare.mask.data =
              static_cast<const char*>(mask.data) +
              (group * mask.group_stride + row * mask.row_stride) * bytes_of(mask.type);
        }
        prepare_sm80(prepare, stream);
        prepare.projections = prepare.out_weight = prepare.out_bias = nullptr;  // once is enough

        const auto rows_of = [&](const Tensor& tensor, std::int64_t columns) {
          return view_of(out, tensor.mutable_data_ptr(), {count, columns}, {columns, 1}, scalar);
        };
        multiply(rows_of(normalised, sizes.channels), projections, std::nullopt,
                 rows_of(projected, 4 * width));
        attend.bias =
            offset(biases.const_data_ptr(), type, group * (bias_size(sizes) / sizes.groups));
        attend_sm80(attend, stream);
        const std::int64_t first = (group * sizes.rows + row) * sizes.n * sizes.channels;
        const Tensor result = view_of(out, offset(out.mutable_data_ptr(), type, first),
                                      {count, sizes.channels}, {sizes.channels, 1}, scalar);
        multiply(rows_of(attended, width), out_weight, out_bias, result);
      }
    }
  }
};

Tensor forward(const Tensor& msa, const Tensor& pair, const MaybeTensor& mask,
               const MaybeTensor& dropout_seed, const Tensor& layer_norm_weight,
               const Tensor& layer_norm_bias, const Tensor& query_weight, const Tensor& key_weight,
               const Tensor& value_weight, const Tensor& gate_weight, const MaybeTensor& gate_bias,
               const MaybeTensor& pair_norm_weight, const MaybeTensor& pair_norm_bias,
               const Tensor& pair_bias_weight, const Tensor& out_proj_weight,
               const MaybeTensor& out_proj_bias, std::int64_t num_heads, double dropout, double eps,
               std::string_view precision, std::optional<ScalarType> dtype) {
  Problem problem;
  problem.msa = floating_type(kOp, msa, "msa");
  floating_type(kOp, pair, "pair");
  FO_CHECK_VALUE(msa.dim() >= 3, kOp, ": msa must have shape (..., S, N, msa_dim), got ",
                 shape_text(msa.sizes()));
  const std::int64_t rows = msa.size(-3), n = msa.size(-2), channels = msa.size(-1);
  FO_CHECK_VALUE(pair.dim() >= 3 && pair.size(-2) == n && pair.size(-3) == n, kOp,
                 ": pair must have shape (..., N, N, pair_dim) with N = ", n, ", got ",
                 shape_text(pair.sizes()));
  FO_CHECK_RUNTIME(same_device(msa, pair), kOp, ": pair must be on the device of msa, expected ",
                   device_text(msa), ", got ", device_text(pair));
  FO_CHECK_VALUE(query_weight.defined() && query_weight.dim() == 2, kOp,
                 ": query_weight must have shape (num_heads * d, msa_dim)");
  const std::int64_t width = query_weight.size(0), pair_channels = pair.size(-1);
  FO_CHECK_VALUE(num_heads >= 1 && width % num_heads == 0, kOp,
                 ": query_weight must have a multiple of num_heads = ", num_heads, " rows, got ",
                 width);
  FO_CHECK_VALUE(dropout >= 0.0 && dropout <= 1.0, kOp, ": dropout must be in [0, 1], got ",
                 dropout);
  FO_CHECK_VALUE(pair_norm_weight.has_value() == pair_norm_bias.has_value(), kOp,
                 ": pair_norm_weight and pair_norm_bias must be given together, got only one");
  const Lead lead = lead_of(msa, pair);
  problem.sizes =
      sizes_of(lead.groups, lead.rows_of_lead * rows, n, channels, pair_channels, num_heads, width);
  problem.result = dtype ? dtype_of(*dtype) : problem.msa;
  FO_CHECK_VALUE(problem.result != DType::kOther &&
                     (problem.msa != DType::kFloat64 || problem.result == DType::kFloat64),
                 kOp, ": dtype must be a floating dtype, and float64 for float64 tensors");
  problem.precision = precision_from(kOp, precision);
  problem.dropout = dropout > 0.0;
  problem.device = device_capability(msa.get_device_index());

  std::vector<Tensor> kept;
  const Storer store(kOp, msa, "msa", problem.msa == DType::kFloat64, &kept);
  const DeviceGuard guard(msa.get_device_index());
  PrepareProblem weights;
  weights.norm_weight = store(layer_norm_weight, "layer_norm_weight", channels);
  weights.norm_bias = store(layer_norm_bias, "layer_norm_bias", channels);
  weights.query = store(query_weight, "query_weight", width, channels);
  weights.key = store(key_weight, "key_weight", width, channels);
  weights.value = store(value_weight, "value_weight", width, channels);
  weights.gate = store(gate_weight, "gate_weight", width, channels);
  weights.out_proj = store(out_proj_weight, "out_proj_weight", channels, width);
  weights.out_proj_bias = store(out_proj_bias, "out_proj_bias", channels);
  BiasProblem bias;
  bias.norm_weight = store(pair_norm_weight, "pair_norm_weight", pair_channels);
  bias.norm_bias = store(pair_norm_bias, "pair_norm_bias", pair_channels);
  bias.weight = store(pair_bias_weight, "pair_bias_weight", num_heads, pair_channels);
  const Stored gate = store(gate_bias, "gate_bias", width);
  Tensor kept_mask = msa, kept_msa = msa, kept_pair = pair;
  const Mask keys = mask_of(mask, msa, lead, &kept_mask);

  const Choice chosen = choose(problem);
  if (chosen.plan.path != Path::kKernel) {
    std::string reason;
    for (const std::string& one : chosen.plan.reasons) reason += (reason.empty() ? "" : "; ") + one;
    return call_operator("fused_ops::msa_row_attention_composition", msa, pair, mask, dropout_seed,
                         layer_norm_weight, layer_norm_bias, query_weight, key_weight, value_weight,
                         gate_weight, gate_bias, pair_norm_weight, pair_norm_bias, pair_bias_weight,
                         out_proj_weight, out_proj_bias, num_heads, dropout, eps,
                         std::string(precision), dtype, reason);
  }
  const auto shape = msa.sizes();
  Tensor out = empty(msa, {shape.begin(), shape.end()}, scalar_type_of(problem.result));
  if (problem.sizes.positions() * channels == 0) return out;
  Forward{chosen,
          problem.sizes,
          static_cast<float>(eps),
          msa_of(msa, lead, &kept_msa),
          pairs_of(pair, lead, &kept_pair),
          keys,
          weights,
          bias,
          gate,
          current_stream(out)}
      .run(out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, m) {
  m.impl("msa_row_attention_forward", TORCH_BOX(&forward));
}

}  // namespace fused_ops::msa_row_attention
