// SPDX-License-Identifier: Apache-2.0
// Backward through a LayerNorm, to what it normalised: with y = (x - mean) rstd and g the gradient
// of the result times the weight, dx = rstd (g - mean(g) - y mean(g y)). Bound by memory.
//
// As in the forward a row is shared by a power of two of lanes, which keep all of it in registers,
// and all loads are under way before the first is used. A lane always has the same channels, and
// adds up what the gradients of weight and bias are sums of; blocks take rows in turn. Rows of
// other lengths leave their mean and rstd for column_sums instead.
#pragma once

#include "common/cuda/sm80/norm.cuh"

namespace fused_ops {

constexpr int kNormBackwardThreads = 128;

struct NormBackwardParams {
  Rows source;
  RowOffsets where;
  NormShares shares;
  Stored weight;
  const void* grad = nullptr;    // (rows, channels)
  void* out = nullptr;           // likewise, of source.type; or null
  float4* statistics = nullptr;  // (rows): mean, its correction, rstd; or null
  float* sums = nullptr;         // (blocks, 2, channels): of grad, of grad times y; or null
  std::int64_t rows = 0;
  int channels = 0;
  float eps = 0.0f;
  int lanes_log2 = 0;
};

template <int most>  // channels
struct NormBackwardShared {
  float sums[2][most];
};

template <DType type, DType grad_type, int kRepeats>
struct NormBackward {
  static constexpr int kPiece =
      type == DType::kFloat32 || grad_type == DType::kFloat32 ? 4 : 8;  // channels
  static constexpr int kRows = kRepeats * kPiece > 8 ? 1 : 16 / (kRepeats * kPiece);
  static constexpr int kWords = words_of(type, kPiece);
  static constexpr int kGradWords = words_of(grad_type, kPiece);

  const NormBackwardParams& p;
  int thread;

  __device__ __forceinline__ int lanes() const { return 1 << p.lanes_log2; }
  // The first of a piece. All its numbers are there, or none.
  __device__ __forceinline__ int channel(int repeat) const {
    return ((thread & (lanes() - 1)) + repeat * lanes()) * kPiece;
  }
  __device__ __forceinline__ bool inside(int repeat) const { return channel(repeat) < p.channels; }
  __device__ __forceinline__ int channel_or_0(int repeat) const {
    return inside(repeat) ? channel(repeat) : 0;
  }

  __device__ __forceinline__ float add_lanes(float sum) const {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      const float more = __shfl_xor_sync(0xffffffffu, sum, other);
      sum += other < lanes() ? more : 0.0f;
    }
    return sum;
  }

  static constexpr int kMost = 32 * kRepeats * kPiece;  // channels

  float sums[2][kRepeats][kPiece];

  __device__ __forceinline__ void run() {
    const int at_once = kNormBackwardThreads >> p.lanes_log2;
#pragma unroll
    for (int i = 0; i < kRepeats * kPiece; ++i) {
      sums[0][i / kPiece][i % kPiece] = sums[1][i / kPiece][i % kPiece] = 0.0f;
    }
    const int together = at_once * kRows;
    std::int64_t first = std::int64_t{blockIdx.x} * together;
    for (; first < p.rows; first += std::int64_t{gridDim.x} * together) {
      some_rows(first + (thread >> p.lanes_log2), at_once);
    }
    if (p.sums) store_sums(at_once);
  }

  __device__ __forceinline__ void some_rows(std::int64_t first, int at_once) {
    std::uint32_t words[kRows][kRepeats][kWords];
    std::uint32_t grads[kRows][kRepeats][kGradWords];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t row = first + r * at_once < p.rows ? first + r * at_once : 0;
      const auto* from =
          static_cast<const unsigned char*>(p.source.data) + p.where.offset(row) * bytes_of(type);
      const auto* grad =
          static_cast<const unsigned char*>(p.grad) + row * p.channels * bytes_of(grad_type);
#pragma unroll
      for (int i = 0; i < kRepeats; ++i) {
        load_words(from + channel_or_0(i) * bytes_of(type), words[r][i]);
        load_words(grad + channel_or_0(i) * bytes_of(grad_type), grads[r][i]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) one_row(first + r * at_once, words[r], grads[r]);
  }

  // Of the block's groups of lanes, one after the other.
  __device__ __forceinline__ void store_sums(int groups) const {
    auto& shared = shared_memory<NormBackwardShared<kMost>>();
    for (int group = 0; group < groups; ++group) {
      if (thread >> p.lanes_log2 == group) {
#pragma unroll
        for (int i = 0; i < kRepeats; ++i) {
          if (!inside(i)) continue;
#pragma unroll
          for (int e = 0; e < kPiece; ++e) {
#pragma unroll
            for (int kind = 0; kind < 2; ++kind) {
              float& to = shared.sums[kind][channel(i) + e];
              to = group == 0 ? sums[kind][i][e] : to + sums[kind][i][e];
            }
          }
        }
      }
      __syncthreads();
    }
    for (int at = thread; at < 2 * p.channels; at += kNormBackwardThreads) {
      const int kind = at >= p.channels;
      p.sums[std::int64_t{blockIdx.x} * 2 * p.channels + at] =
          shared.sums[kind][at - kind * p.channels];
    }
  }

  __device__ __forceinline__ void one_row(std::int64_t row,
                                          const std::uint32_t (&words)[kRepeats][kWords],
                                          const std::uint32_t (&grads)[kRepeats][kGradWords]) {
    float x[kRepeats][kPiece], g[kRepeats][kPiece];
    float mean = 0.0f, grad_mean = 0.0f;
#pragma unroll
    for (int i = 0; i < kRepeats; ++i) {
      unpack<type>(words[i], x[i]);
      unpack<grad_type>(grads[i], g[i]);
      float weight[kPiece];
      load_numbers(p.weight, channel_or_0(i), weight);
#pragma unroll
      for (int e = 0; e < kPiece; ++e) {
        x[i][e] = inside(i) ? x[i][e] : 0.0f;
        if (p.sums && row < p.rows) sums[0][i][e] += g[i][e];
        g[i][e] = inside(i) ? g[i][e] * weight[e] : 0.0f;
        mean = fmaf(x[i][e], p.shares.share, mean);
        grad_mean += g[i][e];
      }
    }
    mean = p.shares.over_rest(add_lanes(mean));
    grad_mean = add_lanes(grad_mean) * p.shares.inverse;
    float squares = 0.0f, correction = 0.0f;
#pragma unroll
    for (int i = 0; i < kRepeats; ++i) {
#pragma unroll
      for (int e = 0; e < kPiece; ++e) {
        x[i][e] = inside(i) ? x[i][e] - mean : 0.0f;
        squares = fmaf(x[i][e], x[i][e], squares);
        if (kCorrects<type>) correction = fmaf(x[i][e], p.shares.share, correction);
      }
    }
    squares = add_lanes(squares);
    if (kCorrects<type>) correction = p.shares.over_rest(add_lanes(correction));
    const float rstd = rsqrtf(variance<type>(squares * p.shares.inverse, correction) + p.eps);
    float products = 0.0f;
#pragma unroll
    for (int i = 0; i < kRepeats; ++i) {
#pragma unroll
      for (int e = 0; e < kPiece; ++e) {
        x[i][e] = inside(i) ? (x[i][e] - correction) * rstd : 0.0f;
        products = fmaf(g[i][e], x[i][e], products);
      }
    }
    products = add_lanes(products) * p.shares.inverse;
    if (row >= p.rows) return;
    if (p.sums) {
#pragma unroll
      for (int i = 0; i < kRepeats; ++i) {
        float plain[kPiece];
        unpack<grad_type>(grads[i], plain);
#pragma unroll
        for (int e = 0; e < kPiece; ++e) {
          sums[1][i][e] = fmaf(plain[e], x[i][e], sums[1][i][e]);
        }
      }
    }
    if (!p.out) return;
#pragma unroll
    for (int i = 0; i < kRepeats; ++i) {
      if (!inside(i)) continue;
#pragma unroll
      for (int e = 0; e < kPiece; ++e) {
        x[i][e] = rstd * (g[i][e] - grad_mean - x[i][e] * products);
      }
      store_numbers_as<type>(p.out, row * p.channels + channel(i), x[i]);
    }
  }
};

// Rows of any length and alignment, by a warp each, which reads them again for each sum.
template <DType type, DType grad_type>
__device__ __forceinline__ void norm_backward_any(const NormBackwardParams& p, int thread) {
  const int lane = thread % 32;
  const std::int64_t row = std::int64_t{blockIdx.x} * (kNormBackwardThreads / 32) + thread / 32;
  if (row >= p.rows) return;
  const unsigned char* from =
      static_cast<const unsigned char*>(p.source.data) + p.where.offset(row) * bytes_of(type);
  const unsigned char* grads =
      static_cast<const unsigned char*>(p.grad) + row * p.channels * bytes_of(grad_type);
  // Rounded everywhere alike: what remains of it less its mean may be nothing.
  const auto gradient = [&](int c) {
    return __fmul_rn(load_number(grads, grad_type, c),
                     load_number(p.weight.data, p.weight.type, c));
  };
  float mean = 0.0f, grad_mean = 0.0f;
  for (int c = lane; c < p.channels; c += 32) {
    mean = fmaf(load_number(from, type, c), p.shares.share, mean);
    grad_mean += gradient(c);
  }
  mean = p.shares.over_rest(warp_sum(mean));
  grad_mean = warp_sum(grad_mean) * p.shares.inverse;
  float squares = 0.0f, correction = 0.0f;
  for (int c = lane; c < p.channels; c += 32) {
    const float x = load_number(from, type, c) - mean;
    squares = fmaf(x, x, squares);
    if (kCorrects<type>) correction = fmaf(x, p.shares.share, correction);
  }
  squares = warp_sum(squares);
  if (kCorrects<type>) correction = p.shares.over_rest(warp_sum(correction));
  const float rstd = rsqrtf(variance<type>(squares * p.shares.inverse, correction) + p.eps);
  const auto normalised = [&](int c) {
    return (load_number(from, type, c) - mean - correction) * rstd;
  };
  float products = 0.0f;
  for (int c = lane; c < p.channels; c += 32) {
    products = fmaf(gradient(c), normalised(c), products);
  }
  products = warp_sum(products) * p.shares.inverse;
  if (p.statistics && lane == 0) p.statistics[row] = make_float4(mean, correction, rstd, 0.0f);
  if (!p.out) return;
  for (int c = lane; c < p.channels; c += 32) {
    store_number(p.out, type, row * p.channels + c,
                 rstd * (gradient(c) - grad_mean - normalised(c) * products));
  }
}

// kRepeats 0: any rows.
template <DType type, DType grad_type, int kRepeats>
__global__ void __launch_bounds__(kNormBackwardThreads)
    norm_backward_kernel(const __grid_constant__ NormBackwardParams params) {
  if constexpr (kRepeats == 0) {
    norm_backward_any<type, grad_type>(params, thread_index());
  } else {
    NormBackward<type, grad_type, kRepeats> all{params, thread_index()};
    all.run();
  }
}

}  // namespace fused_ops
