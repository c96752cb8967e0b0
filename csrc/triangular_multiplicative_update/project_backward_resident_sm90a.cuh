// SPDX-License-Identifier: Apache-2.0
// From the gradients of a and b to those of the projections' results, in bf16, by blocks that stay
// (resident) and form the projections once more: project_resident_sm90a.cuh says how. A warp reads
// the gradient of its eight channels from the tile that was copied and puts its results there.
#pragma once

#include "triangular_multiplicative_update/project_resident_sm90a.cuh"

namespace fused_ops::triangular_multiplicative_update {

struct ProjectBackwardResident {
  static constexpr Mode kMode = Mode::kBFloat16;
  static constexpr int kRows = 64;  // pairs of a tile
  static constexpr int kTiles = kRows / 8;
  static constexpr int kStages = 2;
  using Weights = ResidentWeights<kMode>;
  static constexpr int kWarpChannels = Weights::kWarpChannels;
  // Twice as many as elsewhere: they normalise, and store that as well.
  static constexpr int kProducers = 256;
  static constexpr int kThreads = kProducers + kConsumers;
  using Registers = sm90a::SharedRegisters<kProducers, kConsumers, 64>;

  struct alignas(1024) Shared {
    unsigned char weights[Weights::kBytes];
    unsigned char rows[kStages][2 * kRows * kLineBytes];
    // Of a, then of b: a line of 64 pairs a channel, pieces in the order piece ^ (line % 8).
    unsigned char grads[kStages][2 * kResidentChannels * kLineBytes];
    float factor[kStages][kRows];
    std::uint64_t loaded;          // the weights are there
    std::uint64_t full[kStages];   // a stage may be read
    std::uint64_t empty[kStages];  // it may be written
  };

  const ProjectParams& p;
  Shared& shared;

  static __device__ __forceinline__ void run(const ProjectParams& params) {
    auto& shared = shared_memory<Shared>();
    const ProjectBackwardResident kernel{params, shared};
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
    __syncthreads();
    if (thread < kProducers) {
      sm90a::give_registers<Registers::kGivers>();
      if (thread == 0) Weights(params).load(shared.weights, &shared.loaded);
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
    using Rows = RowCopies<kMode, kRows, kProducers>;
    const int row = Rows::row_of_lane(thread);
    std::int64_t first = std::int64_t{blockIdx.x} * kRows;  // of the tile, in the chunk
    const std::int64_t stride = std::int64_t{gridDim.x} * kRows;
    PairWalk walk(p.sizes, p.first_pair + first + row);
    PairWalk eight(p.sizes, p.first_pair + first + thread % 8 * 8);
    const PairSteps next(p.sizes, stride);
    const Rows rows(p.pair, p.sizes, thread);
    sm80::RingSlot<kStages> slot;
    for (int tile = blockIdx.x; tile < tiles(); tile += gridDim.x) {
      unsigned char* operand = shared.rows[slot.stage];
      unsigned char* grads = shared.grads[slot.stage];
      sm80::mbarrier_wait(&shared.empty[slot.stage], slot.round ^ 1);
      const int places = rows.copy(operand, walk);
      sm80::cp_async_commit();
      copy_grads(grads, first, thread);
      sm80::cp_async_commit();
      if (row < kRows) {
        shared.factor[slot.stage][row] =
            walk.exists() ? load_mask(p.mask, walk.offset(p.mask)) : 0.0f;
      }
      sm80::cp_async_wait<1>();
      rows.normalise(operand, p.eps, places, [&](int pass, int channel, const uint4& words) {
        const std::int64_t at = first + pass * Rows::kPassRows + thread / 16;
        if (at < p.count && channel < p.sizes.channels) {
          sm80::store_global_16(
              static_cast<std::uint16_t*>(p.normalised) + at * p.sizes.channels + channel, words);
        }
      });
      sm80::cp_async_wait<0>();
      if (eight.existing() < 8) clear_padding(grads, eight.existing(), thread);
      sm90a::fence_async();
      sm80::warp_arrives(&shared.full[slot.stage], thread, p.every_thread_arrives);
      walk.advance(next);
      eight.advance(next);
      first += stride;
      slot.advance();
    }
  }

  // Channels up to a multiple of 64 and pairs behind the last one are zeros.
  __device__ __forceinline__ void copy_grads(unsigned char* tile, std::int64_t first,
                                             int thread) const {
    constexpr int kAtOnce = kProducers / 8;  // channels
    const int piece = thread % 8, channel = thread / 8;
    const std::int64_t pairs = p.sizes.pairs();
    const std::int64_t pair = p.first_pair + first + piece * 8;
    const int padded = rounded_up(p.sizes.hidden, kInner);
    for (int plane = 0; plane < 2; ++plane) {
      const auto* grads = static_cast<const std::uint16_t*>(p.plane_grad[plane]);
      const std::uint16_t* from = grads + channel * pairs + pair;
      unsigned char* to = tile + sm80::split_offset(plane * padded + channel, piece);
#pragma unroll 2
      for (int i = channel; i < padded; i += kAtOnce) {
        const bool exists = first + piece * 8 < p.count && i < p.sizes.hidden;
        sm80::cp_async_16(to, exists ? from : grads, exists ? 16 : 0);
        from += kAtOnce * pairs;
        to += kAtOnce * kLineBytes;
      }
    }
  }

  // Of the thread's pieces; what stands in the padding of the planes need not be a number.
  __device__ __forceinline__ void clear_padding(unsigned char* tile, int existing,
                                                int thread) const {
    const int lines = 2 * rounded_up(p.sizes.hidden, kInner);
    for (int line = thread / 8; line < lines; line += kProducers / 8) {
      auto* at = reinterpret_cast<uint4*>(tile + sm80::split_offset(line, thread % 8));
      *at = first_of_eight(*at, existing);
    }
  }

  __device__ __forceinline__ void consume(int thread) const {
    const Weights weights(p);
    const int group = Weights::group(thread);
    static_assert(Weights::kBlocks == 2);
    const ProjectChannel channels[2] = {
        weights.channel_of(group, thread),
        weights.channel_of(p.blocks > 1 ? group + 4 : group, thread)};
    sm80::mbarrier_wait(&shared.loaded, 0);
    float sums[2][2] = {};  // of projection and gate
    sm80::RingSlot<kStages> slot;
    std::int64_t first = std::int64_t{blockIdx.x} * kRows;
    for (int tile = blockIdx.x; tile < tiles(); tile += gridDim.x) {
      sm80::mbarrier_wait(&shared.full[slot.stage], slot.round);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i >= p.blocks) break;
        float total[kTiles][4];
        weights.template multiply<kRows>(total, shared.weights, group + 4 * i,
                                         shared.rows[slot.stage]);
        turn_back(total, channels[i], sums[i], group + 4 * i, slot.stage, first,
                  sm80::opaque(thread));
      }
      sm80::warp_arrives(&shared.empty[slot.stage], thread, p.every_thread_arrives);
      first += std::int64_t{gridDim.x} * kRows;
      slot.advance();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i < p.blocks) store_sums(sums[i], group + 4 * i, thread);
    }
  }

  // Of a half piece, the warp's first line among those of both planes' gradients.
  __device__ __forceinline__ int line_of(int half, int thread) const {
    return half * (kPieceChannels / 2) + thread / 32 % 4 * kWarpChannels;
  }

  __device__ __forceinline__ void turn_back(const float (&total)[kTiles][4],
                                            const ProjectChannel& c, float (&sums)[2], int half,
                                            int stage, std::int64_t first, int thread) const {
    const int lane = thread % 32;
    unsigned char* lines = shared.grads[stage] + line_of(half, thread) * kLineBytes;
    const auto at = sm80::shared_address(lines + sm80::split_offset(lane % 8, lane / 8));
    const float* factor = shared.factor[stage] + lane % 4 * 2;
    std::uint32_t projection[2][4], gate[2][4];
#pragma unroll
    for (int four = 0; four < 2; ++four) {
      std::uint32_t grad[4];
      sm80::ldmatrix_x4(grad, at ^ four << 6);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto& sum = total[four * 4 + j];
        const float2 f = *reinterpret_cast<const float2*>(factor + (four * 4 + j) * 8);
        const float2 d = sm80::unpack_bf16(grad[j]);
        float d_projection[2], d_gate[2];
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const float s = gate_sigmoid<kMode>(fmaf(sum[x], c.gate_scale, c.gate_bias));
          const float projected = fmaf(sum[2 + x], c.scale, c.bias);
          d_projection[x] = (x == 0 ? d.x * f.x : d.y * f.y) * s;
          d_gate[x] = d_projection[x] * projected * (1.0f - s);
          sums[0] += d_projection[x];
          sums[1] += d_gate[x];
        }
        projection[four][j] = sm80::pack_bf16(d_projection[0], d_projection[1]);
        gate[four][j] = sm80::pack_bf16(d_gate[0], d_gate[1]);
      }
    }
    store(projection, lines, at, 0, half, first, thread);
    store(gate, lines, at, 1, half, first, thread);
  }

  // The warp's eight channels, by way of its lines, eight pairs at a time.
  __device__ __forceinline__ void store(const std::uint32_t (&words)[2][4],
                                        const unsigned char* lines, sm80::SharedAddress at,
                                        int kind, int half, std::int64_t first, int thread) const {
    __syncwarp();  // what stood there has been read
#pragma unroll
    for (int four = 0; four < 2; ++four) sm90a::stmatrix_x4(at ^ four << 6, words[four]);
    __syncwarp();
    const int eight = thread % 8, channel = thread % 32 / 8;
    const int there = first + eight * 8 < p.count ? hidden_left(half, thread) - channel : 0;
    std::uint16_t* to = static_cast<std::uint16_t*>(p.grad) +
                        (row_of(half, kind, thread) + channel) * p.count + first + eight * 8;
#pragma unroll
    for (int i = 0; i < kWarpChannels; i += 4) {
      const uint4 word =
          *reinterpret_cast<const uint4*>(lines + sm80::split_offset(channel + i, eight));
      if (i < there) sm80::store_global_16(to + i * p.count, word);
    }
  }

  // The row of the gradient of the warp's first channel.
  __device__ __forceinline__ std::int64_t row_of(int half, int kind, int thread) const {
    const int plane = half >= 2 * p.blocks;
    return (2 * plane + kind) * std::int64_t{p.sizes.hidden} +
           line_of(half - plane * 2 * p.blocks, thread);
  }
  // Channels from the warp's first one on.
  __device__ __forceinline__ int hidden_left(int half, int thread) const {
    const int plane = half >= 2 * p.blocks;
    return p.sizes.hidden - line_of(half - plane * 2 * p.blocks, thread);
  }

  __device__ __forceinline__ void store_sums(const float (&sums)[2], int half, int thread) const {
    const int lane = thread % 32;
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
      float sum = sums[kind];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      if (lane % 4 == 0 && lane / 4 < hidden_left(half, thread)) {
        p.sums[std::int64_t{blockIdx.x} * 4 * p.sizes.hidden + row_of(half, kind, thread) +
               lane / 4] = sum;
      }
    }
  }
};

__global__ void __launch_bounds__(ProjectBackwardResident::kThreads, 1)
    project_backward_resident_kernel(const __grid_constant__ ProjectParams params) {
  ProjectBackwardResident::run(params);
}

}  // namespace fused_ops::triangular_multiplicative_update
