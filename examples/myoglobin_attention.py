# SPDX-License-Identifier: Apache-2.0
"""Attention weights for the picture, recomputed from a module's parameters.

A fused module never holds its attention weights. These two functions repeat the mathematics in
plain PyTorch and also return the module's output made from the weights they found, so that the
caller can check that the picture shows what the module computed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def msa_row_attention(
    module: Any, msa: Tensor, pair: Tensor, msa_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights (B, S, H, N, N), each row of the last axis summing to 1, and output.

    Parameters
    ----------
    module : MSARowAttention
        Fused or reference; only its parameters are read.
    msa : Tensor
        (B, S, N, msa_dim)
    pair : Tensor
        (B, N, N, pair_dim)
    msa_mask : Tensor
        (B, S, N), zero where a row has a gap.
    """
    x = module.layer_norm(msa)
    q, k, v = (
        linear(x).unflatten(-1, (module.num_heads, -1))
        for linear in (module.query, module.key, module.value)
    )
    logits = torch.einsum("bsihd,bsjhd->bshij", q, k) / math.sqrt(q.shape[-1])
    logits = logits + module.pair_bias(pair).permute(0, 3, 1, 2)[:, None]
    logits = logits.masked_fill((msa_mask == 0)[:, :, None, None, :], -math.inf)
    weights = logits.softmax(-1)
    gathered = torch.einsum("bshij,bsjhd->bsihd", weights, v).flatten(-2)
    return weights, module.out_proj(module.gate(x).sigmoid() * gathered)


def invariant_point_attention(
    module: Any,
    node: Tensor,
    pair: Tensor,
    translations: Tensor,
    rotations: Tensor,
    node_mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Weights (B, H, N, N), each row of the last axis summing to 1, and output.

    Parameters
    ----------
    module : InvariantPointAttention
        Fused or reference; only its parameters are read.
    node : Tensor
        (B, N, node_dim)
    pair : Tensor
        (B, N, N, pair_dim)
    translations, rotations : Tensor
        (B, N, 3) and (B, N, 3, 3); points are rows, ``p @ R + t``.
    node_mask : Tensor
        (B, N), zero where a residue is absent.
    """
    heads = module.num_heads
    x = module.layer_norm(node)
    q, k, v = (
        linear(x).unflatten(-1, (heads, -1))
        for linear in (module.q_proj, module.k_proj, module.v_proj)
    )
    q_points, k_points, v_points = (
        torch.einsum("bnhpc,bncd->bnhpd", linear(x).unflatten(-1, (heads, -1, 3)), rotations)
        + translations[:, :, None, None]
        for linear in (module.q_pts, module.k_pts, module.v_pts)
    )
    separation = q_points[:, :, None] - k_points[:, None]
    squared = separation.square().sum((-1, -2)).permute(0, 3, 1, 2)
    logits = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    logits = logits - 0.5 * functional.softplus(module.head_weights)[:, None, None] * squared
    logits = logits + module.pair_bias(pair).permute(0, 3, 1, 2)
    logits = logits.masked_fill((node_mask == 0)[:, None, None, :], -math.inf)
    weights = logits.softmax(-1)
    scalars = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2)
    points = torch.einsum("bhij,bjhpd->bihpd", weights, v_points)
    local = torch.einsum("bnhpd,bncd->bnhpc", points - translations[:, :, None, None], rotations)
    return weights, module.out_proj(torch.cat([scalars, local.flatten(-3)], -1))
