// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "common/launch.h"
#include "invariant_point_attention/small_attend_sm80.cuh"
#include "invariant_point_attention/small_input_sm80.cuh"

namespace fused_ops::invariant_point_attention {
namespace {

// Twice as many as an H200 has multiprocessors; further tiles find the weights in registers.
constexpr std::int64_t kProjectBlocks = 264;

// Few queries a block where there are few: that fills the device.
constexpr int kFewQueries = 4, kManyQueries = 8;
constexpr int kFewFeatures = 384;
constexpr std::int64_t kFewNodes = 1024;

SmallWorkspace parts_of(float* workspace, const Sizes& sizes) {
  const std::int64_t nodes = sizes.nodes();
  const std::int64_t scalars = nodes * sizes.width();
  const std::int64_t points = 4 * nodes * sizes.heads * sizes.query_points;
  SmallWorkspace to;
  to.q = workspace;
  to.k = to.q + scalars;
  to.q_points = to.k + scalars;
  to.k_points = to.q_points + points;
  to.values = to.k_points + points;
  to.bias = to.values + nodes * small_value_line(sizes);
  return to;
}

SmallInputParams input_params(const SmallProblem& problem) {
  const PrepareProblem& prepare = problem.prepare;
  const Sizes& sizes = prepare.sizes;
  SmallInputParams p;
  p.nodes = static_cast<int>(sizes.nodes());
  p.tiles = static_cast<int>(ceil_div(p.nodes, kSmallNodes));
  p.channels = sizes.channels;
  p.width = sizes.width();
  p.head_dim = sizes.head_dim;
  p.value_line = small_value_line(sizes);
  p.query_points = sizes.heads * sizes.query_points;
  p.value_points = sizes.heads * sizes.value_points;
  p.query_scale = problem.scalar_scale;
  p.n = Divisor(sizes.n);
  p.octets = Divisor(p.width / 8);
  p.dim = Divisor(sizes.dim);
  const std::int64_t octets = 3 * (p.width / 8) + ceil_div(2 * p.query_points + p.value_points, 2);
  const std::int64_t chunks = ceil_div(octets, kSmallColumns / 8);
  p.chunks = Divisor(chunks);
  p.tile_steps = static_cast<int>(
      std::min<std::int64_t>(p.tiles, std::max<std::int64_t>(kProjectBlocks / chunks, 1)));
  p.project_blocks = static_cast<int>(p.tile_steps * chunks);
  const Nodes& node = prepare.node;
  // A multiple of four as all of them are, whatever their signs.
  p.node = source_of(node.data, node.type, sizes.channels, node.batch_stride | node.stride);
  p.batch_stride = node.batch_stride;
  p.stride = node.stride;
  p.normed = prepare.norm_weight.data != nullptr;
  p.norm = norm_of(prepare.norm_weight, prepare.norm_bias, sizes.channels, prepare.eps);
  const Linear* linears[kProjections] = {&prepare.q,        &prepare.k,        &prepare.v,
                                         &prepare.q_points, &prepare.k_points, &prepare.v_points};
  for (int m = 0; m < kProjections; ++m) {
    p.weight[m] = source_of(linears[m]->weight, sizes.channels);
    p.weight_bias[m] = source_of(linears[m]->bias, 1);
  }
  p.rotations = source_of(prepare.frames.rotations, 1);
  p.rotations_stride = prepare.frames.rotations_stride;
  p.to = parts_of(problem.workspace, sizes);

  p.pairs = static_cast<int>(sizes.nodes() * sizes.n);
  p.heads = sizes.heads;
  p.pair_channels = sizes.pair_channels;
  const Pairs& pair = problem.pair;
  p.pair = source_of(pair.data, pair.type, sizes.pair_channels,
                     pair.batch_stride | pair.i_stride | pair.j_stride);
  p.pair_batch_stride = pair.batch_stride;
  p.i_stride = pair.i_stride;
  p.j_stride = pair.j_stride;
  p.pair_weight = source_of(problem.bias.weight, sizes.pair_channels);
  p.pair_bias = source_of(problem.bias.bias, 1);
  p.bias_scale = problem.bias_scale;
  return p;
}

SmallAttendParams attend_params(const SmallProblem& problem, int queries) {
  const PrepareProblem& prepare = problem.prepare;
  const Sizes& sizes = prepare.sizes;
  SmallAttendParams p;
  p.n = static_cast<int>(sizes.n);
  p.heads = sizes.heads;
  p.head_dim = sizes.head_dim;
  p.dim = sizes.dim;
  p.width = sizes.width();
  p.channels = sizes.channels;
  p.value_line = small_value_line(sizes);
  p.query_points = sizes.query_points;
  p.value_points = sizes.value_points;
  p.value_channels = sizes.value_channels;
  p.features = sizes.features_filled();
  p.norms = sizes.norms;
  p.norm_eps = problem.norm_eps;
  p.point_scale = problem.point_scale;
  p.tiles = Divisor(ceil_div(sizes.n, queries));
  p.of_dim = Divisor(sizes.dim);
  p.of_value_numbers = Divisor(std::max(sizes.value_numbers(), 1));
  p.mask = prepare.mask;
  p.translations = source_of(prepare.frames.translations, 1);
  p.translations_stride = prepare.frames.translations_stride;
  p.rotations = source_of(prepare.frames.rotations, 1);
  p.rotations_stride = prepare.frames.rotations_stride;
  p.head_weights = source_of(problem.head_weights, 1);
  const Pairs& pair = problem.pair_values;
  p.pair_values = source_of(pair.data, pair.type, sizes.value_channels,
                            pair.batch_stride | pair.i_stride | pair.j_stride);
  p.pair_batch_stride = pair.batch_stride;
  p.i_stride = pair.i_stride;
  p.j_stride = pair.j_stride;
  p.from = parts_of(problem.workspace, sizes);
  p.weight = source_of(prepare.out.weight, p.features);
  p.weight_bias = source_of(prepare.out.bias, 1);
  p.type = type_of(prepare.mode);
  p.out = problem.out;
  return p;
}

template <int key_lines, int queries, int features, bool plain>
void launch_attend(const SmallProblem& problem, CUstream_st* stream) {
  const SmallAttendParams p = attend_params(problem, queries);
  const std::int64_t blocks = problem.prepare.sizes.batch * p.tiles.divisor;
  launch_dependent<small_attend_kernel<key_lines, queries, features, plain>>(
      "invariant_point_attention: launching small_attend", static_cast<unsigned>(blocks),
      kSmallThreads, sizeof(SmallAttendShared<key_lines, queries, features>), stream, p);
}

template <int most, bool plain>
void launch_both(const SmallProblem& problem, const SmallInputParams& input, CUstream_st* stream) {
  const Sizes& sizes = problem.prepare.sizes;
  const std::int64_t blocks = input.project_blocks + ceil_div(input.pairs, kSmallPairs);
  launch("invariant_point_attention: launching small_input", small_input_kernel<most, plain>,
         static_cast<unsigned>(blocks), kSmallThreads, sizeof(SmallInputShared<most>), stream,
         input);
  if (sizes.n <= 32 && sizes.nodes() <= kFewNodes && sizes.features_filled() <= kFewFeatures) {
    launch_attend<1, kFewQueries, kFewFeatures, plain>(problem, stream);
  } else {
    launch_attend<kSmallMostKeys / 32, kManyQueries, kSmallMostFeatures, plain>(problem, stream);
  }
}

bool all_plain(const SmallProblem& problem, const SmallInputParams& p) {
  if (type_of(problem.prepare.mode) != DType::kFloat32) return false;
  const SmallAttendParams a = attend_params(problem, kFewQueries);
  bool plain =
      plain_vectors(p.node, p.pair, p.pair_weight, a.weight) &&
      plain_numbers(p.pair_bias, p.rotations, a.translations, a.head_weights, a.weight_bias);
  for (int m = 0; m < kProjections; ++m) {
    plain = plain && plain_vectors(p.weight[m]) && plain_numbers(p.weight_bias[m]);
  }
  if (p.normed) plain = plain && plain_vectors(p.norm.weight, p.norm.bias);
  if (a.value_channels > 0) plain = plain && plain_vectors(a.pair_values);
  return plain;
}

template <int most>
void choose_plain(const SmallProblem& problem, CUstream_st* stream) {
  const SmallInputParams p = input_params(problem);
  all_plain(problem, p) ? launch_both<most, true>(problem, p, stream)
                        : launch_both<most, false>(problem, p, stream);
}

}  // namespace

void small_forward_sm80(const SmallProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.prepare.sizes;
  FO_CHECK_RUNTIME(small_fits(sizes),
                   "invariant_point_attention: small_forward must get a small problem");
  if (sizes.nodes() == 0 || sizes.channels == 0) return;
  const int line = small_line(sizes);
  const auto run = line == 64    ? choose_plain<64>
                   : line == 128 ? choose_plain<128>
                                 : choose_plain<256>;
  run(problem, stream);
}

}  // namespace fused_ops::invariant_point_attention
