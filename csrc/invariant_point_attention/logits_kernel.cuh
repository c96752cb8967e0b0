// SPDX-License-Identifier: Apache-2.0
// Logits of 8 queries x 32 keys, all heads. First the bias, each warp for two of the queries, into
// shared memory; then by heads the products of keys (rows of an mma) and queries (its columns), and
// the distances of points in fp32, from what the L1 cache holds. A lane's results of neighbouring
// keys are in neighbouring lanes: whole sectors of 32 bytes are written.
#pragma once

#include "invariant_point_attention/pair_products.cuh"

namespace fused_ops::invariant_point_attention {

constexpr int kTileQueries = 8;
constexpr int kTileKeys = 32;
// Lanes 4g + t touch (query 2t, key g), or (head 2t, key g): different banks.
constexpr int kQueryPitch = kTileKeys + 4;
constexpr int kHeadPitch = kTileQueries * kQueryPitch + 4;

struct LogitsParams {
  LogitsProblem problem;
  std::int64_t query_tiles, key_tiles;
  bool whole, whole_weights;
};

struct LogitsShared {
  PairTable table;
  float bias[kMostHeads * kHeadPitch];
  float constant[kMostHeads];  // the bias of the projection, as logits have it
  float distance[kMostHeads];  // what squared distances are multiplied with
};

template <Mode mode>
struct LogitsKernel {
  using Operands = PairOperands<mode>;
  static constexpr float kLog2e = 1.44269504088896340736f;

  const LogitsParams& params;
  int thread;
  std::int64_t batch, row, key;  // the first of the tile; rows count in the block

  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int warp() const { return thread / 32; }
  __device__ __forceinline__ int g() const { return lane() / 4; }
  __device__ __forceinline__ int t() const { return lane() % 4; }
  __device__ __forceinline__ LogitsShared& shared() const { return shared_memory<LogitsShared>(); }
  // Places that are not there stand for the last one; what comes of them is not kept.
  __device__ __forceinline__ std::int64_t query_at(int i) const {
    const Block& block = params.problem.block;
    return block.first_row + (row + i < block.rows ? row + i : block.rows - 1);
  }
  __device__ __forceinline__ std::int64_t key_at(int j) const {
    const std::int64_t n = params.problem.sizes.n;
    return key + j < n ? key + j : n - 1;
  }

  __device__ __forceinline__ void constants() const {
    const LogitsProblem& p = params.problem;
    if (thread >= p.sizes.heads) return;
    const float w = load_number(p.head_weights.data, p.head_weights.type, thread);
    // Accurate for weights of any size; NaN stays.
    const float softplus = w > 0.0f ? w + log1pf(expf(-w)) : log1pf(expf(w));
    shared().constant[thread] = load_or(p.bias.bias, thread, 0.0f) * (p.bias_scale * kLog2e);
    shared().distance[thread] = p.point_scale * softplus * (0.5f * kLog2e);
  }

  __device__ __forceinline__ void bias() const {
    const LogitsProblem& p = params.problem;
    const int channels = p.sizes.pair_channels;
    const Stored pair = {p.pair.data, p.pair.type};
    const bool once = channels <= Operands::kChunk;
#pragma unroll 1
    for (int unit = 0; unit < 4; ++unit) {
      const int i = warp() * 2 + unit / 2;
      const int j = unit % 2 * 16 + g();
      const std::int64_t line = batch * p.pair.batch_stride + query_at(i) * p.pair.i_stride;
      float sum[kOctets][4] = {};
#pragma unroll 1
      for (int from = 0; from < channels; from += Operands::kChunk) {
        if (!once || unit == 0) {
          __syncthreads();
          shared().table.template fill<mode>(p.bias.weight, 0, p.sizes.heads, channels, from,
                                             params.whole_weights, thread);
          __syncthreads();
        }
        multiply_pairs<mode>(shared().table, pair, line + key_at(j) * p.pair.j_stride,
                             line + key_at(j + 8) * p.pair.j_stride, channels, from, params.whole,
                             p.sizes.heads > 8, lane(), sum);
      }
#pragma unroll
      for (int e = 0; e < 4 * kOctets; ++e) {
        const int head = e / 4 * 8 + 2 * t() + e % 2;
        shared().bias[head * kHeadPitch + i * kQueryPitch + j + e / 2 % 2 * 8] = sum[e / 4][e % 4];
      }
    }
    __syncthreads();
  }

  // Of keys g and g + 8 of the half, and queries 2t and 2t + 1.
  __device__ __forceinline__ void products(int head, int half, float (&sum)[4]) const {
    const Sizes& s = params.problem.sizes;
    const Stored projected = {params.problem.projected, Operands::kType};
    const std::int64_t q = head * s.dim;
    const std::int64_t k = q + s.width();
    const std::int64_t query = (batch * s.n + query_at(g())) * s.projected() + q;
    const std::int64_t first = (batch * s.n + key_at(half * 16 + g())) * s.projected() + k;
    const std::int64_t second = (batch * s.n + key_at(half * 16 + g() + 8)) * s.projected() + k;
#pragma unroll 1
    for (int from = 0; from < s.dim; from += Operands::kStep) {
      const int at = from + t() * Operands::kNumbers;
      const uint4 b = Operands::load(projected, query + at, s.dim - at, true);
      const uint4 a = Operands::load(projected, first + at, s.dim - at, true);
      const uint4 a_8 = Operands::load(projected, second + at, s.dim - at, true);
      Operands::multiply(sum, a, a_8, b);
    }
  }

  __device__ __forceinline__ void distances(int head, int half, float (&sum)[4]) const {
    const Sizes& s = params.problem.sizes;
    const int line = point_line(s);
    const std::int64_t first = (batch * s.heads + head) * s.n;
    const float* q[2];
    const float* k[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      q[e] = params.problem.q_points + (first + query_at(2 * t() + e)) * line;
      k[e] = params.problem.k_points + (first + key_at(half * 16 + g() + 8 * e)) * line;
    }
#pragma unroll 1
    for (int from = 0; from < line; from += 4) {
      float4 key_four[2], query_four[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        key_four[e] = *reinterpret_cast<const float4*>(k[e] + from);
        query_four[e] = *reinterpret_cast<const float4*>(q[e] + from);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float4& a = key_four[e / 2];
        const float4& b = query_four[e % 2];
        const float x = a.x - b.x, y = a.y - b.y, z = a.z - b.z, w = a.w - b.w;
        sum[e] = fmaf(x, x, fmaf(y, y, fmaf(z, z, fmaf(w, w, sum[e]))));
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const LogitsProblem& p = params.problem;
    const std::int64_t line = pair_line(p.sizes.n);
    constants();
    bias();
    const int half = warp() % 2;
    bool there[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const std::int64_t j = key + half * 16 + g() + 8 * e;
      there[e] = j < p.sizes.n;
      if (there[e] && p.present) {
        there[e] = (p.present[batch * mask_words(p.sizes.n) + j / 64] >> (j % 64) & 1) != 0;
      }
    }
#pragma unroll 1
    for (int head = warp() / 2; head < p.sizes.heads; head += 2) {
      float product[4] = {};
      float distance[4] = {};
      products(head, half, product);
      distances(head, half, distance);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 2 * t() + e % 2;
        const int j = half * 16 + g() + e / 2 * 8;
        if (row + i >= p.block.rows || key + j >= line) continue;
        const float bias = shared().bias[head * kHeadPitch + i * kQueryPitch + j];
        float logit = fmaf(bias, p.bias_scale * kLog2e, shared().constant[head]);
        logit = fmaf(product[e], p.scalar_scale * kLog2e, logit);
        logit = fmaf(-shared().distance[head], distance[e], logit);
        if (!there[e / 2]) logit = __uint_as_float(0xff800000u);
        const std::int64_t to = (batch * p.sizes.heads + head) * p.block.rows + row + i;
        p.logits[to * line + key + j] = logit;
      }
    }
  }
};

template <Mode mode>
__global__ void __launch_bounds__(kPairThreads, 4)
    logits_kernel(const __grid_constant__ LogitsParams params) {
  const std::int64_t index = blockIdx.x;
  const std::int64_t line = index / params.key_tiles;
  LogitsKernel<mode>{params, thread_index(), line / params.query_tiles,
                     line % params.query_tiles * kTileQueries, index % params.key_tiles * kTileKeys}
      .run();
}

}  // namespace fused_ops::invariant_point_attention
