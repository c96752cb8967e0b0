// SPDX-License-Identifier: Apache-2.0
// How a block's pairs of the gradient of a plane come to shared memory, asynchronously.
#pragma once

#include "triangular_multiplicative_update/tile.cuh"

namespace fused_ops::triangular_multiplicative_update {

// kPieceChannels channels of kRows pairs, numbers of kBytes; in shared memory a channel has kPitch
// numbers. What does not exist becomes zeros.
template <int kRows, int kBytes, int kPitch>
struct PlaneGradCopies {
  static constexpr int kPer16 = 16 / kBytes;
  static constexpr int kPerWord = 4 / kBytes;
  // A thread has the same pairs of every kAtOnce-th channel.
  static constexpr int kCopies = kRows / kPer16;  // of a channel
  static constexpr int kAtOnce = kThreads / kCopies;
  static constexpr int kTimes = kPieceChannels / kAtOnce;
  static constexpr int kToStep = kAtOnce * kPitch * kBytes;
  static_assert(kThreads % kCopies == 0 && kPieceChannels % kAtOnce == 0);

  unsigned char* to;
  const unsigned char* from;
  std::int64_t step;  // to the thread's next channel
  int existing;       // of the thread's pairs, the first so many; none if not positive
  int there;          // channels from the thread's first on

  // `eights`: how many there are of each eight pairs. The plane's channels `begin` on, pairs
  // `first` on.
  static __device__ __forceinline__ void copy(unsigned char* shared, const void* plane,
                                              const Sizes& sizes, int begin, std::int64_t first,
                                              const int* eights, int thread) {
    const int row = thread % kCopies * kPer16, channel = thread / kCopies;
    const PlaneGradCopies copies{shared + (channel * kPitch + row) * kBytes,
                                 static_cast<const unsigned char*>(plane) +
                                     ((begin + channel) * sizes.pairs() + first + row) * kBytes,
                                 kAtOnce * sizes.pairs() * kBytes, eights[row / 8] - row % 8,
                                 sizes.hidden - begin - channel};
    if (copies.existing >= kPer16) {
      copies.copy_whole();
    } else {
      copies.copy_end();
    }
    sm80::cp_async_commit();
  }

  __device__ __forceinline__ bool is_there(int i) const { return i * kAtOnce < there; }

  __device__ __forceinline__ void copy_whole() const {
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      if (is_there(i)) {
        sm80::cp_async_16(to + i * kToStep, from + i * step);
      } else {
        *reinterpret_cast<uint4*>(to + i * kToStep) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // The last numbers of a line, fewer than 16 bytes, or none. What lies behind them nobody has
  // written, so it is not read either.
  __device__ __forceinline__ void copy_end() const {
    std::uint32_t half[kTimes];  // of a word; the loads are under way together
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const bool halved = kPerWord == 2 && existing > 0 && existing % 2 == 1;
      const auto* numbers = reinterpret_cast<const std::uint16_t*>(from + i * step);
      half[i] = halved && is_there(i) ? numbers[existing - 1] : 0u;
    }
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        unsigned char* at = to + i * kToStep + word * 4;
        if (is_there(i) && (word + 1) * kPerWord <= existing) {
          sm80::cp_async_4(at, from + i * step + word * 4, 4);
        } else {
          *reinterpret_cast<std::uint32_t*>(at) = word == existing / kPerWord ? half[i] : 0u;
        }
      }
    }
  }
};

}  // namespace fused_ops::triangular_multiplicative_update
