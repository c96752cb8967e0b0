// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/plan.h"

namespace fused_ops::invariant_point_attention {

// No kernel yet, so nothing about the problem matters.
Plan plan();

}  // namespace fused_ops::invariant_point_attention
