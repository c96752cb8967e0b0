# SPDX-License-Identifier: Apache-2.0
"""The ops as functions of their parameters."""

from fused_ops.invariant_point_attention.op import invariant_point_attention
from fused_ops.msa_row_attention.op import msa_row_attention
from fused_ops.msa_row_attention.triangle_op import triangle_attention
from fused_ops.tensor_matmul.op import tensor_matmul
from fused_ops.triangular_multiplicative_update.op import triangular_multiplicative_update

__all__ = [
    "invariant_point_attention",
    "msa_row_attention",
    "tensor_matmul",
    "triangle_attention",
    "triangular_multiplicative_update",
]
