// SPDX-License-Identifier: Apache-2.0
// The first of two launches for small problems, whose time is latency: LayerNorm and the four
// projections of the MSA by some blocks, the bias from the pair tensor by others.
//
// A block of projections makes 64 columns for 16 positions. Four lanes share a column: each has a
// quarter of its weights in registers, read as they are stored, before and while the MSA comes. So
// shared memory holds the normalised MSA alone, and a block reads the fewest bytes: 132 such blocks
// are a multiprocessor's worth of work at the sizes that matter.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/small.cuh"
#include "msa_row_attention/small.h"

namespace fused_ops::msa_row_attention {

constexpr int kSmallThreads = 256;
constexpr int kSmallColumns = 64;    // of a block at a time
constexpr int kSmallPositions = 16;  // likewise
constexpr int kSmallPairs = 32;      // of a block of the bias

// Whether there are registers for reading all early and for all products at a time.
template <int most, bool plain>
constexpr bool kSmallEarly = plain && most <= 64;

struct SmallInputParams {
  int positions = 0;
  int tiles = 0;       // of kSmallPositions positions
  int tile_steps = 0;  // blocks that share them
  int project_blocks = 0;
  int channels = 0;
  int width = 0;  // of all heads, filled up
  int head_dim = 0;
  float query_scale = 0.0f;
  Divisor n, rows;  // rows of a group
  Divisor chunks;   // of kSmallColumns columns
  Divisor octets;   // of columns, of one matrix
  Divisor dim;      // of a head, filled up
  Source msa;
  std::int64_t group_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t position_stride = 0;
  Norm norm;
  Source weight[4];  // query, key, value, gate
  Source gate_bias;
  // Query times 1 / sqrt(d), key, value and the gate as a factor, one after the other: (positions,
  // width), but the key (row, head, dim / 4, N, 4), for lanes that have one each.
  float* to = nullptr;

  int pairs = 0;
  int heads = 0;
  int pair_channels = 0;
  Source pair;
  std::int64_t pair_group_stride = 0;
  std::int64_t i_stride = 0;
  std::int64_t j_stride = 0;
  bool normed = false;
  Norm pair_norm;
  Source pair_weight;
  float* bias = nullptr;  // (group, head, i, j)
};

template <int most>
struct SmallInputShared {
  float x[kSmallPositions][most];
};

template <int most, bool plain>
__device__ __forceinline__ void small_project(const SmallInputParams& p, int block) {
  auto& x_lines = shared_memory<SmallInputShared<most>>().x;
  using MsaLine = Line<kSmallThreads / kSmallPositions, most / 64>;
  constexpr int kLanes = kSmallThreads / kSmallPositions;
  constexpr int kFours = most / 64;
  constexpr bool kEarly = kSmallEarly<most, plain>;
  const int thread = thread_index();
  const int lane = thread % 32;
  const int part = lane / 8;
  const int first_tile = p.chunks.divide(block);
  // A warp has eight columns: of one head of one matrix, for these have multiples of eight.
  const int octet = p.chunks.rest(block, first_tile) * (kSmallColumns / 8) + thread / 32;
  const int matrix = min(p.octets.divide(octet), 3);
  const int column = (octet - matrix * static_cast<int>(p.octets.divisor)) * 8 + lane % 8;
  const int head = p.dim.divide(column);
  const int in_head = p.dim.rest(column, head);
  const bool exists = column < p.width;
  const bool is_zero = !exists || in_head >= p.head_dim;
  const int line = is_zero ? 0 : head * p.head_dim + in_head;
  float* to = p.to + matrix * p.positions * p.width;

  // Everything from memory at once; places beyond the last read that one.
  uint4 raw[kFours], raw_norm_weight[kFours], raw_norm_bias[kFours];
  const auto load_msa = [&](int tile) {
    const int place = min(tile * kSmallPositions + thread / kLanes, p.positions - 1);
    const int row = p.n.divide(place);
    const int group = p.rows.divide(row);
    MsaLine::template load<plain>(raw, p.msa,
                                  group * p.group_stride + p.rows.rest(row, group) * p.row_stride +
                                      p.n.rest(place, row) * p.position_stride,
                                  thread % kLanes, p.channels);
  };
  load_msa(first_tile);
  const auto load_norm = [&] {
    MsaLine::template load<plain>(raw_norm_weight, p.norm.weight, 0, thread % kLanes, p.channels);
    MsaLine::template load<plain>(raw_norm_bias, p.norm.bias, 0, thread % kLanes, p.channels);
  };
  if (kEarly) load_norm();
  WeightPart<most, plain> weight;
  weight.load(p.weight[matrix], line, is_zero ? 0 : p.channels, p.channels, part);
  const float add = matrix == 3 && !is_zero ? load_one<plain>(p.gate_bias, line) : 0.0f;
  if (kEarly) {
    read_now(raw_norm_weight);
    read_now(raw_norm_bias);
  }
#pragma unroll 1
  for (int tile = first_tile; tile < p.tiles; tile += p.tile_steps) {
    MsaLine x;
    x.template take<plain>(raw, p.msa.type);
    x.normalize(thread % kLanes, p.norm);
    if (!kEarly) load_norm();
    x.template scale<plain>(p.norm, raw_norm_weight, raw_norm_bias);
    if (tile != first_tile) __syncthreads();  // the last ones have been read
    x.store(x_lines[thread / kLanes], thread % kLanes);
    __syncthreads();
    if (tile + p.tile_steps < p.tiles) load_msa(tile + p.tile_steps);

    constexpr int kTogether = kEarly ? 4 : 1;  // of four positions
#pragma unroll 1
    for (int first = 0; first < kSmallPositions; first += 4 * kTogether) {
      float result[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        float sum[4] = {};
        weight.template multiply<most>(sum, x_lines[first + 4 * k], p.channels, part);
        result[k] = fold_four<8, 16>(sum, lane);
      }
      if (matrix == 3) {
#pragma unroll
        for (int k = 0; k < kTogether; ++k) result[k] = sigmoid(result[k] + add);
      }
      // Lanes hold 4 neighbouring positions and 8 columns: whole sectors of 32 bytes.
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int place = tile * kSmallPositions + first + 4 * k + part;
        const int n = static_cast<int>(p.n.divisor);
        const int row = p.n.divide(place);
        const int at = matrix == 1 ? row * n * p.width + (column - in_head % 4) * n +
                                         p.n.rest(place, row) * 4 + in_head % 4
                                   : place * p.width + column;
        if (place < p.positions && exists)
          to[at] = matrix == 0 ? result[k] * p.query_scale : result[k];
      }
    }
  }
}

template <int most, bool plain>
__device__ __forceinline__ void small_bias(const SmallInputParams& p, int block) {
  constexpr int kLanes = kSmallThreads / kSmallPairs;
  constexpr int kFours = most / 4 / kLanes;
  constexpr bool kEarly = kSmallEarly<most, plain>;
  using PairLine = Line<kLanes, kFours>;
  const int thread = thread_index();
  const int lane = thread % kLanes;
  const int place = block * kSmallPairs + thread / kLanes;
  const int pair = min(place, p.pairs - 1);
  const int line = p.n.divide(pair);  // (group, i)
  const int j = p.n.rest(pair, line);
  const int group = p.n.divide(line);
  const int i = p.n.rest(line, group);
  uint4 raw[kFours], raw_norm_weight[kFours], raw_norm_bias[kFours];
  uint4 raw_weight[4][kFours];  // of four heads
  PairLine::template load<plain>(raw, p.pair,
                                 group * p.pair_group_stride + i * p.i_stride + j * p.j_stride,
                                 lane, p.pair_channels);
  const auto load_head = [&](uint4(&to)[kFours], int head) {
    PairLine::template load<plain>(to, p.pair_weight, head * p.pair_channels, lane,
                                   head < p.heads ? p.pair_channels : 0);
  };
  const auto load_heads = [&](int first_head) {
#pragma unroll
    for (int h = 0; h < 4; ++h) load_head(raw_weight[h], first_head + h);
  };
  const auto load_norm = [&] {
    const int channels = p.normed ? p.pair_channels : 0;
    PairLine::template load<plain>(raw_norm_weight, p.pair_norm.weight, 0, lane, channels);
    PairLine::template load<plain>(raw_norm_bias, p.pair_norm.bias, 0, lane, channels);
  };
  if (kEarly) {
    load_norm();
    load_heads(0);
    read_now(raw_norm_weight);
    read_now(raw_norm_bias);
  }
  PairLine x;
  x.template take<plain>(raw, p.pair.type);
  if (p.normed) {
    x.normalize(lane, p.pair_norm);
    if (!kEarly) load_norm();
    x.template scale<plain>(p.pair_norm, raw_norm_weight, raw_norm_bias);
  }
  const int n = static_cast<int>(p.n.divisor);
#pragma unroll 1
  for (int first_head = 0; first_head < p.heads; first_head += 4) {
    float sum[4] = {};
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      if (!kEarly) load_head(raw_weight[h], first_head + h);
#pragma unroll
      for (int f = 0; f < kFours; ++f) {
        float4 w = converted<plain>(raw_weight[h][f], p.pair_weight.type);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[h] = fmaf(element(x.value[f], e), element(w, e), sum[h]);
      }
    }
    if (kEarly && first_head + 4 < p.heads) load_heads(first_head + 4);
    float bias = fold_four<1, 2>(sum, lane);
    bias += __shfl_xor_sync(kWholeWarp, bias, 4);
    const int head = first_head + lane % 4;
    if (lane < 4 && head < p.heads && place < p.pairs) {
      p.bias[((group * p.heads + head) * n + i) * n + j] = bias;
    }
  }
}

// The blocks of projections come first: they have more to do.
template <int most, bool plain>
__global__ void __launch_bounds__(kSmallThreads, most > 128 ? 1 : 2)
    small_input_kernel(const __grid_constant__ SmallInputParams p) {
  sm80::griddepcontrol_launch_dependents();
  const int block = static_cast<int>(blockIdx.x);
  if (block < p.project_blocks) {
    small_project<most, plain>(p, block);
  } else {
    small_bias<most, plain>(p, block - p.project_blocks);
  }
}

}  // namespace fused_ops::msa_row_attention
