# SPDX-License-Identifier: Apache-2.0
"""Invariant point attention in stock PyTorch, block by block over the query rows.

Distances come from one float64 product per head of augmented coordinates,

    w * (q . k - |q|^2 / 2 - |k|^2 / 2) = (w * [q, |q|^2, -1/2]) . [k, -1/2, |k|^2],

so the (N, N, H, P, 3) tensor of differences never exists, and float64 keeps the expansion exact
enough for coordinates far from the origin. Scalar and point values are gathered by one product of
the weights with [v, value points, -1/2] (docs/ops/invariant_point_attention.md).

Shapes: L is the product of the leading axes, r the rows of a block, d the channels of a head,
D = 3 Pq + 2, E = 3 Pv + 1, T = H (2 Pq + Pv). "e" is the elementwise dtype, "g" that of geometry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from fused_ops import _compose

# Elements in the weights of the six input projections up to which joining them is worth it: one
# product in place of six.
_JOINED_ELEMENTS = 1 << 16

# Attention weights, L H N N, from which on the CPU gathers points in fp32. With fewer, the calls
# that centre the coordinates cost more than float64 does.
_FP32_GATHER_WEIGHTS = 1 << 14


class _Block:
    """Some query rows of some batch elements: all rows, or a part of them of one element."""

    def __init__(
        self,
        batch: slice,
        rows: slice,
        heads: int,
        outer: tuple[int, ...],
        pair: slice,
        whole: bool,
    ) -> None:
        self.whole = whole
        """Whether these are all rows of all batch elements: slices of everything cost time too."""
        self.batch = batch
        """Of the flattened leading axes."""
        self.heads = slice(batch.start * heads, batch.stop * heads)
        """The same in (batch, head) flattened."""
        self.rows = rows
        self.pair: tuple[int | slice, ...] = (*outer, pair, rows)
        """Index into the pair tensor as :class:`_Walk` views it."""

    def keys(self, tensor: Tensor) -> Tensor:
        """The heads of the block, all N, of ``tensor`` (L H, N, ...)."""
        return tensor if self.whole else tensor[self.heads]

    def queries(self, tensor: Tensor) -> Tensor:
        """The heads and the rows of the block."""
        return tensor if self.whole else tensor[self.heads, self.rows]


class _Walk:
    """The order in which blocks are visited, and the pair tensor seen in that order."""

    def __init__(self, pair: Tensor, lead: tuple[int, ...], heads: int) -> None:
        pair = pair[(None,) * (len(lead) + 3 - pair.dim())]
        self._heads = heads
        self._length = pair.shape[-2]
        # As many trailing lead axes as possible become one batch axis, over which the pair
        # tensor is either full or broadcast; the others are looped over.
        for split in range(len(lead) + 1):
            self._batch = math.prod(lead[split:])
            size = math.prod(pair.shape[split : len(lead)])
            if size not in (1, self._batch):
                continue
            shape = (*pair.shape[:split], size, *pair.shape[-3:])
            try:
                self.pair = pair.view(shape)
            except RuntimeError:  # not expressible with one stride, and never to be copied
                continue
            self._outer = lead[:split]
            break
        self.accumulates = self.pair.shape[:-3] != (*self._outer, self._batch)
        """Whether several batch elements share a block of the pair tensor."""

    def __iter__(self) -> Iterator[_Block]:
        n, device = self._length, self.pair.device
        rows = min(n, _compose.block_length(device, self._heads * n))
        if rows < n:
            # No last block of a row or two, which takes as many calls as the others.
            even = math.ceil(n / math.ceil(n / rows))
            rows = min(rows, 8 * math.ceil(even / 8))
        together = 1
        if rows == n:
            # The pair block counts too: it is copied where it is strided, expanded or 16-bit.
            widest = max(self._heads, self.pair.shape[-1])
            together = _compose.block_length(device, widest * n * n)
        shared = self.pair.shape[-4] == 1
        whole = rows == n and together >= self._batch and not self._outer
        for position, index in enumerate(_compose.lead_indices(self._outer)):
            outer = _compose.broadcast_index(index, tuple(self.pair.shape[:-4]))
            for batch in _compose.blocks(self._batch, together):
                start = position * self._batch
                flat = slice(start + batch.start, start + batch.stop)
                for part in _compose.blocks(n, rows):
                    pair = slice(0, 1) if shared else batch
                    yield _Block(flat, part, self._heads, outer, pair, whole)


class _Attention:
    """Everything before the attention itself, and the attention weights of a block."""

    def __init__(
        self,
        node: Tensor,
        pair: Tensor,
        translations: Tensor,
        rotations: Tensor,
        node_mask: Tensor | None,
        layer_norm_weight: Tensor,
        layer_norm_bias: Tensor,
        q_proj_weight: Tensor,
        k_proj_weight: Tensor,
        v_proj_weight: Tensor,
        q_pts_weight: Tensor,
        k_pts_weight: Tensor,
        v_pts_weight: Tensor,
        pair_bias_weight: Tensor,
        head_weights: Tensor,
        num_heads: int,
        num_query_points: int,
        num_value_points: int,
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        self.math = _compose.arithmetic(node.device, dtype)
        g = self.geometry = _compose.geometry_dtype(node.device)
        lead = tuple(node.shape[:-2])
        self.batch = math.prod(lead)
        self.length, self.channels = node.shape[-2:]
        self.width = v_proj_weight.shape[0]
        self.heads = num_heads
        self.query_points = num_query_points
        self.value_points = num_value_points
        self.walk = _Walk(pair, lead, num_heads)
        # dtype of what the weights gather. fp32 keeps enough of centred coordinates, but a GPU may
        # have been told to multiply in TF32.
        many = self.batch * num_heads * self.length**2 >= _FP32_GATHER_WEIGHTS
        self.gathering = self.math.elementwise if many and node.device.type == "cpu" else g
        self.pair_bias_weight = _compose.cast(pair_bias_weight, self.math.matmul)
        positions = self.batch * self.length

        # (L N, c)
        self.node = node.reshape(positions, self.channels)
        self.x, self.mean, self.rstd = _compose.layer_norm(
            self.node, layer_norm_weight, layer_norm_bias, eps, self.math
        )
        q, k, v, local = self._project(
            [q_proj_weight, k_proj_weight, v_proj_weight],
            [q_pts_weight, k_pts_weight, v_pts_weight],
        )
        # (L H, N, d)
        self.q = self.by_head(q)
        self.k = self.by_head(k)
        self.scale = 1.0 / math.sqrt(q_proj_weight.shape[0] // num_heads)

        n = self.length
        self.absent: Tensor | None = None
        self.dead: Tensor | None = None
        if node_mask is not None:
            present = (node_mask != 0).expand(*lead, n).reshape(self.batch, n)
            dead = ~present.any(dim=-1, keepdim=True)
            # A batch element without keys is computed as if it had all of them, and what it
            # gathers is then zeroed: finite numbers throughout, and no case by case.
            self.absent = ~(present | dead).view(self.batch, 1, 1, n)
            self.dead = dead.view(self.batch, 1, 1)

        # (L N, 1, 3), (L N, 3, 3), (L N, T, 3)
        translations = _spread(translations.to(g), (*lead, n, 3))
        if self.gathering != g:
            translations = _centred(translations.reshape(self.batch, n, 3), self.absent)
        self.translations = translations.reshape(positions, 1, 3)
        self.rotations = _spread(rotations.to(g), (*lead, n, 3, 3)).reshape(positions, 3, 3)
        self.local_points = local.to(g).view(positions, -1, 3)
        moved = torch.baddbmm(self.translations, self.local_points, self.rotations)
        qk, points = moved.split(
            [2 * num_heads * num_query_points, num_heads * num_value_points], 1
        )
        qk = qk.view(positions, 2, num_heads, -1)
        q, k = qk.unbind(1)
        q_square, k_square = qk.square().sum(dim=-1, keepdim=True).unbind(1)
        half = q.new_full((), -0.5).expand_as(q_square)
        # (L H, N, 2 D) g and (L H, N, d + E) in the dtype of gathering
        points = points.view(positions, num_heads, -1)
        columns = [q, q_square, half, k, half, k_square]
        values = [v.view(positions, num_heads, -1), points, half]
        values = [_compose.cast(part, self.gathering) for part in values]
        width = 3 * num_query_points + 2
        if self.gathering == g:
            features = self.by_head(torch.cat(columns + values, dim=-1)).contiguous()
            self.values = features[..., 2 * width :]
        else:
            features = self.by_head(torch.cat(columns, dim=-1)).contiguous()
            self.values = self.by_head(torch.cat(values, dim=-1)).contiguous()
        self.q_features = features[..., :width]
        self.k_features = features[..., width : 2 * width]
        self.point_weights = functional.softplus(head_weights.to(g)).view(num_heads, 1, 1)
        point_weights = self.point_weights
        if self.batch > 1:
            point_weights = point_weights.repeat(self.batch, 1, 1)
        self.weighted_q_features = self.q_features * point_weights

    def _project(self, scalars: list[Tensor], points: list[Tensor]) -> list[Tensor]:
        """The linears of x: one of each weight in ``scalars``, one of all in ``points``."""
        weights = scalars + points
        sizes = [weight.shape[0] for weight in weights]
        if sum(sizes) * self.channels <= _JOINED_ELEMENTS:
            out = _compose.linear(self.x, torch.cat(weights), None, self.math)
            return list(out.split([*sizes[:3], sum(sizes[3:])], dim=-1))
        outs = [_compose.linear(self.x, weight, None, self.math) for weight in weights]
        return [*outs[:3], torch.cat(outs[3:], dim=-1)]

    def by_head(self, x: Tensor) -> Tensor:
        """(L N, H times something) -> (L H, N, something); a view if L is 1."""
        if self.batch == 1:
            return x.reshape(self.length, self.heads, -1).transpose(0, 1)
        x = x.reshape(self.batch, self.length, self.heads, -1)
        return x.transpose(1, 2).reshape(self.batch * self.heads, self.length, -1)

    def by_position(self, x: Tensor) -> Tensor:
        """(L H, N, something) -> (L N, H times something)."""
        x = x.view(self.batch, self.heads, self.length, -1).transpose(1, 2)
        return x.reshape(self.batch * self.length, -1)

    def pair_rows(self, block: _Block) -> Tensor:
        """The pair block as (batch r, N, cz) in the matmul dtype; only the block is copied."""
        pair = _compose.cast(self.walk.pair[block.pair], self.math.matmul)
        return pair.reshape(-1, *pair.shape[-2:]).contiguous()

    def weights(self, block: _Block, pair: Tensor) -> Tensor:
        """Attention weights (batch H, r, N) in the elementwise dtype."""
        n = self.length
        rows = block.rows
        scores = torch.bmm(
            block.queries(self.weighted_q_features), block.keys(self.k_features).transpose(1, 2)
        ).to(self.math.elementwise)
        by_batch = scores.view(-1, self.heads, rows.stop - rows.start, n)
        # Row by row, so that the product's result has the keys innermost as the scores do.
        weight = self.pair_bias_weight.expand(pair.shape[0], -1, -1)
        bias = torch.bmm(weight, pair.transpose(1, 2))  # (batch r, H, N)
        by_batch.add_(bias.view(-1, by_batch.shape[2], self.heads, n).transpose(1, 2))
        scores.baddbmm_(block.queries(self.q), block.keys(self.k).transpose(1, 2), alpha=self.scale)
        if self.absent is not None:
            by_batch.masked_fill_(self.absent[block.batch], float("-inf"))
        return torch.softmax(scores, dim=-1)


def _spread(frames: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``frames`` over all leading axes."""
    return frames if frames.shape == shape else frames.expand(shape)


def _centred(translations: Tensor, absent: Tensor | None) -> Tensor:
    """``translations`` (L, N, 3) less their median, by coordinate, over the residues there are.

    The median moves with the protein exactly, and is not moved by a few far residues.
    """
    if absent is None:
        return translations - translations.median(dim=1, keepdim=True).values
    present = translations.masked_fill(absent.view(*translations.shape[:2], 1), math.nan)
    return translations - present.nanmedian(dim=1, keepdim=True).values


class _Gathered:
    """What the queries gather: (L, N, H, d + E), made into the input of the output projection."""

    def __init__(self, attention: _Attention) -> None:
        self._attention = attention
        self._gathered: Tensor | None = None

    def add(self, block: _Block, weights: Tensor) -> None:
        """Gather with the ``weights`` of a block, which are in the dtype of gathering."""
        a, rows = self._attention, block.rows
        values = torch.bmm(weights, block.keys(a.values))
        values = values.view(-1, a.heads, rows.stop - rows.start, values.shape[-1])
        values = values.transpose(1, 2)
        if block.whole:
            self._gathered = values
            return
        if self._gathered is None:
            self._gathered = values.new_empty(a.batch, a.length, *values.shape[2:])
        self._gathered[block.batch, rows] = values

    def finish(self) -> tuple[Tensor, Tensor]:
        """Features (L, N, c + 3 H Pv), and gathered points less their query's (L N, H Pv, 3)."""
        a = self._attention
        depth = a.width // a.heads
        assert self._gathered is not None
        scalars, points = self._gathered.split([depth, 3 * a.value_points + 1], dim=-1)
        # A difference of large numbers, of which the first alone is rounded.
        points = _compose.cast(points, a.geometry)
        minus_half = points[..., -1:].unsqueeze(-1)
        points = points[..., :-1].view(a.batch, a.length, a.heads, a.value_points, 3)
        shift = a.translations.view(a.batch, a.length, 1, 1, 3)
        # The sum of the weights, gathered as -1/2 of it, is 1 but for rounding; times the
        # coordinates it would not be.
        centred = points.new_empty(points.shape)  # contiguous, which ``points`` need not be
        torch.addcmul(points, minus_half, shift, value=2, out=centred)
        centred = centred.view(a.batch * a.length, -1, 3)
        local = torch.bmm(centred, a.rotations.transpose(1, 2))
        features = a.x.new_empty(a.batch, a.length, a.width + 3 * a.heads * a.value_points)
        features[..., : a.width].view(scalars.shape).copy_(scalars)
        features[..., a.width :] = local.view(a.batch, a.length, -1)
        if a.dead is not None:
            features.masked_fill_(a.dead, 0.0)
        return features, centred


def forward(
    node: Tensor,
    pair: Tensor,
    translations: Tensor,
    rotations: Tensor,
    node_mask: Tensor | None,
    layer_norm_weight: Tensor,
    layer_norm_bias: Tensor,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    q_pts_weight: Tensor,
    k_pts_weight: Tensor,
    v_pts_weight: Tensor,
    pair_bias_weight: Tensor,
    head_weights: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    num_heads: int,
    num_query_points: int,
    num_value_points: int,
    eps: float,
    precision: str,
    dtype: torch.dtype | None,
) -> Tensor:
    """The op on checked arguments.

    ``node`` (*lead, N, c), ``pair`` (*lead, N, N, cz), ``translations`` (*lead, N, 3),
    ``rotations`` (*lead, N, 3, 3), ``node_mask`` (*lead, N) -> (*lead, N, c).
    """
    dtype = dtype or node.dtype
    if node.numel() == 0:
        return node.new_empty(node.shape, dtype=dtype)
    a = _Attention(
        node,
        pair,
        translations,
        rotations,
        node_mask,
        layer_norm_weight,
        layer_norm_bias,
        q_proj_weight,
        k_proj_weight,
        v_proj_weight,
        q_pts_weight,
        k_pts_weight,
        v_pts_weight,
        pair_bias_weight,
        head_weights,
        num_heads,
        num_query_points,
        num_value_points,
        eps,
        dtype,
    )
    gathered = _Gathered(a)
    for block in a.walk:
        weights = a.weights(block, a.pair_rows(block))
        gathered.add(block, _compose.cast(weights, a.gathering))
    features, _ = gathered.finish()
    out = _compose.linear(features, out_proj_weight, out_proj_bias, a.math)
    return _compose.cast(out, dtype).view(node.shape)


def backward(
    grad: Tensor,
    node: Tensor,
    pair: Tensor,
    translations: Tensor,
    rotations: Tensor,
    node_mask: Tensor | None,
    layer_norm_weight: Tensor,
    layer_norm_bias: Tensor,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    q_pts_weight: Tensor,
    k_pts_weight: Tensor,
    v_pts_weight: Tensor,
    pair_bias_weight: Tensor,
    head_weights: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    num_heads: int,
    num_query_points: int,
    num_value_points: int,
    eps: float,
    precision: str,
    dtype: torch.dtype | None,
    needs: list[bool],
) -> list[Tensor]:
    """The wanted gradients of :func:`forward`, in the order of its differentiable arguments."""
    dtype = dtype or node.dtype
    math_ = _compose.arithmetic(node.device, dtype)
    e = math_.elementwise
    gradients = _compose.Gradients(
        {
            "node": node,
            "pair": pair,
            "translations": translations,
            "rotations": rotations,
            "layer_norm_weight": layer_norm_weight,
            "layer_norm_bias": layer_norm_bias,
            "q_proj_weight": q_proj_weight,
            "k_proj_weight": k_proj_weight,
            "v_proj_weight": v_proj_weight,
            "q_pts_weight": q_pts_weight,
            "k_pts_weight": k_pts_weight,
            "v_pts_weight": v_pts_weight,
            "pair_bias_weight": pair_bias_weight,
            "head_weights": head_weights,
            "out_proj_weight": out_proj_weight,
            "out_proj_bias": out_proj_bias,
        },
        needs,
        e,
    )
    if node.numel() == 0:
        return gradients.result()
    a = _Attention(
        node,
        pair,
        translations,
        rotations,
        node_mask,
        layer_norm_weight,
        layer_norm_bias,
        q_proj_weight,
        k_proj_weight,
        v_proj_weight,
        q_pts_weight,
        k_pts_weight,
        v_pts_weight,
        pair_bias_weight,
        head_weights,
        num_heads,
        num_query_points,
        num_value_points,
        eps,
        dtype,
    )
    g = a.geometry
    lead = tuple(node.shape[:-2])
    positions = a.batch * a.length

    # What is asked for decides what is computed.
    through_input = gradients.needs("node", "layer_norm_weight", "layer_norm_bias")
    through_frames = gradients.needs("translations", "rotations")
    need_output = gradients.needs("out_proj_weight", "rotations")
    need_scalar_logits = through_input or gradients.needs("q_proj_weight", "k_proj_weight")
    need_point_logits = (
        through_input
        or through_frames
        or gradients.needs("q_pts_weight", "k_pts_weight", "head_weights")
    )
    need_bias = gradients.needs("pair", "pair_bias_weight")
    need_logits = need_scalar_logits or need_point_logits or need_bias
    need_scalar_values = through_input or gradients.needs("v_proj_weight")
    need_point_values = through_input or through_frames or gradients.needs("v_pts_weight")
    need_values = need_scalar_values or need_point_values

    # Through the output projection and back to global coordinates.
    grad = grad.reshape(positions, a.channels)
    if gradients.needs("out_proj_bias"):
        gradients.add("out_proj_bias", grad.to(e).sum(dim=0))
    d_features = _compose.matmul(grad, out_proj_weight, math_)  # (L N, c + 3 H Pv)
    if a.dead is not None:
        d_features = d_features.view(a.batch, a.length, -1).masked_fill(a.dead, 0.0)
        d_features = d_features.view(positions, -1)
    d_local = d_features[:, a.width :].to(g).reshape(positions, -1, 3)  # (L N, H Pv, 3)
    d_global = torch.bmm(d_local, a.rotations)
    # The last column, against the -1/2 in the values, subtracts the query's translation, so that
    # the gradient of the weights does not carry a large constant per row into the rounding.
    shift = (d_global * a.translations).view(positions, a.heads, -1).sum(dim=-1).mul_(2.0)
    parts = [
        part.reshape(positions, a.heads, -1).to(a.gathering)
        for part in (d_features[:, : a.width], d_global, shift)
    ]
    d_gathered = a.by_head(torch.cat(parts, dim=-1)).contiguous()  # (L H, N, d + E)
    depth = a.width // a.heads

    d_q, d_k = (t.new_zeros(t.shape) for t in (a.q, a.k))
    d_values = a.values.new_zeros(*a.values.shape[:-1], a.values.shape[-1] - 1)
    # Sums over keys of dS [k, -1/2, |k|^2] and over queries of dS w [q, |q|^2, -1/2].
    q_moments = a.q_features.new_zeros(a.q_features.shape)
    k_moments = a.k_features.new_zeros(a.k_features.shape)
    d_pair = None
    if gradients.needs("pair"):
        d_pair = gradients.buffer("pair", e if a.walk.accumulates else pair.dtype)
        d_pair = d_pair.view(a.walk.pair.shape)
    gathered = _Gathered(a)

    for block in a.walk:
        heads, rows = block.heads, block.rows
        pair_rows = a.pair_rows(block)
        weights = a.weights(block, pair_rows)
        wide = _compose.cast(weights, a.gathering)
        d_rows = block.queries(d_gathered)
        if need_output:
            gathered.add(block, wide)
        if need_values:
            block.keys(d_values).baddbmm_(wide.transpose(1, 2), d_rows[..., :-1])
        if not need_logits:
            continue
        d_weights = torch.bmm(d_rows, block.keys(a.values).transpose(1, 2)).to(e)
        d_logits = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, e)
        if need_scalar_logits:
            d_q[heads, rows] = torch.bmm(d_logits, block.keys(a.k)).mul_(a.scale)
            block.keys(d_k).baddbmm_(d_logits.transpose(1, 2), block.queries(a.q), alpha=a.scale)
        if need_point_logits:
            wide = d_logits.to(g)
            q_moments[heads, rows] = torch.bmm(wide, block.keys(a.k_features))
            block.keys(k_moments).baddbmm_(
                wide.transpose(1, 2), block.queries(a.weighted_q_features)
            )
        if need_bias:
            d_bias = d_logits.view(-1, a.heads, rows.stop - rows.start, a.length)
            if pair_rows.shape[0] != d_bias.shape[0] * d_bias.shape[2]:
                d_bias = d_bias.sum(dim=0, keepdim=True)  # one pair block for several elements
            # (batch r, H, N)
            d_bias = d_bias.transpose(1, 2).reshape(-1, a.heads, a.length).to(math_.matmul)
            if gradients.needs("pair_bias_weight"):
                gradients.add("pair_bias_weight", torch.bmm(d_bias, pair_rows).sum(dim=0))
            if d_pair is not None:
                weight = a.pair_bias_weight.expand(d_bias.shape[0], -1, -1)
                target = d_pair[block.pair]
                value = torch.bmm(d_bias.transpose(1, 2), weight).view(target.shape)
                if a.walk.accumulates:
                    target += value
                else:
                    target.copy_(value)

    # Points: from moments to coordinates, then to the local frames and to the frames themselves.
    columns = 3 * a.query_points
    d_v, d_v_points = d_values.split([depth, 3 * a.value_points], dim=-1)
    d_frame_points = None
    if need_point_logits or need_point_values:
        weights4 = a.point_weights
        q_points, k_points = a.q_features[..., :columns], a.k_features[..., :columns]
        total = q_moments[..., columns : columns + 1]
        d_q_points = q_moments[..., :columns] + 2.0 * q_points * total
        d_q_points = (d_q_points.view(a.batch, a.heads, a.length, -1) * weights4).flatten(0, 1)
        d_k_points = k_moments[..., :columns] + 2.0 * k_points * k_moments[..., columns + 1 :]
        d_frame_points = torch.cat(
            [a.by_position(t) for t in (d_q_points, d_k_points, d_v_points.to(g))], dim=-1
        ).view(positions, -1, 3)
    if gradients.needs("head_weights"):
        by_head = (a.q_features * q_moments).unflatten(0, (a.batch, a.heads)).sum(dim=(0, 2, 3))
        gradients.add("head_weights", by_head * torch.sigmoid(head_weights.to(g)))

    centred = None
    if need_output:
        features, centred = gathered.finish()
        if gradients.needs("out_proj_weight"):
            features = features.view(positions, -1)
            gradients.add("out_proj_weight", _compose.matmul(grad.t(), features, math_))
    if gradients.needs("translations"):
        assert d_frame_points is not None
        d_translations = d_frame_points.sum(dim=1) - d_global.sum(dim=1)
        d_translations = d_translations.view(*lead, a.length, 3)
        gradients.add("translations", d_translations.sum_to_size(translations.shape))
    if gradients.needs("rotations"):
        assert d_frame_points is not None
        assert centred is not None
        d_rotations = torch.bmm(a.local_points.transpose(1, 2), d_frame_points)
        d_rotations.baddbmm_(d_local.transpose(1, 2), centred)
        d_rotations = d_rotations.view(*lead, a.length, 3, 3)
        gradients.add("rotations", d_rotations.sum_to_size(rotations.shape))

    # The six input projections.
    d_x = torch.zeros_like(a.x) if through_input else None
    d_outputs = []
    if need_scalar_logits or need_scalar_values:
        for name, weight, value in (
            ("q_proj_weight", q_proj_weight, d_q),
            ("k_proj_weight", k_proj_weight, d_k),
            ("v_proj_weight", v_proj_weight, d_v.to(e)),
        ):
            d_outputs.append((name, weight, a.by_position(value)))
    if d_frame_points is not None:
        d_local_points = torch.bmm(d_frame_points, a.rotations.transpose(1, 2))
        d_local_points = d_local_points.to(e).view(positions, -1)
        sizes = [weight.shape[0] for weight in (q_pts_weight, k_pts_weight, v_pts_weight)]
        q_part, k_part, v_part = d_local_points.split(sizes, dim=-1)
        d_outputs.append(("q_pts_weight", q_pts_weight, q_part))
        d_outputs.append(("k_pts_weight", k_pts_weight, k_part))
        d_outputs.append(("v_pts_weight", v_pts_weight, v_part))
    for name, weight, value in d_outputs:
        if d_x is not None:
            d_x += _compose.matmul(value, weight, math_)
        if gradients.needs(name):
            gradients.add(name, _compose.matmul(value.t(), a.x, math_))

    if d_x is not None:
        d_node, d_weight, d_bias = _compose.layer_norm_backward(
            d_x, a.node, a.mean, a.rstd, layer_norm_weight, layer_norm_bias, math_
        )
        gradients.add("node", d_node.view(node.shape))
        gradients.add("layer_norm_weight", d_weight)
        gradients.add("layer_norm_bias", d_bias)
    return gradients.result()
