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
  // The block has what it was launched with, a multiple of 8 for each thread; no more can be taken.
  static constexpr int kRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = 72;
  static constexpr int kConsumerRegisters =
      (kRegisters * kThreads - kProducerRegisters * kProducers) / kConsumers / 8 * 8;

  static __device__ __forceinline__ void produce(Shared& shared, const SplitParams& params,
                                                 int thread) {
    const Copies copies{shared, params, thread};
    SplitStream a_at(params), b_at(params), at(params);
    Slot<kStages> a_slot, b_slot, slot;
    copies.find_rows(a_at);
    sm80::named_barrier<1, kProducers>();
    const auto copy_next_a = [&] {
      if (a_at.row_tile >= params.row_tiles) return;
      copies.copy_a(a_at, a_slot.stage);
      a_slot.advance();
      a_at.advance(params);
      if (a_at.chunk == 0) copies.find_rows(a_at);
    };
    const auto copy_next_b = [&] {
      if (b_at.row_tile >= params.row_tiles) return;
      sm80::mbarrier_wait(&shared.empty[b_slot.stage], b_slot.round ^ 1);
      copies.copy_b(b_at, b_slot.stage);
      b_slot.advance();
      b_at.advance(params);
    };
    copy_next_a();
    sm80::cp_async_commit();
    sm80::named_barrier<1, kProducers>();
    copy_next_a();
    copy_next_b();
    sm80::cp_async_commit();
    while (at.row_tile < params.row_tiles) {
      // Of the two groups under way the older one brought this chunk of A; the younger one brings
      // its part of B, into the stage whose part of A is free as well.
      sm80::cp_async_wait<1>();
      sm80::named_barrier<1, kProducers>();
      copy_next_a();
      copy_next_b();
      sm80::cp_async_commit();
      copies.split_a(slot.stage, slot.stage);
      sm80::cp_async_wait<1>();
      Warps::publish();
      warp_arrives(params, &shared.full[slot.stage], thread);
      slot.advance();
      at.advance(params);
    }
    sm80::cp_async_wait<0>();
  }

  static __device__ __forceinline__ void consume(Shared& shared, const SplitParams& params,
                                                 int thread) {
    const Results results{shared, params, Warps{thread}};
    typename Results::Product product;
    product.clear();
    Slot<kStages> slot;
    for (SplitStream at(params); at.row_tile < params.row_tiles; at.advance(params)) {
      sm80::mbarrier_wait(&shared.full[slot.stage], slot.round);
      results.multiply(product, slot.stage,
                       [&] { warp_arrives(params, &shared.empty[slot.stage], thread); });
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
      sm80::mbarrier_init(&shared.full[thread], arrivals(params, kProducers));
      sm80::mbarrier_init(&shared.empty[thread], arrivals(params, kConsumers));
    }
    __syncthreads();
    if (thread < kProducers) {
      sm90a::give_registers<kProducerRegisters>();
      produce(shared, params, thread);
    } else {
      sm90a::take_registers<kConsumerRegisters>();
      consume(shared, params, thread - kProducers);
    }
  }
};

template <int kRows, int kColumns, int kStages>
__global__ void __launch_bounds__(SplitForwardSpecialised<kRows, kColumns, kStages>::kThreads, 1)
    split_forward_specialised_kernel(const __grid_constant__ SplitParams params) {
  SplitForwardSpecialised<kRows, kColumns, kStages>::run(params);
}

}  // namespace fused_ops::tensor_matmul
