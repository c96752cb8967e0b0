# SPDX-License-Identifier: Apache-2.0
"""Shapes and work of msa_row_attention."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.case import Case
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


def case(kind: str, *sizes: int, **more: Any) -> Case:
    named = dict(zip("BSNczH", sizes, strict=True))
    return Case("msa_row_attention", kind, named, make, flops, elements, **more)


CASES = [
    case("headline", 2, 8, 32, 64, 32, 4, modes=("fp32", "tf32", "bf16")),
    case("small", 1, 5, 17, 64, 32, 4),
    case("real", 1, 32, 256, 256, 128, 8, device="cpu"),
    case("real", 1, 128, 256, 256, 128, 8, device="cuda"),
    case("real", 1, 512, 256, 256, 128, 8, device="cuda"),
    # Triangle attention is the same op on a square "MSA", the pair representation itself.
    case("real", 1, 256, 256, 128, 128, 4, device="cuda"),
    *(case("scaling", 1, 8, n, 256, 128, 8, device="cpu") for n in (32, 64, 128, 256)),
    *(case("scaling", 1, 128, n, 256, 128, 8, device="cuda") for n in (64, 128, 256, 512, 1024)),
]
