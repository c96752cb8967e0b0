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

// Words of eight numbers.
template <DType type>
constexpr int kWordsOfEight = type == DType::kFloat32 ? 8 : 4;

template <DType type>
__device__ __forceinline__ void unpack_eight(const std::uint32_t (&words)[kWordsOfEight<type>],
                                             float (&numbers)[8]) {
#pragma unroll
  for (int i = 0; i < kWordsOfEight<type>; ++i) {
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

// The first `there` of eight numbers as they are stored, zero for the others; all loads are under
// way before the first is converted.
__device__ __forceinline__ void load_eight(const Stored& stored, std::int64_t at, int there,
                                           float (&numbers)[8]) {
  if (stored.type == DType::kFloat32) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      numbers[e] = e < there ? static_cast<const float*>(stored.data)[at + e] : 0.0f;
    }
    return;
  }
  std::uint32_t bits[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    bits[e] = e < there ? static_cast<const std::uint16_t*>(stored.data)[at + e] : 0;
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) numbers[e] = from_bits(bits[e], stored.type);
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

// To fp32's accuracy, without the special cases of a division.
__device__ __forceinline__ float reciprocal(int count) {
  const float number = static_cast<float>(count);
  const float near = sm80::reciprocal_approx(number);
  return fmaf(near, fmaf(-number, near, 1.0f), near);
}

// Of pairs g and g + 8, the same in all four lanes of a g.
struct BiasStatistics {
  float mean[2];
  float rstd[2];  // until all channels were taken in, the sum of the squared deviations

  // Subtracts a mean: with `taken` that of all channels, of which the chunks were taken in before;
  // else that of the chunk, which is taken in.
  __device__ __forceinline__ void subtract(BiasPairs& x, bool taken, int chunk, int channels,
                                           int t) {
    const int before = chunk * kBiasChunk;
    const int here = channels - before < kBiasChunk ? channels - before : kBiasChunk;
    float center[2] = {mean[0], mean[1]};
    if (!taken) {
      const float per_channel = reciprocal(here);
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
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < 4; ++block) {
#pragma unroll
        for (int e = 0; e < 8; ++e) x.numbers[half][block][e] -= center[half];
      }
    }
    if (taken) return;
    if (here < kBiasChunk) {  // what is not there does not deviate
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (block * 32 + t * 8 + e >= here) x.numbers[half][block][e] = 0.0f;
          }
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float part[4] = {};
#pragma unroll
      for (int block = 0; block < 4; ++block) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float deviation = x.numbers[half][block][e];
          part[block] = fmaf(deviation, deviation, part[block]);
        }
      }
      const float spread = quad_sum((part[0] + part[1]) + (part[2] + part[3]));
      if (chunk == 0) {
        mean[half] = center[half];
        rstd[half] = spread;
      } else {
        const float share = static_cast<float>(here) * reciprocal(before + here);
        const float shift = center[half] - mean[half];
        mean[half] = fmaf(shift, share, mean[half]);
        rstd[half] += fmaf(shift * shift, share * static_cast<float>(before), spread);
      }
    }
  }

  __device__ __forceinline__ void finish(float per_channel, float eps) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rstd[half] = rsqrtf(fmaf(rstd[half], per_channel, eps));
    }
  }
};

// Weights as a lane takes them, in pieces of eight channels: piece (octet of heads, chunk, block,
// lane) holds head g, channels 8t to 8t + 7 of the block; zero beyond the last ones. For the tensor
// cores it is 16 bytes; else 32 lanes' pieces are mixed, channel by channel, so that a lane finds
// the eight heads of its channel side by side.
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

  // By all threads of the block.
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
      load_eight(problem.weight, std::int64_t{head} * sizes.pair_channels + channel,
                 head < sizes.heads ? sizes.pair_channels - channel : 0, numbers);
      if constexpr (kSixteen) {
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          words[i] = pack_two<type_of(mode)>(numbers[2 * i], numbers[2 * i + 1]);
        }
        reinterpret_cast<uint4*>(of(octet, chunk))[index % 128] =
            make_uint4(words[0], words[1], words[2], words[3]);
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

  // Adds the product of a block of channels to the sums of heads of octets `octet` and, if wanted,
  // the next; operands and results as of two mma.m16n8k16.
  template <int kOctets>
  __device__ __forceinline__ void multiply(const std::uint32_t (&a)[2][4], int octet, int chunk,
                                           int block, bool second, int lane,
                                           float (&sum)[kOctets][4]) const {
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      if (o > 0 && !second) break;
      const uint4 four = reinterpret_cast<const uint4*>(of(octet + o, chunk))[block * 32 + lane];
      const std::uint32_t b[2][2] = {{four.x, four.y}, {four.z, four.w}};
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        if constexpr (mode == Mode::kBFloat16) {
          sm80::mma_bf16(sum[o], a[s], b[s]);
        } else {
          sm80::mma_f16(sum[o], a[s], b[s]);
        }
      }
    }
  }

  // Likewise with fp32 multiplications of this lane's channels: its part of the sums, of eight
  // heads.
  __device__ __forceinline__ void multiply(const BiasPairs& x, int octet, int chunk, int block,
                                           int t, float (&part)[2][8]) const {
    const float* from = reinterpret_cast<const float*>(of(octet, chunk)) + block * 256 + t * 8;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const auto* four = reinterpret_cast<const float4*>(from + e * 32);
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

  // Adds the parts of four lanes to the sums, as results of mma.m16n8k16.
  static __device__ __forceinline__ void gather(const float (&part)[2][8], int t, float (&sum)[4]) {
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
