// SPDX-License-Identifier: Apache-2.0
// From the gradient of the result to those of the output projection's and the gate's, in bf16, by
// blocks that stay (resident): output_resident_sm90a.cuh says how. The four warpgroups share a
// tile, 32 channels each; a warp puts its results where its gradients came from.
#pragma once

#include "triangular_multiplicative_update/output_resident_sm90a.cuh"

namespace fused_ops::triangular_multiplicative_update {

struct OutputBackwardResident {
  static constexpr Mode kMode = Mode::kBFloat16;
  static constexpr int kRows = 64;  // pairs of a tile
  static constexpr int kStages = 3;
  static constexpr int kLag = 1;        // tiles that are on their way while one is got ready
  static constexpr int kChannels = 32;  // of a warpgroup
  static constexpr int kTiles = kChannels / 8;
  static constexpr int kPieceBytes = kPieceChannels * kLineBytes;
  static constexpr int kRowBytes = 2 * kRows * kLineBytes;  // of a tile
  static constexpr int kWarpRows = 16;
  using Registers = sm90a::SharedRegisters<kProducers, kConsumers, 72>;

  struct alignas(1024) Shared {
    unsigned char gate[4 * kPieceBytes];
    unsigned char out[4 * kPieceBytes];
    unsigned char pair[kStages][kRowBytes];
    unsigned char grad[kStages][kRowBytes];  // of the result; then those that are wanted
    unsigned char o[kStages][kResidentChannels * kLineBytes];  // a line of 64 pairs a channel
    OutputVectors vectors;
    RowStatistics statistics[2][kRows];  // of every second tile
    int exists[kStages][kRows];
    float sums[2][kConsumers / 32][kChannels];
    std::uint64_t loaded;          // the weights are there
    std::uint64_t full[kStages];   // a stage may be read
    std::uint64_t empty[kStages];  // it may be written
  };

  const OutputParams& p;
  Shared& shared;

  static __device__ __forceinline__ void run(const OutputParams& params) {
    auto& shared = shared_memory<Shared>();
    const OutputBackwardResident kernel{params, shared};
    const int thread = thread_index();
    if (thread == 0) {
      const bool every = params.every_thread_arrives;
      sm80::mbarrier_init(&shared.loaded, 1);
      for (int i = 0; i < kStages; ++i) {
        sm80::mbarrier_init(&shared.full[i], sm80::arrivals(kProducers, every));
        sm80::mbarrier_init(&shared.empty[i], sm80::arrivals(kConsumers, every));
      }
      sm90a::fence_async();
    }
    shared.vectors.keep(params, thread);
    __syncthreads();
    if (thread < kProducers) {
      sm90a::give_registers<Registers::kGivers>();
      if (thread == 0) load_output_weights(params, shared.gate, shared.out, &shared.loaded);
      kernel.produce(thread);
    } else {
      sm90a::take_registers<Registers::kTakers>();
      kernel.consume(thread - kProducers);
    }
  }

  __device__ __forceinline__ int tiles() const {
    return static_cast<int>(ceil_div(p.count, kRows));
  }

  __device__ __forceinline__ void produce(int thread) const {
    using Rows = RowCopies<kMode, kRows>;
    sm80::RingSlot<kStages> slot, come;
    const std::int64_t stride = std::int64_t{gridDim.x} * kRows;
    std::int64_t first = std::int64_t{blockIdx.x} * kRows, come_first = first;  // in the chunk
    // Of rows to copy, a lane knows the place of one.
    PairWalk walk(p.sizes, p.first_pair + first + Rows::row_of_lane(thread));
    const PairSteps next(p.sizes, stride);
    const Rows pairs(p.pair, p.sizes, thread), grads(p.out_grad, p.sizes, thread);
    int asked = 0;
    for (int tile = blockIdx.x; tile < tiles() || asked > 0; tile += gridDim.x) {
      if (tile < tiles()) {
        ++asked;
        sm80::mbarrier_wait(&shared.empty[slot.stage], slot.round ^ 1);
        copy_plane(shared.o[slot.stage], p, p.first_pair + first, thread);
        pairs.copy(shared.pair[slot.stage], walk);
        grads.copy(shared.grad[slot.stage], walk);
        if (Rows::row_of_lane(thread) < kRows) {
          shared.exists[slot.stage][Rows::row_of_lane(thread)] = walk.exists();
        }
        walk.advance(next);
        first += stride;
        slot.advance();
      }
      sm80::cp_async_commit();
      if (tile < tiles()) {
        if (asked <= kLag) continue;
        sm80::cp_async_wait<kLag>();
      } else {
        sm80::cp_async_wait<0>();
      }
      finish_pairs(pairs, shared.pair[come.stage], come_first, thread);
      sm90a::fence_async();
      sm80::warp_arrives(&shared.full[come.stage], thread, p.every_thread_arrives);
      come_first += stride;
      come.advance();
      --asked;
    }
  }

  // Normalises rows and stores what the gate reads, where they are wanted.
  template <class Rows>
  __device__ __forceinline__ void finish_pairs(const Rows& rows, unsigned char* pairs,
                                               std::int64_t first, int thread) const {
    if (!p.gate_normalized && !p.gate_input) return;
    const auto keep = [&](int pass, int channel, uint4 words) {
      const std::int64_t at = first + pass * Rows::kPassRows + thread / 16;
      if (!p.gate_input || at >= p.count || channel >= p.sizes.channels) return;
      auto* to = static_cast<std::uint16_t*>(p.gate_input);
      sm80::store_global_16(to + at * p.sizes.channels + channel, words);
    };
    if (p.gate_normalized) {
      // Padding is told from rows of equal numbers by this walk.
      const PairWalk walk(p.sizes, p.first_pair + first + Rows::row_of_lane(thread));
      rows.normalise(pairs, p.eps, walk.exists() ? 0 : -1, keep);
    } else {
      rows.read(pairs, keep);
    }
  }

  __device__ __forceinline__ void consume(int thread) const {
    const int group = __shfl_sync(0xffffffff, thread / 128, 0);
    sm80::mbarrier_wait(&shared.loaded, 0);
    float sums[2][kTiles][2] = {};  // of projection and gate, by channel
    sm80::RingSlot<kStages> slot;
    int second = 0;
    std::int64_t first = std::int64_t{blockIdx.x} * kRows;
    for (int tile = blockIdx.x; tile < tiles(); tile += gridDim.x) {
      sm80::mbarrier_wait(&shared.full[slot.stage], slot.round);
      RowShift statistics[2];
      share_statistics(statistics, slot.stage, second, group, thread);
      store_normalised(statistics, slot.stage, group, first, sm80::opaque(thread));
      float gate[kTiles][4], projected[kTiles][4];
      multiply(gate, projected, group, slot.stage);
      turn_back(gate, projected, statistics, sums, slot.stage, group, first, sm80::opaque(thread));
      sm80::warp_arrives(&shared.empty[slot.stage], thread, p.every_thread_arrives);
      first += std::int64_t{gridDim.x} * kRows;
      second ^= 1;
      slot.advance();
    }
    store_sums(sums, group, thread);
  }

  // Of the rows lane / 4 and eight further of the warp's 16. The four warps that have them find
  // four each; buffers are used in turn, so that one meeting is enough.
  __device__ __forceinline__ void share_statistics(RowShift (&of)[2], int stage, int buffer,
                                                   int group, int thread) const {
    RowStatistics* rows = shared.statistics[buffer] + thread / 32 % 4 * kWarpRows;
    find_row_statistics<4>(shared.o[stage], thread / 32 % 4 * kWarpRows + group * 4, p.sizes.hidden,
                           p.eps, thread % 32, rows + group * 4);
    sm80::named_barrier(1 + thread / 32 % 4, 128);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowStatistics& row = rows[thread % 32 / 4 + half * 8];
      of[half] = {row.scale, row.mean * row.scale};
    }
  }

  // Of the warpgroup's channels of o, the warp's rows.
  __device__ __forceinline__ void store_normalised(const RowShift (&statistics)[2], int stage,
                                                   int group, std::int64_t first,
                                                   int thread) const {
    if (group * kChannels >= rounded_up(p.sizes.hidden, kInner)) return;
    const int lane = thread % 32, warp = thread / 32 % 4;
    const int channel = group * kChannels + lane % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t word[4];
      sm80::ldmatrix_x4_trans(
          word, sm80::shared_address(shared.o[stage] + sm80::split_offset(group * kChannels + lane,
                                                                          warp * 2 + half)));
      const int row = warp * kWarpRows + half * 8 + lane / 4;
      const bool exists = shared.exists[stage][row];
      const RowShift& of = statistics[half];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = sm80::unpack_bf16(word[j]);
        const std::uint32_t two =
            sm80::pack_bf16(fmaf(x.x, of.scale, -of.shift), fmaf(x.y, of.scale, -of.shift));
        word[j] = exists ? two : 0u;
      }
      turn_quad(word, lane);
      const std::int64_t at = first + row;
      store_words(p.normalised, at * p.sizes.hidden + channel, word,
                  at < p.count ? p.sizes.hidden - channel : 0, p.sizes.hidden % 8 == 0);
    }
  }

  __device__ __forceinline__ void multiply(float (&gate)[kTiles][4], float (&projected)[kTiles][4],
                                           int group, int stage) const {
    const auto matrix = [](const unsigned char* lines) {
      return sm90a::matrix_descriptor(sm80::shared_address(lines));
    };
    // Channels that do not exist are multiplied with lines that do.
    const int piece = min(group / 2, p.packed.channel_blocks - 1);
    const int lines = group % 2 * (kChannels * kLineBytes);
    multiply_blocks<kMode, true>(
        projected, sm90a::matrix_descriptor_across(sm80::shared_address(shared.o[stage]), 0),
        kInner * kLineBytes,
        matrix(shared.out + piece * p.packed.hidden_blocks * kPieceBytes + lines), kPieceBytes,
        p.packed.hidden_blocks);
    multiply_blocks<kMode, false>(
        gate, matrix(shared.pair[stage]), kRows * kLineBytes,
        matrix(shared.gate + piece * p.packed.channel_blocks * kPieceBytes + lines), kPieceBytes,
        p.packed.channel_blocks);
  }

  __device__ __forceinline__ void turn_back(const float (&gate)[kTiles][4],
                                            const float (&projected)[kTiles][4],
                                            const RowShift (&statistics)[2],
                                            float (&sums)[2][kTiles][2], int stage, int group,
                                            std::int64_t first, int thread) const {
    if (group * kChannels >= rounded_up(p.sizes.channels, kInner)) return;
    const int lane = thread % 32;
    const int rows = thread / 32 % 4 * kWarpRows;
    unsigned char* grads = shared.grad[stage] + group / 2 * (kRows * kLineBytes);
    // Matrices of eight rows by eight channels: two above each other, then the next channels.
    const int piece = group % 2 * 4;
    const auto at =
        sm80::shared_address(grads + sm80::split_offset(rows + lane % 16, piece + lane / 16));
    bool exists[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      exists[half] = shared.exists[stage][rows + half * 8 + lane / 4];
    }
    std::uint32_t of_projection[2][4], of_gate[2][4];
#pragma unroll
    for (int two = 0; two < 2; ++two) {
      std::uint32_t grad[4];
      sm80::ldmatrix_x4(grad, at ^ two << 5);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int tile = 2 * two + j;
        const OutputVectors::Two v = shared.vectors.of(group * kChannels + tile * 8 + lane % 4 * 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const RowShift& row = statistics[half];
          const float2 d = sm80::unpack_bf16(grad[2 * j + half]);
          float d_projection[2], d_gate[2];
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            const float s = v.gate(gate[tile][2 * half + x], x);
            const float r = v.projected(projected[tile][2 * half + x], row, x);
            const float dp = (x == 0 ? d.x : d.y) * s;
            const float dg = dp * r * (1.0f - s);
            d_projection[x] = exists[half] ? dp : 0.0f;
            d_gate[x] = exists[half] ? dg : 0.0f;
            sums[0][tile][x] += d_projection[x];
            sums[1][tile][x] += d_gate[x];
          }
          of_projection[two][2 * j + half] = sm80::pack_bf16(d_projection[0], d_projection[1]);
          of_gate[two][2 * j + half] = sm80::pack_bf16(d_gate[0], d_gate[1]);
        }
      }
    }
    store(of_projection, grads, at, p.out_proj_grad, group, first, thread);
    store(of_gate, grads, at, p.gate_grad, group, first, thread);
  }

  // The warp's 16 rows of 32 channels, by way of where they came from.
  __device__ __forceinline__ void store(const std::uint32_t (&words)[2][4],
                                        const unsigned char* grads, sm80::SharedAddress at,
                                        void* matrix, int group, std::int64_t first,
                                        int thread) const {
    __syncwarp();  // what stood there has been read
#pragma unroll
    for (int two = 0; two < 2; ++two) sm90a::stmatrix_x4(at ^ two << 5, words[two]);
    __syncwarp();
    const int piece = group % 2 * 4 + thread % 4;
    const int channel = group / 2 * kPieceChannels + piece * 8;
    const int row = thread / 32 % 4 * kWarpRows + thread % 32 / 4;
    auto* to = static_cast<std::uint16_t*>(matrix) + (first + row) * p.sizes.channels + channel;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 word =
          *reinterpret_cast<const uint4*>(grads + sm80::split_offset(row + half * 8, piece));
      if (first + row + half * 8 < p.count && channel < p.sizes.channels) {
        sm80::store_global_16(to + half * 8 * p.sizes.channels, word);
      }
    }
  }

  // Over the block's rows, in a fixed order.
  __device__ __forceinline__ void store_sums(const float (&sums)[2][kTiles][2], int group,
                                             int thread) const {
    const int lane = thread % 32;
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const float sum = over_rows(sums[kind][j][x]);
          if (lane < 4) shared.sums[kind][thread / 32][j * 8 + 2 * lane + x] = sum;
        }
      }
    }
    sm80::named_barrier<5, kConsumers>();
    const int kind = thread / kResidentChannels, channel = thread % kResidentChannels;
    if (kind >= 2 || channel >= p.sizes.channels) return;
    const int warp = channel / kChannels * 4;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += shared.sums[kind][warp + i][channel % kChannels];
    p.sums[std::int64_t{blockIdx.x} * 2 * p.sizes.channels + kind * p.sizes.channels + channel] =
        sum;
  }
};

__global__ void __launch_bounds__(kResidentThreads, 1)
    output_backward_resident_kernel(const __grid_constant__ OutputParams params) {
  OutputBackwardResident::run(params);
}

}  // namespace fused_ops::triangular_multiplicative_update
