// SPDX-License-Identifier: Apache-2.0
// The steps of the backward as dispatcher ops, for
// fused_ops/triangular_multiplicative_update/cuda.py alone: it has checked the arguments,
// allocates, and multiplies matrices between the steps. All take the pair representation, from
// whose sizes and dtypes the plan follows.
#include <algorithm>
#include <tuple>

#include "triangular_multiplicative_update/contraction.h"
#include "triangular_multiplicative_update/finish.h"

namespace fused_ops::triangular_multiplicative_update {
namespace {

struct Setup {
  Problem problem;
  Choice chosen;
  std::vector<std::int64_t> lead;
  Tensor kept_pair;
  Pairs pair;
  CUstream_st* stream = nullptr;

  Setup(const Tensor& tensor, std::int64_t hidden, std::string_view precision, ScalarType dtype)
      : kept_pair(tensor) {
    std::int64_t batch = 1;
    for (std::int64_t i = 0; i + 3 < tensor.dim(); ++i) {
      lead.push_back(tensor.size(i));
      batch *= lead.back();
    }
    problem.sizes = sizes_of(batch, tensor.size(-2), tensor.size(-1), hidden);
    problem.pair = dtype_of(tensor.scalar_type());
    problem.result = dtype_of(dtype);
    problem.precision = precision_from(kOp, precision);
    problem.backward = true;
    problem.device = device_capability(tensor.get_device_index());
    chosen = choose(problem);
    FO_CHECK_RUNTIME(chosen.kernels == Kernels::kLarge, kOp, ": backward must have kernels");
    pair = pairs_of(tensor, lead, &kept_pair);
    stream = current_stream(tensor);
  }

  const Sizes& sizes() const { return problem.sizes; }
};

float* floats(const MaybeTensor& tensor) {
  return tensor ? static_cast<float*>(tensor->mutable_data_ptr()) : nullptr;
}

std::uint16_t* halves(const MaybeTensor& tensor) {
  return tensor ? static_cast<std::uint16_t*>(tensor->mutable_data_ptr()) : nullptr;
}

// Packs, projects into a and b (parts, hidden, pairs) and contracts into o (hidden, pairs); returns
// what was packed, and the rows of a block of the two backward kernels, for each of which they
// write column sums; or, last, how many blocks stay on the multiprocessors, which each write one
// row of sums a chunk, and project_backward the transposed grad. For the way back, also folds
// weights (finish.h) and zeroes `largest`.
std::tuple<Tensor, std::int64_t, std::int64_t> forward(
    const Tensor& pair, const MaybeTensor& mask, const Tensor& layer_norm_in_weight,
    const Tensor& layer_norm_in_bias, const Tensor& proj_a_weight, const MaybeTensor& proj_a_bias,
    const Tensor& gate_a_weight, const MaybeTensor& gate_a_bias, const Tensor& proj_b_weight,
    const MaybeTensor& proj_b_bias, const Tensor& gate_b_weight, const MaybeTensor& gate_b_bias,
    const Tensor& layer_norm_out_weight, const Tensor& layer_norm_out_bias,
    const Tensor& out_proj_weight, const MaybeTensor& out_proj_bias, const Tensor& out_gate_weight,
    const MaybeTensor& out_gate_bias, bool outgoing, bool gate_normalized, double eps,
    std::string_view precision, ScalarType dtype, const Tensor& a, const Tensor& b, const Tensor& o,
    const MaybeTensor& folded_input, const MaybeTensor& folded_out_proj,
    const MaybeTensor& folded_out_gate, const MaybeTensor& largest) {
  const DeviceGuard guard(pair.get_device_index());
  const std::int64_t hidden = proj_a_weight.size(0);
  const Setup setup(pair, hidden, precision, dtype);
  const Sizes& sizes = setup.sizes();
  const Mode mode = setup.chosen.mode;
  const Parameters parameters{
      layer_norm_in_weight, layer_norm_in_bias, proj_a_weight,         proj_a_bias,
      gate_a_weight,        gate_a_bias,        proj_b_weight,         proj_b_bias,
      gate_b_weight,        gate_b_bias,        layer_norm_out_weight, layer_norm_out_bias,
      out_proj_weight,      out_proj_bias,      out_gate_weight,       out_gate_bias};
  std::vector<Tensor> kept;
  Weights weights = weights_of(parameters, sizes.channels, hidden, Storer(pair, false, &kept));
  weights.eps = static_cast<float>(eps);
  weights.gate_normalized = gate_normalized;
  FoldProblem fold;
  fold.sizes = sizes;
  fold.weights = weights;
  fold.type = type_of(mode);
  fold.input = folded_input ? folded_input->mutable_data_ptr() : nullptr;
  fold.out_proj = folded_out_proj ? folded_out_proj->mutable_data_ptr() : nullptr;
  fold.out_gate = folded_out_gate ? folded_out_gate->mutable_data_ptr() : nullptr;
  fold.largest = largest ? static_cast<unsigned*>(largest->mutable_data_ptr()) : nullptr;
  fold_sm80(fold, setup.stream);

  Tensor kept_mask = pair;
  const Packed packed = Packed::of(sizes, mode);
  Tensor workspace = empty(pair, {packed.bytes}, ScalarType::Byte);

  PackProblem pack;
  pack.sizes = sizes;
  pack.mode = mode;
  pack.weights = weights;
  pack.mask = mask_of(mask, pair, setup.lead, sizes.n, &kept_mask);
  pack.workspace = workspace.mutable_data_ptr();
  pack_sm80(pack, setup.stream);

  ProjectProblem project;
  project.sizes = sizes;
  project.mode = mode;
  project.outgoing = outgoing;
  project.eps = weights.eps;
  project.tile = setup.chosen.tile;
  project.pair = setup.pair;
  project.mask = pack.mask;
  project.packed = pack.workspace;
  project.blocks = packed.hidden_blocks;
  for (int part = 0; part < parts(mode); ++part) {
    project.a[part] = halves(a) + part * hidden * sizes.pairs();
    project.b[part] = halves(b) + part * hidden * sizes.pairs();
  }
  FUSED_OPS_RUN(project, project, setup.chosen, setup.stream);
  contract_planes(setup.problem, setup.chosen, packed, project, 0, sizes.hidden, o, setup.stream);
  const bool resident = setup.chosen.hopper_rows && resident_backward(setup.pair, sizes, mode);
  return {workspace, kTiles[setup.chosen.tile].rows, resident ? multiprocessors() : 0};
}

void output_backward(const Tensor& pair, std::int64_t hidden, std::string_view precision,
                     ScalarType dtype, bool gate_normalized, double eps, const Tensor& packed,
                     const Tensor& o, const Tensor& out_grad, std::int64_t first_pair,
                     std::int64_t count, const Tensor& out_proj_grad, const Tensor& gate_grad,
                     const Tensor& normalised, const MaybeTensor& gate_input, const Tensor& sums,
                     std::int64_t resident_blocks) {
  const DeviceGuard guard(pair.get_device_index());
  const Setup setup(pair, hidden, precision, dtype);
  Tensor kept = out_grad;
  OutputBackwardProblem p;
  p.sizes = setup.sizes();
  p.mode = setup.chosen.mode;
  p.gate_normalized = gate_normalized;
  p.eps = static_cast<float>(eps);
  p.tile = setup.chosen.tile;
  p.pair = setup.pair;
  p.out_grad = pairs_of(out_grad, setup.lead, &kept);
  p.packed = packed.const_data_ptr();
  p.o = o.const_data_ptr();
  p.first_pair = first_pair;
  p.count = count;
  p.out_proj_grad = out_proj_grad.mutable_data_ptr();
  p.gate_grad = gate_grad.mutable_data_ptr();
  p.normalised = normalised.mutable_data_ptr();
  p.gate_input = gate_input ? gate_input->mutable_data_ptr() : nullptr;
  p.sums = floats(sums);
  p.resident_blocks = static_cast<int>(resident_blocks);
  FUSED_OPS_RUN(output_backward, p, setup.chosen, setup.stream);
}

void norm_out_backward(const Tensor& pair, std::int64_t hidden, std::string_view precision,
                       ScalarType dtype, double eps, const Tensor& packed, const Tensor& grad,
                       std::int64_t first_pair, std::int64_t count, const Tensor& o,
                       const MaybeTensor& largest) {
  const DeviceGuard guard(pair.get_device_index());
  const Setup setup(pair, hidden, precision, dtype);
  NormOutBackwardProblem p;
  p.sizes = setup.sizes();
  p.mode = setup.chosen.mode;
  p.eps = static_cast<float>(eps);
  p.first_pair = first_pair;
  p.count = count;
  p.grad = grad.const_data_ptr();
  if (p.mode == Mode::kTf32) {
    const Packed layout = Packed::of(p.sizes, p.mode);
    p.o_undo = reinterpret_cast<const float*>(static_cast<const char*>(packed.const_data_ptr()) +
                                              layout.plane_undo);
    p.o_undo_second = p.o_undo + layout.hidden_blocks * kPieceChannels;
  }
  p.o = o.mutable_data_ptr();
  p.largest = largest ? static_cast<unsigned*>(largest->mutable_data_ptr()) : nullptr;
  norm_out_backward_sm80(p, setup.stream);
}

void split_plane(const Tensor& pair, std::int64_t hidden, std::string_view precision,
                 ScalarType dtype, const Tensor& plane, const Tensor& largest, const Tensor& hi,
                 const MaybeTensor& lo, const Tensor& undo) {
  const DeviceGuard guard(pair.get_device_index());
  const Setup setup(pair, hidden, precision, dtype);
  SplitPlaneProblem p;
  p.sizes = setup.sizes();
  p.plane = floats(plane);
  p.largest = static_cast<unsigned*>(largest.mutable_data_ptr());
  p.hi = halves(hi);
  p.lo = halves(lo);
  p.undo = floats(undo);
  split_plane_sm80(p, setup.stream);
}

// da = do * b or, `transposed`, db = do^T * a, from split planes (2, hidden, pairs). `second` tells
// which plane of those that were packed b is.
void contract_backward(const Tensor& pair, std::int64_t hidden, std::string_view precision,
                       ScalarType dtype, const Tensor& packed, const Tensor& grad,
                       const Tensor& grad_undo, const Tensor& b, bool transposed,
                       const Tensor& out) {
  const DeviceGuard guard(pair.get_device_index());
  const Setup setup(pair, hidden, precision, dtype);
  const Sizes& sizes = setup.sizes();
  const Packed layout = Packed::of(sizes, setup.chosen.mode);
  const auto* undo = reinterpret_cast<const float*>(
      static_cast<const char*>(packed.const_data_ptr()) + layout.plane_undo);
  const std::int64_t part = hidden * sizes.pairs();
  ContractProblem p;
  p.sizes = sizes;
  p.channels = sizes.hidden;
  p.product = transposed ? Product::kTN : Product::kNN;
  p.a = {halves(grad), halves(grad) + part, floats(grad_undo)};
  p.b = {halves(b), halves(b) + part,
         undo + (transposed ? 0 : layout.hidden_blocks * kPieceChannels)};
  p.out = floats(out);
  contract_split(p, setup.chosen.hopper, setup.stream);
}

void project_backward(const Tensor& pair, const MaybeTensor& mask, std::int64_t hidden,
                      std::string_view precision, ScalarType dtype, bool outgoing, double eps,
                      const Tensor& packed, const Tensor& da, const Tensor& db,
                      const MaybeTensor& grad_undo, std::int64_t first_pair, std::int64_t count,
                      const Tensor& grad, const Tensor& normalised, const Tensor& sums,
                      std::int64_t resident_blocks) {
  const DeviceGuard guard(pair.get_device_index());
  const Setup setup(pair, hidden, precision, dtype);
  Tensor kept_mask = pair;
  ProjectBackwardProblem p;
  p.sizes = setup.sizes();
  p.mode = setup.chosen.mode;
  p.outgoing = outgoing;
  p.eps = static_cast<float>(eps);
  p.tile = setup.chosen.tile;
  p.pair = setup.pair;
  p.mask = mask_of(mask, pair, setup.lead, p.sizes.n, &kept_mask);
  p.packed = packed.const_data_ptr();
  p.first_pair = first_pair;
  p.count = count;
  p.da = da.const_data_ptr();
  p.db = db.const_data_ptr();
  p.grad_undo = floats(grad_undo);
  p.grad = grad.mutable_data_ptr();
  p.normalised = normalised.mutable_data_ptr();
  p.sums = floats(sums);
  p.resident_blocks = static_cast<int>(resident_blocks);
  FUSED_OPS_RUN(project_backward, p, setup.chosen, setup.stream);
}

void norm_in_backward(const Tensor& pair, std::int64_t hidden, std::string_view precision,
                      ScalarType dtype, bool outgoing, bool gate_normalized, double eps,
                      const Tensor& grad, const Tensor& gate_grad, std::int64_t first_pair,
                      std::int64_t count, const Tensor& out) {
  const DeviceGuard guard(pair.get_device_index());
  const Setup setup(pair, hidden, precision, dtype);
  NormInBackwardProblem p;
  p.sizes = setup.sizes();
  p.outgoing = outgoing;
  p.gate_normalized = gate_normalized;
  p.eps = static_cast<float>(eps);
  p.first_pair = first_pair;
  p.count = count;
  p.pair = setup.pair;
  p.grad_type = dtype_of(grad.scalar_type());
  p.grad = grad.const_data_ptr();
  p.gate_grad = gate_grad.const_data_ptr();
  p.output_type = dtype_of(out.scalar_type());
  p.out = out.mutable_data_ptr();
  norm_in_backward_sm80(p, setup.stream);
}

}  // namespace

#define FUSED_OPS_STAGE(name, arguments) \
  "triangular_multiplicative_update_stage_" name "(Tensor pair, " arguments ")"
#define FUSED_OPS_PLAN "int hidden, str precision, ScalarType dtype"

STABLE_TORCH_LIBRARY_FRAGMENT(fused_ops, m) {
  m.def(FUSED_OPS_STAGE(
      "forward",
      "Tensor? mask, Tensor layer_norm_in_weight, Tensor layer_norm_in_bias, "
      "Tensor proj_a_weight, Tensor? proj_a_bias, Tensor gate_a_weight, Tensor? gate_a_bias, "
      "Tensor proj_b_weight, Tensor? proj_b_bias, Tensor gate_b_weight, Tensor? gate_b_bias, "
      "Tensor layer_norm_out_weight, Tensor layer_norm_out_bias, Tensor out_proj_weight, "
      "Tensor? out_proj_bias, Tensor out_gate_weight, Tensor? out_gate_bias, bool outgoing, "
      "bool gate_normalized, float eps, str precision, ScalarType dtype, Tensor(a!) a, "
      "Tensor(b!) b, Tensor(c!) o, Tensor(d!)? folded_input, Tensor(e!)? folded_out_proj, "
      "Tensor(f!)? folded_out_gate, Tensor(g!)? largest") " -> (Tensor, int, int)");
  m.def(FUSED_OPS_STAGE("output_backward", FUSED_OPS_PLAN
                        ", bool gate_normalized, float eps, Tensor packed, Tensor o, "
                        "Tensor out_grad, int first_pair, int count, Tensor(a!) out_proj_grad, "
                        "Tensor(b!) gate_grad, Tensor(c!) normalised, Tensor(d!)? gate_input, "
                        "Tensor(e!) sums, int resident_blocks") " -> ()");
  m.def(FUSED_OPS_STAGE("norm_out_backward", FUSED_OPS_PLAN
                        ", float eps, Tensor packed, Tensor grad, int first_pair, int count, "
                        "Tensor(a!) o, Tensor(b!)? largest") " -> ()");
  m.def(FUSED_OPS_STAGE("split_plane", FUSED_OPS_PLAN
                        ", Tensor plane, Tensor largest, Tensor(a!) hi, Tensor(b!)? lo, "
                        "Tensor(c!) undo") " -> ()");
  m.def(FUSED_OPS_STAGE("contract_backward",
                        FUSED_OPS_PLAN ", Tensor packed, Tensor grad, Tensor grad_undo, Tensor b, "
                                       "bool transposed, Tensor(a!) out") " -> ()");
  m.def(
      "triangular_multiplicative_update_stage_project_backward(Tensor pair, Tensor? "
      "mask, " FUSED_OPS_PLAN
      ", bool outgoing, float eps, Tensor packed, Tensor da, Tensor db, "
      "Tensor? grad_undo, int first_pair, int count, Tensor(a!) grad, Tensor(b!) normalised, "
      "Tensor(c!) sums, int resident_blocks) -> ()");
  m.def(FUSED_OPS_STAGE("norm_in_backward", FUSED_OPS_PLAN
                        ", bool outgoing, bool gate_normalized, float eps, Tensor grad, "
                        "Tensor gate_grad, int first_pair, int count, Tensor(a!) out") " -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fused_ops, CUDA, m) {
  m.impl("triangular_multiplicative_update_stage_forward", TORCH_BOX(&forward));
  m.impl("triangular_multiplicative_update_stage_output_backward", TORCH_BOX(&output_backward));
  m.impl("triangular_multiplicative_update_stage_norm_out_backward", TORCH_BOX(&norm_out_backward));
  m.impl("triangular_multiplicative_update_stage_split_plane", TORCH_BOX(&split_plane));
  m.impl("triangular_multiplicative_update_stage_contract_backward", TORCH_BOX(&contract_backward));
  m.impl("triangular_multiplicative_update_stage_project_backward", TORCH_BOX(&project_backward));
  m.impl("triangular_multiplicative_update_stage_norm_in_backward", TORCH_BOX(&norm_in_backward));
}

}  // namespace fused_ops::triangular_multiplicative_update
