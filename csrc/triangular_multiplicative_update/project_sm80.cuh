// SPDX-License-Identifier: Apache-2.0
// LayerNorm, the four projections of the input, gates, mask; or, backward, from the gradients of a
// and b to those of the projections' results.
//
// A block normalises its rows once, into shared memory, and multiplies them with 64 channels after
// the other of both planes: 128 packed lines, gates beside projections, so that a thread holds both
// of a channel and a warp 16 channels. Planes are channel-first: results are turned in shared
// memory and stored 16 bytes, eight pairs of a channel, at a time.
#pragma once

#include "triangular_multiplicative_update/large.h"
#include "triangular_multiplicative_update/plane_grad.cuh"
#include "triangular_multiplicative_update/results.cuh"
#include "triangular_multiplicative_update/tile.cuh"

namespace fused_ops::triangular_multiplicative_update {

struct ProjectParams {
  Sizes sizes;
  bool turned = false;  // incoming: line and column of a place are (k, line) of the pair
  float eps = 0.0f;
  Pairs pair;
  Mask mask;
  bool needs_largest = false;
  bool every_thread_arrives = false;
  unsigned char* workspace = nullptr;
  Packed packed;
  int first_block = 0;
  int blocks = 0;                   // of 64 channels of each plane
  std::uint16_t* plane[2][2] = {};  // [a, b][part]
  // Backward.
  std::int64_t first_pair = 0;
  std::int64_t count = 0;
  const void* plane_grad[2] = {};
  const float* grad_undo = nullptr;
  void* grad = nullptr;
  void* normalised = nullptr;
  float* sums = nullptr;
};

// For masks that exceed what the planes have room for; all lanes of a warp call it.
__device__ __forceinline__ int mask_exponent(const float* largest, int lane) {
  static_assert(kMaskBlocks == 64);
  const float most = warp_max(fmaxf(largest[lane], largest[lane + 32]));
  // Small masks as well as large ones, but never so far that what undoes both planes underflows.
  if (most > kMaskRoom || (most > 0.0f && most < 1.0f)) return min(exponent_to(most, 7), 30);
  return 0;
}

// The packed lines of the channels of a, then of b.
template <int kBytes>
class ProjectSource {
 public:
  __device__ __forceinline__ explicit ProjectSource(const ProjectParams& p)
      : plane_((static_cast<std::int64_t>(p.packed.hidden_blocks) - p.blocks) *
               p.packed.channel_blocks * kBytes),
        pieces_(p.blocks * p.packed.channel_blocks),
        left_(2 * pieces_),
        at_(p.workspace + p.packed.project +
            static_cast<std::int64_t>(p.first_block) * p.packed.channel_blocks * kBytes) {}

  __device__ __forceinline__ const unsigned char* take() {
    if (left_ == 0) return nullptr;
    if (left_ == pieces_) at_ += plane_;
    --left_;
    const unsigned char* piece = at_;
    at_ += kBytes;
    return piece;
  }

 private:
  std::int64_t plane_;  // from the end of a's to the beginning of b's
  int pieces_;          // of a plane
  int left_;
  const unsigned char* at_;
};

// `Multiply`: WarpProduct, or what serves in its place on a newer architecture.
template <Mode mode, class Shape, bool kBackward,
          class Multiply = WarpProduct<mode, Shape::kRows, kProjectLines, 2>>
struct Project {
  static constexpr int kRows = Shape::kRows;
  static constexpr int kParts = parts(mode);
  // Two where three would leave room for one block a multiprocessor only.
  static constexpr int kStages =
      mode == Mode::kSplit || (kBackward && mode != Mode::kBFloat16) ? 2 : 3;
  static constexpr int kRowTiles = Multiply::kRowTiles;
  static constexpr int kQuads =
      Multiply::kColumnTiles / 4;  // of 16 channels: gate, projection, ...
  static constexpr int kRowGroups = kRows / (kRowTiles * 16);  // of warps with the same channels
  static constexpr int kPlaneBytes = mode == Mode::kBFloat16 ? 2 : 4;  // of a gradient's number
  static constexpr int kPieceBytes = kProjectLines * kLineBytes * kParts;
  using Weights =
      typename Multiply::template Weights<kPieceBytes, kStages, ProjectSource<kPieceBytes>>;

  // Channels of a piece along the rows; the distance between channels avoids bank conflicts.
  static constexpr int kForwardPitch = kRows + 8;
  static constexpr int kBackwardPitch = kRows + (kPlaneBytes == 2 ? 8 : 4);
  static constexpr int kTurnedBytes =
      kPieceChannels * (kBackward ? kBackwardPitch * kPlaneBytes : kForwardPitch * 2 * kParts);

  // Whether the linears' vectors are kept in shared memory, and how long they are.
  static constexpr bool kKeeps = Shape::kInnerMost <= 128;
  static constexpr int kVectors = 4 * Shape::kInnerMost;

  struct alignas(1024) Shared {
    unsigned char rows[kParts * kRows * Shape::kInnerMost * 2];
    alignas(1024) typename Weights::Storage weights;
    alignas(16) unsigned char turned[kTurnedBytes];
    float factor[kRows];      // of the mask; forward: inverse_factor() of it
    int existing[kRows / 8];  // of eight pairs, those that are not padding; -1: beyond the last
    // Times times().
    alignas(16) float undo[kKeeps && is_scaled(mode) ? kVectors : 1];
    alignas(16) float bias[kKeeps ? kVectors : 1];
    float sums[kBackward ? kRowGroups : 1][kBackward ? kProjectLines : 1];
  };

  const ProjectParams& p;
  Shared& shared;
  int thread;
  std::int64_t first;  // pair

  static __device__ __forceinline__ void run(const ProjectParams& params) {
    const std::int64_t first = params.first_pair + static_cast<std::int64_t>(blockIdx.x) * kRows;
    Project{params, shared_memory<Shared>(), thread_index(), first}.all();
  }

  __device__ __forceinline__ int lane() const { return thread % 32; }
  // Of a quad's channels in the piece, the first.
  __device__ __forceinline__ int quad_channel(int quad) const {
    return Multiply::column(thread) / 2 + quad * 16;
  }

  // Counts through both planes.
  __device__ __forceinline__ int block_of(int piece) const {
    return piece < p.blocks ? p.first_block + piece
                            : p.packed.hidden_blocks + p.first_block + piece - p.blocks;
  }

  __device__ __forceinline__ const float* floats(std::int64_t offset) const {
    return reinterpret_cast<const float*>(p.workspace + offset);
  }

  __device__ __forceinline__ void all() {
    Weights weights(shared.weights, ProjectSource<kPieceBytes>(p), thread, p.every_thread_arrives);
    RowNumbers<Shape> rows;
    const Places places(p.sizes, first);
    rows.load(p.pair, p.sizes, places, p.turned, thread);
    rows.normalise(p.sizes.channels, p.eps, thread);
    rows.template store<mode>(shared.rows, p.sizes.channels, thread,
                              [](int, int) { return two_to(kNormalisedExponent); });
    sm80::griddepcontrol_wait();  // up to here nothing packed was read, and nothing written
    weights.start();
    prepare_factors(places);
    Multiply::publish();
    __syncthreads();
    if (kBackward) store_normalised();

    const auto a = Multiply::left(shared.rows, thread);
    Multiply product;
    for (int piece = 0; piece < 2 * p.blocks; ++piece) {
      product.clear();
      if constexpr (kBackward) {
        if (piece > 0) __syncthreads();  // the piece before has been turned
        copy_plane_grad(piece);
      }
      for (int block = 0; block < p.packed.channel_blocks; ++block) {
        const unsigned char* lines = weights.next();
        product.multiply(a + block * (kParts * kRows * kLineBytes), kRows * kLineBytes,
                         Multiply::right(lines, thread), kProjectLines * kLineBytes);
        weights.release();
      }
      if constexpr (kBackward) {
        sm80::cp_async_wait<0>();
        __syncthreads();
        turn_back(product, piece);
      } else {
        if (piece > 0) Multiply::meet(thread);  // the piece before has been stored
        turn(product, piece);
        Multiply::meet(thread);
        store(piece);
      }
    }
    sm80::cp_async_wait<0>();
  }

  __device__ __forceinline__ void prepare_factors(const Places& places) {
    if (kKeeps) {
      const int lines = 2 * p.packed.hidden_blocks * kProjectLines;
      for (int i = thread; i < lines; i += kThreads) {
        const float scale = times(i, i / 8 % 2 == 0);
        shared.bias[i] = floats(p.packed.project_bias)[i] * scale;
        if (is_scaled(mode)) shared.undo[i] = floats(p.packed.project_undo)[i] * scale;
      }
    }
    float mask_scale = 1.0f;
    if (is_scaled(mode) && !kBackward) mask_scale = scale_mask();
    if (thread < kRows) {
      const Place place = places(thread);
      const float factor =
          mask_scale * (places.exists(place) ? mask_at(p.mask, p.sizes, place, p.turned) : 0.0f);
      shared.factor[thread] = kBackward ? factor : inverse_factor(factor);
    } else if (thread < kRows + kRows / 8) {
      const int eight = thread - kRows;
      const Place place = places(eight * 8);
      const auto n = static_cast<int>(p.sizes.n);
      const int existing = place.column + 8 <= n ? 8 : place.column < n ? n - place.column : 0;
      shared.existing[eight] = place.line < p.sizes.batch * p.sizes.n ? existing : -1;
    }
  }

  // For masks that exceed what the planes have room for; the first block tells the way back.
  __device__ __forceinline__ float scale_mask() {
    int exponent = 0;
    if (p.needs_largest) exponent = mask_exponent(floats(p.packed.mask_largest), lane());
    const int padded = p.packed.hidden_blocks * kPieceChannels;
    if (blockIdx.x == 0) {
      auto* undo = reinterpret_cast<float*>(p.workspace + p.packed.plane_undo);
      const float* scale = floats(p.packed.plane_scale);
      for (int i = thread; i < 2 * padded; i += kThreads) {
        undo[i] = two_to(-exponent) / scale[i];
      }
    }
    return two_to(exponent);
  }

  // What the result of a line's linear is formed times: gates as gate_sigmoid() takes them,
  // projections in the scale of their plane.
  __device__ __forceinline__ float times(int line, bool is_gate) const {
    if (is_gate) return kGateScale<mode>;
    if (!is_scaled(mode) || kBackward) return 1.0f;
    return floats(p.packed.plane_scale)[line / 16 * 8 + line % 8];
  }

  // What a thread needs to know of its channels of a piece: those of column tile j. Times times().
  struct Channels {
    float2 gate_undo[2], gate_bias[2], undo[2], bias[2];
  };

  __device__ __forceinline__ Channels channels_of(int piece, int quad) const {
    Channels c;
    const int line = block_of(piece) * kProjectLines + 2 * quad_channel(quad) + lane() % 4 * 2;
    const auto two = [&](const float* kept, std::int64_t offset, int at, bool is_gate) {
      if (kKeeps) return *reinterpret_cast<const float2*>(kept + at);
      const float2 stored = *reinterpret_cast<const float2*>(floats(offset) + at);
      return make_float2(stored.x * times(at, is_gate), stored.y * times(at + 1, is_gate));
    };
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int gate = line + j * 16, projection = gate + 8;
      c.gate_bias[j] = two(shared.bias, p.packed.project_bias, gate, true);
      c.bias[j] = two(shared.bias, p.packed.project_bias, projection, false);
      if (is_scaled(mode)) {
        c.gate_undo[j] = two(shared.undo, p.packed.project_undo, gate, true);
        c.undo[j] = two(shared.undo, p.packed.project_undo, projection, false);
      } else {
        c.gate_undo[j] = make_float2(kGateScale<mode>, kGateScale<mode>);
        c.undo[j] = make_float2(1.0f, 1.0f);
      }
    }
    return c;
  }

  static __device__ __forceinline__ float finish(float sum, const float2& undo, const float2& bias,
                                                 int e) {
    return e % 2 == 0 ? fmaf(sum, undo.x, bias.x) : fmaf(sum, undo.y, bias.y);
  }

  // Gates, mask; into shared memory, channel by channel.
  __device__ __forceinline__ void turn(const Multiply& product, int piece) {
    const int g = lane() / 4;
    float factor[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      factor[i][0] = shared.factor[Multiply::row(thread) + i * 16 + g];
      factor[i][1] = shared.factor[Multiply::row(thread) + i * 16 + 8 + g];
    }
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const Channels c = channels_of(piece, quad);
      const int first_channel = quad_channel(quad) + 2 * (lane() % 4);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = Multiply::row(thread) + i * 16 + half * 8 + g;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const auto& gates = product.total[i][4 * quad + 2 * j];
            const auto& projections = product.total[i][4 * quad + 2 * j + 1];
            float value[2];
#pragma unroll
            for (int x = 0; x < 2; ++x) {
              const int e = half * 2 + x;
              const float gate = finish(gates[e], c.gate_undo[j], c.gate_bias[j], e);
              const float projected = finish(projections[e], c.undo[j], c.bias[j], e);
              value[x] = projected * gate_sigmoid<mode>(gate, factor[i][half]);
            }
            const int channel = first_channel + j * 8 + g % 2;
            std::uint32_t hi, lo;
            if (mode == Mode::kSplit) {
              sm80::split_pair(value[0], value[1], &hi, &lo);
              put_turned(1, channel, row, lo);
            } else {
              hi = pack_16<mode>(value[0], value[1]);
            }
            put_turned(0, channel, row, hi);
          }
        }
      }
    }
  }

  // Two channels of a row become two rows of a channel, by exchange with the next row's lane.
  __device__ __forceinline__ void put_turned(int part, int channel, int row, std::uint32_t mine) {
    const std::uint32_t other = __shfl_xor_sync(0xffffffff, mine, 4);
    const std::uint32_t word = __byte_perm(mine, other, row % 2 == 1 ? 0x3276 : 0x5410);
    auto* to = reinterpret_cast<std::uint16_t*>(shared.turned) +
               (part * kPieceChannels + channel) * kForwardPitch + row / 2 * 2;
    *reinterpret_cast<std::uint32_t*>(to) = word;
  }

  // The threads that share rows store them: eight pairs of a channel at a time.
  __device__ __forceinline__ void store(int piece) {
    constexpr int kGroup = Multiply::kGroupThreads;
    constexpr int kEights = kRows * kGroup / kThreads / 8;
    constexpr int kChannelsAtOnce = kGroup / kEights;
    const int plane = piece >= p.blocks;
    const int from = (piece - plane * p.blocks) * kPieceChannels;
    const int in_group = thread % kGroup;
    const int channel = in_group / kEights;
    const int eight = thread / kGroup * kEights + in_group % kEights;
    const int existing = shared.existing[eight];
    if (existing < 0) return;
    const int there = p.sizes.hidden - p.first_block * kPieceChannels - from;
    const std::int64_t pairs = p.sizes.pairs();
    const std::int64_t at = (from + channel) * pairs + first + eight * 8;
    const bool whole = existing == 8 && there >= kPieceChannels;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      std::uint16_t* to = p.plane[plane][part] + at;
      const auto* turned = reinterpret_cast<const std::uint16_t*>(shared.turned) +
                           (part * kPieceChannels + channel) * kForwardPitch + eight * 8;
#pragma unroll
      for (int i = 0; i < kPieceChannels; i += kChannelsAtOnce) {
        const uint4 word = *reinterpret_cast<const uint4*>(turned + i * kForwardPitch);
        if (whole) {
          sm80::store_global_16(to, word);
        } else if (channel + i < there) {
          sm80::store_global_16(to, first_of_eight(word, existing));
        }
        to += kChannelsAtOnce * pairs;
      }
    }
  }

  // Backward -------------------------------------------------------------------------------------

  __device__ __forceinline__ void copy_plane_grad(int piece) {
    const int plane = piece >= p.blocks;
    PlaneGradCopies<kRows, kPlaneBytes, kBackwardPitch>::copy(
        shared.turned, p.plane_grad[plane], p.sizes, (piece - plane * p.blocks) * kPieceChannels,
        first, shared.existing, thread);
  }

  __device__ __forceinline__ float plane_grad(int channel, int row) const {
    const int at = channel * kBackwardPitch + row;
    if (kPlaneBytes == 4) return reinterpret_cast<const float*>(shared.turned)[at];
    return sm80::unpack_bf16(reinterpret_cast<const std::uint16_t*>(shared.turned)[at]).x;
  }

  // The way back from the scaled planes whose product the gradient of `plane` is.
  __device__ __forceinline__ float undo_of(int plane, int channel) const {
    if (mode == Mode::kBFloat16 || mode == Mode::kSplit || channel >= p.sizes.hidden) return 1.0f;
    float undo = p.grad_undo[channel];
    if (mode == Mode::kTf32) {
      const int padded = p.packed.hidden_blocks * kPieceChannels;
      undo *= floats(p.packed.plane_undo)[(plane == 0 ? padded : 0) + channel];
    }
    return undo;
  }

  __device__ __forceinline__ void store_normalised() {
    store_operand<mode, Shape>(shared.rows, p.sizes.channels, first - p.first_pair, p.count,
                               p.normalised, thread,
                               [](int) { return two_to(-kNormalisedExponent); });
  }

  // From the gradients of a plane to those of projection and gate before its sigmoid.
  __device__ __forceinline__ void turn_back(const Multiply& product, int piece) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) turn_back(product, piece, quad);
    __syncthreads();
    add_columns(piece);
  }

  __device__ __forceinline__ void turn_back(const Multiply& product, int piece, int quad) {
    const Channels c = channels_of(piece, quad);
    const int t = lane() % 4, g = lane() / 4;
    const int hidden = p.sizes.hidden;
    const int plane = piece >= p.blocks;
    const int begin = (piece - plane * p.blocks) * kPieceChannels + quad_channel(quad);
    float sums[2][2][2] = {};  // [projection, gate][column tile][channel]
    float undo[2][2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int x = 0; x < 2; ++x) undo[j][x] = undo_of(plane, begin + j * 8 + 2 * t + x);
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Multiply::row(thread) + i * 16 + half * 8 + g;
        const float factor = shared.factor[row];
        const bool exists = row % 8 < shared.existing[row / 8];
        float number[4][2];  // of projection: column tiles 0, 1; of the gate: 0, 1
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const auto& gates = product.total[i][4 * quad + 2 * j];
          const auto& projections = product.total[i][4 * quad + 2 * j + 1];
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            const int e = half * 2 + x;
            const float gate = finish(gates[e], c.gate_undo[j], c.gate_bias[j], e);
            const float projected = finish(projections[e], c.undo[j], c.bias[j], e);
            const float s = gate_sigmoid<mode>(gate);
            const float grad = plane_grad(quad_channel(quad) + j * 8 + 2 * t + x, row);
            const float d = grad * undo[j][x] * factor * s;
            const float d_gate = d * projected * (1.0f - s);
            number[j][x] = exists ? d : 0.0f;
            number[2 + j][x] = exists ? d_gate : 0.0f;
            sums[0][j][x] += number[j][x];
            sums[1][j][x] += number[2 + j][x];
          }
        }
        const std::int64_t at = first - p.first_pair + row;
        const int channel = begin + t % 2 * 8;
        store_quad<mode>(number, p.grad,
                         at * (4 * hidden) + plane * 2 * hidden + t / 2 * hidden + channel,
                         at < p.count ? hidden - channel : 0, hidden % 8 == 0, lane());
      }
    }
    // Over the warp's rows, in a fixed order.
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const float sum = over_rows(sums[kind][j][x]);
          const int channel = quad_channel(quad) + j * 8 + 2 * t + x;
          const int group = Multiply::row(thread) / (kRowTiles * 16);
          if (lane() < 4) shared.sums[group][kind * kPieceChannels + channel] = sum;
        }
      }
    }
  }

  // The sums over the block's rows.
  __device__ __forceinline__ void add_columns(int piece) {
    const int hidden = p.sizes.hidden;
    const int kind = thread / kPieceChannels;
    const int plane = piece >= p.blocks;
    const int channel = (piece - plane * p.blocks) * kPieceChannels + thread % kPieceChannels;
    if (thread >= kProjectLines || channel >= hidden) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) sum += shared.sums[i][thread];
    p.sums[static_cast<std::int64_t>(blockIdx.x) * (4 * hidden) + plane * 2 * hidden +
           kind * hidden + channel] = sum;
  }
};

// Blocks a multiprocessor that the registers are limited for.
constexpr int project_blocks(Mode mode) {
  return mode == Mode::kSplit ? 1 : 2;
}

template <Mode mode, int kRows, int kInnerMost, bool kBackward>
__global__ void __launch_bounds__(kThreads, project_blocks(mode))
    project_kernel(const __grid_constant__ ProjectParams params) {
  Project<mode, Shape<kRows, kInnerMost>, kBackward>::run(params);
}

}  // namespace fused_ops::triangular_multiplicative_update
