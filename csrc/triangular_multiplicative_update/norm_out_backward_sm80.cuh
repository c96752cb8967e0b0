// SPDX-License-Identifier: Apache-2.0
// Backward through the LayerNorm after the contraction, in place. Bound by memory bandwidth.
//
// The plane is channel-first, its gradient row by row. A lane takes one word of the plane of each
// of its warp's channels (one pair in fp32, two in bf16), so that a warp reads and writes 128 bytes
// of a channel. Rows of the gradient are copied into shared memory, from where a lane reads its
// pairs' parts in pieces of 16 bytes. All numbers of a tile are in registers then; the sums over
// the channels go from warp to warp through shared memory, in a fixed order.
#pragma once

#include <type_traits>

#include "common/cuda/sm80/numbers.cuh"
#include "triangular_multiplicative_update/triangular_multiplicative_update.h"

namespace fused_ops::triangular_multiplicative_update {

struct NormOutBackwardParams {
  NormOutBackwardProblem problem;
  std::int64_t pairs = 0;  // of the plane
  unsigned tiles = 0;
  bool grad_vector = false;  // rows of the gradient begin at 16 bytes and end there
};

// kWarps warps with kChannels each; kWhole: hidden is just so much.
template <DType o_type, DType grad_type, int kChannels, int kWarps, bool kWhole>
struct NormOutBackward {
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMostChannels = kChannels * kWarps;
  // Of a lane: a word of the plane, where the compiler needs no registers for what may be missing.
  static constexpr int kPairs = kWhole ? 4 / bytes_of(o_type) : 1;
  using Word = std::conditional_t<kPairs * bytes_of(o_type) == 4, std::uint32_t, std::uint16_t>;
  static constexpr int kTile = 32 * kPairs;  // pairs of a block
  static constexpr int kPieceNumbers = 16 / bytes_of(grad_type);
  static constexpr int kPieces = kChannels / kPieceNumbers;  // of a pair, for one warp

  // With one, hidden = 512 in fp32 still leaves the kernel below 99 KiB.
  static constexpr int kBuffers = kWarps > 8 ? 1 : 2;

  struct alignas(16) Shared {
    // Tiles of the gradient, in turn: the row of lane l's pair v in slot 32 * v + l. One piece
    // behind each row spreads what 8 lanes read at once over all banks.
    unsigned char grad[kBuffers][kTile][(kWarps * kPieces + 1) * 16];
    float undo[kMostChannels];
    float sums[4][kWarps][kTile];  // over a warp's channels
  };

  // A lane's pairs in one tile.
  struct Place {
    std::int64_t offset;    // of the first from first_pair
    int column;             // of the first
    int valid;              // so many, from the first on, are not padding
    bool inside;            // of those to be worked on, padding included
    unsigned rows[kPairs];  // the first (second) pairs of which lanes are not padding

    __device__ __forceinline__ void look(const NormOutBackwardProblem& p) {
      inside = offset < p.count;  // pairs come in eights, so all of a lane's are
      const int left = inside ? static_cast<int>(p.sizes.n) - column : 0;
      valid = max(min(left, kPairs), 0);
#pragma unroll
      for (int v = 0; v < kPairs; ++v) rows[v] = __ballot_sync(0xffffffffu, v < valid);
    }
    __device__ __forceinline__ bool whole() const {
      return (rows[0] & rows[kPairs - 1]) == 0xffffffffu;
    }
  };

  const NormOutBackwardParams& params;
  Shared& shared;
  int lane;
  int warp;

  __device__ __forceinline__ int hidden() const {
    return kWhole ? kMostChannels : params.problem.sizes.hidden;
  }
  __device__ __forceinline__ int mine() const {  // channels of this warp
    return kWhole ? kChannels : min(max(hidden() - warp * kChannels, 0), kChannels);
  }

  // Starts to copy the gradient of a tile, zeros for padding and for channels that are not there.
  __device__ __forceinline__ void copy_grad(int buffer, const Place& place) const {
    const auto* grad = static_cast<const unsigned char*>(params.problem.grad);
    const std::int64_t first = place.offset - lane * kPairs;
    if (params.grad_vector) {
      const int thread = warp * 32 + lane;
      const int slot = thread / (kWarps * kPieces);
      const int piece = thread % (kWarps * kPieces);
      const bool there = kWhole || piece * kPieceNumbers < hidden();
      const auto* from =
          grad + ((first + slot * kPairs) * hidden() + piece * kPieceNumbers) * bytes_of(grad_type);
      constexpr int kSlots = 32 / kPieces;  // that the block copies at a time
#pragma unroll
      for (int i = 0; i < kTile / kSlots; ++i) {
        const int v = i * kSlots / 32;
        const int l = i * kSlots % 32;
        const bool copied = there && (place.rows[v] >> (l + slot) & 1) != 0;
        const int rows = l * kPairs + v;
        sm80::cp_async_16(shared.grad[buffer][v * 32 + l + slot] + piece * 16,
                          copied ? from + rows * hidden() * bytes_of(grad_type) : grad,
                          copied ? 16 : 0);
      }
    } else {
      using Bits = std::conditional_t<bytes_of(grad_type) == 4, std::uint32_t, std::uint16_t>;
#pragma unroll
      for (int v = 0; v < kPairs; ++v) {
#pragma unroll 1
        for (int l = warp; l < 32; l += kWarps) {
          const bool there = (place.rows[v] >> l & 1) != 0;
          const std::int64_t at = (first + l * kPairs + v) * hidden();
          auto* row = reinterpret_cast<Bits*>(shared.grad[buffer][v * 32 + l]);
#pragma unroll 1
          for (int c = lane; c < kMostChannels; c += 32) {
            Bits bits = 0;
            if (there && c < hidden()) bits = static_cast<Bits>(load_bits<grad_type>(grad, at + c));
            row[c] = bits;
          }
        }
      }
    }
    sm80::cp_async_commit();
  }

  static __device__ __forceinline__ std::uint32_t load_word(const unsigned char* from, int valid) {
    std::uint32_t word = 0;
    if (valid == kPairs) {
      word = *reinterpret_cast<const Word*>(from);
    } else if (kPairs == 2 && valid == 1) {
      word = *reinterpret_cast<const std::uint16_t*>(from);
    }
    return word;
  }

  // A number of the plane.
  static __device__ __forceinline__ float number(std::uint32_t word, int v) {
    if constexpr (o_type == DType::kFloat32) return __uint_as_float(word);
    return v == 0 ? __uint_as_float(word << 16) : __uint_as_float(word & 0xffff0000u);
  }

  // Of the largest finite number in a word of the plane, as bits of a float.
  static __device__ __forceinline__ unsigned magnitude(std::uint32_t word) {
    unsigned result = 0;
#pragma unroll
    for (int v = 0; v < kPairs; ++v) {
      const unsigned bits = __float_as_uint(number(word, v)) & 0x7fffffffu;
      if (bits < 0x7f800000u) result = max(result, bits);
    }
    return result;
  }

  // The undo of four of the warp's channels.
  __device__ __forceinline__ void four_undo(int k, float (&four)[4]) const {
    const float4 all = *reinterpret_cast<const float4*>(&shared.undo[warp * kChannels + k]);
    four[0] = all.x;
    four[1] = all.y;
    four[2] = all.z;
    four[3] = all.w;
  }

  // o minus the mean of pair v; words of fp32 hold o already.
  static __device__ __forceinline__ float centred(std::uint32_t word, int v, float undo,
                                                  float mean) {
    if constexpr (o_type == DType::kFloat32) return __uint_as_float(word) - mean;
    return fmaf(number(word, v), undo, -mean);
  }

  // The gradient of one pair in piece i of the warp's channels.
  __device__ __forceinline__ void gradient(int buffer, int v, int i,
                                           float (&g)[kPieceNumbers]) const {
    std::uint32_t words[4];
    load_words(shared.grad[buffer][v * 32 + lane] + (warp * kPieces + i) * 16, words);
    unpack<grad_type>(words, g);
  }

  __device__ __forceinline__ void publish(int which, const float (&of_warp)[kPairs]) const {
#pragma unroll
    for (int v = 0; v < kPairs; ++v) shared.sums[which][warp][lane * kPairs + v] = of_warp[v];
  }
  __device__ __forceinline__ void gather(int which, float (&all)[kPairs]) const {
#pragma unroll
    for (int v = 0; v < kPairs; ++v) all[v] = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
#pragma unroll
      for (int v = 0; v < kPairs; ++v) all[v] += shared.sums[which][w][lane * kPairs + v];
    }
  }

  __device__ __forceinline__ void run() const {
    const NormOutBackwardProblem& p = params.problem;
    if (lane < kChannels) {
      const int channel = warp * kChannels + lane;
      const bool scaled = p.o_undo != nullptr && lane < mine();
      float undo = scaled ? p.o_undo[channel] : 1.0f;
      if (scaled && p.o_undo_second) undo *= p.o_undo_second[channel];
      shared.undo[channel] = undo;
    }
    __syncwarp();
    const std::int64_t channel_bytes = params.pairs * bytes_of(o_type);
    auto* plane = static_cast<unsigned char*>(p.o) + warp * kChannels * channel_bytes +
                  p.first_pair * bytes_of(o_type);
    unsigned largest = 0;  // lane k's is that of the warp's channel k

    const std::int64_t step = std::int64_t{gridDim.x} * kTile;
    const int column_step = static_cast<int>(step % p.sizes.pitch);
    Place place;
    place.offset = std::int64_t{blockIdx.x} * kTile + lane * kPairs;
    place.column = static_cast<int>(place.offset % p.sizes.pitch);
    place.look(p);
    int buffer = 0;
    copy_grad(buffer, place);
#pragma unroll 1
    for (unsigned tile = blockIdx.x; tile < params.tiles; tile += gridDim.x) {
      unsigned char* const numbers = plane + place.offset * bytes_of(o_type);
      std::uint32_t x[kChannels];  // words of the plane
      if (kWhole && place.whole()) {
#pragma unroll
        for (int k = 0; k < kChannels; ++k) x[k] = load_word(numbers + k * channel_bytes, kPairs);
      } else {
#pragma unroll
        for (int k = 0; k < kChannels; ++k) {
          x[k] = load_word(numbers + k * channel_bytes, k < mine() ? place.valid : 0);
        }
      }
      float mean[kPairs] = {};
#pragma unroll
      for (int k = 0; k < kChannels; k += 4) {
        float undo[4];
        four_undo(k, undo);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (o_type == DType::kFloat32) {
            x[k + e] = __float_as_uint(__uint_as_float(x[k + e]) * undo[e]);
          }
#pragma unroll
          for (int v = 0; v < kPairs; ++v) mean[v] = centred(x[k + e], v, undo[e], -mean[v]);
        }
      }
      publish(0, mean);
      sm80::cp_async_wait<0>();
      __syncthreads();  // also: nobody reads the other buffer any more

      const Place here = place;
      place.offset += step;
      place.column += column_step;
      if (place.column >= p.sizes.pitch) place.column -= static_cast<int>(p.sizes.pitch);
      place.look(p);
      const bool more = tile + gridDim.x < params.tiles;
      if (kBuffers == 2 && more) copy_grad(1 - buffer, place);

      const float per_channel = 1.0f / static_cast<float>(hidden());
      gather(0, mean);
      float squares[kPairs] = {};
      float grads[kPairs] = {};
      float products[kPairs] = {};
#pragma unroll
      for (int v = 0; v < kPairs; ++v) {
        mean[v] *= per_channel;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          float g[kPieceNumbers];
          gradient(buffer, v, i, g);
#pragma unroll
          for (int e = 0; e < kPieceNumbers; e += 4) {
            const int k = i * kPieceNumbers + e;
            float undo[4];
            four_undo(k, undo);
#pragma unroll
            for (int f = 0; f < 4; ++f) {
              float d = centred(x[k + f], v, undo[f], mean[v]);
              if (!kWhole && k + f >= mine()) d = 0.0f;
              squares[v] = fmaf(d, d, squares[v]);
              grads[v] += g[e + f];
              products[v] = fmaf(g[e + f], d, products[v]);
            }
          }
        }
      }
      publish(1, squares);
      publish(2, grads);
      publish(3, products);
      __syncthreads();
      gather(1, squares);
      gather(2, grads);
      gather(3, products);
      float rstd[kPairs];
#pragma unroll
      for (int v = 0; v < kPairs; ++v) {
        rstd[v] = rsqrtf(fmaf(squares[v], per_channel, p.eps));
        grads[v] *= per_channel;
        products[v] = products[v] * per_channel * rstd[v] * rstd[v];
      }
      const std::uint32_t not_padding = here.valid == kPairs ? 0xffffffffu
                                        : here.valid == 1    ? 0xffffu
                                                             : 0u;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        float dx[kPairs][kPieceNumbers];
#pragma unroll
        for (int v = 0; v < kPairs; ++v) {
          gradient(buffer, v, i, dx[v]);
#pragma unroll
          for (int e = 0; e < kPieceNumbers; e += 4) {
            const int k = i * kPieceNumbers + e;
            float undo[4];
            four_undo(k, undo);
#pragma unroll
            for (int f = 0; f < 4; ++f) {
              const float d = centred(x[k + f], v, undo[f], mean[v]);
              float& g = dx[v][e + f];
              g = rstd[v] * fmaf(-d, products[v], g - grads[v]);
            }
          }
        }
#pragma unroll
        for (int e = 0; e < kPieceNumbers; ++e) {
          const int k = i * kPieceNumbers + e;
          std::uint32_t word = __float_as_uint(dx[0][e]);
          if constexpr (o_type == DType::kBFloat16) {
            word = sm80::pack_bf16(dx[0][e], kPairs == 2 ? dx[kPairs - 1][e] : 0.0f);
          }
          x[k] = word & not_padding;
          if (here.inside && k < mine()) {
            *reinterpret_cast<Word*>(numbers + k * channel_bytes) = static_cast<Word>(x[k]);
          }
        }
      }
      if (p.largest != nullptr) {
#pragma unroll
        for (int k = 0; k < kChannels; ++k) {
          const unsigned all = __reduce_max_sync(0xffffffffu, magnitude(x[k]));
          if (lane == k) largest = max(largest, all);
        }
      }
      if constexpr (kBuffers == 2) {
        buffer = 1 - buffer;
      } else {
        __syncthreads();
        if (more) copy_grad(buffer, place);
      }
    }
    if (p.largest != nullptr && lane < mine() && largest != 0) {
      atomicMax(p.largest + warp * kChannels + lane, largest);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 768 / Kernel::kThreads)
    norm_out_backward_kernel(const __grid_constant__ NormOutBackwardParams params) {
  const int thread = thread_index();
  Kernel{params, shared_memory<typename Kernel::Shared>(), thread % 32, thread / 32}.run();
}

}  // namespace fused_ops::triangular_multiplicative_update
