# SPDX-License-Identifier: Apache-2.0
"""Shapes and work of triangular_multiplicative_update."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.case import Case
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


def case(kind: str, *sizes: int, **more: Any) -> Case:
    named = dict(zip("BNch", sizes, strict=True))
    return Case("triangular_multiplicative_update", kind, named, make, flops, elements, **more)


# Some twenty planes of 4.3 GB in a training step, and as much again in float64 for the error.
TOO_LARGE = dict.fromkeys(("eager", "compile"), "a training step would not fit")
LEAN = frozenset({"time", "memory"})
CASES = [
    case("headline", 2, 32, 64, 32, modes=("fp32", "tf32", "bf16")),
    case("small", 1, 17, 64, 32),
    case("real", 1, 128, 128, 128, device="cpu"),
    case("real", 1, 256, 128, 128),
    case("real", 1, 512, 128, 128, device="cuda"),
    *(case("scaling", 1, n, 128, 128) for n in (32, 64, 128, 256)),
    *(case("scaling", 1, n, 128, 128, device="cuda") for n in (512, 1024)),
    *(
        case("issue", 1, n, 128, 128, device="cuda", modes=("bf16", "fp32", "tf32"))
        for n in (256, 512, 1024)
    ),
    *(
        case("lengths", 1, n, 128, 128, device="cuda", modes=("bf16", "fp32"))
        for n in (77, 257, 769, 1025)
    ),
    *(
        case("channels", 1, *sizes, device="cuda", modes=("bf16", "fp32"))
        for sizes in ((256, 64, 64), (256, 256, 256), (384, 384, 128))
    ),
    *(
        case("large", 1, n, 128, 128, device="cuda", modes=(mode,), without=TOO_LARGE, metrics=LEAN)
        for n, mode in ((2944, "fp32"), (4096, "bf16"))
    ),
]
