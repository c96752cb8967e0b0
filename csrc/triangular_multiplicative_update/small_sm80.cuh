// SPDX-License-Identifier: Apache-2.0
// The whole op in two launches, for problems whose time is latency. The first makes a and b from
// the pair representation; the second contracts them, normalises, projects and gates.
//
// Each block reads what it needs of the weights as they are stored, all at once and as early as it
// can. What the second launch does before it needs a and b, it does while the first one runs.
#pragma once

#include <cstdint>

#include "triangular_multiplicative_update/small_tile_sm80.cuh"

namespace fused_ops::triangular_multiplicative_update {

// Input: pair -> a, b ----------------------------------------------------------------------------
// A block makes kHidden channels of both a and b for kPairs pairs. Together these read the fewest
// bytes that 256 threads with eight sums each can do with.
struct SmallInput {
  static constexpr int kPairs = 32;
  static constexpr int kHidden = 16;
};

// a and b are (batch, line, k / 4, hidden, k % 4), with lines padded to a multiple of kPlacesOfK by
// zeros: so a thread that owns a hidden channel reads four k at once, and a warp whole cache lines.
constexpr int kPlacesOfK = kSmallPlaces;
static_assert(kPlacesOfK == 4);

struct SmallInputParams {
  int places = 0;  // (batch, line, k), with the padding
  int n = 0;
  int channels = 0;
  int hidden = 0;
  Divisor padded;  // length of a line
  Divisor lines;   // n
  Divisor chunks;  // of kHidden channels
  Source pair;
  std::int64_t batch_stride = 0;
  std::int64_t line_stride = 0;
  std::int64_t k_stride = 0;
  Mask mask;  // with the strides of line and k as those of i and j
  Norm norm;
  Source weight[4];  // proj_a, gate_a, proj_b, gate_b
  Source bias[4];
  float* to[2] = {};  // a, b
};

template <int most>
struct SmallInputShared {
  float weight[4 * SmallInput::kHidden][kPitch<most>];
  float x[SmallInput::kPairs][kPitch<most>];
  float mask[SmallInput::kPairs];
  bool padding[SmallInput::kPairs];
};

template <int most, bool plain>
__global__ void __launch_bounds__(kSmallThreads, 2)
    small_input_kernel(const __grid_constant__ SmallInputParams p) {
  sm80::griddepcontrol_launch_dependents();
  constexpr int kHidden = SmallInput::kHidden;
  auto& shared = shared_memory<SmallInputShared<most>>();
  const int thread = thread_index();
  const int block = static_cast<int>(blockIdx.x);
  const int tile = p.chunks.divide(block);
  const int first_hidden = p.chunks.rest(block, tile) * kHidden;

  // Everything from memory at once; places without a pair read another one.
  constexpr int kLanes = kSmallThreads / SmallInput::kPairs;
  constexpr int kFours = most / 4 / kLanes;
  using PairLine = Line<kLanes, kFours>;
  const int lane = thread % kLanes;
  const int place = min(tile * SmallInput::kPairs + thread / kLanes, p.places - 1);
  const int row = p.padded.divide(place);
  const int batch = p.lines.divide(row);
  const int line = p.lines.rest(row, batch);
  const int place_k = p.padded.rest(place, row);
  const int k = min(place_k, p.n - 1);
  uint4 raw_pair[kFours];
  uint4 raw_norm_weight[kFours];
  uint4 raw_norm_bias[kFours];
  PairLine::template load<plain>(raw_pair, p.pair,
                                 batch * p.batch_stride + line * p.line_stride + k * p.k_stride,
                                 lane, p.channels);
  WeightTile<most, kHidden, plain> raw_weight[4];
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    raw_weight[m].load(p.weight[m], first_hidden, p.hidden, p.channels, thread);
  }
  PairLine::template load<plain>(raw_norm_weight, p.norm.weight, 0, lane, p.channels);
  PairLine::template load<plain>(raw_norm_bias, p.norm.bias, 0, lane, p.channels);

  // The threads of a warp make 16 pairs and 8 channels of one of a and b: 4 pairs, 1 channel each.
  const int warp = thread / 32;
  const int side = warp / 4;
  const int own_pair = warp % 2 * 16 + thread % 32 / 8;
  const int own_row = warp / 2 % 2 * 8 + thread % 8;
  const int h = first_hidden + own_row;
  float bias[2] = {};
  if (h < p.hidden) {
    bias[0] = load_one<plain>(p.bias[2 * side], h);
    bias[1] = load_one<plain>(p.bias[2 * side + 1], h);
  }
  float mask = 1.0f;
  if (lane == 0 && p.mask.data != nullptr) {
    mask = load_mask(p.mask,
                     batch * p.mask.batch_stride + line * p.mask.i_stride + k * p.mask.j_stride);
  }

  PairLine x;
  x.template take<plain>(raw_pair, p.pair.type);
  x.normalize(lane, p.norm);
  x.template scale<plain>(p.norm, raw_norm_weight, raw_norm_bias);
  x.store(shared.x[thread / kLanes], lane);
  if (lane == 0) {
    shared.mask[thread / kLanes] = mask;
    shared.padding[thread / kLanes] = place_k >= p.n;
  }
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    raw_weight[m].store(&shared.weight[m * kHidden], p.weight[m].type, thread);
  }
  __syncthreads();

  float sum[4][2] = {};  // of pair and projection, gate
  multiply<most, kHidden>(sum, shared.x[own_pair], shared.weight[side * 2 * kHidden + own_row],
                          p.channels);
  // Lanes of a warp hold 4 neighbouring k and 8 neighbouring channels: 128 bytes in all.
  static_assert(kPairStep == kPlacesOfK);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int pair = own_pair + e * kPairStep;
    const int to = tile * SmallInput::kPairs + pair;
    const float value = (sum[e][0] + bias[0]) * sigmoid(sum[e][1] + bias[1]) * shared.mask[pair];
    if (to >= p.places || h >= p.hidden) continue;
    const std::int64_t index =
        (static_cast<std::int64_t>(to / kPlacesOfK) * p.hidden + h) * kPlacesOfK + to % kPlacesOfK;
    p.to[side][index] = shared.padding[pair] ? 0.0f : value;
  }
}

// Output: a, b, pair -> out ----------------------------------------------------------------------
// A block makes kChannels channels of kSide x kSide pairs (i, j), for which it reads kSide lines of
// a and of b.
struct SmallOutput {
  static constexpr int kSide = 4;
  static constexpr int kPairs = kSide * kSide;
  static constexpr int kChannels = 64;
};

struct SmallOutputParams {
  int n = 0;
  int fours = 0;  // of k
  int channels = 0;
  int hidden = 0;
  bool gate_normalized = false;
  Divisor tiles;        // of a side
  Divisor chunks;       // of kChannels channels
  int log2_groups = 0;  // of 32 hidden channels, rounded up to a power of two
  Source pair;
  std::int64_t batch_stride = 0;
  std::int64_t i_stride = 0;
  std::int64_t j_stride = 0;
  Norm norm_in;
  Norm norm_out;
  Source gate_weight, gate_bias;
  Source proj_weight, proj_bias;
  const float* a = nullptr;
  const float* b = nullptr;
  DType output_type = DType::kFloat32;
  void* out = nullptr;
};

template <int most>
struct SmallOutputShared {
  // The warps' sums over k: (part of k, pair, hidden in whole groups). 256 threads have 16 each.
  static constexpr int kPartial = kSmallThreads * SmallOutput::kPairs;
  union {
    float gate_weight[SmallOutput::kChannels][kPitch<most>];
    float partial[kPartial];
  };
  float proj_weight[SmallOutput::kChannels][kPitch<most>];
  float x[SmallOutput::kPairs][kPitch<most>];  // what the gate reads, then the normalised o
  float norm_weight[most];                     // of the LayerNorm of o
  float norm_bias[most];
};

// One thread's channel of o for all pairs of the tile, summed over a part of k: every `parts`th
// four of it.
struct SmallContraction {
  static constexpr int kSide = SmallOutput::kSide;

  // In fours: the lines of a and b, from this channel on. small_fits() keeps them far below 2^31.
  int a_line[kSide];
  int b_line[kSide];
  float sum[kSide][kSide] = {};

  __device__ __forceinline__ SmallContraction(const SmallOutputParams& p, int batch, int i, int j,
                                              int h) {
    const int line = p.fours * p.hidden;
    const int first = batch * p.n * line + h;
#pragma unroll
    for (int e = 0; e < kSide; ++e) {  // lines beyond the last are read as the last one
      a_line[e] = first + min(i + e, p.n - 1) * line;
      b_line[e] = first + min(j + e, p.n - 1) * line;
    }
  }

  __device__ __forceinline__ void run(const SmallOutputParams& p, int part, int parts) {
    const auto* a = reinterpret_cast<const float4*>(p.a);
    const auto* b = reinterpret_cast<const float4*>(p.b);
#pragma unroll 1
    for (int four = part; four < p.fours; four += parts) {
      float4 left[kSide];
      float4 right[kSide];
#pragma unroll
      for (int e = 0; e < kSide; ++e) {  // from L2: this kernel may have started before they came
        left[e] = __ldcg(a + a_line[e] + four * p.hidden);
        right[e] = __ldcg(b + b_line[e] + four * p.hidden);
      }
      __syncwarp();  // else the compiler puts off some of the reads until others have come
#pragma unroll
      for (int u = 0; u < kPlacesOfK; ++u) {
#pragma unroll
        for (int e = 0; e < kSide; ++e) {
#pragma unroll
          for (int f = 0; f < kSide; ++f) {
            sum[e][f] = fmaf(element(left[e], u), element(right[f], u), sum[e][f]);
          }
        }
      }
    }
  }
};

template <int most, bool plain>
__global__ void __launch_bounds__(kSmallThreads, 2)
    small_output_kernel(const __grid_constant__ SmallOutputParams p) {
  constexpr int kSide = SmallOutput::kSide;
  constexpr int kPairs = SmallOutput::kPairs;
  constexpr int kChannels = SmallOutput::kChannels;
  auto& shared = shared_memory<SmallOutputShared<most>>();
  const int thread = thread_index();
  const int tile = p.chunks.divide(static_cast<int>(blockIdx.x));
  const int first_channel = p.chunks.rest(static_cast<int>(blockIdx.x), tile) * kChannels;
  const int tile_row = p.tiles.divide(tile);
  const int batch = p.tiles.divide(tile_row);
  const int tile_i = p.tiles.rest(tile_row, batch) * kSide;
  const int tile_j = p.tiles.rest(tile, tile_row) * kSide;

  // Pairs beyond the last are read as the last one.
  constexpr int kLanes = kSmallThreads / kPairs;
  constexpr int kFours = most / 4 / kLanes;
  using PairLine = Line<kLanes, kFours>;
  const int lane = thread % kLanes;
  const int line_pair = thread / kLanes;
  const int i = min(tile_i + line_pair / kSide, p.n - 1);
  const int j = min(tile_j + line_pair % kSide, p.n - 1);
  uint4 raw[kFours];
  uint4 raw_norm_weight[kFours];
  uint4 raw_norm_bias[kFours];
  PairLine::template load<plain>(
      raw, p.pair, batch * p.batch_stride + i * p.i_stride + j * p.j_stride, lane, p.channels);
  WeightTile<most, kChannels, plain> raw_weight;
  raw_weight.load(p.gate_weight, first_channel, p.channels, p.channels, thread);

  // The threads of a warp make 8 pairs and 16 channels: 2 pairs, 2 channels each.
  const int warp = thread / 32;
  const int own_pair = warp % 2 * 8 + thread % 32 / 8;
  const int own_row = warp / 2 * 16 + thread % 8;
  float gate_bias[2] = {};
  float proj_bias[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int c = first_channel + own_row + r * 8;
    if (c < p.channels) {
      gate_bias[r] = load_one<plain>(p.gate_bias, c);
      proj_bias[r] = load_one<plain>(p.proj_bias, c);
    }
  }

  PairLine x;
  if (p.gate_normalized) {
    PairLine::template load<plain>(raw_norm_weight, p.norm_in.weight, 0, lane, p.channels);
    PairLine::template load<plain>(raw_norm_bias, p.norm_in.bias, 0, lane, p.channels);
  }
  x.template take<plain>(raw, p.pair.type);
  if (p.gate_normalized) {
    x.normalize(lane, p.norm_in);
    x.template scale<plain>(p.norm_in, raw_norm_weight, raw_norm_bias);
  }
  x.store(shared.x[line_pair], lane);
  raw_weight.store(shared.gate_weight, p.gate_weight.type, thread);
  // Under way during the gate's product.
  raw_weight.load(p.proj_weight, first_channel, p.channels, p.hidden, thread);
  if (line_pair == 0) {
    PairLine::template load<plain>(raw_norm_weight, p.norm_out.weight, 0, lane, p.hidden);
    PairLine::template load<plain>(raw_norm_bias, p.norm_out.bias, 0, lane, p.hidden);
  }
  __syncthreads();

  float gate[2][2] = {};  // of pair and channel
  multiply<most, 8>(gate, shared.x[own_pair], shared.gate_weight[own_row], p.channels);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int r = 0; r < 2; ++r) gate[e][r] = sigmoid(gate[e][r] + gate_bias[r]);
  }
  raw_weight.store(shared.proj_weight, p.proj_weight.type, thread);
  if (line_pair == 0) {
    x.template take<plain>(raw_norm_weight, p.norm_out.weight.type);
    x.store(shared.norm_weight, lane);
    x.template take<plain>(raw_norm_bias, p.norm_out.bias.type);
    x.store(shared.norm_bias, lane);
  }
  __syncthreads();  // the sums over k come where the gate's weights are

  // A warp sums up 32 channels, one a lane, over its part of k.
  const int width = 32 << p.log2_groups;
  const int parts = kSmallThreads / 32 >> p.log2_groups;
  const int part = warp >> p.log2_groups;
  const int h = thread & (width - 1);
  SmallContraction contraction(p, batch, tile_i, tile_j, min(h, p.hidden - 1));
  float* partial = &shared.partial[part * kPairs * width + h];
  sm80::griddepcontrol_wait();
  contraction.run(p, part, parts);
#pragma unroll
  for (int e = 0; e < kPairs; ++e) {
    partial[e * width] = h < p.hidden ? contraction.sum[e / kSide][e % kSide] : 0.0f;
  }
  __syncthreads();

#pragma unroll
  for (int f = 0; f < kFours; ++f) {
    const int column = PairLine::column(lane, f);
    x.value[f] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int s = 0; s < kSmallThreads / 32; ++s) {
      if (s >= parts || column >= width) continue;
      const float4 add = *reinterpret_cast<const float4*>(
          &shared.partial[(s * kPairs + line_pair) * width + column]);
      x.value[f].x += add.x;
      x.value[f].y += add.y;
      x.value[f].z += add.z;
      x.value[f].w += add.w;
    }
  }
  x.normalize(lane, p.norm_out);
  x.scale(shared.norm_weight, shared.norm_bias, lane);
  x.store(shared.x[line_pair], lane);
  __syncthreads();

  float result[2][2] = {};
  multiply<most, 8>(result, shared.x[own_pair], shared.proj_weight[own_row], p.hidden);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int pair = own_pair + e * kPairStep;
    const int row = tile_i + pair / kSide;
    const int column = tile_j + pair % kSide;
    const std::int64_t place = (static_cast<std::int64_t>(batch) * p.n + row) * p.n + column;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int c = first_channel + own_row + r * 8;
      if (row >= p.n || column >= p.n || c >= p.channels) continue;
      store_one<plain>(p.out, p.output_type, place * p.channels + c,
                       gate[e][r] * (result[e][r] + proj_bias[r]));
    }
  }
}

}  // namespace fused_ops::triangular_multiplicative_update
