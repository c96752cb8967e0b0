// SPDX-License-Identifier: Apache-2.0
// The backward on CUDA: the room's kernels, with matrix products between them.
//
// Nothing but the inputs is kept by the forward: a, b and o are formed again. Then, some lines of
// pairs at a time, back through the output gate, the output projection and the second LayerNorm
// (the gradient of o takes o's place); through the contraction, to the gradients of a and b; and,
// some lines at a time, through the gates, the projections and the first LayerNorm. The parameters'
// gradients follow at the end from sums over pairs. docs/ops/ has the formulae.
#include <algorithm>
#include <initializer_list>

#include "triangular_multiplicative_update/backward.h"

namespace fused_ops::triangular_multiplicative_update {
namespace {

class Backward {
 public:
  Backward(const Call& call, const Inputs& inputs, const std::vector<bool>& needs)
      : call_(call),
        inputs_(inputs),
        needs_(needs),
        chunks_(chunks_of(call.sizes())),
        out_proj_products_(chunks_, call.precision),
        out_gate_products_({{0, call.sizes().pairs()}}, call.precision),
        input_products_(chunks_, call.precision) {}

  // The wanted gradients.
  std::vector<Tensor> run() {
    Inputs grads;
    walk_back(&grads);
    parameters(&grads);
    std::vector<Tensor> wanted;
    for (int i = 0; i < kInputs; ++i) {
      if (needs_[i]) wanted.push_back(*grads[i]);
    }
    return wanted;
  }

 private:
  // Planes of gradients of a and b; times `undo`, and the scales of b and a, in fp16.
  struct PlaneGrads {
    Tensor a;
    Tensor b;
    MaybeTensor undo;
  };

  bool needs(std::initializer_list<Input> inputs) const {
    return std::any_of(inputs.begin(), inputs.end(), [&](Input i) { return needs_[i]; });
  }

  Tensor make(const std::vector<std::int64_t>& sizes, ScalarType type) const {
    return empty(call_.pair, sizes, type);
  }

  // a * b in their dtype; fp32 to the accuracy that the precision asks for.
  Tensor multiply(const Tensor& a, const Tensor& b) const {
    if (a.scalar_type() != ScalarType::Float) {
      if (!fills_products()) return call_operator("aten::mm", a, b);
      const Tensor out = make({a.size(0), b.size(1)}, a.scalar_type());
      call_operator("aten::zero_", out);
      return call_overload("aten::mm", "out", a, b, out);
    }
    return call_operator("fused_ops::tensor_matmul_forward", a, b, call_.precision,
                         std::optional<ScalarType>());
  }

  // Room for a row of sums from each block of pairs, or from each that stays, a chunk.
  Tensor line_sums(std::int64_t lines) const {
    const std::int64_t resident = call_.resident_blocks;
    const std::int64_t rows = resident ? static_cast<std::int64_t>(chunks_.size()) * resident
                                       : row_blocks(call_.chosen.tile, call_.sizes().pairs());
    return make({rows, lines}, ScalarType::Float);
  }

  // The rows of a chunk, which begins with a block.
  float* of_chunk(const Tensor& sums, const Chunk& chunk) const {
    const std::int64_t row = call_.resident_blocks
                                 ? chunk.first / chunks_[0].count * call_.resident_blocks
                                 : row_blocks(call_.chosen.tile, chunk.first);
    return static_cast<float*>(at(sums, row * sums.size(1)));
  }

  // Everything up to the sums over pairs, and the gradient of the pair.
  void walk_back(Inputs* grads) {
    const Sizes& sizes = call_.sizes();
    const std::int64_t planes = parts(call_.mode());
    const bool side = std::any_of(needs_.begin(), needs_.begin() + kNormOutWeight,
                                  [](bool need) { return need; });
    std::optional<PlaneGrads> d;
    MaybeTensor through_gate;
    {
      const Tensor a = make({planes, sizes.hidden, sizes.pairs()}, call_.half());
      const Tensor b =
          make({planes * sizes.hidden * sizes.pairs() + room_behind(sizes)}, call_.half());
      const Tensor o = make({sizes.hidden, sizes.pairs()}, call_.wide());
      if (side) {
        folded_.out_proj = make({sizes.channels, sizes.hidden}, call_.type());
        if (!call_.brain()) folded_.largest = make({sizes.hidden}, ScalarType::Int);
      }
      if (needs_[kPair]) {
        folded_.input = make({4 * sizes.hidden, sizes.channels}, call_.type());
        folded_.out_gate = make({sizes.channels, sizes.channels}, call_.type());
      }
      form_planes(call_, folded_, a, b, o);
      through_gate = through_output(o);
      if (side) d = through_contraction(o, a, b);
    }
    if (side) (*grads)[kPair] = through_input(*d, through_gate);
  }

  // Through what comes after the contraction; o becomes its own gradient. Returns what came through
  // the output gate, in its rows, for all pairs.
  MaybeTensor through_output(const Tensor& o) {
    const Sizes& sizes = call_.sizes();
    const ScalarType type = call_.type();
    const bool gate_normalized = call_.weights.gate_normalized;
    const bool need_proj = needs({kOutProjWeight, kNormOutWeight});
    // With the gate on LayerNorm(pair), the weight of that has a share in it.
    const bool need_gate = needs_[kOutGateWeight] || (gate_normalized && needs_[kNormInWeight]);
    const bool plain = sizes.n == sizes.pitch && call_.pair.is_contiguous() &&
                       call_.pair.scalar_type() == type && !gate_normalized;
    MaybeTensor gate_input;
    if (need_gate && plain) {
      gate_input = view_of(call_.pair, const_cast<void*>(call_.pairs.data),
                           {sizes.pairs(), sizes.channels}, {sizes.channels, 1}, type);
    } else if (need_gate) {
      gate_input = make({sizes.pairs(), sizes.channels}, type);
    }
    const Tensor d_gate = make({sizes.pairs(), sizes.channels}, type);
    sums_.output_lines = line_sums(2 * sizes.channels);
    for (const Chunk& chunk : chunks_) {
      const Tensor d_proj = make({chunk.count, sizes.channels}, type);
      const Tensor normalised = make({chunk.count, sizes.hidden}, type);
      OutputGradients to;
      to.out_proj = d_proj.mutable_data_ptr();
      to.gate = at(d_gate, chunk.first * sizes.channels);
      to.normalised = normalised.mutable_data_ptr();
      if (need_gate && !plain) to.gate_input = at(*gate_input, chunk.first * sizes.channels);
      to.sums = of_chunk(*sums_.output_lines, chunk);
      output_backward(call_, o, chunk, to);
      if (need_proj) out_proj_products_.add(d_proj, normalised);
      if (folded_.out_proj) {
        const Tensor d_normalised = multiply(d_proj, *folded_.out_proj);
        norm_out_backward(call_, d_normalised, chunk, o, folded_.largest);
      }
    }
    if (gate_input) out_gate_products_.add(d_gate, *gate_input);
    gate_input.reset();
    if (!folded_.out_gate) return std::nullopt;
    return multiply(d_gate, *folded_.out_gate);
  }

  // The matrices of a plane, `lines` of them from line `first` on, `places` long.
  Tensor part(const Tensor& plane, std::int64_t first, std::int64_t lines,
              std::int64_t places) const {
    const Sizes& sizes = call_.sizes();
    return view_of(plane, at(plane, first * sizes.pitch),
                   {sizes.hidden * sizes.batch, lines, places},
                   {sizes.n * sizes.pitch, sizes.pitch, 1}, plane.scalar_type());
  }

  // da = do * b. Where n is not a multiple of 8, cuBLAS is six times slower than with the padding
  // of do, zeros, and as many lines of b more. Those are the next channel's, or the room behind:
  // what is no number there is none in this channel either, as LayerNorms mix channels. Not so the
  // next batch element's.
  void multiply_along(const Tensor& d_o, const Tensor& b, const Tensor& da) const {
    const Sizes& sizes = call_.sizes();
    const bool wider = sizes.pitch != sizes.n && sizes.batch == 1 && call_.weights.eps > 0;
    const std::int64_t inner = wider ? sizes.pitch : sizes.n;
    if (wider) {
      const std::int64_t room = room_behind(sizes);
      call_operator("aten::zero_",
                    view_of(b, at(b, sizes.hidden * sizes.pairs()), {room}, {1}, b.scalar_type()));
    }
    multiply_matrices(part(d_o, 0, sizes.n, inner), part(b, 0, inner, sizes.pitch),
                      part(da, 0, sizes.n, sizes.pitch));
  }

  // db = do^T * a: the lines up to a multiple of 8, then the others, or cuBLAS is as slow.
  void multiply_across(const Tensor& d_o, const Tensor& a, const Tensor& db) const {
    const Sizes& sizes = call_.sizes();
    const std::int64_t most = sizes.n / kPlaces * kPlaces;
    const std::int64_t parts[2][2] = {{0, most}, {most, sizes.n - most}};
    for (const auto& [first, lines] : parts) {
      if (lines == 0) continue;
      const Tensor columns =
          view_of(d_o, at(d_o, first), {sizes.hidden * sizes.batch, lines, sizes.n},
                  {sizes.n * sizes.pitch, 1, sizes.pitch}, d_o.scalar_type());
      multiply_matrices(columns, part(a, 0, sizes.n, sizes.pitch),
                        part(db, first, lines, sizes.pitch));
    }
  }

  PlaneGrads through_contraction(const Tensor& d_o, const Tensor& a, const Tensor& b) const {
    const Sizes& sizes = call_.sizes();
    const Tensor da = make({sizes.hidden, sizes.pairs()}, call_.wide());
    if (call_.brain()) {
      const Tensor db = make({sizes.hidden, sizes.pairs()}, call_.wide());
      multiply_along(d_o, b, da);
      multiply_across(d_o, a, db);
      return {da, db, std::nullopt};
    }
    const Tensor split = make({parts(call_.mode()), sizes.hidden, sizes.pairs()}, ScalarType::Half);
    const Tensor undo = make({sizes.hidden}, ScalarType::Float);
    split_plane(call_, d_o, *folded_.largest, split, undo);
    // o is not needed any more, and its memory is as large as that of db.
    const Tensor& db = d_o;
    if (call_.mode() == Mode::kSplit) {
      contract_backward(call_, split, undo, b, false, da);
      contract_backward(call_, split, undo, a, true, db);
      return {da, db, std::nullopt};
    }
    multiply_along(split, b, da);
    multiply_across(split, a, db);
    return {da, db, undo};
  }

  // Through what comes before the contraction, to the gradient of the pair.
  MaybeTensor through_input(const PlaneGrads& planes, const MaybeTensor& through_gate) {
    const Sizes& sizes = call_.sizes();
    const ScalarType type = call_.type();
    const std::int64_t lines = std::int64_t{4} * sizes.hidden;
    const bool need_products =
        needs({kProjAWeight, kGateAWeight, kProjBWeight, kGateBWeight, kNormInWeight});
    MaybeTensor d_pair;
    if (folded_.input) {
      const auto shape = call_.pair.sizes();
      d_pair = make({shape.begin(), shape.end()}, call_.pair.scalar_type());
    }
    sums_.input_lines = line_sums(lines);
    for (const Chunk& chunk : chunks_) {
      const Tensor memory = make({chunk.count, lines}, type);
      const Tensor normalised = make({chunk.count, sizes.channels}, type);
      project_backward(call_, planes.a, planes.b, planes.undo, chunk, memory, normalised,
                       of_chunk(*sums_.input_lines, chunk));
      const Tensor d = call_.resident_blocks ? view_of(memory, memory.mutable_data_ptr(),
                                                       {chunk.count, lines}, {1, chunk.count}, type)
                                             : memory;
      if (need_products) input_products_.add(d, normalised);
      if (folded_.input) {
        const Tensor d_normalised = multiply(d, *folded_.input);
        norm_in_backward(call_, d_normalised, *through_gate, chunk, *d_pair);
      }
    }
    return d_pair;
  }

  // Of the wanted parameters: each a tensor of its own, in its parameter's dtype.
  void parameters(Inputs* grads) {
    bool any = false;
    for (int i = kPair + 1; i < kInputs; ++i) {
      if (!needs_[i]) continue;
      const auto shape = inputs_[i]->sizes();
      (*grads)[i] = make({shape.begin(), shape.end()}, inputs_[i]->scalar_type());
      any = true;
    }
    if (!any) return;
    sums_.input = input_products_.slabs();
    sums_.out_proj = out_proj_products_.slabs();
    sums_.out_gate = out_gate_products_.slabs();
    finish(call_, sums_, *grads);
  }

  const Call& call_;
  const Inputs& inputs_;
  const std::vector<bool>& needs_;
  const std::vector<Chunk> chunks_;
  Folded folded_;
  Sums sums_;
  SlabProducts out_proj_products_;
  SlabProducts out_gate_products_;
  SlabProducts input_products_;
};

// The arguments of fused_ops::triangular_multiplicative_update_backward.
std::vector<Tensor> backward(const Tensor& grad, const Tensor& pair, const MaybeTensor& mask,
                             const Tensor& layer_norm_in_weight, const Tensor& layer_norm_in_bias,
                             const Tensor& proj_a_weight, const MaybeTensor& proj_a_bias,
                             const Tensor& gate_a_weight, const MaybeTensor& gate_a_bias,
                             const Tensor& proj_b_weight, const MaybeTensor& proj_b_bias,
                             const Tensor& gate_b_weight, const MaybeTensor& gate_b_bias,
                             const Tensor& layer_norm_out_weight, const Tensor& layer_norm_out_bias,
                             const Tensor& out_proj_weight, const MaybeTensor& out_proj_bias,
                             const Tensor& out_gate_weight, const MaybeTensor& out_gate_bias,
                             bool outgoing, bool gate_normalized, double eps,
                             std::optional<std::int64_t> /*max_workspace*/,
                             std::string_view precision, std::optional<ScalarType> dtype,
                             const std::vector<bool>& needs) {
  const Parameters parameters{
      layer_norm_in_weight, layer_norm_in_bias, proj_a_weight,         proj_a_bias,
      gate_a_weight,        gate_a_bias,        proj_b_weight,         proj_b_bias,
      gate_b_weight,        gate_b_bias,        layer_norm_out_weight, layer_norm_out_bias,
      out_proj_weight,      out_proj_bias,      out_gate_weight,       out_gate_bias};
  const Inputs inputs{pair,
                      layer_norm_in_weight,
                      layer_norm_in_bias,
                      proj_a_weight,
                      proj_a_bias,
                      gate_a_weight,
                      gate_a_bias,
                      proj_b_weight,
                      proj_b_bias,
                      gate_b_weight,
                      gate_b_bias,
                      layer_norm_out_weight,
                      layer_norm_out_bias,
                      out_proj_weight,
                      out_proj_bias,
                      out_gate_weight,
                      out_gate_bias};
  FO_CHECK_VALUE(needs.size() == kInputs, kOp, ": needs must have ", int{kInputs}, " entries, got ",
                 needs.size());
  for (int i = 0; i < kInputs; ++i) {
    FO_CHECK_VALUE(inputs[i] || !needs[i], kOp, ": a bias that is None has no gradient");
  }
  const DeviceGuard guard(pair.get_device_index());
  const Call call(grad, pair, mask, parameters, outgoing, gate_normalized, eps, precision, dtype);
  return Backward(call, inputs, needs).run();
}

}  // namespace

// Called where the planner gives the backward to kernels and there are pairs.
STABLE_TORCH_LIBRARY_FRAGMENT(fused_ops, m) {
  m.def(
      "triangular_multiplicative_update_backward_cuda(Tensor grad, Tensor pair, Tensor? mask, "
      "Tensor layer_norm_in_weight, Tensor layer_norm_in_bias, Tensor proj_a_weight, "
      "Tensor? proj_a_bias, Tensor gate_a_weight, Tensor? gate_a_bias, Tensor proj_b_weight, "
      "Tensor? proj_b_bias, Tensor gate_b_weight, Tensor? gate_b_bias, "
      "Tensor layer_norm_out_weight, Tensor layer_norm_out_bias, Tensor out_proj_weight, "
      "Tensor? out_proj_bias, Tensor out_gate_weight, Tensor? out_gate_bias, bool outgoing, "
      "bool gate_normalized, float eps, int? max_workspace, str precision, ScalarType? dtype, "
      "bool[] needs) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, m) {
  m.impl("triangular_multiplicative_update_backward_cuda", TORCH_BOX(&backward));
}

}  // namespace fused_ops::triangular_multiplicative_update
