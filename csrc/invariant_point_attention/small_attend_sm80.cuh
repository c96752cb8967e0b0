// SPDX-License-Identifier: Apache-2.0
// The second of two launches for small problems: attention and the output projection, a block for a
// few queries and all heads. What it does before it needs the first one's results, it does while
// that one runs.
#pragma once

#include <cstdint>

#include "invariant_point_attention/small_input_sm80.cuh"
#include "invariant_point_attention/softplus.cuh"

namespace fused_ops::invariant_point_attention {

struct SmallAttendParams {
  int n = 0;
  int heads = 0;
  int head_dim = 0;
  int dim = 0;
  int width = 0;
  int channels = 0;
  int value_line = 0;
  int query_points = 0;  // of a head
  int value_points = 0;  // likewise
  int value_channels = 0;
  int features = 0;
  bool norms = false;
  float norm_eps = 0.0f;
  float point_scale = 0.0f;
  Divisor tiles;                     // of queries, of a batch element
  Divisor of_dim, of_value_numbers;  // columns of a head: of v, of its value points
  Mask mask;
  Source translations, rotations;
  std::int64_t translations_stride = 0;
  std::int64_t rotations_stride = 0;
  Source head_weights;
  Source pair_values;
  std::int64_t pair_batch_stride = 0;
  std::int64_t i_stride = 0;
  std::int64_t j_stride = 0;
  SmallWorkspace from;
  Source weight, weight_bias;  // of the output projection
  DType type = DType::kFloat32;
  void* out = nullptr;
};

// Attention weights of a head, (key, query) with keys up to a multiple of 32, are a few banks apart
// from those of the next one.
constexpr int kHeadGap = 4;

template <int key_lines, int queries, int features>
struct SmallAttendShared {
  static constexpr int kLogits = key_lines == 1 ? 32 * kSmallMostHeads : kSmallMostLogits;
  float weights[kLogits * queries + kSmallMostHeads * kHeadGap];
  float features_of[queries][features];
  float moved[kSmallMostHeads][queries]
             [3];  // sum of P times the key's translation less the query's
  float translation[queries][3];
  float rotation[queries][9];
  float head_factor[kSmallMostHeads];
};

// A lane has key `lane` and those 32, 64, ... further, `key_lines` in all.
template <int key_lines, int queries, int most_features, bool plain>
struct SmallAttend {
  using Shared = SmallAttendShared<key_lines, queries, most_features>;
  // Features whose weights a lane has at a time, a quarter of them: as registers allow.
  static constexpr int kFeatureChunk = plain || key_lines == 1 ? 192 : 96;
  static_assert(most_features % kFeatureChunk == 0 && queries % 4 == 0);
  static constexpr int kWarps = kSmallThreads / 32;
  static constexpr int kOwn = 2;                         // queries of a warp, in one head
  static constexpr int kFours = key_lines == 1 ? 4 : 2;  // of a head's numbers, at a time
  static constexpr float kMinusInfinity = -__builtin_huge_valf();

  const SmallAttendParams& p;
  Shared& shared;
  int thread;
  int batch;
  int first_query;
  unsigned own;                // bit t: whether key lane + 32 * t is there
  bool any;                    // whether any is
  float key_at[key_lines][3];  // translations of the lane's keys
  WeightPart<kFeatureChunk, plain> weight;
  float weight_bias;

  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int query_at(int q) const { return min(first_query + q, p.n - 1); }
  __device__ __forceinline__ int key_at_line(int t) const { return min(lane() + 32 * t, p.n - 1); }
  __device__ __forceinline__ float* weights_of(int head) const {
    return &shared.weights[head * ((p.n + 31) / 32 * 32 * queries + kHeadGap)];
  }
  __device__ __forceinline__ float translation_of(int residue, int axis) const {
    return load_one<plain>(p.translations, batch * p.translations_stride + 3 * residue + axis);
  }

  // All that does not come from the first launch.
  __device__ __forceinline__ void begin() {
    own = 0;
#pragma unroll
    for (int t = 0; t < key_lines; ++t) {
      const int key = lane() + 32 * t;
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) key_at[t][axis] = translation_of(key_at_line(t), axis);
      if (key >= p.n) continue;
      if (p.mask.data == nullptr ||
          is_present(p.mask.data, p.mask.type, batch * p.mask.batch_stride + key * p.mask.stride)) {
        own |= 1u << t;
      }
    }
    any = __any_sync(kWholeWarp, own != 0);
    if (thread < queries * 9) {
      shared.rotation[thread / 9][thread % 9] = load_one<plain>(
          p.rotations, batch * p.rotations_stride + query_at(thread / 9) * 9 + thread % 9);
    }
    if (thread < queries * 3) {
      shared.translation[thread / 3][thread % 3] = translation_of(query_at(thread / 3), thread % 3);
    }
    if (thread < p.heads) {
      const float x = load_one<plain>(p.head_weights, thread);
      shared.head_factor[thread] = -0.5f * p.point_scale * softplus(x);
    }
    for (int i = thread; i < queries * most_features / 4; i += kSmallThreads) {  // end in zeros
      reinterpret_cast<float4*>(shared.features_of)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void load_weights(int first_channel, int first_feature) {
    const int channel = first_channel + thread / 32 * 8 + lane() % 8;
    const bool exists = channel < p.channels;
    Source from = p.weight;
    from.data = static_cast<const char*>(from.data) +
                first_feature * (plain || from.type == DType::kFloat32 ? 4 : 2);
    weight.load(from, exists ? channel : 0, exists ? p.features - first_feature : 0, p.features,
                lane() / 8);
    weight_bias = exists ? load_one<plain>(p.weight_bias, channel) : 0.0f;
  }

  // Of two queries in one head, to every key of the lane.
  __device__ __forceinline__ void add_products(float (&dot)[key_lines][kOwn], int head, int first) {
    const auto* keys =
        reinterpret_cast<const float4*>(p.from.k + (batch * p.width + head * p.dim) * p.n);
#pragma unroll 1
    for (int first_four = 0; first_four < p.dim / 4; first_four += kFours) {
      float4 key[key_lines][kFours], query[kOwn][kFours];
#pragma unroll
      for (int f = 0; f < kFours; ++f) {
        const bool inside = kFours <= 2 || first_four + f < p.dim / 4;
#pragma unroll
        for (int t = 0; t < key_lines; ++t) {
          key[t][f] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (inside && 32 * t < p.n) {
            key[t][f] = __ldcg(&keys[(first_four + f) * p.n + key_at_line(t)]);
          }
        }
#pragma unroll
        for (int q = 0; q < kOwn; ++q) {
          query[q][f] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (inside) {
            query[q][f] = __ldcg(reinterpret_cast<const float4*>(
                &p.from.q[(batch * p.n + query_at(first + q)) * p.width + head * p.dim +
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
  }

  __device__ __forceinline__ void add_distances(float (&sum)[key_lines][kOwn], int head,
                                                int first) {
    const auto* keys = reinterpret_cast<const float4*>(p.from.k_points);
    const auto* points = reinterpret_cast<const float4*>(p.from.q_points);
#pragma unroll(key_lines == 1 ? 4 : 1)
    for (int point = 0; point < p.query_points; ++point) {
      const int index = head * p.query_points + point;
      float4 query[kOwn];
#pragma unroll
      for (int q = 0; q < kOwn; ++q) {
        query[q] =
            __ldcg(&points[(batch * p.n + query_at(first + q)) * p.heads * p.query_points + index]);
      }
#pragma unroll
      for (int t = 0; t < key_lines; ++t) {
        if (32 * t >= p.n) break;
        float4 key =
            __ldcg(&keys[(batch * p.heads * p.query_points + index) * p.n + key_at_line(t)]);
#pragma unroll
        for (int q = 0; q < kOwn; ++q) {
#pragma unroll
          for (int axis = 0; axis < 3; ++axis) {
            const float between = shared.translation[first + q][axis] - key_at[t][axis];
            const float d = (element(query[q], axis) - element(key, axis)) + between;
            sum[t][q] = fmaf(d, d, sum[t][q]);
          }
        }
      }
    }
  }

  // The attention weights of a few queries in one head.
  __device__ __forceinline__ void attend(int head, int first) {
    float logit[key_lines][kOwn], dot[key_lines][kOwn] = {}, distance[key_lines][kOwn] = {};
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      const int line = ((batch * p.heads + head) * p.n + query_at(first + q)) * p.n;
#pragma unroll
      for (int t = 0; t < key_lines; ++t) logit[t][q] = __ldcg(&p.from.bias[line + key_at_line(t)]);
    }
    add_products(dot, head, first);
    add_distances(distance, head, first);
    // As in PyTorch an infinite logit, or only ones of -inf, make NaN.
    const float factor = shared.head_factor[head];
    float top[kOwn], sum[kOwn];
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      top[q] = kMinusInfinity;
      sum[q] = 0.0f;
#pragma unroll
      for (int t = 0; t < key_lines; ++t) {
        logit[t][q] =
            own >> t & 1 ? fmaf(factor, distance[t][q], dot[t][q] + logit[t][q]) : kMinusInfinity;
        top[q] = fmaxf(top[q], logit[t][q]);
      }
#pragma unroll
      for (int bit = 16; bit > 0; bit /= 2) {
        top[q] = fmaxf(top[q], __shfl_xor_sync(kWholeWarp, top[q], bit));
      }
    }
    float moved[kOwn][3] = {};
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
#pragma unroll
      for (int t = 0; t < key_lines; ++t) {
        logit[t][q] = own >> t & 1 ? expf(logit[t][q] - top[q]) : 0.0f;
        sum[q] += logit[t][q];
      }
      sum[q] = Line<32, 1>::sum_of_lanes(sum[q]);
    }
    float* weights = weights_of(head);
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      const float inverse = __fdividef(1.0f, sum[q]);
#pragma unroll
      for (int t = 0; t < key_lines; ++t) {
        // Of absent keys zero whatever the sum is.
        const float share = own >> t & 1 ? logit[t][q] * inverse : 0.0f;
        if (32 * t >= p.n) continue;
        weights[(lane() + 32 * t) * queries + first + q] = share;
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) {
          moved[q][axis] =
              fmaf(share, key_at[t][axis] - shared.translation[first + q][axis], moved[q][axis]);
        }
      }
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        moved[q][axis] = Line<32, 1>::sum_of_lanes(moved[q][axis]);
      }
      if (lane() == 0) {
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) shared.moved[head][first + q][axis] = moved[q][axis];
      }
    }
  }

  // A thread has a column of the values, for all queries. Nothing comes from a batch element
  // without keys, NaN neither.
  __device__ __forceinline__ void gather_values() {
    constexpr int kTogether = key_lines == 1 ? 32 : 16;  // keys
#pragma unroll 1
    for (int column = thread; column < p.value_line; column += kSmallThreads) {
      const bool is_point = column >= p.width;
      const int in_points = max(column - p.width, 0);
      const int head = is_point ? p.of_value_numbers.divide(in_points) : p.of_dim.divide(column);
      const float* weights = weights_of(head);
      float sum[queries] = {};
#pragma unroll 1
      for (int first = 0; first < p.n; first += kTogether) {
        float value[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int key = first + i;
          value[i] = key < p.n ? __ldcg(&p.from.values[(batch * p.n + key) * p.value_line + column])
                               : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
#pragma unroll
          for (int q = 0; q < queries; q += 4) {
            float4 four = *reinterpret_cast<const float4*>(&weights[(first + i) * queries + q]);
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[q + e] = fmaf(element(four, e), value[i], sum[q + e]);
          }
        }
      }
      const int in_head = is_point ? 0 : p.of_dim.rest(column, head);
      if (in_head >= p.head_dim) continue;
      const int feature = is_point ? p.heads * p.head_dim + in_points : head * p.head_dim + in_head;
#pragma unroll
      for (int q = 0; q < queries; ++q) {
        const float add = is_point ? shared.moved[head][q][in_points % 3] : 0.0f;
        shared.features_of[q][feature] = any ? sum[q] + add : 0.0f;
      }
    }
  }

  // Eight lanes share the keys of four neighbouring channels, for one query and four heads.
  __device__ __forceinline__ void gather_pairs() {
    const int groups = (p.value_channels + 15) / 16;
    const int head_groups = (p.heads + 3) / 4;
    const int first_feature = p.features - p.heads * p.value_channels;
#pragma unroll 1
    for (int task = thread / 32; task < queries * groups * head_groups; task += kWarps) {
      const int q = task % queries;
      const int group = task / queries % groups;
      const int first_head = task / queries / groups * 4;
      const int channel = group * 16 + lane() % 4 * 4;
      const std::int64_t line = batch * p.pair_batch_stride + query_at(q) * p.i_stride + channel;
      float sum[4][4] = {};  // channel, head
#pragma unroll 4
      for (int key = lane() / 4; key < p.n; key += 8) {
        float4 z = converted<plain>(
            load_four<plain>(p.pair_values, line + key * p.j_stride, p.value_channels - channel),
            p.pair_values.type);
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          const float share = weights_of(min(first_head + h, p.heads - 1))[key * queries + q];
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[e][h] = fmaf(share, element(z, e), sum[e][h]);
        }
      }
      const int head = first_head + lane() / 4 % 4;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float whole = fold_four<4, 8>(sum[e], lane());
        whole += __shfl_xor_sync(kWholeWarp, whole, 16);
        if (lane() < 16 && head < p.heads && channel + e < p.value_channels) {
          shared.features_of[q][first_feature + head * p.value_channels + channel + e] =
              any ? whole : 0.0f;
        }
      }
    }
  }

  // Points of the queries' own frames, and their lengths.
  __device__ __forceinline__ void turn_points() {
    const int points = p.heads * p.value_points;
    const int first = p.heads * p.head_dim;
#pragma unroll 1
    for (int i = thread; i < queries * points; i += kSmallThreads) {
      const int q = i % queries;
      const int point = i / queries;
      float* at = &shared.features_of[q][first + 3 * point];
      const float x = at[0], y = at[1], z = at[2];
      float squares = 0.0f;
#pragma unroll
      for (int c = 0; c < 3; ++c) {
        const float* r = &shared.rotation[q][3 * c];
        const float local = fmaf(z, r[2], fmaf(y, r[1], x * r[0]));
        squares = fmaf(local, local, squares);
        at[c] = any ? local : 0.0f;
      }
      if (p.norms) {
        shared.features_of[q][first + 3 * points + point] =
            any ? sqrtf(squares + p.norm_eps) : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void project(int first_channel) {
    const int part = lane() / 8;
    const int channel = first_channel + thread / 32 * 8 + lane() % 8;
    float sum[queries / 4][4] = {};
#pragma unroll 1
    for (int first = 0; first < p.features; first += kFeatureChunk) {
      if (first_channel > 0 || first > 0) load_weights(first_channel, first);
#pragma unroll
      for (int four = 0; four < queries; four += 4) {
        weight.template multiply<most_features>(sum[four / 4], &shared.features_of[four][first],
                                                p.features - first, part);
      }
    }
#pragma unroll
    for (int four = 0; four < queries; four += 4) {
      const float result = fold_four<8, 16>(sum[four / 4], lane()) + weight_bias;
      const int query = first_query + four + part;
      if (query >= p.n || channel >= p.channels) continue;
      store_one<plain>(p.out, p.type, std::int64_t{batch * p.n + query} * p.channels + channel,
                       result);
    }
  }

  __device__ __forceinline__ void all() {
    begin();
    sm80::griddepcontrol_wait();
    constexpr int kShares = queries / kOwn;
#pragma unroll 1
    for (int task = thread / 32; task < kShares * p.heads; task += kWarps) {
      attend(task / kShares, task % kShares * kOwn);
    }
    __syncthreads();
    gather_values();
    if (p.value_channels > 0) gather_pairs();
    load_weights(0, 0);
    __syncthreads();
    turn_points();
    __syncthreads();
#pragma unroll 1
    for (int channel = 0; channel < p.channels; channel += kSmallColumns) project(channel);
  }
};

template <int key_lines, int queries, int most_features, bool plain>
__global__ void __launch_bounds__(kSmallThreads, 2)
    small_attend_kernel(const __grid_constant__ SmallAttendParams p) {
  using Kernel = SmallAttend<key_lines, queries, most_features, plain>;
  Kernel kernel{p, shared_memory<typename Kernel::Shared>(), thread_index()};
  const int block = static_cast<int>(blockIdx.x);
  kernel.batch = p.tiles.divide(block);
  kernel.first_query = p.tiles.rest(block, kernel.batch) * queries;
  kernel.all();
}

}  // namespace fused_ops::invariant_point_attention
