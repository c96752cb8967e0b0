# SPDX-License-Identifier: Apache-2.0
"""Triangular multiplicative update, incoming and outgoing."""

from fused_ops.triangular_multiplicative_update.module import (
    TriangularMultiplicativeUpdate,
    TriangularMultiplicativeUpdateIncoming,
    TriangularMultiplicativeUpdateOutgoing,
)
from fused_ops.triangular_multiplicative_update.op import triangular_multiplicative_update

__all__ = [
    "TriangularMultiplicativeUpdate",
    "TriangularMultiplicativeUpdateIncoming",
    "TriangularMultiplicativeUpdateOutgoing",
    "triangular_multiplicative_update",
]
