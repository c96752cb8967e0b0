// SPDX-License-Identifier: Apache-2.0
// The backward on CUDA: the room's kernels, with matrix products between them.
//
// From the result back through the output projection to what was gathered; then, for some queries
// at a time, logits again, dS, and sums over queries and keys; then to the projected nodes and the
// frames, through the projections, and through the LayerNorm. The parameters' gradients follow at
// the end, from sums over parts of the nodes. docs/ops/ has the formulae.
#include "invariant_point_attention/backward_call.h"

namespace fused_ops::invariant_point_attention {
namespace {

class Backward {
 public:
  Backward(const Call& call, const Tensor& grad, const MaybeTensor& saved,
           const MaybeTensor& projected, const std::vector<bool>& needs)
      : call_(call),
        sizes_(call.sizes()),
        grad_(grad),
        projected_(projected),
        of_(call, needs),
        g_(call.inputs.node, call.type(), call.settings.precision, of_.inputs, needs),
        stream_(g_.stream),
        saved_(call),
        stages_(call, g_.memory, true),
        weight_sums_(sizes_.projected(), sizes_.channels),
        out_sums_(sizes_.channels, sizes_.features()),
        pair_grad_(call, call.inputs.pair, wanted(kPair)),
        value_grad_(call, call.inputs.pair_value ? *call.inputs.pair_value : call.inputs.pair,
                    wanted(kPairValue)) {
    if (saved) saved_.set(saved->mutable_data_ptr());
  }

  // The wanted gradients.
  std::vector<Tensor> run() {
    reserve();
    if (g_.needs(kOutBias)) {
      g_.sum_columns(out_bias_sums_, sizes_.nodes(), grad_.const_data_ptr(), sizes_.channels);
    }
    if (needs_attention() || g_.needs(kOutWeight)) walk();
    parameters();
    pair_grad_.finish();
    value_grad_.finish();
    return g_.grads();
  }

 private:
  MaybeTensor wanted(Input input) const {
    return g_.needs(input) ? MaybeTensor(g_.grad(input)) : MaybeTensor();
  }
  bool needs_weights() const {
    return g_.needs_any(
        {kQWeight, kKWeight, kVWeight, kQPointsWeight, kKPointsWeight, kVPointsWeight});
  }
  bool needs_biases() const {
    return g_.needs_any({kQBias, kKBias, kVBias, kQPointsBias, kKPointsBias, kVPointsBias});
  }
  bool needs_norm() const { return g_.needs_any({kNormWeight, kNormBias}); }
  bool needs_source() const { return g_.needs(kNode) || needs_norm(); }
  bool needs_projected() const {
    return needs_weights() || needs_biases() || needs_source() ||
           g_.needs_any({kTranslations, kRotations});
  }
  bool needs_bias() const { return g_.needs_any({kPairBiasWeight, kPairBiasBias}); }
  bool needs_scores() const {
    return needs_projected() || needs_bias() || g_.needs_any({kPair, kPairValue, kHeadWeights});
  }
  bool needs_attention() const { return needs_scores(); }

  void reserve() {
    const Mode mode = call_.mode();
    const std::int64_t size = bytes_of(call_.type()), nodes = sizes_.nodes();
    const std::int64_t lines = nodes * sizes_.heads;
    const Parts& parts = call_.chosen.parts;
    const std::int64_t pairs = parts.batch * sizes_.heads * parts.rows * pair_line(sizes_.n);
    Workspace& w = g_.memory;
    stages_.reserve();
    const bool recomputes = !projected_;
    const std::int64_t at_saved = w.take(recomputes ? saved_.bytes() : 0);
    d_features_ = w.take(call_.is_fp32() ? 0 : nodes * sizes_.features() * size);
    d_gathered_ = w.take(lines * value_line(sizes_, mode) * size);
    row_dots_ = w.take(lines * 4);
    pair_dots_ = w.take(sizes_.value_channels > 0 ? pairs * 4 : 0);
    d_logits_ = w.take(pairs * size);
    d_keys_ = w.take(lines * moment_line(sizes_, mode) * 4);
    d_values_ = w.take(lines * d_value_line(sizes_) * 4);
    d_queries_ = w.take(lines * moment_line(sizes_, mode) * 4);
    unused_ = w.take(call_.is_fp32() ? parts.batch * sizes_.n * sizes_.heads *
                                           (moment_line(sizes_, mode) + d_value_line(sizes_)) * 4
                                     : 0);
    d_projected_ = w.take(nodes * sizes_.projected() * size);
    d_normalised_ = w.take(call_.is_fp32() ? 0 : nodes * sizes_.channels * size);
    pair_parts_ = needs_bias() ? pair_sum_parts(sizes_, call_.mode()) : 0;
    pair_sums_ = w.take(std::int64_t{pair_parts_} * sizes_.heads * (sizes_.pair_channels + 1) * 4);
    distance_parts_ = g_.needs(kHeadWeights) ? distance_sum_parts(sizes_) : 0;
    distance_sums_ = w.take(std::int64_t{distance_parts_} * sizes_.heads * 4);
    statistics_ = w.take(needs_norm() ? nodes * 16 : 0);
    const auto columns = [&](ColumnParts* sums, int count, int kinds, bool wanted) {
      return g_.reserve_columns(sums, count, kinds, nodes, 1, wanted);
    };
    const std::int64_t at_norm = columns(&norm_sums_, sizes_.channels, 2, needs_norm());
    const std::int64_t at_biases = columns(&bias_sums_, sizes_.projected(), 1, needs_biases());
    const std::int64_t at_out = columns(&out_bias_sums_, sizes_.channels, 1, g_.needs(kOutBias));
    const auto products = [&](const SlabProducts& sums, bool wanted) {
      return w.take(wanted ? sums.slabs_of(nodes) * sums.size() * 4 : 0);
    };
    const std::int64_t at_weights = products(weight_sums_, needs_weights());
    const std::int64_t at_out_weights = products(out_sums_, g_.needs(kOutWeight));
    w.allocate(call_.inputs.node);
    if (recomputes) saved_.set(w.at(at_saved));
    norm_sums_.to = w.at<float>(at_norm);
    bias_sums_.to = w.at<float>(at_biases);
    out_bias_sums_.to = w.at<float>(at_out);
    weight_sums_.set(w.at<float>(at_weights));
    out_sums_.set(w.at<float>(at_out_weights));
  }

  void walk() {
    const bool recomputes = !projected_;
    stages_.prepare(saved_, recomputes, stream_);
    if (recomputes) projected_ = stages_.project();
    stages_.place(*projected_, saved_, recomputes, stream_);
    if (recomputes) {
      stages_.for_parts([&](std::int64_t batch, const Sizes& part, const Block& block) {
        stages_.logits(batch, part, block, *projected_, saved_, stream_);
        stages_.gather(batch, part, block, saved_, true, stream_);
      });
    }
    const std::int64_t nodes = sizes_.nodes();
    void* grad = const_cast<void*>(grad_.const_data_ptr());
    if (g_.needs(kOutWeight)) g_.add_product(out_sums_, grad, saved_.features(), nodes);
    if (!needs_attention()) return;
    const Tensor d_features =
        g_.multiply(call_.matrix(grad, nodes, sizes_.channels),
                    call_.matrix(stages_.out_weight(), sizes_.channels, sizes_.features()),
                    g_.memory.at(d_features_));
    output(d_features);
    stages_.for_parts([&](std::int64_t batch, const Sizes& part, const Block& block) {
      scores(batch, part, block, d_features);
    });
    if (needs_projected()) inputs(d_features);
  }

  void output(const Tensor& d_features) const {
    OutputBackwardProblem p;
    p.sizes = sizes_;
    p.mode = call_.mode();
    p.frames = call_.prepare.frames;
    p.centres = saved_.centres();
    p.norm_eps = call_.norm_eps;
    p.features = saved_.features();
    p.d_features = d_features.const_data_ptr();
    p.gathered = saved_.gathered();
    p.d_gathered = g_.memory.at(d_gathered_);
    p.row_dots = g_.memory.at<float>(row_dots_);
    output_backward_sm80(p, stream_);
  }

  // From dS of some queries.
  void scores(std::int64_t batch, const Sizes& part, const Block& block, const Tensor& d_features) {
    const Mode mode = call_.mode();
    const DType type = call_.type();
    const bool fp32 = call_.is_fp32();
    const std::int64_t lines = batch * part.heads * part.n;
    stages_.logits(batch, part, block, *projected_, saved_, stream_);
    const void* features =
        further(d_features.const_data_ptr(), type, batch * part.n * part.features());
    if (part.value_channels > 0) {
      PairDotsProblem p;
      p.sizes = part;
      p.mode = mode;
      p.block = block;
      p.pair = Stages::pairs_from(call_.pair_value, batch);
      p.d_features = features;
      p.pair_dots = g_.memory.at<float>(pair_dots_);
      (fp32 ? pair_dots_fp32_sm80 : pair_dots_sm80)(p, stream_);
    }
    ScoresBackwardProblem p;
    p.sizes = part;
    p.mode = mode;
    p.block = block;
    p.logits = stages_.logits();
    p.log_sums = saved_.log_sums() + lines;
    p.row_dots = g_.memory.at<float>(row_dots_) + lines;
    if (part.value_channels > 0) p.pair_dots = g_.memory.at<float>(pair_dots_);
    p.values = further(stages_.values(), type, lines * value_line(part, mode));
    p.d_gathered = further(g_.memory.at<void>(d_gathered_), type, lines * value_line(part, mode));
    p.q_moments = further(stages_.q_moments(), type, lines * moment_line(part, mode));
    p.k_moments = further(stages_.k_moments(), type, lines * moment_line(part, mode));
    p.accumulate = block.first_row > 0;
    p.d_logits = g_.memory.at(d_logits_);
    p.d_keys = g_.memory.at<float>(d_keys_) + lines * moment_line(part, mode);
    p.d_values = g_.memory.at<float>(d_values_) + lines * d_value_line(part);
    p.d_queries = g_.memory.at<float>(d_queries_) + lines * moment_line(part, mode);
    if (fp32) settle(p);
    (fp32 ? keys_backward_fp32_sm80 : keys_backward_sm80)(p, stream_);
    if (needs_projected()) (fp32 ? queries_backward_fp32_sm80 : queries_backward_sm80)(p, stream_);
    if (g_.needs(kHeadWeights)) distances(part, block, lines);
    pairs(batch, part, block, features);
  }

  // Row dots that make the sums over keys of dS zero. The other results of this go nowhere.
  void settle(ScoresBackwardProblem p) {
    p.accumulate = false;
    p.d_keys = g_.memory.at<float>(unused_);
    p.d_values = p.d_keys + p.sizes.nodes() * p.sizes.heads * moment_line(p.sizes, p.mode);
    keys_backward_fp32_sm80(p, stream_);
    SettleDotsProblem settled;
    settled.sizes = p.sizes;
    settled.block = p.block;
    settled.d_logits = static_cast<const float*>(p.d_logits);
    settled.row_dots = const_cast<float*>(p.row_dots);
    settle_dots_sm80(settled, stream_);
  }

  void distances(const Sizes& part, const Block& block, std::int64_t lines) {
    DistancesBackwardProblem p;
    p.sizes = part;
    p.mode = call_.mode();
    p.block = block;
    p.d_logits = g_.memory.at(d_logits_);
    p.q_points = stages_.q_points() + lines * point_line(part);
    p.k_points = stages_.k_points() + lines * point_line(part);
    p.head_weights = call_.head_weights;
    p.point_scale = call_.point_scale;
    p.sums = g_.memory.at<float>(distance_sums_);
    p.parts = distance_parts_;
    p.add_sums = distances_begun_;
    distances_begun_ = true;
    distances_backward_sm80(p, stream_);
  }

  // To the pair tensor, through the bias and through the pair values, which may come from the same.
  void pairs(std::int64_t batch, const Sizes& part, const Block& block, const void* d_features) {
    const bool same = call_.settings.gathers_pair;
    PairBackwardProblem p;
    p.sizes = part;
    p.mode = call_.mode();
    p.block = block;
    p.channels = part.pair_channels;
    p.d_logits = g_.memory.at(d_logits_);
    p.weight = call_.bias.weight;
    p.bias_scale = call_.bias_scale;
    if (same) from_values(&p, batch, part, d_features);
    if (needs_bias()) {
      p.pair = Stages::pairs_from(call_.pair, batch);
      p.sums = g_.memory.at<float>(pair_sums_);
      p.parts = pair_parts_;
    }
    if (needs_bias() || pair_grad_.wanted()) launch_pairs(&p, pair_grad_, batch, &pairs_begun_);
    if (!value_grad_.wanted()) return;
    PairBackwardProblem values;
    values.sizes = part;
    values.mode = call_.mode();
    values.block = block;
    values.channels = part.value_channels;
    from_values(&values, batch, part, d_features);
    launch_pairs(&values, value_grad_, batch, nullptr);
  }

  void from_values(PairBackwardProblem* p, std::int64_t batch, const Sizes& part,
                   const void* d_features) const {
    p->logits = stages_.logits();
    p->log_sums = saved_.log_sums() + batch * part.heads * part.n;
    p->d_features = d_features;
  }

  void launch_pairs(PairBackwardProblem* p, PairGradient& grad, std::int64_t batch, bool* begun) {
    const auto launch = call_.is_fp32() ? pair_backward_fp32_sm80 : pair_backward_sm80;
    const auto start = [&] {
      p->add_sums = begun && *begun;
      if (begun) *begun = true;
      launch(*p, stream_);
    };
    p->grad_type = grad.type();
    if (!grad.wanted() || !grad.is_shared()) {
      if (grad.wanted()) p->grad = grad.data(batch);
      return start();
    }
    // One batch element after the other.
    const Sizes all = p->sizes;
    const PairBackwardProblem first = *p;
    const std::int64_t lines = all.heads * p->block.rows * pair_line(all.n);
    for (std::int64_t b = 0; b < all.batch; ++b) {
      p->sizes.batch = 1;
      p->grad = grad.data(batch + b);
      p->accumulate = grad.accumulates(batch + b, p->block.first_row);
      if (first.d_logits) p->d_logits = further(first.d_logits, call_.type(), b * lines);
      if (first.d_features) {
        p->logits = first.logits + b * lines;
        p->log_sums = first.log_sums + b * all.heads * all.n;
        p->d_features = further(first.d_features, call_.type(), b * all.n * all.features());
      }
      if (first.sums) p->pair = Stages::pairs_from(first.pair, b);
      start();
    }
  }

  // To the frames, the projections and the nodes.
  void inputs(const Tensor& d_features) {
    FramesBackwardProblem p;
    p.sizes = sizes_;
    p.mode = call_.mode();
    p.frames = call_.prepare.frames;
    p.scalar_scale = call_.scalar_scale;
    p.point_scale = call_.point_scale;
    p.head_weights = call_.head_weights;
    p.norm_eps = call_.norm_eps;
    p.projected = projected_->const_data_ptr();
    p.q_points = stages_.q_points();
    p.k_points = stages_.k_points();
    p.features = saved_.features();
    p.d_features = d_features.const_data_ptr();
    p.gathered = saved_.gathered();
    p.centres = saved_.centres();
    p.d_queries = g_.memory.at<float>(d_queries_);
    p.d_keys = g_.memory.at<float>(d_keys_);
    p.d_values = g_.memory.at<float>(d_values_);
    p.d_projected = g_.memory.at(d_projected_);
    if (g_.needs(kTranslations)) {
      p.d_translations = static_cast<float*>(g_.grad(kTranslations).mutable_data_ptr());
    }
    if (g_.needs(kRotations)) {
      p.d_rotations = static_cast<float*>(g_.grad(kRotations).mutable_data_ptr());
    }
    frames_backward_sm80(p, stream_);
    const std::int64_t nodes = sizes_.nodes();
    void* d_projected = g_.memory.at(d_projected_);
    if (needs_biases()) g_.sum_columns(bias_sums_, nodes, d_projected, sizes_.projected());
    if (needs_weights()) {
      g_.add_product(weight_sums_, d_projected, stages_.normalised().mutable_data_ptr(), nodes);
    }
    if (!needs_source()) return;
    const Tensor d_normalised =
        g_.multiply(call_.matrix(d_projected, nodes, sizes_.projected()),
                    call_.matrix(stages_.projections(), sizes_.projected(), sizes_.channels),
                    g_.memory.at(d_normalised_));
    if (!call_.inputs.layer_norm_weight) {
      const Tensor& to = g_.grad(kNode);
      call_operator("aten::copy_",
                    view_of(to, to.mutable_data_ptr(), {nodes, sizes_.channels},
                            {sizes_.channels, 1}, to.scalar_type()),
                    d_normalised, false);
      return;
    }
    NormBackwardProblem norm;
    const Nodes& node = call_.prepare.node;
    norm.source.data = node.data;
    norm.source.type = node.type;
    norm.source.axes[0] = {sizes_.n, node.stride};
    norm.source.axes[1] = {sizes_.batch, node.batch_stride};
    norm.channels = sizes_.channels;
    norm.eps = call_.prepare.eps;
    norm.weight = call_.prepare.norm_weight;
    norm.grad = d_normalised.const_data_ptr();
    norm.grad_type = call_.type();
    if (g_.needs(kNode)) norm.out = g_.grad(kNode).mutable_data_ptr();
    if (needs_norm()) {
      norm.statistics = g_.memory.at<float>(statistics_);
      norm.parts = norm_sums_.parts;
      norm.sums = norm_sums_.next();
    }
    norm_backward_sm80(norm, stream_);
  }

  // Each gradient of a parameter from its sums.
  void parameters() const {
    FinishProblem p;
    const std::int64_t c = sizes_.channels, dim = sizes_.dim, head = sizes_.head_dim;
    const std::int64_t columns = sizes_.projected();
    const std::int64_t ats[] = {0,
                                sizes_.width(),
                                2 * sizes_.width(),
                                sizes_.query_points_at(),
                                sizes_.key_points_at(),
                                sizes_.value_points_at()};
    for (int i = 0; i < 6; ++i) {
      const bool points = i >= 3;
      g_.add(&p, static_cast<Input>(kQWeight + 2 * i), weight_sums_.data() + ats[i] * c,
             weight_sums_.used(), weight_sums_.size(), points ? c : dim * c, points ? c : head * c);
      g_.add(&p, static_cast<Input>(kQBias + 2 * i), bias_sums_.to + ats[i], bias_sums_.used,
             columns, points ? 1 : dim, points ? 1 : head);
    }
    g_.add(&p, kOutWeight, out_sums_.data(), out_sums_.used(), out_sums_.size(), sizes_.features(),
           sizes_.features_filled());
    g_.add(&p, kOutBias, out_bias_sums_.to, out_bias_sums_.used, c, 1, 1);
    g_.add(&p, kNormBias, norm_sums_.to, norm_sums_.used, 2 * c, 1, 1);
    g_.add(&p, kNormWeight, norm_sums_.to + c, norm_sums_.used, 2 * c, 1, 1);
    const std::int64_t line = sizes_.pair_channels + 1;
    const float* pair_sums = g_.memory.at<float>(pair_sums_);
    g_.add(&p, kPairBiasWeight, pair_sums, pair_parts_, sizes_.heads * line, line,
           sizes_.pair_channels, call_.bias_scale);
    g_.add(&p, kPairBiasBias, pair_sums + sizes_.pair_channels, pair_parts_, sizes_.heads * line,
           line, 1, call_.bias_scale);
    g_.add(&p, kHeadWeights, g_.memory.at<float>(distance_sums_), distance_parts_, sizes_.heads, 1,
           1);
    if (p.count > 0) finish_sm80(p, stream_);
  }

  const Call& call_;
  const Sizes& sizes_;
  const Tensor& grad_;
  MaybeTensor projected_;
  const Differentiable of_;
  Gradients g_;
  CUstream_st* const stream_;
  Saved saved_;
  Stages stages_;
  SlabProducts weight_sums_, out_sums_;
  ColumnParts norm_sums_, bias_sums_, out_bias_sums_;
  PairGradient pair_grad_, value_grad_;
  std::int64_t d_features_, d_gathered_, row_dots_, pair_dots_, d_logits_, d_keys_, d_values_;
  std::int64_t unused_, d_queries_, d_projected_, d_normalised_, pair_sums_, distance_sums_,
      statistics_;
  int pair_parts_ = 0, distance_parts_ = 0;
  bool pairs_begun_ = false, distances_begun_ = false;
};

std::vector<Tensor> backward(
    const Tensor& grad, const MaybeTensor& saved, const MaybeTensor& projected, const Tensor& node,
    const Tensor& pair, const Tensor& translations, const Tensor& rotations,
    const MaybeTensor& node_mask, const MaybeTensor& pair_value,
    const MaybeTensor& layer_norm_weight, const MaybeTensor& layer_norm_bias,
    const Tensor& q_proj_weight, const MaybeTensor& q_proj_bias, const Tensor& k_proj_weight,
    const MaybeTensor& k_proj_bias, const Tensor& v_proj_weight, const MaybeTensor& v_proj_bias,
    const Tensor& q_pts_weight, const MaybeTensor& q_pts_bias, const Tensor& k_pts_weight,
    const MaybeTensor& k_pts_bias, const Tensor& v_pts_weight, const MaybeTensor& v_pts_bias,
    const Tensor& pair_bias_weight, const MaybeTensor& pair_bias_bias, const Tensor& head_weights,
    const Tensor& out_proj_weight, const MaybeTensor& out_proj_bias, std::int64_t num_heads,
    std::int64_t num_query_points, std::int64_t num_value_points,
    std::optional<double> scalar_scale, double point_scale, double bias_scale, bool gathers_pair,
    std::optional<double> norm_eps, double eps, std::string_view precision,
    std::optional<ScalarType> dtype, const std::vector<bool>& needs) {
  const Inputs inputs{node,
                      pair,
                      translations,
                      rotations,
                      node_mask,
                      pair_value,
                      layer_norm_weight,
                      layer_norm_bias,
                      q_proj_weight,
                      q_proj_bias,
                      k_proj_weight,
                      k_proj_bias,
                      v_proj_weight,
                      v_proj_bias,
                      q_pts_weight,
                      q_pts_bias,
                      k_pts_weight,
                      k_pts_bias,
                      v_pts_weight,
                      v_pts_bias,
                      pair_bias_weight,
                      pair_bias_bias,
                      head_weights,
                      out_proj_weight,
                      out_proj_bias};
  const Settings settings{
      num_heads,  num_query_points, num_value_points, scalar_scale, point_scale,
      bias_scale, gathers_pair,     norm_eps,         eps,          std::string(precision),
      dtype};
  const Call call(inputs, settings, true);
  FO_CHECK_RUNTIME(call.chosen.plan.path == Path::kKernel, kOp,
                   ": the backward must be one that kernels take");
  const Sizes& sizes = call.sizes();
  const auto is_of_call = [&](const MaybeTensor& tensor, ScalarType type, std::int64_t count) {
    return !tensor || (tensor->numel() == count && tensor->scalar_type() == type &&
                       tensor->is_contiguous() && same_device(*tensor, node));
  };
  FO_CHECK_RUNTIME(saved.has_value() == projected.has_value() &&
                       is_of_call(saved, ScalarType::Byte, Saved(call).bytes()) &&
                       is_of_call(projected, call.scalar(), sizes.nodes() * sizes.projected()),
                   kOp, ": what was saved must be of this call");
  FO_CHECK_VALUE(grad.numel() == sizes.nodes() * sizes.channels, kOp,
                 ": grad must have the shape of node, got ", shape_text(grad.sizes()));
  const DeviceGuard guard(node.get_device_index());
  Tensor kept = grad;
  if (!grad.is_contiguous() || grad.scalar_type() != call.scalar()) {
    const auto shape = grad.sizes();
    kept = empty(grad, {shape.begin(), shape.end()}, call.scalar());
    call_operator("aten::copy_", kept, grad, false);
  }
  return Backward(call, kept, saved, projected, needs).run();
}

}  // namespace

// Called where the planner gives the backward to kernels and there are residues.
STABLE_TORCH_LIBRARY_FRAGMENT(fused_ops, m) {
  m.def(
      "invariant_point_attention_backward_cuda(Tensor grad, Tensor? saved, Tensor? "
      "projected, " FO_IPA_ARGUMENTS ", bool[] needs) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, m) {
  m.impl("invariant_point_attention_backward_cuda", TORCH_BOX(&backward));
}

}  // namespace fused_ops::invariant_point_attention
