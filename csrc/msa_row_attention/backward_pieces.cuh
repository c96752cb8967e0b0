// SPDX-License-Identifier: Apache-2.0
// What the kernels of the backward share: their parameters, and products with lines of a head's
// numbers in shared memory.
#pragma once

#include "common/cuda/sm80/quad.cuh"
#include "msa_row_attention/dropout.cuh"
#include "msa_row_attention/lines.cuh"

namespace fused_ops::msa_row_attention {

struct BackwardParams {
  const std::uint16_t* projected = nullptr;
  const void* bias = nullptr;
  const std::uint64_t* present = nullptr;
  const std::uint16_t* d_attended = nullptr;
  const float* log_sums = nullptr;
  const float* row_dots = nullptr;
  std::uint16_t* d_projected = nullptr;
  unsigned rows = 0;         // of a group
  unsigned row_blocks = 0;   // of a group
  unsigned block_tiles = 0;  // of queries or keys, of a row
  unsigned heads = 0;
  int n = 0;
  int tiles = 0;   // of 64 queries or keys
  int blocks = 0;  // of queries, of bias
  unsigned dim = 0;
  unsigned width = 0;        // of all heads
  float scale = 0.0f;        // 1 / sqrt(dim), times the factor of dropout
  float logit_scale = 0.0f;  // log2(e) / sqrt(dim)
  Dropout dropout;

  // Which of 64 keys of a row are there.
  __device__ __forceinline__ std::uint64_t mask_word(std::int64_t row, int tile) const {
    if (tile >= tiles) return 0;
    if (present) return present[row * tiles + tile];
    const int left = n - tile * kKeys;
    return left >= kKeys ? ~std::uint64_t{0} : ~std::uint64_t{0} >> (kKeys - left);
  }
};

// A row and head of the tensors. All numbers are positive, and unsigned products are shorter.
struct Place {
  const BackwardParams& p;
  std::uint64_t first;  // position of the row
  unsigned head;

  // Of query, key, value, gate.
  __device__ __forceinline__ std::uint64_t projected(unsigned position, unsigned which) const {
    return (first + position) * (4u * p.width) + (which * p.width + head * p.dim);
  }
  __device__ __forceinline__ std::uint64_t attended(unsigned position) const {
    return (first + position) * p.width + head * p.dim;
  }
  __device__ __forceinline__ std::uint64_t statistic(unsigned query) const {
    return first * p.heads + std::uint64_t{head} * static_cast<unsigned>(p.n) + query;
  }
};

// What a block's threads for one of its rows work at. The tiles of a row and head follow each
// other, then the heads: they share what the block walks.
struct RowTile {
  int tile;  // of the queries or keys that a block has of a row
  unsigned head;
  unsigned group;
  bool exists;       // whether there is such a row
  std::int64_t row;  // the group's first one if not

  template <int row_count>
  static __device__ __forceinline__ RowTile of(const BackwardParams& p, unsigned slot) {
    unsigned block = blockIdx.x;
    const unsigned tile = block % p.block_tiles;
    block /= p.block_tiles;
    const unsigned head = block % p.heads;
    block /= p.heads;
    const unsigned group = block / p.row_blocks;
    const unsigned in_group = block % p.row_blocks * row_count + slot;
    const bool exists = row_count == 1 || in_group < p.rows;
    return {static_cast<int>(tile), head, group, exists,
            std::int64_t{group} * p.rows + (exists ? in_group : 0)};
  }

  __device__ __forceinline__ Place place(const BackwardParams& p) const {
    return {p, static_cast<std::uint64_t>(row) * static_cast<unsigned>(p.n), head};
  }
};

__device__ __forceinline__ sm80::SharedAddress number_of(const void* shared) {
  return static_cast<sm80::SharedAddress>(
      sm80::opaque(static_cast<int>(sm80::shared_address(shared))));
}

__device__ __forceinline__ float opaque(float x) {
  return __uint_as_float(
      static_cast<std::uint32_t>(sm80::opaque(static_cast<int>(__float_as_uint(x)))));
}

// Asks for a thread's pieces of a head's lines, of which it has every kLineStep-th from `line` on;
// zeros for those that `is_here` says no of. `from` is in the first of them, and `to`; `stride`
// elements before the next line. `inside`: whether the head is so wide.
template <int width, int threads, int line_count, class IsHere>
__device__ __forceinline__ void copy_pieces(sm80::SharedAddress to, const std::uint16_t* from,
                                            unsigned stride, bool inside, unsigned line,
                                            IsHere is_here) {
  constexpr int kLineStep = threads / Lines<width>::kPieceRoom;
  static_assert(Lines<width>::repeats_after(kLineStep));
#pragma unroll
  for (int i = 0; i < line_count; i += kLineStep) {
    // Lines kLineStep apart have their pieces in the same order.
    sm80::cp_async_16(to + i * Lines<width>::kPitch, from + std::uint64_t{stride} * i,
                      inside && is_here(static_cast<int>(line) + i) ? 16 : 0);
  }
}

// Asks for 64 lines of two tensors, by `threads` threads: those that `here` has a bit for, zeros
// for the others. `first` and `second` are the thread's pieces of its first line.
template <int width, int threads>
__device__ __forceinline__ void copy_two_lines(sm80::SharedAddress to_first,
                                               sm80::SharedAddress to_second,
                                               const std::uint16_t* first,
                                               const std::uint16_t* second, unsigned first_stride,
                                               unsigned second_stride, unsigned dim,
                                               unsigned thread, std::uint64_t here) {
  using Line = Lines<width>;
  constexpr int kLineStep = threads / Line::kPieceRoom;
  static_assert(Line::repeats_after(kLineStep));
  const unsigned piece = thread % Line::kPieceRoom, line = thread / Line::kPieceRoom;
  if (piece >= Line::kPieces) return;
  const unsigned at = Line::piece_at(line, piece);
  const auto copy = [&](auto bytes_of) {
#pragma unroll
    for (int i = 0; i < kKeys; i += kLineStep) {
      // Lines kLineStep apart have their pieces in the same order.
      sm80::cp_async_16(to_first + at + i * Line::kPitch, first + std::uint64_t{first_stride} * i,
                        bytes_of(i));
      sm80::cp_async_16(to_second + at + i * Line::kPitch,
                        second + std::uint64_t{second_stride} * i, bytes_of(i));
    }
  };
  if (width == dim && here == ~std::uint64_t{0}) {  // no question at every piece
    copy([](int) { return 16; });
  } else {
    if (width != dim && piece * 8 >= dim) here = 0;
    here >>= line;
    copy([here](int i) { return (here >> i & 1) != 0 ? 16 : 0; });
  }
}

// Products of a warp's kM * 16 rows, which are fragments in registers, with 16 lines.
template <Mode mode, int width, int kM>
struct Products {
  using Line = Lines<width>;
  static constexpr int kSteps = width / 16;
  static constexpr int kTiles = width / 8;
  using Fragments = std::uint32_t[kM][kSteps][4];
  using Weights = float[kM][4];         // rows by 8 lines
  using Packed = std::uint32_t[kM][4];  // rows by 16 lines, as left operand
  using Sums = float[kM][kTiles][4];    // rows by `width` numbers

  // `first` is the warp's first row, `count` how many exist; all others are zeros. `whole`: all
  // rows exist and fill their width.
  template <bool whole = false>
  static __device__ __forceinline__ void load(Fragments& rows, const std::uint16_t* first,
                                              unsigned stride, int count, unsigned dim,
                                              unsigned lane) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = m * 16 + h * 8 + static_cast<int>(lane / 4);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const unsigned column = s * 16 + i * 8 + lane % 4 * 2;
            const bool here = whole || (row < count && (width == dim || column < dim));
            rows[m][s][i * 2 + h] = here ? *reinterpret_cast<const std::uint32_t*>(
                                               first + std::uint64_t{stride} * row + column)
                                         : 0;
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void negate(Fragments& rows) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[m][s][i] ^= 0x80008000u;
      }
    }
  }

  // The same from lines in shared memory, `offset` bytes behind `at`.
  static __device__ __forceinline__ void load(Fragments& rows, sm80::SharedAddress at, int offset) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        sm80::ldmatrix_x4(rows[m][s], Line::further(at, 2 * s) + offset + m * 16 * Line::kPitch);
      }
    }
  }

  // Right operands of products with 16 lines: of 8 lines each, which are its columns.
  using EightColumns = std::uint32_t[kSteps][2];
  using Columns = EightColumns[2];
  // Whether a load of four matrices takes 8 lines by 32 numbers, else 16 lines by 16.
  static constexpr bool kEightLines = width % 32 == 0;

  // What a lane adds to the address of 16 lines, for operands: `across` where the lines
  // are columns of a right one, `down` where they are rows of it.
  static __device__ __forceinline__ int across(unsigned lane) {
    return kEightLines ? Line::piece_at(lane % 8, lane / 8)
                       : Line::piece_at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }
  static __device__ __forceinline__ int down(unsigned lane) {
    return Line::piece_at(lane % 16, lane / 16);
  }

  // Of lines `offset` bytes behind `at`. They are loaded as late as possible, for registers: the
  // first 8 with `half` = 0, the next ones with 1.
  static __device__ __forceinline__ void load(Columns& columns, sm80::SharedAddress at, int offset,
                                              int half) {
    if (kEightLines) {
#pragma unroll
      for (int s = 0; s < kSteps; s += 2) {
        std::uint32_t four[4];
        sm80::ldmatrix_x4(four, Line::further(at, 2 * s) + offset + half * 8 * Line::kPitch);
#pragma unroll
        for (int i = 0; i < 4; ++i) columns[half][s + i / 2][i % 2] = four[i];
      }
    } else if (half == 0) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        std::uint32_t four[4];
        sm80::ldmatrix_x4(four, Line::further(at, 2 * s) + offset);
#pragma unroll
        for (int i = 0; i < 4; ++i) columns[i / 2][s][i % 2] = four[i];
      }
    }
  }

  // weights += rows * lines^T, of 8 lines
  static __device__ __forceinline__ void multiply(Weights& weights, const Fragments& rows,
                                                  const std::uint32_t (&columns)[kSteps][2]) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int m = 0; m < kM; ++m) multiply_16<mode>(weights[m], rows[m][s], columns[s]);
    }
  }

  // Of a row tile and the first 8 lines, or the last 8 with `half` = 1.
  static __device__ __forceinline__ void pack(std::uint32_t (&packed)[4], const float (&four)[4],
                                              int half) {
    packed[2 * half] = pack_16<mode>(four[0], four[1]);
    packed[2 * half + 1] = pack_16<mode>(four[2], four[3]);
  }

  // Clears what belongs to lines that the lowest 16 bits of `some` are not set for.
  static __device__ __forceinline__ void remove_absent(Packed& weights, std::uint32_t some,
                                                       unsigned lane) {
    const std::uint32_t mine = some >> (2 * (lane % 4));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const std::uint32_t bits = mine >> (8 * j);
      const std::uint32_t mask = ((bits & 1) | (bits & 2) << 15) * 0xffff;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        weights[m][2 * j] &= mask;
        weights[m][2 * j + 1] &= mask;
      }
    }
  }

  // Addresses of 16 lines' operands: those of further lines are at fixed distances. Of wide heads
  // they are too many to be held.
  static constexpr bool kHeld = width <= 64;
  using Down = sm80::SharedAddress[kHeld ? kTiles / 2 : 1];
  static __device__ __forceinline__ void start(Down& down, sm80::SharedAddress at) {
#pragma unroll
    for (int j = 0; j < (kHeld ? kTiles / 2 : 1); ++j) down[j] = Line::further(at, 2 * j);
  }

  // sums += weights * lines, with the lines `offset` bytes behind `at`.
  static __device__ __forceinline__ void add(Sums& sums, const Packed& weights, const Down& at,
                                             int offset) {
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      std::uint32_t four[4];
      sm80::ldmatrix_x4_trans(
          four, kHeld ? at[kHeld ? j / 2 : 0] + offset : Line::further(at[0] + offset, j));
      const std::uint32_t left[2] = {four[0], four[1]}, right[2] = {four[2], four[3]};
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        multiply_16<mode>(sums[m][j], weights[m], left);
        multiply_16<mode>(sums[m][j + 1], weights[m], right);
      }
    }
  }

  static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[m][j][e] = 0.0f;
      }
    }
  }

  // sums * scale to the warp's rows, zeros to those that `here` has no bit for.
  template <bool whole = false>
  static __device__ __forceinline__ void store(std::uint16_t* first, unsigned stride,
                                               const Sums& sums, float scale, std::uint32_t here,
                                               int count, unsigned dim, unsigned lane) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = m * 16 + h * 8 + static_cast<int>(lane / 4);
        const bool there = here >> row & 1;
        std::uint16_t* line = first + std::uint64_t{stride} * row;
        const auto word = [&](int j) {
          const float x = sums[m][j][2 * h] * scale, y = sums[m][j][2 * h + 1] * scale;
          return there ? pack_16<mode>(x, y) : 0;
        };
#pragma unroll
        for (int j = 0; j < kTiles; j += 4) {
          if (j + 4 <= kTiles) {  // by pieces of 16 bytes
            std::uint32_t words[4] = {word(j), word(j + 1), word(j + 2), word(j + 3)};
            turn_quad(words, lane);
            const unsigned column = (j + lane % 4) * 8;
            if (whole || (row < count && (width == dim || column < dim))) {
              sm80::store_global_16(line + column,
                                    make_uint4(words[0], words[1], words[2], words[3]));
            }
          } else {
#pragma unroll
            for (int i = j; i < kTiles; ++i) {
              const unsigned column = i * 8 + lane % 4 * 2;
              if (whole || (row < count && (width == dim || column < dim))) {
                *reinterpret_cast<std::uint32_t*>(line + column) = word(i);
              }
            }
          }
        }
      }
    }
  }
};

}  // namespace fused_ops::msa_row_attention
