// SPDX-License-Identifier: Apache-2.0
// From a mode and a tile, numbers, to a kernel, which has them as types.
#pragma once

#include "common/launch.h"
#include "common/sanitizers.h"
#include "triangular_multiplicative_update/large.h"

namespace fused_ops::triangular_multiplicative_update {

template <Mode mode>
struct ModeOf {
  static constexpr Mode kMode = mode;
};
template <int tile>
struct TileOf {
  static constexpr int kIndex = tile;
};

template <class Function>
void with_mode(Mode mode, Function function) {
  switch (mode) {
    case Mode::kBFloat16:
      return function(ModeOf<Mode::kBFloat16>());
    case Mode::kFloat16:
      return function(ModeOf<Mode::kFloat16>());
    case Mode::kTf32:
      return function(ModeOf<Mode::kTf32>());
    case Mode::kSplit:
      return function(ModeOf<Mode::kSplit>());
  }
}

template <class Function>
void with_tile(int tile, Function function) {
  static_assert(kTileCount == 4);
  switch (tile) {
    case 0:
      return function(TileOf<0>());
    case 1:
      return function(TileOf<1>());
    case 2:
      return function(TileOf<2>());
    case 3:
      return function(TileOf<3>());
  }
}

// Whether there is a kernel: the emulation compiles a few of them, each mode and each tile once at
// least, for the time it takes.
constexpr bool is_compiled(Mode mode, int tile) {
#ifdef FUSED_OPS_FEW_KERNELS
  constexpr int kOf[4][2] = {{0, 1}, {3, 3}, {0, 3}, {0, 2}};  // by mode
  return kOf[static_cast<int>(mode)][0] == tile || kOf[static_cast<int>(mode)][1] == tile;
#else
  return static_cast<int>(mode) < 4 && tile < kTileCount;
#endif
}

// Calls `function` with both.
template <class Function>
void with_kernel(Mode mode, int tile, Function function) {
  with_mode(mode, [&](auto mode_of) {
    with_tile(tile, [&](auto tile_of) {
      constexpr bool kCompiled = is_compiled(decltype(mode_of)::kMode, decltype(tile_of)::kIndex);
      FO_CHECK_RUNTIME(kCompiled, "triangular_multiplicative_update: tile ", tile,
                       " must be compiled for the mode");
      if constexpr (kCompiled) function(mode_of, tile_of);
    });
  });
}

// The same for the tall tile, which the mode kSplit has not.
template <class Function>
void with_tall_kernel(Mode mode, Function function) {
  with_mode(mode, [&](auto mode_of) {
#ifdef FUSED_OPS_FEW_KERNELS
    constexpr bool kCompiled = decltype(mode_of)::kMode == Mode::kBFloat16;
#else
    constexpr bool kCompiled = decltype(mode_of)::kMode != Mode::kSplit;
#endif
    FO_CHECK_RUNTIME(
        kCompiled, "triangular_multiplicative_update: the tall tile must be compiled for the mode");
    if constexpr (kCompiled) function(mode_of);
  });
}

}  // namespace fused_ops::triangular_multiplicative_update
