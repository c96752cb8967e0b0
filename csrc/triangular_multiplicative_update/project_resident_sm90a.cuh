// SPDX-License-Identifier: Apache-2.0
// LayerNorm, the four projections of the input, gates, mask, by blocks that stay (resident): the
// product is turned, weights * rows, so that a thread holds pairs of one channel, which is how the
// planes lie, and knows its channel's bias and scales once and for all.
//
// A warp takes 16 packed lines, eight channels: their gates in rows 0 to 7 of its product and their
// projections in rows 8 to 15, so that a thread holds both of its channel.
#pragma once

#include "triangular_multiplicative_update/project_sm80.cuh"
#include "triangular_multiplicative_update/resident_rows_sm90a.cuh"

namespace fused_ops::triangular_multiplicative_update {

// What makes a product the argument of gate_sigmoid(), and another one the projection.
struct ProjectChannel {
  float gate_scale, gate_bias, scale, bias;
};

// The packed weights of the projections in shared memory, and who multiplies which: a warpgroup
// takes 64 lines, half a piece, at a time; half pieces are counted through both planes.
template <Mode mode>
struct ResidentWeights {
  static constexpr int kLines = 64;
  static constexpr int kWarpChannels = 8;
  static constexpr int kPieceBytes = kProjectLines * kLineBytes;  // and 64 of the inner axis
  static constexpr int kBlocks = kResidentChannels / 64;
  static constexpr int kBytes = 2 * kBlocks * kBlocks * kPieceBytes;

  const ProjectParams& p;

  __device__ __forceinline__ explicit ResidentWeights(const ProjectParams& params) : p(params) {}

  // The warpgroup, the same for a warp, as the compiler does not see by itself.
  static __device__ __forceinline__ int group(int thread) {
    return __shfl_sync(0xffffffff, thread / 128, 0);
  }

  // One thread asks for all.
  __device__ __forceinline__ void load(unsigned char* weights, std::uint64_t* loaded) const {
    const int bytes = p.blocks * p.packed.channel_blocks * kPieceBytes;
    sm90a::mbarrier_arrive_expect(loaded, 2 * bytes);
    for (int plane = 0; plane < 2; ++plane) {
      const std::int64_t block = plane * p.packed.hidden_blocks + p.first_block;
      sm90a::bulk_copy(
          weights + plane * bytes,
          p.workspace + p.packed.project + block * p.packed.channel_blocks * kPieceBytes, bytes,
          loaded);
    }
  }

  // What a thread's channel in a half piece has.
  __device__ __forceinline__ ProjectChannel channel_of(int half, int thread) const {
    const auto floats = [&](std::int64_t offset) {
      return reinterpret_cast<const float*>(p.workspace + offset);
    };
    const int piece = half / 2;
    const int block = piece < p.blocks ? p.first_block + piece
                                       : p.packed.hidden_blocks + p.first_block + piece - p.blocks;
    const int gate =
        block * kProjectLines + half % 2 * kLines + thread / 32 % 4 * 16 + thread % 32 / 4;
    const int projection = gate + 8;
    float plane_scale = 1.0f;
    if (is_scaled(mode)) {
      plane_scale = floats(p.packed.plane_scale)[block * kPieceChannels + half % 2 * (kLines / 2) +
                                                 thread / 32 % 4 * kWarpChannels + thread % 32 / 4];
    }
    ProjectChannel c;
    c.gate_scale = kGateScale<mode> * floats(p.packed.project_undo)[gate];
    c.gate_bias = kGateScale<mode> * floats(p.packed.project_bias)[gate];
    c.scale = floats(p.packed.project_undo)[projection] * plane_scale;
    c.bias = floats(p.packed.project_bias)[projection] * plane_scale;
    return c;
  }

  // A half piece times the rows of a tile, turned: a thread's results are of pairs 2 * (lane % 4)
  // and the next of each eight, two of its channel's gate and two of its projection.
  template <int kRows>
  __device__ __forceinline__ void multiply(float (&total)[kRows / 8][4],
                                           const unsigned char* weights, int half,
                                           const unsigned char* rows) const {
    const int blocks = p.packed.channel_blocks;
    const unsigned char* lines =
        weights + half / 2 * blocks * kPieceBytes + half % 2 * (kLines * kLineBytes);
    multiply_blocks<mode, false>(total, sm90a::matrix_descriptor(sm80::shared_address(lines)),
                                 kPieceBytes, sm90a::matrix_descriptor(sm80::shared_address(rows)),
                                 kRows * kLineBytes, blocks);
  }
};

// `wide`: the pair representation is fp32, else of the mode's 16 bits.
template <Mode mode, bool wide>
struct ProjectResident {
  static constexpr int kRows = 128;  // pairs of a tile
  static constexpr int kTiles = kRows / 8;
  static constexpr int kStages = 2;
  // Factors are read after their tile's rows have been given back, but before the next tile's are.
  static constexpr int kFactors = 2 * kStages;
  using Weights = ResidentWeights<mode>;
  static constexpr int kWarpChannels = Weights::kWarpChannels;
  static constexpr int kPlaneBytes = kRows * 2;  // of a tile's channel
  using Registers = sm90a::SharedRegisters<kProducers, kConsumers, 72>;

  struct alignas(1024) Shared {
    unsigned char weights[Weights::kBytes];
    unsigned char rows[kStages][2 * kRows * kLineBytes];
    unsigned char turned[kConsumers / 32][kWarpChannels * kPlaneBytes];
    float inverse[kFactors][kRows];  // one over the mask's factor
    std::uint64_t loaded;            // the weights are there
    std::uint64_t full[kStages];     // rows and factors of a stage may be read
    std::uint64_t empty[kStages];    // its rows may be written
  };

  const ProjectParams& p;
  Shared& shared;

  static __device__ __forceinline__ void run(const ProjectParams& params) {
    auto& shared = shared_memory<Shared>();
    const ProjectResident kernel{params, shared};
    const int thread = thread_index();
    if (thread == 0) {
      sm80::mbarrier_init(&shared.loaded, 1);
      for (int i = 0; i < kStages; ++i) {
        sm80::mbarrier_init(&shared.full[i],
                            sm80::arrivals(kProducers, params.every_thread_arrives));
        sm80::mbarrier_init(&shared.empty[i],
                            sm80::arrivals(kConsumers, params.every_thread_arrives));
      }
      sm90a::fence_async();
    }
    __syncthreads();
    if (thread < kProducers) {
      if (!wide) sm90a::give_registers<Registers::kGivers>();
      kernel.produce(thread);
    } else {
      if (!wide) sm90a::take_registers<Registers::kTakers>();
      kernel.consume(thread - kProducers);
    }
  }

  // A warp's eight channels on their way to the planes, eight pairs at a time. Its second half
  // piece has the same channels of the other plane, or there is none.
  class Results {
   public:
    __device__ __forceinline__ Results(const ProjectParams& params, const unsigned char* turned,
                                       int group, int thread)
        : p_(params) {
      const int lane = thread % 32, odd = lane / kEights;
      const int plane = group >= 2 * p_.blocks;
      const int channel = (group - plane * 2 * p_.blocks) * (kPieceChannels / 2) +
                          thread / 32 % 4 * kWarpChannels + odd;
      eight_ = lane % kEights;
      channels_left_ = p_.sizes.hidden - p_.first_block * kPieceChannels - channel;
      channel_at_ = channel * p_.sizes.pairs() + eight_ * 8;
      from_ = turned + odd * kPlaneBytes;
      piece_ = (eight_ ^ odd) << 4;
    }

    __device__ __forceinline__ void store(std::uint16_t* plane, int tile) const {
      const std::int64_t pairs = p_.sizes.pairs();
      const bool exists = tile * kEights + eight_ < static_cast<int>(pairs / 8);
      std::uint16_t* to = plane + channel_at_ + std::int64_t{tile} * kRows;
#pragma unroll
      for (int i = 0; i < kWarpChannels; i += kAtOnce) {
        const uint4 word =
            *reinterpret_cast<const uint4*>(from_ + i * kPlaneBytes + (piece_ ^ i << 4));
        if (exists && i < channels_left_) sm80::store_global_16(to, word);
        to += kAtOnce * pairs;
      }
    }

   private:
    static constexpr int kEights = kRows / 8;
    static constexpr int kAtOnce = 32 / kEights;  // channels
    static_assert(kAtOnce == 2);

    const ProjectParams& p_;
    const unsigned char* from_;
    int piece_, eight_, channels_left_;
    std::int64_t channel_at_;
  };

  __device__ __forceinline__ int tiles() const {
    return static_cast<int>(ceil_div(p.count, kRows));
  }
  __device__ __forceinline__ const float* floats(std::int64_t offset) const {
    return reinterpret_cast<const float*>(p.workspace + offset);
  }

  __device__ __forceinline__ void produce(int thread) const {
    using Copies = RowCopies<mode, kRows>;
    using Rows = std::conditional_t<wide, RowStream<mode, kRows>, Copies>;
    const int row = Copies::row_of_lane(thread);
    PairWalk walk(p.sizes, p.first_pair + std::int64_t{blockIdx.x} * kRows + row);
    const PairSteps next(p.sizes, std::int64_t{gridDim.x} * kRows);
    Rows rows(p.pair, p.sizes, thread);
    if constexpr (wide) rows.start(walk);
    sm80::griddepcontrol_wait();  // up to here nothing packed was read
    if (thread == 0) Weights(p).load(shared.weights, &shared.loaded);
    const float mask_scale = is_scaled(mode) ? scale_mask(thread) : 1.0f;
    sm80::RingSlot<kStages> slot;
    sm80::RingSlot<kFactors> factor;
    for (int tile = blockIdx.x; tile < tiles(); tile += gridDim.x) {
      unsigned char* operand = shared.rows[slot.stage];
      sm80::mbarrier_wait(&shared.empty[slot.stage], slot.round ^ 1);
      int places = 0;
      if constexpr (!wide) {
        places = rows.copy(operand, walk);
        sm80::cp_async_commit();
      }
      shared.inverse[factor.stage][row] = inverse_of(walk, mask_scale);
      walk.advance(next);
      if constexpr (wide) {
        rows.advance(walk);
        rows.tile(operand, true, p.eps);
      } else {
        sm80::cp_async_wait<0>();
        rows.normalise(operand, p.eps, places, [](int, int, const uint4&) {});
      }
      sm90a::fence_async();
      sm80::warp_arrives(&shared.full[slot.stage], thread, p.every_thread_arrives);
      slot.advance();
      factor.advance();
    }
  }

  // Of the factor that results are multiplied by, 0 for padding.
  __device__ __forceinline__ float inverse_of(const PairWalk& walk, float mask_scale) const {
    const float factor = walk.exists() ? load_mask(p.mask, walk.offset(p.mask)) : 0.0f;
    return inverse_factor(factor * mask_scale);
  }

  // For masks that exceed what the planes have room for; the first block tells the way back.
  __device__ __forceinline__ float scale_mask(int thread) const {
    int exponent = 0;
    if (p.needs_largest) exponent = mask_exponent(floats(p.packed.mask_largest), thread % 32);
    if (blockIdx.x == 0) {
      auto* undo = reinterpret_cast<float*>(p.workspace + p.packed.plane_undo);
      const float* scale = floats(p.packed.plane_scale);
      const int padded = p.packed.hidden_blocks * kPieceChannels;
      for (int i = thread; i < 2 * padded; i += kProducers) {
        undo[i] = two_to(-exponent) / scale[i];
      }
    }
    return two_to(exponent);
  }

  __device__ __forceinline__ void consume(int thread) const {
    sm80::griddepcontrol_wait();
    const Weights weights(p);
    const int group = Weights::group(thread);
    static_assert(Weights::kBlocks == 2);
    const ProjectChannel first = weights.channel_of(group, thread);
    const ProjectChannel second = p.blocks > 1 ? weights.channel_of(group + 4, thread) : first;
    const Results results(p, shared.turned[thread / 32], group, thread);
    sm80::mbarrier_wait(&shared.loaded, 0);
    sm80::RingSlot<kStages> slot;
    sm80::RingSlot<kFactors> factor;
    for (int tile = blockIdx.x; tile < tiles(); tile += gridDim.x) {
      sm80::mbarrier_wait(&shared.full[slot.stage], slot.round);
#pragma unroll 1
      for (int i = 0; i < p.blocks; ++i) {
        const int half = group + 4 * i;
        float total[kTiles][4];
        weights.template multiply<kRows>(total, shared.weights, half, shared.rows[slot.stage]);
        if (i + 1 == p.blocks) {
          sm80::warp_arrives(&shared.empty[slot.stage], thread, p.every_thread_arrives);
        }
        const ProjectChannel channel = {i == 0 ? first.gate_scale : second.gate_scale,
                                        i == 0 ? first.gate_bias : second.gate_bias,
                                        i == 0 ? first.scale : second.scale,
                                        i == 0 ? first.bias : second.bias};
        turn(total, channel, factor.stage, thread);
        results.store(p.plane[half >= 2 * p.blocks][0], tile);
      }
      slot.advance();
      factor.advance();
    }
  }

  // Gates and mask; into the warp's shared memory, channel by channel.
  __device__ __forceinline__ void turn(const float (&total)[kTiles][4], const ProjectChannel& c,
                                       int stage, int thread) const {
    const int lane = thread % 32;
    unsigned char* line = shared.turned[thread / 32] + lane % 8 * kPlaneBytes;
    const auto to = sm80::shared_address(line + ((lane / 8 ^ lane % 8) << 4));
    const float* inverse = shared.inverse[stage] + lane % 4 * 2;
    __syncwarp();  // the results before have been read
#pragma unroll
    for (int four = 0; four < kTiles; four += 4) {
      std::uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto& sums = total[four + j];
        const float2 f = *reinterpret_cast<const float2*>(inverse + (four + j) * 8);
        word[j] =
            pack_16<mode>(value_of(sums[0], sums[2], c, f.x), value_of(sums[1], sums[3], c, f.y));
      }
      sm90a::stmatrix_x4(to ^ four << 4, word);
    }
    __syncwarp();
  }

  static __device__ __forceinline__ float value_of(float gate, float projection,
                                                   const ProjectChannel& c, float inverse) {
    return fmaf(projection, c.scale, c.bias) *
           gate_sigmoid<mode>(fmaf(gate, c.gate_scale, c.gate_bias), inverse);
  }
};

template <Mode mode, bool wide>
__global__ void __launch_bounds__(kResidentThreads, 1)
    project_resident_kernel(const __grid_constant__ ProjectParams params) {
  ProjectResident<mode, wide>::run(params);
}

}  // namespace fused_ops::triangular_multiplicative_update
