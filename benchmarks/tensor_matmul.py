# SPDX-License-Identifier: Apache-2.0
"""Shapes and work of tensor_matmul."""

import torch
from torch import Tensor, nn

from benchmarks.harness import Case
from fused_ops import reference


def make(b: int, i: int, j: int, l: int, k: int) -> tuple[nn.Module, list[Tensor]]:
    return reference.TensorMatmul(), [torch.randn(b, i, j, l), torch.randn(l, k)]


def flops(b: int, i: int, j: int, l: int, k: int) -> int:
    return 2 * b * i * j * l * k


def elements(b: int, i: int, j: int, l: int, k: int) -> int:
    return b * i * j * (l + k) + l * k


CASES = [
    Case("tensor_matmul", suite, dict(zip("bijlk", sizes, strict=True)), make, flops, elements)
    for suite, *sizes in (
        ("headline", 8, 256, 512, 256, 768),
        ("real", 1, 256, 256, 128, 128),
        ("real", 1, 77, 77, 128, 4),
        ("small", 1, 32, 32, 64, 64),
    )
]
