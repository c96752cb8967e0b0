// SPDX-License-Identifier: Apache-2.0
#include "tensor_matmul/plan.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "tensor_matmul/config.h"
#include "tensor_matmul/split.h"
#include "tensor_matmul/tensor_matmul.h"

namespace fused_ops::tensor_matmul {

int merge_axes(const std::int64_t* sizes, const std::int64_t* strides, std::size_t dims,
               RowAxes* axes) {
  int count = 0;
  std::int64_t size = 1;  // of the axis that is being grown
  std::int64_t stride = 0;
  const auto close = [&] {
    if (count < RowAxes::kMax) {
      axes->size[count] = size;
      axes->stride[count] = stride;
    }
    ++count;
  };
  bool open = false;
  for (std::size_t i = 0; i < dims; ++i) {
    if (sizes[i] == 1) continue;
    if (open && stride == sizes[i] * strides[i]) {
      size *= sizes[i];
    } else {
      if (open) close();
      open = true;
      size = sizes[i];
    }
    stride = strides[i];
  }
  close();  // all axes of size 1, or none: one axis of size 1
  axes->count = count < RowAxes::kMax ? count : RowAxes::kMax;
  return count;
}

namespace {

// cuBLAS is near the hardware's limit for the tensor cores' own dtypes; a parameter stored in
// another costs it one cast.
bool is_fp32(const Problem& problem) {
  return problem.a == DType::kFloat32 && problem.b == DType::kFloat32 &&
         problem.output == DType::kFloat32 && problem.precision == Precision::kIeee;
}

Choice by_cublas() {
  Choice choice;
  choice.plan.path = Path::kCublas;
  return choice;
}

Choice by_kernel(Kernel kernel, const char* name, const std::array<int, 3>& tile, int launches) {
  Choice choice;
  choice.kernel = kernel;
  choice.plan.kernel = name;
  choice.plan.tile = tile;
  choice.plan.launches = launches;
  return choice;
}

// What a block may have. Devices of 8.x and 12.x that are not data-centre ones have less.
int shared_bytes_of(Capability device) {
  if (device.major == 8) return (device.minor == 0 || device.minor == 7 ? 163 : 99) * 1024;
  return (device.major >= 12 ? 99 : 227) * 1024;
}

std::int64_t blocks(const SplitTile& tile, std::int64_t rows, std::int64_t columns) {
  return ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns);
}

// Tiles are counted in int, with room for a step beyond the last.
constexpr std::int64_t kMaxSplitTiles = std::int64_t{1} << 30;

double work(const Problem& p) {  // as double: the product of three sizes can exceed 64 bits
  return static_cast<double>(p.rows) * static_cast<double>(p.inner) *
         static_cast<double>(p.columns);
}

// Of the results that the tiles hold, how many exist.
double filled(const SplitTile& tile, std::int64_t rows, std::int64_t columns) {
  return static_cast<double>(rows) * static_cast<double>(columns) /
         (static_cast<double>(blocks(tile, rows, columns)) * tile.rows * tile.columns);
}

bool is_splittable(const Problem& p) {
  return is_fp32(p) && build_runs_on(p.device) && p.row_axes <= RowAxes::kMax;
}

// The numbers below are from one H200 with cuBLAS beside: products on split operands win from
// 2^29 multiplications on, where their tiles are many enough for the multiprocessors and filled.
constexpr double kLeastSplitWork = 1 << 29;
constexpr std::int64_t kLeastLargeTiles = 96;
constexpr std::int64_t kLeastSmallTiles = 1024;
constexpr std::int64_t kLeastSmallColumns = 96;
constexpr double kLeastFilled = 0.6;
constexpr std::int64_t kProcessors = 132;

// Up to here a product waits for its launch, and ours is the shorter one; beyond, cuBLAS's FP32
// kernel is faster than ours.
constexpr double kMostPlainWork = 1 << 27;

Choice split_forward(Kernel kernel, const char* name, const SplitTile& tile, const Problem& p) {
  constexpr int kLaunches = 4;  // three that prepare B
  Choice choice = by_kernel(kernel, name, tile.size(), kLaunches);
  choice.plan.workspace_bytes = PreparedB::of(p.inner, p.columns).bytes();
  return choice;
}

// Of kHopperTiles, by the time of the multiprocessors' rounds; -1 if neither has tiles enough, and
// filled. A narrow tile takes two thirds of the time of a wide one.
int choose_hopper_tile(const SplitTile (&tiles)[2], std::int64_t least_tiles, std::int64_t rows,
                       std::int64_t columns) {
  constexpr double kTime[] = {1.0, 0.68};
  int best = -1;
  double best_time = 0.0;
  for (const int tile : {kWideHopperTile, kNarrowHopperTile}) {
    const std::int64_t count = blocks(tiles[tile], rows, columns);
    if (count < least_tiles || count > kMaxSplitTiles) continue;
    if (filled(tiles[tile], rows, columns) < kLeastFilled) continue;
    const double time = static_cast<double>(ceil_div(count, kProcessors)) * kTime[tile];
    if (best >= 0 && time >= best_time) continue;
    best = tile;
    best_time = time;
  }
  return best;
}

// kNone where no kernel on split operands is worth its preparation.
Choice choose_split_forward(const Problem& p) {
  Choice choice;
  if (!is_splittable(p) || work(p) < kLeastSplitWork) return choice;
  if (build_runs_sm90a_on(p.device)) {
    const int tile = choose_hopper_tile(kHopperTiles, kLeastLargeTiles, p.rows, p.columns);
    if (tile < 0) return choice;
    choice =
        split_forward(Kernel::kSplitForwardSm90a, "split_forward_sm90a", kHopperTiles[tile], p);
    choice.tile = tile;
    return choice;
  }
  const SplitTile& large = kSplitTiles[kLargeSplitTile];
  const std::int64_t large_tiles = blocks(large, p.rows, p.columns);
  if (large_tiles >= kLeastLargeTiles && large_tiles <= kMaxSplitTiles &&
      filled(large, p.rows, p.columns) >= kLeastFilled &&
      large.shared_bytes <= shared_bytes_of(p.device)) {
    choice = split_forward(Kernel::kSplitForwardSm80, "split_forward_sm80", large, p);
    choice.tile = kLargeSplitTile;
    return choice;
  }
  const SplitTile& small = kSplitTiles[kSmallSplitTile];
  const std::int64_t small_tiles = blocks(small, p.rows, p.columns);
  if (small_tiles >= kLeastSmallTiles && small_tiles <= kMaxSplitTiles &&
      p.columns >= kLeastSmallColumns && filled(small, p.rows, p.columns) >= kLeastFilled) {
    choice = split_forward(Kernel::kSplitForwardSm80, "split_forward_sm80", small, p);
    choice.tile = kSmallSplitTile;
  }
  return choice;
}

}  // namespace

Choice choose_forward(const Problem& problem) {
  if (!is_fp32(problem)) return by_cublas();
  const Choice split = choose_split_forward(problem);
  if (split.kernel != Kernel::kNone) return split;
  if (work(problem) > kMostPlainWork && build_runs_on(problem.device)) return by_cublas();
  const int tile = choose_tile(problem.rows, problem.columns);
  const bool fits_grid = blocks(kTiles[tile], problem.rows, problem.columns) <= kMaxBlocks;
  const bool fits_axes = problem.row_axes <= RowAxes::kMax;
  if (build_runs_on(problem.device) && fits_grid && fits_axes) {
    const bool empty = problem.rows == 0 || problem.columns == 0;
    Choice choice =
        by_kernel(Kernel::kForwardSm80, "forward_sm80", kTiles[tile].size(), empty ? 0 : 1);
    choice.tile = tile;
    return choice;
  }

  Choice choice;
  Plan& plan = choice.plan;
  plan.path = Path::kComposition;
  if (!build_runs_on(problem.device)) plan.reasons.push_back(build_reason(problem.device));
  if (!fits_grid) {
    plan.reasons.push_back(concat("the kernel takes at most ", kMaxBlocks, " tiles of ",
                                  kTiles[tile].rows, "x", kTiles[tile].columns, ", the result has ",
                                  blocks(kTiles[tile], problem.rows, problem.columns)));
  }
  if (!fits_axes) {
    plan.reasons.push_back(concat("the kernel walks at most ", RowAxes::kMax,
                                  " leading axes of a that no common stride joins, a has ",
                                  problem.row_axes));
  }
  return choice;
}

Choice choose_reduce(const Problem& problem) {
  // Everything smaller or stranger is cuBLAS's, which sums over rows well.
  if (!is_splittable(problem) || work(problem) < kLeastSplitWork) return by_cublas();
  const bool hopper = build_runs_sm90a_on(problem.device);
  const auto fits = [&](const SplitTile& tile) {
    const std::int64_t tiles = blocks(tile, problem.inner, problem.columns);
    return tiles >= 1 && tiles <= kMaxSplitTiles &&
           filled(tile, problem.inner, problem.columns) >= kLeastFilled &&
           tile.shared_bytes <= shared_bytes_of(problem.device);
  };
  // Slabs fill the multiprocessors, so only how well the tiles are filled counts.
  const int index = fits(kHopperReduceTiles[kWideHopperTile]) ? kWideHopperTile : kNarrowHopperTile;
  const SplitTile& tile = hopper ? kHopperReduceTiles[index] : kReduceTileSm80;
  if (!fits(tile)) return by_cublas();
  // As many slabs as give each multiprocessor of an H200 a block, on every device: so the order of
  // the sum, and with it the last digit, is the same everywhere.
  const std::int64_t tiles = blocks(tile, problem.inner, problem.columns);
  const std::int64_t chunks = ceil_div(problem.rows, PreparedB::kInner);
  const std::int64_t slabs = std::max<std::int64_t>(1, std::min(kProcessors / tiles, chunks));
  Choice choice = by_kernel(hopper ? Kernel::kSplitReduceSm90a : Kernel::kSplitReduceSm80,
                            hopper ? "split_reduce_sm90a" : "split_reduce_sm80", tile.size(),
                            slabs > 1 ? 2 : 1);
  choice.tile = hopper ? index : 0;
  choice.slabs = static_cast<int>(slabs);
  if (slabs > 1) {
    choice.plan.workspace_bytes = slabs * problem.inner * problem.columns * 4;
  }
  return choice;
}

namespace {

Plan answer(const Query& query) {
  const auto& a = query.shape("a", 1);
  const auto& b = query.shape("b", 2);
  FO_CHECK_VALUE(b.size() == 2 && b[0] == a.back(), "tensor_matmul: b must have shape (", a.back(),
                 ", K), got ", shape_text(b));
  if (!query.device) return composition("CPU tensors");

  Problem problem;
  problem.rows = 1;
  for (std::size_t i = 0; i + 1 < a.size(); ++i) problem.rows *= a[i];
  problem.inner = b[0];
  problem.columns = b[1];
  RowAxes axes;
  problem.row_axes = merge_axes(a.data(), query.strides_of("a").data(), a.size() - 1, &axes);
  problem.a = problem.b = problem.output = query.dtype;
  problem.precision = query.precision;
  problem.device = *query.device;
  if (!query.backward) return choose_forward(problem).plan;
  // The gradient of A is a forward with B's transpose. Whichever has a kernel is told, that of B
  // first; the launches are those of our kernels.
  Plan reduce = choose_reduce(problem).plan;
  std::swap(problem.inner, problem.columns);
  problem.row_axes = 1;
  Plan forward = choose_forward(problem).plan;
  Plan& told = reduce.path == Path::kKernel ? reduce : forward;
  if (reduce.path == Path::kKernel && forward.path == Path::kKernel) {
    reduce.kernel = concat(reduce.kernel, " and ", forward.kernel);
    reduce.launches += forward.launches;
    reduce.workspace_bytes = std::max(reduce.workspace_bytes, forward.workspace_bytes);
  }
  return told;
}

const Registration registration("tensor_matmul", &answer);

}  // namespace
}  // namespace fused_ops::tensor_matmul
