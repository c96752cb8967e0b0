// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/small_sm80.cuh"

#include <utility>

#include "common/launch.h"
#include "triangular_multiplicative_update/small.h"

namespace fused_ops::triangular_multiplicative_update {
namespace {

Source source_of(const Pairs& pair, std::int64_t channels) {
  // A multiple of four as all of them are, whatever their signs.
  return source_of(pair.data, pair.type, channels,
                   pair.batch_stride | pair.i_stride | pair.j_stride);
}

Norm norm_in(const SmallProblem& problem) {
  const Weights& weights = problem.weights;
  return norm_of(weights.norm_in_weight, weights.norm_in_bias, problem.sizes.channels, weights.eps);
}

Norm norm_out(const SmallProblem& problem) {
  const Weights& weights = problem.weights;
  return norm_of(weights.norm_out_weight, weights.norm_out_bias, problem.sizes.hidden, weights.eps);
}

template <int most, bool plain>
void launch_both(const SmallInputParams& input, unsigned input_blocks,
                 const SmallOutputParams& output, unsigned output_blocks, CUstream_st* stream) {
  launch("triangular_multiplicative_update: launching small_input", small_input_kernel<most, plain>,
         input_blocks, kSmallThreads, sizeof(SmallInputShared<most>), stream, input);
  launch_dependent<small_output_kernel<most, plain>>(
      "triangular_multiplicative_update: launching small_output", output_blocks, kSmallThreads,
      sizeof(SmallOutputShared<most>), stream, output);
}

SmallInputParams input_params(const SmallProblem& problem) {
  const Sizes& sizes = problem.sizes;
  const Weights& weights = problem.weights;
  SmallInputParams p;
  const std::int64_t padded = ceil_div(sizes.n, kPlacesOfK) * kPlacesOfK;
  p.places = static_cast<int>(sizes.batch * sizes.n * padded);
  p.n = static_cast<int>(sizes.n);
  p.channels = sizes.channels;
  p.hidden = sizes.hidden;
  p.padded = Divisor(padded);
  p.lines = Divisor(sizes.n);
  p.chunks = Divisor(ceil_div(sizes.hidden, SmallInput::kHidden));
  p.pair = source_of(problem.pair, sizes.channels);
  p.batch_stride = problem.pair.batch_stride;
  p.line_stride = problem.pair.i_stride;
  p.k_stride = problem.pair.j_stride;
  p.mask = problem.mask;
  if (!problem.outgoing) {
    std::swap(p.line_stride, p.k_stride);
    std::swap(p.mask.i_stride, p.mask.j_stride);
  }
  p.norm = norm_in(problem);
  const Linear* linears[4] = {&weights.proj_a, &weights.gate_a, &weights.proj_b, &weights.gate_b};
  for (int m = 0; m < 4; ++m) {
    p.weight[m] = source_of(linears[m]->weight, sizes.channels);
    p.bias[m] = source_of(linears[m]->bias, sizes.hidden);
  }
  p.to[0] = problem.workspace;
  p.to[1] = problem.workspace + small_workspace(sizes) / 2;
  return p;
}

SmallOutputParams output_params(const SmallProblem& problem) {
  const Sizes& sizes = problem.sizes;
  const Weights& weights = problem.weights;
  SmallOutputParams p;
  p.n = static_cast<int>(sizes.n);
  p.fours = static_cast<int>(ceil_div(sizes.n, kPlacesOfK));
  p.channels = sizes.channels;
  p.hidden = sizes.hidden;
  p.gate_normalized = weights.gate_normalized;
  p.tiles = Divisor(ceil_div(sizes.n, SmallOutput::kSide));
  p.chunks = Divisor(ceil_div(sizes.channels, SmallOutput::kChannels));
  while (sizes.hidden > 32 << p.log2_groups) ++p.log2_groups;
  p.pair = source_of(problem.pair, sizes.channels);
  p.batch_stride = problem.pair.batch_stride;
  p.i_stride = problem.pair.i_stride;
  p.j_stride = problem.pair.j_stride;
  p.norm_in = norm_in(problem);
  p.norm_out = norm_out(problem);
  p.gate_weight = source_of(weights.out_gate.weight, sizes.channels);
  p.gate_bias = source_of(weights.out_gate.bias, sizes.channels);
  p.proj_weight = source_of(weights.out_proj.weight, sizes.hidden);
  p.proj_bias = source_of(weights.out_proj.bias, sizes.channels);
  p.a = problem.workspace;
  p.b = problem.workspace + small_workspace(sizes) / 2;
  p.output_type = problem.output_type;
  p.out = problem.out;
  return p;
}

}  // namespace

void small_forward_sm80(const SmallProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  FO_CHECK_RUNTIME(small_fits(sizes),
                   "triangular_multiplicative_update: small_forward must get a small problem");
  if (sizes.batch == 0 || sizes.n == 0 || sizes.channels == 0) return;
  const SmallInputParams in = input_params(problem);
  const SmallOutputParams out = output_params(problem);
  const std::int64_t input_blocks = ceil_div(in.places, SmallInput::kPairs) * in.chunks.divisor;
  const std::int64_t output_blocks =
      sizes.batch * out.tiles.divisor * out.tiles.divisor * out.chunks.divisor;
  const bool plain =
      problem.output_type == DType::kFloat32 &&
      plain_vectors(in.pair, in.norm.weight, in.norm.bias, in.weight[0], in.weight[1], in.weight[2],
                    in.weight[3], out.norm_out.weight, out.norm_out.bias, out.gate_weight,
                    out.proj_weight) &&
      plain_numbers(in.bias[0], in.bias[1], in.bias[2], in.bias[3], out.gate_bias, out.proj_bias);
  const bool narrow = sizes.channels <= 64 && sizes.hidden <= 64;
  const auto run = narrow ? (plain ? launch_both<64, true> : launch_both<64, false>)
                          : (plain ? launch_both<128, true> : launch_both<128, false>);
  run(in, static_cast<unsigned>(input_blocks), out, static_cast<unsigned>(output_blocks), stream);
}

}  // namespace fused_ops::triangular_multiplicative_update
