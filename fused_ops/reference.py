# SPDX-License-Identifier: Apache-2.0
"""The eager reference modules: the definition of every op in plain, readable PyTorch.

They share constructor, parameter names and semantics with the fused modules and are what the
tests hold the fused modules against.
"""

from fused_ops.invariant_point_attention.reference import InvariantPointAttention
from fused_ops.msa_row_attention.reference import MSARowAttention
from fused_ops.msa_row_attention.triangle_reference import TriangleAttention
from fused_ops.tensor_matmul.reference import TensorMatmul
from fused_ops.triangular_multiplicative_update.reference import TriangularMultiplicativeUpdate

__all__ = [
    "InvariantPointAttention",
    "MSARowAttention",
    "TensorMatmul",
    "TriangleAttention",
    "TriangularMultiplicativeUpdate",
]
