// SPDX-License-Identifier: Apache-2.0
// The CUDA implementation of fused_ops::msa_row_attention_forward, whose schema Python has defined:
// check, plan, then launch or hand over to the PyTorch composition.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common/sanitizers.h"
#include "msa_row_attention/arguments.h"
#include "msa_row_attention/small.h"

namespace fused_ops::msa_row_attention {
namespace {

// out = a * b^T, and a bias of as many columns.
void multiply(const Tensor& a, const Tensor& b, const MaybeTensor& bias, const Tensor& out) {
  if (fills_products()) call_operator("aten::zero_", out);
  call_overload("aten::linear", "out", a, b, bias, out);
}

// a * b^T of fp32 numbers, to the precision of the op: ATen's product would be one of FFMAs.
Tensor multiply_fp32(const Tensor& a, const Tensor& b, Mode mode) {
  const std::int64_t inner = b.size(1);
  const Tensor turned = view_of(b, const_cast<void*>(b.const_data_ptr()), {inner, b.size(0)},
                                {1, inner}, ScalarType::Float);
  const std::string precision = mode == Mode::kTf32 ? "tf32" : "ieee";
  return call_operator("fused_ops::tensor_matmul_forward", a, turned, precision,
                       std::optional<ScalarType>());
}

template <class T>
T* offset(T* data, DType type, std::int64_t numbers) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return static_cast<Byte*>(data) + numbers * bytes_of(type);
}

void run_small(const Choice& chosen, SmallProblem& small, Tensor& out) {
  const Tensor workspace = empty(out, {chosen.plan.workspace_bytes / 4}, ScalarType::Float);
  small.workspace = workspace.mutable_data_ptr<float>();
  small.out = out.mutable_data_ptr();
  small_forward_sm80(small, current_stream(out));
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
  CUstream_st* stream;

  void run(const Tensor& out) {
    const DType type = type_of(chosen.mode);
    const ScalarType scalar = scalar_type_of(type);
    const bool is_fp32 = type == DType::kFloat32;
    Sizes part = sizes;
    part.groups = chosen.groups;
    part.rows = chosen.rows;
    const std::int64_t positions = part.positions(), width = sizes.width();
    const std::int64_t channels = sizes.channels, size = bytes_of(type);

    // One allocation: each costs as much time of the host as a launch.
    std::int64_t end = 0;
    const auto take = [&end](std::int64_t bytes) {
      const std::int64_t begin = end;
      end += ceil_div(bytes, 256) * 256;
      return begin;
    };
    const std::int64_t at_bias = take(bias_size(sizes) * size);
    const std::int64_t at_projections = take(4 * width * channels * size);
    const std::int64_t at_projection_bias = take(4 * width * size);
    const std::int64_t at_out_weight = take(channels * width * size);
    const std::int64_t at_out_bias = take(channels * size);
    const std::int64_t at_present = take(mask.data ? part.all_rows() * mask_words(sizes.n) * 8 : 0);
    const std::int64_t at_normalised = take(positions * channels * size);
    const std::int64_t at_projected = take(is_fp32 ? 0 : positions * 4 * width * size);
    const std::int64_t at_attended = take(positions * width * size);
    const Tensor workspace = empty(out, {end}, ScalarType::Byte);
    auto* memory = static_cast<unsigned char*>(workspace.mutable_data_ptr());
    const auto matrix = [&](void* data, std::int64_t rows, std::int64_t columns) {
      return view_of(out, data, {rows, columns}, {columns, 1}, scalar);
    };
    const auto vector = [&](void* data, std::int64_t count) {
      return view_of(out, data, {count}, {1}, scalar);
    };

    bias.sizes = sizes;
    bias.mode = chosen.mode;
    bias.eps = eps;
    bias.pair = pair;
    bias.scale = std::sqrt(static_cast<float>(sizes.head_dim));
    bias.bias = memory + at_bias;
    bias_sm80(bias, stream);

    PrepareProblem prepare = weights;
    prepare.mode = chosen.mode;
    prepare.eps = eps;
    prepare.normalised = memory + at_normalised;
    if (mask.data) prepare.present = reinterpret_cast<std::uint64_t*>(memory + at_present);
    prepare.projections = memory + at_projections;
    prepare.projection_bias = memory + at_projection_bias;
    prepare.out_weight = memory + at_out_weight;
    prepare.out_bias = memory + at_out_bias;
    const Tensor projections = matrix(prepare.projections, 4 * width, channels);
    const Tensor projection_bias = vector(prepare.projection_bias, 4 * width);
    const Tensor out_weight = matrix(prepare.out_weight, channels, width);
    const Tensor out_bias = vector(prepare.out_bias, channels);

    AttendProblem attend;
    attend.mode = chosen.mode;
    attend.projected = memory + at_projected;
    if (is_fp32) {
      attend.projection_bias = reinterpret_cast<const float*>(memory + at_projection_bias);
    }
    attend.present = prepare.present;
    attend.out = memory + at_attended;

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
        // Once is enough.
        prepare.projections = prepare.projection_bias = nullptr;
        prepare.out_weight = prepare.out_bias = nullptr;

        const Tensor normalised = matrix(prepare.normalised, count, channels);
        const Tensor attended = matrix(attend.out, count, width);
        void* results =
            offset(out.mutable_data_ptr(), type, (group * sizes.rows + row) * sizes.n * channels);
        attend.bias = memory + at_bias + group * (bias_size(sizes) / sizes.groups) * size;
        if (is_fp32) {
          {  // its memory is free again before the next product needs some
            const Tensor projected = multiply_fp32(normalised, projections, chosen.mode);
            attend.projected = projected.const_data_ptr();
            attend_fp32_sm80(attend, stream);
          }
          const Tensor product = multiply_fp32(attended, out_weight, chosen.mode);
          AddBiasProblem add;
          add.rows = count;
          add.channels = sizes.channels;
          add.product = static_cast<const float*>(product.const_data_ptr());
          add.bias = reinterpret_cast<const float*>(memory + at_out_bias);
          add.out = static_cast<float*>(results);
          add_bias_sm80(add, stream);
        } else {
          multiply(normalised, projections, projection_bias,
                   matrix(memory + at_projected, count, 4 * width));
          attend_sm80(attend, stream);
          multiply(attended, out_weight, out_bias, matrix(results, count, channels));
        }
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
  FO_CHECK_VALUE(
      (floating_type(kOp, pair, "pair") == DType::kFloat64) == (problem.msa == DType::kFloat64),
      kOp, ": pair must be float64 when msa is, and only then, got ",
      dtype_text(pair.scalar_type()));
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
  FO_CHECK_VALUE(dtype || pair.scalar_type() == msa.scalar_type(), kOp,
                 ": pair must have the dtype of msa outside autocast, expected ",
                 dtype_text(msa.scalar_type()), ", got ", dtype_text(pair.scalar_type()));
  FO_CHECK_VALUE(!dropout_seed || (dropout_seed->scalar_type() == ScalarType::Long &&
                                   dropout_seed->numel() == 1 && same_device(msa, *dropout_seed)),
                 kOp, ": dropout_seed must be one int64 on the device of msa");
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
  weights.gate_bias = store(gate_bias, "gate_bias", width);
  weights.out_proj = store(out_proj_weight, "out_proj_weight", channels, width);
  weights.out_proj_bias = store(out_proj_bias, "out_proj_bias", channels);
  BiasProblem bias;
  bias.norm_weight = store(pair_norm_weight, "pair_norm_weight", pair_channels);
  bias.norm_bias = store(pair_norm_bias, "pair_norm_bias", pair_channels);
  bias.weight = store(pair_bias_weight, "pair_bias_weight", num_heads, pair_channels);
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
  if (chosen.small) {
    SmallProblem small;
    small.prepare = weights;
    small.prepare.sizes = problem.sizes;
    small.prepare.mode = chosen.mode;
    small.prepare.eps = static_cast<float>(eps);
    small.prepare.msa = msa_of(msa, lead, &kept_msa);
    small.prepare.mask = keys;
    small.bias = bias;
    small.bias.pair = pairs_of(pair, lead, &kept_pair);
    run_small(chosen, small, out);
    return out;
  }
  Forward{chosen,
          problem.sizes,
          static_cast<float>(eps),
          msa_of(msa, lead, &kept_msa),
          pairs_of(pair, lead, &kept_pair),
          keys,
          weights,
          bias,
          current_stream(out)}
      .run(out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, m) {
  m.impl("msa_row_attention_forward", TORCH_BOX(&forward));
}

}  // namespace fused_ops::msa_row_attention
