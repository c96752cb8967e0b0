// SPDX-License-Identifier: Apache-2.0
// Packs the weights (packed.h): a warp takes a line at a time.
#pragma once

#include "common/cuda/sm80/split.cuh"
#include "triangular_multiplicative_update/access.cuh"
#include "triangular_multiplicative_update/packed.h"

namespace fused_ops::triangular_multiplicative_update {

constexpr int kPackThreads = 256;
constexpr int kPackWarps = kPackThreads / 32;

struct PackParams {
  Sizes sizes;
  Mode mode = Mode::kBFloat16;
  Weights weights;
  Mask mask;
  bool needs_largest = false;  // of the mask: its type can hold more than kMaskRoom
  Packed packed;
  unsigned char* workspace = nullptr;
};

// One line: weight[row][...], with the norm that precedes it.
struct PackLine {
  Linear linear;
  std::int64_t row = 0;  // beyond `rows`: a line of zeros
  std::int64_t rows = 0;
  int inner = 0;
  bool folds = false;
  Stored norm_weight, norm_bias;
  unsigned char* lines = nullptr;  // of the first block of the inner axis, line 0 of the operand
  int line = 0;
  std::int64_t block_stride = 0;  // to the next block of the inner axis, in bytes
  std::int64_t part_stride = 0;
  float* bias = nullptr;
  float* undo = nullptr;
  int operand_exponent = 0;      // of the other operand, which is undone here too
  float* plane_scale = nullptr;  // null, or where the scale of the channel's plane goes
  float* line_sum = nullptr;     // null, or where the sum of the bf16 numbers of the line goes
};

class LinePacker {
 public:
  __device__ __forceinline__ LinePacker(Mode mode, int lane) : mode_(mode), lane_(lane) {}

  // A lane has eight numbers of the line at a time; all loads are under way together.
  __device__ __forceinline__ void pack(const PackLine& p) const {
    float x[kEights][8];
    float sum = 0.0f, squares = 0.0f, largest = 0.0f;
#pragma unroll
    for (int m = 0; m < kEights; ++m) {
      const int k = (lane_ + 32 * m) * 8;
      const int count = p.row < p.rows ? p.inner - k : 0;
      load_eight(p.linear.weight, p.row * p.inner + k, count, x[m]);
      if (!p.folds) continue;
      float weight[8], bias[8];
      load_eight(p.norm_weight, k, count, weight);
      load_eight(p.norm_bias, k, count, bias);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum += x[m][i] * bias[i];
        x[m][i] *= weight[i];
      }
    }
#pragma unroll
    for (int m = 0; m < kEights; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        squares += x[m][i] * x[m][i];
        largest = fmaxf(largest, fabsf(x[m][i]));
      }
    }
    sum = warp_sum(sum);
    squares = warp_sum(squares);
    largest = warp_max(largest);
    const float bias = p.row < p.rows ? load_or(p.linear.bias, p.row, 0.0f) + sum : 0.0f;
    const int exponent = is_scaled(mode_) ? exponent_to(largest, 9) : 0;
    if (lane_ == 0) {
      *p.bias = bias;
      *p.undo = is_scaled(mode_) ? two_to(-exponent - p.operand_exponent) : 1.0f;
      if (p.plane_scale && is_scaled(mode_)) {
        // |normalised| <= sqrt(inner) as a vector, and a gate is at most 1.
        const float bound = sqrtf(static_cast<float>(p.inner) * squares) + fabsf(bias);
        *p.plane_scale = two_to(exponent_to(bound, kPlaneExponent));
      }
    }
    const float scale = two_to(exponent);
    float packed_sum = 0.0f;
#pragma unroll
    for (int m = 0; m < kEights; ++m) {
      const int piece = lane_ + 32 * m;
      if (piece >= rounded_up(p.inner, kInner) / 8) continue;
      std::uint32_t hi[4], lo[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = x[m][2 * i] * scale, high = x[m][2 * i + 1] * scale;
        lo[i] = 0;
        if (mode_ == Mode::kBFloat16) {
          hi[i] = sm80::pack_bf16(low, high);
          const float2 rounded = sm80::unpack_bf16(hi[i]);
          packed_sum += rounded.x + rounded.y;
        } else {
          sm80::split_pair(low, high, &hi[i], &lo[i]);
        }
      }
      unsigned char* to =
          p.lines + piece / 8 * p.block_stride + sm80::split_offset(p.line, piece % 8);
      *reinterpret_cast<uint4*>(to) = make_uint4(hi[0], hi[1], hi[2], hi[3]);
      if (mode_ == Mode::kSplit) {
        *reinterpret_cast<uint4*>(to + p.part_stride) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
      }
    }
    packed_sum = warp_sum(packed_sum);
    if (lane_ == 0 && p.line_sum) *p.line_sum = packed_sum;
  }

 private:
  static constexpr int kEights = kMostChannels / 8 / 32;

  // `count` numbers from `index` on, or eight if there are more; zeros for the others.
  static __device__ __forceinline__ void load_eight(const Stored& stored, std::int64_t index,
                                                    int count, float (&x)[8]) {
    if (count <= 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = 0.0f;
    } else if (stored.type == DType::kFloat32) {
      const auto* from = static_cast<const float*>(stored.data) + index;
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = i < count ? from[i] : 0.0f;
    } else {
      const auto* from = static_cast<const std::uint16_t*>(stored.data) + index;
      std::uint32_t bits[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) bits[i] = i < count ? from[i] : 0u;
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = from_bits(bits[i], stored.type);
    }
  }

  Mode mode_;
  int lane_;
};

static_assert(kLineBytes == sm80::kSplitLineBytes);

// Lines of the projections first, then those of the output gate, then of the output projection.
__device__ __forceinline__ PackLine find_line(const PackParams& params, int line) {
  const Packed& packed = params.packed;
  const Sizes& sizes = params.sizes;
  const Weights& w = params.weights;
  const auto floats = [&](std::int64_t offset) {
    return reinterpret_cast<float*>(params.workspace + offset);
  };
  const int project_lines = 2 * packed.hidden_blocks * kProjectLines;
  const int out_lines = packed.channel_blocks * kPieceChannels;
  PackLine p;
  if (line < project_lines) {
    const int piece = line / kProjectLines;
    const bool second = piece >= packed.hidden_blocks;
    const int at = line % kProjectLines;
    const bool is_gate = at / 8 % 2 == 0;
    p.row = piece % packed.hidden_blocks * kPieceChannels + at / 16 * 8 + at % 8;
    p.rows = sizes.hidden;
    p.inner = sizes.channels;
    p.linear = second ? (is_gate ? w.gate_b : w.proj_b) : (is_gate ? w.gate_a : w.proj_a);
    p.folds = true;
    p.norm_weight = w.norm_in_weight;
    p.norm_bias = w.norm_in_bias;
    p.part_stride = kProjectLines * kLineBytes;
    p.block_stride = p.part_stride * parts(params.mode);
    p.lines = params.workspace + packed.project + piece * packed.channel_blocks * p.block_stride;
    p.line = at;
    p.bias = floats(packed.project_bias) + line;
    p.undo = floats(packed.project_undo) + line;
    p.operand_exponent = kNormalisedExponent;
    if (!is_gate) {
      p.plane_scale =
          floats(packed.plane_scale) + (second ? packed.hidden_blocks * kPieceChannels : 0) + p.row;
    }
    return p;
  }
  line -= project_lines;
  const bool is_gate = line < out_lines;
  if (!is_gate) line -= out_lines;
  p.row = line;
  p.rows = sizes.channels;
  p.inner = is_gate ? sizes.channels : sizes.hidden;
  p.linear = is_gate ? w.out_gate : w.out_proj;
  p.folds = !is_gate || w.gate_normalized;
  p.norm_weight = is_gate ? w.norm_in_weight : w.norm_out_weight;
  p.norm_bias = is_gate ? w.norm_in_bias : w.norm_out_bias;
  p.part_stride = kPieceChannels * kLineBytes;
  p.block_stride = p.part_stride * parts(params.mode);
  p.lines = params.workspace + (is_gate ? packed.gate : packed.out) +
            line / kPieceChannels * (is_gate ? packed.channel_blocks : packed.hidden_blocks) *
                p.block_stride;
  p.line = line % kPieceChannels;
  p.bias = floats(is_gate ? packed.gate_bias : packed.out_bias) + line;
  p.undo = floats(is_gate ? packed.gate_undo : packed.out_undo) + line;
  if (!is_gate && params.mode == Mode::kBFloat16) p.line_sum = floats(packed.out_sum) + line;
  // Rows of the raw pair have scales of their own.
  p.operand_exponent = p.folds ? kNormalisedExponent : 0;
  return p;
}

struct PackShared {
  float largest[kPackWarps];
};

// The largest finite magnitude of a share of the mask.
__device__ __forceinline__ void find_largest(const PackParams& params, int share, int thread) {
  auto& shared = shared_memory<PackShared>();
  float largest = 0.0f;
  const Sizes& s = params.sizes;
  const std::int64_t batches = params.mask.batch_stride == 0 ? 1 : s.batch;
  for (std::int64_t line = share; line < batches * s.n; line += kMaskBlocks) {
    for (std::int64_t j = thread; j < s.n; j += kPackThreads) {
      const float x = fabsf(load_mask(params.mask, line / s.n, line % s.n, j));
      if (x < __uint_as_float(0x7f800000u)) largest = fmaxf(largest, x);
    }
  }
  largest = warp_max(largest);
  if (thread % 32 == 0) shared.largest[thread / 32] = largest;
  __syncthreads();
  if (thread == 0) {
    for (int i = 1; i < kPackWarps; ++i) largest = fmaxf(largest, shared.largest[i]);
    reinterpret_cast<float*>(params.workspace + params.packed.mask_largest)[share] = largest;
  }
}

constexpr int pack_lines(const Packed& packed) {
  return 2 * packed.hidden_blocks * kProjectLines + 2 * packed.channel_blocks * kPieceChannels;
}

// The first blocks take the lines, the last kMaskBlocks the mask, if it is needed.
__global__ void __launch_bounds__(kPackThreads, 1)
    pack_kernel(const __grid_constant__ PackParams params) {
  sm80::griddepcontrol_launch_dependents();
  const int thread = thread_index();
  const int line_blocks = pack_lines(params.packed) / kPackWarps;
  const int block = static_cast<int>(blockIdx.x);
  if (block >= line_blocks) {
    find_largest(params, block - line_blocks, thread);
    return;
  }
  LinePacker(params.mode, thread % 32).pack(find_line(params, block * kPackWarps + thread / 32));
}

}  // namespace fused_ops::triangular_multiplicative_update
