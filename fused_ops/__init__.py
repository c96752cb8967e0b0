# SPDX-License-Identifier: Apache-2.0
"""Fused kernels for protein-structure models, as drop-in PyTorch modules.

The modules have the constructor, the parameters and the numbers of the eager modules in
:mod:`fused_ops.reference`; :mod:`fused_ops.functional` has the ops as functions, and
:func:`explain` tells which kernel a call would run. ``python -m fused_ops`` reports on the
installation.
"""

from fused_ops import _library, functional, reference
from fused_ops._explain import Explanation, explain
from fused_ops._version import __version__
from fused_ops.invariant_point_attention import InvariantPointAttention
from fused_ops.msa_row_attention import (
    MSARowAttention,
    TriangleAttention,
    TriangleAttentionEndingNode,
    TriangleAttentionStartingNode,
)
from fused_ops.tensor_matmul import TensorMatmul, tensor_matmul
from fused_ops.triangular_multiplicative_update import (
    TriangularMultiplicativeUpdate,
    TriangularMultiplicativeUpdateIncoming,
    TriangularMultiplicativeUpdateOutgoing,
)

_library.load()

__all__ = [
    "Explanation",
    "InvariantPointAttention",
    "MSARowAttention",
    "TensorMatmul",
    "TriangleAttention",
    "TriangleAttentionEndingNode",
    "TriangleAttentionStartingNode",
    "TriangularMultiplicativeUpdate",
    "TriangularMultiplicativeUpdateIncoming",
    "TriangularMultiplicativeUpdateOutgoing",
    "__version__",
    "explain",
    "functional",
    "reference",
    "tensor_matmul",
]
