// SPDX-License-Identifier: Apache-2.0
// What a lane of the bias kernel holds of 16 pairs and a chunk of channels, and the statistics of
// their LayerNorm.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/numbers.cuh"
#include "common/cuda/sm80/stored.cuh"
#include "msa_row_attention/msa_row_attention.h"

namespace fused_ops::msa_row_attention {

constexpr int kBiasChunk = 128;  // channels of a step

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

}  // namespace fused_ops::msa_row_attention
