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

// Of a row of o: 1 / deviation, and mean / deviation.
struct RowStatistics {
  float scale, shift;
};

// Of a tile of o, a line of 64 pairs for each channel, the statistics of a warp's 16 pairs from
// `first` on: those of lane / 4, and eight further.
template <bool whole>
__device__ __forceinline__ void find_statistics(const unsigned char* tile, int first, int hidden,
                                                float eps, int lane, RowStatistics (&of)[2]) {
  // A lane has two pairs and a quarter of their channels. Quarters read lines that differ modulo 8
  // by two, so that their banks do not meet.
  const int two = lane % 8, quarter = lane / 8;
  const unsigned char* lines[2];
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    lines[odd] = tile + sm80::split_offset(quarter * 2 + odd, first / 8 + two / 4) + two % 4 * 4;
  }
  // Distances from the first number, as in normalise_rows().
  const auto* channel_0 = reinterpret_cast<const std::uint32_t*>(
      tile + sm80::split_offset(0, first / 8 + two / 4) + two % 4 * 4);
  const float2 pivot = sm80::unpack_bf16(*channel_0);
  constexpr int kMost = kResidentChannels / 4;
  const int count = whole ? kMost : rounded_up(hidden, kInner) / 4;
  float2 sum = make_float2(0.0f, 0.0f), squares = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int k = 0; k < kMost; ++k) {
    if (!whole && k >= count) break;
    const auto* at = reinterpret_cast<const std::uint32_t*>(lines[k % 2] + k / 2 * 8 * kLineBytes);
    const bool exists = whole || k / 2 * 8 + quarter * 2 + k % 2 < hidden;
    const float2 x = sm80::unpack_bf16(*at);
    const float dx = exists ? x.x - pivot.x : 0.0f, dy = exists ? x.y - pivot.y : 0.0f;
    sum.x += dx, sum.y += dy;
    squares.x = fmaf(dx, dx, squares.x), squares.y = fmaf(dy, dy, squares.y);
  }
#pragma unroll
  for (int offset = 8; offset < 32; offset *= 2) {
    sum.x += __shfl_xor_sync(0xffffffff, sum.x, offset);
    sum.y += __shfl_xor_sync(0xffffffff, sum.y, offset);
    squares.x += __shfl_xor_sync(0xffffffff, squares.x, offset);
    squares.y += __shfl_xor_sync(0xffffffff, squares.y, offset);
  }
  const float inverse = 1.0f / static_cast<float>(hidden);
  const auto statistics = [&](float sum, float square, float pivot) {
    const float mean = sum * inverse;
    return RowStatistics{rsqrtf(variance_of(mean, square * inverse) + eps), pivot + mean};
  };
  const RowStatistics even = statistics(sum.x, squares.x, pivot.x);
  const RowStatistics odd = statistics(sum.y, squares.y, pivot.y);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto get = [&](float x, float y) {
      const int from = half * 4 + lane / 8;
      const float low = __shfl_sync(0xffffffff, x, from);
      const float high = __shfl_sync(0xffffffff, y, from);
      return lane / 4 % 2 == 0 ? low : high;
    };
    of[half].scale = get(even.scale, odd.scale);
    of[half].shift = get(even.shift, odd.shift) * of[half].scale;
  }
}

// `wide`: the pair representation is fp32, else bf16.
template <bool wide>
struct OutputResident {
  static constexpr Mode kMode = Mode::kBFloat16;
  static constexpr int kRows = 64;  // pairs of a tile
  static constexpr int kStages = 4;
  static constexpr int kLag = 2;  // tiles that are on their way while one is got ready
  // Places of rows are read when their tile has been given back, but before the next is.
  static constexpr int kPlaceStages = 2 * kStages;
  static constexpr int kTiles = kPieceChannels / 8;
  static constexpr int kBlocks = kResidentChannels / 64;
  static constexpr int kPieceBytes = kPieceChannels * kLineBytes;  // and 64 of the inner axis
  static constexpr int kResultTiles = 4;  // column tiles that are stored together
  static constexpr int kResultBytes = kResultTiles * 16;
  using Registers = sm90a::SharedRegisters<kProducers, kConsumers, 72>;

  struct alignas(1024) Shared {
    unsigned char gate[kBlocks * kBlocks * kPieceBytes];
    unsigned char out[kBlocks * kBlocks * kPieceBytes];
    unsigned char pair[kStages][kBlocks * kRows * kLineBytes];
    unsigned char o[kStages][kResidentChannels * kLineBytes];   // a line of 64 pairs a channel
    unsigned char results[kConsumers / 32][16 * kResultBytes];  // of a warp's 16 pairs
    // Of two channels: biases of the gate (scaled) and of the projection; sums of weights.
    float4 bias[kResidentChannels / 2];
    float2 sum[kResidentChannels / 2];
    std::int64_t row[kPlaceStages][kRows];  // of the result; -1: nowhere
    std::uint64_t loaded;                   // the weights are there
    std::uint64_t full[kStages];            // a stage may be read
    std::uint64_t empty[kStages];           // it may be written
  };

  const OutputParams& p;
  Shared& shared;

  static __device__ __forceinline__ void run(const OutputParams& params) {
    auto& shared = shared_memory<Shared>();
    const OutputResident kernel{params, shared};
    const int thread = thread_index();
    if (thread == 0) {
      sm80::mbarrier_init(&shared.loaded, 1);
      const bool every = params.every_thread_arrives;
      for (int i = 0; i < kStages; ++i) {
        sm80::mbarrier_init(&shared.full[i], sm80::arrivals(kProducers, every));
        sm80::mbarrier_init(&shared.empty[i], sm80::arrivals(kernel.pieces() * 128, every));
      }
      sm90a::fence_async();
    }
    kernel.keep_vectors(thread);
    __syncthreads();
    if (thread < kProducers) {
      if (!wide) sm90a::give_registers<Registers::kGivers>();
      kernel.produce(thread);
    } else {
      if (!wide) sm90a::take_registers<Registers::kTakers>();
      kernel.consume(thread - kProducers);
    }
  }

  __device__ __forceinline__ int pieces() const { return p.packed.channel_blocks; }
  __device__ __forceinline__ int tiles() const {
    return static_cast<int>(ceil_div(p.count, kRows));
  }
  __device__ __forceinline__ const float* floats(std::int64_t offset) const {
    return reinterpret_cast<const float*>(p.workspace + offset);
  }

  __device__ __forceinline__ void keep_vectors(int thread) const {
    const int at = 2 * thread;
    if (at >= pieces() * kPieceChannels) return;
    const float* gate = floats(p.packed.gate_bias) + at;
    const float* out = floats(p.packed.out_bias) + at;
    const float* sum = floats(p.packed.out_sum) + at;
    constexpr float kScale = kGateScale<kMode>;
    shared.bias[thread] = make_float4(kScale * gate[0], kScale * gate[1], out[0], out[1]);
    shared.sum[thread] = make_float2(sum[0], sum[1]);
  }

  __device__ __forceinline__ void load_weights() const {
    const int gate = pieces() * p.packed.channel_blocks * kPieceBytes;
    const int out = pieces() * p.packed.hidden_blocks * kPieceBytes;
    sm90a::mbarrier_arrive_expect(&shared.loaded, gate + out);
    sm90a::bulk_copy(shared.gate, p.workspace + p.packed.gate, gate, &shared.loaded);
    sm90a::bulk_copy(shared.out, p.workspace + p.packed.out, out, &shared.loaded);
  }

  __device__ __forceinline__ void produce(int thread) const {
    if (thread == 0) load_weights();
    using Copies = RowCopies<kMode, kRows>;
    using Rows = std::conditional_t<wide, RowStream<kMode, kRows>, Copies>;
    sm80::RingSlot<kStages> slot, come;
    sm80::RingSlot<kPlaceStages> place;
    std::int64_t first = p.first_pair + std::int64_t{blockIdx.x} * kRows;
    // Of rows to copy, a lane knows the place of one; of results, a thread.
    PairWalk walk(p.sizes, first + Copies::row_of_lane(thread)), results(p.sizes, first + thread);
    const PairSteps next(p.sizes, std::int64_t{gridDim.x} * kRows);
    Rows rows(p.pair, p.sizes, thread);
    if constexpr (wide) rows.start(walk);
    int asked = 0;
    for (int tile = blockIdx.x; tile < tiles() || asked > 0; tile += gridDim.x) {
      if (tile < tiles()) {
        ++asked;
        sm80::mbarrier_wait(&shared.empty[slot.stage], slot.round ^ 1);
        copy_o(shared.o[slot.stage], first, thread);
        if constexpr (wide) {
          walk.advance(next);
          rows.advance(walk);
          rows.tile(shared.pair[slot.stage], p.gate_normalized, p.eps);
        } else {
          rows.copy(shared.pair[slot.stage], walk);
          walk.advance(next);
        }
        if (thread < kRows) {
          const std::int64_t n = p.sizes.n;
          const Pairs lines{nullptr, DType::kBFloat16, n * n, n, 1};
          shared.row[place.stage][thread] = results.exists() ? results.offset(lines) : -1;
        }
        results.advance(next);
        place.advance();
        first += std::int64_t{gridDim.x} * kRows;
        slot.advance();
      }
      sm80::cp_async_commit();
      if (tile < tiles()) {
        if (asked <= kLag) continue;
        sm80::cp_async_wait<kLag>();
      } else {
        sm80::cp_async_wait<0>();
      }
      // Rows of pairs that do not exist may become NaN: their results go nowhere.
      if constexpr (!wide) {
        if (p.gate_normalized) rows.normalise(shared.pair[come.stage], p.eps, 0);
      }
      sm90a::fence_async();
      sm80::warp_arrives(&shared.full[come.stage], thread, p.every_thread_arrives);
      come.advance();
      --asked;
    }
  }

  // Channels up to a multiple of 64 and pairs behind the last one are zeros.
  __device__ __forceinline__ void copy_o(unsigned char* tile, std::int64_t first,
                                         int thread) const {
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

  // A warpgroup takes 64 channels of every tile, or of every second or fourth.
  __device__ __forceinline__ void consume(int thread) const {
    // The same for a warp, as the compiler does not see by itself.
    const int group = __shfl_sync(0xffffffff, thread / 128, 0);
    const int piece = group % pieces();
    const int turns = kConsumers / 128 / pieces();
    sm80::mbarrier_wait(&shared.loaded, 0);
    sm80::RingSlot<kStages> slot;
    sm80::RingSlot<kPlaceStages> place;
    const auto skip = [&](int tiles) {
      for (int i = 0; i < tiles; ++i) slot.advance(), place.advance();
    };
    const int turn = group / pieces();
    skip(turn);
    for (int tile = blockIdx.x + turn * gridDim.x; tile < tiles(); tile += turns * gridDim.x) {
      sm80::mbarrier_wait(&shared.full[slot.stage], slot.round);
      RowStatistics statistics[2];
      const int first = thread / 32 % 4 * 16;  // of the warp's rows
      if (p.sizes.hidden == kResidentChannels) {
        find_statistics<true>(shared.o[slot.stage], first, p.sizes.hidden, p.eps, thread % 32,
                              statistics);
      } else {
        find_statistics<false>(shared.o[slot.stage], first, p.sizes.hidden, p.eps, thread % 32,
                               statistics);
      }
      float gate[kTiles][4], projected[kTiles][4];
      multiply(gate, projected, piece, slot.stage);
      sm80::warp_arrives(&shared.empty[slot.stage], thread, p.every_thread_arrives);
#pragma unroll
      for (int j = 0; j < kTiles; j += kResultTiles) {
        finish(gate, projected, statistics, piece, j, sm80::opaque(thread));
        store(piece, j, place.stage, sm80::opaque(thread));
      }
      skip(turns);
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
                                         const float (&projected)[kTiles][4],
                                         const RowStatistics (&of)[2], int piece, int begin,
                                         int thread) const {
    const int lane = thread % 32;
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
          const RowStatistics& row = of[half];
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

  static __device__ __forceinline__ float value_of(float gate, float product,
                                                   const RowStatistics& row, float gate_bias,
                                                   float bias, float sum) {
    const float projected = fmaf(product, row.scale, fmaf(-row.shift, sum, bias));
    return projected * gate_sigmoid<kMode>(fmaf(gate, kGateScale<kMode>, gate_bias));
  }

  // The warp's 16 pairs, eight channels at a time.
  __device__ __forceinline__ void store(int piece, int begin, int place, int thread) const {
    constexpr int kAtOnce = 32 / kResultTiles;  // pairs
    const int lane = thread % 32;
    const int eight = lane % kResultTiles;
    const int channel = piece * kPieceChannels + (begin + eight) * 8;
    const int first = thread / 32 % 4 * 16;
    const unsigned char* results = shared.results[thread / 32];
#pragma unroll
    for (int i = 0; i < 16; i += kAtOnce) {
      const int row = i + lane / kResultTiles;
      const std::int64_t at = shared.row[place][first + row];
      const uint4 word = *reinterpret_cast<const uint4*>(results + row * kResultBytes +
                                                         (swizzled(eight, row) << 4));
      if (at >= 0 && channel < p.sizes.channels) {
        sm80::store_global_16(static_cast<std::uint16_t*>(p.out) + at * p.sizes.channels + channel,
                              word);
      }
    }
  }
};

template <bool wide>
__global__ void __launch_bounds__(kResidentThreads, 1)
    output_resident_kernel(const __grid_constant__ OutputParams params) {
  OutputResident<wide>::run(params);
}

}  // namespace fused_ops::triangular_multiplicative_update
