# SPDX-License-Identifier: Apache-2.0
"""Triangle attention in plain PyTorch (AlphaFold 2 supplement, Algorithms 13 and 14).

A query whose keys are all masked comes out as NaN here; the fused module gives zero attention
there.
"""

import math

import torch
from torch import Tensor, nn


class TriangleAttention(nn.Module):
    """Eager triangle attention; see :mod:`fused_ops` for the fast drop-in."""

    def __init__(
        self,
        pair_dim: int,
        num_heads: int,
        head_dim: int | None = None,
        direction: str = "starting",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if direction not in ("starting", "ending"):
            raise ValueError(f"direction must be 'starting' or 'ending', got {direction!r}")
        if num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {num_heads}")
        if head_dim is None:
            if pair_dim % num_heads:
                raise ValueError(
                    f"pair_dim must be a multiple of num_heads where head_dim is not given, "
                    f"got {pair_dim}, {num_heads}"
                )
            head_dim = pair_dim // num_heads
        if head_dim < 1:
            raise ValueError(f"head_dim must be at least 1, got {head_dim}")
        width = num_heads * head_dim
        self.pair_dim = pair_dim
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.direction = direction
        self.layer_norm = nn.LayerNorm(pair_dim)
        self.query = nn.Linear(pair_dim, width, bias=False)
        self.key = nn.Linear(pair_dim, width, bias=False)
        self.value = nn.Linear(pair_dim, width, bias=False)
        self.gate = nn.Linear(pair_dim, width)
        self.pair_bias = nn.Linear(pair_dim, num_heads, bias=False)
        self.out_proj = nn.Linear(width, pair_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, pair_repr: Tensor, pair_mask: Tensor | None = None) -> Tensor:
        """Attend among the edges that start, or end, at the same node.

        ``pair_repr`` (B, N, N, pair_dim), ``pair_mask`` (B, N, N) -> (B, N, N, pair_dim).
        """
        x = self.layer_norm(pair_repr)
        q = self.query(x).unflatten(-1, (self.num_heads, -1))
        k = self.key(x).unflatten(-1, (self.num_heads, -1))
        v = self.value(x).unflatten(-1, (self.num_heads, -1))
        bias = self.pair_bias(x).movedim(-1, -3)
        absent = None if pair_mask is None else pair_mask == 0
        if self.direction == "starting":  # query (i, j), keys (i, k), bias of (j, k)
            logits = torch.einsum("...ijhd,...ikhd->...ihjk", q, k)
            attended = "...ihjk,...ikhd->...ijhd"
        else:  # query (i, j), keys (k, j), bias of (k, i)
            logits = torch.einsum("...ijhd,...kjhd->...jhik", q, k)
            attended = "...jhik,...kjhd->...ijhd"
            bias = bias.transpose(-1, -2)
            absent = None if absent is None else absent.transpose(-1, -2)
        logits = logits / math.sqrt(q.shape[-1]) + bias.unsqueeze(-4)
        if absent is not None:
            logits = logits.masked_fill(absent[..., None, None, :], float("-inf"))
        weights = self.dropout(torch.softmax(logits, dim=-1))
        o = torch.einsum(attended, weights, v).flatten(-2)
        return self.out_proj(torch.sigmoid(self.gate(x)) * o)
