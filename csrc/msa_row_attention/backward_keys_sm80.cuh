// SPDX-License-Identifier: Apache-2.0
// Gradients of keys and values: dv = P^T da, dk = dS^T q / sqrt(d), with P the weights and
// dS = P (da v^T - D).
//
// The forward with queries and keys in each other's place: a warp has 32 keys (16 of wide heads) of
// one row and walks the queries, 64 at a time through a ring in shared memory, 16 at a time through
// registers. So logits come out as S^T = k q^T, with keys along M, and P^T and dS^T are at once the
// left operands of the next products. Only the bias has queries along M; its matrices of 8 by 8 are
// transposed as words between lanes (movmatrix), half as many as P and dS would have, and nothing
// goes through shared memory. Besides, an absent key is a row of results and nothing else: it is
// left out when the results are stored.
#pragma once

#include "msa_row_attention/backward_pieces.cuh"

namespace fused_ops::msa_row_attention {

// A block has `row_count` rows and of each 16 * `key_tiles` * `key_warps` keys.
template <Mode mode, int width, int row_count, int key_warps, int key_tiles, int stage_count,
          bool dropout = false>
struct BackwardKeys {
  static constexpr int kRowThreads = 32 * key_warps;
  static constexpr int kThreads = kRowThreads * row_count;
  static constexpr int kM = key_tiles;
  static constexpr int kWarpKeys = 16 * kM;
  static constexpr int kBlockKeys = kWarpKeys * key_warps;
  static constexpr int kStages = stage_count;  // 1: for a single tile of queries
  static_assert(kStages <= 2);
  using Product = Products<mode, width, kM>;
  using Line = Lines<width>;
  static constexpr int kTileBytes = kKeys * Line::kPitch;
  static constexpr int kSteps = kKeys / 16;  // of a tile
  static constexpr int kUnroll = kSteps;

  // Of 16 queries, as the lanes of a quad take them: lane t has queries 2t, 2t + 1 and those 8
  // further. D is there twice, as sums of products begin with it: of two keys.
  struct PlainStatistics {
    float log_sums[4][2][2];
    float row_dots[2][4][2][2];
  };
  struct DropoutStatistics : PlainStatistics {
    uint2 keys[16];
  };
  using Statistics = std::conditional_t<dropout, DropoutStatistics, PlainStatistics>;
  struct alignas(1024) Stage {
    unsigned char lines[row_count][2][kTileBytes];  // queries, gradients
    Statistics statistics[row_count][kSteps];
  };
  // That a thread copies of a tile; and words of dropout's keys.
  static constexpr int kNumbers = 2 * kKeys / kRowThreads;
  static constexpr int kWords = dropout ? kNumbers : 0;
  struct Shared {
    Stage stages[kStages];
    // What a thread asks for the next tile with, pieces and numbers: here it occupies no registers.
    const std::uint16_t* queries[kThreads];
    const std::uint16_t* gradients[kThreads];
    const float* numbers[kNumbers + kWords][kThreads];
    std::uint32_t offsets[dropout ? kThreads : 1];  // of dropout's hash, at the lane's first key
  };
  static constexpr int kStageBytes = sizeof(Stage);

  const BackwardParams& p;
  // Of the row's queries and statistics in the first stage: numbers, else the compiler looks for
  // them at each use.
  sm80::SharedAddress lines;
  sm80::SharedAddress statistics;
  bool wanted;  // whether any of the row's keys in this block is there
  // The lane's numbers of the next 16 queries.
  const uint4* bias;

  // Is read again where it is asked for, and occupies no registers.
  static __device__ __forceinline__ unsigned thread() {
    return static_cast<unsigned>(thread_index());
  }
  __device__ __forceinline__ unsigned lane() const { return thread() % 32; }
  __device__ __forceinline__ unsigned in_row() const {
    return row_count == 1 ? thread() : thread() % kRowThreads;
  }

  // Of a single row all is the same for all threads.
  static __device__ __forceinline__ unsigned slot_of(unsigned thread) {
    return row_count == 1 ? 0 : thread / kRowThreads;
  }
  // The warp's first one.
  static __device__ __forceinline__ int first_key(const RowTile& at, unsigned thread) {
    return at.tile * kBlockKeys + static_cast<int>(thread % kRowThreads / 32 * kWarpKeys);
  }
  // Which of the warp's keys are there.
  static __device__ __forceinline__ std::uint32_t present(const BackwardParams& p,
                                                          const RowTile& at, int first) {
    if (!at.exists) return 0;
    const std::uint64_t word = p.mask_word(at.row, first / kKeys) >> (first % kKeys);
    return static_cast<std::uint32_t>(word) & (0xffffffffu >> (32 - kWarpKeys));
  }

  static __device__ __forceinline__ void run(const BackwardParams& p) {
    const unsigned thread = BackwardKeys::thread();
    const auto at = RowTile::of<row_count>(p, slot_of(thread));
    std::uint64_t any = 0;
#pragma unroll
    for (int i = 0; i < kBlockKeys; i += kKeys) {
      any |= p.mask_word(at.row, (at.tile * kBlockKeys + i) / kKeys);
    }
    const std::int64_t head = std::int64_t{at.group} * p.heads + at.head;
    const int piece = first_key(at, thread) / kBiasBlock * 32 + static_cast<int>(thread % 32);
    const Stage& first = shared_memory<Shared>().stages[0];
    const Place place = at.place(p);
    const unsigned in_row = thread % kRowThreads;
    const unsigned line = in_row / Line::kPieceRoom, column = in_row % Line::kPieceRoom * 8;
    auto& shared = shared_memory<Shared>();
    shared.queries[thread] = p.projected + place.projected(line, 0) + column;
    shared.gradients[thread] = p.d_attended + place.attended(line) + column;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      shared.numbers[i][thread] = (which_number(in_row, i) == 0 ? p.log_sums : p.row_dots) +
                                  place.statistic((in_row + i * kRowThreads) % kKeys);
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      shared.numbers[kNumbers + i][thread] =
          reinterpret_cast<const float*>(p.dropout.keys + place.statistic(0)) + in_row +
          i * kRowThreads;
    }
    BackwardKeys{p, number_of(first.lines[slot_of(thread)]),
                 number_of(first.statistics[slot_of(thread)]), at.exists && any != 0,
                 static_cast<const uint4*>(p.bias) + head * p.blocks * line_of_bias(p) + piece}
        .all(at);
  }

  // 0: log_sums, 1: row_dots.
  static __device__ __forceinline__ unsigned which_number(unsigned in_row, int i) {
    return (in_row + i * kRowThreads) / kKeys;
  }

  // Of 16 queries and all keys, in pieces of 16 bytes.
  static __device__ __forceinline__ std::int64_t line_of_bias(const BackwardParams& p) {
    return std::int64_t{p.tiles} * (kKeys / kBiasBlock * 32);
  }

  // Asks for the next tile of queries and what belongs to them; zeros for those that do not exist.
  // With these and a bias of zero their weights are one, times zero.
  __device__ __forceinline__ void copy(int tile) {
    if (wanted && tile < p.tiles) {
      const unsigned me = in_row();
      const auto stage = tile % kStages * kStageBytes;
      const std::uint64_t here =
          tile + 1 < p.tiles ? ~std::uint64_t{0} : ~std::uint64_t{0} >> (-p.n & (kKeys - 1));
      auto& shared = shared_memory<Shared>();
      const std::uint16_t* queries = shared.queries[thread()];
      const std::uint16_t* gradients = shared.gradients[thread()];
      copy_two_lines<width, kRowThreads>(lines + stage, lines + stage + kTileBytes, queries,
                                         gradients, 4 * p.width, p.width, p.dim, me, here);
      shared.queries[thread()] = queries + std::uint64_t{4 * kKeys} * p.width;
      shared.gradients[thread()] = gradients + std::uint64_t{kKeys} * p.width;
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        const unsigned query = (me + i * kRowThreads) % kKeys;
        const int bytes = (here >> query & 1) != 0 ? 4 : 0;
        const auto to = statistics + stage + query / 16 * static_cast<int>(sizeof(Statistics)) +
                        query % 8 / 2 * 16 + query % 2 * 4;
        const unsigned half = query / 8 % 2;
        const float* from = shared.numbers[i][thread()];
        if (which_number(me, i) == 0) {
          sm80::cp_async_4(to + half * 8, from, bytes);
        } else {
          sm80::cp_async_4(to + 64 + half * 64, from, bytes);
          sm80::cp_async_4(to + 64 + half * 64 + 8, from, bytes);
        }
        shared.numbers[i][thread()] = from + kKeys;
      }
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const unsigned word = me + i * kRowThreads, query = word / 2;
        const float* from = shared.numbers[kNumbers + i][thread()];
        sm80::cp_async_4(statistics + stage + query / 16 * static_cast<int>(sizeof(Statistics)) +
                             static_cast<int>(sizeof(PlainStatistics)) + word % 32 * 4,
                         from, (here >> query & 1) != 0 ? 4 : 0);
        shared.numbers[kNumbers + i][thread()] = from + 2 * kKeys;
      }
    }
    sm80::cp_async_commit();
  }

  uint4 ahead[2][kM];  // bias of a step and of the next one
  typename Product::Fragments key, value;
  typename Product::Sums d_key, d_value;

  __device__ __forceinline__ void load_bias(int step) {
#pragma unroll
    for (int m = 0; m < kM; ++m) ahead[step % 2][m] = bias[m * 32];
  }

  __device__ __forceinline__ void all(const RowTile& at) {
    copy(0);
    const int first = first_key(at, thread());
    const std::uint32_t present_keys = present(p, at, first);
    if (dropout) {
      shared_memory<Shared>().offsets[thread()] =
          (static_cast<unsigned>(first) + lane() / 4) / 2 * kDropoutStep;
    }
    if (present_keys != 0) {
      load_bias(0);
      is_whole(first) ? load_keys<true>(at, first) : load_keys<false>(at, first);
    }
    Product::clear(d_key);
    Product::clear(d_value);
    for (int tile = 0; tile < p.tiles; ++tile) {
      sm80::cp_async_wait<0>();
      __syncthreads();
      if (kStages > 1) copy(tile + 1);
      if (present_keys == 0) continue;
      const auto stage = tile % kStages * kStageBytes;
      const auto across = lines + stage + Product::across(lane());
      typename Product::Down down;
      Product::start(down, lines + stage + Product::down(lane()));
      const auto numbers = statistics + stage + lane() % 4 * 16;
#pragma unroll kUnroll
      for (int i = 0; i < kSteps; ++i) {
        const int block = tile * kSteps + i;
        if (i > 0 && block >= p.blocks) break;
        if (block + 1 < p.blocks) bias += line_of_bias(p);
        load_bias(i + 1);
        typename Product::Packed weights, gradients;
        step(weights, gradients, i, across, numbers);
        Product::add(d_value, weights, down, kTileBytes + i * 16 * Line::kPitch);
        Product::add(d_key, gradients, down, i * 16 * Line::kPitch);
      }
    }
    sm80::cp_async_wait<0>();
    store();
  }

  // Whether all of the warp's keys exist and fill their width.
  __device__ __forceinline__ bool is_whole(int first) const {
    return width == p.dim && first + kWarpKeys <= p.n;
  }

  template <bool whole>
  __device__ __forceinline__ void load_keys(const RowTile& at, int first) {
    const std::uint16_t* from = p.projected + at.place(p).projected(first, 1);
    Product::template load<whole>(key, from, 4 * p.width, p.n - first, p.dim, lane());
    Product::template load<whole>(value, from + p.width, 4 * p.width, p.n - first, p.dim, lane());
    // Products of the negative begin with D, and give D - da v^T.
    Product::negate(value);
  }

  __device__ __forceinline__ void store() const {
    const auto at = RowTile::of<row_count>(p, slot_of(thread()));
    if (!at.exists) return;
    const int first = first_key(at, thread());
    is_whole(first) ? store<true>(at, first) : store<false>(at, first);
  }
  template <bool whole>
  __device__ __forceinline__ void store(const RowTile& at, int first) const {
    const std::uint32_t here = present(p, at, first);
    std::uint16_t* to = p.d_projected + at.place(p).projected(first, 1);
    Product::template store<whole>(to, 4 * p.width, d_key, -p.scale, here, p.n - first, p.dim,
                                   lane());
    Product::template store<whole>(to + p.width, 4 * p.width, d_value,
                                   dropout ? p.dropout.factor : 1.0f, here, p.n - first, p.dim,
                                   lane());
  }

  // P and -dS of 16 queries, 8 at a time.
  __device__ __forceinline__ void step(typename Product::Packed& packed_weights,
                                       typename Product::Packed& packed_gradients, int i,
                                       sm80::SharedAddress across,
                                       sm80::SharedAddress numbers) const {
    typename Product::Columns queries, d_attended;
    const auto at = numbers + i * static_cast<int>(sizeof(Statistics));
    const uint4 four = sm80::load_shared_16(at);
    const float log_sums[2][2] = {{__uint_as_float(four.x), __uint_as_float(four.y)},
                                  {__uint_as_float(four.z), __uint_as_float(four.w)}};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      typename Product::Weights weights, gradients;
      const uint4 dots = sm80::load_shared_16(at + 64 + j * 64);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        // First or last 8 queries of the first 8 keys, then of the next.
        const uint4& piece = ahead[i % 2][m];
        const std::uint32_t words[2] = {j == 0 ? piece.x : piece.y, j == 0 ? piece.z : piece.w};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 two = unpack_16<mode>(sm80::transpose_8x8(words[h]));
          weights[m][2 * h] = two.x;
          weights[m][2 * h + 1] = two.y;
        }
        gradients[m][0] = __uint_as_float(dots.x);
        gradients[m][1] = __uint_as_float(dots.y);
        gradients[m][2] = __uint_as_float(dots.z);
        gradients[m][3] = __uint_as_float(dots.w);
      }
      Product::load(queries, across, i * 16 * Line::kPitch, j);
      Product::multiply(weights, key, queries[j]);
      Product::load(d_attended, across, kTileBytes + i * 16 * Line::kPitch, j);
      Product::multiply(gradients, value, d_attended[j]);
      uint2 dropout_key;  // of a query of these 8
      std::uint32_t offset;
      if (dropout) {
        offset = shared_memory<Shared>().offsets[thread()];
        // `at` is already at a place of 16 bytes, as queries 2t and 2t + 1 have.
        dropout_key = sm80::load_shared_8(at + static_cast<int>(sizeof(PlainStatistics)) + j * 64 +
                                          static_cast<int>(lane() / 4 % 2) * 8);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          weights[m][e] =
              sm80::exp2_approx(fmaf(weights[m][e], p.logit_scale, -log_sums[j][e % 2]));
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float (&weight)[4] = weights[m], (&gradient)[4] = gradients[m];
          const int e = 2 * h;
          if (dropout) {
            const auto numbers = exchange_numbers(
                dropout_numbers(dropout_key, offset + (m * 8 + h * 4) * kDropoutStep), lane());
            const bool first = keeps_first(numbers, p.dropout.threshold);
            const bool second = keeps_second(numbers, p.dropout.threshold);
            gradient[e] = (first ? gradient[e] : __uint_as_float(dots.x)) * weight[e];
            gradient[e + 1] = (second ? gradient[e + 1] : __uint_as_float(dots.y)) * weight[e + 1];
            // Times zero, for NaN stays what it is.
            if (!first) weight[e] *= 0.0f;
            if (!second) weight[e + 1] *= 0.0f;
          } else {
            gradient[e] *= weight[e];
            gradient[e + 1] *= weight[e + 1];
          }
        }
        Product::pack(packed_weights[m], weights[m], j);
        Product::pack(packed_gradients[m], gradients[m], j);
      }
    }
  }
};

template <Mode mode, int width, int row_count, int key_warps, int key_tiles, int stage_count,
          bool dropout = false>
__global__ void __launch_bounds__(32 * key_warps * row_count,
                                  (width <= 32 ? 384 : 256) / (32 * key_warps * row_count))
    backward_keys_kernel(const __grid_constant__ BackwardParams params) {
  BackwardKeys<mode, width, row_count, key_warps, key_tiles, stage_count, dropout>::run(params);
}

}  // namespace fused_ops::msa_row_attention
