// SPDX-License-Identifier: Apache-2.0
// The contraction of planes: cuBLAS, or our own kernel for split planes. For the room's host ops.
#pragma once

#include "common/sanitizers.h"
#include "triangular_multiplicative_update/arguments.h"
#include "triangular_multiplicative_update/large.h"

namespace fused_ops::triangular_multiplicative_update {

// `channels` planes from `data` on, as matrices (channels * batch, lines, pitch), transposed or
// not.
inline Tensor matrices(const Tensor& like, const Sizes& sizes, const void* data, int channels,
                       std::int64_t lines, ScalarType type, bool transposed) {
  const std::int64_t rows = transposed ? sizes.pitch : lines;
  const std::int64_t columns = transposed ? lines : sizes.pitch;
  const std::int64_t along = transposed ? sizes.pitch : 1, across = transposed ? 1 : sizes.pitch;
  return view_of(like, const_cast<void*>(data), {channels * sizes.batch, rows, columns},
                 {sizes.n * sizes.pitch, across, along}, type);
}

// What a plane b must have behind its end, in numbers: cuBLAS is several times slower where sizes
// are odd, so it sees `pitch` lines of b. Those behind the n-th are the next matrix's, or this
// room; their products go to the padding of o.
inline std::int64_t room_behind(const Sizes& sizes) {
  return (sizes.pitch - sizes.n) * sizes.pitch;
}

// out = a * b for 16-bit matrices; fp32 results where `out` is fp32.
inline void multiply_matrices(const Tensor& a, const Tensor& b, const Tensor& out) {
  if (fills_products()) call_operator("aten::zero_", out);
  if (out.scalar_type() == a.scalar_type()) {
    call_overload("aten::bmm", "out", a, b, out);
  } else {
    call_overload("aten::bmm", "dtype_out", a, b, out.scalar_type(), out);
  }
}

// The kernels of the plan.
#if FUSED_OPS_HAS_SM90A
#define FUSED_OPS_RUN(name, problem, chosen, stream) \
  ((chosen).hopper_rows ? name##_sm90a(problem, stream) : name##_sm80(problem, stream))
#else
#define FUSED_OPS_RUN(name, problem, chosen, stream) name##_sm80(problem, stream)
#endif

inline void contract_split(const ContractProblem& contract, bool hopper, CUstream_st* stream) {
#if FUSED_OPS_HAS_SM90A
  if (hopper) return contract_sm90a(contract, stream);
#endif
  static_cast<void>(hopper);
  contract_sm80(contract, stream);
}

// o = a * b^T for the planes that `project` has written: hidden channels `from` on.
inline void contract_planes(const Problem& problem, const Choice& chosen, const Packed& packed,
                            const ProjectProblem& project, int from, int channels, const Tensor& o,
                            CUstream_st* stream) {
  const Sizes& sizes = problem.sizes;
  const bool brain = chosen.mode == Mode::kBFloat16;
  auto* out = static_cast<char*>(o.mutable_data_ptr()) + from * sizes.pairs() * (brain ? 2 : 4);
  if (chosen.mode == Mode::kSplit) {
    const auto* undo = reinterpret_cast<const float*>(
        static_cast<const unsigned char*>(project.packed) + packed.plane_undo);
    ContractProblem contract;
    contract.sizes = sizes;
    contract.channels = channels;
    contract.product = Product::kNT;
    contract.a = {project.a[0], project.a[1], undo + from};
    contract.b = {project.b[0], project.b[1], undo + packed.hidden_blocks * kPieceChannels + from};
    contract.out = reinterpret_cast<float*>(out);
    contract_split(contract, chosen.hopper, stream);
    return;
  }
  const ScalarType type = brain ? ScalarType::BFloat16 : ScalarType::Half;
  multiply_matrices(
      matrices(o, sizes, project.a[0], channels, sizes.n, type, false),
      matrices(o, sizes, project.b[0], channels, sizes.pitch, type, true),
      matrices(o, sizes, out, channels, sizes.n, brain ? type : ScalarType::Float, false));
}

}  // namespace fused_ops::triangular_multiplicative_update
