// SPDX-License-Identifier: Apache-2.0
// The backward on CUDA: the room's kernels, with matrix products between them.
//
// Some rows at a time, LayerNorm and projections are formed again, the attention too unless the
// forward has saved it, and gradients go back through the output projection, the attention,
// the projections and the LayerNorm. The bias's gradient is summed up over all rows that share it,
// and then goes back to the pair tensor. The parameters' gradients follow at the end, in one
// launch, from sums over parts of the positions. docs/ops/ has the formulae.
#include <algorithm>

#include "msa_row_attention/backward.h"
#include "msa_row_attention/backward_fp32_config.h"
#include "msa_row_attention/backward_pairs.h"
#include "msa_row_attention/config.h"

namespace fused_ops::msa_row_attention {
namespace {

// Of the forward: (positions, width), and (rows, heads, N) with the factors of fp32 behind; both or
// neither.
struct Saved {
  const MaybeTensor& gated;
  const MaybeTensor& log_sums;
};

class Backward {
 public:
  Backward(const Call& call, const Tensor& grad, const Saved& saved, const Inputs& inputs,
           const std::vector<bool>& needs)
      : c_(call, inputs, needs),
        sizes_(c_.sizes),
        grad_(grad),
        saved_(saved),
        projections_(4 * sizes_.width(), sizes_.channels),
        out_(sizes_.channels, sizes_.width()),
        pairs_(&c_) {}

  // The wanted gradients.
  std::vector<Tensor> run() {
    reserve();
    walk_rows();
    if (c_.needs_pair()) pairs_.run();
    parameters();
    return c_.grads();
  }

 private:
  bool needs_weights() const {
    return c_.needs_any({kQueryWeight, kKeyWeight, kValueWeight, kGateWeight});
  }
  bool needs_norm() const { return c_.needs_any({kNormWeight, kNormBias}); }
  bool needs_source() const { return c_.needs(kMsa) || needs_norm(); }
  bool needs_projected() const { return needs_weights() || needs_source() || c_.needs(kGateBias); }
  bool needs_attention() const {
    return needs_projected() || c_.needs_pair() || c_.needs(kOutWeight);
  }

  // All memory, in one allocation.
  void reserve() {
    const std::int64_t size = bytes_of(c_.call.type()), width = sizes_.width();
    const std::int64_t channels = sizes_.channels;
    part_ = sizes_;
    part_.groups = c_.call.chosen.groups;
    part_.rows = c_.call.chosen.rows;
    const std::int64_t positions = part_.positions();
    const std::int64_t chunks = ceil_div(sizes_.groups, part_.groups) *
                                (part_.groups > 1 ? 1 : ceil_div(sizes_.rows, part_.rows));
    Workspace& w = c_.memory;
    const auto products = [&](const SlabProducts& p, bool wanted) {
      return w.take(wanted ? chunks * p.slabs_of(positions) * p.size() * 4 : 0);
    };
    at_bias_ = w.take(bias_size(sizes_) * size);
    at_projections_ = w.take(4 * width * channels * size);
    at_projection_bias_ = w.take(4 * width * size);
    at_out_weight_ = w.take(channels * width * size);
    at_out_bias_ = w.take(channels * size);
    at_present_ = w.take(c_.call.mask.data ? part_.all_rows() * mask_words(sizes_.n) * 8 : 0);
    at_normalised_ = w.take(positions * channels * size);
    at_projected_ = w.take(c_.call.is_fp32() ? 0 : positions * 4 * width * size);
    at_d_projected_ = w.take(positions * 4 * width * size);
    at_d_gated_ = w.take(c_.call.is_fp32() ? 0 : positions * width * size);
    at_gated_ = w.take(saved_.gated ? 0 : positions * width * size);
    at_d_attended_ = w.take(positions * width * size);
    const std::int64_t queries = part_.all_rows() * sizes_.heads * sizes_.n;
    at_log_sums_ = w.take(saved_.gated ? 0 : queries * 4);
    at_factors_ = w.take(saved_.gated || !c_.call.is_fp32() ? 0 : queries * 4);
    at_row_dots_ = w.take(queries * 4);
    at_keys_ = w.take(c_.call.seed ? queries * 8 : 0);
    at_statistics_ = w.take(needs_norm() ? positions * 16 : 0);
    at_partial_ = w.take(c_.needs_pair() ? partial_size() * 4 : 0);
    const std::int64_t at_norm =
        c_.reserve_columns(&norm_sums_, channels, 2, positions, chunks, needs_norm());
    const std::int64_t at_gate =
        c_.reserve_columns(&gate_sums_, width, 1, positions, chunks, c_.needs(kGateBias));
    const std::int64_t at_out =
        c_.reserve_columns(&out_sums_, channels, 1, positions, chunks, c_.needs(kOutBias));
    const std::int64_t at_weights = products(projections_, needs_weights());
    const std::int64_t at_out_weights = products(out_, c_.needs(kOutWeight));
    w.allocate(c_.call.msa);
    norm_sums_.to = w.at<float>(at_norm);
    gate_sums_.to = w.at<float>(at_gate);
    out_sums_.to = w.at<float>(at_out);
    projections_.set(w.at<float>(at_weights));
    out_.set(w.at<float>(at_out_weights));
    pairs_.begin();
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
        const bool adds = rows < sizes_.rows, drops = c_.call.seed != nullptr;
        const auto size = c_.call.is_fp32() ? bias_fp32_partial_size : bias_partial_size;
        most = std::max(most, size(some, multiprocessors(), adds, drops));
      }
    }
    return most;
  }

  void walk_rows() {
    if (needs_attention()) {
      BiasProblem bias = c_.call.bias;
      bias.bias = c_.memory.at(at_bias_);
      bias_sm80(bias, c_.stream);
    }
    for (std::int64_t group = 0; group < sizes_.groups; group += c_.call.chosen.groups) {
      Sizes part = sizes_;
      part.groups = std::min(c_.call.chosen.groups, sizes_.groups - group);
      for (std::int64_t row = 0; row < sizes_.rows; row += c_.call.chosen.rows) {
        part.rows = std::min(c_.call.chosen.rows, sizes_.rows - row);
        walk_back(part, group, row);
      }
    }
  }

  // Rows `row` on of the groups from `group` on.
  void walk_back(const Sizes& part, std::int64_t group, std::int64_t row) {
    const std::int64_t count = part.positions(), channels = sizes_.channels;
    const std::int64_t width = sizes_.width(), line = sizes_.n * channels;
    void* grad = further(const_cast<void*>(grad_.const_data_ptr()), c_.call.type(),
                         (group * sizes_.rows + row) * line);
    if (c_.needs(kOutBias)) c_.sum_columns(out_sums_, count, grad, channels);
    if (!needs_attention()) return;

    PrepareProblem prepare = c_.call.part(part, group, row);
    prepare.normalised = c_.memory.at(at_normalised_);
    if (c_.call.mask.data) {
      prepare.present = c_.memory.at<std::uint64_t>(at_present_);
    }
    if (group == 0 && row == 0) {  // once is enough
      prepare.projections = c_.memory.at(at_projections_);
      prepare.projection_bias = c_.memory.at(at_projection_bias_);
      prepare.out_weight = c_.memory.at(at_out_weight_);
      prepare.out_bias = c_.memory.at(at_out_bias_);
    }
    prepare_sm80(prepare, c_.stream);
    const Tensor normalised = c_.matrix(prepare.normalised, count, channels);
    const Tensor projections = c_.matrix(c_.memory.at(at_projections_), 4 * width, channels);
    const Tensor out_weight = c_.matrix(c_.memory.at(at_out_weight_), channels, width);

    BackwardProblem p;
    p.sizes = part;
    p.mode = c_.call.mode();
    p.bias = c_.memory.at(at_bias_ +
                          group * (bias_size(sizes_) / sizes_.groups) * bytes_of(c_.call.type()));
    p.present = prepare.present;
    const Tensor projected = project(normalised, projections);
    p.projected = projected.const_data_ptr();
    if (c_.call.is_fp32()) p.projection_bias = c_.memory.at<float>(at_projection_bias_);
    const Tensor d_gated =
        c_.multiply(c_.matrix(grad, count, channels), out_weight, c_.memory.at(at_d_gated_));
    p.d_gated = d_gated.const_data_ptr();
    p.dropout = c_.call.draw(part, group * sizes_.rows + row, c_.memory.at<std::uint64_t>(at_keys_),
                             c_.stream);
    void* gated = attend(&p, group * sizes_.rows + row);
    if (c_.needs(kOutWeight)) c_.add_product(out_, grad, gated, count);
    if (!needs_projected() && !c_.needs_pair()) return;
    p.d_projected = c_.memory.at(at_d_projected_);
    p.d_attended = c_.memory.at(at_d_attended_);
    p.row_dots = c_.memory.at<float>(at_row_dots_);
    backward_gate_sm80(p, c_.stream);
    if (c_.needs_pair()) {
      p.partial = c_.memory.at<float>(at_partial_);
      p.d_bias = pairs_.d_bias() + group * sizes_.heads * sizes_.n * sizes_.n;
      p.accumulate = row > 0;
      run(p, backward_bias_sm80, backward_bias_dropout_sm80, backward_bias_fp32_sm80,
          backward_bias_fp32_dropout_sm80);
    }
    if (!needs_projected()) return;
    if (needs_weights() || needs_source()) {
      run(p, backward_keys_sm80, backward_keys_dropout_sm80, backward_keys_fp32_sm80,
          backward_keys_fp32_dropout_sm80);
      run(p, backward_queries_sm80, backward_queries_dropout_sm80, backward_queries_fp32_sm80,
          backward_queries_fp32_dropout_sm80);
    }
    if (c_.needs(kGateBias)) {
      c_.sum_columns(gate_sums_, count, further(p.d_projected, c_.call.type(), 3 * width),
                     4 * width);
    }
    if (needs_weights()) c_.add_product(projections_, p.d_projected, prepare.normalised, count);
    if (needs_source()) {
      // In the place of the normalised numbers, which nothing needs any more.
      const Tensor d_normalised = c_.multiply(c_.matrix(p.d_projected, count, 4 * width),
                                              projections, c_.memory.at(at_normalised_));
      through_norm(part, prepare.msa, d_normalised, group * sizes_.rows + row);
    }
  }

  // One of a kernel's launchers: of 16 bits without dropout and with it, of fp32 likewise.
  using Launcher = void(const BackwardProblem&, CUstream_st*);
  void run(const BackwardProblem& p, Launcher* plain, Launcher* dropout, Launcher* plain_fp32,
           Launcher* dropout_fp32) const {
    const bool drops = c_.call.seed != nullptr;
    (c_.call.is_fp32() ? drops ? dropout_fp32 : plain_fp32 : drops ? dropout : plain)(p, c_.stream);
  }

  // What the forward has stored of these rows, or would have.
  void* attend(BackwardProblem* p, std::int64_t first_row) const {
    if (saved_.gated) {
      void* gated = further(saved_.gated->mutable_data_ptr(), c_.call.type(),
                            first_row * sizes_.n * sizes_.width());
      p->gated = gated;
      p->log_sums = saved_.log_sums->const_data_ptr<float>() + first_row * sizes_.heads * sizes_.n;
      if (c_.call.is_fp32()) p->factors = p->log_sums + saved_.log_sums->numel() / 2;
      return gated;
    }
    AttendProblem a;
    a.sizes = p->sizes;
    a.mode = p->mode;
    a.projected = p->projected;
    a.projection_bias = p->projection_bias;
    a.bias = p->bias;
    a.present = p->present;
    a.dropout = p->dropout;
    a.out = c_.memory.at(at_gated_);
    a.log_sums = c_.memory.at<float>(at_log_sums_);
    if (c_.call.is_fp32()) a.factors = c_.memory.at<float>(at_factors_);
    c_.call.attend(a, c_.stream);
    p->gated = a.out;
    p->log_sums = a.log_sums;
    p->factors = a.factors;
    return a.out;
  }

  Tensor project(const Tensor& normalised, const Tensor& projections) const {
    const std::int64_t width = 4 * sizes_.width(), channels = sizes_.channels;
    if (c_.call.is_fp32()) {
      const Tensor turned = view_of(c_.call.msa, c_.memory.at(at_projections_), {channels, width},
                                    {1, channels}, c_.call.scalar());
      return multiply_fp32(normalised, turned, c_.call.precision);
    }
    const Tensor out = c_.matrix(c_.memory.at(at_projected_), normalised.size(0), width);
    const Tensor bias =
        view_of(c_.call.msa, c_.memory.at(at_projection_bias_), {width}, {1}, c_.call.scalar());
    if (fills_products()) call_operator("aten::zero_", out);
    call_overload("aten::linear", "out", normalised, projections, MaybeTensor(bias), out);
    return out;
  }

  void through_norm(const Sizes& part, const Msa& source, const Tensor& grad,
                    std::int64_t first_row) {
    NormBackwardProblem p;
    p.channels = part.channels;
    p.eps = c_.call.eps;
    p.source = rows_of(part, source);
    p.weight = c_.call.weights.norm_weight;
    p.grad = grad.const_data_ptr();
    p.grad_type = c_.call.type();
    if (c_.needs(kMsa)) {
      p.out = further(c_.grad(kMsa).mutable_data_ptr(), source.type,
                      first_row * sizes_.n * sizes_.channels);
    }
    if (needs_norm()) {
      p.statistics = c_.memory.at<float>(at_statistics_);
      p.parts = norm_sums_.parts;
      p.sums = norm_sums_.next();
    }
    norm_backward_sm80(p, c_.stream);
  }

  // Each gradient of a parameter from its sums.
  void parameters() const {
    FinishProblem p;
    const std::int64_t channels = sizes_.channels, dim = sizes_.dim, head = sizes_.head_dim;
    const std::int64_t of_weight = sizes_.width() * channels;
    for (int i = 0; i < 4; ++i) {
      c_.add(&p, static_cast<Input>(kQueryWeight + i), projections_.data() + i * of_weight,
             projections_.used(), projections_.size(), dim * channels, head * channels);
    }
    c_.add(&p, kOutWeight, out_.data(), out_.used(), out_.size(), dim, head);
    c_.add_columns(&p, kGateBias, gate_sums_, 0, dim, head);
    c_.add_columns(&p, kNormBias, norm_sums_, 0, 1, 1);
    c_.add_columns(&p, kNormWeight, norm_sums_, 1, 1, 1);
    c_.add_columns(&p, kOutBias, out_sums_, 0, 1, 1);
    pairs_.finish(&p);
    finish_sm80(p, c_.stream);
  }

  BackwardCall c_;
  const Sizes& sizes_;
  const Tensor& grad_;
  const Saved& saved_;
  Sizes part_;  // at most
  std::int64_t at_bias_, at_projections_, at_projection_bias_, at_out_weight_, at_out_bias_;
  std::int64_t at_present_, at_normalised_, at_projected_, at_d_projected_, at_d_gated_, at_gated_;
  std::int64_t at_d_attended_, at_log_sums_, at_factors_, at_row_dots_, at_statistics_, at_partial_;
  std::int64_t at_keys_;
  SlabProducts projections_, out_;
  ColumnParts norm_sums_, gate_sums_, out_sums_;
  PairBackward pairs_;
};

// The arguments of fused_ops::msa_row_attention_backward.
std::vector<Tensor> backward(const Tensor& grad, const MaybeTensor& gated,
                             const MaybeTensor& log_sums, const Tensor& msa, const Tensor& pair,
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
  const Sizes& sizes = call.sizes();
  const auto is_of_call = [&](const std::optional<Tensor>& saved, ScalarType type, auto count) {
    return !saved ||
           (saved->numel() == count && saved->scalar_type() == type && saved->is_contiguous() &&
            saved->get_device_index() == msa.get_device_index());
  };
  const auto queries = sizes.positions() * sizes.heads;
  FO_CHECK_RUNTIME(gated.has_value() == log_sums.has_value() &&
                       is_of_call(gated, call.scalar(), sizes.positions() * sizes.width()) &&
                       is_of_call(log_sums, ScalarType::Float, queries * (call.is_fp32() ? 2 : 1)),
                   kOp, ": what was saved must be of this call");
  return Backward(call, kept, {gated, log_sums}, inputs, needs).run();
}

}  // namespace

// Called where the planner gives the backward to kernels and there are positions.
STABLE_TORCH_LIBRARY_FRAGMENT(fused_ops, m) {
  m.def(
      "msa_row_attention_backward_cuda(Tensor grad, Tensor? gated, Tensor? log_sums, Tensor msa, "
      "Tensor pair, Tensor? mask, "
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
