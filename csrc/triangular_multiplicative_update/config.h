// SPDX-License-Identifier: Apache-2.0
// The tiles of the kernels for large problems, and which device can hold them.
#pragma once

#include <cstdint>

#include "common/build_info.h"

namespace fused_ops::triangular_multiplicative_update {

// A block's rows (pairs), and the most channels of pair and hidden it takes: its threads hold 64
// numbers of a row operand each, so rows times channels is 16384 at most. (64 x 512 was no faster
// than 32 x 512.)
struct Tile {
  int rows;
  int channels;
  int shared_bytes;        // the most that one of its kernels takes, with operands of one part
  int shared_bytes_split;  // and of two
};

constexpr Tile kTiles[] = {
    // Registers and rates: docs/ops/triangular_multiplicative_update.md.
    {128, 128, 121 * 1024, 187 * 1024},
    {64, 256, 102 * 1024, 184 * 1024},
    {32, 512, 98 * 1024, 184 * 1024},
    // For devices with little shared memory, and for problems whose blocks of 128 rows would not
    // fill a GPU.
    {32, 128, 72 * 1024, 98 * 1024},
};
constexpr int kTileCount = 4;
constexpr int kSmallRowsTile = 3;

// In the place of 32 x 512, forward, in operands of one part: half as many blocks read all weights,
// and on Hopper a multiprocessor still has two of them. For hidden channels up to kTallHidden.
constexpr Tile kTallTile = {64, 384, 107 * 1024, 0};
constexpr int kTallHidden = 128;
constexpr int kTallTileIndex = 4;

// Two blocks for each multiprocessor of an H100 or H200; fewer blocks than that leave some idle.
constexpr std::int64_t kFewBlocks = 264;

// Fewer pairs take a few microseconds, in whatever arithmetic.
constexpr std::int64_t kFewPairs = 1 << 13;

// What a block may have, by compute capability.
constexpr int shared_limit(Capability device) {
  if (device.major == 8 && (device.minor == 0 || device.minor == 7)) return 163 * 1024;
  return device.major == 9 || device.major == 10 ? 227 * 1024 : 99 * 1024;
}

// The smallest whose channels fit and whose shared memory the device has; -1: none.
constexpr int choose_tile(int channels, bool split, std::int64_t pairs, Capability device) {
  const auto fits = [&](int tile) {
    const int bytes = split ? kTiles[tile].shared_bytes_split : kTiles[tile].shared_bytes;
    return channels <= kTiles[tile].channels && bytes <= shared_limit(device);
  };
  const bool few = pairs < kFewBlocks * kTiles[0].rows;
  if (few && fits(kSmallRowsTile)) return kSmallRowsTile;
  for (int tile = 0; tile < kTileCount; ++tile) {
    if (fits(tile)) return tile;
  }
  return -1;
}

// That of the forward's projections and output.
constexpr int choose_forward_tile(int tile, int channels, int hidden, bool split,
                                  Capability device) {
  const bool tall = tile == 2 && channels <= kTallTile.channels && hidden <= kTallHidden &&
                    !split && 2 * kTallTile.shared_bytes <= shared_limit(device);
  return tall ? kTallTileIndex : tile;
}

}  // namespace fused_ops::triangular_multiplicative_update
