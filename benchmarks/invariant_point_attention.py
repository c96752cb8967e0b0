# SPDX-License-Identifier: Apache-2.0
"""Shapes and work of invariant_point_attention."""

import torch
from torch import Tensor, nn

from benchmarks.harness import Case
from fused_ops import reference


def make(
    B: int, N: int, c: int, z: int, H: int, Pq: int, Pv: int
) -> tuple[nn.Module, list[Tensor]]:
    module = reference.InvariantPointAttention(c, z, H, Pq, Pv)
    walk = 3.8 * torch.nn.functional.normalize(torch.randn(B, N, 3), dim=-1)  # CA to CA, Angstrom
    rotations = torch.linalg.qr(torch.randn(B, N, 3, 3, dtype=torch.float64))[0]
    rotations = rotations * torch.linalg.det(rotations)[..., None, None]
    return module, [
        torch.randn(B, N, c),
        torch.randn(B, N, N, z),
        walk.cumsum(dim=1),
        rotations.float(),
    ]


def flops(B: int, N: int, c: int, z: int, H: int, Pq: int, Pv: int) -> int:
    """Projections, pair bias, logits (features and points), values, output projection."""
    points = 3 * H * (2 * Pq + Pv)
    projections = N * (c * (3 * c + points) + (c + 3 * H * Pv) * c)
    return 2 * B * (projections + N * N * (z * H + 2 * c + 3 * H * (Pq + Pv)))


def elements(B: int, N: int, c: int, z: int, H: int, Pq: int, Pv: int) -> int:
    """Pair in, bias written and read, node in and out, projected tensors written and read."""
    return B * (N * N * (z + 2 * H) + N * (2 * c + 2 * (4 * c + 3 * H * (2 * Pq + 2 * Pv))))


CASES = [
    Case(
        "invariant_point_attention",
        suite,
        dict(zip(("B", "N", "c", "z", "H", "Pq", "Pv"), sizes, strict=True)),
        make,
        flops,
        elements,
    )
    for suite, *sizes in (
        ("headline", 2, 32, 64, 32, 4, 4, 8),
        ("small", 1, 17, 64, 32, 4, 4, 8),
        ("real", 1, 256, 384, 128, 12, 4, 8),
        ("real", 1, 512, 384, 128, 12, 4, 8),
    )
]
