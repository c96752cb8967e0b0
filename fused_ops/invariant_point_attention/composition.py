# SPDX-License-Identifier: Apache-2.0
"""Invariant point attention in stock PyTorch, block by block over the query rows.

``attention.py`` says how distances become a product and what is gathered, ``blocks.py`` in which
order pairs of residues are visited (docs/ops/invariant_point_attention.md).
"""

from __future__ import annotations

from torch import Tensor

from fused_ops import _compose
from fused_ops.invariant_point_attention.arguments import Arguments
from fused_ops.invariant_point_attention.attention import Attention, Gathered
from fused_ops.invariant_point_attention.backward import backward

__all__ = ["backward", "forward"]


def forward(*args: object) -> Tensor:
    """The op on checked arguments, those of :class:`Arguments`.

    ``node`` (*lead, N, c), ``pair`` (*lead, N, N, cz), ``translations`` (*lead, N, 3),
    ``rotations`` (*lead, N, 3, 3), ``node_mask`` (*lead, N), ``pair_value`` (*lead, N, N, cv)
    -> (*lead, N, c).
    """
    given = Arguments(*args)  # type: ignore[arg-type]
    node = given.node
    dtype = given.dtype or node.dtype
    if node.numel() == 0:
        return node.new_empty(node.shape, dtype=dtype)
    a = Attention(given, dtype)
    gathered = Gathered(a)
    for block in a.walk:
        pair = a.pair.rows(block, a.math.matmul)
        weights = a.weights(block, pair)
        gathered.add(block, _compose.cast(weights, a.gathering))
        if a.pair_value is not None:
            values = pair if given.gathers_pair else a.pair_value.rows(block, a.math.matmul)
            gathered.add_pairs(block, a.by_pair_row(weights, block, values), values)
    features, _ = gathered.finish()
    out = _compose.linear(features, given.out_proj_weight, given.out_proj_bias, a.math)
    return _compose.cast(out, dtype).view(node.shape)
