// SPDX-License-Identifier: Apache-2.0
// Logits of 8 or 16 queries x 32 keys, all heads. First the bias, a warp taking queries of its own,
// into shared memory; then by heads the products of keys (rows of an mma) and queries (its
// columns), and the distances of points in fp32. What a warp needs for the next 16 pairs, or for a
// head, is asked for at once. A lane's results of neighbouring keys are in neighbouring lanes:
// whole sectors of 32 bytes are written. With 16 queries keys are read half as often; with 8 there
// are twice as many blocks.
#pragma once

#include <type_traits>

#include "invariant_point_attention/pair_products.cuh"
#include "invariant_point_attention/softplus.cuh"

namespace fused_ops::invariant_point_attention {

constexpr int kTileKeys = 32;
// Lanes 4g + t touch one number at (query 2t, key g), or two at (head g, key 2t): different banks.
constexpr int kQueryPitch = kTileKeys + 4;

constexpr int head_pitch(int queries) {
  return queries * kQueryPitch + 8;
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
  alignas(8) float bias[kMostHeads * head_pitch(queries)];
  float constant[kMostHeads];  // the bias of the projection, as logits have it
  float distance[kMostHeads];  // what squared distances are multiplied with
};

template <Mode mode, int queries>
struct LogitsKernel {
  using Operands = PairOperands<mode>;
  using Shared = LogitsShared<queries>;
  using Number = std::conditional_t<is_fp32(mode), float, std::uint16_t>;
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
    shared().constant[thread] = load_or(p.bias.bias, thread, 0.0f) * (p.bias_scale * kLog2e);
    shared().distance[thread] = p.point_scale * softplus(w) * (0.5f * kLog2e);
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

  __device__ __forceinline__ void keep(int unit, const PairSums& sum) const {
    float* to = shared().bias + query_of(unit) * kQueryPitch + unit % 2 * 16 + 2 * t();
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const int head = g() + e % 4 / 2 * 8;
      *reinterpret_cast<float2*>(to + head * kHeadPitch + e / 4 * 8) =
          make_float2(sum[e / 4][e % 4], sum[e / 4][e % 4 + 1]);
    }
  }

  __device__ __forceinline__ void fill(int from) const {
    const LogitsProblem& p = params.problem;
    shared().table.template fill<mode>(p.bias.weight, 0, p.sizes.heads, p.sizes.pair_channels, from,
                                       params.whole_weights, thread);
  }

  // Lines that are whole and of the mode's type, whose weights fit the table: a stage, which is a
  // unit or a part of its channels, is asked for before the one before it is multiplied.
  template <bool full>
  __device__ __forceinline__ void stream_bias() const {
    const LogitsProblem& p = params.problem;
    const int channels = p.sizes.pair_channels;
    constexpr int kPart = kLoadSteps * Operands::kStep;
    const int parts = (channels + kPart - 1) / kPart;
    const int steps = (channels + Operands::kStep - 1) / Operands::kStep;
    const Stored pair = {p.pair.data, p.pair.type};
    PairPieces<mode> here, next;
    int unit = 0, part = 0;
    here.template ask<full>(pair, pair_at(0, 0), pair_at(0, 8), channels, 0, lane());
    fill(0);
    __syncthreads();
    PairSums sum = {};
    const auto take = [&](PairPieces<mode>& now, PairPieces<mode>& then) {
      const bool last = part + 1 == parts;
      const int next_unit = last ? unit + 1 : unit, next_part = last ? 0 : part + 1;
      if (next_unit < kUnits) {
        then.template ask<full>(pair, pair_at(next_unit, 0), pair_at(next_unit, 8), channels,
                                next_part * kPart, lane());
      }
      now.template multiply<full>(shared().table, part * kLoadSteps, steps, lane(), sum);
      if (last) {
        keep(unit, sum);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[e / 4][e % 4] = 0.0f;
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
      PairSums sum = {};
#pragma unroll 1
      for (int from = 0; from < channels; from += Operands::kChunk) {
        if (!once || unit == 0) {
          __syncthreads();
          fill(from);
          __syncthreads();
        }
        multiply_pairs<mode>(shared().table, pair, pair_at(unit, 0), pair_at(unit, 8), channels,
                             from, params.whole, lane(), sum);
      }
      keep(unit, sum);
    }
    __syncthreads();
  }

  // Of keys g and g + 8 of the half, and queries 2t and 2t + 1 of each tile of 8.
  using Results = float[kQueryTiles][4];

  // Where the lane's residues begin, in the batch element: lines of projected numbers, of keys g
  // and g + 8 and of query g of each tile; and lines of points, which are counted in 32 bits.
  struct Places {
    const unsigned char* key_lines[2];
    const unsigned char* query_lines[kQueryTiles];
    unsigned key_points[2];
    unsigned query_points[kQueryTiles][2];
  };

  __device__ __forceinline__ Places places(int half) const {
    const Sizes& s = params.problem.sizes;
    const auto* projected = static_cast<const unsigned char*>(params.problem.projected);
    const auto begin = [&](std::int64_t residue, int column) {
      return projected + ((batch * s.n + residue) * s.projected() + column) * sizeof(Number);
    };
    const auto line = static_cast<unsigned>(point_line(s));
    Places at;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const std::int64_t residue = key_at(half * 16 + g() + 8 * e);
      at.key_lines[e] = begin(residue, s.width() + t() * Operands::kNumbers);
      at.key_points[e] = static_cast<unsigned>(residue) * line;
    }
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
      at.query_lines[i] = begin(query_at(i * 8 + g()), t() * Operands::kNumbers);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        at.query_points[i][e] = static_cast<unsigned>(query_at(i * 8 + 2 * t() + e)) * line;
      }
    }
    return at;
  }

  __device__ __forceinline__ void products(int head, const Places& at, Results& sum) const {
    const int dim = params.problem.sizes.dim;
#pragma unroll 1
    for (int from = 0; from < dim; from += Operands::kStep) {
      const int left = dim - from - t() * Operands::kNumbers;
      const int column = (head * dim + from) * static_cast<int>(sizeof(Number));
      const auto load = [&](const unsigned char* line) {
        return left > 0 ? *reinterpret_cast<const uint4*>(line + column) : make_uint4(0, 0, 0, 0);
      };
      const uint4 a = load(at.key_lines[0]), a_8 = load(at.key_lines[1]);
#pragma unroll
      for (int i = 0; i < kQueryTiles; ++i) {
        Operands::multiply(sum[i], a, a_8, load(at.query_lines[i]));
      }
    }
  }

  // Of so many numbers of the points; `full`: no line ends before.
  template <bool full>
  __device__ __forceinline__ void add_distances(const float* q, const float* k, int left,
                                                const Places& at, Results& sum) const {
    const auto load = [left](const float* from, float4(&fours)[kFours]) {
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        fours[i] = full || 4 * i < left ? *reinterpret_cast<const float4*>(from + 4 * i)
                                        : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    };
    float4 keys[2][kFours];
#pragma unroll
    for (int e = 0; e < 2; ++e) load(k + at.key_points[e], keys[e]);
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
      float4 fours[2][kFours];
#pragma unroll
      for (int e = 0; e < 2; ++e) load(q + at.query_points[i][e], fours[e]);
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

  __device__ __forceinline__ void distances(int head, const Places& at, Results& sum) const {
    const Sizes& s = params.problem.sizes;
    const int line = point_line(s);
    const std::int64_t first = (batch * s.heads + head) * s.n * line;
    const float* q = params.problem.q_points + first;
    const float* k = params.problem.k_points + first;
    int from = 0;
#pragma unroll 1
    for (; from + 4 * kFours <= line; from += 4 * kFours) {
      add_distances<true>(q + from, k + from, 0, at, sum);
    }
    if (from < line) add_distances<false>(q + from, k + from, line - from, at, sum);
  }

  __device__ __forceinline__ void run() const {
    const LogitsProblem& p = params.problem;
    const std::int64_t line = pair_line(p.sizes.n);
    constants();
    if (!params.streams) {
      any_bias();
    } else if (p.sizes.pair_channels % (kLoadSteps * Operands::kStep) == 0) {
      stream_bias<true>();
    } else {
      stream_bias<false>();
    }
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
    const Places at = places(half);
#pragma unroll 1
    for (int head = warp() / 2; head < p.sizes.heads; head += 2) {
      Results product = {}, distance = {};
      products(head, at, product);
      distances(head, at, distance);
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
