// SPDX-License-Identifier: Apache-2.0
// Backward through the LayerNorm before the projections. Bound by memory bandwidth.
//
// A row of channels is shared by a power of two of lanes, which keep all of it in registers; a
// warp's lanes all have several loads under way. A block takes a tile of lines and columns, so that
// also for "incoming", where neighbours in a line lie far apart in the pair representation, memory
// is touched in stretches of several rows.
#pragma once

#include "common/cuda/sm80/numbers.cuh"
#include "triangular_multiplicative_update/triangular_multiplicative_update.h"

namespace fused_ops::triangular_multiplicative_update {

struct NormInBackwardParams {
  NormInBackwardProblem problem;
  std::int64_t first_line = 0;  // of all batch elements' lines
  std::int64_t lines = 0;
  unsigned tiles_across = 0;  // of a line
  int tile_lines = 0;         // a power of two
  int lanes = 0;              // of a row, a power of two
  bool vector = false;        // all rows may be accessed a piece at a time
};

constexpr int kNormInThreads = 256;

template <DType pair_type, DType grad_type, bool kLong>
struct NormInBackward {
  // Channels that a lane takes together: 16 bytes of the wider type.
  static constexpr int kPiece =
      pair_type == DType::kFloat32 || grad_type == DType::kFloat32 ? 4 : 8;
  static constexpr int kMostChannels = 512;
  static constexpr int kRepeats = kLong ? kMostChannels / (32 * kPiece) : 1;  // pieces of a lane
  static constexpr int kRows = kLong ? 1 : 2;                                 // of a lane
  static constexpr int kPairWords = words_of(pair_type, kPiece);
  static constexpr int kGradWords = words_of(grad_type, kPiece);

  static constexpr int lanes(int channels) {
    int lanes = 1;
    while (lanes < 32 && lanes * kPiece < channels) lanes *= 2;
    return lanes;
  }
  static constexpr int tile(int lanes) { return kNormInThreads / lanes * kRows; }  // rows

  // What a lane needs of one row; rows that are not there have no channels.
  struct Row {
    const unsigned char* pair;
    const unsigned char* grad;
    const unsigned char* gate_grad;
    std::int64_t out;  // in elements
    bool there;
  };

  const NormInBackwardParams& params;
  int thread;

  __device__ __forceinline__ Row row(int r) const {
    const NormInBackwardProblem& p = params.problem;
    const Sizes& sizes = p.sizes;
    const int groups = kNormInThreads / params.lanes;
    const int index = thread / params.lanes + r * groups;
    const int down = index & (params.tile_lines - 1);
    const int across = index / params.tile_lines;
    const std::int64_t rel_line =
        std::int64_t{blockIdx.x / params.tiles_across} * params.tile_lines + down;
    const std::int64_t column =
        std::int64_t{blockIdx.x % params.tiles_across} * (groups * kRows / params.tile_lines) +
        across;
    Row result{};
    result.there = rel_line < params.lines && column < sizes.n;
    if (!result.there) return result;
    const auto n = static_cast<unsigned>(sizes.n);
    const auto any_line = static_cast<unsigned>(params.first_line + rel_line);
    const std::int64_t batch = any_line / n;
    const std::int64_t line = any_line % n;
    const std::int64_t i = p.outgoing ? line : column;
    const std::int64_t j = p.outgoing ? column : line;
    result.pair = static_cast<const unsigned char*>(p.pair.data) +
                  (batch * p.pair.batch_stride + i * p.pair.i_stride + j * p.pair.j_stride) *
                      bytes_of(pair_type);
    result.grad = static_cast<const unsigned char*>(p.grad) +
                  (rel_line * sizes.pitch + column) * sizes.channels * bytes_of(grad_type);
    if (p.gate_grad != nullptr) {
      result.gate_grad =
          static_cast<const unsigned char*>(p.gate_grad) +
          ((batch * sizes.n + i) * sizes.pitch + j) * sizes.channels * bytes_of(grad_type);
    }
    result.out = ((batch * sizes.n + i) * sizes.n + j) * sizes.channels;
    return result;
  }

  // The e-th number of a lane's piece: neighbours with vector access, else one in each of the
  // lanes.
  __device__ __forceinline__ int channel(int repeat, int e) const {
    const int lane = thread & (params.lanes - 1);
    return params.vector ? (lane + repeat * params.lanes) * kPiece + e
                         : lane + (repeat * kPiece + e) * params.lanes;
  }

  template <DType type>
  __device__ __forceinline__ void load(const unsigned char* from, int repeat,
                                       std::uint32_t (&words)[words_of(type, kPiece)]) const {
#pragma unroll
    for (std::uint32_t& word : words) word = 0;
    const int channels = params.problem.sizes.channels;
    if (params.vector) {
      const int first = channel(repeat, 0);
      if (from != nullptr && first < channels) load_words(from + first * bytes_of(type), words);
    } else {
#pragma unroll
      for (int e = 0; e < kPiece; ++e) {
        const int c = channel(repeat, e);
        if (from == nullptr || c >= channels) continue;
        constexpr int kInWord = 4 / bytes_of(type);
        words[e / kInWord] |= load_bits<type>(from, c) << e % kInWord * 16;
      }
    }
  }

  // Over the lanes of a row.
  __device__ __forceinline__ float sum(float mine) const {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      if (other < params.lanes) mine += __shfl_xor_sync(0xffffffffu, mine, other);
    }
    return mine;
  }

  template <DType type>
  __device__ __forceinline__ void store_as(std::int64_t row, int repeat,
                                           const float (&numbers)[kPiece]) const {
    const int channels = params.problem.sizes.channels;
    auto* to = static_cast<unsigned char*>(params.problem.out) + row * bytes_of(type);
    std::uint32_t words[words_of(type, kPiece)];
#pragma unroll
    for (int e = 0; e < kPiece; ++e) {
      if constexpr (type == DType::kFloat32) {
        words[e] = __float_as_uint(numbers[e]);
      } else if (e % 2 == 0) {
        words[e / 2] = pack_two<type>(numbers[e], numbers[e + 1]);
      }
    }
    if (params.vector) {
      const int first = channel(repeat, 0);
      if (first < channels) store_words(to + first * bytes_of(type), words);
      return;
    }
#pragma unroll
    for (int e = 0; e < kPiece; ++e) {
      const int c = channel(repeat, e);
      if (c >= channels) continue;
      if constexpr (type == DType::kFloat32) {
        reinterpret_cast<std::uint32_t*>(to)[c] = words[e];
      } else {
        reinterpret_cast<std::uint16_t*>(to)[c] =
            static_cast<std::uint16_t>(words[e / 2] >> e % 2 * 16);
      }
    }
  }

  __device__ __forceinline__ void store(std::int64_t row, int repeat,
                                        const float (&numbers)[kPiece]) const {
    if (params.problem.output_type == DType::kFloat32) {
      store_as<DType::kFloat32>(row, repeat, numbers);
    } else if (params.problem.output_type == DType::kBFloat16) {
      store_as<DType::kBFloat16>(row, repeat, numbers);
    } else {
      store_as<DType::kFloat16>(row, repeat, numbers);
    }
  }

  // The gradient as it goes into the LayerNorm.
  __device__ __forceinline__ void gradient(const std::uint32_t (&grad)[kGradWords],
                                           const std::uint32_t (&gate)[kGradWords],
                                           float (&g)[kPiece]) const {
    unpack<grad_type>(grad, g);
    if (!params.problem.gate_normalized) return;
    float more[kPiece];
    unpack<grad_type>(gate, more);
#pragma unroll
    for (int e = 0; e < kPiece; ++e) g[e] += more[e];
  }

  __device__ __forceinline__ void run() const {
    const NormInBackwardProblem& p = params.problem;
    std::uint32_t pair[kRows][kRepeats][kPairWords];
    std::uint32_t grad[kRows][kRepeats][kGradWords];
    std::uint32_t gate[kRows][kRepeats][kGradWords];
    std::int64_t out[kRows];
    bool there[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Row at = row(r);
#pragma unroll
      for (int i = 0; i < kRepeats; ++i) {
        load<pair_type>(at.pair, i, pair[r][i]);
        load<grad_type>(at.grad, i, grad[r][i]);
        load<grad_type>(at.gate_grad, i, gate[r][i]);
      }
      out[r] = at.out;
      there[r] = at.there;
    }

    const float per_channel = 1.0f / static_cast<float>(p.sizes.channels);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float mean = 0.0f;
      float grads = 0.0f;
#pragma unroll
      for (int i = 0; i < kRepeats; ++i) {
        float x[kPiece];
        float g[kPiece];
        unpack<pair_type>(pair[r][i], x);
        gradient(grad[r][i], gate[r][i], g);
#pragma unroll
        for (int e = 0; e < kPiece; ++e) {
          mean += x[e];
          grads += g[e];
        }
      }
      mean = sum(mean) * per_channel;
      grads = sum(grads) * per_channel;
      float squares = 0.0f;
      float products = 0.0f;
#pragma unroll
      for (int i = 0; i < kRepeats; ++i) {
        float x[kPiece];
        float g[kPiece];
        unpack<pair_type>(pair[r][i], x);
        gradient(grad[r][i], gate[r][i], g);
#pragma unroll
        for (int e = 0; e < kPiece; ++e) {
          const float d = channel(i, e) < p.sizes.channels ? x[e] - mean : 0.0f;
          squares = fmaf(d, d, squares);
          products = fmaf(g[e], d, products);
        }
      }
      const float rstd = rsqrtf(fmaf(sum(squares), per_channel, p.eps));
      products = sum(products) * per_channel * rstd * rstd;
      if (!there[r]) continue;
#pragma unroll
      for (int i = 0; i < kRepeats; ++i) {
        float x[kPiece];
        float g[kPiece];
        unpack<pair_type>(pair[r][i], x);
        gradient(grad[r][i], gate[r][i], g);
#pragma unroll
        for (int e = 0; e < kPiece; ++e) {
          x[e] = rstd * (g[e] - grads - (x[e] - mean) * products);
        }
        if (!p.gate_normalized) {
          unpack<grad_type>(gate[r][i], g);
#pragma unroll
          for (int e = 0; e < kPiece; ++e) x[e] += g[e];
        }
        store(out[r], i, x);
      }
    }
  }
};

template <DType pair_type, DType grad_type, bool kLong>
__global__ void __launch_bounds__(kNormInThreads, kLong ? 2 : 4)
    norm_in_backward_kernel(const __grid_constant__ NormInBackwardParams params) {
  NormInBackward<pair_type, grad_type, kLong>{params, thread_index()}.run();
}

}  // namespace fused_ops::triangular_multiplicative_update
