# SPDX-License-Identifier: Apache-2.0
"""MSA row attention with pair bias, and triangle attention, which is the same op."""

from fused_ops.msa_row_attention.module import MSARowAttention
from fused_ops.msa_row_attention.op import msa_row_attention
from fused_ops.msa_row_attention.triangle import (
    TriangleAttention,
    TriangleAttentionEndingNode,
    TriangleAttentionStartingNode,
)
from fused_ops.msa_row_attention.triangle_op import triangle_attention

__all__ = [
    "MSARowAttention",
    "TriangleAttention",
    "TriangleAttentionEndingNode",
    "TriangleAttentionStartingNode",
    "msa_row_attention",
    "triangle_attention",
]
