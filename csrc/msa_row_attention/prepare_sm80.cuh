// SPDX-License-Identifier: Apache-2.0
// What comes before the products, in one launch: the weights side by side, the mask as bits, and
// the LayerNorm of the MSA, which is bound by memory bandwidth. A block takes one of the three.
#pragma once

#include "msa_row_attention/norm.cuh"

namespace fused_ops::msa_row_attention {

constexpr int kPrepareThreads = 128;
constexpr int kPrepareWarps = kPrepareThreads / 32;

// Numbers to be converted, one after the other; zeros where there are none. Of each `chunk` of the
// results the first `filled` come from `from`, where they follow each other, and the rest are
// zeros.
struct WeightCopy {
  Stored from;
  void* to = nullptr;
  std::int64_t count = 0;  // of results
  std::int64_t chunk = 1;
  std::int64_t filled = 1;
  unsigned blocks = 0;
  bool vector = false;  // both begin at 16 bytes, and nothing is filled up
};

constexpr int kCopies = 8;
constexpr int kCopyNumbers = 8 * kPrepareThreads;  // of a block

struct PrepareParams {
  PrepareProblem problem;
  WeightCopy copies[kCopies];
  unsigned mask_blocks = 0;
  int mask_bytes = 0;         // of an element
  int mask_shift = 0;         // 1 for floating numbers
  unsigned other_blocks = 0;  // for all that is not LayerNorm
  unsigned pairs = 0;         // of a block of those and one for LayerNorm, which take turns
  NormRows where;
  std::int64_t rows = 0;
  NormShares shares;
  int lanes_log2 = 0;  // lanes that share a row in registers
};

__device__ __forceinline__ float load_filled(const WeightCopy& copy, std::int64_t at) {
  if (copy.chunk == copy.filled) return load_or(copy.from, at, 0.0f);
  const std::int64_t chunk = at / copy.chunk, in_chunk = at - chunk * copy.chunk;
  if (in_chunk >= copy.filled) return 0.0f;
  return load_or(copy.from, chunk * copy.filled + in_chunk, 0.0f);
}

__device__ __forceinline__ void copy_numbers(const WeightCopy& copy, DType type, unsigned block,
                                             int thread) {
  const std::int64_t first = std::int64_t{block} * kCopyNumbers;
  float numbers[8];
  if (copy.vector && first + 8 * (thread + 1) <= copy.count) {
    load_numbers(copy.from, first + 8 * thread, numbers);
    store_numbers(copy.to, type, first + 8 * thread, numbers);
    return;
  }
  // One by one; of a copy with vectors, what its last vector leaves.
  const std::int64_t from = first + (copy.vector ? 8 * thread : thread);
  const int step = copy.vector ? 1 : kPrepareThreads;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::int64_t at = from + i * step;
    numbers[i] = at < copy.count ? load_filled(copy, at) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::int64_t at = from + i * step;
    if (at < copy.count) store_number(copy.to, type, at, numbers[i]);
  }
}

// A warp takes a word of the mask. Elements are read as bits: any of them makes a key be there, but
// not the sign of a floating number, which is shifted out.
template <class Bits>
__device__ __forceinline__ void pack_mask(const PrepareParams& params, int shift, unsigned block,
                                          int thread) {
  const Sizes& sizes = params.problem.sizes;
  const Mask& mask = params.problem.mask;
  const std::int64_t words = mask_words(sizes.n);
  const std::int64_t word = std::int64_t{block} * kPrepareWarps + thread / 32;
  if (word >= sizes.all_rows() * words) return;
  const std::int64_t row = word / words;
  const std::int64_t group = row / sizes.rows;
  const auto* from = static_cast<const Bits*>(mask.data) + group * mask.group_stride +
                     (row - group * sizes.rows) * mask.row_stride;
  Bits bits[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t key = (word - row * words) * 64 + half * 32 + thread % 32;
    bits[half] = key < sizes.n ? from[key * mask.position_stride] : Bits{0};
  }
  std::uint32_t present[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    present[half] = __ballot_sync(0xffffffffu, static_cast<Bits>(bits[half] << shift) != 0);
  }
  if (thread % 32 == 0) {
    params.problem.present[word] = std::uint64_t{present[1]} << 32 | present[0];
  }
}

__device__ __forceinline__ void pack_mask(const PrepareParams& params, unsigned block, int thread) {
  switch (params.mask_bytes) {
    case 1:
      return pack_mask<std::uint8_t>(params, 0, block, thread);
    case 2:
      return pack_mask<std::uint16_t>(params, params.mask_shift, block, thread);
    case 4:
      return pack_mask<std::uint32_t>(params, params.mask_shift, block, thread);
    default:
      return pack_mask<std::uint64_t>(params, params.mask_shift, block, thread);
  }
}

// Rows that stay in registers: a lane has kRepeats pieces of 16 bytes of each of its rows, 32
// numbers together, and all of them are under way before the first is used.
template <DType type, int kRepeats>
struct RowNorms {
  static constexpr int kPiece = 16 / bytes_of(type);
  static constexpr int kRows = 32 / (kRepeats * kPiece);

  const PrepareParams& params;
  int thread, lanes, channels;

  // The first of a piece. All its numbers are there, or none.
  __device__ __forceinline__ int channel(int repeat) const {
    return ((thread & (lanes - 1)) + repeat * lanes) * kPiece;
  }
  __device__ __forceinline__ bool inside(int repeat) const { return channel(repeat) < channels; }
  // Where something is read instead that is not needed.
  __device__ __forceinline__ int channel_or_0(int repeat) const {
    return inside(repeat) ? channel(repeat) : 0;
  }

  // Over the lanes of a row.
  __device__ __forceinline__ void add_lanes(float (&sums)[kRows]) const {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
#pragma unroll
      for (float& sum : sums) {
        const float more = __shfl_xor_sync(0xffffffffu, sum, other);
        sum += other < lanes ? more : 0.0f;
      }
    }
  }

  // Of each row, the sum to which add(number, sum) adds a number.
  template <class Add>
  __device__ __forceinline__ void sum_up(const float (&x)[kRows][kRepeats][kPiece],
                                         float (&sums)[kRows], Add add) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] = 0.0f;
#pragma unroll
      for (int i = 0; i < kRepeats; ++i) {
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < kPiece; ++e) sum = add(x[r][i][e], sum);
        sums[r] += inside(i) ? sum : 0.0f;
      }
    }
    add_lanes(sums);
  }

  __device__ __forceinline__ void take_means(const float (&x)[kRows][kRepeats][kPiece],
                                             float (&means)[kRows]) const {
    const float share = params.shares.share;
    sum_up(x, means, [share](float number, float sum) { return fmaf(number, share, sum); });
#pragma unroll
    for (float& mean : means) mean = params.shares.over_rest(mean);
  }

  __device__ __forceinline__ void run(unsigned block) const {
    const PrepareProblem& p = params.problem;
    const int at_once = kPrepareThreads >> params.lanes_log2;
    const std::int64_t first =
        std::int64_t{block} * (at_once * kRows) + (thread >> params.lanes_log2);
    // All offsets, then all loads: no branches between them. What is not there reads something
    // else.
    std::int64_t offsets[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t row = first + r * at_once;
      offsets[r] = params.where.offset(row < params.rows ? row : 0);
    }
    std::uint32_t words[kRows][kRepeats][4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto* from =
          static_cast<const unsigned char*>(p.msa.data) + offsets[r] * bytes_of(type);
#pragma unroll
      for (int i = 0; i < kRepeats; ++i) {
        load_words(from + channel_or_0(i) * bytes_of(type), words[r][i]);
      }
    }
    float x[kRows][kRepeats][kPiece];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kRepeats; ++i) unpack<type>(words[r][i], x[r][i]);
    }

    float mean[kRows], correction[kRows] = {}, scale[kRows];
    take_means(x, mean);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kRepeats; ++i) {
#pragma unroll
        for (float& number : x[r][i]) number -= mean[r];
      }
    }
    sum_up(x, scale, [](float number, float sum) { return fmaf(number, number, sum); });
    if (kCorrects<type>) take_means(x, correction);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      scale[r] = rsqrtf(variance<type>(scale[r] * params.shares.inverse, correction[r]) + p.eps);
      correction[r] *= -scale[r];
    }

#pragma unroll
    for (int i = 0; i < kRepeats; ++i) {
      float weight[kPiece], bias[kPiece];
      load_numbers(p.norm_weight, channel_or_0(i), weight);
      load_numbers(p.norm_bias, channel_or_0(i), bias);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int e = 0; e < kPiece; ++e) {
          float& y = x[r][i][e];
          y = kCorrects<type> ? fmaf(y, scale[r], correction[r]) : y * scale[r];
          y = fmaf(y, weight[e], bias[e]);
        }
      }
    }
    const DType to = type_of(p.mode);
    if (to == DType::kFloat32) {
      store<DType::kFloat32>(first, x);
    } else if (to == DType::kBFloat16) {
      store<DType::kBFloat16>(first, x);
    } else {
      store<DType::kFloat16>(first, x);
    }
  }

  template <DType to>
  __device__ __forceinline__ void store(std::int64_t first,
                                        const float (&x)[kRows][kRepeats][kPiece]) const {
    const int at_once = kPrepareThreads >> params.lanes_log2;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t row = first + r * at_once;
      if (row >= params.rows) return;
#pragma unroll
      for (int i = 0; i < kRepeats; ++i) {
        if (inside(i)) {
          store_numbers_as<to>(params.problem.normalised, row * channels + channel(i), x[r][i]);
        }
      }
    }
  }
};

// Rows of any length and alignment: a warp reads its row once for each thing that it needs of it,
// the later times from a cache.
template <DType type>
__device__ __forceinline__ void normalise_any(const PrepareParams& params, unsigned block,
                                              int thread) {
  const PrepareProblem& p = params.problem;
  const int lane = thread % 32, channels = p.sizes.channels;
  const std::int64_t row = std::int64_t{block} * kPrepareWarps + thread / 32;
  if (row >= params.rows) return;
  const unsigned char* from =
      static_cast<const unsigned char*>(p.msa.data) + params.where.offset(row) * bytes_of(type);
  const float share = params.shares.share;
  float mean = 0.0f;
#pragma unroll 8
  for (int c = lane; c < channels; c += 32) mean = fmaf(load_number(from, type, c), share, mean);
  mean = params.shares.over_rest(warp_sum(mean));
  float squares = 0.0f, correction = 0.0f;
#pragma unroll 8
  for (int c = lane; c < channels; c += 32) {
    const float x = load_number(from, type, c) - mean;
    squares = fmaf(x, x, squares);
    if (kCorrects<type>) correction = fmaf(x, share, correction);
  }
  squares = warp_sum(squares);
  if (kCorrects<type>) correction = params.shares.over_rest(warp_sum(correction));
  const float scale = rsqrtf(variance<type>(squares * params.shares.inverse, correction) + p.eps);
  correction *= -scale;
#pragma unroll 4
  for (int c = lane; c < channels; c += 32) {
    const float y = fmaf(load_number(from, type, c) - mean, scale, correction);
    const float weight = load_number(p.norm_weight.data, p.norm_weight.type, c);
    const float bias = load_number(p.norm_bias.data, p.norm_bias.type, c);
    store_number(p.normalised, type_of(p.mode), row * channels + c, fmaf(y, weight, bias));
  }
}

// kRepeats as RowNorms has it, or 0 for any rows.
template <DType type, int kRepeats>
__global__ void __launch_bounds__(kPrepareThreads, 8)
    prepare_kernel(const __grid_constant__ PrepareParams params) {
  const int thread = thread_index();
  // In turn, so that while there are others most of what is under way is LayerNorm.
  const bool paired = blockIdx.x < 2 * params.pairs;
  unsigned block = paired ? blockIdx.x / 2 : blockIdx.x - params.pairs;
  if (paired ? blockIdx.x % 2 != 0 : params.pairs == params.other_blocks) {
    if constexpr (kRepeats == 0) {
      normalise_any<type>(params, block, thread);
    } else {
      const int channels = params.problem.sizes.channels;
      RowNorms<type, kRepeats>{params, thread, 1 << params.lanes_log2, channels}.run(block);
    }
    return;
  }
  if (block < params.mask_blocks) return pack_mask(params, block, thread);
  block -= params.mask_blocks;
  int i = 0;
  while (block >= params.copies[i].blocks) block -= params.copies[i++].blocks;
  copy_numbers(params.copies[i], type_of(params.problem.mode), block, thread);
}

}  // namespace fused_ops::msa_row_attention
