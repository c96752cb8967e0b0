# SPDX-License-Identifier: Apache-2.0
"""The definition of the op in plain PyTorch."""

import torch
from torch import Tensor, nn


class TensorMatmul(nn.Module):
    """``C[..., k] = sum_l A[..., l] * B[l, k]``, written as an einsum."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply ``a`` (..., L) by ``b`` (L, K) and return (..., K)."""
        return torch.einsum("...l,lk->...k", a, b)
