// SPDX-License-Identifier: Apache-2.0
// What WarpProduct does, on Hopper: a warpgroup multiplies 64 rows with all lines of a piece by
// wgmma, which reads both operands from shared memory as they lie there.
#pragma once

#include "common/cuda/sm80/ring.cuh"
#include "common/cuda/sm90a/split.cuh"
#include "triangular_multiplicative_update/tile.cuh"

namespace fused_ops::triangular_multiplicative_update {

// Packed operands that stream through a ring in shared memory, brought by the copy engine, which
// one thread asks for. A piece is waited for, and given back, without a meeting of the block.
template <int kBytes, int kStages, class Source>
class BulkRing {
 public:
  struct Storage {
    unsigned char pieces[kStages][kBytes];
    std::uint64_t full[kStages];   // a piece has come
    std::uint64_t empty[kStages];  // all warps have read it
  };

  // `every_thread_arrives`: for a race checker, see warp_arrives().
  __device__ __forceinline__ BulkRing(Storage& storage, const Source& source, int thread,
                                      bool every_thread_arrives)
      : storage_(storage), source_(source), thread_(thread), every_(every_thread_arrives) {
    if (thread == 0) {
      for (int i = 0; i < kStages; ++i) {
        sm80::mbarrier_init(&storage.full[i], 1);
        sm80::mbarrier_init(&storage.empty[i], sm80::arrivals(kThreads, every_thread_arrives));
      }
      sm90a::fence_async();
    }
  }

  // Between this and next() the block meets, for the barriers' sake.
  __device__ __forceinline__ void start() {
    if (thread_ != 0) return;
    for (int i = 0; i < kStages - 1; ++i) copy();
  }

  // With two places the piece after the next one takes the place of the one before, and is asked
  // for here, to come while the next one is multiplied: this warp has given that place back, and
  // the others have, or soon will.
  __device__ __forceinline__ const unsigned char* next() {
    if (kStages == 2 && thread_ == 0) copy();
    sm80::mbarrier_wait(&storage_.full[out_.stage], out_.round);
    return storage_.pieces[out_.stage];
  }

  // The piece has been read. With more than two places, asks for the one that takes the place of
  // the one before it, which the others have read by now, or soon.
  __device__ __forceinline__ void release() {
    sm80::warp_arrives(&storage_.empty[out_.stage], thread_, every_);
    out_.advance();
    if (kStages > 2 && thread_ == 0) copy();
  }

 private:
  __device__ __forceinline__ void copy() {
    const unsigned char* from = source_.take();
    if (!from) return;
    sm80::mbarrier_wait(&storage_.empty[in_.stage], in_.round ^ 1);
    sm90a::mbarrier_arrive_expect(&storage_.full[in_.stage], kBytes);
    sm90a::bulk_copy(storage_.pieces[in_.stage], from, kBytes, &storage_.full[in_.stage]);
    in_.advance();
  }

  Storage& storage_;
  Source source_;
  int thread_;
  bool every_;
  sm80::RingSlot<kStages> in_, out_;
};

template <Mode mode, int kRows, int kColumns>
struct GroupProduct {
  static_assert(kRows == 64 * (kThreads / 128));
  static constexpr int kGroupThreads = 128;  // that share rows
  static constexpr int kRowTiles = 1;        // of a warp
  static constexpr int kColumnTiles = kColumns / 8;

  float total[1][kColumnTiles][4];

  static __device__ __forceinline__ int row(int thread) { return thread / 32 * 16; }
  static __device__ __forceinline__ int column(int) { return 0; }
  static __device__ __forceinline__ void publish() { sm90a::fence_async(); }
  static __device__ __forceinline__ void meet(int thread) {
    if (thread < 128) {
      sm80::named_barrier<1, 128>();
    } else {
      sm80::named_barrier<2, 128>();
    }
  }

  template <int kBytes, int kStages, class Source>
  using Weights = BulkRing<kBytes, kStages, Source>;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) total[0][j][e] = 0.0f;
    }
  }

  static __device__ __forceinline__ sm80::SharedAddress left(const unsigned char* lines,
                                                             int thread) {
    return sm80::shared_address(lines + thread / 128 * 64 * kLineBytes);
  }
  static __device__ __forceinline__ sm80::SharedAddress right(const unsigned char* lines, int) {
    return sm80::shared_address(lines);
  }

  __device__ __forceinline__ void multiply(sm80::SharedAddress a, int a_lo, sm80::SharedAddress b,
                                           int b_lo) {
    const auto left = sm90a::matrix_descriptor(a), right = sm90a::matrix_descriptor(b);
    // Descriptors count in units of 16 bytes; 16 numbers of the inner axis are two.
    constexpr int kNext = 2;
    if constexpr (mode == Mode::kSplit) {
      const auto left_lo = left + (a_lo >> 4), right_lo = right + (b_lo >> 4);
#pragma unroll
      for (int k = 0; k < 4 * kNext; k += 2 * kNext) {
        float sum[kColumnTiles][4];
        sm90a::wgmma_begin();
        // The small terms first.
        sm90a::wgmma_f16_zero(sum, left_lo + k, right + k);
        sm90a::wgmma_f16(sum, left + k, right_lo + k);
        sm90a::wgmma_f16(sum, left_lo + k + kNext, right + k + kNext);
        sm90a::wgmma_f16(sum, left + k + kNext, right_lo + k + kNext);
        sm90a::wgmma_f16(sum, left + k, right + k);
        sm90a::wgmma_f16(sum, left + k + kNext, right + k + kNext);
        sm90a::wgmma_wait(sum);
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) total[0][j][e] += sum[j][e];
        }
      }
    } else {
      sm90a::wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4 * kNext; k += kNext) {
        if constexpr (mode == Mode::kBFloat16) {
          sm90a::wgmma_bf16(total[0], left + k, right + k);
        } else {
          sm90a::wgmma_f16(total[0], left + k, right + k);
        }
      }
      sm90a::wgmma_wait(total[0]);
    }
  }
};

}  // namespace fused_ops::triangular_multiplicative_update
