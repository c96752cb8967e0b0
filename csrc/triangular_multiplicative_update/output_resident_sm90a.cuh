// SPDX-License-Identifier: Apache-2.0
// LayerNorm of o, output projection, output gate in bf16, by blocks that stay (resident). Tiles of
// o are multiplied as they lie, channel by channel, and the LayerNorm is put right behind the
// product: with the row's mean and deviation, and s the sum of a column of the weights,
//   LN(o) W = (o W - mean s) / deviation.
// The product is exact but for fp32's sums, so this loses nothing that bf16 could hold.
#pragma once

#include "triangular_multiplicative_update/output_sm80.cuh"
#include "triangular_multiplicative_update/resident_sm90a.cuh"

namespace fused_ops::triangular_multiplicative_update {

// Pairs of a tile of o in shared memory, channel by channel: a line of 64 pairs is 128 bytes.
struct PlaneTile {
  static constexpr int kRows = 64;

  // Copies `hidden` channels, zeros up to a multiple of 64, of the pairs from `first` on; behind
  // `pairs` there are none.
  static __device__ __forceinline__ void copy(unsigned char* tile, const std::uint16_t* plane,
                                              std::int64_t first, std::int64_t pairs, int hidden,
                                              int thread) {
    constexpr int kAtOnce = kProducers / 8;  // channels
    const int piece = thread % 8, channel = thread / 8;
    const bool here = first + piece * 8 < pairs;
    const std::uint16_t* from = plane + channel * pairs + first + piece * 8;
    unsigned char* to = tile + sm80::split_offset(channel, piece);
    // A walk, for registers: the compiler would keep all the products.
#pragma unroll 1
    for (int i = channel; i < rounded_up(hidden, kInner); i += kAtOnce) {
      const bool exists = here && i < hidden;
      sm80::cp_async_16(to, exists ? from : plane, exists ? 16 : 0);
      from += kAtOnce * pairs;
      to += kAtOnce * kLineBytes;
    }
  }

  // Of a row: 1 / deviation, and mean / deviation.
  struct Statistics {
    float scale, shift;
  };

  // Of the tile's rows; a warp takes 16 of them, a lane two and a quarter of their channels.
  template <bool whole>
  static __device__ __forceinline__ void find_statistics(const unsigned char* tile, int hidden,
                                                         float eps, Statistics* of_rows,
                                                         int thread) {
    const int lane = thread % 32, two = thread / 32 * 8 + lane % 8, quarter = lane / 8;
    // Quarters read lines that differ modulo 8 by two, so that their banks do not meet.
    const unsigned char* lines[2];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      lines[odd] = tile + sm80::split_offset(quarter * 2 + odd, two / 4) + two % 4 * 4;
    }
    std::uint32_t word[kResidentChannels / 4];
    float2 sum = make_float2(0.0f, 0.0f);
    const int count = whole ? kResidentChannels / 4 : rounded_up(hidden, kInner) / 4;
#pragma unroll
    for (int k = 0; k < kResidentChannels / 4; ++k) {
      const auto* at =
          reinterpret_cast<const std::uint32_t*>(lines[k % 2] + k / 2 * 8 * kLineBytes);
      word[k] = whole || k < count ? *at : 0u;
      const float2 x = sm80::unpack_bf16(word[k]);
      sum.x += x.x, sum.y += x.y;
    }
    const float inverse = 1.0f / static_cast<float>(hidden);
    sum = over_quarters(sum);
    const float2 mean = make_float2(sum.x * inverse, sum.y * inverse);
    float2 squares = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < kResidentChannels / 4; ++k) {
      const bool exists = whole || k / 2 * 8 + quarter * 2 + k % 2 < hidden;
      const float2 x = sm80::unpack_bf16(word[k]);
      const float dx = exists ? x.x - mean.x : 0.0f, dy = exists ? x.y - mean.y : 0.0f;
      squares.x = fmaf(dx, dx, squares.x), squares.y = fmaf(dy, dy, squares.y);
    }
    squares = over_quarters(squares);
    if (quarter == 0) {
      const float x = rsqrtf(squares.x * inverse + eps), y = rsqrtf(squares.y * inverse + eps);
      of_rows[two * 2] = {x, mean.x * x};
      of_rows[two * 2 + 1] = {y, mean.y * y};
    }
  }

 private:
  static __device__ __forceinline__ float2 over_quarters(float2 x) {
#pragma unroll
    for (int offset = 8; offset < 32; offset *= 2) {
      x.x += __shfl_xor_sync(0xffffffff, x.x, offset);
      x.y += __shfl_xor_sync(0xffffffff, x.y, offset);
    }
    return x;
  }
};

enum class Bringing { kCopies, kNarrow, kWide };  // rows of the pair representation: see below

template <Bringing bringing>
struct OutputResident {
  static constexpr Mode kMode = Mode::kBFloat16;
  static constexpr int kRows = PlaneTile::kRows;  // pairs of a tile
  static constexpr int kStages = 4;
  // Of a row's statistics and place: read when its tile has been given back, before the next is.
  static constexpr int kNotes = 2 * kStages;
  static constexpr int kLag = 2;  // tiles that are on their way while one is got ready
  static constexpr int kTiles = kPieceChannels / 8;
  static constexpr int kBlocks = kResidentChannels / 64;
  static constexpr int kPieceBytes = kPieceChannels * kLineBytes;  // and 64 of the inner axis
  static constexpr int kResultTiles = 4;  // column tiles that are stored together
  static constexpr int kResultBytes = kResultTiles * 16;
  static constexpr int kProducerRegisters = 88;
  using Registers = sm90a::SharedRegisters<kProducers, kConsumers, kProducerRegisters>;
  using Statistics = PlaneTile::Statistics;

  struct alignas(1024) Shared {
    unsigned char gate[kBlocks * kBlocks * kPieceBytes];
    unsigned char out[kBlocks * kBlocks * kPieceBytes];
    unsigned char pair[kStages][kBlocks * kRows * kLineBytes];
    unsigned char o[kStages][kResidentChannels * kLineBytes];
    unsigned char results[kConsumers / 32][16 * kResultBytes];  // of a warp's 16 pairs
    // Of two channels: biases of the gate (times -log2 e) and of the projection; sums of weights.
    float4 bias[kResidentChannels / 2];
    float2 sum[kResidentChannels / 2];
    Statistics statistics[kNotes][kRows];
    std::int64_t row[kNotes][kRows];  // of the result; -1: nowhere
    std::uint64_t loaded;             // the weights are there
    std::uint64_t full[kStages];      // a stage may be read
    std::uint64_t empty[kStages];     // it may be written
  };

  const OutputParams& p;
  Shared& shared;
  WarpArrivals arrivals;

  static __device__ __forceinline__ void run(const OutputParams& params) {
    auto& shared = shared_memory<Shared>();
    const OutputResident kernel{params, shared, {params.every_thread_arrives}};
    const int thread = thread_index();
    if (thread == 0) {
      sm80::mbarrier_init(&shared.loaded, 1);
      for (int i = 0; i < kStages; ++i) {
        sm80::mbarrier_init(&shared.full[i], kernel.arrivals.of(kProducers));
        sm80::mbarrier_init(&shared.empty[i], kernel.arrivals.of(kernel.pieces() * 128));
      }
      sm90a::fence_async();
    }
    kernel.keep_vectors(thread);
    __syncthreads();
    if (thread < kProducers) {
      if (thread == 0) kernel.load_weights();
      using Pairs = std::conditional_t<bringing == Bringing::kCopies, FromCopies,
                                       FromRegisters<bringing == Bringing::kWide>>;
      kernel.template produce<Pairs>(thread);
    } else {
      kernel.consume(thread - kProducers);
    }
  }

  __device__ __forceinline__ int pieces() const { return p.packed.channel_blocks; }
  __device__ __forceinline__ std::int64_t tiles() const { return ceil_div(p.count, kRows); }
  __device__ __forceinline__ std::int64_t first_pair() const {
    return p.first_pair + std::int64_t{blockIdx.x} * kRows;
  }
  __device__ __forceinline__ std::int64_t stride() const { return std::int64_t{gridDim.x} * kRows; }
  __device__ __forceinline__ const float* floats(std::int64_t offset) const {
    return reinterpret_cast<const float*>(p.workspace + offset);
  }

  __device__ __forceinline__ void keep_vectors(int thread) const {
    constexpr float kLog2E = 1.44269504f;
    const int at = 2 * thread;
    if (at >= pieces() * kPieceChannels) return;
    const float* gate = floats(p.packed.gate_bias) + at;
    const float* out = floats(p.packed.out_bias) + at;
    const float* sum = floats(p.packed.out_sum) + at;
    shared.bias[thread] = make_float4(-kLog2E * gate[0], -kLog2E * gate[1], out[0], out[1]);
    shared.sum[thread] = make_float2(sum[0], sum[1]);
  }

  __device__ __forceinline__ void load_weights() const {
    const int gate = pieces() * p.packed.channel_blocks * kPieceBytes;
    const int out = pieces() * p.packed.hidden_blocks * kPieceBytes;
    sm90a::mbarrier_arrive_expect(&shared.loaded, gate + out);
    sm90a::bulk_copy(shared.gate, p.workspace + p.packed.gate, gate, &shared.loaded);
    sm90a::bulk_copy(shared.out, p.workspace + p.packed.out, out, &shared.loaded);
  }

  // Rows of the pair representation, normalised or of another type.
  template <bool wide>
  struct FromRegisters {
    using Rows = RowStream<kMode, kRows, wide, wide ? 2 : 4>;
    const OutputParams& p;
    PairWalk walk;
    PairSteps next;
    Rows rows;

    __device__ __forceinline__ FromRegisters(const OutputResident& kernel, int thread)
        : p(kernel.p),
          walk(p.sizes, kernel.first_pair() + Rows::row_of_lane(thread)),
          next(p.sizes, kernel.stride()),
          rows(p.pair, p.sizes, thread) {
      rows.start(walk);
    }

    __device__ __forceinline__ void bring(unsigned char* operand) {
      const auto keep = [](int, int, const std::uint32_t (&)[4]) {};
      walk.advance(next);
      rows.advance(walk);
      rows.tile(operand, p.gate_normalized, p.eps, keep);
    }
  };

  // Rows of the pair representation as they are.
  struct FromCopies {
    static constexpr int kPasses = kRows / 8;
    const OutputParams& p;
    int thread;
    PairWalk walk;
    PairSteps next;

    __device__ __forceinline__ FromCopies(const OutputResident& kernel, int thread)
        : p(kernel.p),
          thread(thread),
          walk(p.sizes, kernel.first_pair() + RowStream<kMode, kRows, false>::row_of_lane(thread)),
          next(p.sizes, kernel.stride()) {}

    __device__ __forceinline__ void bring(unsigned char* operand) {
      const int place = walk.exists() ? static_cast<int>(walk.offset(p.pair) / 8) : -1;
      walk.advance(next);
      const int row = thread / 16, eight = thread % 16;
      unsigned char* to =
          operand + eight / 8 * (kRows * kLineBytes) + sm80::split_offset(row, eight % 8);
      const bool padded = eight * 8 < rounded_up(p.sizes.channels, kInner);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int at = __shfl_sync(0xffffffff, place, 2 * pass + thread % 32 / 16);
        const bool here = at >= 0 && eight * 8 < p.sizes.channels;
        const auto* from =
            static_cast<const uint4*>(p.pair.data) + (here ? std::int64_t{at} + eight : 0);
        if (padded) sm80::cp_async_16(to + pass * (8 * kLineBytes), from, here ? 16 : 0);
      }
    }
  };

  template <class Bring>
  __device__ __forceinline__ void produce(int thread) const {
    Bring pairs(*this, thread);
    RingSlot<kStages> slot, come;
    RingSlot<kNotes> note;
    std::int64_t coming = first_pair();
    // The thread's row of the result in the tile that comes next.
    PairWalk walk(p.sizes, coming + thread % kRows);
    const PairSteps next(p.sizes, stride());
    const std::int64_t last = tiles() + std::int64_t{kLag} * gridDim.x;
    for (std::int64_t tile = blockIdx.x; tile < last; tile += gridDim.x) {
      if (tile < tiles()) {
        sm80::mbarrier_wait(&shared.empty[slot.stage], slot.round ^ 1);
        PlaneTile::copy(shared.o[slot.stage], static_cast<const std::uint16_t*>(p.o), coming,
                        p.sizes.pairs(), p.sizes.hidden, thread);
        pairs.bring(shared.pair[slot.stage]);
        coming += stride();
        slot.advance();
      }
      sm80::cp_async_commit();
      if (tile < blockIdx.x + std::int64_t{kLag} * gridDim.x) continue;
      sm80::cp_async_wait<kLag>();
      sm80::named_barrier<1, kProducers>();  // all have what they have copied
      if (thread < kRows) {
        const std::int64_t n = p.sizes.n;
        shared.row[note.stage][thread] =
            walk.exists() ? walk.offset(Pairs{nullptr, DType::kBFloat16, n * n, n, 1}) : -1;
      }
      walk.advance(next);
      const unsigned char* o = shared.o[come.stage];
      Statistics* statistics = shared.statistics[note.stage];
      if (p.sizes.hidden == kResidentChannels) {
        PlaneTile::find_statistics<true>(o, p.sizes.hidden, p.eps, statistics, thread);
      } else {
        PlaneTile::find_statistics<false>(o, p.sizes.hidden, p.eps, statistics, thread);
      }
      sm90a::fence_async();
      arrivals.arrive(&shared.full[come.stage], thread);
      come.advance();
      note.advance();
    }
    sm80::cp_async_wait<0>();
  }

  // A warpgroup takes 64 channels of every tile, or of every second or fourth.
  __device__ __forceinline__ void consume(int thread) const {
    const int piece = thread / 128 % pieces();
    const int turns = kConsumers / 128 / pieces();
    sm80::mbarrier_wait(&shared.loaded, 0);
    RingSlot<kStages> slot;
    RingSlot<kNotes> note;
    for (int i = thread / 128 / pieces(); i > 0; --i) slot.advance(), note.advance();
    const std::int64_t step = turns * std::int64_t{gridDim.x};
    for (std::int64_t tile = blockIdx.x + thread / 128 / pieces() * std::int64_t{gridDim.x};
         tile < tiles(); tile += step) {
      sm80::mbarrier_wait(&shared.full[slot.stage], slot.round);
      float gate[kTiles][4], projected[kTiles][4];
      multiply(gate, projected, piece, slot.stage);
      arrivals.arrive(&shared.empty[slot.stage], thread);
#pragma unroll
      for (int j = 0; j < kTiles; j += kResultTiles) {
        finish(gate, projected, piece, j, note.stage, thread);
        store(piece, j, note.stage, thread);
      }
      for (int i = 0; i < turns; ++i) slot.advance(), note.advance();
    }
  }

  __device__ __forceinline__ void multiply(float (&gate)[kTiles][4], float (&projected)[kTiles][4],
                                           int piece, int stage) const {
    const auto matrix = [](const unsigned char* lines) {
      return sm90a::matrix_descriptor(sm80::shared_address(lines));
    };
    multiply_blocks<kMode, true>(
        projected, sm90a::matrix_descriptor_across(sm80::shared_address(shared.o[stage]), 0),
        kInner * kLineBytes, matrix(shared.out + piece * p.packed.hidden_blocks * kPieceBytes),
        kPieceBytes, p.packed.hidden_blocks);
    multiply_blocks<kMode, false>(
        gate, matrix(shared.pair[stage]), kRows * kLineBytes,
        matrix(shared.gate + piece * p.packed.channel_blocks * kPieceBytes), kPieceBytes,
        p.packed.channel_blocks);
  }

  // LayerNorm, biases, gate of column tiles `begin` on; into the warp's shared memory.
  __device__ __forceinline__ void finish(const float (&gate)[kTiles][4],
                                         const float (&projected)[kTiles][4], int piece, int begin,
                                         int note, int thread) const {
    const int lane = thread % 32;
    const int first = thread / 32 % 4 * 16;  // of the warp's rows
    const Statistics* statistics = shared.statistics[note] + first + lane / 4;
    const Statistics of[2] = {statistics[0], statistics[8]};
    const int channels = piece * (kPieceChannels / 2) + begin * 4 + lane % 4;
    unsigned char* line = shared.results[thread / 32] + lane % 16 * kResultBytes;
    const auto to = sm80::shared_address(line + (swizzled(lane / 16, lane % 16) << 4));
    __syncwarp();  // the results before have been read
#pragma unroll
    for (int j = 0; j < kResultTiles; j += 2) {
      std::uint32_t word[4];
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float4 bias = shared.bias[channels + (j + x) * 4];
        const float2 sum = shared.sum[channels + (j + x) * 4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Statistics& row = of[half];
          const float* g = &gate[begin + j + x][2 * half];
          const float* q = &projected[begin + j + x][2 * half];
          word[2 * x + half] = pack_16<kMode>(value_of(g[0], q[0], row, bias.x, bias.z, sum.x),
                                              value_of(g[1], q[1], row, bias.y, bias.w, sum.y));
        }
      }
      sm90a::stmatrix_x4(to ^ j << 4, word);
    }
    __syncwarp();
  }

  // Where in a line of results a piece of 16 bytes stands: eight lines, or two, do not meet.
  static __device__ __forceinline__ int swizzled(int piece, int row) {
    return piece ^ row / 2 % kResultTiles;
  }

  static __device__ __forceinline__ float value_of(float gate, float product, const Statistics& row,
                                                   float gate_bias, float bias, float sum) {
    constexpr float kLog2E = 1.44269504f;
    const float e = sm80::exp2_approx(fmaf(gate, -kLog2E, gate_bias));
    const float projected = fmaf(product, row.scale, fmaf(-row.shift, sum, bias));
    return projected * sm80::reciprocal_approx(1.0f + e);
  }

  // The warp's 16 pairs, eight channels at a time.
  __device__ __forceinline__ void store(int piece, int begin, int note, int thread) const {
    constexpr int kAtOnce = 32 / kResultTiles;  // pairs
    const int lane = thread % 32;
    const int eight = lane % kResultTiles;
    const int channel = piece * kPieceChannels + (begin + eight) * 8;
    const int first = thread / 32 % 4 * 16;
    const unsigned char* results = shared.results[thread / 32];
#pragma unroll
    for (int i = 0; i < 16; i += kAtOnce) {
      const int row = i + lane / kResultTiles;
      const std::int64_t at = shared.row[note][first + row];
      const uint4 word = *reinterpret_cast<const uint4*>(results + row * kResultBytes +
                                                         (swizzled(eight, row) << 4));
      if (at >= 0 && channel < p.sizes.channels) {
        sm80::store_global_16(static_cast<std::uint16_t*>(p.out) + at * p.sizes.channels + channel,
                              word);
      }
    }
  }
};

template <Bringing bringing>
__global__ void __launch_bounds__(kResidentThreads, 1)
    output_resident_kernel(const __grid_constant__ OutputParams params) {
  OutputResident<bringing>::run(params);
}

}  // namespace fused_ops::triangular_multiplicative_update
