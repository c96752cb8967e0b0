// SPDX-License-Identifier: Apache-2.0
// The contraction of the triangular multiplicative update, through its launcher, or with a tile and
// stages that the launcher would not choose at so small a size.
#include "emulation/driver.h"
#include "triangular_multiplicative_update/contract_sm80.cu"

namespace {

using emulation::Request;
using namespace fused_ops;
using namespace fused_ops::triangular_multiplicative_update;

// Planes a_hi, a_lo, b_hi, b_lo (channels, batch, n, pitch) in fp16; a_undo, b_undo (channels).
ContractProblem problem(Request& request) {
  ContractProblem p;
  p.channels = static_cast<int>(request.integer("channels"));
  p.sizes.batch = request.integer("batch");
  p.sizes.n = request.integer("n");
  p.sizes.pitch = ceil_div(p.sizes.n, kPlaces) * kPlaces;
  p.product = static_cast<Product>(request.integer("product"));
  p.a.hi = request.input<std::uint16_t>("a_hi");
  p.a.lo = request.input<std::uint16_t>("a_lo");
  p.a.undo = request.input<float>("a_undo");
  p.b.hi = request.input<std::uint16_t>("b_hi");
  p.b.lo = request.input<std::uint16_t>("b_lo");
  p.b.undo = request.input<float>("b_undo");
  p.out = request.output<float>("out", p.channels * p.sizes.pairs());
  return p;
}

const emulation::Kernel contract("contract", [](Request& request) {
  contract_sm80(problem(request), nullptr);
});

template <Layout a_layout, Layout b_layout>
void launch_forced(const ContractProblem& p, std::int64_t tile, int stages) {
  if (tile == kSmallSide) {
    launch_tiles<a_layout, b_layout, kSmallSide, kSmallBlocks>(p, nullptr, stages);
  } else {
    launch_tiles<a_layout, b_layout, kLargeSide, kLargeBlocks>(p, nullptr, stages);
  }
}

const emulation::Kernel forced("forced", [](Request& request) {
  const ContractProblem p = problem(request);
  const std::int64_t tile = request.integer("tile");
  const int stages = static_cast<int>(request.integer("stages"));
  if (p.product == Product::kNT) {
    launch_forced<Layout::kAlong, Layout::kAlong>(p, tile, stages);
  } else if (p.product == Product::kNN) {
    launch_forced<Layout::kAlong, Layout::kAcross>(p, tile, stages);
  } else {
    launch_forced<Layout::kAcross, Layout::kAcross>(p, tile, stages);
  }
});

}  // namespace
