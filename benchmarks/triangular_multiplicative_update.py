# SPDX-License-Identifier: Apache-2.0
"""Shapes and work of triangular_multiplicative_update."""

import torch
from torch import Tensor, nn

from benchmarks.harness import Case
from fused_ops import reference


def make(B: int, N: int, c: int, h: int) -> tuple[nn.Module, list[Tensor]]:
    module = reference.TriangularMultiplicativeUpdate(c, h, "outgoing")
    return module, [torch.randn(B, N, N, c), torch.ones(B, N, N, dtype=torch.bool)]


def flops(B: int, N: int, c: int, h: int) -> int:
    """Four input projections, the contraction, output projection and gate."""
    return 2 * B * N * N * (4 * c * h + N * h + h * c + c * c)


def elements(B: int, N: int, c: int, h: int) -> int:
    """Pair in and out, a and b written and read, o written and read."""
    return B * N * N * (2 * c + 6 * h + 1)


CASES = [
    Case(
        "triangular_multiplicative_update",
        suite,
        dict(zip("BNch", sizes, strict=True)),
        make,
        flops,
        elements,
    )
    for suite, *sizes in (
        ("headline", 2, 32, 64, 32),
        ("small", 1, 17, 64, 32),
        ("real", 1, 128, 128, 128),
        ("real", 1, 256, 128, 128),
    )
]
