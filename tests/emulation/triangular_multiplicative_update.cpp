// SPDX-License-Identifier: Apache-2.0
// The kernels of the triangular multiplicative update for large problems, through their launchers.
#define FUSED_OPS_FEW_KERNELS
#include "emulation/driver.h"
#include "triangular_multiplicative_update/output_backward_sm80.cu"
#include "triangular_multiplicative_update/output_sm80.cu"
#include "triangular_multiplicative_update/output_sm90a.cu"
#include "triangular_multiplicative_update/pack_sm80.cu"
#include "triangular_multiplicative_update/project_backward_sm80.cu"
#include "triangular_multiplicative_update/project_sm80.cu"
#include "triangular_multiplicative_update/project_sm90a.cu"

namespace {

using emulation::Request;
using namespace fused_ops;
using namespace fused_ops::triangular_multiplicative_update;

DType type_named(const Request& request, const std::string& name) {
  return static_cast<DType>(request.integer(name, 0));
}

Sizes sizes_of(const Request& request) {
  Sizes s;
  s.batch = request.integer("batch");
  s.n = request.integer("n");
  s.pitch = (s.n + kPlaces - 1) / kPlaces * kPlaces;
  s.channels = static_cast<int>(request.integer("channels"));
  s.hidden = static_cast<int>(request.integer("hidden"));
  return s;
}

// Contiguous but for `pair_row`, the distance of rows.
Pairs pairs_of(const Request& request, const std::string& name) {
  Pairs p;
  p.type = type_named(request, name + "_type");
  p.data = request.input<char>(name);
  const std::int64_t n = request.integer("n");
  p.j_stride = request.integer(name + "_row", request.integer("channels"));
  p.i_stride = n * p.j_stride;
  p.batch_stride = n * p.i_stride;
  return p;
}

Mask mask_of(const Request& request) {
  Mask m;
  if (!request.integer("masked", 0)) return m;
  m.data = request.input<char>("mask");
  m.type = static_cast<MaskType>(request.integer("mask_type"));
  const std::int64_t n = request.integer("n");
  m.j_stride = 1;
  m.i_stride = n;
  m.batch_stride = n * n;
  return m;
}

Weights weights_of(const Request& request) {
  Weights w;
  const DType type = type_named(request, "weight_type");
  const bool biases = request.integer("biases", 1);
  const auto stored = [&](const std::string& name) {
    return Stored{request.input<char>(name), type};
  };
  const auto linear = [&](const std::string& name) {
    return Linear{stored(name + "_weight"), biases ? stored(name + "_bias") : Stored{}};
  };
  w.norm_in_weight = stored("layer_norm_in_weight");
  w.norm_in_bias = stored("layer_norm_in_bias");
  w.norm_out_weight = stored("layer_norm_out_weight");
  w.norm_out_bias = stored("layer_norm_out_bias");
  w.proj_a = linear("proj_a");
  w.gate_a = linear("gate_a");
  w.proj_b = linear("proj_b");
  w.gate_b = linear("gate_b");
  w.out_proj = linear("out_proj");
  w.out_gate = linear("out_gate");
  w.eps = 1e-5f;
  w.gate_normalized = request.integer("gate_normalized", 0);
  return w;
}

struct Common {
  Sizes sizes;
  Mode mode;
  int tile;
  emulation::Buffer workspace;

  explicit Common(const Request& request)
      : sizes(sizes_of(request)),
        mode(static_cast<Mode>(request.integer("mode"))),
        tile(static_cast<int>(request.integer("tile"))),
        workspace(static_cast<std::size_t>(Packed::of(sizes, mode).bytes)) {
    emulation::poison(workspace.data(), workspace.bytes());
    PackProblem pack;
    pack.sizes = sizes;
    pack.mode = mode;
    pack.weights = weights_of(request);
    pack.mask = mask_of(request);
    pack.workspace = workspace.data();
    pack_sm80(pack, nullptr);
  }

  // What the projections would have written.
  void set_plane_undo(float value) const {
    const Packed packed = Packed::of(sizes, mode);
    auto* undo = reinterpret_cast<float*>(workspace.data() + packed.plane_undo);
    for (int i = 0; i < 2 * packed.hidden_blocks * kPieceChannels; ++i) undo[i] = value;
  }
};

// Nobody has written the padding of a plane of gradients: who reads it is reported. In bf16 the
// products write it, and blocks that stay read it.
class ForbiddenPadding {
 public:
  ForbiddenPadding(const Sizes& sizes, int size, const void* plane, bool forbidden)
      : sizes_(sizes),
        size_(size),
        plane_(static_cast<char*>(const_cast<void*>(plane))),
        forbidden_(forbidden) {
    if (forbidden_) each(emulation::forbid);
  }
  ~ForbiddenPadding() {
    if (forbidden_) each(emulation::allow);
  }
  ForbiddenPadding(const ForbiddenPadding&) = delete;
  ForbiddenPadding& operator=(const ForbiddenPadding&) = delete;

 private:
  void each(void (*call)(void*, int)) const {
    char* line = plane_;
    const int padding = static_cast<int>(sizes_.pitch - sizes_.n) * size_;
    for (std::int64_t i = 0; i < sizes_.hidden * sizes_.batch * sizes_.n; ++i) {
      if (padding > 0) call(line + sizes_.n * size_, padding);
      line += sizes_.pitch * size_;
    }
  }

  Sizes sizes_;
  int size_;
  char* plane_;
  bool forbidden_;
};

const emulation::Kernel project("project", [](Request& request) {
  const Common c(request);
  ProjectProblem p;
  p.sizes = c.sizes;
  p.mode = c.mode;
  p.outgoing = request.integer("outgoing");
  p.eps = 1e-5f;
  p.tile = c.tile;
  p.pair = pairs_of(request, "pair");
  p.mask = mask_of(request);
  p.packed = c.workspace.data();
  const Packed packed = Packed::of(c.sizes, c.mode);
  p.first_block = static_cast<int>(request.integer("first_block", 0));
  p.blocks = static_cast<int>(request.integer("blocks", packed.hidden_blocks));
  const int hidden =
      std::min(p.blocks * kPieceChannels, c.sizes.hidden - p.first_block * kPieceChannels);
  const std::int64_t count = hidden * c.sizes.pairs();
  for (int part = 0; part < parts(c.mode); ++part) {
    p.a[part] = request.output<std::uint16_t>(part == 0 ? "a" : "a_lo", count);
    p.b[part] = request.output<std::uint16_t>(part == 0 ? "b" : "b_lo", count);
  }
  (request.integer("hopper", 0) ? project_sm90a : project_sm80)(p, nullptr);
  const int padded = packed.hidden_blocks * kPieceChannels;
  if (is_scaled(c.mode)) {
    auto* undo = request.output<float>("undo", 2 * padded);
    std::memcpy(undo, c.workspace.data() + packed.plane_undo, sizeof(float) * 2 * padded);
  }
});

const emulation::Kernel output("output", [](Request& request) {
  const Common c(request);
  OutputProblem p;
  p.sizes = c.sizes;
  p.mode = c.mode;
  p.gate_normalized = request.integer("gate_normalized", 0);
  p.eps = 1e-5f;
  p.tile = c.tile;
  p.pair = pairs_of(request, "pair");
  p.packed = c.workspace.data();
  p.o = request.input<char>("o");
  const std::int64_t count = c.sizes.batch * c.sizes.n * c.sizes.n * c.sizes.channels;
  if (c.mode == Mode::kTf32) c.set_plane_undo(0.5f);
  p.out = request.output<char>("out", count * (is_wide(c.mode) ? 4 : 2));
  (request.integer("hopper", 0) ? output_sm90a : output_sm80)(p, nullptr);
});

const emulation::Kernel project_backward("project_backward", [](Request& request) {
  const Common c(request);
  ProjectBackwardProblem p;
  p.sizes = c.sizes;
  p.mode = c.mode;
  p.outgoing = request.integer("outgoing");
  p.eps = 1e-5f;
  p.tile = c.tile;
  p.pair = pairs_of(request, "pair");
  p.mask = mask_of(request);
  p.packed = c.workspace.data();
  p.first_pair = request.integer("first_pair", 0);
  p.count = request.integer("count", c.sizes.pairs());
  p.da = request.input<char>("da");
  p.db = request.input<char>("db");
  const std::vector<float> ones(static_cast<std::size_t>(c.sizes.hidden), 1.0f);
  p.grad_undo = ones.data();
  if (c.mode == Mode::kTf32) c.set_plane_undo(1.0f);
  const int size = is_wide(c.mode) ? 4 : 2;
  const std::int64_t hidden = c.sizes.hidden;
  const int grad_size = c.mode == Mode::kBFloat16 ? 2 : 4;
  p.resident_blocks = static_cast<int>(request.integer("resident_blocks", 0));
  const ForbiddenPadding of_a(c.sizes, grad_size, p.da, p.resident_blocks == 0),
      of_b(c.sizes, grad_size, p.db, p.resident_blocks == 0);
  p.grad = request.output<char>("grad", p.count * 4 * hidden * size);
  p.normalised = request.output<char>("normalised", p.count * c.sizes.channels * size);
  const std::int64_t blocks = p.resident_blocks ? p.resident_blocks : row_blocks(c.tile, p.count);
  p.sums = request.output<float>("sums", blocks * 4 * hidden);
  (request.integer("hopper", 0) ? project_backward_sm90a : project_backward_sm80)(p, nullptr);
});

const emulation::Kernel output_backward("output_backward", [](Request& request) {
  const Common c(request);
  OutputBackwardProblem p;
  p.sizes = c.sizes;
  p.mode = c.mode;
  p.gate_normalized = request.integer("gate_normalized", 0);
  p.eps = 1e-5f;
  p.tile = c.tile;
  p.pair = pairs_of(request, "pair");
  p.out_grad = pairs_of(request, "out_grad");
  p.packed = c.workspace.data();
  p.o = request.input<char>("o");
  if (c.mode == Mode::kTf32) c.set_plane_undo(0.5f);
  p.first_pair = request.integer("first_pair", 0);
  p.count = request.integer("count", c.sizes.pairs());
  const int size = is_wide(c.mode) ? 4 : 2;
  const std::int64_t channels = c.sizes.channels;
  p.out_proj_grad = request.output<char>("out_proj_grad", p.count * channels * size);
  p.gate_grad = request.output<char>("gate_grad", p.count * channels * size);
  p.normalised = request.output<char>("normalised", p.count * c.sizes.hidden * size);
  if (request.integer("keeps_gate_input", 0)) {
    p.gate_input = request.output<char>("gate_input", p.count * channels * size);
  }
  p.resident_blocks = static_cast<int>(request.integer("resident_blocks", 0));
  const std::int64_t blocks = p.resident_blocks ? p.resident_blocks : row_blocks(c.tile, p.count);
  p.sums = request.output<float>("sums", blocks * 2 * channels);
  (request.integer("hopper", 0) ? output_backward_sm90a : output_backward_sm80)(p, nullptr);
});

}  // namespace
