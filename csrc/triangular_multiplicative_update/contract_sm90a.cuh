// SPDX-License-Identifier: Apache-2.0
// The contraction of split planes for Hopper, its warps specialised: one warpgroup copies, two
// multiply by wgmma, which reads both operands from shared memory in the layouts in which they were
// copied, and store. A block takes tile after tile, and the copies run ahead across their borders.
#pragma once

#include <cstdint>

#include "common/cuda/sm80/ring.cuh"
#include "common/cuda/sm90a/split.cuh"
#include "triangular_multiplicative_update/contract_operand_sm80.cuh"
#include "triangular_multiplicative_update/contract_tile.cuh"

namespace fused_ops::triangular_multiplicative_update {

// The tiles of a block. They rotate with each round, so that a block does not always meet the same
// tile of a matrix: the last ones of a line may have fewer columns.
struct TileStream {
  std::int64_t first = 0;  // of the round
  unsigned turn = blockIdx.x;

  __device__ __forceinline__ std::int64_t tile() const { return first + turn; }
  __device__ __forceinline__ void advance() {
    first += gridDim.x;
    turn = turn + 1 == gridDim.x ? 0 : turn + 1;
  }
};

// What wgmma has to know of an operand. Distances in units of 16 bytes, as descriptors count.
template <Layout layout, int kSide>
struct OperandMatrix {
  static constexpr bool kAcross = layout == Layout::kAcross;
  static constexpr int kNext = kAcross ? sm80::kSplitLineBytes : 2;    // the next 16 of k
  static constexpr int kLo = kAcross ? kOperandBytes<kSide> / 32 : 4;  // from hi to lo

  // Of hi, from place `first` on, a multiple of 64.
  static __device__ __forceinline__ sm90a::MatrixDescriptor at(const unsigned char* operand,
                                                               int first) {
    if constexpr (kAcross) {
      return sm90a::matrix_descriptor_across(
          sm80::shared_address(operand + first / kGroupPlaces * kGroupBytes), kGroupBytes);
    } else {
      return sm90a::matrix_descriptor(
          sm80::shared_address(operand + first * sm80::kSplitLineBytes));
    }
  }
};

template <Layout a_layout, Layout b_layout, int kColumns>
struct ContractSpecialised {
  static constexpr int kRows = 128;
  static constexpr int kStages = kColumns == 256 ? 4 : 6;
  static constexpr int kProducers = 128;
  static constexpr int kConsumers = kRows / 64 * 128;
  static constexpr int kThreads = kProducers + kConsumers;
  using Registers = sm90a::SharedRegisters<kProducers, kConsumers, 72>;
  using Product = sm90a::SplitProduct<kColumns>;
  using A = OperandMatrix<a_layout, kRows>;
  using B = OperandMatrix<b_layout, kColumns>;

  struct alignas(1024) Shared {
    unsigned char a[kStages][kOperandBytes<kRows>];
    unsigned char b[kStages][kOperandBytes<kColumns>];
    std::uint64_t full[kStages];   // a and b of a stage may be read
    std::uint64_t empty[kStages];  // they may be written
  };

  static __device__ __forceinline__ void produce(Shared& shared, const ContractParams& params,
                                                 int thread) {
    constexpr int kLag = 2;  // so many chunks later a chunk has come
    static_assert(kLag < kStages - 1);
    const Sizes& sizes = params.problem.sizes;
    sm80::RingSlot<kStages> slot, come;
    const auto publish = [&] {
      sm90a::fence_async();
      sm80::warp_arrives(&shared.full[come.stage], thread, params.every_thread_arrives);
      come.advance();
    };
    int under_way = 0;
    for (TileStream at; at.tile() < params.end_tile; at.advance()) {
      const TilePlace place(params, at.tile());
      const std::int64_t matrix = place.matrix * sizes.n * sizes.pitch;
      OperandCopies<a_layout, kRows, kProducers> a_copies(params.problem.a, matrix, sizes,
                                                          std::int64_t{place.row} * kRows, thread);
      OperandCopies<b_layout, kColumns, kProducers> b_copies(
          params.problem.b, matrix, sizes, std::int64_t{place.column} * kColumns, thread);
      for (int chunk = 0; chunk < params.chunks; ++chunk) {
        sm80::mbarrier_wait(&shared.empty[slot.stage], slot.round ^ 1);
        a_copies.copy(shared.a[slot.stage], params.problem.a, sizes.pitch);
        b_copies.copy(shared.b[slot.stage], params.problem.b, sizes.pitch);
        sm80::cp_async_commit();
        slot.advance();
        if (under_way < kLag) {
          ++under_way;
        } else {
          sm80::cp_async_wait<kLag>();
          publish();
        }
      }
    }
    sm80::cp_async_wait<0>();
    for (; under_way > 0; --under_way) publish();
  }

  // total += a * b for a chunk, for as many columns; `release` is called when both have been read.
  template <class Release>
  static __device__ __forceinline__ void multiply(Product& product, const unsigned char* a,
                                                  const unsigned char* b, int warpgroup,
                                                  int columns, Release release) {
    constexpr bool kA = A::kAcross;
    constexpr bool kB = B::kAcross;
    constexpr int kHeld = Product::kTilesAtOnce;
    const auto a_hi = A::at(a, warpgroup * 64);
    const auto a_lo = a_hi + A::kLo;
#pragma unroll
    for (int first = 0; first < Product::kColumnTiles; first += kHeld) {
      const auto b_hi = B::at(b, first * 8);
      const auto b_lo = b_hi + B::kLo;
      float sum[kHeld][4];
      sm90a::wgmma_begin();
      // The small terms first.
      sm90a::wgmma_f16_zero<kA, kB>(sum, a_lo, b_hi);
      sm90a::wgmma_f16<kA, kB>(sum, a_hi, b_lo);
      sm90a::wgmma_f16<kA, kB>(sum, a_lo + A::kNext, b_hi + B::kNext);
      sm90a::wgmma_f16<kA, kB>(sum, a_hi + A::kNext, b_lo + B::kNext);
      sm90a::wgmma_f16<kA, kB>(sum, a_hi, b_hi);
      sm90a::wgmma_f16<kA, kB>(sum, a_hi + A::kNext, b_hi + B::kNext);
      sm90a::wgmma_wait(sum);
      const bool last = first + kHeld == Product::kColumnTiles || (first + kHeld) * 8 >= columns;
      if (last) release();
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) product.total[0][first + j][e] += sum[j][e];
      }
      if (last) break;
    }
  }

  static __device__ __forceinline__ void consume(Shared& shared, const ContractParams& params,
                                                 int thread) {
    const std::int64_t n = params.problem.sizes.n;
    sm80::RingSlot<kStages> slot;
    for (TileStream at; at.tile() < params.end_tile; at.advance()) {
      const TilePlace place(params, at.tile());
      const int columns =
          static_cast<int>(min(n - std::int64_t{place.column} * kColumns, std::int64_t{kColumns}));
      Product product;
      product.clear();
      for (int chunk = 0; chunk < params.chunks; ++chunk) {
        sm80::mbarrier_wait(&shared.full[slot.stage], slot.round);
        multiply(product, shared.a[slot.stage], shared.b[slot.stage], thread / 128, columns, [&] {
          sm80::warp_arrives(&shared.empty[slot.stage], thread, params.every_thread_arrives);
        });
        slot.advance();
      }
      store_tile<kRows, kColumns>(product, params.problem, place, thread / 32 * 16, 0, thread % 32);
    }
  }

  static __device__ __forceinline__ void run(const ContractParams& params) {
    auto& shared = shared_memory<Shared>();
    const int thread = thread_index();
    if (thread < kStages) {
      sm80::mbarrier_init(&shared.full[thread],
                          sm80::arrivals(kProducers, params.every_thread_arrives));
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

template <Layout a_layout, Layout b_layout, int kColumns>
__global__ void __launch_bounds__(ContractSpecialised<a_layout, b_layout, kColumns>::kThreads, 1)
    contract_specialised_kernel(const __grid_constant__ ContractParams params) {
  ContractSpecialised<a_layout, b_layout, kColumns>::run(params);
}

}  // namespace fused_ops::triangular_multiplicative_update
