// SPDX-License-Identifier: Apache-2.0
// The second of two launches for small problems: attention, gate and output projection, a block for
// a few queries of a row and all heads. What it does before it needs the first one's results, it
// does while that one runs.
#pragma once

#include <cstdint>

#include "msa_row_attention/small_input_sm80.cuh"

namespace fused_ops::msa_row_attention {

struct SmallAttendParams {
  int n = 0;
  int heads = 0;
  int head_dim = 0;
  int width = 0;        // of all heads, filled up
  int model_width = 0;  // and as the model has it
  int channels = 0;
  Divisor tiles;  // of queries, of a row
  Divisor rows;   // of a group
  Divisor dim;
  Mask mask;
  const float* query = nullptr;  // as SmallInputParams has them
  const float* key = nullptr;
  const float* value = nullptr;
  const float* gate = nullptr;
  const float* bias = nullptr;
  Source weight, weight_bias;  // of the output projection
  DType type = DType::kFloat32;
  void* out = nullptr;
};

// Attention weights of a head, (key, query) with keys up to a multiple of 32, are a few banks apart
// from those of the next one.
constexpr int kHeadGap = 4;
constexpr int kSmallMostHeads = kSmallMostChannels / 8;

template <int most, int queries>
struct SmallAttendShared {
  float weights[kSmallMostLogits * queries + kSmallMostHeads * kHeadGap];
  float partial[4][queries][kSmallColumns];  // sums over a quarter of the keys
  float attended[queries][most];             // with the gate; heads as the model has them
};

// A lane has key `lane` and those 32, 64, ... further, `key_lines` in all. Of a row's queries a
// block has `queries`.
template <int most, int key_lines, int queries, bool plain>
struct SmallAttend {
  using Shared = SmallAttendShared<most, queries>;
  static constexpr int kWarps = kSmallThreads / 32;
  static constexpr int kOwn = queries / 2;               // queries of a warp, in one head
  static constexpr int kFours = key_lines == 1 ? 4 : 2;  // of a head's numbers, at a time
  static constexpr int kKeys = key_lines * 32 / 4;       // of a thread's sum
  static constexpr int kSteps = queries * kSmallColumns / kSmallThreads;
  // Whether values, and weights of the output, are read before they are needed: it takes registers.
  static constexpr bool kEarlyValues = key_lines == 1;
  static constexpr bool kEarlyWeights = most <= 128 && key_lines == 1;
  static constexpr float kMinusInfinity = -__builtin_huge_valf();

  const SmallAttendParams& p;
  Shared& shared;
  int thread;
  int row;
  int group;
  int first_query;
  unsigned own;  // bit t: whether key lane + 32 * t is there
  bool any;      // whether any is
  float value[kKeys];
  float gate[kSteps];
  WeightPart<most, plain> weight;
  float weight_bias;

  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int query_at(int q) const { return min(first_query + q, p.n - 1); }
  __device__ __forceinline__ float* weights_of(int head) const {
    return &shared.weights[head * ((p.n + 31) / 32 * 32 * queries + kHeadGap)];
  }

  __device__ __forceinline__ void find_keys() {
    own = 0;
#pragma unroll
    for (int t = 0; t < key_lines; ++t) {
      const int key = lane() + 32 * t;
      if (key >= p.n) continue;
      const bool there =
          p.mask.data == nullptr ||
          is_present(p.mask.data, p.mask.type,
                     group * p.mask.group_stride + p.rows.rest(row, group) * p.mask.row_stride +
                         key * p.mask.position_stride);
      if (there) own |= 1u << t;
    }
    any = __any_sync(kWholeWarp, own != 0);
  }

  __device__ __forceinline__ void load_weights(int first_channel) {
    const int channel = first_channel + thread / 32 * 8 + lane() % 8;
    const bool exists = channel < p.channels;
    weight.load(p.weight, exists ? channel : 0, exists ? p.model_width : 0, p.model_width,
                lane() / 8);
    weight_bias = exists ? load_one<plain>(p.weight_bias, channel) : 0.0f;
  }

  // Of one column, every fourth key; gates of that column.
  __device__ __forceinline__ void load_values(int first_column) {
    const int column = first_column + thread % kSmallColumns;
    const bool exists = column < p.width;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = thread / kSmallColumns + 4 * i;
      value[i] =
          exists && key < p.n ? __ldcg(&p.value[(row * p.n + key) * p.width + column]) : 0.0f;
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int query = query_at(thread / kSmallColumns + 4 * s);
      gate[s] = exists ? __ldcg(&p.gate[(row * p.n + query) * p.width + column]) : 0.0f;
    }
  }

  // The attention weights of a few queries in one head.
  __device__ __forceinline__ void attend(int head, int first) {
    const int dim = static_cast<int>(p.dim.divisor);
    float logit[key_lines][kOwn], dot[key_lines][kOwn] = {};
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      const int line = ((group * p.heads + head) * p.n + query_at(first + q)) * p.n;
#pragma unroll
      for (int t = 0; t < key_lines; ++t) {
        logit[t][q] = __ldcg(&p.bias[line + min(lane() + 32 * t, p.n - 1)]);
      }
    }
    const auto* keys = reinterpret_cast<const float4*>(p.key + (row * p.width + head * dim) * p.n);
#pragma unroll 1
    for (int first_four = 0; first_four < dim / 4; first_four += kFours) {
      float4 key[key_lines][kFours], query[kOwn][kFours];
#pragma unroll
      for (int f = 0; f < kFours; ++f) {
        const bool inside = kFours <= 2 || first_four + f < dim / 4;
#pragma unroll
        for (int t = 0; t < key_lines; ++t) {
          key[t][f] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (inside && 32 * t < p.n) {
            key[t][f] = __ldcg(&keys[(first_four + f) * p.n + min(lane() + 32 * t, p.n - 1)]);
          }
        }
#pragma unroll
        for (int q = 0; q < kOwn; ++q) {
          query[q][f] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (inside) {
            query[q][f] = __ldcg(reinterpret_cast<const float4*>(
                &p.query[(row * p.n + query_at(first + q)) * p.width + head * dim +
                         4 * (first_four + f)]));
          }
        }
      }
#pragma unroll
      for (int f = 0; f < kFours; ++f) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int t = 0; t < key_lines; ++t) {
#pragma unroll
            for (int q = 0; q < kOwn; ++q) {
              dot[t][q] = fmaf(element(query[q][f], e), element(key[t][f], e), dot[t][q]);
            }
          }
        }
      }
    }
    // As in PyTorch an infinite logit, or only ones of -inf, make NaN.
    float top[kOwn], sum[kOwn];
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      top[q] = kMinusInfinity;
      sum[q] = 0.0f;
#pragma unroll
      for (int t = 0; t < key_lines; ++t) {
        logit[t][q] = own >> t & 1 ? logit[t][q] + dot[t][q] : kMinusInfinity;
        top[q] = fmaxf(top[q], logit[t][q]);
      }
    }
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) {
#pragma unroll
      for (int q = 0; q < kOwn; ++q) {
        top[q] = fmaxf(top[q], __shfl_xor_sync(kWholeWarp, top[q], bit));
      }
    }
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
#pragma unroll
      for (int t = 0; t < key_lines; ++t) {
        logit[t][q] = own >> t & 1 ? expf(logit[t][q] - top[q]) : 0.0f;
        sum[q] += logit[t][q];
      }
    }
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) {
#pragma unroll
      for (int q = 0; q < kOwn; ++q) sum[q] += __shfl_xor_sync(kWholeWarp, sum[q], bit);
    }
    float* weights = weights_of(head);
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      const float inverse = __fdividef(1.0f, sum[q]);
#pragma unroll
      for (int t = 0; t < key_lines; ++t) {
        // Of absent keys zero whatever the sum is.
        const float share = own >> t & 1 ? logit[t][q] * inverse : 0.0f;
        if (32 * t < p.n) weights[(lane() + 32 * t) * queries + first + q] = share;
      }
    }
  }

  // The sums over a quarter of the keys, of one column and all queries.
  __device__ __forceinline__ void add_values(int first_column) {
    const int column = first_column + thread % kSmallColumns;
    const float* weights = weights_of(min(p.dim.divide(column), p.heads - 1));
    float sum[queries] = {};
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (key_lines > 1 && i % 8 == 0 && 4 * i >= p.n) break;
      const int key = thread / kSmallColumns + 4 * i;
#pragma unroll
      for (int q = 0; q < queries; q += 4) {
        float4 four = *reinterpret_cast<const float4*>(&weights[key * queries + q]);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[q + e] = fmaf(element(four, e), value[i], sum[q + e]);
      }
    }
#pragma unroll
    for (int q = 0; q < queries; ++q) {
      shared.partial[thread / kSmallColumns][q][thread % kSmallColumns] = sum[q];
    }
  }

  __device__ __forceinline__ void gate_sums(int first_column) {
    const int column = first_column + thread % kSmallColumns;
    const int head = p.dim.divide(column);
    const int in_head = p.dim.rest(column, head);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int q = thread / kSmallColumns + 4 * s;
      float parts[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) parts[k] = shared.partial[k][q][thread % kSmallColumns];
      const float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
      if (column >= p.width || in_head >= p.head_dim) continue;
      // Nothing comes from a row without keys, NaN neither.
      shared.attended[q][head * p.head_dim + in_head] = any ? sum * gate[s] : 0.0f;
    }
  }

  __device__ __forceinline__ void project(int first_channel) {
    const int part = lane() / 8;
    const int channel = first_channel + thread / 32 * 8 + lane() % 8;
#pragma unroll
    for (int four = 0; four < queries; four += 4) {
      float sum[4] = {};
      weight.template multiply<most>(sum, shared.attended[four], p.model_width, part);
      const float result = fold_four<8, 16>(sum, lane()) + weight_bias;
      const int query = first_query + four + part;
      if (query >= p.n || channel >= p.channels) continue;
      store_one<plain>(p.out, p.type, (row * p.n + query) * p.channels + channel, result);
    }
  }

  __device__ __forceinline__ void all() {
    if (kEarlyWeights) load_weights(0);
    find_keys();
#pragma unroll
    for (int first = 0; first < queries * most / 4; first += kSmallThreads) {  // end in zeros
      const int i = first + thread;
      if (i >= queries * most / 4) continue;
      reinterpret_cast<float4*>(shared.attended)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    sm80::griddepcontrol_wait();
    if (kEarlyValues) load_values(0);
#pragma unroll 1
    for (int task = thread / 32; task < 2 * p.heads; task += kWarps) {
      attend(task / 2, task % 2 * kOwn);
    }
#pragma unroll 1
    for (int column = 0; column < p.width; column += kSmallColumns) {
      if (!kEarlyValues || column > 0) load_values(column);
      __syncthreads();
      add_values(column);
      __syncthreads();
      gate_sums(column);
    }
    __syncthreads();
#pragma unroll 1
    for (int channel = 0; channel < p.channels; channel += kSmallColumns) {
      if (!kEarlyWeights || channel > 0) load_weights(channel);
      project(channel);
    }
  }
};

template <int most, int key_lines, int queries, bool plain>
__global__ void __launch_bounds__(kSmallThreads, 2)
    small_attend_kernel(const __grid_constant__ SmallAttendParams p) {
  using Kernel = SmallAttend<most, key_lines, queries, plain>;
  const int block = static_cast<int>(blockIdx.x);
  const int row = p.tiles.divide(block);
  Kernel{p,
         shared_memory<typename Kernel::Shared>(),
         thread_index(),
         row,
         p.rows.divide(row),
         p.tiles.rest(block, row) * queries}
      .all();
}

}  // namespace fused_ops::msa_row_attention
