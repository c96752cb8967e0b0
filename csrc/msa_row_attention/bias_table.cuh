// SPDX-License-Identifier: Apache-2.0
// The weights of the bias kernel in shared memory, and products with them.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/stored.cuh"
#include "msa_row_attention/bias_pieces.cuh"
#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

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
