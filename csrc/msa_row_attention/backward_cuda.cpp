// SPDX-License-Identifier: Apache-2.0
// The backward on CUDA: the room's kernels, with matrix products between them.
//
// Nothing but the inputs is kept by the forward. Some rows at a time, LayerNorm, projections and
// attention are formed again, and gradients go back through the output projection, the attention,
// the projections and the LayerNorm. The bias's gradient is summed up over all rows that share it,
// and then goes back to the pair tensor. The parameters' gradients follow at the end, in one
// launch, from sums over parts of the positions. docs/ops/ has the formulae.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>

#include "common/launch.h"
#include "common/sanitizers.h"
#include "msa_row_attention/backward.h"
#include "msa_row_attention/call.h"
#include "msa_row_attention/config.h"
#include "msa_row_attention/parameters.h"

namespace fused_ops::msa_row_attention {
namespace {

// The differentiable ones, in the order of the op's `needs`.
enum Input {
  kMsa,
  kPair,
  kNormWeight,
  kNormBias,
  kQueryWeight,
  kKeyWeight,
  kValueWeight,
  kGateWeight,
  kGateBias,
  kPairNormWeight,
  kPairNormBias,
  kPairBiasWeight,
  kOutWeight,
  kOutBias,
  kInputs
};
using Inputs = MaybeTensor[kInputs];

// Sums of products over positions, in fp32: (slabs, lines, columns), to be added.
class SlabProducts {
 public:
  SlabProducts(std::int64_t lines, std::int64_t columns) : lines_(lines), columns_(columns) {}

  // At most so many slabs come of a part of so many positions.
  std::int64_t slabs_of(std::int64_t positions) const { return cuts_of(positions) + 1; }
  std::int64_t size() const { return lines_ * columns_; }
  void set(float* to) { to_ = to; }

  // left^T * right, of (positions, lines) and (positions, columns), contiguous.
  void add(const Call& call, void* left, void* right, std::int64_t positions) {
    const Tensor& like = call.msa;
    const ScalarType type = call.scalar();
    if (call.is_fp32()) {
      const Tensor a = view_of(like, left, {positions, lines_}, {lines_, 1}, type);
      const Tensor b = view_of(like, right, {positions, columns_}, {columns_, 1}, type);
      const Tensor product = call_operator("fused_ops::tensor_matmul_reduce", a, b, call.precision,
                                           std::optional<ScalarType>());
      call_operator("aten::copy_",
                    view_of(like, to_ + used_ * size(), {lines_, columns_}, {columns_, 1}, type),
                    product, false);
      ++used_;
      return;
    }
    const std::int64_t cuts = cuts_of(positions), length = positions / cuts / 8 * 8;
    if (length > 0) multiply(call, left, right, 0, cuts, length);
    const std::int64_t done = cuts * length;
    if (done < positions) multiply(call, left, right, done, 1, positions - done);
  }

  std::int64_t used() const { return used_; }
  const float* data() const { return to_; }

 private:
  // One product of few results would leave most of the GPU idle.
  std::int64_t cuts_of(std::int64_t positions) const {
    const std::int64_t tiles = ceil_div(lines_, 128) * ceil_div(columns_, 128);
    std::int64_t cuts = 64;
    while (cuts > 1 && (cuts * tiles > 256 || positions / cuts < 256)) cuts /= 2;
    return cuts;
  }

  void multiply(const Call& call, void* left, void* right, std::int64_t first, std::int64_t cuts,
                std::int64_t length) {
    const Tensor& like = call.msa;
    const Tensor a = view_of(like, further(left, call.type(), first * lines_),
                             {cuts, lines_, length}, {length * lines_, 1, lines_}, call.scalar());
    const Tensor b =
        view_of(like, further(right, call.type(), first * columns_), {cuts, length, columns_},
                {length * columns_, columns_, 1}, call.scalar());
    const Tensor out = view_of(like, to_ + used_ * size(), {cuts, lines_, columns_},
                               {size(), columns_, 1}, ScalarType::Float);
    if (fills_products()) call_operator("aten::zero_", out);
    call_overload("aten::bmm", "dtype_out", a, b, ScalarType::Float, out);
    used_ += cuts;
  }

  std::int64_t lines_, columns_;
  float* to_ = nullptr;
  std::int64_t used_ = 0;
};

// Sums of a matrix's columns, in parts, over one part of the positions after the other.
struct ColumnParts {
  std::int64_t columns = 0;
  int kinds = 1;
  int parts = 1;
  float* to = nullptr;
  std::int64_t used = 0;

  std::int64_t size(std::int64_t chunks) const { return chunks * parts * kinds * columns; }
};

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

class Backward {
 public:
  Backward(const Call& call, const Tensor& grad, const Inputs& inputs,
           const std::vector<bool>& needs)
      : call_(call),
        sizes_(call.sizes()),
        grad_(grad),
        inputs_(inputs),
        needs_(needs),
        stream_(current_stream(grad)),
        projections_(4 * sizes_.width(), sizes_.channels),
        out_(sizes_.channels, sizes_.width()),
        pair_bias_(sizes_.heads, sizes_.pair_channels) {}

  // The wanted gradients.
  std::vector<Tensor> run() {
    for (int i = 0; i < kInputs; ++i) {
      if (!needs_[i]) continue;
      const auto shape = inputs_[i]->sizes();
      grads_[i] = empty(call_.msa, {shape.begin(), shape.end()}, inputs_[i]->scalar_type());
    }
    reserve();
    walk_rows();
    if (needs_pair()) walk_pairs();
    parameters();
    std::vector<Tensor> wanted;
    for (int i = 0; i < kInputs; ++i) {
      if (needs_[i]) wanted.push_back(*grads_[i]);
    }
    return wanted;
  }

 private:
  bool needs(std::initializer_list<Input> inputs) const {
    return std::any_of(inputs.begin(), inputs.end(), [&](Input i) { return needs_[i]; });
  }
  bool needs_weights() const {
    return needs({kQueryWeight, kKeyWeight, kValueWeight, kGateWeight});
  }
  bool needs_norm() const { return needs({kNormWeight, kNormBias}); }
  bool needs_source() const { return needs_[kMsa] || needs_norm(); }
  bool needs_projected() const { return needs_weights() || needs_source() || needs_[kGateBias]; }
  bool needs_pair_norm() const { return needs({kPairNormWeight, kPairNormBias}); }
  bool needs_pair() const { return needs({kPair, kPairBiasWeight}) || needs_pair_norm(); }
  bool needs_attention() const { return needs_projected() || needs_pair() || needs_[kOutWeight]; }

  // Rows of pairs at a time, of one group.
  std::int64_t pair_rows() const {
    constexpr std::int64_t kMost = std::int64_t{1} << 26;  // numbers
    const std::int64_t line = std::max<std::int64_t>(
        1, sizes_.n * std::max<std::int64_t>(sizes_.pair_channels, sizes_.heads));
    return std::clamp<std::int64_t>(kMost / line, 1, std::max<std::int64_t>(sizes_.n, 1));
  }

  ColumnParts parts_of(std::int64_t columns, int kinds, std::int64_t positions) const {
    ColumnParts parts;
    parts.columns = columns;
    parts.kinds = kinds;
    parts.parts = column_sum_parts(positions, static_cast<int>(columns));
    return parts;
  }

  // All memory, in one allocation.
  void reserve() {
    const std::int64_t size = bytes_of(call_.type()), width = sizes_.width();
    const std::int64_t channels = sizes_.channels;
    part_ = sizes_;
    part_.groups = call_.chosen.groups;
    part_.rows = call_.chosen.rows;
    const std::int64_t positions = part_.positions();
    const std::int64_t chunks = ceil_div(sizes_.groups, part_.groups) *
                                (part_.groups > 1 ? 1 : ceil_div(sizes_.rows, part_.rows));
    Workspace& w = memory_;
    const auto products = [&](SlabProducts& p, std::int64_t slabs, bool wanted) {
      return w.take(wanted ? slabs * p.size() * 4 : 0);
    };
    const auto column_parts = [&](ColumnParts& p, std::int64_t times, bool wanted) {
      return w.take(wanted ? p.size(times) * 4 : 0);
    };
    at_bias_ = w.take(bias_size(sizes_) * size);
    at_projections_ = w.take(4 * width * channels * size);
    at_projection_bias_ = w.take(4 * width * size);
    at_out_weight_ = w.take(channels * width * size);
    at_out_bias_ = w.take(channels * size);
    at_present_ = w.take(call_.mask.data ? part_.all_rows() * mask_words(sizes_.n) * 8 : 0);
    at_normalised_ = w.take(positions * channels * size);
    at_projected_ = w.take(call_.is_fp32() ? 0 : positions * 4 * width * size);
    at_d_projected_ = w.take(positions * 4 * width * size);
    at_d_gated_ = w.take(call_.is_fp32() ? 0 : positions * width * size);
    at_gated_ = w.take(positions * width * size);
    at_d_attended_ = w.take(positions * width * size);
    const std::int64_t queries = part_.all_rows() * sizes_.heads * sizes_.n;
    at_log_sums_ = w.take(queries * 4);
    at_row_dots_ = w.take(queries * 4);
    at_statistics_ = w.take(needs_norm() ? positions * 16 : 0);
    const std::int64_t maps = sizes_.groups * sizes_.heads * sizes_.n * sizes_.n;
    at_d_bias_ = w.take(needs_pair() ? maps * 4 : 0);
    at_partial_ = w.take(needs_pair() ? partial_size() * 4 : 0);
    norm_sums_ = parts_of(channels, 2, positions);
    gate_sums_ = parts_of(width, 1, positions);
    out_sums_ = parts_of(channels, 1, positions);
    const std::int64_t at_norm = column_parts(norm_sums_, chunks, needs_norm());
    const std::int64_t at_gate = column_parts(gate_sums_, chunks, needs_[kGateBias]);
    const std::int64_t at_out = column_parts(out_sums_, chunks, needs_[kOutBias]);
    const std::int64_t at_weights =
        products(projections_, chunks * projections_.slabs_of(positions), needs_weights());
    const std::int64_t at_out_weights =
        products(out_, chunks * out_.slabs_of(positions), needs_[kOutWeight]);
    // Of pairs.
    const std::int64_t pair_positions = pair_rows() * sizes_.n;
    const std::int64_t pair_chunks = sizes_.groups * ceil_div(sizes_.n, pair_rows());
    pair_sums_ = parts_of(sizes_.pair_channels, 2, pair_positions);
    const bool pairs = needs_pair();
    at_pair_input_ = w.take(pairs ? pair_positions * sizes_.pair_channels * size : 0);
    at_d_pair_input_ = w.take(pairs ? pair_positions * sizes_.pair_channels * size : 0);
    at_pair_statistics_ = w.take(needs_pair_norm() ? pair_positions * 16 : 0);
    at_maps_ = w.take(pairs && !call_.is_fp32() ? pair_positions * sizes_.heads * size : 0);
    at_pair_weight_ = w.take(pairs ? sizes_.heads * sizes_.pair_channels * size : 0);
    const std::int64_t at_pair_norm = column_parts(pair_sums_, pair_chunks, needs_pair_norm());
    const std::int64_t at_pair_bias =
        products(pair_bias_, sizes_.groups * sizes_.n, needs_[kPairBiasWeight]);
    w.allocate(call_.msa);
    const auto floats = [&](std::int64_t at) { return w.at<float>(at); };
    norm_sums_.to = floats(at_norm);
    gate_sums_.to = floats(at_gate);
    out_sums_.to = floats(at_out);
    pair_sums_.to = floats(at_pair_norm);
    projections_.set(floats(at_weights));
    out_.set(floats(at_out_weights));
    pair_bias_.set(floats(at_pair_bias));
  }

  // Of the bias's gradient, for whatever parts of groups and rows there are.
  std::int64_t partial_size() const {
    std::int64_t most = 0;
    Sizes some = part_;
    for (const std::int64_t groups : {part_.groups, sizes_.groups % part_.groups}) {
      for (const std::int64_t rows : {part_.rows, sizes_.rows % part_.rows}) {
        some.groups = groups;
        some.rows = rows;
        if (groups * rows == 0) continue;
        most = std::max(most, bias_partial_size(some, multiprocessors(), rows < sizes_.rows));
      }
    }
    return most;
  }

  Tensor matrix(void* data, std::int64_t rows, std::int64_t columns) const {
    return view_of(call_.msa, data, {rows, columns}, {columns, 1}, call_.scalar());
  }

  // a * b. Of 16 bits it is written to `to`; of fp32 it is a tensor of its own.
  Tensor multiply(const Tensor& a, const Tensor& b, void* to) const {
    if (call_.is_fp32()) return multiply_fp32(a, b, call_.precision);
    const Tensor out = matrix(to, a.size(0), b.size(1));
    if (fills_products()) call_operator("aten::zero_", out);
    call_overload("aten::mm", "out", a, b, out);
    return out;
  }

  void sum_columns(ColumnParts& parts, const Sizes& part, const void* grad, std::int64_t stride,
                   const Msa& source = {}, const float* statistics = nullptr) const {
    ColumnSumsProblem p;
    p.sizes = part;
    p.columns = static_cast<int>(parts.columns);
    p.grad = grad;
    p.grad_type = call_.type();
    p.grad_stride = stride;
    p.source = source;
    p.statistics = statistics;
    p.parts = parts.parts;
    p.sums = parts.to + parts.used * parts.kinds * parts.columns;
    column_sums_sm80(p, stream_);
    parts.used += parts.parts;
  }

  void walk_rows() {
    if (needs_attention()) {
      BiasProblem bias = call_.bias;
      bias.bias = memory_.at(at_bias_);
      bias_sm80(bias, stream_);
    }
    for (std::int64_t group = 0; group < sizes_.groups; group += call_.chosen.groups) {
      Sizes part = sizes_;
      part.groups = std::min(call_.chosen.groups, sizes_.groups - group);
      for (std::int64_t row = 0; row < sizes_.rows; row += call_.chosen.rows) {
        part.rows = std::min(call_.chosen.rows, sizes_.rows - row);
        walk_back(part, group, row);
      }
    }
  }

  // Rows `row` on of the groups from `group` on.
  void walk_back(const Sizes& part, std::int64_t group, std::int64_t row) {
    const std::int64_t count = part.positions(), channels = sizes_.channels;
    const std::int64_t width = sizes_.width(), line = sizes_.n * channels;
    void* grad = further(const_cast<void*>(grad_.const_data_ptr()), call_.type(),
                         (group * sizes_.rows + row) * line);
    if (needs_[kOutBias]) sum_columns(out_sums_, part, grad, channels);
    if (!needs_attention()) return;

    PrepareProblem prepare = call_.part(part, group, row);
    prepare.normalised = memory_.at(at_normalised_);
    if (call_.mask.data) {
      prepare.present = memory_.at<std::uint64_t>(at_present_);
    }
    if (group == 0 && row == 0) {  // once is enough
      prepare.projections = memory_.at(at_projections_);
      prepare.projection_bias = memory_.at(at_projection_bias_);
      prepare.out_weight = memory_.at(at_out_weight_);
      prepare.out_bias = memory_.at(at_out_bias_);
    }
    prepare_sm80(prepare, stream_);
    const Tensor normalised = matrix(prepare.normalised, count, channels);
    const Tensor projections = matrix(memory_.at(at_projections_), 4 * width, channels);
    const Tensor out_weight = matrix(memory_.at(at_out_weight_), channels, width);

    BackwardProblem p;
    p.sizes = part;
    p.mode = call_.mode();
    p.bias =
        memory_.at(at_bias_ + group * (bias_size(sizes_) / sizes_.groups) * bytes_of(call_.type()));
    p.present = prepare.present;
    const Tensor projected = project(normalised, projections);
    p.projected = projected.const_data_ptr();
    const Tensor d_gated =
        multiply(matrix(grad, count, channels), out_weight, memory_.at(at_d_gated_));
    p.d_gated = d_gated.const_data_ptr();
    p.gated = memory_.at(at_gated_);
    p.d_projected = memory_.at(at_d_projected_);
    p.d_attended = memory_.at(at_d_attended_);
    p.log_sums = memory_.at<float>(at_log_sums_);
    p.row_dots = memory_.at<float>(at_row_dots_);
    attend_statistics_sm80(p, stream_);
    if (needs_[kOutWeight]) out_.add(call_, grad, p.gated, count);
    if (needs_pair()) {
      p.partial = memory_.at<float>(at_partial_);
      p.d_bias = d_bias(group);
      p.accumulate = row > 0;
      backward_bias_sm80(p, stream_);
    }
    if (!needs_projected()) return;
    if (needs_weights() || needs_source()) {
      backward_keys_sm80(p, stream_);
      backward_queries_sm80(p, stream_);
    }
    if (needs_[kGateBias]) {
      sum_columns(gate_sums_, part, further(p.d_projected, call_.type(), 3 * width), 4 * width);
    }
    if (needs_weights()) projections_.add(call_, p.d_projected, prepare.normalised, count);
    if (needs_source()) {
      // In the place of the normalised numbers, which nothing needs any more.
      const Tensor d_normalised = multiply(matrix(p.d_projected, count, 4 * width), projections,
                                           memory_.at(at_normalised_));
      through_norm(part, prepare.msa, d_normalised, group * sizes_.rows + row);
    }
  }

  Tensor project(const Tensor& normalised, const Tensor& projections) const {
    const std::int64_t width = 4 * sizes_.width(), channels = sizes_.channels;
    if (call_.is_fp32()) {
      const Tensor turned = view_of(call_.msa, memory_.at(at_projections_), {channels, width},
                                    {1, channels}, call_.scalar());
      return multiply_fp32(normalised, turned, call_.precision);
    }
    const Tensor out = matrix(memory_.at(at_projected_), normalised.size(0), width);
    const Tensor bias =
        view_of(call_.msa, memory_.at(at_projection_bias_), {width}, {1}, call_.scalar());
    if (fills_products()) call_operator("aten::zero_", out);
    call_overload("aten::linear", "out", normalised, projections, MaybeTensor(bias), out);
    return out;
  }

  void through_norm(const Sizes& part, const Msa& source, const Tensor& grad,
                    std::int64_t first_row) {
    NormBackwardProblem p;
    p.sizes = part;
    p.eps = call_.eps;
    p.source = source;
    p.weight = call_.weights.norm_weight;
    p.grad = grad.const_data_ptr();
    p.grad_type = call_.type();
    if (needs_[kMsa]) {
      p.out = further(grads_[kMsa]->mutable_data_ptr(), source.type,
                      first_row * sizes_.n * sizes_.channels);
    }
    if (needs_norm()) p.statistics = memory_.at<float>(at_statistics_);
    norm_backward_sm80(p, stream_);
    if (needs_norm()) {
      sum_columns(norm_sums_, part, p.grad, sizes_.channels, source, p.statistics);
    }
  }

  float* d_bias(std::int64_t group) const {
    return memory_.at<float>(at_d_bias_) + group * sizes_.heads * sizes_.n * sizes_.n;
  }

  // From the bias's gradient to the pair tensor: some of its rows at a time.
  void walk_pairs() {
    if (sizes_.pair_channels == 0) return;
    const std::int64_t channels = sizes_.pair_channels, heads = sizes_.heads;
    const Tensor weight = matrix(memory_.at(at_pair_weight_), heads, channels);
    call_operator("aten::copy_", weight,
                  view_of(call_.msa, const_cast<void*>(call_.bias.weight.data), {heads, channels},
                          {channels, 1}, scalar_type_of(call_.bias.weight.type)),
                  false);
    const Shared shared(call_);
    const float* maps = add_shared(shared);
    const std::int64_t of_pair = sizes_.n * sizes_.n;
    for (std::int64_t own = 0; own < shared.count; ++own) {
      for (std::int64_t row = 0; row < sizes_.n; row += pair_rows()) {
        const std::int64_t rows = std::min(pair_rows(), sizes_.n - row);
        void* to = nullptr;
        if (needs_[kPair]) {
          to = further(grads_[kPair]->mutable_data_ptr(), call_.pairs.type,
                       (own * of_pair + row * sizes_.n) * channels);
        }
        through_bias(weight, maps + own * heads * of_pair, shared.group_of(own), row, rows, to);
      }
    }
  }

  // The bias's gradient of each pair tensor: where groups share one, the sum of theirs.
  const float* add_shared(const Shared& shared) {
    float* maps = d_bias(0);
    std::int64_t outer = 1, inner = sizes_.groups * sizes_.heads * sizes_.n * sizes_.n;
    for (std::size_t axis = 0; axis < shared.sizes.size(); ++axis) {
      const std::int64_t size = shared.sizes[axis];
      inner /= size;
      if (shared.own[axis] == size) {
        outer *= size;
        continue;
      }
      shared_maps_.push_back(empty(call_.msa, {outer, inner}, ScalarType::Float));
      float* to = shared_maps_.back().mutable_data_ptr<float>();
      for (std::int64_t i = 0; i < outer; ++i) {
        FinishProblem p;
        p.count = 1;
        p.summands[0] = {maps + i * size * inner,          size, inner, inner, 1, 1,
                         {to + i * inner, DType::kFloat32}};
        finish_sm80(p, stream_);
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
    const Tensor& like = call_.msa;
    const bool has_norm = call_.bias.norm_weight.data != nullptr;
    Sizes part;
    part.groups = 1;
    part.rows = rows;
    part.n = n;
    part.channels = sizes_.pair_channels;
    Msa source;
    source.type = call_.pairs.type;
    source.data = further(call_.pairs.data, source.type,
                          group * call_.pairs.group_stride + row * call_.pairs.i_stride);
    source.group_stride = 0;
    source.row_stride = call_.pairs.i_stride;
    source.position_stride = call_.pairs.j_stride;

    // (heads, rows, N) of the type of the products.
    Tensor maps = view_of(like, const_cast<float*>(maps_of_pair) + row * n, {heads, rows, n},
                          {n * n, n, 1}, ScalarType::Float);
    std::int64_t map = n * n;
    if (!call_.is_fp32()) {
      const Tensor rounded =
          view_of(like, memory_.at(at_maps_), {heads, rows, n}, {count, n, 1}, call_.scalar());
      call_operator("aten::copy_", rounded, maps, false);
      maps = rounded;
      map = count;
    }
    void* map_data = maps.mutable_data_ptr();
    if (needs_[kPairBiasWeight]) {
      void* input = memory_.at(at_pair_input_);
      const bool plain = source.type == call_.type() && source.position_stride == channels &&
                         source.row_stride == n * channels;
      if (!has_norm && plain) {
        input = const_cast<void*>(source.data);
      } else if (has_norm) {
        PrepareProblem prepare;
        prepare.sizes = part;
        prepare.mode = call_.mode();
        prepare.eps = call_.eps;
        prepare.msa = source;
        prepare.norm_weight = call_.bias.norm_weight;
        prepare.norm_bias = call_.bias.norm_bias;
        prepare.normalised = input;
        prepare_sm80(prepare, stream_);
      } else {
        call_operator(
            "aten::copy_",
            view_of(like, input, {rows, n, channels}, {n * channels, channels, 1}, call_.scalar()),
            view_of(like, const_cast<void*>(source.data), {rows, n, channels},
                    {source.row_stride, source.position_stride, 1}, scalar_type_of(source.type)),
            false);
      }
      add_pair_products(map_data, map, input, rows);
    }
    if (!to && !needs_pair_norm()) return;
    const Tensor turned = view_of(like, map_data, {count, heads}, {1, map}, call_.scalar());
    const bool direct = !has_norm && !call_.is_fp32() && source.type == call_.type();
    const Tensor d_input = multiply(turned, weight, direct ? to : memory_.at(at_d_pair_input_));
    if (direct) return;
    if (!has_norm) {
      call_operator(
          "aten::copy_",
          view_of(like, to, {count, channels}, {channels, 1}, scalar_type_of(source.type)), d_input,
          false);
      return;
    }
    NormBackwardProblem p;
    p.sizes = part;
    p.eps = call_.eps;
    p.source = source;
    p.weight = call_.bias.norm_weight;
    p.grad = d_input.const_data_ptr();
    p.grad_type = call_.type();
    p.out = to;
    if (needs_pair_norm()) {
      p.statistics = memory_.at<float>(at_pair_statistics_);
    }
    norm_backward_sm80(p, stream_);
    if (needs_pair_norm()) sum_columns(pair_sums_, part, p.grad, channels, source, p.statistics);
  }

  // A slab of the weight's gradient for each row of pairs.
  void add_pair_products(void* maps, std::int64_t map, void* input, std::int64_t rows) {
    const std::int64_t n = sizes_.n, heads = sizes_.heads, channels = sizes_.pair_channels;
    const Tensor& like = call_.msa;
    float* to = const_cast<float*>(pair_bias_.data()) + pair_slabs_ * pair_bias_.size();
    const Tensor a = view_of(like, maps, {rows, heads, n}, {n, map, 1}, call_.scalar());
    const Tensor b =
        view_of(like, input, {rows, n, channels}, {n * channels, channels, 1}, call_.scalar());
    const Tensor out = view_of(like, to, {rows, heads, channels}, {heads * channels, channels, 1},
                               ScalarType::Float);
    if (fills_products()) call_operator("aten::zero_", out);
    if (call_.is_fp32()) {
      call_overload("aten::bmm", "out", a, b, out);
    } else {
      call_overload("aten::bmm", "dtype_out", a, b, ScalarType::Float, out);
    }
    pair_slabs_ += rows;
  }

  // Each gradient of a parameter from its sums.
  void parameters() const {
    FinishProblem p;
    const auto add = [&](Input input, const float* from, std::int64_t slabs, std::int64_t stride,
                         std::int64_t chunk, std::int64_t filled) {
      if (!needs_[input]) return;
      const Tensor& grad = *grads_[input];
      Summand& s = p.summands[p.count++];
      s.from = from;
      s.slabs = slabs;
      s.slab_stride = stride;
      s.count = grad.numel();
      s.chunk = chunk;
      s.filled = filled;
      s.result = {grad.mutable_data_ptr(), dtype_of(grad.scalar_type())};
    };
    const auto add_columns = [&](Input input, const ColumnParts& from, int kind, std::int64_t chunk,
                                 std::int64_t filled) {
      add(input, from.to + kind * from.columns, from.used, from.kinds * from.columns, chunk,
          filled);
    };
    const std::int64_t channels = sizes_.channels, dim = sizes_.dim, head = sizes_.head_dim;
    const std::int64_t of_weight = sizes_.width() * channels;
    for (int i = 0; i < 4; ++i) {
      add(static_cast<Input>(kQueryWeight + i), projections_.data() + i * of_weight,
          projections_.used(), projections_.size(), dim * channels, head * channels);
    }
    add(kOutWeight, out_.data(), out_.used(), out_.size(), dim, head);
    add(kPairBiasWeight, pair_bias_.data(), pair_slabs_, pair_bias_.size(), 1, 1);
    add_columns(kGateBias, gate_sums_, 0, dim, head);
    add_columns(kNormBias, norm_sums_, 0, 1, 1);
    add_columns(kNormWeight, norm_sums_, 1, 1, 1);
    add_columns(kPairNormBias, pair_sums_, 0, 1, 1);
    add_columns(kPairNormWeight, pair_sums_, 1, 1, 1);
    add_columns(kOutBias, out_sums_, 0, 1, 1);
    finish_sm80(p, stream_);
  }

  const Call& call_;
  const Sizes& sizes_;
  const Tensor& grad_;
  const Inputs& inputs_;
  const std::vector<bool>& needs_;
  CUstream_st* stream_;
  Sizes part_;  // at most
  Workspace memory_;
  std::int64_t at_bias_, at_projections_, at_projection_bias_, at_out_weight_, at_out_bias_;
  std::int64_t at_present_, at_normalised_, at_projected_, at_d_projected_, at_d_gated_, at_gated_;
  std::int64_t at_d_attended_, at_log_sums_, at_row_dots_, at_statistics_, at_d_bias_, at_partial_;
  std::int64_t at_pair_input_, at_d_pair_input_, at_pair_statistics_, at_maps_, at_pair_weight_;
  SlabProducts projections_, out_, pair_bias_;
  std::int64_t pair_slabs_ = 0;
  std::vector<Tensor> shared_maps_;
  ColumnParts norm_sums_, gate_sums_, out_sums_, pair_sums_;
  Inputs grads_;
};

// The arguments of fused_ops::msa_row_attention_backward.
std::vector<Tensor> backward(const Tensor& grad, const Tensor& msa, const Tensor& pair,
                             const MaybeTensor& mask, const MaybeTensor& dropout_seed,
                             const Tensor& layer_norm_weight, const Tensor& layer_norm_bias,
                             const Tensor& query_weight, const Tensor& key_weight,
                             const Tensor& value_weight, const Tensor& gate_weight,
                             const MaybeTensor& gate_bias, const MaybeTensor& pair_norm_weight,
                             const MaybeTensor& pair_norm_bias, const Tensor& pair_bias_weight,
                             const Tensor& out_proj_weight, const MaybeTensor& out_proj_bias,
                             std::int64_t num_heads, double dropout, double eps,
                             std::string_view precision, std::optional<ScalarType> dtype,
                             const std::vector<bool>& needs) {
  const Inputs inputs = {msa,
                         pair,
                         layer_norm_weight,
                         layer_norm_bias,
                         query_weight,
                         key_weight,
                         value_weight,
                         gate_weight,
                         gate_bias,
                         pair_norm_weight,
                         pair_norm_bias,
                         pair_bias_weight,
                         out_proj_weight,
                         out_proj_bias};
  FO_CHECK_VALUE(needs.size() == kInputs, kOp, ": needs must have ", int{kInputs}, " entries, got ",
                 needs.size());
  for (int i = 0; i < kInputs; ++i) {
    FO_CHECK_VALUE(inputs[i] || !needs[i], kOp, ": a parameter that is None has no gradient");
  }
  const Parameters parameters{layer_norm_weight, layer_norm_bias,  query_weight,
                              key_weight,        value_weight,     gate_weight,
                              gate_bias,         pair_norm_weight, pair_norm_bias,
                              pair_bias_weight,  out_proj_weight,  out_proj_bias};
  const Call call(msa, pair, mask, parameters, num_heads, dropout, eps, precision, dtype,
                  dropout_seed, true);
  FO_CHECK_RUNTIME(call.chosen.plan.path == Path::kKernel, kOp,
                   ": the backward must be one that kernels take");
  const DeviceGuard guard(msa.get_device_index());
  Tensor kept = grad;
  if (!grad.is_contiguous() || grad.scalar_type() != call.scalar()) {
    const auto shape = grad.sizes();
    kept = empty(grad, {shape.begin(), shape.end()}, call.scalar());
    call_operator("aten::copy_", kept, grad, false);
  }
  return Backward(call, kept, inputs, needs).run();
}

}  // namespace

// Called where the planner gives the backward to kernels and there are positions.
STABLE_TORCH_LIBRARY_FRAGMENT(fused_ops, m) {
  m.def(
      "msa_row_attention_backward_cuda(Tensor grad, Tensor msa, Tensor pair, Tensor? mask, "
      "Tensor? dropout_seed, Tensor layer_norm_weight, Tensor layer_norm_bias, "
      "Tensor query_weight, Tensor key_weight, Tensor value_weight, Tensor gate_weight, "
      "Tensor? gate_bias, Tensor? pair_norm_weight, Tensor? pair_norm_bias, "
      "Tensor pair_bias_weight, Tensor out_proj_weight, Tensor? out_proj_bias, int num_heads, "
      "float dropout, float eps, str precision, ScalarType? dtype, bool[] needs) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, m) {
  m.impl("msa_row_attention_backward_cuda", TORCH_BOX(&backward));
}

}  // namespace fused_ops::msa_row_attention
