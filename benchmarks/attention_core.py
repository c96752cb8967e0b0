# SPDX-License-Identifier: Apache-2.0
"""Attention alone, with queries, keys, values and bias at hand: what is between the projections of
row attention and of triangle attention, and what other libraries have a kernel for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.case import BOTH, FORWARD, Case

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes q, k, v (B, S, H, N, d), bias (B, H, N, N), mask (B, S, N) with zeros for the keys that are
not there; returns (B, S, H, N, d)."""


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """The definition."""
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias.unsqueeze(1)
    logits = logits.masked_fill((mask == 0)[:, :, None, None, :], float("-inf"))
    return torch.softmax(logits, dim=-1) @ v


class AttentionCore(nn.Module):
    """An :data:`Attend` as a module."""

    def __init__(self, attend: Attend = softmax_attention) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        return self.attend(q, k, v, bias, mask)


def make(B: int, S: int, N: int, H: int, d: int) -> tuple[nn.Module, list[Tensor]]:
    return AttentionCore(), [
        *(torch.randn(B, S, H, N, d) for _ in "qkv"),
        torch.randn(B, H, N, N),
        torch.ones(B, S, N, dtype=torch.bool),
    ]


def flops(B: int, S: int, N: int, H: int, d: int) -> int:
    """Logits and weighted values."""
    return 4 * B * S * H * N * N * d


def elements(B: int, S: int, N: int, H: int, d: int) -> int:
    """q, k, v and the bias in, the result out."""
    return B * (4 * S * H * N * d + H * N * N)


def case(kind: str, *sizes: int, **more: Any) -> Case:
    named = dict(zip("BSNHd", sizes, strict=True))
    return Case("attention_core", kind, named, make, flops, elements, device="cuda", **more)


# H = 4 and as many rows as columns: triangle attention.
TRIANGLES = [(1, n, n, 4, 32) for n in (256, 768)]
# Gradients in float64 would need more than the memory of one device.
LEAN = frozenset({"time", "memory"})
SHAPES = [(1, 128, 256, 8, 32), (1, 512, 512, 8, 32), *TRIANGLES]
CASES = [
    *(case("issue", *sizes, modes=("bf16",), directions=(FORWARD,)) for sizes in TRIANGLES),
    *(case("core", *sizes, modes=("bf16",), directions=(FORWARD,)) for sizes in SHAPES),
    *(case("core", *sizes, modes=("bf16",), directions=(BOTH,), metrics=LEAN) for sizes in SHAPES),
]
