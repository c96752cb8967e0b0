// SPDX-License-Identifier: Apache-2.0
// The weights as the kernels for large problems read them, in one workspace: products' operands in
// the order of shared memory, and fp32 vectors. Packed at every call, for weights may change.
//
// The weight and bias of a LayerNorm are folded into the linear that reads it: the kernels multiply
// numbers that are normalised and nothing else. A line of an operand is 64 numbers of the inner
// axis as 128 bytes, pieces of 16 bytes in the order piece ^ (line % 8). In the mode kSplit the
// lines of the parts lo follow those of the parts hi.
#pragma once

#include <cstdint>

#include "triangular_multiplicative_update/triangular_multiplicative_update.h"

namespace fused_ops::triangular_multiplicative_update {

constexpr int kInner = 64;       // numbers of the inner axis that lie in shared memory together
constexpr int kLineBytes = 128;  // of as many 16-bit numbers
constexpr int kPieceChannels = 64;
constexpr int kMostChannels = 512;

// Lines of the four input projections, 128 for 64 channels: eight of the gate, eight of the
// projection, and so on, so that one thread holds both of a channel.
constexpr int kProjectLines = 2 * kPieceChannels;

// Blocks that look for the largest mask value.
constexpr int kMaskBlocks = 64;

// Normalised numbers are at most sqrt(channels); scaled by 2^9 they stay in fp16's range and small
// ones keep their digits.
constexpr int kNormalisedExponent = 9;
// Planes of scaled numbers: the bound of a channel is brought to [2^6, 2^7), which leaves masks of
// magnitude 256 room; larger ones take back as much.
constexpr int kPlaneExponent = 6;
constexpr float kMaskRoom = 256.0f;

constexpr int parts(Mode mode) {
  return mode == Mode::kSplit ? 2 : 1;
}

constexpr bool is_scaled(Mode mode) {
  return mode == Mode::kSplit || mode == Mode::kTf32;
}

constexpr int rounded_up(int count, int multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// Where everything is, in bytes from the beginning.
struct Packed {
  int channel_blocks = 0;  // of 64
  int hidden_blocks = 0;
  // Operands: [plane a, b][block of 64 channels][block of the inner axis][part][128 lines];
  // [block of 64 channels][block of the inner axis][part][64 lines].
  std::int64_t project = 0;
  std::int64_t gate = 0;
  std::int64_t out = 0;
  // fp32 vectors, as long as there are lines. A product times `undo` plus `bias` is the linear's
  // result; undo is 1 unless numbers are scaled.
  std::int64_t project_bias = 0;
  std::int64_t project_undo = 0;
  std::int64_t gate_bias = 0;
  std::int64_t gate_undo = 0;
  std::int64_t out_bias = 0;
  std::int64_t out_undo = 0;
  // Of the output projection's lines, in bf16: the sums of their numbers, as they are packed.
  std::int64_t out_sum = 0;
  // [plane a, b][hidden, rounded up to 64]: what a number is multiplied by before it is stored in
  // the plane, for masks of at most kMaskRoom; and the way back, whatever the mask.
  std::int64_t plane_scale = 0;
  std::int64_t plane_undo = 0;
  std::int64_t mask_largest = 0;  // [kMaskBlocks]
  std::int64_t bytes = 0;

  static constexpr Packed of(const Sizes& sizes, Mode mode) {
    Packed p;
    p.channel_blocks = rounded_up(sizes.channels, kInner) / kInner;
    p.hidden_blocks = rounded_up(sizes.hidden, kInner) / kInner;
    std::int64_t at = 0;
    const auto take = [&at](std::int64_t bytes) {
      const std::int64_t begin = at;
      at += (bytes + 1023) / 1024 * 1024;
      return begin;
    };
    const std::int64_t line = kLineBytes * parts(mode);
    const std::int64_t project_lines = std::int64_t{2} * p.hidden_blocks * kProjectLines;
    const std::int64_t out_lines = std::int64_t{p.channel_blocks} * kPieceChannels;
    p.project = take(project_lines * p.channel_blocks * line);
    p.gate = take(out_lines * p.channel_blocks * line);
    p.out = take(out_lines * p.hidden_blocks * line);
    p.project_bias = take(project_lines * 4);
    p.project_undo = take(project_lines * 4);
    p.gate_bias = take(out_lines * 4);
    p.gate_undo = take(out_lines * 4);
    p.out_bias = take(out_lines * 4);
    p.out_undo = take(out_lines * 4);
    p.out_sum = take(out_lines * 4);
    p.plane_scale = take(std::int64_t{2} * p.hidden_blocks * kPieceChannels * 4);
    p.plane_undo = take(std::int64_t{2} * p.hidden_blocks * kPieceChannels * 4);
    p.mask_largest = take(kMaskBlocks * 4);
    p.bytes = at;
    return p;
  }
};

}  // namespace fused_ops::triangular_multiplicative_update
