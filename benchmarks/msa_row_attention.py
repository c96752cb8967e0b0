# SPDX-License-Identifier: Apache-2.0
"""Shapes and work of msa_row_attention, and of triangle attention, which is the same op."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.case import FORWARD, Case
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


def issue(*sizes: int, **more: Any) -> Case:
    return case("issue", *sizes, device="cuda", **more)


def lengths(*sizes: int) -> Case:
    return case("lengths", *sizes, device="cuda", modes=("bf16",), metrics=frozenset({"time"}))


def make_triangle(B: int, N: int, c: int, H: int, d: int) -> tuple[nn.Module, list[Tensor]]:
    module = reference.TriangleAttention(c, H, d)
    return module, [torch.randn(B, N, N, c), torch.ones(B, N, N, dtype=torch.bool)]


def triangle_flops(B: int, N: int, c: int, H: int, d: int) -> int:
    """Five projections of the pair, the bias, logits and weighted values."""
    return 2 * B * N * N * (5 * c * H * d + c * H + 2 * N * H * d)


def triangle_elements(B: int, N: int, c: int, H: int, d: int) -> int:
    """Pair in and out, q, k, v, gate and bias written and read."""
    return B * N * N * (2 * c + 8 * H * d + 2 * H + 1)


def triangle(kind: str, *sizes: int, **more: Any) -> Case:
    named = dict(zip("BNcHd", sizes, strict=True))
    functions = (make_triangle, triangle_flops, triangle_elements)
    return Case("triangle_attention", kind, named, *functions, **more)


CASES = [
    case("headline", 2, 8, 32, 64, 32, 4, modes=("fp32", "tf32", "bf16")),
    case("small", 1, 5, 17, 64, 32, 4),
    case("real", 1, 32, 256, 256, 128, 8, device="cpu"),
    case("real", 1, 128, 256, 256, 128, 8, device="cuda"),
    case("real", 1, 512, 256, 256, 128, 8, device="cuda"),
    triangle("small", 1, 17, 64, 4, 16),
    triangle("real", 1, 256, 128, 4, 32, device="cuda"),
    *(case("scaling", 1, 8, n, 256, 128, 8, device="cpu") for n in (32, 64, 128, 256)),
    *(case("scaling", 1, 128, n, 256, 128, 8, device="cuda") for n in (64, 128, 256, 512, 1024)),
    issue(2, 8, 32, 64, 32, 4, modes=("fp32",), directions=(FORWARD,)),
    issue(1, 128, 256, 256, 128, 8, modes=("bf16",), directions=(FORWARD,)),
    issue(1, 512, 256, 256, 128, 8, modes=("bf16",)),
    issue(1, 128, 768, 256, 128, 8, modes=("bf16",), directions=(FORWARD,)),
    issue(1, 128, 768, 256, 128, 8, modes=("fp32",)),
    *(
        triangle("issue", 1, n, 128, 4, 32, device="cuda", modes=("bf16",), directions=(FORWARD,))
        for n in (256, 768)
    ),
    # Lengths that are no multiple of anything, few rows and many, heads of other widths.
    *(lengths(1, 128, n, 256, 128, 8) for n in (77, 257, 513, 1025)),
    *(lengths(1, rows, 256, 256, 128, 8) for rows in (1, 33, 5120)),
    *(lengths(1, 128, 256, 256, 128, heads) for heads in (32, 16, 4)),
]
