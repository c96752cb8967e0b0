// SPDX-License-Identifier: Apache-2.0
// What the two resident kernels of the output share: tiles of o, their rows' statistics, and what a
// thread has to know of its channels. All in bf16.
#pragma once

#include "triangular_multiplicative_update/output_sm80.cuh"
#include "triangular_multiplicative_update/resident_rows_sm90a.cuh"

namespace fused_ops::triangular_multiplicative_update {

// One thread asks for all weights.
__device__ __forceinline__ void load_output_weights(const OutputParams& p, unsigned char* gate,
                                                    unsigned char* out, std::uint64_t* loaded) {
  const int piece = kPieceChannels * kLineBytes;
  const int gate_bytes = p.packed.channel_blocks * p.packed.channel_blocks * piece;
  const int out_bytes = p.packed.channel_blocks * p.packed.hidden_blocks * piece;
  sm90a::mbarrier_arrive_expect(loaded, gate_bytes + out_bytes);
  sm90a::bulk_copy(gate, p.workspace + p.packed.gate, gate_bytes, loaded);
  sm90a::bulk_copy(out, p.workspace + p.packed.out, out_bytes, loaded);
}

// A tile of o: a line of 64 pairs, from `first` on, for each channel. Channels up to a multiple of
// 64 and pairs behind the last one are zeros. The producers call it.
__device__ __forceinline__ void copy_plane(unsigned char* tile, const OutputParams& p,
                                           std::int64_t first, int thread) {
  constexpr int kAtOnce = kProducers / 8;  // channels
  const int piece = thread % 8, channel = thread / 8;
  const std::int64_t pairs = p.sizes.pairs();
  const bool here = first + piece * 8 < pairs;
  const auto* plane = static_cast<const std::uint16_t*>(p.o);
  const std::uint16_t* from = plane + channel * pairs + first + piece * 8;
  unsigned char* to = tile + sm80::split_offset(channel, piece);
  // A walk, for registers: the compiler would keep all the products.
#pragma unroll 2
  for (int i = channel; i < rounded_up(p.sizes.hidden, kInner); i += kAtOnce) {
    const bool exists = here && i < p.sizes.hidden;
    sm80::cp_async_16(to, exists ? from : plane, exists ? 16 : 0);
    from += kAtOnce * pairs;
    to += kAtOnce * kLineBytes;
  }
}

// Of a row of o: 1 / deviation, and mean.
struct RowStatistics {
  float scale, mean;
};
// 1 / deviation, and mean / deviation: less exact where rows are nearly constant, in fewer
// registers.
struct RowShift {
  float scale, shift;
};

// Of a tile of o, a line of 64 pairs for each channel, the statistics of kPairs pairs from `first`
// on, a multiple of them, 4 or 8; a warp finds them, for shared memory.
template <int kPairs>
__device__ __forceinline__ void find_row_statistics(const unsigned char* tile, int first,
                                                    int hidden, float eps, int lane,
                                                    RowStatistics* of) {
  // A lane has two pairs and a slice of their channels.
  constexpr int kTwos = kPairs / 2, kSlices = 32 / kTwos;
  const int two = lane % kTwos, slice = lane / kTwos;
  const unsigned char* column = tile + (first % 8 + two * 2) * 2;
  const auto at = [&](int line) {
    const unsigned char* word = column + sm80::split_offset(line, first / 8);
    return sm80::unpack_bf16(*reinterpret_cast<const std::uint32_t*>(word));
  };
  const float2 pivot = at(0);
  float2 sum = make_float2(0.0f, 0.0f), squares = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int k = 0; k < kResidentChannels; k += kSlices) {
    if (k >= hidden) break;
    const bool exists = k + slice < hidden;
    const float2 x = at(k + slice);
    const float dx = exists ? x.x - pivot.x : 0.0f, dy = exists ? x.y - pivot.y : 0.0f;
    sum.x += dx, sum.y += dy;
    squares.x = fmaf(dx, dx, squares.x), squares.y = fmaf(dy, dy, squares.y);
  }
#pragma unroll
  for (int offset = kTwos; offset < 32; offset *= 2) {
    sum.x += __shfl_xor_sync(0xffffffff, sum.x, offset);
    sum.y += __shfl_xor_sync(0xffffffff, sum.y, offset);
    squares.x += __shfl_xor_sync(0xffffffff, squares.x, offset);
    squares.y += __shfl_xor_sync(0xffffffff, squares.y, offset);
  }
  if (slice > 0) return;
  const float inverse = 1.0f / static_cast<float>(hidden);
  const auto statistics = [&](float sum, float square, float pivot) {
    const float mean = sum * inverse;
    return RowStatistics{rsqrtf(variance_of(mean, square * inverse) + eps), pivot + mean};
  };
  of[2 * two] = statistics(sum.x, squares.x, pivot.x);
  of[2 * two + 1] = statistics(sum.y, squares.y, pivot.y);
}

// In shared memory, of two channels each: biases of the gate (scaled) and of the projection; sums
// of the projection's weights.
struct OutputVectors {
  float4 bias[kResidentChannels / 2];
  float2 sum[kResidentChannels / 2];

  struct Two {
    float4 bias;
    float2 sum;

    // Of products with the weights of channel x.
    __device__ __forceinline__ float gate(float product, int x) const {
      constexpr float kScale = kGateScale<Mode::kBFloat16>;
      return gate_sigmoid<Mode::kBFloat16>(fmaf(product, kScale, x == 0 ? bias.x : bias.y));
    }
    __device__ __forceinline__ float projected(float product, const RowStatistics& row,
                                               int x) const {
      const float centred = fmaf(-row.mean, x == 0 ? sum.x : sum.y, product);
      return fmaf(centred, row.scale, x == 0 ? bias.z : bias.w);
    }
    __device__ __forceinline__ float projected(float product, const RowShift& row, int x) const {
      const float shifted = fmaf(-row.shift, x == 0 ? sum.x : sum.y, x == 0 ? bias.z : bias.w);
      return fmaf(product, row.scale, shifted);
    }
  };

  // The block's threads call it, at least 64 of them.
  __device__ __forceinline__ void keep(const OutputParams& p, int thread) {
    const auto floats = [&](std::int64_t offset) {
      return reinterpret_cast<const float*>(p.workspace + offset) + 2 * thread;
    };
    if (2 * thread >= p.packed.channel_blocks * kPieceChannels) return;
    const float* of_gate = floats(p.packed.gate_bias);
    const float* of_out = floats(p.packed.out_bias);
    const float* of_sum = floats(p.packed.out_sum);
    constexpr float kScale = kGateScale<Mode::kBFloat16>;
    bias[thread] = make_float4(kScale * of_gate[0], kScale * of_gate[1], of_out[0], of_out[1]);
    sum[thread] = make_float2(of_sum[0], of_sum[1]);
  }

  __device__ __forceinline__ Two of(int channel) const {
    return {bias[channel / 2], sum[channel / 2]};
  }
};

}  // namespace fused_ops::triangular_multiplicative_update
