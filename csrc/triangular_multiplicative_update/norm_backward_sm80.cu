// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include "common/launch.h"
#include "triangular_multiplicative_update/norm_in_backward_sm80.cuh"
#include "triangular_multiplicative_update/norm_out_backward_sm80.cuh"

namespace fused_ops::triangular_multiplicative_update {
namespace {

bool aligned(const void* data, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0;
}

template <class Kernel>
void launch_norm_out(const NormOutBackwardProblem& problem, CUstream_st* stream) {
  NormOutBackwardParams params;
  params.problem = problem;
  params.pairs = problem.sizes.pairs();
  params.tiles = static_cast<unsigned>(ceil_div(problem.count, Kernel::kTile));
  params.grad_vector =
      aligned(problem.grad, 16) && problem.sizes.hidden % Kernel::kPieceNumbers == 0;
  // A block walks over tiles and keeps the largest numbers of its channels; several times as many
  // as there is room for at once, so that all end at about the same time.
  const auto blocks = static_cast<unsigned>(multiprocessors() * (4096 / Kernel::kThreads));
  launch("triangular_multiplicative_update: launching norm_out_backward",
         norm_out_backward_kernel<Kernel>, std::min(params.tiles, blocks), Kernel::kThreads,
         sizeof(typename Kernel::Shared), stream, params);
}

template <DType o_type, DType grad_type>
void choose_norm_out(const NormOutBackwardProblem& problem, CUstream_st* stream) {
  const int hidden = problem.sizes.hidden;
  if (hidden == 128) {
    launch_norm_out<NormOutBackward<o_type, grad_type, 16, 8, true>>(problem, stream);
  } else if (hidden == 64) {
    launch_norm_out<NormOutBackward<o_type, grad_type, 16, 4, true>>(problem, stream);
  } else if (hidden <= 128) {
    launch_norm_out<NormOutBackward<o_type, grad_type, 16, 8, false>>(problem, stream);
  } else {
    launch_norm_out<NormOutBackward<o_type, grad_type, 32, 16, false>>(problem, stream);
  }
}

template <DType pair_type, DType grad_type, bool kLong>
void launch_norm_in(const NormInBackwardProblem& problem, CUstream_st* stream) {
  using Kernel = NormInBackward<pair_type, grad_type, kLong>;
  const Sizes& sizes = problem.sizes;
  NormInBackwardParams params;
  params.problem = problem;
  params.first_line = problem.first_pair / sizes.pitch;
  params.lines = problem.count / sizes.pitch;
  params.lanes = Kernel::lanes(sizes.channels);
  params.tile_lines = problem.outgoing ? 1 : 8;
  params.tiles_across =
      static_cast<unsigned>(ceil_div(sizes.n, Kernel::tile(params.lanes) / params.tile_lines));
  constexpr int kPiece = Kernel::kPiece;
  const Pairs& pair = problem.pair;
  params.vector = sizes.channels % kPiece == 0 && pair.batch_stride % kPiece == 0 &&
                  pair.i_stride % kPiece == 0 && pair.j_stride % kPiece == 0 &&
                  aligned(pair.data, kPiece * bytes_of(pair_type)) &&
                  aligned(problem.grad, kPiece * bytes_of(grad_type)) &&
                  aligned(problem.gate_grad, kPiece * bytes_of(grad_type)) &&
                  aligned(problem.out, 16);
  launch("triangular_multiplicative_update: launching norm_in_backward",
         norm_in_backward_kernel<pair_type, grad_type, kLong>,
         static_cast<unsigned>(ceil_div(params.lines, params.tile_lines) * params.tiles_across),
         kNormInThreads, 0, stream, params);
}

template <DType pair_type, DType grad_type>
void choose_norm_in(const NormInBackwardProblem& problem, CUstream_st* stream) {
  if (problem.sizes.channels > 32 * NormInBackward<pair_type, grad_type, false>::kPiece) {
    launch_norm_in<pair_type, grad_type, true>(problem, stream);
  } else {
    launch_norm_in<pair_type, grad_type, false>(problem, stream);
  }
}

template <DType pair_type>
void choose_norm_in(const NormInBackwardProblem& problem, CUstream_st* stream) {
  if (problem.grad_type == DType::kFloat32) {
    choose_norm_in<pair_type, DType::kFloat32>(problem, stream);
  } else if (problem.grad_type == DType::kBFloat16) {
    choose_norm_in<pair_type, DType::kBFloat16>(problem, stream);
  } else {
    choose_norm_in<pair_type, DType::kFloat16>(problem, stream);
  }
}

}  // namespace

void norm_out_backward_sm80(const NormOutBackwardProblem& problem, CUstream_st* stream) {
  if (problem.count == 0) return;
  if (problem.mode == Mode::kBFloat16) {
    choose_norm_out<DType::kBFloat16, DType::kBFloat16>(problem, stream);
  } else if (problem.mode == Mode::kFloat16) {
    choose_norm_out<DType::kFloat32, DType::kFloat16>(problem, stream);
  } else {
    choose_norm_out<DType::kFloat32, DType::kFloat32>(problem, stream);
  }
}

void norm_in_backward_sm80(const NormInBackwardProblem& problem, CUstream_st* stream) {
  if (problem.count == 0) return;
  if (problem.pair.type == DType::kFloat32) {
    choose_norm_in<DType::kFloat32>(problem, stream);
  } else if (problem.pair.type == DType::kBFloat16) {
    choose_norm_in<DType::kBFloat16>(problem, stream);
  } else {
    choose_norm_in<DType::kFloat16>(problem, stream);
  }
}

}  // namespace fused_ops::triangular_multiplicative_update
