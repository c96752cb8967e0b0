// SPDX-License-Identifier: Apache-2.0
// What the kernels for the gradient of the pair tensor share: how tiles are shared out among blocks
// of threads, what is asked for ahead, and how results leave.
//
// A tile is a query and `kPairKeys` keys, one after the other in memory. A warp has 32 channels of
// it, for both products: it alone reads and multiplies these columns of the pair tensor. What all
// warps of a block read, dS and logits of all heads, is small.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/numbers.cuh"
#include "common/cuda/sm80/stored.cuh"
#include "invariant_point_attention/backward.h"

namespace fused_ops::invariant_point_attention {

constexpr int kPairHeads = 16;     // as many as a product's operand has; zeros fill them up
constexpr int kPairChannels = 32;  // of a warp
constexpr int kPairMostWarps = 4;
constexpr int kPairStages = 3;

constexpr int pair_keys(DType type) {
  return type == DType::kFloat32 ? 32 : 64;
}

// How the pair tensor comes into shared memory.
enum class PairAccess : std::uint8_t {
  kCopied,     // pieces of 16 bytes of the type that products take, asynchronously
  kConverted,  // eight channels at a time, through registers
  kNumbers,    // one by one: any alignment, any number of channels
};

struct PairBackwardParams {
  PairBackwardProblem problem;
  int n = 0;
  int key_tiles = 0;       // of a query
  int warps = 0;           // of a block
  int chunks = 0;          // blocks beside each other, for the channels
  std::int64_t share = 0;  // tiles of a part of the grid, and how many parts have one more
  std::int64_t longer = 0;
  PairAccess access = PairAccess::kNumbers;
  bool whole_lines = false;  // the gradient is written in pieces of 16 bytes
  // Where a stage has what, in bytes.
  int logits_at = 0;
  int log_sums_at = 0;
  int pairs_at = 0;
  int stage_bytes = 0;
};

struct PairTile {
  int batch;
  int row;  // of the block of queries
  int key_tile;

  __device__ __forceinline__ PairTile(const PairBackwardParams& p, std::int64_t index) {
    const auto tiles = static_cast<std::int64_t>(p.key_tiles);
    const std::int64_t line = index / tiles;
    key_tile = static_cast<int>(index % tiles);
    row = static_cast<int>(line % p.problem.block.rows);
    batch = static_cast<int>(line / p.problem.block.rows);
  }

  __device__ __forceinline__ void next(const PairBackwardParams& p) {
    if (++key_tile < p.key_tiles) return;
    key_tile = 0;
    if (++row < p.problem.block.rows) return;
    row = 0;
    ++batch;
  }
};

// `type`: what products take.
template <DType type>
struct PairBackwardBlock {
  static constexpr bool kSixteen = type != DType::kFloat32;
  static constexpr int kSize = kSixteen ? 2 : 4;
  static constexpr int kPairKeys = pair_keys(type);
  static constexpr int kScoreBytes = kPairHeads * kPairKeys * kSize;  // dS of a stage
  static constexpr int kLogitBytes = kPairHeads * kPairKeys * 4;
  static constexpr int kLogSumBytes = 128;
  static constexpr int kPairBytes = kPairKeys * kPairChannels * kSize;  // of a warp

  const PairBackwardParams& p;
  int thread;

  __device__ __forceinline__ int warp() const { return thread >> 5; }
  __device__ __forceinline__ int lane() const { return thread & 31; }
  __device__ __forceinline__ int g() const { return thread >> 2 & 7; }
  __device__ __forceinline__ int t() const { return thread & 3; }
  __device__ __forceinline__ int part() const { return static_cast<int>(blockIdx.x) / p.chunks; }
  __device__ __forceinline__ int first_channel() const {
    return (static_cast<int>(blockIdx.x) % p.chunks * p.warps + warp()) * kPairChannels;
  }
  // From the warp's first channel on; may be none.
  __device__ __forceinline__ int channels_left() const {
    return p.problem.channels - first_channel();
  }

  __device__ __forceinline__ unsigned char* stage(int index) const {
    return shared_memory<unsigned char[16]>() + index * p.stage_bytes;
  }
  __device__ __forceinline__ unsigned char* scores(int index) const { return stage(index); }
  __device__ __forceinline__ unsigned char* logits(int index) const {
    return stage(index) + p.logits_at;
  }
  __device__ __forceinline__ const float* log_sums(int index) const {
    return reinterpret_cast<const float*>(stage(index) + p.log_sums_at);
  }
  __device__ __forceinline__ unsigned char* pairs(int index) const {
    return stage(index) + p.pairs_at + warp() * kPairBytes;
  }

  // Where pieces of 16 bytes lie: such that what the lanes of an instruction read lies in different
  // banks. Of 16-bit dS eight lines are read at one piece. Fp32 numbers of both orders of reading
  // are those of 4 heads and 8 keys, or of 8 heads and 4 keys.
  static __device__ __forceinline__ int score_piece(int head, int piece) {
    const int turned = kSixteen ? head & 7 : (head & 3) << 1 | (head >> 2 & 1);
    return head * kPairKeys * kSize + ((piece ^ turned) << 4);
  }
  // A 16-bit operand has heads 2t and 2t + 1 side by side.
  static __device__ __forceinline__ int logit_piece(int head, int piece) {
    const int turned = kSixteen ? (head >> 1 & 3) << 1 : (head & 3) << 1 | (head >> 2 & 1);
    return head * kPairKeys * 4 + ((piece ^ turned) << 4);
  }
  static __device__ __forceinline__ int pair_piece(int key, int piece) {
    const int turned = kSixteen ? key >> 1 & 3 : (key & 3) << 1;
    return key * kPairChannels * kSize + ((piece ^ turned) << 4);
  }

  __device__ __forceinline__ float logit(int index, int head, int key) const {
    const int at = logit_piece(head, key >> 2) + (key & 3) * 4;
    return *reinterpret_cast<const float*>(logits(index) + at);
  }
  // The weight: of keys that are not there 0, of heads that do not exist finite.
  __device__ __forceinline__ float weight(int index, int head, int key) const {
    return sm80::exp2_approx(logit(index, head, key) - log_sums(index)[head]);
  }

  // Lines of keys of all heads, of numbers of `kBytes`: with what fills lines up, zeros beyond.
  template <int kBytes, class At>
  __device__ __forceinline__ void ask_lines(const void* from, const PairTile& tile,
                                            unsigned char* to, At at) const {
    constexpr int kPieces = kPairKeys * kBytes / 16;
    const Sizes& sizes = p.problem.sizes;
    const std::int64_t line = pair_line(p.n);
    for (int index = thread; index < kPairHeads * kPieces; index += p.warps * 32) {
      const int head = index / kPieces;
      const int piece = index % kPieces;
      const std::int64_t key = tile.key_tile * kPairKeys + piece * (16 / kBytes);
      const bool there = head < sizes.heads && key < line;
      const std::int64_t row =
          (std::int64_t{tile.batch} * sizes.heads + head) * p.problem.block.rows + tile.row;
      const auto* piece_from = static_cast<const unsigned char*>(from);
      if (there) piece_from += (row * line + key) * kBytes;
      sm80::cp_async_16(to + at(head, piece), piece_from, there ? 16 : 0);
    }
  }

  __device__ __forceinline__ std::int64_t query(const PairTile& tile) const {
    return p.problem.block.first_row + tile.row;
  }

  // Asks for what belongs to a tile.
  __device__ __forceinline__ void ask(const PairTile& tile, int index) const {
    const PairBackwardProblem& problem = p.problem;
    if (problem.d_logits) {
      ask_lines<kSize>(problem.d_logits, tile, scores(index), score_piece);
    }
    if (problem.d_features) {
      ask_lines<4>(problem.logits, tile, logits(index), logit_piece);
      if (thread < kPairHeads) {
        const bool there = thread < problem.sizes.heads;
        const std::int64_t head = std::int64_t{tile.batch} * problem.sizes.heads + thread;
        const float* from = problem.log_sums + (there ? head * p.n + query(tile) : 0);
        sm80::cp_async_4(stage(index) + p.log_sums_at + thread * 4, from, there ? 4 : 0);
      }
    }
    if (!problem.sums) return;
    if (p.access == PairAccess::kCopied) {
      copy_pairs(tile, index);
    } else if (kSixteen && p.access == PairAccess::kConverted &&
               problem.pair.type == DType::kFloat32) {
      convert_pairs<4>(tile, index, [&](std::int64_t at, int left, float (&numbers)[8]) {
        if (left > 0) load_numbers_as<DType::kFloat32>(problem.pair.data, at, numbers);
      });
    } else {  // rare
      const Stored stored{problem.pair.data, problem.pair.type};
      convert_pairs<1>(tile, index, [&](std::int64_t at, int left, float (&numbers)[8]) {
        if (p.access == PairAccess::kConverted) {
          if (left > 0) load_numbers(stored, at, numbers);
          return;
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (e < left) numbers[e] = load_number(stored.data, stored.type, at + e);
        }
      });
    }
  }

  __device__ __forceinline__ std::int64_t pair_at(const PairTile& tile, int key) const {
    const Pairs& pair = p.problem.pair;
    return tile.batch * pair.batch_stride + query(tile) * pair.i_stride + key * pair.j_stride;
  }

  __device__ __forceinline__ void copy_pairs(const PairTile& tile, int index) const {
    constexpr int kPieces = kPairChannels * kSize / 16;
    const int piece = lane() % kPieces;
    const int channel = first_channel() + piece * (16 / kSize);
    const auto* data = static_cast<const unsigned char*>(p.problem.pair.data);
    const int first = tile.key_tile * kPairKeys;
#pragma unroll
    for (int key = lane() / kPieces; key < kPairKeys; key += 32 / kPieces) {
      const bool there = first + key < p.n && channel < p.problem.channels;
      const std::int64_t at = there ? pair_at(tile, first + key) + channel : 0;
      sm80::cp_async_16(pairs(index) + pair_piece(key, piece), data + at * kSize, there ? 16 : 0);
    }
  }

  // `load(at, left, numbers)`: the eight numbers from element `at` on, of which `left` exist; the
  // others are zero. The loads of `kBatch` eights are under way at once.
  template <int kBatch, class Load>
  __device__ __forceinline__ void convert_pairs(const PairTile& tile, int index, Load load) const {
    const int channel = lane() % 4 * 8;
    const int left = channels_left() - channel;
    const int first = tile.key_tile * kPairKeys;
#pragma unroll 1
    for (int keys = lane() / 4; keys < kPairKeys; keys += 8 * kBatch) {
      float numbers[kBatch][8] = {};
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int key = first + keys + b * 8;
        load(pair_at(tile, key) + first_channel() + channel, key < p.n ? left : 0, numbers[b]);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        constexpr int kNumbers = 16 / kSize;
#pragma unroll
        for (int e = 0; e < 8; e += kNumbers) {
          float some[kNumbers];
#pragma unroll
          for (int i = 0; i < kNumbers; ++i) some[i] = numbers[b][e + i];
          const int at = pair_piece(keys + b * 8, (channel + e) / kNumbers);
          store_numbers_as<type>(pairs(index) + at, 0, some);
        }
      }
    }
  }

  // Columns of the tiles of 8 that a product gives are channels in such an order that a lane has 16
  // bytes of the gradient, whatever its type: column `column` of tile j.
  __device__ __forceinline__ int channel_of(int j, int column) const {
    const int two = column / 2;
    if (p.problem.grad_type == DType::kFloat32) {
      return j / 2 * 16 + two * 4 + j % 2 * 2 + column % 2;
    }
    return two * 8 + j * 2 + column % 2;
  }

  // Of the features' gradient, 0 where there is none.
  __device__ __forceinline__ float d_feature(const PairTile& tile, int head, int channel) const {
    const Sizes& sizes = p.problem.sizes;
    if (head >= sizes.heads || channel >= channels_left()) return 0.0f;
    const std::int64_t line = (tile.batch * sizes.n + query(tile)) * sizes.features();
    const std::int64_t at = line + sizes.pair_values_at() +
                            std::int64_t{head} * sizes.value_channels + first_channel() + channel;
    return __uint_as_float(number_bits(p.problem.d_features, at));
  }
  __device__ __forceinline__ float bias_weight(int head, int channel) const {
    if (head >= p.problem.sizes.heads || channel >= channels_left()) return 0.0f;
    return load_or(p.problem.weight,
                   std::int64_t{head} * p.problem.channels + first_channel() + channel, 0.0f);
  }
  static __device__ __forceinline__ std::uint32_t number_bits(const void* data, std::int64_t at) {
    if constexpr (kSixteen) {
      return __float_as_uint(from_bits(load_bits<type>(data, at), type));
    } else {
      return load_bits<type>(data, at);
    }
  }

  // 32 channels of the gradient of two keys, g and g + 8 of the 16 from `first_key` on.
  __device__ __forceinline__ void store(const PairTile& tile, int first_key,
                                        const float (&sum)[4][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + g() + half * 8;
      if (key >= p.n) continue;
      const std::int64_t pair = (std::int64_t{tile.batch} * p.n + query(tile)) * p.n + key;
      const std::int64_t at = pair * p.problem.channels + first_channel();
      if (p.problem.grad_type == DType::kFloat32) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          float numbers[4] = {sum[j][2 * half], sum[j][2 * half + 1], sum[j + 1][2 * half],
                              sum[j + 1][2 * half + 1]};
          store_fp32(at, channel_of(j, t() * 2), numbers);
        }
      } else {
        const float numbers[8] = {sum[0][2 * half],     sum[0][2 * half + 1], sum[1][2 * half],
                                  sum[1][2 * half + 1], sum[2][2 * half],     sum[2][2 * half + 1],
                                  sum[3][2 * half],     sum[3][2 * half + 1]};
        store_16(at, t() * 8, numbers);
      }
    }
  }

  __device__ __forceinline__ void store_fp32(std::int64_t at, int channel,
                                             float (&numbers)[4]) const {
    float* to = static_cast<float*>(p.problem.grad) + at + channel;
    const int left = channels_left() - channel;
    if (p.whole_lines) {
      if (left <= 0) return;
      if (p.problem.accumulate) {
        const float4 before = *reinterpret_cast<const float4*>(to);
        numbers[0] += before.x;
        numbers[1] += before.y;
        numbers[2] += before.z;
        numbers[3] += before.w;
      }
      sm80::store_global_16(to,
                            make_uint4(__float_as_uint(numbers[0]), __float_as_uint(numbers[1]),
                                       __float_as_uint(numbers[2]), __float_as_uint(numbers[3])));
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < left) to[e] = p.problem.accumulate ? to[e] + numbers[e] : numbers[e];
    }
  }

  __device__ __forceinline__ void store_16(std::int64_t at, int channel,
                                           const float (&numbers)[8]) const {
    const bool bf16 = p.problem.grad_type == DType::kBFloat16;
    std::uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      words[e] = bf16 ? sm80::pack_bf16(numbers[2 * e], numbers[2 * e + 1])
                      : sm80::pack_f16(numbers[2 * e], numbers[2 * e + 1]);
    }
    auto* to = static_cast<std::uint16_t*>(p.problem.grad) + at + channel;
    const int left = channels_left() - channel;
    if (p.whole_lines) {
      if (left > 0) sm80::store_global_16(to, make_uint4(words[0], words[1], words[2], words[3]));
      return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (e < left) to[e] = static_cast<std::uint16_t>(words[e / 2] >> (e % 2 * 16));
    }
  }

  // The sums of a part: of heads g and g + 8, tiles of 8 channels in their own order; and of dS,
  // which any column has.
  __device__ __forceinline__ void store_sums(const float (&sum)[4][4],
                                             const float (&alone)[4]) const {
    const PairBackwardProblem& problem = p.problem;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = g() + half * 8;
      if (head >= problem.sizes.heads) continue;
      float* to = problem.sums +
                  (std::int64_t{part()} * problem.sizes.heads + head) * (problem.channels + 1);
      const auto put = [&](int channel, float number) {
        to[channel] = problem.add_sums ? to[channel] + number : number;
      };
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int channel = j * 8 + t() * 2 + e;
          if (channel < channels_left()) put(first_channel() + channel, sum[j][2 * half + e]);
        }
      }
      if (first_channel() == 0 && t() == 0) put(problem.channels, alone[2 * half]);
    }
  }
};

// Takes the block's tiles: `take(tile, stage, new_query)` by each warp.
template <class Block, class Take>
__device__ __forceinline__ void walk_pairs(const Block& block, Take take) {
  const PairBackwardParams& p = block.p;
  const std::int64_t part = block.part();
  const bool longer = part < p.longer;
  const std::int64_t first = part * p.share + (longer ? part : p.longer);
  const std::int64_t tiles = p.share + (longer ? 1 : 0);
  if (tiles == 0) return;
  PairTile ahead(p, first);
  PairTile tile = ahead;
  std::int64_t asked = 0;
  const auto ask = [&](int stage) {
    if (asked < tiles) {
      block.ask(ahead, stage);
      ahead.next(p);
      ++asked;
    }
    sm80::cp_async_commit();
  };
#pragma unroll 1
  for (int stage = 0; stage < kPairStages - 1; ++stage) ask(stage);
  int stage = 0;
#pragma unroll 1
  for (std::int64_t done = 0; done < tiles; ++done) {
    sm80::cp_async_wait<kPairStages - 2>();
    __syncthreads();
    ask(stage == 0 ? kPairStages - 1 : stage - 1);  // the one that all have done with
    take(tile, stage, done == 0 || tile.key_tile == 0);
    tile.next(p);
    stage = stage + 1 < kPairStages ? stage + 1 : 0;
  }
  sm80::cp_async_wait<0>();
}

}  // namespace fused_ops::invariant_point_attention
