// SPDX-License-Identifier: Apache-2.0
// Rows of the pair representation on their way to the operand of a resident kernel: copied or
// loaded ahead, normalised, rounded.
#pragma once

#include "triangular_multiplicative_update/resident_sm90a.cuh"

namespace fused_ops::triangular_multiplicative_update {

// Rows of an operand: in a pass of the producers a warp has two of them, a lane eight channels.
constexpr int pass_rows(int producers) {
  return producers / 16;
}

// The piece of 16 bytes of a row's channels, eight from `channel` on.
template <int kRows>
__device__ __forceinline__ int row_piece(int row, int channel) {
  return channel / kInner * (kRows * kLineBytes) + sm80::split_offset(row, channel / 8 % 8);
}

template <Mode mode>
__device__ __forceinline__ uint4 pack_row(const float (&x)[8]) {
  constexpr float kTimes = is_scaled(mode) ? 1 << kNormalisedExponent : 1;
  return make_uint4(
      pack_16<mode>(x[0] * kTimes, x[1] * kTimes), pack_16<mode>(x[2] * kTimes, x[3] * kTimes),
      pack_16<mode>(x[4] * kTimes, x[5] * kTimes), pack_16<mode>(x[6] * kTimes, x[7] * kTimes));
}

// From the means of numbers and of their squares; NaN stays.
__device__ __forceinline__ float variance_of(float mean, float square) {
  return sm80::max_nan(fmaf(-mean, mean, square), 0.0f);
}

// To mean 0 and variance 1 over the channels, four rows over 16 lanes each. A lane whose eight
// channels are not `here` holds zeros, which stay. Sums and sums of squares are of distances from
// the row's first number, together: its own is at most sqrt(channels) deviations, so that these
// squares are at most channels + 1 times those of the distances from the mean, and what fp32 loses
// by the difference is far below the 11 bits of the result.
__device__ __forceinline__ void normalise_rows(float (&x)[4][8], const bool (&here)[4],
                                               int channels, float eps, int lane) {
  const float inverse = 1.0f / static_cast<float>(channels);
  float sum[4], squares[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = __shfl_sync(0xffffffff, x[i][0], lane & 16);
    const float pivot = here[i] ? first : 0.0f;
    sum[i] = 0.0f, squares[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      x[i][k] -= pivot;
      sum[i] += x[i][k];
      squares[i] = fmaf(x[i][k], x[i][k], squares[i]);
    }
  }
  // Half of the lanes go on with half of the rows, twice: lanes 4i to 4i + 3 with row i.
  const auto halve = [&](float& low, float high, int distance) {
    const bool upper = lane & distance;
    const float sent = upper ? low : high;
    low = (upper ? high : low) + __shfl_xor_sync(0xffffffff, sent, distance);
  };
  halve(sum[0], sum[2], 8), halve(squares[0], squares[2], 8);
  halve(sum[1], sum[3], 8), halve(squares[1], squares[3], 8);
  halve(sum[0], sum[1], 4), halve(squares[0], squares[1], 4);
#pragma unroll
  for (int distance = 2; distance > 0; distance /= 2) {
    sum[0] += __shfl_xor_sync(0xffffffff, sum[0], distance);
    squares[0] += __shfl_xor_sync(0xffffffff, squares[0], distance);
  }
  const float mean = sum[0] * inverse;
  const float variance = variance_of(mean, squares[0] * inverse);
  const float scale = rsqrtf(variance + eps);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int from = (lane & 16) + 4 * i;
    const float row_scale = __shfl_sync(0xffffffff, scale, from);
    const float row_shift = __shfl_sync(0xffffffff, -mean * scale, from);
    // With eps = 0 a row of equal numbers is NaN, as in PyTorch; padding is not.
    const float times = here[i] ? row_scale : 0.0f, plus = here[i] ? row_shift : 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) x[i][k] = fmaf(x[i][k], times, plus);
  }
}

// The producers' rows of tiles of kRows pairs, of the mode's 16 bits: copied to where they belong
// in the operand, then normalised in place. A thread reads and writes what it has copied itself.
template <Mode mode, int kRows, int kThreads = kProducers>
class RowCopies {
 public:
  static constexpr int kPassRows = pass_rows(kThreads);
  static constexpr int kPassBytes = kPassRows * kLineBytes;
  static constexpr int kPasses = kRows / kPassRows;
  static constexpr int kTogether = 4;  // passes, for their latencies

  __device__ __forceinline__ RowCopies(const Pairs& pairs, const Sizes& sizes, int thread)
      : pairs_(pairs), channels_(sizes.channels), thread_(thread) {}

  // The row of a tile that a lane knows the place of: of pass l / 2.
  static __device__ __forceinline__ int row_of_lane(int thread) {
    return thread % 32 / 2 * kPassRows + thread / 32 * 2 + thread % 2;
  }

  // Asks for a tile; the walk is at the row of the lane. Returns what normalise() wants to know.
  __device__ __forceinline__ int copy(unsigned char* operand, const PairWalk& walk) const {
    const int places = walk.exists() ? static_cast<int>(walk.offset(pairs_) / 8) : -1;
    const int channel = thread_ % 16 * 8;
    if (__any_sync(0xffffffff, channel >= rounded_up(channels_, kInner))) {
      copy_passes<false>(operand, channel, places);
    } else {
      copy_passes<true>(operand, channel, places);
    }
    return places;
  }

  // A tile that has come; keep(pass, channel, eight numbers) sees it.
  template <class Keep>
  __device__ __forceinline__ void normalise(unsigned char* operand, float eps, int places,
                                            Keep keep) const {
    const int channel = thread_ % 16 * 8;
    const bool padded = channel < rounded_up(channels_, kInner);
    unsigned char* piece = operand + row_piece<kRows>(thread_ / 16, channel);
#pragma unroll 1
    for (int first = 0; first < kPasses; first += kTogether) {
      float x[kTogether][8];
      bool here[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        uint4 four = make_uint4(0, 0, 0, 0);
        if (padded) four = *reinterpret_cast<const uint4*>(piece + i * kPassBytes);
        const std::uint32_t word[4] = {four.x, four.y, four.z, four.w};
        here[i] = place(places, first + i) >= 0 && channel < channels_;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 two = unpack_16<mode>(word[k]);
          x[i][2 * k] = two.x, x[i][2 * k + 1] = two.y;
        }
      }
      normalise_rows(x, here, channels_, eps, thread_ % 32);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const uint4 words = pack_row<mode>(x[i]);
        if (padded) *reinterpret_cast<uint4*>(piece + i * kPassBytes) = words;
        keep(first + i, channel, words);
      }
      piece += kTogether * kPassBytes;
    }
  }

  // The same without a change.
  template <class Keep>
  __device__ __forceinline__ void read(const unsigned char* operand, Keep keep) const {
    const int channel = thread_ % 16 * 8;
    if (channel >= channels_) return;
    const unsigned char* piece = operand + row_piece<kRows>(thread_ / 16, channel);
#pragma unroll 4
    for (int pass = 0; pass < kPasses; ++pass) {
      keep(pass, channel, *reinterpret_cast<const uint4*>(piece + pass * kPassBytes));
    }
  }

 private:
  // Of the thread's row of the pass.
  __device__ __forceinline__ int place(int places, int pass) const {
    return __shfl_sync(0xffffffff, places, 2 * pass + thread_ % 32 / 16);
  }

  template <bool padded>  // whether every lane has a piece
  __device__ __forceinline__ void copy_passes(unsigned char* operand, int channel,
                                              int places) const {
    const auto* from = static_cast<const uint4*>(pairs_.data);
    unsigned char* to = operand + row_piece<kRows>(thread_ / 16, channel);
#pragma unroll 4
    for (int pass = 0; pass < kPasses; ++pass) {
      const int at = place(places, pass);
      const bool here = at >= 0 && channel < channels_;
      if (padded || channel < rounded_up(channels_, kInner)) {
        sm80::cp_async_16(to, here ? from + at + channel / 8 : from, here ? 16 : 0);
      }
      to += kPassBytes;
    }
  }

  const Pairs& pairs_;
  int channels_;
  int thread_;
};

// The same of fp32 pairs, through registers: loads run ahead of their use by kDepth passes, into
// the next tile.
template <Mode mode, int kRows>
class RowStream {
 public:
  static constexpr int kPassRows = pass_rows(kProducers);
  static constexpr int kPassBytes = kPassRows * kLineBytes;
  static constexpr int kPasses = kRows / kPassRows;
  static constexpr int kDepth = 4;
  static constexpr int kTogether = 4;
  static_assert(kPasses % kDepth == 0 && kDepth % kTogether == 0);

  __device__ __forceinline__ RowStream(const Pairs& pairs, const Sizes& sizes, int thread)
      : pairs_(pairs),
        channels_(sizes.channels),
        row_(thread / 16),
        channel_(thread % 16 * 8),
        lane_(thread % 32) {}

  // The first tile. `walk` is at the row of the lane.
  __device__ __forceinline__ void start(const PairWalk& walk) {
    next_ = place(walk);
#pragma unroll
    for (int pass = 0; pass < kDepth; ++pass) load(pass, pass, next_);
  }

  // The walk is at the row of the lane in the tile after the one that tile() takes now.
  __device__ __forceinline__ void advance(const PairWalk& walk) {
    now_ = next_;
    next_ = place(walk);
  }

  // The next tile, into the operand.
  __device__ __forceinline__ void tile(unsigned char* operand, bool normalises, float eps) {
#pragma unroll 1
    for (int first = 0; first < kPasses; first += kDepth) {
      const bool last = first + kDepth == kPasses;
      const int places = last ? next_ : now_, ahead = last ? 0 : first + kDepth;
#pragma unroll
      for (int begin = 0; begin < kDepth; begin += kTogether) {
        float x[kTogether][8];
        bool here[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          here[i] = take(begin + i, x[i]);
          load(begin + i, ahead + begin + i, places);
        }
        if (normalises) normalise_rows(x, here, channels_, eps, lane_);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) store(operand, first + begin + i, x[i]);
      }
    }
  }

 private:
  // In units of eight numbers; -1 where there is no such pair.
  __device__ __forceinline__ int place(const PairWalk& walk) const {
    return walk.exists() ? static_cast<int>(walk.offset(pairs_) / 8) : -1;
  }

  // Without a branch: what does not exist reads the first numbers.
  __device__ __forceinline__ void load(int at, int pass, int places) {
    const int place = __shfl_sync(0xffffffff, places, 2 * pass + lane_ / 16);
    const bool here = place >= 0 && channel_ < channels_;
    here_[at] = here;
    const std::int64_t offset = here ? std::int64_t{place} + channel_ / 8 : 0;
    const auto* from = static_cast<const uint4*>(pairs_.data) + 2 * offset;
    raw_[at][0] = from[0], raw_[at][1] = from[1];
  }

  __device__ __forceinline__ void store(unsigned char* operand, int pass,
                                        const float (&x)[8]) const {
    if (channel_ >= rounded_up(channels_, kInner)) return;
    *reinterpret_cast<uint4*>(operand + row_piece<kRows>(row_, channel_) + pass * kPassBytes) =
        pack_row<mode>(x);
  }

  __device__ __forceinline__ bool take(int at, float (&x)[8]) const {
    const bool here = here_[at];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[4 * i] = here ? __uint_as_float(raw_[at][i].x) : 0.0f;
      x[4 * i + 1] = here ? __uint_as_float(raw_[at][i].y) : 0.0f;
      x[4 * i + 2] = here ? __uint_as_float(raw_[at][i].z) : 0.0f;
      x[4 * i + 3] = here ? __uint_as_float(raw_[at][i].w) : 0.0f;
    }
    return here;
  }

  const Pairs& pairs_;
  int channels_;
  int row_, channel_, lane_;
  int now_ = -1, next_ = -1;
  uint4 raw_[kDepth][2];
  bool here_[kDepth];
};

}  // namespace fused_ops::triangular_multiplicative_update
