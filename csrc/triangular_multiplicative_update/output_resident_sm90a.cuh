// SPDX-License-Identifier: Apache-2.0
// LayerNorm of o, output projection, output gate in bf16, by blocks that stay (resident). Tiles of
// o are multiplied as they lie, channel by channel, and the LayerNorm is put right behind the
// product: with the row's mean and deviation, and s the sum of a column of the weights,
//   LN(o) W = (o W - mean s) / deviation.
// What fp32's sums lose grows with mean / deviation, as does what o has lost already where it was
// rounded to bf16, 2^-9 of the mean, far more. Rows of one number throughout, whose LayerNorm is 0,
// keep 1e-7 of the mean over sqrt(eps).
#pragma once

#include "triangular_multiplicative_update/output_tile_sm90a.cuh"

namespace fused_ops::triangular_multiplicative_update {

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
  static constexpr int kWarpRows = 16;
  static constexpr int kTurns = kConsumers / 128;  // at most
  static constexpr int kResultTiles = 4;           // column tiles that are stored together
  static constexpr int kResultBytes = kResultTiles * 16;
  using Registers = sm90a::SharedRegisters<kProducers, kConsumers, 72>;

  struct alignas(1024) Shared {
    unsigned char gate[kBlocks * kBlocks * kPieceBytes];
    unsigned char out[kBlocks * kBlocks * kPieceBytes];
    unsigned char pair[kStages][kBlocks * kRows * kLineBytes];
    unsigned char o[kStages][kResidentChannels * kLineBytes];   // a line of 64 pairs a channel
    unsigned char results[kConsumers / 32][16 * kResultBytes];  // of a warp's 16 pairs
    OutputVectors vectors;
    RowStatistics statistics[kTurns][2][kRows];  // of every second tile of a turn
    std::int64_t row[kPlaceStages][kRows];       // of the result; -1: nowhere
    std::uint64_t loaded;                        // the weights are there
    std::uint64_t full[kStages];                 // a stage may be read
    std::uint64_t empty[kStages];                // it may be written
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
    shared.vectors.keep(params, thread);
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
  __device__ __forceinline__ void produce(int thread) const {
    if (thread == 0) load_output_weights(p, shared.gate, shared.out, &shared.loaded);
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
        copy_plane(shared.o[slot.stage], p, first, thread);
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
        if (p.gate_normalized)
          rows.normalise(shared.pair[come.stage], p.eps, 0, [](int, int, const uint4&) {});
      }
      sm90a::fence_async();
      sm80::warp_arrives(&shared.full[come.stage], thread, p.every_thread_arrives);
      come.advance();
      --asked;
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
    int second = 0;
    for (int tile = blockIdx.x + turn * gridDim.x; tile < tiles(); tile += turns * gridDim.x) {
      sm80::mbarrier_wait(&shared.full[slot.stage], slot.round);
      RowStatistics statistics[2];
      share_statistics(statistics, slot.stage, turn, second, piece, thread);
      second ^= 1;
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

  // Of the rows lane / 4 and eight further of the warp's 16. Where two warps have them, each finds
  // eight; buffers are used in turn, so that one meeting is enough.
  __device__ __forceinline__ void share_statistics(RowStatistics (&of)[2], int stage, int turn,
                                                   int buffer, int piece, int thread) const {
    const int warp = thread / 32 % 4, first = warp * kWarpRows;
    RowStatistics* rows = shared.statistics[turn][buffer] + first;
    for (int half = piece; half < 2; half += pieces()) {
      find_row_statistics<8>(shared.o[stage], first + half * 8, p.sizes.hidden, p.eps, thread % 32,
                             rows + half * 8);
    }
    if (pieces() == 1) {
      __syncwarp();
    } else {
      sm80::named_barrier(1 + turn * 4 + warp, 64);
    }
    of[0] = rows[thread % 32 / 4];
    of[1] = rows[thread % 32 / 4 + 8];
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
    const int channel = piece * kPieceChannels + begin * 8 + lane % 4 * 2;
    unsigned char* line = shared.results[thread / 32] + lane % 16 * kResultBytes;
    const auto to = sm80::shared_address(line + (swizzled(lane / 16, lane % 16) << 4));
    __syncwarp();  // the results before have been read
#pragma unroll
    for (int j = 0; j < kResultTiles; j += 2) {
      std::uint32_t word[4];
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const OutputVectors::Two v = shared.vectors.of(channel + (j + x) * 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const RowStatistics& row = of[half];
          float result[2];
#pragma unroll
          for (int y = 0; y < 2; ++y) {
            result[y] = v.projected(projected[begin + j + x][2 * half + y], row, y) *
                        v.gate(gate[begin + j + x][2 * half + y], y);
          }
          word[2 * x + half] = sm80::pack_bf16(result[0], result[1]);
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
