// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/plan.h"

namespace fused_ops::triangular_multiplicative_update {

// No kernel yet, so nothing about the problem matters.
Plan plan();

}  // namespace fused_ops::triangular_multiplicative_update
