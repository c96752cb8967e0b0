// SPDX-License-Identifier: Apache-2.0
// What the kernels of the projections share: a block's rows (pairs) as the left operand of products
// in shared memory, packed weights that stream past as the right one, and where rows lie.
//
// An operand is blocks of 64 numbers of the inner axis; a block is, for each part (hi, then lo in
// the mode kSplit), a line of 128 bytes a row, swizzled as packed.h says.
#pragma once

#include "common/cuda/sm80/split.cuh"
#include "triangular_multiplicative_update/access.cuh"
#include "triangular_multiplicative_update/large.h"

namespace fused_ops::triangular_multiplicative_update {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Rows of a block and the most numbers a row can have. Threads hold 64 numbers of the rows each, of
// the tall tile's 96.
template <int rows, int inner>
struct Shape {
  static constexpr int kRows = rows;
  static constexpr int kInnerMost = inner;
  // Loading: a row is spread over kLanes lanes, eight numbers at a time.
  static constexpr int kLanes = inner / 8 < 32 ? inner / 8 : inner % 256 == 0 ? 32 : 16;
  static constexpr int kVectors = inner / 8 / kLanes;
  static constexpr int kRowsAtOnce = 32 / kLanes;
  static constexpr int kPasses = rows / kWarps / kRowsAtOnce;
  static_assert(kPasses * kRowsAtOnce * kWarps == rows);
};

template <Mode mode>
__device__ __forceinline__ std::uint32_t pack_16(float low, float high) {
  return mode == Mode::kBFloat16 ? sm80::pack_bf16(low, high) : sm80::pack_f16(low, high);
}

template <Mode mode>
__device__ __forceinline__ float2 unpack_16(std::uint32_t packed) {
  return mode == Mode::kBFloat16 ? sm80::unpack_bf16(packed) : sm80::unpack_f16(packed);
}

constexpr bool is_wide(Mode mode) {
  return type_of(mode) == DType::kFloat32;
}

// What the argument x of a gate is formed times: folded into the factor and the bias of a sum, it
// costs nothing. Powers of two are fewer instructions, where the results carry 11 bits or less.
template <Mode mode>
constexpr float kGateScale = mode == Mode::kSplit ? -1.0f : -1.44269504f;

// e^-x of kGateScale * x.
template <Mode mode>
__device__ __forceinline__ float gate_exp(float scaled) {
  return mode == Mode::kSplit ? expf(scaled) : sm80::exp2_approx(scaled);
}

// The sigmoid of x, of kGateScale * x.
template <Mode mode>
__device__ __forceinline__ float gate_sigmoid(float scaled) {
  return sm80::reciprocal_approx(1.0f + gate_exp<mode>(scaled));
}

// The same times a factor, given as inverse_factor(factor).
template <Mode mode>
__device__ __forceinline__ float gate_sigmoid(float scaled, float inverse) {
  return sm80::reciprocal_approx(fmaf(gate_exp<mode>(scaled), inverse, inverse));
}

// 1 / factor, but finite for 0, so that no infinity meets e^-x = 0: of 2^127 and more
// reciprocal_approx() makes 0. NaN and infinite factors arrive as such; so do those above 2^126.
__device__ __forceinline__ float inverse_factor(float factor) {
  const float inverse = 1.0f / factor;
  const float most = two_to(127);
  return fabsf(inverse) > most ? copysignf(most, inverse) : inverse;
}

// Where pair `first + r` lies.
struct Place {
  std::int64_t line;
  int column;
};

class Places {
 public:
  __device__ __forceinline__ Places(const Sizes& sizes, std::int64_t first)
      : pitch_(static_cast<std::uint32_t>(sizes.pitch)),
        line_(first / sizes.pitch),
        column_(static_cast<std::uint32_t>(first % sizes.pitch)),
        lines_(sizes.batch * sizes.n),
        n_(static_cast<int>(sizes.n)) {}

  __device__ __forceinline__ Place operator()(int r) const {
    const std::uint32_t column = column_ + static_cast<std::uint32_t>(r);
    return {line_ + column / pitch_, static_cast<int>(column % pitch_)};
  }

  // Not padding, and not beyond the last pair.
  __device__ __forceinline__ bool exists(const Place& place) const {
    return place.column < n_ && place.line < lines_;
  }

 private:
  std::uint32_t pitch_;
  std::int64_t line_;
  std::uint32_t column_;
  std::int64_t lines_;
  int n_;
};

// Walks over the rows of a tensor of pairs in steps of `step` rows, fewer than a line has: an
// addition where a division would be.
class RowWalk {
 public:
  __device__ __forceinline__ RowWalk(const Pairs& pairs, const Sizes& sizes, const Place& place,
                                     bool turned)
      : pairs_(pairs),
        turned_(turned),
        column_(place.column),
        n_(static_cast<int>(sizes.n)),
        pitch_(static_cast<int>(sizes.pitch)),
        lines_left_(sizes.batch * sizes.n - place.line),
        across_(static_cast<int>(static_cast<std::uint32_t>(place.line) %
                                 static_cast<std::uint32_t>(n_))),
        batch_(static_cast<int>(static_cast<std::uint32_t>(place.line) /
                                static_cast<std::uint32_t>(n_))) {
    find();
  }

  __device__ __forceinline__ bool exists() const { return column_ < n_ && lines_left_ > 0; }
  // Of the row's first number; 0 where there is none.
  __device__ __forceinline__ std::int64_t offset() const { return exists() ? at_ : 0; }

  __device__ __forceinline__ void advance(int step) {
    column_ += step;
    at_ += step * (turned_ ? pairs_.i_stride : pairs_.j_stride);
    if (column_ < pitch_) return;
    column_ -= pitch_;
    --lines_left_;
    if (++across_ == n_) {
      across_ = 0;
      ++batch_;
    }
    find();
  }

 private:
  __device__ __forceinline__ void find() {
    at_ = batch_ * pairs_.batch_stride + (turned_ ? column_ : across_) * pairs_.i_stride +
          (turned_ ? across_ : column_) * pairs_.j_stride;
  }

  const Pairs& pairs_;
  bool turned_;
  int column_, n_, pitch_;
  std::int64_t lines_left_;
  int across_, batch_;
  std::int64_t at_;
};

// The element (place, channel 0) of a tensor of pairs; `turned`: the place is (k, line) of it.
__device__ __forceinline__ std::int64_t offset_of(const Pairs& pairs, const Sizes& sizes,
                                                  const Place& place, bool turned) {
  const auto n = static_cast<std::uint32_t>(sizes.n);
  const auto line = static_cast<std::uint32_t>(place.line);
  const std::int64_t batch = line / n, across = line % n, column = place.column;
  return batch * pairs.batch_stride + (turned ? column : across) * pairs.i_stride +
         (turned ? across : column) * pairs.j_stride;
}

__device__ __forceinline__ float mask_at(const Mask& mask, const Sizes& sizes, const Place& place,
                                         bool turned) {
  const auto n = static_cast<std::uint32_t>(sizes.n);
  const auto line = static_cast<std::uint32_t>(place.line);
  const std::int64_t batch = line / n, across = line % n, column = place.column;
  return load_mask(mask, batch, turned ? column : across, turned ? across : column);
}

// A block's rows of a tensor of pairs, in registers: thread by thread 8 numbers of a row at a time.
template <class Shape>
class RowNumbers {
 public:
  float number[Shape::kPasses][Shape::kVectors][8];
  unsigned exists = 0;  // a bit for each pass: whether there is such a pair

  static __device__ __forceinline__ int row(int pass, int thread) {
    return thread / 32 * (Shape::kRows / kWarps) + pass * Shape::kRowsAtOnce +
           thread % 32 / Shape::kLanes;
  }
  static __device__ __forceinline__ int channel(int vector, int thread) {
    return (thread % Shape::kLanes + vector * Shape::kLanes) * 8;
  }

  // Rows that do not exist are zeros.
  __device__ __forceinline__ void load(const Pairs& pairs, const Sizes& sizes, const Places& places,
                                       bool turned, int thread) {
    const int size = pairs.type == DType::kFloat32 ? 4 : 2;
    const std::int64_t strides = pairs.batch_stride | pairs.i_stride | pairs.j_stride;
    const bool aligned = reinterpret_cast<std::uintptr_t>(pairs.data) % 16 == 0 &&
                         strides % (16 / size) == 0 && sizes.channels % 8 == 0;
    if (!aligned) {
      load_as(pairs, sizes, places, turned, thread, [&](std::int64_t at, int count, float* to) {
        for (int i = 0; i < 8; ++i) {
          to[i] = i < count ? load_number(pairs.data, pairs.type, at + i) : 0.0f;
        }
      });
    } else if (pairs.type == DType::kFloat32) {
      load_as(pairs, sizes, places, turned, thread, [&](std::int64_t at, int, float* to) {
        const auto* from =
            reinterpret_cast<const float4*>(static_cast<const float*>(pairs.data) + at);
        const float4 x = from[0], y = from[1];
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
        to[4] = y.x, to[5] = y.y, to[6] = y.z, to[7] = y.w;
      });
    } else {
      const bool brain = pairs.type == DType::kBFloat16;
      load_as(pairs, sizes, places, turned, thread, [&](std::int64_t at, int, float* to) {
        const uint4 raw =
            *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(pairs.data) + at);
        const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 two = brain ? sm80::unpack_bf16(words[i]) : sm80::unpack_f16(words[i]);
          to[2 * i] = two.x, to[2 * i + 1] = two.y;
        }
      });
    }
  }

  // To mean 0 and variance 1 over the channels.
  __device__ __forceinline__ void normalise(int channels, float eps, int thread) {
    if (channels == Shape::kInnerMost) {
      normalise_as<true>(channels, eps, thread);
    } else {
      normalise_as<false>(channels, eps, thread);
    }
  }

  template <bool whole>
  __device__ __forceinline__ void normalise_as(int channels, float eps, int thread) {
    const float inverse = 1.0f / static_cast<float>(channels);
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      float sum = 0.0f;
#pragma unroll
      for (int v = 0; v < Shape::kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += number[pass][v][i];
      }
      const float mean = over_row(sum, [](float x, float y) { return x + y; }) * inverse;
      float squares = 0.0f;
#pragma unroll
      for (int v = 0; v < Shape::kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& x = number[pass][v][i];
          x = whole || channel(v, thread) + i < channels ? x - mean : 0.0f;
          squares += x * x;
        }
      }
      const float variance = over_row(squares, [](float x, float y) { return x + y; }) * inverse;
      // With eps = 0 a row of equal numbers is NaN, as in PyTorch; padding is not.
      const float scale = exists >> pass & 1 ? rsqrtf(variance + eps) : 0.0f;
#pragma unroll
      for (int v = 0; v < Shape::kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < 8; ++i) number[pass][v][i] *= scale;
      }
    }
  }

  // To the operand, each times a power of two. Rows that do not exist become zeros.
  template <Mode mode, class Scale>
  __device__ __forceinline__ void store(unsigned char* operand, int channels, int thread,
                                        Scale scale) const {
    const int padded = rounded_up(channels, kInner);
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      const int r = row(pass, thread);
      const float times = scale(pass, r);
#pragma unroll
      for (int v = 0; v < Shape::kVectors; ++v) {
        const int c = channel(v, thread);
        if (c < padded) store_eight<mode>(operand, Shape::kRows, r, c, number[pass][v], times);
      }
    }
  }

  // The largest magnitude of the row of a pass.
  __device__ __forceinline__ float largest(int pass) const {
    float largest = 0.0f;
#pragma unroll
    for (int v = 0; v < Shape::kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(number[pass][v][i]));
    }
    return over_row(largest, [](float x, float y) { return fmaxf(x, y); });
  }

  // Eight numbers of a row of an operand, each times `times`; `rows` is how many it has.
  template <Mode mode>
  static __device__ __forceinline__ void store_eight(unsigned char* operand, int rows, int row,
                                                     int inner, const float (&x)[8], float times) {
    unsigned char* to = operand + inner / kInner * parts(mode) * rows * kLineBytes +
                        sm80::split_offset(row, inner / 8 % 8);
    std::uint32_t hi[4], lo[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      if (mode == Mode::kSplit) {
        sm80::split_pair(a * times, b * times, &hi[i], &lo[i]);
      } else if (mode == Mode::kTf32) {
        hi[i] = pack_16<mode>(a * times, b * times);
      } else {
        hi[i] = pack_16<mode>(a, b);
      }
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(hi[0], hi[1], hi[2], hi[3]);
    if (mode == Mode::kSplit) {
      *reinterpret_cast<uint4*>(to + rows * kLineBytes) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
  }

 private:
  // Without branches around the loads, so that all of a thread are under way together: what does
  // not exist reads the tensor's first numbers.
  template <class Load>
  __device__ __forceinline__ void load_as(const Pairs& pairs, const Sizes& sizes,
                                          const Places& places, bool turned, int thread,
                                          Load load) {
    RowWalk walk(pairs, sizes, places(row(0, thread)), turned);
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      if (pass > 0) walk.advance(Shape::kRowsAtOnce);
      exists |= unsigned{walk.exists()} << pass;
      const std::int64_t at = walk.offset();
#pragma unroll
      for (int v = 0; v < Shape::kVectors; ++v) {
        const int c = channel(v, thread);
        load(c < sizes.channels ? at + c : 0, sizes.channels - c, number[pass][v]);
      }
    }
    constexpr unsigned kAll = (1u << Shape::kPasses) - 1;
    const bool whole = exists == kAll && sizes.channels == Shape::kInnerMost;
    if (__all_sync(0xffffffff, whole)) return;
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
#pragma unroll
      for (int v = 0; v < Shape::kVectors; ++v) {
        const bool here = (exists >> pass & 1) && channel(v, thread) < sizes.channels;
#pragma unroll
        for (int i = 0; i < 8; ++i) number[pass][v][i] = here ? number[pass][v][i] : 0.0f;
      }
    }
  }

  template <class Combine>
  static __device__ __forceinline__ float over_row(float x, Combine combine) {
#pragma unroll
    for (int offset = Shape::kLanes / 2; offset > 0; offset /= 2) {
      x = combine(x, __shfl_xor_sync(0xffffffff, x, offset));
    }
    return x;
  }
};

template <int kBytes, int kStages, class Source>
class Ring;

// A warp's results: row tiles of 16 by column tiles of 8. Lane l holds, of each, the results
// (l / 4, 2 * (l % 4)), the next column, and both 8 rows on.
template <Mode mode, int kRows, int kColumns, int kWarpsDown>
struct WarpProduct {
  static constexpr int kGroupThreads = kThreads;  // that share rows
  static constexpr int kWarpsAcross = kWarps / kWarpsDown;
  static constexpr int kRowTiles = kRows / kWarpsDown / 16;
  static constexpr int kColumnTiles = kColumns / kWarpsAcross / 8;
  static_assert(kColumnTiles % 2 == 0);

  float total[kRowTiles][kColumnTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) total[i][j][e] = 0.0f;
      }
    }
  }

  // The warp's first row and column.
  static __device__ __forceinline__ int row(int thread) {
    return thread / 32 / kWarpsAcross * (kRowTiles * 16);
  }
  static __device__ __forceinline__ int column(int thread) {
    return thread / 32 % kWarpsAcross * (kColumnTiles * 8);
  }
  // Whoever wrote operands calls this before the barrier behind which they are multiplied.
  static __device__ __forceinline__ void publish() {}
  // A meeting of the threads that share rows.
  static __device__ __forceinline__ void meet(int) { __syncthreads(); }

  template <int kBytes, int kStages, class Source>
  using Weights = Ring<kBytes, kStages, Source>;

  // A thread's addresses into the lines of an operand's part.
  static __device__ __forceinline__ sm80::SharedAddress left(const unsigned char* lines,
                                                             int thread) {
    const int lane = thread % 32;
    return sm80::shared_address(lines + sm80::split_offset(row(thread) + lane % 16, lane / 16));
  }
  static __device__ __forceinline__ sm80::SharedAddress right(const unsigned char* lines,
                                                              int thread) {
    const int lane = thread % 32;
    return sm80::shared_address(
        lines + sm80::split_offset(column(thread) + lane / 16 * 8 + lane % 8, lane / 8 % 2));
  }

  // Adds a product over 64 of the inner axis. The parts lo lie so many bytes behind the parts hi.
  __device__ __forceinline__ void multiply(sm80::SharedAddress a, int a_lo, sm80::SharedAddress b,
                                           int b_lo) {
    if constexpr (mode == Mode::kSplit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply_split(a ^ (half << 6), a_lo, b ^ (half << 6), b_lo);
        __syncwarp();  // else the compiler holds both halves at once, and spills
      }
    } else {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        std::uint32_t right[kColumnTiles][2];
        load_right(right, b ^ (s << 5));
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          std::uint32_t left[4];
          sm80::ldmatrix_x4(left, (a ^ (s << 5)) + i * 16 * kLineBytes);
#pragma unroll
          for (int j = 0; j < kColumnTiles; ++j) {
            if (mode == Mode::kBFloat16) {
              sm80::mma_bf16(total[i][j], left, right[j]);
            } else {
              sm80::mma_f16(total[i][j], left, right[j]);
            }
          }
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ void load_right(std::uint32_t (&right)[kColumnTiles][2],
                                                    sm80::SharedAddress b) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += 2) {
      std::uint32_t four[4];
      sm80::ldmatrix_x4(four, b + j * 8 * kLineBytes);
      right[j][0] = four[0], right[j][1] = four[1];
      right[j + 1][0] = four[2], right[j + 1][1] = four[3];
    }
  }

  // Over 32 of the inner axis, the small terms first, into sums of their own.
  __device__ __forceinline__ void multiply_split(sm80::SharedAddress a, int a_lo,
                                                 sm80::SharedAddress b, int b_lo) {
    std::uint32_t b_hi[2][kColumnTiles][2], b_low[2][kColumnTiles][2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      load_right(b_hi[s], b ^ (s << 5));
      load_right(b_low[s], (b ^ (s << 5)) + b_lo);
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float sum[kColumnTiles][4];
      std::uint32_t a_hi[2][4], a_low[2][4];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        sm80::ldmatrix_x4(a_low[s], (a ^ (s << 5)) + a_lo + i * 16 * kLineBytes);
        sm80::ldmatrix_x4(a_hi[s], (a ^ (s << 5)) + i * 16 * kLineBytes);
      }
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) sm80::mma_f16_zero(sum[j], a_low[0], b_hi[0][j]);
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) sm80::mma_f16(sum[j], a_hi[0], b_low[0][j]);
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) sm80::mma_f16(sum[j], a_low[1], b_hi[1][j]);
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) sm80::mma_f16(sum[j], a_hi[1], b_low[1][j]);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) sm80::mma_f16(sum[j], a_hi[s], b_hi[s][j]);
      }
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) total[i][j][e] += sum[j][e];
      }
    }
  }
};

// Packed operands that stream through a ring in shared memory. `Source` gives the pieces of kBytes
// one after the other: take() returns the next one, null behind the last.
template <int kBytes, int kStages, class Source>
class Ring {
 public:
  static constexpr int kSize = kBytes * kStages;
  static_assert(kBytes % (16 * kThreads) == 0);
  struct Storage {
    unsigned char pieces[kSize];
  };

  __device__ __forceinline__ Ring(Storage& storage, const Source& source, int thread, bool)
      : shared_(storage.pieces), source_(source), thread_(thread) {}

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) copy();
  }

  // Waits for the next piece, and for all threads: the one before may be overwritten by a later
  // one, which is asked for.
  __device__ __forceinline__ const unsigned char* next() {
    sm80::cp_async_wait<kStages - 2>();
    __syncthreads();
    copy();
    const unsigned char* piece = shared_ + out_;
    out_ = following(out_);
    return piece;
  }

  // The piece has been read; that all have read it, next() sees.
  __device__ __forceinline__ void release() {}

 private:
  static __device__ __forceinline__ int following(int offset) {
    return offset + kBytes == kSize ? 0 : offset + kBytes;
  }

  __device__ __forceinline__ void copy() {
    const unsigned char* from = source_.take();
    if (from) {
#pragma unroll
      for (int i = 0; i < kBytes / (16 * kThreads); ++i) {
        const int at = (i * kThreads + thread_) * 16;
        sm80::cp_async_16(shared_ + in_ + at, from + at);
      }
    }
    in_ = following(in_);
    sm80::cp_async_commit();
  }

  unsigned char* shared_;
  Source source_;
  int thread_;
  int in_ = 0;   // where the next piece goes
  int out_ = 0;  // where the next one is taken
};

}  // namespace fused_ops::triangular_multiplicative_update
