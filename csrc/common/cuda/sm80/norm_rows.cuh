// SPDX-License-Identifier: Apache-2.0
// LayerNorm of rows that lie anywhere, into a matrix of another type; bound by memory bandwidth.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/cuda/sm80/norm.cuh"

namespace fused_ops {

constexpr int kNormRowsThreads = 128;
constexpr int kNormRowsWarps = kNormRowsThreads / 32;

struct NormRowsParams {
  const void* data = nullptr;
  RowOffsets where;
  std::int64_t rows = 0;
  int channels = 0;
  float eps = 0.0f;
  NormShares shares;
  Stored weight, bias;  // (channels); of rows that may be converted only, null: those are
  void* out = nullptr;  // (rows, channels)
  DType out_type = DType::kFloat32;
  int lanes_log2 = 0;  // lanes that share a row in registers

  static NormRowsParams of(const Rows& source, int channels, float eps, const Stored& weight,
                           const Stored& bias, void* out, DType out_type) {
    NormRowsParams p;
    p.data = source.data;
    p.where = RowOffsets::of(source);
    p.rows = source.count();
    p.channels = channels;
    p.eps = eps;
    p.shares = NormShares::of(channels);
    p.weight = weight;
    p.bias = bias;
    p.out = out;
    p.out_type = out_type;
    return p;
  }
};

// Rows that stay in registers: a lane has kRepeats pieces of 16 bytes of each of its rows, 32
// numbers together, and all of them are under way before the first is used.
template <DType type, int kRepeats, bool kMayConvert = false>
struct RowNorms {
  static constexpr int kPiece = 16 / bytes_of(type);
  static constexpr int kRows = 32 / (kRepeats * kPiece);

  const NormRowsParams& params;
  int thread, lanes, channels;

  // Chooses how many lanes share a row; returns how many rows a block takes.
  static std::int64_t rows_of_block(NormRowsParams* params) {
    while ((kRepeats * kPiece << params->lanes_log2) < params->channels) ++params->lanes_log2;
    return (kNormRowsThreads >> params->lanes_log2) * kRows;
  }

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

  __device__ __forceinline__ void normalise(float (&x)[kRows][kRepeats][kPiece]) const {
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
      scale[r] =
          rsqrtf(variance<type>(scale[r] * params.shares.inverse, correction[r]) + params.eps);
      correction[r] *= -scale[r];
    }

#pragma unroll
    for (int i = 0; i < kRepeats; ++i) {
      float weight[kPiece], bias[kPiece];
      load_numbers(params.weight, channel_or_0(i), weight);
      load_numbers(params.bias, channel_or_0(i), bias);
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
  }

  __device__ __forceinline__ void run(unsigned block) const {
    const int at_once = kNormRowsThreads >> params.lanes_log2;
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
          static_cast<const unsigned char*>(params.data) + offsets[r] * bytes_of(type);
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

    if (!kMayConvert || params.weight.data) normalise(x);
    const DType to = params.out_type;
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
    const int at_once = kNormRowsThreads >> params.lanes_log2;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t row = first + r * at_once;
      if (row >= params.rows) return;
#pragma unroll
      for (int i = 0; i < kRepeats; ++i) {
        if (inside(i)) {
          store_numbers_as<to>(params.out, row * channels + channel(i), x[r][i]);
        }
      }
    }
  }
};

// Rows of any length and alignment: a warp reads its row once for each thing that it needs of it,
// the later times from a cache.
template <DType type, bool kMayConvert = false>
__device__ __forceinline__ void normalise_any(const NormRowsParams& params, unsigned block,
                                              int thread) {
  const int lane = thread % 32, channels = params.channels;
  const std::int64_t row = std::int64_t{block} * kNormRowsWarps + thread / 32;
  if (row >= params.rows) return;
  const unsigned char* from =
      static_cast<const unsigned char*>(params.data) + params.where.offset(row) * bytes_of(type);
  if (kMayConvert && !params.weight.data) {
#pragma unroll 8
    for (int c = lane; c < channels; c += 32) {
      store_number(params.out, params.out_type, row * channels + c, load_number(from, type, c));
    }
    return;
  }
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
  const float scale =
      rsqrtf(variance<type>(squares * params.shares.inverse, correction) + params.eps);
  correction *= -scale;
#pragma unroll 4
  for (int c = lane; c < channels; c += 32) {
    const float y = fmaf(load_number(from, type, c) - mean, scale, correction);
    const float weight = load_number(params.weight.data, params.weight.type, c);
    const float bias = load_number(params.bias.data, params.bias.type, c);
    store_number(params.out, params.out_type, row * channels + c, fmaf(y, weight, bias));
  }
}

// kRepeats as RowNorms has it, or 0 for any rows.
template <DType type, int kRepeats, bool kMayConvert = false>
__device__ __forceinline__ void normalise_rows(const NormRowsParams& params, unsigned block,
                                               int thread) {
  if constexpr (kRepeats == 0) {
    normalise_any<type, kMayConvert>(params, block, thread);
  } else {
    RowNorms<type, kRepeats, kMayConvert>{params, thread, 1 << params.lanes_log2, params.channels}
        .run(block);
  }
}

// Calls with(type, kRepeats), as constants, that the rows are fit for.
template <DType type, class With>
void with_repeats(const NormRowsParams& params, With with) {
  const auto aligned = [](const void* data) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
  };
  constexpr int kPiece = 16 / bytes_of(type);
  const int channels = params.channels;
  const bool vector = channels % 8 == 0 && aligned(params.data) && aligned(params.out) &&
                      aligned(params.weight.data) && aligned(params.bias.data) &&
                      params.where.steps_by(kPiece);
  constexpr std::integral_constant<DType, type> kType;
  if (vector && channels <= 2 * 32 * kPiece) {
    with(kType, std::integral_constant<int, 2>());
  } else if (vector && channels <= 4 * 32 * kPiece) {
    with(kType, std::integral_constant<int, 4>());
  } else {
    with(kType, std::integral_constant<int, 0>());
  }
}

template <class With>
void with_norm_rows(const NormRowsParams& params, DType type, With with) {
  if (type == DType::kFloat32) {
    with_repeats<DType::kFloat32>(params, with);
  } else if (type == DType::kBFloat16) {
    with_repeats<DType::kBFloat16>(params, with);
  } else {
    with_repeats<DType::kFloat16>(params, with);
  }
}

// Prepares `params` for normalise_rows; returns how many blocks share the rows.
template <DType type, int kRepeats>
std::int64_t norm_rows_blocks(NormRowsParams* params) {
  if constexpr (kRepeats == 0) {
    return ceil_div(params->rows, kNormRowsWarps);
  } else {
    return ceil_div(params->rows, RowNorms<type, kRepeats>::rows_of_block(params));
  }
}

}  // namespace fused_ops
