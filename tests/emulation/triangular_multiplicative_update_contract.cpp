// SPDX-License-Identifier: Apache-2.0
// The contraction of the triangular multiplicative update, through its launcher, or with a tile and
// stages that the launcher would not choose at so small a size.
#include "emulation/driver.h"
#include "triangular_multiplicative_update/contract_sm80.cu"
#include "triangular_multiplicative_update/contract_sm90a.cu"

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

const emulation::Kernel hopper("hopper",
                               [](Request& request) { contract_sm90a(problem(request), nullptr); });

// Tiles of 64 or 128 rows are those of the kernel for 8.0, with so many stages; else of so many
// columns of the one for Hopper.
template <Layout a_layout, Layout b_layout>
void launch_forced(Request& request) {
  const ContractProblem p = problem(request);
  if (request.integer("columns", 0) == kWide) {
    launch_columns<a_layout, b_layout, kWide>(p, nullptr);
  } else if (request.integer("columns", 0) == kNarrow) {
    launch_columns<a_layout, b_layout, kNarrow>(p, nullptr);
  } else if (request.integer("rows") == kSmallSide) {
    const int stages = static_cast<int>(request.integer("stages"));
    launch_tiles<a_layout, b_layout, kSmallSide, kSmallBlocks>(p, nullptr, stages);
  } else {
    const int stages = static_cast<int>(request.integer("stages"));
    launch_tiles<a_layout, b_layout, kLargeSide, kLargeBlocks>(p, nullptr, stages);
  }
}

const emulation::Kernel forced("forced", [](Request& request) {
  const auto product = static_cast<Product>(request.integer("product"));
  if (product == Product::kNT) {
    launch_forced<Layout::kAlong, Layout::kAlong>(request);
  } else if (product == Product::kNN) {
    launch_forced<Layout::kAlong, Layout::kAcross>(request);
  } else {
    launch_forced<Layout::kAcross, Layout::kAcross>(request);
  }
});

}  // namespace
