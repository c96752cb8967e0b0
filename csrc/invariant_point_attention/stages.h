// SPDX-License-Identifier: Apache-2.0
// The steps of the forward, for the host ops of both directions.
#pragma once

#include <algorithm>

#include "invariant_point_attention/call.h"

namespace fused_ops::invariant_point_attention {

// What the forward leaves for the backward beside the projected nodes: linear in N, in one
// allocation.
class Saved {
 public:
  explicit Saved(const Call& call) {
    const Sizes& sizes = call.sizes();
    features_ = take(sizes.nodes() * sizes.features() * bytes_of(call.type()));
    log_sums_ = take(sizes.nodes() * sizes.heads * 4);
    gathered_ = take(sizes.nodes() * sizes.heads * sizes.value_numbers() * 4);
    centres_ = take(sizes.batch * static_cast<std::int64_t>(sizeof(Centre)));
    present_ = take(call.prepare.mask.data ? sizes.batch * mask_words(sizes.n) * 8 : 0);
  }

  std::int64_t bytes() const { return end_; }
  void set(void* memory) { memory_ = static_cast<unsigned char*>(memory); }

  void* features() const { return memory_ + features_; }
  float* log_sums() const { return at<float>(log_sums_); }
  float* gathered() const { return at<float>(gathered_); }
  Centre* centres() const { return at<Centre>(centres_); }
  std::uint64_t* present() const { return at<std::uint64_t>(present_); }

 private:
  template <class T>
  T* at(std::int64_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  std::int64_t take(std::int64_t bytes) {
    const std::int64_t begin = end_;
    end_ += round_up(bytes, 256);
    return begin;
  }

  std::int64_t features_, log_sums_, gathered_, centres_, present_;
  std::int64_t end_ = 0;
  unsigned char* memory_ = nullptr;
};

// The forward's own memory and steps. `reserve` is called before `memory` is allocated, all else
// after.
class Stages {
 public:
  Stages(const Call& call, Workspace& memory, bool moments)
      : call_(call), memory_(memory), moments_(moments) {}

  void reserve() {
    const Sizes& sizes = call_.sizes();
    const Mode mode = call_.mode();
    const std::int64_t size = bytes_of(call_.type()), nodes = sizes.nodes(),
                       lines = nodes * sizes.heads;
    const Parts& parts = call_.chosen.parts;
    normalised_ = memory_.take(takes_nodes() ? 0 : nodes * sizes.channels * size);
    projections_ = memory_.take(std::int64_t{sizes.projected()} * sizes.channels * size);
    projection_bias_ = memory_.take(sizes.projected() * size);
    out_weight_ = memory_.take(std::int64_t{sizes.channels} * sizes.features() * size);
    out_bias_ = memory_.take(sizes.channels * size);
    q_points_ = memory_.take(lines * point_line(sizes) * 4);
    k_points_ = memory_.take(lines * point_line(sizes) * 4);
    values_ = memory_.take(lines * value_line(sizes, mode) * size);
    q_moments_ = memory_.take(moments_ ? lines * moment_line(sizes, mode) * size : 0);
    k_moments_ = memory_.take(moments_ ? lines * moment_line(sizes, mode) * size : 0);
    logits_ = memory_.take(parts.batch * sizes.heads * parts.rows * pair_line(sizes.n) * 4);
  }

  // LayerNorm and the weights; with `first` also what the forward leaves in `saved`.
  void prepare(const Saved& saved, bool first, CUstream_st* stream) const {
    PrepareProblem p = call_.prepare;
    if (!takes_nodes()) p.normalised = memory_.at(normalised_);
    if (first) {
      if (p.mask.data) p.present = saved.present();
      p.centres = saved.centres();
    }
    p.projections = memory_.at(projections_);
    p.projection_bias = memory_.at(projection_bias_);
    p.out_weight = memory_.at(out_weight_);
    p.out_bias = memory_.at(out_bias_);
    prepare_sm80(p, stream);
  }

  // (nodes, projected), the projections of the normalised nodes; in fp32 without bias.
  Tensor project() const {
    const Sizes& sizes = call_.sizes();
    const Tensor x = normalised();
    void* weight = memory_.at(projections_);
    if (call_.is_fp32()) {
      return multiply_fp32(x, call_.turned(weight, sizes.projected(), sizes.channels),
                           call_.settings.precision);
    }
    const Tensor out = empty(call_.inputs.node, {sizes.nodes(), sizes.projected()}, call_.scalar());
    multiply(x, call_.matrix(weight, sizes.projected(), sizes.channels),
             vector(projection_bias_, sizes.projected()), out);
    return out;
  }

  // `adds_bias`: of fp32, to `projected`, which has none yet.
  void place(const Tensor& projected, const Saved& saved, bool adds_bias,
             CUstream_st* stream) const {
    FramesProblem p;
    p.sizes = call_.sizes();
    p.mode = call_.mode();
    p.frames = call_.prepare.frames;
    p.centres = saved.centres();
    p.projected = projected.mutable_data_ptr();
    if (adds_bias && call_.is_fp32() && has_bias())
      p.projection_bias = memory_.at<float>(projection_bias_);
    p.q_points = q_points();
    p.k_points = k_points();
    p.values = values();
    if (moments_) {
      p.q_moments = q_moments();
      p.k_moments = k_moments();
    }
    frames_sm80(p, stream);
  }

  // f(first batch element, sizes of the part, block), part by part.
  template <class F>
  void for_parts(F f) const {
    Sizes part = call_.sizes();
    const Parts& parts = call_.chosen.parts;
    for (std::int64_t batch = 0; batch < call_.sizes().batch; batch += parts.batch) {
      part.batch = std::min(parts.batch, call_.sizes().batch - batch);
      for (std::int64_t row = 0; row < part.n; row += parts.rows) {
        f(batch, part, Block{row, std::min(parts.rows, part.n - row)});
      }
    }
  }

  void logits(std::int64_t batch, const Sizes& part, const Block& block, const Tensor& projected,
              const Saved& saved, CUstream_st* stream) const {
    LogitsProblem p;
    p.sizes = part;
    p.mode = call_.mode();
    p.block = block;
    p.projected =
        further(projected.const_data_ptr(), call_.type(), batch * part.n * part.projected());
    const std::int64_t lines = batch * part.heads * part.n;
    p.q_points = q_points() + lines * point_line(part);
    p.k_points = k_points() + lines * point_line(part);
    if (call_.prepare.mask.data) p.present = saved.present() + batch * mask_words(part.n);
    p.pair = pairs_from(call_.pair, batch);
    p.bias = call_.bias;
    p.head_weights = call_.head_weights;
    p.scalar_scale = call_.scalar_scale;
    p.point_scale = call_.point_scale;
    p.bias_scale = call_.bias_scale;
    p.logits = logits();
    (call_.is_fp32() ? logits_fp32_sm80 : logits_sm80)(p, stream);
  }

  // Softmax, the gathered values, and pair values.
  void gather(std::int64_t batch, const Sizes& part, const Block& block, const Saved& saved,
              bool saves, CUstream_st* stream) const {
    const std::int64_t lines = batch * part.heads * part.n, nodes = batch * part.n;
    void* features = further(saved.features(), call_.type(), nodes * part.features());
    const bool pair_values = part.value_channels > 0;
    ValuesProblem p;
    p.sizes = part;
    p.mode = call_.mode();
    p.block = block;
    p.logits = logits();
    p.values = further(values(), call_.type(), lines * value_line(part, call_.mode()));
    p.frames = frames_from(batch);
    p.centres = saved.centres() + batch;
    p.norm_eps = call_.norm_eps;
    p.features = features;
    if (saves || pair_values) p.log_sums = saved.log_sums() + lines;
    if (saves) p.gathered = saved.gathered() + lines * part.value_numbers();
    (call_.is_fp32() ? values_fp32_sm80 : values_sm80)(p, stream);
    if (!pair_values) return;
    GatherProblem g;
    g.sizes = part;
    g.mode = call_.mode();
    g.block = block;
    g.logits = logits();
    g.log_sums = saved.log_sums() + lines;
    g.pair = pairs_from(call_.pair_value, batch);
    g.features = features;
    (call_.is_fp32() ? gather_fp32_sm80 : gather_sm80)(g, stream);
  }

  Tensor normalised() const {
    const Sizes& sizes = call_.sizes();
    void* data =
        takes_nodes() ? const_cast<void*>(call_.prepare.node.data) : memory_.at(normalised_);
    return call_.matrix(data, sizes.nodes(), sizes.channels);
  }

  Frames frames_from(std::int64_t batch) const {
    Frames frames = call_.prepare.frames;
    const auto move = [&](Stored& stored, std::int64_t stride) {
      stored.data = further(stored.data, stored.type, batch * stride);
    };
    move(frames.translations, frames.translations_stride);
    move(frames.rotations, frames.rotations_stride);
    return frames;
  }

  static Pairs pairs_from(Pairs pairs, std::int64_t batch) {
    pairs.data = further(pairs.data, pairs.type, batch * pairs.batch_stride);
    return pairs;
  }

  Tensor vector(std::int64_t at, std::int64_t count) const {
    return view_of(call_.inputs.node, memory_.at(at), {count}, {1}, call_.scalar());
  }

  void* projections() const { return memory_.at(projections_); }
  void* out_weight() const { return memory_.at(out_weight_); }
  Tensor out_bias() const { return vector(out_bias_, call_.sizes().channels); }
  float* q_points() const { return memory_.at<float>(q_points_); }
  float* k_points() const { return memory_.at<float>(k_points_); }
  void* values() const { return memory_.at(values_); }
  void* q_moments() const { return memory_.at(q_moments_); }
  void* k_moments() const { return memory_.at(k_moments_); }
  float* logits() const { return memory_.at<float>(logits_); }

 private:
  // Whether the nodes, as they are, are what the projections multiply.
  bool takes_nodes() const {
    const PrepareProblem& p = call_.prepare;
    return !p.norm_weight.data && p.node.type == call_.type() &&
           p.node.stride == call_.sizes().channels &&
           (call_.sizes().batch == 1 ||
            p.node.batch_stride == call_.sizes().n * call_.sizes().channels);
  }

  bool has_bias() const {
    const PrepareProblem& p = call_.prepare;
    for (const Linear& linear : {p.q, p.k, p.v, p.q_points, p.k_points, p.v_points}) {
      if (linear.bias.data) return true;
    }
    return false;
  }

  const Call& call_;
  Workspace& memory_;
  bool moments_;
  std::int64_t normalised_, projections_, projection_bias_, out_weight_, out_bias_;
  std::int64_t q_points_, k_points_, values_, q_moments_, k_moments_, logits_;
};

}  // namespace fused_ops::invariant_point_attention
