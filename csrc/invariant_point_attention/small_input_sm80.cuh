// SPDX-License-Identifier: Apache-2.0
// The first of two launches for small problems, whose time is latency: LayerNorm and the six
// projections of the nodes by some blocks, the bias from the pair tensor by others.
//
// A block of projections makes 64 columns for 16 nodes. Four lanes share a column: each has a
// quarter of its weights in registers. A warp has eight columns: eight of q, k or v, or two points,
// whose fourth numbers are zeros.
//
// Points are rotated but not moved: the second launch adds differences of two translations, which
// are exact for neighbours however far they are from the origin. So no centre is needed, and no
// residue far away costs the others digits.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/small.cuh"
#include "invariant_point_attention/small.h"

namespace fused_ops::invariant_point_attention {

constexpr int kSmallThreads = 256;
constexpr int kSmallColumns = 64;  // of a block at a time
constexpr int kSmallNodes = 16;    // likewise
constexpr int kSmallPairs = 32;    // of a block of the bias

// Whether there are registers for reading all early and for all products at a time.
template <int most, bool plain>
constexpr bool kSmallEarly = plain && most <= 64;

enum Projection { kQuery, kKey, kValue, kQueryPoints, kKeyPoints, kValuePoints, kProjections };

// What the first launch leaves to the second one.
struct SmallWorkspace {
  float* q = nullptr;         // (node, width), times the scale
  float* k = nullptr;         // (batch, head, dim / 4, N, 4), for lanes that have one key each
  float* q_points = nullptr;  // (node, head, point, 4)
  float* k_points = nullptr;  // (batch, head, point, N, 4)
  float* values = nullptr;    // (node, value_line)
  float* bias = nullptr;      // (batch, head, i, j)
};

struct SmallInputParams {
  int nodes = 0;
  int tiles = 0;       // of kSmallNodes nodes
  int tile_steps = 0;  // blocks that share them
  int project_blocks = 0;
  int channels = 0;
  int width = 0;  // of all heads, filled up
  int head_dim = 0;
  int value_line = 0;
  int query_points = 0;  // of all heads
  int value_points = 0;  // likewise
  float query_scale = 0.0f;
  Divisor n;
  Divisor chunks;  // of kSmallColumns columns
  Divisor octets;  // of columns, of q, k or v
  Divisor dim;     // of a head, filled up
  Source node;
  std::int64_t batch_stride = 0;
  std::int64_t stride = 0;
  bool normed = false;
  Norm norm;
  Source weight[kProjections];
  Source weight_bias[kProjections];
  Source rotations;
  std::int64_t rotations_stride = 0;
  SmallWorkspace to;

  int pairs = 0;
  int heads = 0;
  int pair_channels = 0;
  Source pair;
  std::int64_t pair_batch_stride = 0;
  std::int64_t i_stride = 0;
  std::int64_t j_stride = 0;
  Source pair_weight, pair_bias;
  float bias_scale = 0.0f;
};

template <int most>
struct SmallInputShared {
  float x[kSmallNodes][most];
  float rotation[kSmallNodes][9];
};

// The column of a lane: a row of one of the matrices, or a zero that fills something up.
struct SmallColumn {
  int matrix = 0;
  int index = 0;    // of q, k, v: the column, filled up; of points: the point
  int in_head = 0;  // of q, k, v
  int axis = 0;     // of points, 3: the fourth number
  int line = 0;     // of the matrix
  bool is_point = false;
  bool exists = false;
  bool is_zero = true;
};

__device__ __forceinline__ SmallColumn small_column(const SmallInputParams& p, int octet,
                                                    int lane) {
  SmallColumn c;
  const int octets = static_cast<int>(p.octets.divisor);
  if (octet < 3 * octets) {
    c.matrix = p.octets.divide(octet);
    c.index = (octet - c.matrix * octets) * 8 + lane;
    const int head = p.dim.divide(c.index);
    c.in_head = p.dim.rest(c.index, head);
    c.exists = true;
    c.is_zero = c.in_head >= p.head_dim;
    c.line = c.is_zero ? 0 : head * p.head_dim + c.in_head;
    return c;
  }
  c.is_point = true;
  c.axis = lane < 6 ? lane % 3 : 3;
  int point = 2 * (octet - 3 * octets) + (lane < 6 ? lane / 3 : lane - 6);
  c.exists = point < 2 * p.query_points + p.value_points;
  c.is_zero = !c.exists || c.axis == 3;
  c.matrix = kQueryPoints;
  for (int i = 0; i < 2; ++i) {
    if (point < p.query_points) break;
    point -= p.query_points;
    ++c.matrix;
  }
  c.index = point;
  c.line = c.is_zero ? 0 : 3 * point + c.axis;
  return c;
}

template <int most, bool plain>
__device__ __forceinline__ void small_project(const SmallInputParams& p, int block) {
  auto& shared = shared_memory<SmallInputShared<most>>();
  constexpr int kLanes = kSmallThreads / kSmallNodes;
  constexpr int kFours = most / 64;
  constexpr bool kEarly = kSmallEarly<most, plain>;
  using NodeLine = Line<kLanes, kFours>;
  const int thread = thread_index();
  const int lane = thread % 32;
  const int part = lane / 8;
  const int n = static_cast<int>(p.n.divisor);
  const int first_tile = p.chunks.divide(block);
  const int octet = p.chunks.rest(block, first_tile) * (kSmallColumns / 8) + thread / 32;
  const SmallColumn column = small_column(p, octet, lane % 8);

  uint4 raw[kFours], raw_norm_weight[kFours] = {}, raw_norm_bias[kFours] = {};
  const auto load_nodes = [&](int tile) {
    const int place = min(tile * kSmallNodes + thread / kLanes, p.nodes - 1);
    const int batch = p.n.divide(place);
    NodeLine::template load<plain>(raw, p.node,
                                   batch * p.batch_stride + p.n.rest(place, batch) * p.stride,
                                   thread % kLanes, p.channels);
  };
  load_nodes(first_tile);
  const auto load_norm = [&] {
    NodeLine::template load<plain>(raw_norm_weight, p.norm.weight, 0, thread % kLanes,
                                   p.normed ? p.channels : 0);
    NodeLine::template load<plain>(raw_norm_bias, p.norm.bias, 0, thread % kLanes,
                                   p.norm.bias.data != nullptr ? p.channels : 0);
  };
  if (kEarly) load_norm();
  WeightPart<most, plain> weight;
  weight.load(p.weight[column.matrix], column.line, column.is_zero ? 0 : p.channels, p.channels,
              part);
  const float add =
      column.is_zero ? 0.0f : load_one<plain>(p.weight_bias[column.matrix], column.line);
  if (kEarly) {
    read_now(raw_norm_weight);
    read_now(raw_norm_bias);
  }
#pragma unroll 1
  for (int tile = first_tile; tile < p.tiles; tile += p.tile_steps) {
    float rotation = 0.0f;
    const int turned = tile * kSmallNodes + thread / 9;
    if (thread < 9 * kSmallNodes && turned < p.nodes) {
      const int batch = p.n.divide(turned);
      rotation = load_one<plain>(
          p.rotations, batch * p.rotations_stride + p.n.rest(turned, batch) * 9 + thread % 9);
    }
    NodeLine x;
    x.template take<plain>(raw, p.node.type);
    if (p.normed) {
      x.normalize(thread % kLanes, p.norm);
      if (!kEarly) load_norm();
      x.template scale<plain>(p.norm, raw_norm_weight, raw_norm_bias);
    }
    if (tile != first_tile) __syncthreads();  // the last ones have been read
    x.store(shared.x[thread / kLanes], thread % kLanes);
    if (thread < 9 * kSmallNodes) shared.rotation[thread / 9][thread % 9] = rotation;
    __syncthreads();
    if (tile + p.tile_steps < p.tiles) load_nodes(tile + p.tile_steps);

    constexpr int kTogether = kEarly ? 4 : 1;  // of four nodes
#pragma unroll 1
    for (int first = 0; first < kSmallNodes; first += 4 * kTogether) {
      float result[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        float sum[4] = {};
        weight.template multiply<most>(sum, shared.x[first + 4 * k], p.channels, part);
        result[k] = fold_four<8, 16>(sum, lane) + add;
      }
      if (column.is_point) {  // the same in all lanes
        const int of_point = lane - lane % 8 + (lane % 8 < 6 ? lane % 8 / 3 : lane % 8 - 6) * 3;
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          const float* matrix = shared.rotation[first + 4 * k + part];
          float turned_sum = 0.0f;
#pragma unroll
          for (int c = 0; c < 3; ++c) {
            const float local = __shfl_sync(kWholeWarp, result[k], of_point + c);
            if (column.axis < 3) {
              turned_sum = fmaf(local, matrix[3 * c + min(column.axis, 2)], turned_sum);
            }
          }
          result[k] = turned_sum;
        }
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int place = tile * kSmallNodes + first + 4 * k + part;
        if (place >= p.nodes || !column.exists) continue;
        const int batch = p.n.divide(place);
        const int residue = p.n.rest(place, batch);
        const int index = column.index;
        if (column.matrix == kQuery) {
          p.to.q[place * p.width + index] = result[k] * p.query_scale;
        } else if (column.matrix == kKey) {
          const int in_four = column.in_head % 4;
          p.to.k[batch * n * p.width + (index - in_four) * n + residue * 4 + in_four] = result[k];
        } else if (column.matrix == kValue) {
          p.to.values[place * p.value_line + index] = result[k];
        } else if (column.matrix == kQueryPoints) {
          p.to.q_points[(place * p.query_points + index) * 4 + column.axis] = result[k];
        } else if (column.matrix == kKeyPoints) {
          p.to.k_points[((batch * p.query_points + index) * n + residue) * 4 + column.axis] =
              result[k];
        } else if (column.axis < 3) {
          p.to.values[place * p.value_line + p.width + 3 * index + column.axis] = result[k];
        }
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
  const int line = p.n.divide(pair);  // (batch, i)
  const int j = p.n.rest(pair, line);
  const int batch = p.n.divide(line);
  const int i = p.n.rest(line, batch);
  const int n = static_cast<int>(p.n.divisor);
  uint4 raw[kFours], raw_weight[4][kFours];  // of four heads
  PairLine::template load<plain>(raw, p.pair,
                                 batch * p.pair_batch_stride + i * p.i_stride + j * p.j_stride,
                                 lane, p.pair_channels);
  const auto load_head = [&](uint4(&to)[kFours], int head) {
    PairLine::template load<plain>(to, p.pair_weight, head * p.pair_channels, lane,
                                   head < p.heads ? p.pair_channels : 0);
  };
  const auto load_heads = [&](int first_head) {
#pragma unroll
    for (int h = 0; h < 4; ++h) load_head(raw_weight[h], first_head + h);
  };
  if (kEarly) load_heads(0);
  PairLine x;
  x.template take<plain>(raw, p.pair.type);
#pragma unroll 1
  for (int first_head = 0; first_head < p.heads; first_head += 4) {
    const int head = first_head + lane % 4;
    const float add = head < p.heads ? load_one<plain>(p.pair_bias, head) : 0.0f;
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
    if (lane < 4 && head < p.heads && place < p.pairs) {
      p.to.bias[((batch * p.heads + head) * n + i) * n + j] = p.bias_scale * (bias + add);
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

}  // namespace fused_ops::invariant_point_attention
