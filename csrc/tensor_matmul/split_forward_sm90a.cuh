// SPDX-License-Identifier: Apache-2.0
// The product of split_forward_sm80.cuh for Hopper, its warps specialised: one warpgroup copies and
// splits, the others multiply by wgmma and store. Registers are handed from the first to the
// others, so that those hold large tiles.
#pragma once

#include "common/cuda/sm90a/split.cuh"
#include "tensor_matmul/split_tile.cuh"

namespace fused_ops::tensor_matmul {

template <int kRows, int kColumns, int kStages>
struct SplitForwardSpecialised {
  struct Shared : SplitShared<kRows, kColumns, kStages> {
    std::uint64_t full[kStages];   // a and b of a stage may be read
    std::uint64_t empty[kStages];  // they may be written
  };
  static constexpr int kProducers = 128;
  using Copies = SplitCopies<kRows, kColumns, kProducers, kStages>;
  using Warps = sm90a::SplitWarpgroups<kRows, kColumns>;
  using Results = SplitResults<kRows, kColumns, kStages, Warps>;
  static constexpr int kConsumers = Warps::kThreads;
  static constexpr int kThreads = kProducers + kConsumers;
  using Registers = sm90a::SharedRegisters<kProducers, kConsumers, 72>;

  static __device__ __forceinline__ void produce(Shared& shared, const SplitParams& params,
                                                 int thread) {
    const Copies copies{shared, params, thread};
    SplitStream a_at(params), at(params);
    sm80::RingSlot<kStages> a_slot, slot;
    copies.find_rows(a_at);
    sm80::named_barrier<1, kProducers>();
    const auto copy_next_a = [&] {
      if (a_at.row_tile < params.row_tiles) {
        copies.copy_a(a_at, a_slot.stage);
        a_slot.advance();
        a_at.advance(params);
        if (a_at.chunk == 0) copies.find_rows(a_at);
      }
      sm80::cp_async_commit();
    };
    copy_next_a();
    sm80::named_barrier<1, kProducers>();
    copy_next_a();
    while (at.row_tile < params.row_tiles) {
      sm80::cp_async_wait<1>();
      sm80::named_barrier<1, kProducers>();  // all have copied this chunk, and split the last one
      copy_next_a();
      sm80::mbarrier_wait(&shared.empty[slot.stage], slot.round ^ 1);
      if (thread == 0) copy_b(shared, params, at, slot.stage);
      copies.split_a(slot.stage, slot.stage);
      Warps::publish();
      sm80::warp_arrives(&shared.full[slot.stage], thread, params.every_thread_arrives);
      slot.advance();
      at.advance(params);
    }
    sm80::cp_async_wait<0>();
  }

  // B's part of a stage, by the copy engine.
  static __device__ __forceinline__ void copy_b(Shared& shared, const SplitParams& params,
                                                const SplitStream& at, int stage) {
    const PreparedB& prepared = params.prepared;
    const std::int64_t first = std::int64_t{at.column_tile} * kColumns;
    const bool with_scales = at.chunk == 0;
    sm90a::mbarrier_arrive_expect(
        &shared.full[stage],
        static_cast<int>(sizeof(shared.b[0]) + (with_scales ? sizeof(shared.column_scale[0]) : 0)));
    sm90a::bulk_copy(shared.b[stage],
                     params.workspace + prepared.lines() +
                         (at.chunk * prepared.columns + first) * sm80::kSplitLineBytes,
                     sizeof(shared.b[0]), &shared.full[stage]);
    if (with_scales) {
      sm90a::bulk_copy(shared.column_scale[at.turn],
                       params.workspace + prepared.column_scales() + first * 4,
                       sizeof(shared.column_scale[0]), &shared.full[stage]);
    }
  }

  static __device__ __forceinline__ void consume(Shared& shared, const SplitParams& params,
                                                 int thread) {
    const Results results{shared, params, Warps{thread}};
    typename Results::Product product;
    product.clear();
    sm80::RingSlot<kStages> slot;
    for (SplitStream at(params); at.row_tile < params.row_tiles; at.advance(params)) {
      sm80::mbarrier_wait(&shared.full[slot.stage], slot.round);
      results.multiply(product, slot.stage, [&] {
        sm80::warp_arrives(&shared.empty[slot.stage], thread, params.every_thread_arrives);
      });
      slot.advance();
      if (at.chunk == static_cast<int>(params.prepared.chunks) - 1) {
        results.store(product, at);
        product.clear();
      }
    }
  }

  static __device__ __forceinline__ void run(const SplitParams& params) {
    auto& shared = shared_memory<Shared>();
    const int thread = thread_index();
    if (thread < kStages) {
      sm80::mbarrier_init(&shared.full[thread],
                          sm80::arrivals(kProducers, params.every_thread_arrives) + 1);
      sm80::mbarrier_init(&shared.empty[thread],
                          sm80::arrivals(kConsumers, params.every_thread_arrives));
      sm90a::fence_async();
    }
    __syncthreads();
    if (thread < kProducers) {
      sm90a::give_registers<Registers::kGivers>();
      produce(shared, params, thread);
    } else {
      sm90a::take_registers<Registers::kTakers>();
      consume(shared, params, thread - kProducers);
    }
  }
};

}  // namespace fused_ops::tensor_matmul
