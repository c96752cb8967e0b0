// SPDX-License-Identifier: Apache-2.0
// The backward of the bias: from its gradient to those of the pair tensor, the projection, and the
// LayerNorm if there is one. For the room's host op.
#pragma once

#include "msa_row_attention/backward_call.h"

namespace fused_ops::msa_row_attention {

// Which groups have the same pair tensor: along axes of the MSA where that has one.
struct Shared {
  std::vector<std::int64_t> sizes;  // of groups
  std::vector<std::int64_t> own;    // of pair tensors
  std::int64_t count = 1;           // of pair tensors

  explicit Shared(const Call& call) {
    const auto axes = static_cast<std::int64_t>(call.lead.sizes.size());
    const std::int64_t missing = axes - (call.pair.dim() - 3);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(call.lead.group_axes); ++i) {
      sizes.push_back(call.lead.sizes[static_cast<std::size_t>(i)]);
      own.push_back(i < missing ? 1 : call.pair.size(i - missing));
      count *= own.back();
    }
  }

  // The first group of a pair tensor.
  std::int64_t group_of(std::int64_t pair) const {
    std::int64_t group = 0, stride = 1;
    for (std::size_t i = sizes.size(); i-- > 0;) {
      group += pair % own[i] * stride;
      pair /= own[i];
      stride *= sizes[i];
    }
    return group;
  }
};

class PairBackward {
 public:
  explicit PairBackward(BackwardCall* call)
      : c_(*call), sizes_(c_.sizes), weight_(sizes_.heads, sizes_.pair_channels) {
    const std::int64_t size = bytes_of(c_.call.type()), channels = sizes_.pair_channels;
    const std::int64_t maps = sizes_.groups * sizes_.heads * sizes_.n * sizes_.n;
    const std::int64_t pairs = c_.needs_pair() ? rows_at_a_time() * sizes_.n : 0;
    const std::int64_t chunks = sizes_.groups * ceil_div(sizes_.n, rows_at_a_time());
    Workspace& memory = c_.memory;
    at_d_bias_ = memory.take(c_.needs_pair() ? maps * 4 : 0);
    at_input_ = memory.take(pairs * channels * size);
    at_d_input_ = memory.take(pairs * channels * size);
    at_statistics_ = memory.take(c_.needs_pair_norm() ? pairs * 16 : 0);
    at_maps_ = memory.take(c_.call.is_fp32() ? 0 : pairs * sizes_.heads * size);
    at_weight_ = memory.take(c_.needs_pair() ? sizes_.heads * channels * size : 0);
    at_norm_sums_ =
        c_.reserve_columns(&norm_sums_, channels, 2, pairs, chunks, c_.needs_pair_norm());
    at_products_ =
        memory.take(c_.needs(kPairBiasWeight) ? sizes_.groups * sizes_.n * weight_.size() * 4 : 0);
  }

  // Once the memory is there.
  void begin() {
    norm_sums_.to = c_.memory.at<float>(at_norm_sums_);
    weight_.set(c_.memory.at<float>(at_products_));
  }

  // (groups, heads, N, N)
  float* d_bias() const { return c_.memory.at<float>(at_d_bias_); }

  // From the bias's gradient to the pair tensor: some of its rows at a time.
  void run() {
    if (sizes_.pair_channels == 0) return;
    const std::int64_t channels = sizes_.pair_channels, heads = sizes_.heads;
    const Stored& stored = c_.call.bias.weight;
    const bool rounded = stored.type != c_.call.type();
    void* weight_data = rounded ? c_.memory.at(at_weight_) : const_cast<void*>(stored.data);
    const Tensor weight = c_.matrix(weight_data, heads, channels);
    if (rounded) {
      call_operator("aten::copy_", weight,
                    view_of(c_.call.msa, const_cast<void*>(stored.data), {heads, channels},
                            {channels, 1}, scalar_type_of(stored.type)),
                    false);
    }
    const Shared shared(c_.call);
    const float* maps = add_shared(shared);
    const std::int64_t of_pair = sizes_.n * sizes_.n;
    for (std::int64_t own = 0; own < shared.count; ++own) {
      for (std::int64_t row = 0; row < sizes_.n; row += rows_at_a_time()) {
        const std::int64_t rows = std::min(rows_at_a_time(), sizes_.n - row);
        void* to = nullptr;
        if (c_.needs(kPair)) {
          to = further(c_.grad(kPair).mutable_data_ptr(), c_.call.pairs.type,
                       (own * of_pair + row * sizes_.n) * channels);
        }
        through_bias(weight, maps + own * heads * of_pair, shared.group_of(own), row, rows, to);
      }
    }
  }

  void finish(FinishProblem* finish) const {
    c_.add(finish, kPairBiasWeight, weight_.data(), slabs_, weight_.size(), 1, 1);
    c_.add_columns(finish, kPairNormBias, norm_sums_, 0, 1, 1);
    c_.add_columns(finish, kPairNormWeight, norm_sums_, 1, 1, 1);
  }

 private:
  // Rows of pairs, of one group.
  std::int64_t rows_at_a_time() const {
    constexpr std::int64_t kMost = std::int64_t{1} << 26;  // numbers
    const std::int64_t line = std::max<std::int64_t>(
        1, sizes_.n * std::max<std::int64_t>(sizes_.pair_channels, sizes_.heads));
    return std::clamp<std::int64_t>(kMost / line, 1, std::max<std::int64_t>(sizes_.n, 1));
  }

  // The bias's gradient of each pair tensor: where groups share one, the sum of theirs.
  const float* add_shared(const Shared& shared) {
    float* maps = d_bias();
    std::int64_t outer = 1, inner = sizes_.groups * sizes_.heads * sizes_.n * sizes_.n;
    for (std::size_t axis = 0; axis < shared.sizes.size(); ++axis) {
      const std::int64_t size = shared.sizes[axis];
      inner /= size;
      if (shared.own[axis] == size) {
        outer *= size;
        continue;
      }
      shared_maps_.push_back(empty(c_.call.msa, {outer, inner}, ScalarType::Float));
      float* to = shared_maps_.back().mutable_data_ptr<float>();
      for (std::int64_t i = 0; i < outer; ++i) {
        FinishProblem p;
        p.count = 1;
        p.summands[0] = {maps + i * size * inner,          size, inner, inner, 1, 1, 1.0f,
                         {to + i * inner, DType::kFloat32}};
        finish_sm80(p, c_.stream);
      }
      maps = to;
    }
    return maps;
  }

  // Rows [row, row + rows) of the group's pairs; their gradient to `to` unless it is null.
  void through_bias(const Tensor& weight, const float* maps_of_pair, std::int64_t group,
                    std::int64_t row, std::int64_t rows, void* to) {
    const std::int64_t n = sizes_.n, heads = sizes_.heads, count = rows * n;
    const std::int64_t channels = sizes_.pair_channels;
    const Tensor& like = c_.call.msa;
    const bool has_norm = c_.call.bias.norm_weight.data != nullptr;
    Sizes part;
    part.groups = 1;
    part.rows = rows;
    part.n = n;
    part.channels = sizes_.pair_channels;
    Msa source;
    source.type = c_.call.pairs.type;
    source.data = further(c_.call.pairs.data, source.type,
                          group * c_.call.pairs.group_stride + row * c_.call.pairs.i_stride);
    source.group_stride = 0;
    source.row_stride = c_.call.pairs.i_stride;
    source.position_stride = c_.call.pairs.j_stride;

    // (heads, rows, N) of the type of the products.
    Tensor maps = view_of(like, const_cast<float*>(maps_of_pair) + row * n, {heads, rows, n},
                          {n * n, n, 1}, ScalarType::Float);
    std::int64_t map = n * n;
    if (!c_.call.is_fp32()) {
      const Tensor rounded =
          view_of(like, c_.memory.at(at_maps_), {heads, rows, n}, {count, n, 1}, c_.call.scalar());
      call_operator("aten::copy_", rounded, maps, false);
      maps = rounded;
      map = count;
    }
    void* map_data = maps.mutable_data_ptr();
    if (c_.needs(kPairBiasWeight)) {
      void* input = c_.memory.at(at_input_);
      const bool plain = source.type == c_.call.type() && source.position_stride == channels &&
                         source.row_stride == n * channels;
      if (!has_norm && plain) {
        input = const_cast<void*>(source.data);
      } else if (has_norm) {
        PrepareProblem prepare;
        prepare.sizes = part;
        prepare.mode = c_.call.mode();
        prepare.eps = c_.call.eps;
        prepare.msa = source;
        prepare.norm_weight = c_.call.bias.norm_weight;
        prepare.norm_bias = c_.call.bias.norm_bias;
        prepare.normalised = input;
        prepare_sm80(prepare, c_.stream);
      } else {
        call_operator(
            "aten::copy_",
            view_of(like, input, {rows, n, channels}, {n * channels, channels, 1},
                    c_.call.scalar()),
            view_of(like, const_cast<void*>(source.data), {rows, n, channels},
                    {source.row_stride, source.position_stride, 1}, scalar_type_of(source.type)),
            false);
      }
      add_pair_products(map_data, map, input, rows);
    }
    if (!to && !c_.needs_pair_norm()) return;
    const Tensor turned = view_of(like, map_data, {count, heads}, {1, map}, c_.call.scalar());
    const bool direct = !has_norm && !c_.call.is_fp32() && source.type == c_.call.type();
    const Tensor d_input = c_.multiply(turned, weight, direct ? to : c_.memory.at(at_d_input_));
    if (direct) return;
    if (!has_norm) {
      call_operator(
          "aten::copy_",
          view_of(like, to, {count, channels}, {channels, 1}, scalar_type_of(source.type)), d_input,
          false);
      return;
    }
    NormBackwardProblem p;
    p.channels = part.channels;
    p.eps = c_.call.eps;
    p.source = rows_of(part, source);
    p.weight = c_.call.bias.norm_weight;
    p.grad = d_input.const_data_ptr();
    p.grad_type = c_.call.type();
    p.out = to;
    if (c_.needs_pair_norm()) {
      p.statistics = c_.memory.at<float>(at_statistics_);
      p.parts = norm_sums_.parts;
      p.sums = norm_sums_.next();
    }
    norm_backward_sm80(p, c_.stream);
  }

  // A slab of the weight's gradient for each row of pairs.
  void add_pair_products(void* maps, std::int64_t map, void* input, std::int64_t rows) {
    const std::int64_t n = sizes_.n, heads = sizes_.heads, channels = sizes_.pair_channels;
    const Tensor& like = c_.call.msa;
    float* to = const_cast<float*>(weight_.data()) + slabs_ * weight_.size();
    const Tensor a = view_of(like, maps, {rows, heads, n}, {n, map, 1}, c_.call.scalar());
    const Tensor b =
        view_of(like, input, {rows, n, channels}, {n * channels, channels, 1}, c_.call.scalar());
    const Tensor out = view_of(like, to, {rows, heads, channels}, {heads * channels, channels, 1},
                               ScalarType::Float);
    if (fills_products()) call_operator("aten::zero_", out);
    if (c_.call.is_fp32()) {
      call_overload("aten::bmm", "out", a, b, out);
    } else {
      call_overload("aten::bmm", "dtype_out", a, b, ScalarType::Float, out);
    }
    slabs_ += rows;
  }

  BackwardCall& c_;
  const Sizes& sizes_;
  std::int64_t at_d_bias_, at_input_, at_d_input_, at_statistics_, at_maps_, at_weight_;
  std::int64_t at_norm_sums_, at_products_;
  SlabProducts weight_;
  std::int64_t slabs_ = 0;
  ColumnParts norm_sums_;
  std::vector<Tensor> shared_maps_;
};

}  // namespace fused_ops::msa_row_attention
