# SPDX-License-Identifier: Apache-2.0
"""The gradients of the composition, block by block, computing the attention weights again.

Shapes and dtypes are named as in ``attention.py``; F is the number of features that the output
projection takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops import _compose
from fused_ops.invariant_point_attention.arguments import DIFFERENTIABLE, Arguments
from fused_ops.invariant_point_attention.attention import (
    Attention,
    Gathered,
    by_pair_row,
    from_pair_rows,
)
from fused_ops.invariant_point_attention.blocks import Block, Pairs

_PROJECTIONS = tuple(
    (f"{name}_weight", f"{name}_bias")
    for name in ("q_proj", "k_proj", "v_proj", "q_pts", "k_pts", "v_pts")
)
_Q_PROJ, _K_PROJ, _V_PROJ, _Q_PTS, _K_PTS, _V_PTS = _PROJECTIONS


class _Needs:
    """What is asked for decides what is computed."""

    def __init__(self, gradients: _compose.Gradients, a: Attention) -> None:
        needs = gradients.needs
        self.input = needs("node", "layer_norm_weight", "layer_norm_bias")
        frames = needs("translations", "rotations")
        self.features = needs("out_proj_weight", "rotations") or a.norm_eps is not None
        self.scalar_logits = self.input or needs(*_Q_PROJ, *_K_PROJ)
        self.point_logits = self.input or frames or needs(*_Q_PTS, *_K_PTS, "head_weights")
        self.bias = needs("pair", "pair_bias_weight", "pair_bias_bias")
        self.logits = self.scalar_logits or self.point_logits or self.bias
        self.scalar_values = self.input or needs(*_V_PROJ)
        self.point_values = self.input or frames or needs(*_V_PTS)
        self.values = self.scalar_values or self.point_values
        self.pair_values = needs("pair_value") or (needs("pair") and a.pair_value is a.pair)


class _FeatureGradients:
    """Gradients of the features (L N, F), taken back to what the weights of a block multiply."""

    def __init__(self, a: Attention, d_features: Tensor) -> None:
        self._attention = a
        self._features = d_features.view(a.batch, a.length, -1)
        shape = (a.batch * a.length, a.heads * a.value_points, 3)
        if a.norm_eps is None:
            self.local, self.world, self._rows = self._back(self._features, None, None)
        else:  # in blocks, for the lengths' gradients need the points, which need the weights
            self.local = a.translations.new_empty(shape)
            self.world = a.translations.new_empty(shape)
        self._pair_values: Tensor | None = None
        if a.pair_value is not None:
            d_pair_values = self._features[..., a.norms_end :].unflatten(-1, (a.heads, -1))
            self._pair_values = _compose.cast(d_pair_values, a.math.matmul)

    def rows(self, block: Block, gathered: Gathered, values: Tensor | None) -> Tensor:
        """(batch H, r, d + E), in the dtype of gathering; ``values`` is what the block gathered."""
        a = self._attention
        if a.norm_eps is None:
            return block.queries(self._rows)
        assert values is not None
        _, points = gathered.local(values, block)
        local, world, rows = self._back(block.positions(self._features), block, points)
        for whole, part in ((self.local, local), (self.world, world)):
            target = block.positions(whole.view(a.batch, a.length, -1, 3))
            target.copy_(part.view(target.shape))
        return rows

    def pair_rows(self, block: Block, pairs: Tensor) -> Tensor:
        """Those of pair values, as :func:`by_pair_row` gives them."""
        assert self._pair_values is not None
        return by_pair_row(block.positions(self._pair_values).transpose(1, 2), block, pairs)

    def _back(
        self, d_features: Tensor, block: Block | None, points: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of local points and points in the global frame (batch r, H Pv, 3), and the rows.

        ``d_features`` (batch, r, F); ``points`` are the local ones, given if there are lengths.
        """
        a = self._attention
        batch, count = d_features.shape[:2]
        translations, rotations = a.translations, a.rotations
        if block is not None and not block.whole:
            shape = (a.batch, a.length)
            translations = block.positions(translations.view(*shape, 1, 3)).flatten(0, 1)
            rotations = block.positions(rotations.view(*shape, 3, 3)).flatten(0, 1)
        d_features = d_features.reshape(batch * count, -1)
        d_local = d_features[:, a.width : a.points_end].to(a.geometry)
        d_local = d_local.reshape(batch * count, -1, 3)
        if points is not None:
            lengths = a.lengths(points)
            ratio = d_features[:, a.points_end : a.norms_end].to(a.geometry) / lengths
            # Where a length is 0 the gradient is defined to be 0.
            ratio = ratio.masked_fill(lengths == 0, 0.0)
            d_local = torch.addcmul(d_local, ratio.unsqueeze(-1), points)
        d_global = torch.bmm(d_local, rotations)
        # The last column, against the -1/2 in the values, subtracts the query's translation, so
        # that the gradient of the weights does not carry a large constant per row into the
        # rounding.
        shift = (d_global * translations).view(batch * count, a.heads, -1).sum(dim=-1).mul_(2.0)
        parts = [
            part.reshape(batch * count, a.heads, -1).to(a.gathering)
            for part in (d_features[:, : a.width], d_global, shift)
        ]
        return d_local, d_global, a.by_head(torch.cat(parts, dim=-1), batch).contiguous()


class _PairGradient:
    """The gradient of a tensor of pairs: rounded block by block, or summed and then rounded."""

    def __init__(self, gradients: _compose.Gradients, name: str, pairs: Pairs, e: torch.dtype):
        self._pairs = pairs
        sums = gradients.buffer(name, e if pairs.accumulates else pairs.view.dtype)
        self._view = sums.view(pairs.view.shape)

    def add(self, block: Block, value: Tensor) -> None:
        """``value`` (batch r, N, channels) is what the block owes."""
        target = self._view[self._pairs.index(block)]
        value = value.view(target.shape)
        if self._pairs.accumulates:
            target += value
        else:
            target.copy_(value)


def backward(grad: Tensor, *args: object) -> list[Tensor]:
    """The wanted gradients of :func:`forward`, in the order of its differentiable arguments.

    ``args`` are those of :func:`forward` and a list of flags, one for each name in DIFFERENTIABLE.
    """
    *values, needs = args
    given = Arguments(*values)  # type: ignore[arg-type]
    node = given.node
    dtype = given.dtype or node.dtype
    math_ = _compose.arithmetic(node.device, dtype)
    e = math_.elementwise
    tensors = {name: getattr(given, name) for name in DIFFERENTIABLE}
    gradients = _compose.Gradients(tensors, needs, e)  # type: ignore[arg-type]
    if node.numel() == 0:
        return gradients.result()
    a = Attention(given, dtype)
    g = a.geometry
    need = _Needs(gradients, a)

    # Through the output projection and back to global coordinates.
    grad = grad.reshape(a.batch * a.length, a.channels)
    if gradients.needs("out_proj_bias"):
        gradients.add("out_proj_bias", grad.to(e).sum(dim=0))
    d_features = _compose.matmul(grad, given.out_proj_weight, math_)  # (L N, F)
    if a.dead is not None:
        d_features = d_features.view(a.batch, a.length, -1).masked_fill(a.dead, 0.0)
    from_features = _FeatureGradients(a, d_features)

    d_q, d_k = (t.new_zeros(t.shape) for t in (a.q, a.k))
    d_values = a.values.new_zeros(*a.values.shape[:-1], a.values.shape[-1] - 1)
    # Sums over keys of dS [k, -1/2, |k|^2] and over queries of dS w [q, |q|^2, -1/2].
    q_moments = a.q_features.new_zeros(a.q_features.shape)
    k_moments = a.k_features.new_zeros(a.k_features.shape)
    d_pair = d_pair_value = None
    if gradients.needs("pair"):
        d_pair = _PairGradient(gradients, "pair", a.pair, e)
    if gradients.needs("pair_value"):
        assert a.pair_value is not None
        d_pair_value = _PairGradient(gradients, "pair_value", a.pair_value, e)
    gathered = Gathered(a)

    for block in a.walk:
        heads, rows = block.heads, block.rows
        pair = a.pair.rows(block, math_.matmul)
        weights = a.weights(block, pair)
        wide = _compose.cast(weights, a.gathering)
        own = gathered.add(block, wide) if need.features else None
        d_rows = from_features.rows(block, gathered, own)
        if need.values:
            block.keys(d_values).baddbmm_(wide.transpose(1, 2), d_rows[..., :-1])
        from_values: Tensor | None = None  # what the pair owes to having been gathered
        if a.pair_value is not None:
            pair_values = pair if given.gathers_pair else a.pair_value.rows(block, math_.matmul)
            d_pair_rows = from_features.pair_rows(block, pair_values)
            if need.pair_values or gradients.needs("out_proj_weight"):
                by_row = a.by_pair_row(weights, block, pair_values)
            if gradients.needs("out_proj_weight"):
                gathered.add_pairs(block, by_row, pair_values)
            if need.pair_values:
                from_values = torch.bmm(by_row.transpose(1, 2), d_pair_rows)
                if d_pair_value is not None:
                    d_pair_value.add(block, from_values)
        if not need.logits:
            continue
        d_weights = torch.bmm(d_rows, block.keys(a.values).transpose(1, 2)).to(e)
        if a.pair_value is not None:
            by_row = torch.bmm(d_pair_rows, pair_values.transpose(1, 2))
            by_batch = d_weights.view(-1, a.heads, block.count, a.length)
            by_batch.add_(from_pair_rows(by_row, by_batch.shape[0], block.count).transpose(1, 2))
        d_logits = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, e)
        if need.scalar_logits:
            d_q[heads, rows] = torch.bmm(d_logits, block.keys(a.k)).mul_(a.scale)
            block.keys(d_k).baddbmm_(d_logits.transpose(1, 2), block.queries(a.q), alpha=a.scale)
        if need.point_logits:
            wide = d_logits.to(g)
            q_moments[heads, rows] = torch.bmm(wide, block.keys(a.k_features))
            block.keys(k_moments).baddbmm_(
                wide.transpose(1, 2), block.queries(a.weighted_q_features)
            )
        if need.bias:
            d_bias = d_logits.view(-1, a.heads, block.count, a.length)
            if a.bias_scale != 1.0:
                d_bias = d_bias * a.bias_scale
            if gradients.needs("pair_bias_bias"):
                gradients.add("pair_bias_bias", d_bias.sum(dim=(0, 2, 3)))
            if pair.shape[0] != d_bias.shape[0] * block.count:
                d_bias = d_bias.sum(dim=0, keepdim=True)  # one pair block for several elements
            # (batch r, H, N)
            d_bias = d_bias.transpose(1, 2).reshape(-1, a.heads, a.length).to(math_.matmul)
            if gradients.needs("pair_bias_weight"):
                gradients.add("pair_bias_weight", torch.bmm(d_bias, pair).sum(dim=0))
            if d_pair is not None:
                weight = a.pair_bias_weight.expand(d_bias.shape[0], -1, -1)
                d_block = torch.bmm(d_bias.transpose(1, 2), weight)
                if from_values is not None and given.gathers_pair:
                    d_block += from_values
                d_pair.add(block, d_block)

    if need.features:
        features, centred = gathered.finish()
        if gradients.needs("out_proj_weight"):
            features = features.view(a.batch * a.length, -1)
            gradients.add("out_proj_weight", _compose.matmul(grad.t(), features, math_))
    if gradients.needs("head_weights"):
        by_head = (a.q_features * q_moments).unflatten(0, (a.batch, a.heads)).sum(dim=(0, 2, 3))
        by_head *= torch.sigmoid(given.head_weights.to(g))
        if given.point_scale != 1.0:
            by_head *= given.point_scale
        gradients.add("head_weights", by_head)
    d_v, d_v_points = d_values.split([a.width // a.heads, 3 * a.value_points], dim=-1)
    d_outputs: list[Tensor | None] = [None] * 6
    if need.scalar_logits or need.scalar_values:
        d_outputs[:3] = [a.by_position(t) for t in (d_q, d_k, d_v.to(e))]
    if need.point_logits or need.point_values:
        d_points = _point_gradients(a, q_moments, k_moments, d_v_points)
        if gradients.needs("translations"):
            d_translations = d_points.sum(dim=1) - from_features.world.sum(dim=1)
            d_translations = d_translations.view(*node.shape[:-1], 3)
            gradients.add("translations", d_translations.sum_to_size(given.translations.shape))
        if gradients.needs("rotations"):
            d_rotations = torch.bmm(a.local_points.transpose(1, 2), d_points)
            d_rotations.baddbmm_(from_features.local.transpose(1, 2), centred)
            d_rotations = d_rotations.view(*node.shape[:-1], 3, 3)
            gradients.add("rotations", d_rotations.sum_to_size(given.rotations.shape))
        d_local = torch.bmm(d_points, a.rotations.transpose(1, 2)).to(e).flatten(1)
        sizes = [3 * a.heads * count for count in (a.query_points, a.query_points, a.value_points)]
        d_outputs[3:] = d_local.split(sizes, dim=-1)
    _through_inputs(gradients, given, a, d_outputs, need.input)
    return gradients.result()


def _point_gradients(
    a: Attention, q_moments: Tensor, k_moments: Tensor, d_v_points: Tensor
) -> Tensor:
    """From moments to gradients of points in the global frame, (L N, T, 3)."""
    columns = 3 * a.query_points
    q_points, k_points = a.q_features[..., :columns], a.k_features[..., :columns]
    total = q_moments[..., columns : columns + 1]
    d_q = q_moments[..., :columns] + 2.0 * q_points * total
    d_q = (d_q.view(a.batch, a.heads, a.length, -1) * a.point_weights).flatten(0, 1)
    d_k = k_moments[..., :columns] + 2.0 * k_points * k_moments[..., columns + 1 :]
    parts = [a.by_position(t) for t in (d_q, d_k, d_v_points.to(a.geometry))]
    return torch.cat(parts, dim=-1).view(a.batch * a.length, -1, 3)


def _through_inputs(
    gradients: _compose.Gradients,
    given: Arguments,
    a: Attention,
    d_outputs: list[Tensor | None],
    through: bool,
) -> None:
    """The six projections, whose results' gradients are given, and the LayerNorm."""
    d_x = torch.zeros_like(a.x) if through else None
    for (weight, bias), d_output in zip(_PROJECTIONS, d_outputs, strict=True):
        if d_output is None:
            continue
        if d_x is not None:
            d_x += _compose.matmul(d_output, getattr(given, weight), a.math)
        if gradients.needs(weight):
            gradients.add(weight, _compose.matmul(d_output.t(), a.x, a.math))
        if gradients.needs(bias):
            gradients.add(bias, d_output.sum(dim=0))
    if d_x is None:
        return
    if a.mean is None or a.rstd is None:  # no LayerNorm
        gradients.add("node", d_x.view(given.node.shape))
        return
    assert given.layer_norm_weight is not None
    assert given.layer_norm_bias is not None
    d_node, d_weight, d_bias = _compose.layer_norm_backward(
        d_x, a.node, a.mean, a.rstd, given.layer_norm_weight, given.layer_norm_bias, a.math
    )
    gradients.add("node", d_node.view(given.node.shape))
    gradients.add("layer_norm_weight", d_weight)
    gradients.add("layer_norm_bias", d_bias)
