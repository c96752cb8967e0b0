// SPDX-License-Identifier: Apache-2.0
// The backward kernels of triangular_multiplicative_update around its LayerNorms, through their
// launchers.
#include "emulation/driver.h"
#include "triangular_multiplicative_update/norm_backward_sm80.cu"
#include "triangular_multiplicative_update/split_plane_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::DType;
using namespace fused_ops::triangular_multiplicative_update;

Sizes sizes(Request& request) {
  Sizes s;
  s.batch = request.integer("batch");
  s.n = request.integer("n");
  s.pitch = (s.n + kPlaces - 1) / kPlaces * kPlaces;
  s.channels = static_cast<int>(request.integer("channels", 0));
  s.hidden = static_cast<int>(request.integer("hidden", 0));
  return s;
}

DType type(Request& request, const char* name) {
  return static_cast<DType>(request.integer(name));
}

// An input that the kernel changes, as an output.
template <class T>
T* changed(Request& request, const char* name) {
  const std::int64_t size = request.size<T>(name);
  T* copy = request.output<T>(name, size);
  std::memcpy(copy, request.input<T>(name), static_cast<std::size_t>(size) * sizeof(T));
  return copy;
}

const emulation::Kernel norm_out("norm_out", [](Request& request) {
  NormOutBackwardProblem p;
  p.sizes = sizes(request);
  p.mode = static_cast<Mode>(request.integer("mode"));
  p.eps = 1e-5f;
  p.first_pair = request.integer("first_pair");
  p.count = request.integer("count");
  p.grad = request.input<char>("grad") + request.integer("grad_offset", 0);
  if (request.integer("with_undo") != 0) p.o_undo = request.input<float>("o_undo");
  p.o = changed<char>(request, "o");
  if (request.integer("with_largest") != 0) p.largest = changed<unsigned>(request, "largest");
  norm_out_backward_sm80(p, nullptr);
});

const emulation::Kernel split("split", [](Request& request) {
  SplitPlaneProblem p;
  p.sizes = sizes(request);
  const std::int64_t size = p.sizes.hidden * p.sizes.pairs();
  p.plane = request.input<float>("plane");
  p.largest = request.input<unsigned>("largest");
  p.hi = request.output<std::uint16_t>("hi", size);
  if (request.integer("with_lo") != 0) p.lo = request.output<std::uint16_t>("lo", size);
  p.undo = request.output<float>("undo", p.sizes.hidden);
  split_plane_sm80(p, nullptr);
});

const emulation::Kernel norm_in("norm_in", [](Request& request) {
  NormInBackwardProblem p;
  p.sizes = sizes(request);
  p.outgoing = request.integer("outgoing") != 0;
  p.gate_normalized = request.integer("gate_normalized") != 0;
  p.eps = 1e-5f;
  p.first_pair = request.integer("first_pair");
  p.count = request.integer("count");
  p.pair.type = type(request, "pair_type");
  p.pair.data = request.input<char>("pair") + request.integer("pair_offset");
  p.pair.batch_stride = request.integer("batch_stride");
  p.pair.i_stride = request.integer("i_stride");
  p.pair.j_stride = request.integer("j_stride");
  p.grad_type = type(request, "grad_type");
  p.grad = request.input<char>("grad");
  if (request.integer("with_gate") != 0) p.gate_grad = request.input<char>("gate_grad");
  p.output_type = type(request, "output_type");
  p.out = changed<char>(request, "out");  // what other pairs hold must stay
  norm_in_backward_sm80(p, nullptr);
});

}  // namespace
