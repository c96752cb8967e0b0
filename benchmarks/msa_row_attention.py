# SPDX-License-Identifier: Apache-2.0
"""Shapes and work of msa_row_attention."""

import torch
from torch import Tensor, nn

from benchmarks.harness import Case
from fused_ops import reference


def make(B: int, S: int, N: int, c: int, z: int, H: int) -> tuple[nn.Module, list[Tensor]]:
    module = reference.MSARowAttention(c, z, H)
    return module, [
        torch.randn(B, S, N, c),
        torch.randn(B, N, N, z),
        torch.ones(B, S, N, dtype=torch.bool),
    ]


def flops(B: int, S: int, N: int, c: int, z: int, H: int) -> int:
    """Five projections of the MSA, the bias, logits and weighted values."""
    return 2 * B * (S * N * 5 * c * c + N * N * z * H + 2 * S * N * N * c)


def elements(B: int, S: int, N: int, c: int, z: int, H: int) -> int:
    """MSA in and out, pair in, bias written and read, q, k, v and gate written and read."""
    return B * (S * N * (2 * c + 8 * c + 1) + N * N * (z + 2 * H))


CASES = [
    Case(
        "msa_row_attention",
        suite,
        dict(zip("BSNczH", sizes, strict=True)),
        make,
        flops,
        elements,
    )
    for suite, *sizes in (
        ("headline", 2, 8, 32, 64, 32, 4),
        ("small", 1, 5, 17, 64, 32, 4),
        ("real", 1, 32, 256, 256, 128, 8),
        ("real", 1, 128, 128, 256, 128, 8),
    )
]
