# SPDX-License-Identifier: Apache-2.0
"""Shapes and work of invariant_point_attention."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from benchmarks.case import BOTH, FORWARD, Case
from fused_ops import reference


def make(
    B: int, N: int, c: int, z: int, H: int, Pq: int, Pv: int
) -> tuple[nn.Module, list[Tensor]]:
    module = reference.InvariantPointAttention(c, z, H, Pq, Pv)
    walk = 3.8 * normalize(torch.randn(B, N, 3), dim=-1)  # CA to CA, Angstrom
    first, second = normalize(torch.randn(2, B, N, 3), dim=-1)
    third = normalize(torch.linalg.cross(first, second), dim=-1)
    rotations = torch.stack([first, torch.linalg.cross(third, first), third], dim=-2)
    return module, [
        torch.randn(B, N, c),
        torch.randn(B, N, N, z),
        walk.cumsum(dim=1),
        rotations,
    ]


def flops(B: int, N: int, c: int, z: int, H: int, Pq: int, Pv: int) -> int:
    """Projections, pair bias, logits (features and points), values, output projection."""
    points = 3 * H * (2 * Pq + Pv)
    projections = N * (c * (3 * c + points) + (c + 3 * H * Pv) * c)
    return 2 * B * (projections + N * N * (z * H + 2 * c + 3 * H * (Pq + Pv)))


def elements(B: int, N: int, c: int, z: int, H: int, Pq: int, Pv: int) -> int:
    """Pair in, bias written and read, node in and out, projected tensors written and read."""
    return B * (N * N * (z + 2 * H) + N * (2 * c + 2 * (4 * c + 3 * H * (2 * Pq + 2 * Pv))))


def case(kind: str, *sizes: int, **more: Any) -> Case:
    named = dict(zip(("B", "N", "c", "z", "H", "Pq", "Pv"), sizes, strict=True))
    return Case("invariant_point_attention", kind, named, make, flops, elements, **more)


CASES = [
    case("headline", 2, 32, 64, 32, 4, 4, 8, modes=("fp32", "tf32", "bf16")),
    case("small", 1, 17, 64, 32, 4, 4, 8),
    case("real", 1, 256, 384, 128, 12, 4, 8),
    case("real", 1, 512, 384, 128, 12, 4, 8),
    *(case("scaling", 1, n, 384, 128, 12, 4, 8) for n in (32, 64, 128, 256)),
    *(case("scaling", 1, n, 384, 128, 12, 4, 8, device="cuda") for n in (512, 1024)),
    *(
        case("issue", 1, n, 384, 128, 12, 4, 8, device="cuda", modes=modes, directions=directions)
        for n, modes, directions in (
            (256, ("bf16",), (FORWARD,)),
            (512, ("bf16",), (FORWARD, BOTH)),
            (1024, ("bf16",), (FORWARD, BOTH)),
            (1024, ("fp32",), (FORWARD,)),
        )
    ),
]
