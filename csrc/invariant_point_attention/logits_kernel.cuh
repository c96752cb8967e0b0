// SPDX-License-Identifier: Apache-2.0
// Logits of 8 or 16 queries x 32 keys, all heads. First the bias, a warp taking queries of its own,
// into shared memory; then by heads the products of keys (rows of an mma) and queries (its
// columns), and the distances of points in fp32. What a warp needs for the next 16 pairs, or for a
// head, is asked for at once. A lane's results of neighbouring keys are in neighbouring lanes:
// whole sectors of 32 bytes are written. With 16 queries keys are read half as often; with 8 there
// are twice as many blocks.
#pragma once

#include "invariant_point_attention/pair_products.cuh"

namespace fused_ops::invariant_point_attention {

constexpr int kTileKeys = 32;
// Lanes 4g + t touch (query 2t, key g), or (head 2t, key g): different banks.
constexpr int kQueryPitch = kTileKeys + 4;

constexpr int head_pitch(int queries) {
  return queries * kQueryPitch + 4;
}

struct LogitsParams {
  LogitsProblem problem;
  std::int64_t query_tiles, key_tiles;
  bool whole, whole_weights;
  bool streams = false;  // the pair tensor, a stage ahead
};

template <int queries>
struct LogitsShared {
  PairTable table;
  float bias[kMostHeads * head_pitch(queries)];
  float constant[kMostHeads];  // the bias of the projection, as logits have it
  float distance[kMostHeads];  // what squared distances are multiplied with
};

template <Mode mode, int queries>
struct LogitsKernel {
  using Operands = PairOperands<mode>;
  using Shared = LogitsShared<queries>;
  static constexpr int kHeadPitch = head_pitch(queries);
  static constexpr int kQueryTiles = queries / 8;
  static constexpr int kQueryUnits = queries / 4;  // queries of a warp, while it forms the bias
  static constexpr int kUnits = 2 * kQueryUnits;   // of 16 pairs
  static constexpr int kFours = 3;  // of the numbers of a point that are asked for at once
  static constexpr float kLog2e = 1.44269504088896340736f;

  const LogitsParams& params;
  int thread;
  std::int64_t batch, row, key;  // the first of the tile; rows count in the block

  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int warp() const { return thread / 32; }
  __device__ __forceinline__ int g() const { return lane() / 4; }
  __device__ __forceinline__ int t() const { return lane() % 4; }
  __device__ __forceinline__ Shared& shared() const { return shared_memory<Shared>(); }
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

  // Of a unit, which is 16 keys of a query: the query, and the lane's first key.
  __device__ __forceinline__ int query_of(int unit) const {
    return warp() * kQueryUnits + unit / 2;
  }
  __device__ __forceinline__ int key_of(int unit) const { return unit % 2 * 16 + g(); }
  __device__ __forceinline__ std::int64_t pair_at(int unit, int further) const {
    const Pairs& pair = params.problem.pair;
    return batch * pair.batch_stride + query_at(query_of(unit)) * pair.i_stride +
           key_at(key_of(unit) + further) * pair.j_stride;
  }

  __device__ __forceinline__ void keep(int unit, const float (&sum)[kOctets][4]) const {
    float* to = shared().bias + query_of(unit) * kQueryPitch + key_of(unit);
#pragma unroll
    for (int e = 0; e < 4 * kOctets; ++e) {
      const int head = e / 4 * 8 + 2 * t() + e % 2;
      to[head * kHeadPitch + e / 2 % 2 * 8] = sum[e / 4][e % 4];
    }
  }

  __device__ __forceinline__ void fill(int from) const {
    const LogitsProblem& p = params.problem;
    shared().table.template fill<mode>(p.bias.weight, 0, p.sizes.heads, p.sizes.pair_channels, from,
                                       params.whole_weights, thread);
  }

  // Lines that are whole and of the mode's type, whose weights fit the table: a stage, which is a
  // unit or a part of its channels, is asked for before the one before it is multiplied.
  __device__ __forceinline__ void stream_bias() const {
    const LogitsProblem& p = params.problem;
    const int channels = p.sizes.pair_channels;
    constexpr int kPart = kLoadSteps * Operands::kStep;
    const int parts = (channels + kPart - 1) / kPart;
    const int steps = (channels + Operands::kStep - 1) / Operands::kStep;
    const Stored pair = {p.pair.data, p.pair.type};
    const bool second = p.sizes.heads > 8;
    PairPieces<mode> here, next;
    int unit = 0, part = 0;
    here.ask(pair, pair_at(0, 0), pair_at(0, 8), channels, 0, lane());
    fill(0);
    __syncthreads();
    float sum[kOctets][4] = {};
    const auto take = [&](PairPieces<mode>& now, PairPieces<mode>& then) {
      const bool last = part + 1 == parts;
      const int next_unit = last ? unit + 1 : unit, next_part = last ? 0 : part + 1;
      if (next_unit < kUnits) {
        then.ask(pair, pair_at(next_unit, 0), pair_at(next_unit, 8), channels, next_part * kPart,
                 lane());
      }
      now.multiply(shared().table, part * kLoadSteps, steps, second, lane(), sum);
      if (last) {
        keep(unit, sum);
#pragma unroll
        for (int e = 0; e < 4 * kOctets; ++e) sum[e / 4][e % 4] = 0.0f;
      }
      unit = next_unit;
      part = next_part;
    };
    // kUnits is even, so the number of stages is.
#pragma unroll 1
    while (unit < kUnits) {
      take(here, next);
      take(next, here);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void any_bias() const {
    const LogitsProblem& p = params.problem;
    const int channels = p.sizes.pair_channels;
    const Stored pair = {p.pair.data, p.pair.type};
    const bool once = channels <= Operands::kChunk;
#pragma unroll 1
    for (int unit = 0; unit < kUnits; ++unit) {
      float sum[kOctets][4] = {};
#pragma unroll 1
      for (int from = 0; from < channels; from += Operands::kChunk) {
        if (!once || unit == 0) {
          __syncthreads();
          fill(from);
          __syncthreads();
        }
        multiply_pairs<mode>(shared().table, pair, pair_at(unit, 0), pair_at(unit, 8), channels,
                             from, params.whole, p.sizes.heads > 8, lane(), sum);
      }
      keep(unit, sum);
    }
    __syncthreads();
  }

  // Of keys g and g + 8 of the half, and queries 2t and 2t + 1 of each tile of 8.
  using Results = float[kQueryTiles][4];

  __device__ __forceinline__ void products(int head, int half, Results& sum) const {
    const Sizes& s = params.problem.sizes;
    const Stored projected = {params.problem.projected, Operands::kType};
    const std::int64_t q = head * s.dim;
    const std::int64_t k = q + s.width();
    const std::int64_t first = (batch * s.n + key_at(half * 16 + g())) * s.projected() + k;
    const std::int64_t second = (batch * s.n + key_at(half * 16 + g() + 8)) * s.projected() + k;
#pragma unroll 1
    for (int from = 0; from < s.dim; from += Operands::kStep) {
      const int at = from + t() * Operands::kNumbers;
      const uint4 a = Operands::load(projected, first + at, s.dim - at, true);
      const uint4 a_8 = Operands::load(projected, second + at, s.dim - at, true);
#pragma unroll
      for (int i = 0; i < kQueryTiles; ++i) {
        const std::int64_t query = (batch * s.n + query_at(i * 8 + g())) * s.projected() + q;
        const uint4 b = Operands::load(projected, query + at, s.dim - at, true);
        Operands::multiply(sum[i], a, a_8, b);
      }
    }
  }

  __device__ __forceinline__ void distances(int head, int half, Results& sum) const {
    const Sizes& s = params.problem.sizes;
    const int line = point_line(s);
    const std::int64_t first = (batch * s.heads + head) * s.n;
    const auto load = [line](const float* from, int at, float4(&fours)[kFours]) {
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        fours[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (at + 4 * i < line) fours[i] = *reinterpret_cast<const float4*>(from + at + 4 * i);
      }
    };
#pragma unroll 1
    for (int from = 0; from < line; from += 4 * kFours) {
      float4 keys[2][kFours];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        load(params.problem.k_points + (first + key_at(half * 16 + g() + 8 * e)) * line, from,
             keys[e]);
      }
#pragma unroll
      for (int i = 0; i < kQueryTiles; ++i) {
        float4 fours[2][kFours];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          load(params.problem.q_points + (first + query_at(i * 8 + 2 * t() + e)) * line, from,
               fours[e]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int f = 0; f < kFours; ++f) {
            const float4& a = keys[e / 2][f];
            const float4& b = fours[e % 2][f];
            const float x = a.x - b.x, y = a.y - b.y, z = a.z - b.z, w = a.w - b.w;
            sum[i][e] = fmaf(x, x, fmaf(y, y, fmaf(z, z, fmaf(w, w, sum[i][e]))));
          }
        }
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const LogitsProblem& p = params.problem;
    const std::int64_t line = pair_line(p.sizes.n);
    constants();
    params.streams ? stream_bias() : any_bias();
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
      Results product = {}, distance = {};
      products(head, half, product);
      distances(head, half, distance);
#pragma unroll
      for (int r = 0; r < 4 * kQueryTiles; ++r) {
        const int e = r % 4, i = r / 4 * 8 + 2 * t() + e % 2;
        const int j = half * 16 + g() + e / 2 * 8;
        if (row + i >= p.block.rows || key + j >= line) continue;
        const float bias = shared().bias[head * kHeadPitch + i * kQueryPitch + j];
        float logit = fmaf(bias, p.bias_scale * kLog2e, shared().constant[head]);
        logit = fmaf(product[r / 4][e], p.scalar_scale * kLog2e, logit);
        logit = fmaf(-shared().distance[head], distance[r / 4][e], logit);
        if (!there[e / 2]) logit = __uint_as_float(0xff800000u);
        const std::int64_t to = (batch * p.sizes.heads + head) * p.block.rows + row + i;
        p.logits[to * line + key + j] = logit;
      }
    }
  }
};

template <Mode mode, int queries>
__global__ void __launch_bounds__(kPairThreads, 4)
    logits_kernel(const __grid_constant__ LogitsParams params) {
  const std::int64_t index = blockIdx.x;
  const std::int64_t line = index / params.key_tiles;
  LogitsKernel<mode, queries>{params, thread_index(), line / params.query_tiles,
                              line % params.query_tiles * queries,
                              index % params.key_tiles * kTileKeys}
      .run();
}

}  // namespace fused_ops::invariant_point_attention
