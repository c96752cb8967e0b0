# SPDX-License-Identifier: Apache-2.0
"""The definition of the op in plain PyTorch (AlphaFold 2 supplement, Algorithm 7).

A query whose keys are all masked comes out as NaN here; the fused op gives zero attention there.
"""

import math

import torch
from torch import Tensor, nn


class MSARowAttention(nn.Module):
    """Eager MSA row attention with pair bias; see :mod:`fused_ops` for the fast drop-in."""

    def __init__(self, msa_dim: int, pair_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if num_heads < 1 or msa_dim % num_heads:
            raise ValueError(f"msa_dim must be a multiple of num_heads, got {msa_dim}, {num_heads}")
        self.msa_dim = msa_dim
        self.pair_dim = pair_dim
        self.num_heads = num_heads
        self.layer_norm = nn.LayerNorm(msa_dim)
        self.query = nn.Linear(msa_dim, msa_dim, bias=False)
        self.key = nn.Linear(msa_dim, msa_dim, bias=False)
        self.value = nn.Linear(msa_dim, msa_dim, bias=False)
        self.gate = nn.Linear(msa_dim, msa_dim)
        self.pair_bias = nn.Linear(pair_dim, num_heads, bias=False)
        self.out_proj = nn.Linear(msa_dim, msa_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, msa_repr: Tensor, pair_repr: Tensor, msa_mask: Tensor | None = None
    ) -> Tensor:
        """Attend along the rows of the MSA.

        ``msa_repr`` (B, S, N, msa_dim), ``pair_repr`` (B, N, N, pair_dim), ``msa_mask``
        (B, S, N) -> (B, S, N, msa_dim).
        """
        x = self.layer_norm(msa_repr)
        q = self.query(x).unflatten(-1, (self.num_heads, -1))
        k = self.key(x).unflatten(-1, (self.num_heads, -1))
        v = self.value(x).unflatten(-1, (self.num_heads, -1))
        logits = torch.einsum("...sihd,...sjhd->...shij", q, k) / math.sqrt(q.shape[-1])
        logits = logits + self.pair_bias(pair_repr).movedim(-1, -3).unsqueeze(-4)
        if msa_mask is not None:
            absent = (msa_mask == 0)[..., None, None, :]
            logits = logits.masked_fill(absent, float("-inf"))
        weights = self.dropout(torch.softmax(logits, dim=-1))
        attended = torch.einsum("...shij,...sjhd->...sihd", weights, v).flatten(-2)
        return self.out_proj(torch.sigmoid(self.gate(x)) * attended)
