// SPDX-License-Identifier: Apache-2.0
// The steps of the backward but the last: from tensors to launchers. backward_cuda.cpp allocates,
// and multiplies matrices between the steps.
#include "triangular_multiplicative_update/backward.h"

namespace fused_ops::triangular_multiplicative_update {
namespace {

std::vector<std::int64_t> shape_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

Tensor cast(const Tensor& tensor, ScalarType type) {
  if (tensor.scalar_type() == type) return tensor;
  const Tensor copy = empty(tensor, shape_of(tensor), type);
  return call_operator("aten::copy_", copy, tensor, false);
}

float* floats(const Tensor& tensor) {
  return static_cast<float*>(tensor.mutable_data_ptr());
}

std::uint16_t* halves(const Tensor& tensor) {
  return static_cast<std::uint16_t*>(tensor.mutable_data_ptr());
}

void* data_or_null(const MaybeTensor& tensor) {
  return tensor ? tensor->mutable_data_ptr() : nullptr;
}

}  // namespace

Call::Call(const Tensor& out_grad, const Tensor& input, const MaybeTensor& factors,
           const Parameters& parameters, bool is_outgoing, bool gate_normalized, double eps,
           std::string_view precision_text, std::optional<ScalarType> dtype)
    : pair(input), grad(out_grad), precision(precision_text), outgoing(is_outgoing), packed(input) {
  FO_CHECK_VALUE(input.dim() >= 3 && input.size(-2) == input.size(-3), kOp,
                 ": pair must have shape (..., N, N, pair_dim), got ", shape_text(input.sizes()));
  FO_CHECK_VALUE(parameters.proj_a_weight.dim() == 2, kOp,
                 ": proj_a_weight must have shape (hidden_dim, pair_dim), got ",
                 shape_text(parameters.proj_a_weight.sizes()));
  FO_CHECK_VALUE(shape_of(out_grad) == shape_of(input), kOp, ": grad must have shape ",
                 shape_text(input.sizes()), ", got ", shape_text(out_grad.sizes()));
  FO_CHECK_RUNTIME(same_device(input, out_grad), kOp,
                   ": grad must be on the device of pair, expected ", device_text(input), ", got ",
                   device_text(out_grad));
  std::int64_t batch = 1;
  for (std::int64_t i = 0; i + 3 < input.dim(); ++i) {
    lead.push_back(input.size(i));
    batch *= lead.back();
  }
  const std::int64_t hidden = parameters.proj_a_weight.size(0);
  problem.sizes = sizes_of(batch, input.size(-2), input.size(-1), hidden);
  problem.pair = dtype_of(input.scalar_type());
  problem.result = dtype_of(dtype.value_or(input.scalar_type()));
  problem.precision = precision_from(kOp, precision);
  problem.backward = true;
  problem.device = device_capability(input.get_device_index());
  chosen = choose(problem);
  FO_CHECK_RUNTIME(chosen.kernels == Kernels::kLarge, kOp, ": backward must have kernels");

  pairs = pairs_of(input, lead, &pair);
  grads = pairs_of(cast(out_grad, type()), lead, &grad);
  if (chosen.hopper_rows && resident_backward(pairs, sizes(), mode())) {
    if (!is_walkable(grads, sizes(), mode())) {
      const Tensor copy = copy_of(grad, shape_of(grad));
      grads = pairs_of(copy, lead, &grad);
    }
    if (is_walkable(grads, sizes(), mode())) resident_blocks = multiprocessors();
  }
  Tensor kept_mask = pair;
  mask = mask_of(factors, pair, lead, sizes().n, &kept_mask);
  kept.push_back(kept_mask);
  weights =
      weights_of(parameters, sizes().channels, hidden, Storer(kOp, pair, "pair", false, &kept));
  weights.eps = static_cast<float>(eps);
  weights.gate_normalized = gate_normalized;
  layout = Packed::of(sizes(), mode());
  packed = empty(pair, {layout.bytes}, ScalarType::Byte);
  stream = current_stream(pair);
}

const float* Call::undo_a() const {
  return reinterpret_cast<const float*>(static_cast<const char*>(packed.const_data_ptr()) +
                                        layout.plane_undo);
}

const float* Call::undo_b() const {
  return undo_a() + layout.hidden_blocks * kPieceChannels;
}

void form_planes(const Call& call, const Folded& folded, const Tensor& a, const Tensor& b,
                 const Tensor& o) {
  const Sizes& sizes = call.sizes();
  FoldProblem fold;
  fold.sizes = sizes;
  fold.weights = call.weights;
  fold.type = type_of(call.mode());
  fold.input = data_or_null(folded.input);
  fold.out_proj = data_or_null(folded.out_proj);
  fold.out_gate = data_or_null(folded.out_gate);
  fold.largest = static_cast<unsigned*>(data_or_null(folded.largest));
  fold_sm80(fold, call.stream);

  PackProblem pack;
  pack.sizes = sizes;
  pack.mode = call.mode();
  pack.weights = call.weights;
  pack.mask = call.mask;
  pack.workspace = call.packed.mutable_data_ptr();
  pack_sm80(pack, call.stream);

  ProjectProblem project;
  project.sizes = sizes;
  project.mode = call.mode();
  project.outgoing = call.outgoing;
  project.eps = call.weights.eps;
  project.tile = call.chosen.forward_tile;
  project.pair = call.pairs;
  project.mask = call.mask;
  project.packed = pack.workspace;
  project.blocks = call.layout.hidden_blocks;
  for (int part = 0; part < parts(call.mode()); ++part) {
    project.a[part] = halves(a) + part * sizes.hidden * sizes.pairs();
    project.b[part] = halves(b) + part * sizes.hidden * sizes.pairs();
  }
  FUSED_OPS_RUN(project, project, call.chosen, call.stream);
  contract_planes(call.problem, call.chosen, call.layout, project, 0, sizes.hidden, o, call.stream);
}

void output_backward(const Call& call, const Tensor& o, Chunk chunk, const OutputGradients& to) {
  OutputBackwardProblem p;
  p.sizes = call.sizes();
  p.mode = call.mode();
  p.gate_normalized = call.weights.gate_normalized;
  p.eps = call.weights.eps;
  p.tile = call.chosen.tile;
  p.pair = call.pairs;
  p.out_grad = call.grads;
  p.packed = call.packed.const_data_ptr();
  p.o = o.const_data_ptr();
  p.first_pair = chunk.first;
  p.count = chunk.count;
  p.out_proj_grad = to.out_proj;
  p.gate_grad = to.gate;
  p.normalised = to.normalised;
  p.gate_input = to.gate_input;
  p.sums = to.sums;
  p.resident_blocks = call.resident_blocks;
  FUSED_OPS_RUN(output_backward, p, call.chosen, call.stream);
}

void norm_out_backward(const Call& call, const Tensor& grad, Chunk chunk, const Tensor& o,
                       const MaybeTensor& largest) {
  NormOutBackwardProblem p;
  p.sizes = call.sizes();
  p.mode = call.mode();
  p.eps = call.weights.eps;
  p.first_pair = chunk.first;
  p.count = chunk.count;
  p.grad = grad.const_data_ptr();
  if (p.mode == Mode::kTf32) {
    p.o_undo = call.undo_a();
    p.o_undo_second = call.undo_b();
  }
  p.o = o.mutable_data_ptr();
  p.largest = static_cast<unsigned*>(data_or_null(largest));
  norm_out_backward_sm80(p, call.stream);
}

void split_plane(const Call& call, const Tensor& plane, const Tensor& largest, const Tensor& to,
                 const Tensor& undo) {
  SplitPlaneProblem p;
  p.sizes = call.sizes();
  p.plane = floats(plane);
  p.largest = static_cast<unsigned*>(largest.mutable_data_ptr());
  p.hi = halves(to);
  if (parts(call.mode()) == 2) p.lo = p.hi + p.sizes.hidden * p.sizes.pairs();
  p.undo = floats(undo);
  split_plane_sm80(p, call.stream);
}

void contract_backward(const Call& call, const Tensor& grad, const Tensor& grad_undo,
                       const Tensor& plane, bool transposed, const Tensor& out) {
  ContractProblem p;
  p.sizes = call.sizes();
  p.channels = p.sizes.hidden;
  p.product = transposed ? Product::kTN : Product::kNN;
  const std::int64_t part = p.sizes.hidden * p.sizes.pairs();
  p.a = {halves(grad), halves(grad) + part, floats(grad_undo)};
  p.b = {halves(plane), halves(plane) + part, transposed ? call.undo_a() : call.undo_b()};
  p.out = floats(out);
  contract_split(p, call.chosen.hopper, call.stream);
}

void project_backward(const Call& call, const Tensor& da, const Tensor& db,
                      const MaybeTensor& grad_undo, Chunk chunk, const Tensor& grad,
                      const Tensor& normalised, float* sums) {
  ProjectBackwardProblem p;
  p.sizes = call.sizes();
  p.mode = call.mode();
  p.outgoing = call.outgoing;
  p.eps = call.weights.eps;
  p.tile = call.chosen.tile;
  p.pair = call.pairs;
  p.mask = call.mask;
  p.packed = call.packed.const_data_ptr();
  p.first_pair = chunk.first;
  p.count = chunk.count;
  p.da = da.const_data_ptr();
  p.db = db.const_data_ptr();
  p.grad_undo = grad_undo ? floats(*grad_undo) : nullptr;
  p.grad = grad.mutable_data_ptr();
  p.normalised = normalised.mutable_data_ptr();
  p.sums = sums;
  p.resident_blocks = call.resident_blocks;
  FUSED_OPS_RUN(project_backward, p, call.chosen, call.stream);
}

void norm_in_backward(const Call& call, const Tensor& grad, const Tensor& gate_grad, Chunk chunk,
                      const Tensor& out) {
  NormInBackwardProblem p;
  p.sizes = call.sizes();
  p.outgoing = call.outgoing;
  p.gate_normalized = call.weights.gate_normalized;
  p.eps = call.weights.eps;
  p.first_pair = chunk.first;
  p.count = chunk.count;
  p.pair = call.pairs;
  p.grad_type = dtype_of(grad.scalar_type());
  p.grad = grad.const_data_ptr();
  p.gate_grad = gate_grad.const_data_ptr();
  p.output_type = dtype_of(out.scalar_type());
  p.out = out.mutable_data_ptr();
  norm_in_backward_sm80(p, call.stream);
}

}  // namespace fused_ops::triangular_multiplicative_update
