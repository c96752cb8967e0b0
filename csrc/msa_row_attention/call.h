// SPDX-License-Identifier: Apache-2.0
// A call of the op as its kernels take it: checked, and chosen for.
#pragma once

#include <cmath>

#include "common/products.h"
#include "common/workspace.h"
#include "msa_row_attention/arguments.h"
#include "msa_row_attention/dropout.h"

namespace fused_ops::msa_row_attention {

struct Parameters {
  const Tensor& layer_norm_weight;
  const Tensor& layer_norm_bias;
  const Tensor& query_weight;
  const Tensor& key_weight;
  const Tensor& value_weight;
  const Tensor& gate_weight;
  const MaybeTensor& gate_bias;
  const MaybeTensor& pair_norm_weight;
  const MaybeTensor& pair_norm_bias;
  const Tensor& pair_bias_weight;
  const Tensor& out_proj_weight;
  const MaybeTensor& out_proj_bias;
};

// Tensors of strides that kernels do not walk are copied into `kept`.
struct Call {
  Tensor msa, pair;
  Lead lead;
  Problem problem;
  Choice chosen;
  PrepareProblem weights;  // the parameters of it
  BiasProblem bias;        // likewise
  Msa rows;
  Pairs pairs;
  Mask mask;
  float eps;
  std::string precision;
  Dropout dropout;                     // without keys
  const std::int64_t* seed = nullptr;  // of it, on the device; null: none
  std::vector<Tensor> kept;

  Call(const Tensor& msa_tensor, const Tensor& pair_tensor, const MaybeTensor& mask_tensor,
       const Parameters& parameters, std::int64_t num_heads, double probability,
       double eps_of_norms, std::string_view precision_text, std::optional<ScalarType> dtype,
       const MaybeTensor& dropout_seed, bool backward)
      : msa(msa_tensor),
        pair(pair_tensor),
        eps(static_cast<float>(eps_of_norms)),
        precision(precision_text) {
    problem.msa = floating_type(kOp, msa, "msa");
    FO_CHECK_VALUE(
        (floating_type(kOp, pair, "pair") == DType::kFloat64) == (problem.msa == DType::kFloat64),
        kOp, ": pair must be float64 when msa is, and only then, got ",
        dtype_text(pair.scalar_type()));
    FO_CHECK_VALUE(msa.dim() >= 3, kOp, ": msa must have shape (..., S, N, msa_dim), got ",
                   shape_text(msa.sizes()));
    const std::int64_t rows_of_axis = msa.size(-3), n = msa.size(-2), channels = msa.size(-1);
    FO_CHECK_VALUE(pair.dim() >= 3 && pair.size(-2) == n && pair.size(-3) == n, kOp,
                   ": pair must have shape (..., N, N, pair_dim) with N = ", n, ", got ",
                   shape_text(pair.sizes()));
    FO_CHECK_RUNTIME(same_device(msa, pair), kOp, ": pair must be on the device of msa, expected ",
                     device_text(msa), ", got ", device_text(pair));
    const Parameters& given = parameters;
    FO_CHECK_VALUE(given.query_weight.defined() && given.query_weight.dim() == 2, kOp,
                   ": query_weight must have shape (num_heads * d, msa_dim)");
    const std::int64_t width = given.query_weight.size(0), pair_channels = pair.size(-1);
    FO_CHECK_VALUE(num_heads >= 1 && width % num_heads == 0, kOp,
                   ": query_weight must have a multiple of num_heads = ", num_heads, " rows, got ",
                   width);
    FO_CHECK_VALUE(probability >= 0.0 && probability <= 1.0, kOp,
                   ": dropout must be in [0, 1], got ", probability);
    FO_CHECK_VALUE(given.pair_norm_weight.has_value() == given.pair_norm_bias.has_value(), kOp,
                   ": pair_norm_weight and pair_norm_bias must be given together, got only one");
    lead = lead_of(msa, pair);
    problem.sizes = sizes_of(lead.groups, lead.rows_of_lead * rows_of_axis, n, channels,
                             pair_channels, num_heads, width);
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
    problem.dropout = probability > 0.0 && dropout_seed.has_value();
    if (problem.dropout) {
      dropout = dropout_of(probability);
      seed = static_cast<const std::int64_t*>(dropout_seed->const_data_ptr());
    }
    problem.backward = backward;
    problem.device = device_capability(msa.get_device_index());

    const Storer store(kOp, msa, "msa", problem.msa == DType::kFloat64, &kept);
    const DeviceGuard guard(msa.get_device_index());
    weights.norm_weight = store(given.layer_norm_weight, "layer_norm_weight", channels);
    weights.norm_bias = store(given.layer_norm_bias, "layer_norm_bias", channels);
    weights.query = store(given.query_weight, "query_weight", width, channels);
    weights.key = store(given.key_weight, "key_weight", width, channels);
    weights.value = store(given.value_weight, "value_weight", width, channels);
    weights.gate = store(given.gate_weight, "gate_weight", width, channels);
    weights.gate_bias = store(given.gate_bias, "gate_bias", width);
    weights.out_proj = store(given.out_proj_weight, "out_proj_weight", channels, width);
    weights.out_proj_bias = store(given.out_proj_bias, "out_proj_bias", channels);
    bias.norm_weight = store(given.pair_norm_weight, "pair_norm_weight", pair_channels);
    bias.norm_bias = store(given.pair_norm_bias, "pair_norm_bias", pair_channels);
    bias.weight = store(given.pair_bias_weight, "pair_bias_weight", num_heads, pair_channels);
    Tensor of_mask = msa;
    mask = mask_of(mask_tensor, msa, lead, &of_mask);
    kept.push_back(of_mask);

    chosen = choose(problem);
    if (chosen.plan.path != Path::kKernel) return;
    Tensor of_msa = msa, of_pair = pair;
    rows = msa_of(msa, lead, &of_msa);
    pairs = pairs_of(pair, lead, &of_pair);
    kept.push_back(of_msa);
    kept.push_back(of_pair);
    weights.mode = bias.mode = chosen.mode;
    weights.eps = bias.eps = eps;
    bias.sizes = problem.sizes;
    bias.pair = pairs;
    bias.scale = std::sqrt(static_cast<float>(problem.sizes.head_dim));
  }

  const Sizes& sizes() const { return problem.sizes; }
  Mode mode() const { return chosen.mode; }
  DType type() const { return type_of(chosen.mode); }
  ScalarType scalar() const { return scalar_type_of(type()); }
  bool is_fp32() const { return type() == DType::kFloat32; }

  // Dropout of a part of the rows, from number `first_row` of the call on; writes its keys.
  Dropout draw(const Sizes& part, std::int64_t first_row, std::uint64_t* keys,
               CUstream_st* stream) const {
    if (!seed) return {};
    DropoutKeysProblem p;
    p.seed = seed;
    p.first_row = first_row;
    p.rows = part.all_rows();
    p.n = part.n;
    p.heads = part.heads;
    p.keys = keys;
    dropout_keys_sm80(p, stream);
    Dropout drawn = dropout;
    drawn.keys = keys;
    return drawn;
  }

  void attend(const AttendProblem& p, CUstream_st* stream) const {
    if (is_fp32()) return (seed ? attend_fp32_dropout_sm80 : attend_fp32_sm80)(p, stream);
    (seed ? attend_dropout_sm80 : attend_sm80)(p, stream);
  }

  // The problem of a part of the rows: `group` and `row` are its first ones.
  PrepareProblem part(const Sizes& part, std::int64_t group, std::int64_t row) const {
    PrepareProblem p = weights;
    p.sizes = part;
    p.msa = rows;
    p.msa.data = further(rows.data, rows.type, group * rows.group_stride + row * rows.row_stride);
    p.mask = mask;
    if (mask.data) {
      p.mask.data = static_cast<const char*>(mask.data) +
                    (group * mask.group_stride + row * mask.row_stride) * bytes_of(mask.type);
    }
    return p;
  }
};

}  // namespace fused_ops::msa_row_attention
