// SPDX-License-Identifier: Apache-2.0
// The kernels of invariant point attention over residues and heads, through their launchers.
#include "emulation/driver.h"
#include "invariant_point_attention/distances_backward_sm80.cu"
#include "invariant_point_attention/frames_backward_sm80.cu"
#include "invariant_point_attention/frames_sm80.cu"
#include "invariant_point_attention/output_backward_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::DType;
using namespace fused_ops::invariant_point_attention;

Sizes sizes_of(Request& request) {
  Sizes s;
  s.batch = request.integer("batch");
  s.n = request.integer("n");
  s.heads = static_cast<int>(request.integer("heads"));
  s.head_dim = static_cast<int>(request.integer("head_dim"));
  s.dim = static_cast<int>(round_up(s.head_dim, 8));
  s.query_points = static_cast<int>(request.integer("query_points"));
  s.value_points = static_cast<int>(request.integer("value_points"));
  s.value_channels = static_cast<int>(request.integer("value_channels"));
  s.norms = request.integer("norms") != 0;
  return s;
}

Mode mode_of(Request& request) {
  return static_cast<Mode>(request.integer("mode"));
}

Frames frames_of(Request& request) {
  Frames f;
  const auto type = static_cast<DType>(request.integer("frames_type"));
  f.translations = {request.input<char>("translations"), type};
  f.rotations = {request.input<char>("rotations"), type};
  f.translations_stride = request.integer("translations_stride");
  f.rotations_stride = request.integer("rotations_stride");
  return f;
}

char* bytes(Request& request, const char* name, Mode mode, std::int64_t numbers) {
  return request.output<char>(name, numbers * fused_ops::bytes_of(type_of(mode)));
}

const emulation::Kernel frames("frames", [](Request& request) {
  FramesProblem p;
  p.sizes = sizes_of(request);
  p.mode = mode_of(request);
  p.frames = frames_of(request);
  p.centres = request.input<Centre>("centres");
  const std::int64_t lines = p.sizes.nodes() * p.sizes.heads;
  const std::int64_t size = request.size<char>("projected");
  p.projected = request.output<char>("projected", size);
  if (size > 0) std::memcpy(p.projected, request.input<char>("projected"), size);
  if (request.integer("bias")) p.projection_bias = request.input<float>("projection_bias");
  p.q_points = request.output<float>("q_points", lines * point_line(p.sizes));
  p.k_points = request.output<float>("k_points", lines * point_line(p.sizes));
  p.values = bytes(request, "values", p.mode, lines * value_line(p.sizes, p.mode));
  if (request.integer("moments")) {
    const std::int64_t count = lines * moment_line(p.sizes, p.mode);
    p.q_moments = bytes(request, "q_moments", p.mode, count);
    p.k_moments = bytes(request, "k_moments", p.mode, count);
  }
  frames_sm80(p, nullptr);
});

const emulation::Kernel output_backward("output_backward", [](Request& request) {
  OutputBackwardProblem p;
  p.sizes = sizes_of(request);
  p.mode = mode_of(request);
  p.frames = frames_of(request);
  p.centres = request.input<Centre>("centres");
  p.norm_eps = static_cast<float>(request.integer("norm_eps_millionths")) * 1e-6f;
  p.features = request.input<char>("features");
  p.d_features = request.input<char>("d_features");
  p.gathered = request.input<float>("gathered");
  const std::int64_t lines = p.sizes.nodes() * p.sizes.heads;
  p.d_gathered = bytes(request, "d_gathered", p.mode, lines * value_line(p.sizes, p.mode));
  p.row_dots = request.output<float>("row_dots", lines);
  output_backward_sm80(p, nullptr);
});

const emulation::Kernel frames_backward("frames_backward", [](Request& request) {
  FramesBackwardProblem p;
  p.sizes = sizes_of(request);
  p.mode = mode_of(request);
  p.frames = frames_of(request);
  p.centres = request.input<Centre>("centres");
  p.scalar_scale = 0.25f;
  p.point_scale = 0.5f;
  p.head_weights = {request.input<char>("head_weights"),
                    static_cast<DType>(request.integer("head_weights_type"))};
  p.norm_eps = static_cast<float>(request.integer("norm_eps_millionths")) * 1e-6f;
  p.projected = request.input<char>("projected");
  p.q_points = request.input<float>("q_points");
  p.k_points = request.input<float>("k_points");
  p.d_features = request.input<char>("d_features");
  p.gathered = request.input<float>("gathered");
  p.d_queries = request.input<float>("d_queries");
  p.d_keys = request.input<float>("d_keys");
  p.d_values = request.input<float>("d_values");
  const std::int64_t nodes = p.sizes.nodes();
  p.d_projected = bytes(request, "d_projected", p.mode, nodes * p.sizes.projected());
  if (request.integer("of_frames")) {
    p.d_translations = request.output<float>("d_translations", 3 * nodes);
    p.d_rotations = request.output<float>("d_rotations", 9 * nodes);
  }
  frames_backward_sm80(p, nullptr);
});

// Of one block of queries; `parts` is 0 for as many as there should be.
const emulation::Kernel distances_backward("distances_backward", [](Request& request) {
  DistancesBackwardProblem p;
  p.sizes = sizes_of(request);
  p.mode = mode_of(request);
  p.block.first_row = request.integer("first_row");
  p.block.rows = request.integer("rows");
  p.d_logits = request.input<char>("d_logits");
  p.q_points = request.input<float>("q_points");
  p.k_points = request.input<float>("k_points");
  p.head_weights = {request.input<float>("head_weights"), DType::kFloat32};
  p.point_scale = 0.5f;
  p.parts = static_cast<int>(request.integer("parts"));
  if (p.parts == 0) p.parts = distance_sum_parts(p.sizes);
  p.add_sums = request.integer("add_sums") != 0;
  const std::int64_t count = std::int64_t{p.parts} * p.sizes.heads;
  p.sums = request.output<float>("sums", count);
  for (std::int64_t i = 0; p.add_sums && i < count; ++i) p.sums[i] = 0.5f;
  distances_backward_sm80(p, nullptr);
});

}  // namespace
