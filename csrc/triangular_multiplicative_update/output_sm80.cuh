// SPDX-License-Identifier: Apache-2.0
// LayerNorm of o, output projection, output gate; or, backward, from the gradient of the result to
// those of the projection's and the gate's results.
//
// A block turns its pairs of the channel-first o into normalised rows, puts the rows of the pair
// representation beside them, and multiplies both with 64 output channels after the other.
#pragma once

#include "triangular_multiplicative_update/large.h"
#include "triangular_multiplicative_update/results.cuh"
#include "triangular_multiplicative_update/tile.cuh"

namespace fused_ops::triangular_multiplicative_update {

struct OutputParams {
  Sizes sizes;
  float eps = 0.0f;
  bool gate_normalized = false;
  bool every_thread_arrives = false;
  Pairs pair;
  unsigned char* workspace = nullptr;
  Packed packed;
  const void* o = nullptr;
  std::int64_t first_pair = 0;
  std::int64_t count = 0;
  void* out = nullptr;
  // Backward.
  Pairs out_grad;
  void* out_proj_grad = nullptr;
  void* gate_grad = nullptr;
  void* normalised = nullptr;
  void* gate_input = nullptr;
  float* sums = nullptr;
};

// For each 64 output channels the packed lines of the gate, then those of the projection.
template <int kBytes>
class OutputSource {
 public:
  __device__ __forceinline__ explicit OutputSource(const OutputParams& p)
      : gate_(p.workspace + p.packed.gate),
        out_(p.workspace + p.packed.out),
        gates_(p.packed.channel_blocks),
        outs_(p.packed.hidden_blocks),
        pieces_(p.packed.channel_blocks) {}

  __device__ __forceinline__ const unsigned char* take() {
    if (at_ == gates_ + outs_) {
      at_ = 0;
      --pieces_;
    }
    if (pieces_ <= 0) return nullptr;
    const bool is_gate = at_ < gates_;
    ++at_;
    const unsigned char* piece = is_gate ? gate_ : out_;
    gate_ += is_gate ? kBytes : 0;
    out_ += is_gate ? 0 : kBytes;
    return piece;
  }

 private:
  const unsigned char* gate_;
  const unsigned char* out_;
  int gates_, outs_;  // of a piece
  int pieces_;
  int at_ = 0;
};

// A block's pairs of o, in registers: a thread has two pairs of 32 channels, eight at a time.
template <Mode mode, class Shape>
struct ColumnNumbers {
  static constexpr int kTwos = Shape::kRows / 2;
  static constexpr int kGroups = kThreads / kTwos;  // of threads with the same pairs
  static constexpr int kEights = Shape::kInnerMost / 8 / kGroups;

  float number[kEights][8][2];

  static __device__ __forceinline__ int row(int thread) { return thread % kTwos * 2; }
  static __device__ __forceinline__ int group(int thread) { return thread / kTwos; }
  static __device__ __forceinline__ int channel(int eight, int thread) {
    return (eight * kGroups + group(thread)) * 8;
  }

  // `existing`: of the thread's two pairs, the first so many. Loads have no branches around them,
  // so that all of a thread are under way together: what does not exist reads the first numbers.
  __device__ __forceinline__ void load(const void* plane, std::int64_t pairs, std::int64_t first,
                                       int hidden, int existing, int thread) {
    using Number = std::conditional_t<mode == Mode::kBFloat16, std::uint16_t, float>;
    const auto* from = static_cast<const Number*>(plane) + (existing > 0 ? first + row(thread) : 0);
    if (existing != 1) {
      load_as(from, pairs, hidden, thread, [](const Number* at) {
        if constexpr (mode == Mode::kBFloat16) {
          return sm80::unpack_bf16(*reinterpret_cast<const std::uint32_t*>(at));
        } else {
          return *reinterpret_cast<const float2*>(at);
        }
      });
    } else {
      load_as(from, pairs, hidden, thread, [](const Number* at) {
        if constexpr (mode == Mode::kBFloat16) {
          return make_float2(sm80::unpack_bf16(*at).x, 0.0f);
        } else {
          return make_float2(*at, 0.0f);
        }
      });
    }
    if (existing == 2 && hidden == Shape::kInnerMost) return;
#pragma unroll
    for (int m = 0; m < kEights; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool here = channel(m, thread) + i < hidden;
        number[m][i][0] = here && existing > 0 ? number[m][i][0] : 0.0f;
        number[m][i][1] = here && existing > 1 ? number[m][i][1] : 0.0f;
      }
    }
  }

  template <class Number, class Load>
  __device__ __forceinline__ void load_as(const Number* from, std::int64_t pairs, int hidden,
                                          int thread, Load load) {
    const bool whole = hidden == Shape::kInnerMost;
#pragma unroll
    for (int m = 0; m < kEights; ++m) {
      const Number* at = from + channel(m, thread) * pairs;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 two = load(whole || channel(m, thread) + i < hidden ? at : from);
        number[m][i][0] = two.x;
        number[m][i][1] = two.y;
        at += pairs;
      }
    }
  }

  // Times the way back from scaled planes, channel by channel.
  __device__ __forceinline__ void undo(const float* a, const float* b, int hidden, int thread) {
#pragma unroll
    for (int m = 0; m < kEights; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int c = channel(m, thread) + i;
        if (c >= hidden) continue;
#pragma unroll
        for (int x = 0; x < 2; ++x) number[m][i][x] = number[m][i][x] * a[c] * b[c];
      }
    }
  }

  // Sums of term(number, which pair) over the thread's channels.
  template <class Term>
  __device__ __forceinline__ float2 sum_over(int hidden, int thread, Term term) const {
    return hidden == Shape::kInnerMost ? sum_as<true>(hidden, thread, term)
                                       : sum_as<false>(hidden, thread, term);
  }

 private:
  template <bool whole, class Term>
  __device__ __forceinline__ float2 sum_as(int hidden, int thread, Term term) const {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int m = 0; m < kEights; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (!whole && channel(m, thread) + i >= hidden) continue;
        sum.x += term(number[m][i][0], 0);
        sum.y += term(number[m][i][1], 1);
      }
    }
    return sum;
  }
};

// `Multiply`: WarpProduct, or what serves in its place on a newer architecture. `HiddenShape`: of
// as many rows of o.
template <Mode mode, class Shape, bool kBackward,
          class Multiply =
              WarpProduct<mode, Shape::kRows, kPieceChannels, Shape::kRows >= 64 ? 4 : 2>,
          class HiddenShape = Shape>
struct Output {
  static constexpr int kRows = Shape::kRows;
  static constexpr int kParts = parts(mode);
  static constexpr int kStages = 3;
  static constexpr int kRowTiles = Multiply::kRowTiles;
  static constexpr int kColumnTiles = Multiply::kColumnTiles;
  static constexpr int kTilesAtOnce = kColumnTiles < 4 ? kColumnTiles : 4;
  static constexpr int kRowGroups = kRows / (kRowTiles * 16);  // of warps with the same columns
  static constexpr int kPieceBytes = kPieceChannels * kLineBytes * kParts;
  using Weights =
      typename Multiply::template Weights<kPieceBytes, kStages, OutputSource<kPieceBytes>>;
  using Columns = ColumnNumbers<mode, HiddenShape>;
  static_assert(HiddenShape::kRows == kRows);

  // Whether the linears' vectors are kept in shared memory.
  static constexpr bool kKeeps = Shape::kInnerMost <= 128;

  struct alignas(1024) Shared {
    unsigned char pair[kParts * kRows * Shape::kInnerMost * 2];
    unsigned char o[kParts * kRows * HiddenShape::kInnerMost * 2];
    alignas(1024) typename Weights::Storage weights;
    float2 partial[2][Columns::kGroups][Columns::kTwos];
    float undo[kRows];  // of the rows of the raw pair
    // Of the gate, times kGateScale; then of the projection.
    alignas(16) float line_undo[2][kKeeps && is_scaled(mode) ? Shape::kInnerMost : 1];
    alignas(16) float line_bias[2][kKeeps ? Shape::kInnerMost : 1];
    float sums[kBackward ? kRowGroups : 1][kBackward ? 2 * kPieceChannels : 1];
  };

  const OutputParams& p;
  Shared& shared;
  int thread;
  std::int64_t first;  // pair
  // Of the thread's rows, where they are in the result, or, backward, in its gradient; -1: nowhere.
  std::int64_t row_at[kRowTiles][2] = {};

  static __device__ __forceinline__ void run(const OutputParams& params) {
    const std::int64_t first = params.first_pair + static_cast<std::int64_t>(blockIdx.x) * kRows;
    Output{params, shared_memory<Shared>(), thread_index(), first}.all();
  }

  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ const float* floats(std::int64_t offset) const {
    return reinterpret_cast<const float*>(p.workspace + offset);
  }

  __device__ __forceinline__ void all() {
    Weights weights(shared.weights, OutputSource<kPieceBytes>(p), thread, p.every_thread_arrives);
    weights.start();
    keep_vectors();
    const Places places(p.sizes, first);
    prepare_o(places);
    prepare_pair(places);

    const auto pair = Multiply::left(shared.pair, thread);
    const auto o = Multiply::left(shared.o, thread);
    constexpr int kBlock = kParts * kRows * kLineBytes;
    find_rows(places);
    Multiply::publish();
    __syncthreads();
    if (kBackward) store_normalised();
    Multiply gate, projected;
    for (int piece = 0; piece < p.packed.channel_blocks; ++piece) {
      gate.clear();
      for (int block = 0; block < p.packed.channel_blocks; ++block) {
        const unsigned char* lines = weights.next();
        gate.multiply(pair + block * kBlock, kRows * kLineBytes, Multiply::right(lines, thread),
                      kPieceChannels * kLineBytes);
        weights.release();
      }
      projected.clear();
      for (int block = 0; block < p.packed.hidden_blocks; ++block) {
        const unsigned char* lines = weights.next();
        projected.multiply(o + block * kBlock, kRows * kLineBytes, Multiply::right(lines, thread),
                           kPieceChannels * kLineBytes);
        weights.release();
      }
      finish(gate, projected, piece * kPieceChannels);
    }
    sm80::cp_async_wait<0>();
  }

  __device__ __forceinline__ void find_rows(const Places& places) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Place place = places(Multiply::row(thread) + i * 16 + half * 8 + lane() / 4);
        const std::int64_t at = kBackward
                                    ? offset_of(p.out_grad, p.sizes, place, false)
                                    : (place.line * p.sizes.n + place.column) * p.sizes.channels;
        row_at[i][half] = places.exists(place) ? at : -1;
      }
    }
  }

  // Sums over all threads that hold the same two pairs.
  __device__ __forceinline__ float2 over_groups(float2 mine, int buffer) const {
    const int two = Columns::row(thread) / 2;
    shared.partial[buffer][Columns::group(thread)][two] = mine;
    __syncthreads();
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < Columns::kGroups; ++i) {
      sum.x += shared.partial[buffer][i][two].x;
      sum.y += shared.partial[buffer][i][two].y;
    }
    return sum;
  }

  __device__ __forceinline__ void prepare_o(const Places& places) {
    const int hidden = p.sizes.hidden;
    Columns columns;
    const Place place = places(Columns::row(thread));  // lines hold an even number of places
    const auto n = static_cast<int>(p.sizes.n);
    const int existing = !places.exists(place) ? 0 : place.column + 2 <= n ? 2 : 1;
    columns.load(p.o, p.sizes.pairs(), first, hidden, existing, thread);
    if (mode == Mode::kTf32) {
      const float* undo = floats(p.packed.plane_undo);
      columns.undo(undo, undo + p.packed.hidden_blocks * kPieceChannels, hidden, thread);
    }
    const float inverse = 1.0f / static_cast<float>(hidden);
    float2 mean = over_groups(columns.sum_over(hidden, thread, [](float x, int) { return x; }), 0);
    mean.x *= inverse, mean.y *= inverse;
    const float2 squares = over_groups(columns.sum_over(hidden, thread,
                                                        [&](float x, int at) {
                                                          const float d =
                                                              x - (at == 0 ? mean.x : mean.y);
                                                          return d * d;
                                                        }),
                                       1);
    const float scale[2] = {existing > 0 ? rsqrtf(squares.x * inverse + p.eps) : 0.0f,
                            existing > 1 ? rsqrtf(squares.y * inverse + p.eps) : 0.0f};
    const int padded = p.packed.hidden_blocks * kInner;
    const bool whole = hidden == HiddenShape::kInnerMost;
    // Half of the lanes store their second row first: eight that store together so have rows that
    // differ modulo 8, and with that different banks.
    const int swap = thread / 4 % 2;
#pragma unroll
    for (int m = 0; m < Columns::kEights; ++m) {
      const int c = Columns::channel(m, thread);
      if (c >= padded) continue;
      float eight[2][8];
#pragma unroll
      for (int x = 0; x < 2; ++x) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float d = (columns.number[m][i][x] - (x == 0 ? mean.x : mean.y)) * scale[x];
          eight[x][i] = whole || c + i < hidden ? d : 0.0f;
        }
      }
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        float chosen[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) chosen[i] = swap ? eight[1 - x][i] : eight[x][i];
        RowNumbers<Shape>::template store_eight<mode>(shared.o, kRows,
                                                      Columns::row(thread) + (x ^ swap), c, chosen,
                                                      two_to(kNormalisedExponent));
      }
    }
  }

  __device__ __forceinline__ void prepare_pair(const Places& places) {
    RowNumbers<Shape> rows;
    rows.load(p.pair, p.sizes, places, false, thread);
    if (p.gate_normalized) {
      rows.normalise(p.sizes.channels, p.eps, thread);
      if (is_scaled(mode) && thread < kRows) shared.undo[thread] = 1.0f;
      rows.template store<mode>(shared.pair, p.sizes.channels, thread,
                                [](int, int) { return two_to(kNormalisedExponent); });
    } else {
      rows.template store<mode>(shared.pair, p.sizes.channels, thread, [&](int pass, int row) {
        if (!is_scaled(mode)) return 1.0f;
        const int exponent = exponent_to(rows.largest(pass), 9);
        if (lane() % Shape::kLanes == 0) shared.undo[row] = two_to(-exponent);
        return two_to(exponent);
      });
    }
  }

  __device__ __forceinline__ void store_normalised() {
    const std::int64_t row = first - p.first_pair;
    const auto undo = [](int) { return two_to(-kNormalisedExponent); };
    store_operand<mode, HiddenShape>(shared.o, p.sizes.hidden, row, p.count, p.normalised, thread,
                                     undo);
    if (!p.gate_input) return;
    store_operand<mode, Shape>(shared.pair, p.sizes.channels, row, p.count, p.gate_input, thread,
                               [&](int r) { return p.gate_normalized ? undo(r) : shared.undo[r]; });
  }

  // Those of the gate times kGateScale.
  struct Vectors {
    float2 gate_undo, gate_bias, undo, bias;
  };

  __device__ __forceinline__ void keep_vectors() {
    if (!kKeeps) return;
    for (int i = thread; i < p.packed.channel_blocks * kPieceChannels; i += kThreads) {
      shared.line_bias[0][i] = floats(p.packed.gate_bias)[i] * kGateScale<mode>;
      shared.line_bias[1][i] = floats(p.packed.out_bias)[i];
      if (!is_scaled(mode)) continue;
      shared.line_undo[0][i] = floats(p.packed.gate_undo)[i] * kGateScale<mode>;
      shared.line_undo[1][i] = floats(p.packed.out_undo)[i];
    }
  }

  __device__ __forceinline__ Vectors vectors_of(int channel) const {
    const auto two = [&](const float* kept, std::int64_t offset, float times) {
      if (kKeeps) return *reinterpret_cast<const float2*>(kept + channel);
      const float2 stored = *reinterpret_cast<const float2*>(floats(offset) + channel);
      return make_float2(stored.x * times, stored.y * times);
    };
    Vectors v;
    v.gate_bias = two(shared.line_bias[0], p.packed.gate_bias, kGateScale<mode>);
    v.bias = two(shared.line_bias[1], p.packed.out_bias, 1.0f);
    if (is_scaled(mode)) {
      v.gate_undo = two(shared.line_undo[0], p.packed.gate_undo, kGateScale<mode>);
      v.undo = two(shared.line_undo[1], p.packed.out_undo, 1.0f);
    } else {
      v.gate_undo = make_float2(kGateScale<mode>, kGateScale<mode>);
      v.undo = make_float2(1.0f, 1.0f);
    }
    return v;
  }

  __device__ __forceinline__ void finish(const Multiply& gate, const Multiply& projected,
                                         int begin) {
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; tile += kTilesAtOnce) {
      finish(gate, projected, begin, tile);
    }
    if constexpr (kBackward) {
      __syncthreads();
      add_columns(begin);
      __syncthreads();  // the sums have been read
    }
  }

  // Of kTilesAtOnce column tiles.
  __device__ __forceinline__ void finish(const Multiply& gate, const Multiply& projected, int begin,
                                         int tile) {
    constexpr int kTiles = kTilesAtOnce;
    const int t = lane() % 4, g = lane() / 4;
    const int column = Multiply::column(thread) + tile * 8;  // the first in the piece
    Vectors v[kTiles];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) v[j] = vectors_of(begin + column + j * 8 + 2 * t);
    float sums[2][kTiles][2] = {};
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float2 grad[2][kTiles];
      if constexpr (kBackward) load_grads(grad, i, begin + column + 2 * t);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Multiply::row(thread) + i * 16 + half * 8 + g;
        const std::int64_t at = row_at[i][half];
        const bool exists = at >= 0;
        const float row_undo = is_scaled(mode) ? shared.undo[row] : 1.0f;
        float s[kTiles][2], r[kTiles][2];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            const int e = half * 2 + x;
            const auto pick = [x](const float2& two) { return x == 0 ? two.x : two.y; };
            const float a = gate.total[i][tile + j][e] * row_undo;
            const float b = projected.total[i][tile + j][e];
            s[j][x] = gate_sigmoid<mode>(fmaf(a, pick(v[j].gate_undo), pick(v[j].gate_bias)));
            r[j][x] = fmaf(b, pick(v[j].undo), pick(v[j].bias));
          }
        }
        if constexpr (kBackward) {
          turn_back(s, r, sums, grad[half], row, exists, begin + column);
        } else {
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int x = 0; x < 2; ++x) r[j][x] *= s[j][x];
          }
          store_row(r, p.out, at, exists, begin + column);
        }
      }
    }
    if constexpr (kBackward) {
      // Over the warp's rows, in a fixed order.
#pragma unroll
      for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            const float sum = over_rows(sums[kind][j][x]);
            const int at = kind * kPieceChannels + column + j * 8 + 2 * t + x;
            const int group = Multiply::row(thread) / (kRowTiles * 16);
            if (lane() < 4) shared.sums[group][at] = sum;
          }
        }
      }
    }
  }

  // A row's results of the warp's columns, the row beginning at element `at`.
  __device__ __forceinline__ void store_row(const float (&number)[kTilesAtOnce][2], void* matrix,
                                            std::int64_t at, bool exists, int begin) const {
    const int channels = p.sizes.channels;
    const bool aligned = channels % 8 == 0;
    if constexpr (kTilesAtOnce == 4) {
      const int channel = begin + lane() % 4 * 8;
      store_quad<mode>(number, matrix, at + channel, exists ? channels - channel : 0, aligned,
                       lane());
    } else {
      static_assert(kTilesAtOnce == 2);
      const float four[4][2] = {{number[0][0], number[0][1]}, {number[1][0], number[1][1]}, {}, {}};
      const int channel = begin + lane() % 4 * 8;
      const bool here = exists && lane() % 4 < 2;
      store_quad<mode>(four, matrix, at + channel, here ? channels - channel : 0, aligned, lane());
    }
  }

  // Backward -------------------------------------------------------------------------------------

  __device__ __forceinline__ void turn_back(const float (&s)[kTilesAtOnce][2],
                                            const float (&r)[kTilesAtOnce][2],
                                            float (&sums)[2][kTilesAtOnce][2],
                                            const float2 (&grad)[kTilesAtOnce], int row,
                                            bool exists, int begin) const {
    float projected[kTilesAtOnce][2], gate[kTilesAtOnce][2];
#pragma unroll
    for (int j = 0; j < kTilesAtOnce; ++j) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float d = (x == 0 ? grad[j].x : grad[j].y) * s[j][x];
        projected[j][x] = exists ? d : 0.0f;
        gate[j][x] = exists ? d * r[j][x] * (1.0f - s[j][x]) : 0.0f;
        sums[0][j][x] += projected[j][x];
        sums[1][j][x] += gate[j][x];
      }
    }
    const std::int64_t line = first - p.first_pair + row;
    store_row(projected, p.out_proj_grad, line * p.sizes.channels, line < p.count, begin);
    store_row(gate, p.gate_grad, line * p.sizes.channels, line < p.count, begin);
  }

  // The result's gradients of a row tile's two rows, two neighbouring channels of each column tile.
  // All loads of a thread are under way together: what does not exist reads the first numbers.
  __device__ __forceinline__ void load_grads(float2 (&grad)[2][kTilesAtOnce], int i,
                                             int channel) const {
    const Pairs& from = p.out_grad;
    const std::int64_t strides = from.batch_stride | from.i_stride | from.j_stride;
    const bool wide = from.type == DType::kFloat32;
    const bool aligned = reinterpret_cast<std::uintptr_t>(from.data) % (wide ? 8 : 4) == 0 &&
                         strides % 2 == 0 && p.sizes.channels % 2 == 0;
    const auto load = [&](auto two_at) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kTilesAtOnce; ++j) {
          const int count = p.sizes.channels - channel - j * 8;
          const bool here = row_at[i][half] >= 0 && count > 0;
          grad[half][j] = two_at(here ? row_at[i][half] + channel + j * 8 : 0, count);
        }
      }
    };
    if (!aligned) {
      load([&](std::int64_t at, int count) {
        return make_float2(load_number(from.data, from.type, at),
                           count > 1 ? load_number(from.data, from.type, at + 1) : 0.0f);
      });
    } else if (wide) {
      load([&](std::int64_t at, int) {
        return *reinterpret_cast<const float2*>(static_cast<const float*>(from.data) + at);
      });
    } else {
      const bool brain = from.type == DType::kBFloat16;
      load([&](std::int64_t at, int) {
        const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(
            static_cast<const std::uint16_t*>(from.data) + at);
        return brain ? sm80::unpack_bf16(word) : sm80::unpack_f16(word);
      });
    }
  }

  // The sums over the block's rows.
  __device__ __forceinline__ void add_columns(int begin) {
    const int channel = begin + thread % kPieceChannels;
    if (thread >= 2 * kPieceChannels || channel >= p.sizes.channels) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) sum += shared.sums[i][thread];
    p.sums[static_cast<std::int64_t>(blockIdx.x) * (2 * p.sizes.channels) +
           thread / kPieceChannels * p.sizes.channels + channel] = sum;
  }
};

// Blocks a multiprocessor that the registers are limited for.
constexpr int output_blocks(Mode mode, int rows, bool backward) {
  const bool spills = is_wide(mode) && (rows == 64 || backward);
  return mode == Mode::kSplit || spills ? 1 : 2;
}

// The tall tile.
template <Mode mode>
using TallOutput = Output<mode, Shape<kTallTile.rows, kTallTile.channels>, false,
                          WarpProduct<mode, kTallTile.rows, kPieceChannels, 4>,
                          Shape<kTallTile.rows, kTallHidden>>;

template <Mode mode>
__global__ void __launch_bounds__(kThreads, 2)
    tall_output_kernel(const __grid_constant__ OutputParams params) {
  TallOutput<mode>::run(params);
}

template <Mode mode, int kRows, int kInnerMost, bool kBackward>
__global__ void __launch_bounds__(kThreads, output_blocks(mode, kRows, kBackward))
    output_kernel(const __grid_constant__ OutputParams params) {
  Output<mode, Shape<kRows, kInnerMost>, kBackward>::run(params);
}

}  // namespace fused_ops::triangular_multiplicative_update
