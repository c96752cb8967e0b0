// SPDX-License-Identifier: Apache-2.0
// What a lane of the bias kernel holds of 16 pairs and a chunk of channels, its LayerNorm, and its
// product with the weights, which lie in shared memory in the same order.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/stored.cuh"
#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

constexpr int kBiasChunk = 128;  // channels of a step

// Of kBFloat16 or kFloat16, the first in the lower half.
template <DType type>
__device__ __forceinline__ std::uint32_t pack_two(float first, float second) {
  return type == DType::kBFloat16 ? sm80::pack_bf16(first, second) : sm80::pack_f16(first, second);
}

template <DType type, int kWords>
__device__ __forceinline__ void unpack_eight(const std::uint32_t (&words)[kWords],
                                             float (&numbers)[8]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (type == DType::kFloat32) {
      numbers[i] = __uint_as_float(words[i]);
    } else {
      const float2 two =
          type == DType::kBFloat16 ? sm80::unpack_bf16(words[i]) : sm80::unpack_f16(words[i]);
      numbers[2 * i] = two.x;
      numbers[2 * i + 1] = two.y;
    }
  }
}

// Of lane 4 * g + t: pairs g and g + 8, channels 32 * block + 8 * t to + 7 of the chunk.
struct BiasPairs {
  float numbers[2][4][8];
};

// Of four neighbouring lanes.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Of pairs g and g + 8, the same in all four lanes of a g.
struct BiasStatistics {
  float mean[2];
  float squares[2];  // of the deviations from it
  float rstd[2];

  // Takes one more chunk in, and subtracts its mean (the whole mean, if it is the only one).
  // Channels beyond the last are zero, and stay so.
  __device__ __forceinline__ void take(BiasPairs& x, int chunk, int channels, int t) {
    const int before = chunk * kBiasChunk;
    const int here = channels - before < kBiasChunk ? channels - before : kBiasChunk;
    const float per_channel = 1.0f / static_cast<float>(here);
    float center[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float part[4];
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const float (&p)[8] = x.numbers[half][block];
        part[block] = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
      }
      center[half] = quad_sum((part[0] + part[1]) + (part[2] + part[3])) * per_channel;
    }
    float spread[2];
    if (here == kBiasChunk) {
      deviations<true>(x, center, spread, here, t);
    } else {
      deviations<false>(x, center, spread, here, t);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (chunk == 0) {
        mean[half] = center[half];
        squares[half] = spread[half];
      } else {
        const float share = static_cast<float>(here) / static_cast<float>(before + here);
        const float shift = center[half] - mean[half];
        mean[half] = fmaf(shift, share, mean[half]);
        squares[half] += fmaf(shift * shift, share * static_cast<float>(before), spread[half]);
      }
    }
  }

  __device__ __forceinline__ void finish(int channels, float eps) {
    const float per_channel = 1.0f / static_cast<float>(channels);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rstd[half] = rsqrtf(fmaf(squares[half], per_channel, eps));
    }
  }

  __device__ __forceinline__ void subtract_mean(BiasPairs& x) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < 4; ++block) {
#pragma unroll
        for (int e = 0; e < 8; ++e) x.numbers[half][block][e] -= mean[half];
      }
    }
  }

 private:
  template <bool kFull>
  static __device__ __forceinline__ void deviations(BiasPairs& x, const float (&center)[2],
                                                    float (&spread)[2], int channels, int t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float part[4] = {};
#pragma unroll
      for (int block = 0; block < 4; ++block) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& number = x.numbers[half][block][e];
          const bool there = kFull || block * 32 + t * 8 + e < channels;
          number = there ? number - center[half] : 0.0f;
          part[block] = fmaf(number, number, part[block]);
        }
      }
      spread[half] = quad_sum((part[0] + part[1]) + (part[2] + part[3]));
    }
  }
};

// Weights as a lane takes them, in pieces of eight channels: piece (octet of heads, chunk, block,
// lane) holds head g, channels 8t to 8t + 7 of the block; zero beyond the last ones. For tensor
// cores a piece is 16 bytes; for others the same number of 32 lanes' pieces follow each other,
// those of the eight heads side by side.
template <Mode mode>
struct BiasTable {
  static constexpr bool kSixteen = type_of(mode) != DType::kFloat32;
  static constexpr int kWeightBytes = 8 * kBiasChunk * (kSixteen ? 2 : 4);  // of octet and chunk
  static constexpr int kNormBytes = 2 * kBiasChunk * 4;                     // of a chunk

  unsigned char* weights;
  float* norm;  // of each chunk the weight, then the bias
  int chunks;

  __device__ __forceinline__ unsigned char* of(int octet, int chunk) const {
    return weights + (octet * chunks + chunk) * kWeightBytes;
  }

  __device__ __forceinline__ void fill(const BiasProblem& problem, int first_octet, int octets,
                                       int first_chunk, int some_chunks, int thread,
                                       int threads) const {
    const Sizes& sizes = problem.sizes;
    for (int index = thread; index < octets * some_chunks * 128; index += threads) {
      const int lane = index % 32;
      const int block = index / 32 % 4;
      const int chunk = index / 128 % some_chunks;
      const int octet = index / 128 / some_chunks;
      const int head = (first_octet + octet) * 8 + lane / 4;
      const int channel = (first_chunk + chunk) * kBiasChunk + block * 32 + lane % 4 * 8;
      float numbers[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const bool there = head < sizes.heads && channel + e < sizes.pair_channels;
        const std::int64_t at = std::int64_t{head} * sizes.pair_channels + channel + e;
        numbers[e] = there ? load_number(problem.weight.data, problem.weight.type, at) : 0.0f;
      }
      if constexpr (kSixteen) {
        constexpr DType kType = type_of(mode);
        reinterpret_cast<uint4*>(of(octet, chunk))[index % 128] = make_uint4(
            pack_two<kType>(numbers[0], numbers[1]), pack_two<kType>(numbers[2], numbers[3]),
            pack_two<kType>(numbers[4], numbers[5]), pack_two<kType>(numbers[6], numbers[7]));
      } else {
        auto* to = reinterpret_cast<float*>(of(octet, chunk)) + block * 256 + lane % 4 * 8;
#pragma unroll
        for (int e = 0; e < 8; ++e) to[e * 32 + lane / 4] = numbers[e];
      }
    }
    if (!problem.norm_weight.data) return;
    for (int index = thread; index < some_chunks * kBiasChunk; index += threads) {
      const int channel = first_chunk * kBiasChunk + index;
      const bool there = channel < sizes.pair_channels;
      float* to = norm + index / kBiasChunk * 2 * kBiasChunk + index % kBiasChunk;
      to[0] = there ? load_or(problem.norm_weight, channel, 1.0f) : 0.0f;
      to[kBiasChunk] = there ? load_or(problem.norm_bias, channel, 0.0f) : 0.0f;
    }
  }

  // The LayerNorm of deviations from the mean, in place.
  __device__ __forceinline__ void normalise(BiasPairs& x, const BiasStatistics& statistics,
                                            int chunk, int block, int t) const {
    const float* from = norm + chunk * 2 * kBiasChunk + block * 32 + t * 8;
#pragma unroll
    for (int four = 0; four < 8; four += 4) {
      const float4 w = *reinterpret_cast<const float4*>(from + four);
      const float4 b = *reinterpret_cast<const float4*>(from + kBiasChunk + four);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* to = x.numbers[half][block] + four;
        to[0] = fmaf(to[0] * statistics.rstd[half], w.x, b.x);
        to[1] = fmaf(to[1] * statistics.rstd[half], w.y, b.y);
        to[2] = fmaf(to[2] * statistics.rstd[half], w.z, b.z);
        to[3] = fmaf(to[3] * statistics.rstd[half], w.w, b.w);
      }
    }
  }

  // Adds to the sums of octets `octet` and, if wanted, the next; as results of mma.m16n8k16.
  template <int kOctets>
  __device__ __forceinline__ void multiply(BiasPairs& x, bool normed,
                                           const BiasStatistics& statistics, int octet, int chunk,
                                           bool second, int lane, float (&sum)[kOctets][4]) const {
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (normed) normalise(x, statistics, chunk, block, lane % 4);
      if constexpr (kSixteen) {
        std::uint32_t a[2][4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float* two = x.numbers[half][block] + 2 * word;
            a[word / 2][word % 2 * 2 + half] = pack_two<type_of(mode)>(two[0], two[1]);
          }
        }
#pragma unroll
        for (int o = 0; o < kOctets; ++o) {
          if (o > 0 && !second) break;
          const uint4 w = reinterpret_cast<const uint4*>(of(octet + o, chunk))[block * 32 + lane];
          multiply_add(sum[o], a[0], {w.x, w.y});
          multiply_add(sum[o], a[1], {w.z, w.w});
        }
      }
    }
    if constexpr (!kSixteen) {
      static_assert(kOctets == 1);
      float part[2][8] = {};
      const float* from = reinterpret_cast<const float*>(of(octet, chunk)) + lane % 4 * 8;
#pragma unroll
      for (int block = 0; block < 4; ++block) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const auto* four = reinterpret_cast<const float4*>(from + block * 256 + e * 32);
          const float4 low = four[0];
          const float4 high = four[1];
          const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int head = 0; head < 8; ++head) {
              part[half][head] = fmaf(x.numbers[half][block][e], w[head], part[half][head]);
            }
          }
        }
      }
      add_of_quad(part, lane % 4, sum[0]);
    }
  }

 private:
  struct Two {
    std::uint32_t words[2];
  };
  static __device__ __forceinline__ void multiply_add(float (&sum)[4], const std::uint32_t (&a)[4],
                                                      const Two& b) {
    if constexpr (mode == Mode::kBFloat16) {
      sm80::mma_bf16(sum, a, b.words);
    } else {
      sm80::mma_f16(sum, a, b.words);
    }
  }

  // The sums over four lanes, of which lane t gets heads 2t and 2t + 1.
  static __device__ __forceinline__ void add_of_quad(const float (&part)[2][8], int t,
                                                     float (&sum)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float four[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float mine = t >= 2 ? part[half][4 + e] : part[half][e];
        const float theirs = t >= 2 ? part[half][e] : part[half][4 + e];
        four[e] = mine + __shfl_xor_sync(0xffffffffu, theirs, 2);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float mine = t % 2 ? four[2 + e] : four[e];
        const float theirs = t % 2 ? four[e] : four[2 + e];
        sum[2 * half + e] += mine + __shfl_xor_sync(0xffffffffu, theirs, 1);
      }
    }
  }
};

}  // namespace fused_ops::msa_row_attention
