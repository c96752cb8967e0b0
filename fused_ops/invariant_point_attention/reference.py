# SPDX-License-Identifier: Apache-2.0
"""The definition of the op in plain PyTorch (after AlphaFold 2 supplement, Algorithm 22)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class InvariantPointAttention(nn.Module):
    """Eager invariant point attention; see :mod:`fused_ops` for the fast drop-in.

    Points are rows: ``to_global(p) = p @ R + t`` and ``to_local(g) = (g - t) @ R^T``.
    """

    def __init__(
        self,
        node_dim: int,
        pair_dim: int,
        num_heads: int,
        num_query_points: int,
        num_value_points: int,
    ) -> None:
        super().__init__()
        if num_heads < 1 or node_dim % num_heads:
            raise ValueError(
                f"node_dim must be a multiple of num_heads, got {node_dim}, {num_heads}"
            )
        self.node_dim = node_dim
        self.pair_dim = pair_dim
        self.num_heads = num_heads
        self.num_query_points = num_query_points
        self.num_value_points = num_value_points
        self.q_proj = nn.Linear(node_dim, node_dim, bias=False)
        self.k_proj = nn.Linear(node_dim, node_dim, bias=False)
        self.v_proj = nn.Linear(node_dim, node_dim, bias=False)
        self.q_pts = nn.Linear(node_dim, num_heads * num_query_points * 3, bias=False)
        self.k_pts = nn.Linear(node_dim, num_heads * num_query_points * 3, bias=False)
        self.v_pts = nn.Linear(node_dim, num_heads * num_value_points * 3, bias=False)
        self.pair_bias = nn.Linear(pair_dim, num_heads, bias=False)
        self.head_weights = nn.Parameter(torch.zeros(num_heads))
        self.out_proj = nn.Linear(node_dim + num_heads * num_value_points * 3, node_dim)
        self.layer_norm = nn.LayerNorm(node_dim)

    def forward(
        self,
        node_repr: Tensor,
        pair_repr: Tensor,
        translations: Tensor,
        rotations: Tensor,
        node_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend over residues.

        ``node_repr`` (B, N, node_dim), ``pair_repr`` (B, N, N, pair_dim), ``translations``
        (B, N, 3), ``rotations`` (B, N, 3, 3), ``node_mask`` (B, N) -> (B, N, node_dim).
        """
        heads = self.num_heads
        x = self.layer_norm(node_repr)
        q = self.q_proj(x).unflatten(-1, (heads, -1))
        k = self.k_proj(x).unflatten(-1, (heads, -1))
        v = self.v_proj(x).unflatten(-1, (heads, -1))

        def to_global(points: Tensor) -> Tensor:  # (..., N, H*P*3) -> (..., N, H, P, 3)
            local = points.unflatten(-1, (heads, -1, 3)).to(rotations.dtype)
            moved = torch.einsum("...nhpc,...ncd->...nhpd", local, rotations)
            return moved + translations[..., None, None, :]

        q_pts = to_global(self.q_pts(x))
        k_pts = to_global(self.k_pts(x))
        v_pts = to_global(self.v_pts(x))

        logits = torch.einsum("...ihd,...jhd->...hij", q, k) / math.sqrt(q.shape[-1])
        difference = q_pts.unsqueeze(-4) - k_pts.unsqueeze(-5)  # (..., i, j, H, P, 3)
        squared = difference.square().sum(dim=(-1, -2)).movedim(-1, -3)  # (..., H, i, j)
        point_weights = functional.softplus(self.head_weights)[:, None, None]
        logits = logits - 0.5 * point_weights * squared
        logits = logits + self.pair_bias(pair_repr).movedim(-1, -3)
        if node_mask is not None:
            absent = (node_mask == 0)[..., None, None, :]
            logits = logits.masked_fill(absent, float("-inf"))
        weights = torch.softmax(logits, dim=-1)

        scalar = torch.einsum("...hij,...jhd->...ihd", weights.to(v.dtype), v).flatten(-2)
        gathered = torch.einsum("...hij,...jhpd->...ihpd", weights.to(v_pts.dtype), v_pts)
        centred = gathered - translations[..., None, None, :]
        local = torch.einsum("...nhpd,...ncd->...nhpc", centred, rotations).flatten(-3)
        return self.out_proj(torch.cat([scalar, local.to(scalar.dtype)], dim=-1))
