// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "common/launch.h"
#include "msa_row_attention/small_attend_sm80.cuh"
#include "msa_row_attention/small_input_sm80.cuh"

namespace fused_ops::msa_row_attention {
namespace {

// Twice as many as an H200 has multiprocessors; further tiles find the weights in registers.
constexpr std::int64_t kProjectBlocks = 264;

// Few queries a block where there are few: that fills the device.
constexpr int kFewQueries = 4, kManyQueries = 8;
constexpr std::int64_t kFewPositions = 1024;

SmallInputParams input_params(const SmallProblem& problem) {
  const PrepareProblem& prepare = problem.prepare;
  const BiasProblem& bias = problem.bias;
  const Sizes& sizes = prepare.sizes;
  SmallInputParams p;
  p.positions = static_cast<int>(sizes.positions());
  p.tiles = static_cast<int>(ceil_div(p.positions, kSmallPositions));
  p.channels = sizes.channels;
  p.width = sizes.width();
  p.head_dim = sizes.head_dim;
  p.query_scale = 1.0f / std::sqrt(static_cast<float>(sizes.head_dim));
  p.n = Divisor(sizes.n);
  p.rows = Divisor(sizes.rows);
  const std::int64_t chunks = ceil_div(4 * p.width, kSmallColumns);
  p.chunks = Divisor(chunks);
  p.octets = Divisor(p.width / 8);
  p.dim = Divisor(sizes.dim);
  p.tile_steps = static_cast<int>(
      std::min<std::int64_t>(p.tiles, std::max<std::int64_t>(kProjectBlocks / chunks, 1)));
  p.project_blocks = static_cast<int>(p.tile_steps * chunks);
  const Msa& msa = prepare.msa;
  // A multiple of four as all of them are, whatever their signs.
  p.msa = source_of(msa.data, msa.type, sizes.channels,
                    msa.group_stride | msa.row_stride | msa.position_stride);
  p.group_stride = msa.group_stride;
  p.row_stride = msa.row_stride;
  p.position_stride = msa.position_stride;
  p.norm = norm_of(prepare.norm_weight, prepare.norm_bias, sizes.channels, prepare.eps);
  const Stored* weights[4] = {&prepare.query, &prepare.key, &prepare.value, &prepare.gate};
  for (int m = 0; m < 4; ++m) p.weight[m] = source_of(*weights[m], sizes.channels);
  p.gate_bias = source_of(prepare.gate_bias, 1);
  p.to = problem.workspace;
  p.bias = p.to + 4 * sizes.positions() * p.width;

  p.pairs = static_cast<int>(sizes.groups * sizes.n * sizes.n);
  p.heads = sizes.heads;
  p.pair_channels = sizes.pair_channels;
  const Pairs& pair = bias.pair;
  p.pair = source_of(pair.data, pair.type, sizes.pair_channels,
                     pair.group_stride | pair.i_stride | pair.j_stride);
  p.pair_group_stride = pair.group_stride;
  p.i_stride = pair.i_stride;
  p.j_stride = pair.j_stride;
  p.normed = bias.norm_weight.data != nullptr;
  p.pair_norm = norm_of(bias.norm_weight, bias.norm_bias, sizes.pair_channels, prepare.eps);
  p.pair_weight = source_of(bias.weight, sizes.pair_channels);
  return p;
}

SmallAttendParams attend_params(const SmallProblem& problem, const SmallInputParams& input,
                                int queries) {
  const PrepareProblem& prepare = problem.prepare;
  const Sizes& sizes = prepare.sizes;
  SmallAttendParams p;
  p.n = static_cast<int>(sizes.n);
  p.heads = sizes.heads;
  p.head_dim = sizes.head_dim;
  p.width = input.width;
  p.model_width = sizes.heads * sizes.head_dim;
  p.channels = sizes.channels;
  p.tiles = Divisor(ceil_div(sizes.n, queries));
  p.rows = input.rows;
  p.dim = input.dim;
  p.mask = prepare.mask;
  const std::int64_t numbers = sizes.positions() * p.width;
  p.query = input.to;
  p.key = p.query + numbers;
  p.value = p.key + numbers;
  p.gate = p.value + numbers;
  p.bias = input.bias;
  p.weight = source_of(prepare.out_proj, p.model_width);
  p.weight_bias = source_of(prepare.out_proj_bias, 1);
  p.type = type_of(prepare.mode);
  p.out = problem.out;
  return p;
}

template <int most, bool plain, int key_lines, int queries>
void launch_attend(const SmallProblem& problem, const SmallInputParams& input,
                   CUstream_st* stream) {
  const SmallAttendParams p = attend_params(problem, input, queries);
  const std::int64_t blocks = problem.prepare.sizes.all_rows() * p.tiles.divisor;
  launch_dependent<small_attend_kernel<most, key_lines, queries, plain>>(
      "msa_row_attention: launching small_attend", static_cast<unsigned>(blocks), kSmallThreads,
      sizeof(SmallAttendShared<most, queries>), stream, p);
}

template <int most, bool plain>
void launch_both(const SmallProblem& problem, const SmallInputParams& input, CUstream_st* stream) {
  const Sizes& sizes = problem.prepare.sizes;
  const std::int64_t blocks = input.project_blocks + ceil_div(input.pairs, kSmallPairs);
  launch("msa_row_attention: launching small_input", small_input_kernel<most, plain>,
         static_cast<unsigned>(blocks), kSmallThreads, sizeof(SmallInputShared<most>), stream,
         input);
  if (sizes.n <= 32 && sizes.positions() <= kFewPositions) {
    launch_attend<most, plain, 1, kFewQueries>(problem, input, stream);
  } else {
    launch_attend<most, plain, kSmallMostKeys / 32, kManyQueries>(problem, input, stream);
  }
}

template <int most>
void choose_plain(const SmallProblem& problem, CUstream_st* stream) {
  const SmallInputParams p = input_params(problem);
  const PrepareProblem& prepare = problem.prepare;
  bool plain = type_of(prepare.mode) == DType::kFloat32 &&
               plain_vectors(p.msa, p.pair, p.norm.weight, p.norm.bias, p.weight[0], p.weight[1],
                             p.weight[2], p.weight[3], p.pair_weight,
                             source_of(prepare.out_proj, p.heads * p.head_dim)) &&
               plain_numbers(p.gate_bias, source_of(prepare.out_proj_bias, 1));
  if (p.normed) plain = plain && plain_vectors(p.pair_norm.weight, p.pair_norm.bias);
  plain ? launch_both<most, true>(problem, p, stream)
        : launch_both<most, false>(problem, p, stream);
}

}  // namespace

void small_forward_sm80(const SmallProblem& problem, CUstream_st* stream) {
  const Sizes& sizes = problem.prepare.sizes;
  FO_CHECK_RUNTIME(small_fits(sizes), "msa_row_attention: small_forward must get a small problem");
  if (sizes.positions() == 0 || sizes.channels == 0) return;
  const int line = small_line(sizes);
  const auto run = line == 64    ? choose_plain<64>
                   : line == 128 ? choose_plain<128>
                                 : choose_plain<256>;
  run(problem, stream);
}

}  // namespace fused_ops::msa_row_attention
