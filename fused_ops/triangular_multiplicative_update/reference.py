# SPDX-License-Identifier: Apache-2.0
"""The definition of the op in plain PyTorch (AlphaFold 2 supplement, Algorithms 11 and 12).

One difference from AlphaFold: the output gate reads the raw pair representation, not the
normalised one.
"""

import torch
from torch import Tensor, nn


class TriangularMultiplicativeUpdate(nn.Module):
    """Eager triangular multiplicative update; see :mod:`fused_ops` for the fast drop-in."""

    def __init__(self, pair_dim: int, hidden_dim: int, direction: str = "incoming") -> None:
        super().__init__()
        if direction not in ("incoming", "outgoing"):
            raise ValueError(f"direction must be 'incoming' or 'outgoing', got {direction!r}")
        self.pair_dim = pair_dim
        self.hidden_dim = hidden_dim
        self.direction = direction
        self.layer_norm_in = nn.LayerNorm(pair_dim)
        self.proj_a = nn.Linear(pair_dim, hidden_dim)
        self.gate_a = nn.Linear(pair_dim, hidden_dim)
        self.proj_b = nn.Linear(pair_dim, hidden_dim)
        self.gate_b = nn.Linear(pair_dim, hidden_dim)
        self.layer_norm_out = nn.LayerNorm(hidden_dim)
        self.out_proj = nn.Linear(hidden_dim, pair_dim)
        self.out_gate = nn.Linear(pair_dim, pair_dim)

    def forward(self, pair_repr: Tensor, pair_mask: Tensor | None = None) -> Tensor:
        """``pair_repr`` (B, N, N, pair_dim), ``pair_mask`` (B, N, N) -> (B, N, N, pair_dim)."""
        x = self.layer_norm_in(pair_repr)
        a = self.proj_a(x) * torch.sigmoid(self.gate_a(x))
        b = self.proj_b(x) * torch.sigmoid(self.gate_b(x))
        if pair_mask is not None:
            factor = pair_mask.to(a.dtype).unsqueeze(-1)
            a = a * factor
            b = b * factor
        if self.direction == "outgoing":
            o = torch.einsum("...ikh,...jkh->...ijh", a, b)
        else:
            o = torch.einsum("...kih,...kjh->...ijh", a, b)
        return torch.sigmoid(self.out_gate(pair_repr)) * self.out_proj(self.layer_norm_out(o))
