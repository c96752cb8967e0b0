# SPDX-License-Identifier: Apache-2.0
"""Shapes and work of tensor_matmul."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.case import BOTH, FORWARD, Case
from fused_ops import reference


def make(b: int, i: int, j: int, l: int, k: int) -> tuple[nn.Module, list[Tensor]]:
    return reference.TensorMatmul(), [torch.randn(b, i, j, l), torch.randn(l, k)]


def flops(b: int, i: int, j: int, l: int, k: int) -> int:
    return 2 * b * i * j * l * k


def elements(b: int, i: int, j: int, l: int, k: int) -> int:
    return b * i * j * (l + k) + l * k


def backward_elements(b: int, i: int, j: int, l: int, k: int) -> int:
    """Both operands and the incoming gradient in, two gradients out."""
    return b * i * j * (2 * l + k) + 2 * l * k


def case(kind: str, *sizes: int, **more: Any) -> Case:
    named = dict(zip("bijlk", sizes, strict=True))
    return Case("tensor_matmul", kind, named, make, flops, elements, backward_elements, **more)


ALL_MODES = ("fp32", "tf32", "bf16", "fp16")
EACH_GRADIENT = (FORWARD, BOTH, "dA", "dB")
CASES = [
    # A forward of it takes seconds on a small CPU, which gets the same matrix with fewer rows.
    case(
        "headline",
        *(8, 256, 512, 256, 768),
        device="cuda",
        directions=EACH_GRADIENT,
        modes=ALL_MODES,
    ),
    case("headline", 1, 64, 128, 256, 768, device="cpu", directions=EACH_GRADIENT),
    case("real", 1, 512, 512, 128, 128, modes=ALL_MODES[:3]),
    case("real", 1, 256, 256, 128, 512, modes=ALL_MODES[:3]),
    # How near the machine's limit a product comes that is large in all directions.
    case(
        "real",
        *(1, 1, 8192, 8192, 8192),
        device="cuda",
        directions=(FORWARD,),
        modes=ALL_MODES,
    ),
    case("small", 1, 77, 77, 64, 64),
    *(case("scaling", 1, n, n, 128, 128) for n in (32, 64, 128, 256)),
    *(case("scaling", 1, n, n, 128, 128, device="cuda") for n in (512, 1024)),
]
