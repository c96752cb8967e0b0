// SPDX-License-Identifier: Apache-2.0
// The operands of the contraction in shared memory: how a tile of one comes there and how a warp
// reads it.
//
// A stage holds, of each operand, kSplitInner of k for kSide places (rows of the result for a,
// columns for b), in lines of 128 bytes whose 16-byte pieces are XORed with the line, so that eight
// lines read at one piece meet eight different groups of banks. Two layouts of the same size:
// - along: lines run along k, one for each place, as split.cuh has them: hi before lo in a line;
// - across: a line is one k and runs over a group of 64 places, all k of a group one after the
//   other, first all groups of hi, then all of lo. Reading transposes.
// wgmma knows both.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/split.cuh"
#include "triangular_multiplicative_update/triangular_multiplicative_update.h"

namespace fused_ops::triangular_multiplicative_update {

enum class Layout { kAlong, kAcross };

template <int kSide>
constexpr int kOperandBytes = kSide * sm80::kSplitLineBytes;

// Of the layout across.
constexpr int kGroupPlaces = 64;
constexpr int kGroupBytes = sm80::kSplitInner * sm80::kSplitLineBytes;

// Where 8 numbers of hi stand in it.
__device__ __forceinline__ int across_offset(int k, int place) {
  return place / kGroupPlaces * kGroupBytes + sm80::split_offset(k, place % kGroupPlaces / 8);
}

// Where the copies of one operand are. Each thread copies pieces of 8 numbers, always the same
// piece of hi or of lo, of every kStep-th line.
template <Layout layout, int kSide, int kThreads>
class OperandCopies {
  static constexpr int kInner = sm80::kSplitInner;
  static constexpr bool kAlong = layout == Layout::kAlong;
  static constexpr int kPieces = (kAlong ? kInner : kSide) / 8;  // of a line of hi
  static constexpr int kLines = kAlong ? kSide : kInner;
  static constexpr int kStep = kThreads / (2 * kPieces);
  static_assert(kStep > 0 && (kStep & (kStep - 1)) == 0 && kLines % kStep == 0);

 public:
  // `first`: the tile's first place; `matrix`: the first element of the matrix in its plane.
  __device__ __forceinline__ OperandCopies(const SplitPlane& plane, std::int64_t matrix,
                                           const Sizes& sizes, std::int64_t first, int thread) {
    const int piece = thread % kPieces;
    const int part = thread / kPieces % 2;
    const int line = thread / (2 * kPieces);
    // Lines a multiple of 8 apart have the same order of pieces.
    to_ = kAlong ? sm80::split_offset(line, part * kPieces + piece)
                 : part * (kOperandBytes<kSide> / 2) + across_offset(line, piece * 8);
    const std::int64_t first_line = kAlong ? first + line : line;
    const std::int64_t first_number = (kAlong ? 0 : first) + piece * 8;
    from_ = (part == 0 ? plane.hi : plane.lo) + matrix + first_line * sizes.pitch + first_number;
    lines_left_ = static_cast<int>(sizes.n - first_line);
    numbers_left_ = static_cast<int>(sizes.pitch - first_number);
  }

  // Starts the copies of the next chunk. Behind the matrix there are zeros.
  __device__ __forceinline__ void copy(unsigned char* operand, const SplitPlane& plane,
                                       std::int64_t pitch) {
    const int lines = numbers_left_ > 0 ? lines_left_ : 0;
#pragma unroll
    for (int i = 0; i < kLines; i += kStep) {
      const bool exists = i < lines;  // else the address is not read, but valid
      sm80::cp_async_16(operand + (to_ ^ (i & 7) << 4) + i * sm80::kSplitLineBytes,
                        exists ? from_ + i * pitch : plane.hi, exists ? 16 : 0);
    }
    if constexpr (kAlong) {
      from_ += kInner;
      numbers_left_ -= kInner;
    } else {
      from_ += kInner * pitch;
      lines_left_ -= kInner;
    }
  }

 private:
  const std::uint16_t* from_;
  int to_;
  int lines_left_;    // that exist, from this thread's first one on
  int numbers_left_;  // of a line
};

// Views of a warp for sm80::SplitProduct. The scales are undone at the end.
template <Layout layout, int kSide>
class OperandA;
template <Layout layout, int kSide>
class OperandB;

template <int kSide>
class OperandA<Layout::kAlong, kSide> {
 public:
  __device__ __forceinline__ OperandA(const unsigned char* operand, int first_row, int lane)
      : at_(sm80::shared_address(operand + sm80::split_offset(first_row + lane % 16, lane / 16))) {}

  __device__ __forceinline__ void load(int tile, sm80::SplitFragmentA* fragment) const {
    const int offset = tile * 16 * sm80::kSplitLineBytes;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      sm80::ldmatrix_x4(fragment->lo[s], (at_ ^ (4 << 4 | s << 5)) + offset);
      sm80::ldmatrix_x4(fragment->hi[s], (at_ ^ (s << 5)) + offset);
    }
  }

  __device__ __forceinline__ float undo(int, int) const { return 1.0f; }

 private:
  sm80::SharedAddress at_;
};

template <int kSide>
class OperandA<Layout::kAcross, kSide> {
 public:
  // Lanes 8i to 8i+7 address 8 lines of k for 8 rows: i = 1 the next rows, i = 2 the next lines.
  __device__ __forceinline__ OperandA(const unsigned char* operand, int first_row, int lane)
      : at_(sm80::shared_address(
            operand + across_offset(lane / 16 * 8 + lane % 8, first_row + lane / 8 % 2 * 8))) {}

  // The tiles of a warp begin at a multiple of their number, so that another one is the same
  // address with other bits flipped.
  __device__ __forceinline__ void load(int tile, sm80::SplitFragmentA* fragment) const {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const sm80::SharedAddress hi = (at_ ^ tile << 5) + s * 16 * sm80::kSplitLineBytes;
      sm80::ldmatrix_x4_trans(fragment->lo[s], hi + kOperandBytes<kSide> / 2);
      sm80::ldmatrix_x4_trans(fragment->hi[s], hi);
    }
  }

  __device__ __forceinline__ float undo(int, int) const { return 1.0f; }

 private:
  sm80::SharedAddress at_;
};

template <int kSide>
class OperandB<Layout::kAlong, kSide> : public sm80::SplitLinesB<false> {
 public:
  __device__ __forceinline__ OperandB(const unsigned char* operand, int first_column, int lane)
      : SplitLinesB(operand, nullptr, first_column, lane) {}
};

template <int kSide>
class OperandB<Layout::kAcross, kSide> {
 public:
  static constexpr bool kScaled = false;

  // Each lane addresses its line of k for 8 columns.
  __device__ __forceinline__ OperandB(const unsigned char* operand, int first_column, int lane)
      : at_(sm80::shared_address(operand + across_offset(lane, first_column))) {}

  __device__ __forceinline__ void load(int tile, sm80::SplitFragmentB* fragment) const {
    std::uint32_t four[4];
    sm80::ldmatrix_x4_trans(four, at_ ^ tile << 4);
    sm80::take_slices(fragment->hi, four);
    sm80::ldmatrix_x4_trans(four, (at_ ^ tile << 4) + kOperandBytes<kSide> / 2);
    sm80::take_slices(fragment->lo, four);
  }

  __device__ __forceinline__ float2 undo(int) const { return make_float2(1.0f, 1.0f); }

 private:
  sm80::SharedAddress at_;
};

}  // namespace fused_ops::triangular_multiplicative_update
