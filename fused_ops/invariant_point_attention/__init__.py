# SPDX-License-Identifier: Apache-2.0
"""Invariant point attention."""

from fused_ops.invariant_point_attention.module import InvariantPointAttention
from fused_ops.invariant_point_attention.op import invariant_point_attention

__all__ = ["InvariantPointAttention", "invariant_point_attention"]
