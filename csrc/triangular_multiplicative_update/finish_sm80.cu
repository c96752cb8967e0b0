// SPDX-License-Identifier: Apache-2.0
#include "triangular_multiplicative_update/finish_sm80.cuh"

#include <algorithm>

#include "common/launch.h"

namespace fused_ops::triangular_multiplicative_update {
namespace {

int tiles_of(std::int64_t columns) {
  return static_cast<int>(ceil_div(columns, 32));
}

int line_tiles(const Sizes& sizes, int group) {
  return static_cast<int>(ceil_div(lines_of(sizes, group), kFinishWarps));
}

// Parts of 64 rows at least, so that sums of few rows are quick to add. Not asked of the device:
// sums are the same on all of them.
ColumnSums column_sums_of(const LineSums& sums, std::int64_t columns, float* to) {
  ColumnSums m;
  if (!sums.data) return m;
  m.from = sums.data;
  m.to = to;
  m.rows = sums.rows;
  m.columns = columns;
  m.part_rows = std::max<std::int64_t>(64, ceil_div(sums.rows, kMostParts));
  m.parts = static_cast<int>(std::max<std::int64_t>(1, ceil_div(sums.rows, m.part_rows)));
  m.tiles = tiles_of(columns);
  return m;
}

// Everything that follows from a problem, with the workspace dealt out.
struct Finish {
  ColumnSumsParams sums;
  FinishParams lines;
  FinishNormsParams norms;
  std::int64_t used = 0;  // floats of the workspace

  explicit Finish(const FinishProblem& p) : workspace_(p.workspace) {
    const Sizes& s = p.sizes;
    const std::int64_t columns[2] = {kInputLinears * std::int64_t{s.hidden},
                                     2 * std::int64_t{s.channels}};
    sums.matrices[0] = column_sums_of(p.input_sums, columns[0], take(kMostParts * columns[0]));
    sums.matrices[1] = column_sums_of(p.output_sums, columns[1], take(kMostParts * columns[1]));

    lines.sizes = s;
    list_linears(p.weights, lines.linears);
    const LinearResult results[kLinears] = {p.proj_a, p.gate_a,          p.proj_b,
                                            p.gate_b, p.out_proj_result, p.out_gate_result};
    std::copy_n(results, kLinears, lines.results);
    const Products products[kGroups] = {p.input, p.out_proj, p.out_gate};
    for (int i = 0; i < kGroups; ++i) {
      FinishGroup& group = lines.groups[i];
      const ColumnSums& m = sums.matrices[i == 0 ? 0 : 1];
      group.products = products[i];
      if (m.to && m.parts > 0) group.sums = m.to + (i == kGroups - 1 ? s.channels : 0);
      group.sums_columns = m.columns;
      group.parts = m.parts;
      group.column_tiles = tiles_of(inner_of(s, i));
      const bool any = group.products.data || m.parts > 0;
      group.blocks = any ? line_tiles(s, i) * group.column_tiles : 0;
    }
    normalise(0, p.weights.norm_in_weight, p.weights.norm_in_bias);
    normalise(1, p.weights.norm_out_weight, p.weights.norm_out_bias);
    const bool gate = p.weights.gate_normalized;
    if (gate) normalise(2, p.weights.norm_in_weight, p.weights.norm_in_bias);

    add_norm(0, p.norm_in_weight, 0, gate ? 2 : -1);
    add_norm(1, p.norm_in_bias, 0, gate ? 2 : -1);
    add_norm(2, p.norm_out_weight, 1, -1);
    add_norm(3, p.norm_out_bias, 1, -1);
  }

 private:
  float* take(std::int64_t floats) {
    float* at = workspace_ ? workspace_ + used : nullptr;
    used += floats;
    return at;
  }

  void normalise(int group, const Stored& weight, const Stored& bias) {
    lines.groups[group].norm_weight = weight;
    lines.groups[group].norm_bias = bias;
  }

  // A vector to which the lines of a group, or two, add: weights even, biases odd.
  void add_norm(int which, const Result& result, int first, int second) {
    if (!result.data) return;
    FinishNorm& norm = norms.norms[which];
    norm.size = inner_of(lines.sizes, first);
    norm.blocks = tiles_of(norm.size);
    norm.result = result;
    for (int group : {first, second}) {
      if (group < 0 || lines.groups[group].blocks == 0) continue;
      const int rows = line_tiles(lines.sizes, group);
      float* part = take(std::int64_t{rows} * norm.size);
      lines.groups[group].of_norm[which % 2] = part;
      if (norm.rows == 0) norm.from = part;
      norm.rows += rows;
    }
  }

  float* workspace_;
};

}  // namespace

std::int64_t finish_workspace(const FinishProblem& problem) {
  return Finish(problem).used;
}

void finish_sm80(const FinishProblem& problem, CUstream_st* stream) {
  const Finish finish(problem);
  const ColumnSums* m = finish.sums.matrices;
  const int sum_blocks = m[0].tiles * m[0].parts + m[1].tiles * m[1].parts;
  if (sum_blocks > 0) {
    launch("triangular_multiplicative_update: launching column_sums", column_sums_kernel,
           static_cast<unsigned>(sum_blocks), kFinishThreads, sizeof(FinishShared), stream,
           finish.sums);
  }
  unsigned line_blocks = 0, norm_blocks = 0;
  for (const FinishGroup& group : finish.lines.groups) {
    line_blocks += static_cast<unsigned>(group.blocks);
  }
  for (const FinishNorm& norm : finish.norms.norms) {
    norm_blocks += static_cast<unsigned>(norm.blocks);
  }
  constexpr const char* kLines = "triangular_multiplicative_update: launching finish_lines";
  if (sum_blocks > 0) {
    launch_dependent<finish_lines_kernel>(kLines, line_blocks, kFinishThreads, sizeof(FinishShared),
                                          stream, finish.lines);
  } else if (line_blocks > 0) {  // behind a kernel that may let the next one begin too early
    launch(kLines, finish_lines_kernel, line_blocks, kFinishThreads, sizeof(FinishShared), stream,
           finish.lines);
  }
  if (norm_blocks > 0 && line_blocks > 0) {
    launch_dependent<finish_norms_kernel>(
        "triangular_multiplicative_update: launching finish_norms", norm_blocks, kFinishThreads,
        sizeof(FinishShared), stream, finish.norms);
  }
}

}  // namespace fused_ops::triangular_multiplicative_update
