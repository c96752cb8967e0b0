// SPDX-License-Identifier: Apache-2.0
// The gradients of the pair tensor and of the bias projection, through their launchers.
#include <algorithm>

#include "emulation/driver.h"
#include "invariant_point_attention/pair_backward_fp32_sm80.cu"
#include "invariant_point_attention/pair_backward_sm80.cu"

namespace {

using emulation::Request;
using fused_ops::bytes_of;
using fused_ops::DType;
using namespace fused_ops::invariant_point_attention;

Sizes sizes_of(const Request& request) {
  Sizes s;
  s.batch = request.integer("batch");
  s.n = request.integer("n");
  s.heads = static_cast<int>(request.integer("heads"));
  s.dim = s.head_dim = static_cast<int>(request.integer("dim"));
  s.query_points = s.value_points = static_cast<int>(request.integer("points"));
  s.norms = request.integer("norms") != 0;
  s.pair_channels = static_cast<int>(request.integer("channels"));
  s.value_channels = static_cast<int>(request.integer("value_channels"));
  return s;
}

// The result under its name, which holds NaN, or what an input of another name says.
template <class T>
T* result(Request& request, const char* name, const char* before, std::int64_t size) {
  T* out = request.output<T>(name, size);
  if (request.integer(before, 0)) std::copy_n(request.input<T>(before), size, out);
  return out;
}

const emulation::Kernel pair_backward("pair_backward", [](Request& request) {
  PairBackwardProblem p;
  p.sizes = sizes_of(request);
  p.mode = static_cast<Mode>(request.integer("mode"));
  p.block = {request.integer("first_row"), request.integer("rows")};
  p.channels = p.sizes.pair_channels;
  if (request.integer("has_bias")) {
    p.d_logits = request.input<char>("d_logits");
    p.weight = {request.input<char>("weight"), static_cast<DType>(request.integer("weight_type"))};
    p.bias_scale = *request.input<float>("bias_scale");
  }
  if (request.integer("has_features")) {
    p.logits = request.input<float>("logits");
    p.log_sums = request.input<float>("log_sums");
    p.d_features = request.input<char>("d_features");
  }
  if (request.integer("has_grad")) {
    p.grad_type = static_cast<DType>(request.integer("grad_type"));
    p.accumulate = request.integer("grad_before", 0) != 0;
    const std::int64_t size =
        p.sizes.batch * p.sizes.n * p.sizes.n * p.channels * bytes_of(p.grad_type);
    p.grad = result<char>(request, "grad", "grad_before", size);
  }
  fused_ops::emulated_multiprocessors = static_cast<int>(request.integer("multiprocessors", 2));
  if (request.integer("has_sums")) {
    p.pair.type = static_cast<DType>(request.integer("pair_type"));
    p.pair.data = request.input<char>("pair") + request.integer("offset") * bytes_of(p.pair.type);
    p.pair.batch_stride = request.integer("batch_stride");
    p.pair.i_stride = request.integer("i_stride");
    p.pair.j_stride = request.integer("j_stride");
    p.parts = pair_sum_parts(p.sizes, p.mode);
    p.add_sums = request.integer("sums_before", 0) != 0;
    p.sums = result<float>(request, "sums", "sums_before",
                           std::int64_t{p.parts} * p.sizes.heads * (p.channels + 1));
  }
  is_fp32(p.mode) ? pair_backward_fp32_sm80(p, nullptr) : pair_backward_sm80(p, nullptr);
});

}  // namespace
