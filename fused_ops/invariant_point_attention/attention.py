# SPDX-License-Identifier: Apache-2.0
"""What forward and backward of the composition share: attention weights, and what they gather.

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

import torch
from torch import Tensor
from torch.nn import functional

from fused_ops import _compose
from fused_ops.invariant_point_attention.arguments import Arguments
from fused_ops.invariant_point_attention.blocks import Block, Walk

# Elements in the weights of the six input projections up to which joining them is worth it: one
# product in place of six.
_JOINED_ELEMENTS = 1 << 16

# Attention weights, L H N N, from which on the CPU gathers points in fp32. With fewer, the calls
# that centre the coordinates cost more than float64 does.
_FP32_GATHER_WEIGHTS = 1 << 14


class Attention:
    """Everything before the attention itself, and the attention weights of a block."""

    def __init__(self, given: Arguments, dtype: torch.dtype) -> None:
        node = given.node
        self.math = _compose.arithmetic(node.device, dtype)
        g = self.geometry = _compose.geometry_dtype(node.device)
        lead = tuple(node.shape[:-2])
        self.batch = math.prod(lead)
        self.length, self.channels = node.shape[-2:]
        self.width = given.v_proj_weight.shape[0]
        heads = self.heads = given.num_heads
        self.query_points = given.num_query_points
        self.value_points = given.num_value_points
        self.norm_eps = given.norm_eps
        # Columns of the features: scalars, local points, their lengths, pair values.
        self.points_end = self.width + 3 * heads * self.value_points
        self.norms_end = self.points_end
        if self.norm_eps is not None:
            self.norms_end += heads * self.value_points
        self.features_end = self.norms_end + heads * given.value_channels
        tensors = [given.pair] if given.pair_value is None else [given.pair, given.pair_value]
        self.walk = Walk(tensors, lead, heads)
        self.pair, *others = self.walk.pairs
        # The tensor of pairs that values are gathered from.
        self.pair_value = self.pair if given.gathers_pair else others[0] if others else None
        # dtype of what the weights gather. fp32 keeps enough of centred coordinates, but a GPU may
        # have been told to multiply in TF32.
        many = self.batch * heads * self.length**2 >= _FP32_GATHER_WEIGHTS
        self.gathering = self.math.elementwise if many and node.device.type == "cpu" else g
        self.pair_bias_weight = _compose.cast(given.pair_bias_weight, self.math.matmul)
        self.pair_bias_bias: Tensor | None = None
        if given.pair_bias_bias is not None:
            bias = _compose.cast(given.pair_bias_bias, self.math.matmul)
            self.pair_bias_bias = bias.view(1, heads, 1)
        self.bias_scale = given.bias_scale
        positions = self.batch * self.length

        # (L N, c)
        self.node = node.reshape(positions, self.channels)
        self.mean: Tensor | None = None
        self.rstd: Tensor | None = None
        if given.layer_norm_weight is None or given.layer_norm_bias is None:
            self.x = _compose.cast(self.node, self.math.elementwise)
        else:
            self.x, self.mean, self.rstd = _compose.layer_norm(
                self.node, given.layer_norm_weight, given.layer_norm_bias, given.eps, self.math
            )
        q, k, v, local = self._project(given)
        # (L H, N, d)
        self.q = self.by_head(q)
        self.k = self.by_head(k)
        scale = given.scalar_scale
        if scale is None:
            scale = 1.0 / math.sqrt(given.q_proj_weight.shape[0] // heads)
        self.scale = scale

        n = self.length
        self.absent: Tensor | None = None
        self.dead: Tensor | None = None
        if given.node_mask is not None:
            present = (given.node_mask != 0).expand(*lead, n).reshape(self.batch, n)
            dead = ~present.any(dim=-1, keepdim=True)
            # A batch element without keys is computed as if it had all of them, and what it
            # gathers is then zeroed: finite numbers throughout, and no case by case.
            self.absent = ~(present | dead).view(self.batch, 1, 1, n)
            self.dead = dead.view(self.batch, 1, 1)

        # (L N, 1, 3), (L N, 3, 3), (L N, T, 3)
        translations = _spread(given.translations.to(g), (*lead, n, 3))
        if self.gathering != g:
            translations = _centred(translations.reshape(self.batch, n, 3), self.absent)
        self.translations = translations.reshape(positions, 1, 3)
        rotations = _spread(given.rotations.to(g), (*lead, n, 3, 3))
        self.rotations = rotations.reshape(positions, 3, 3)
        self.local_points = local.to(g).view(positions, -1, 3)
        moved = torch.baddbmm(self.translations, self.local_points, self.rotations)
        qk, points = moved.split([2 * heads * self.query_points, heads * self.value_points], 1)
        qk = qk.view(positions, 2, heads, -1)
        q, k = qk.unbind(1)
        q_square, k_square = qk.square().sum(dim=-1, keepdim=True).unbind(1)
        half = q.new_full((), -0.5).expand_as(q_square)
        # (L H, N, 2 D) g and (L H, N, d + E) in the dtype of gathering
        points = points.view(positions, heads, -1)
        columns = [q, q_square, half, k, half, k_square]
        values = [v.view(positions, heads, -1), points, half]
        values = [_compose.cast(part, self.gathering) for part in values]
        width = 3 * self.query_points + 2
        if self.gathering == g:
            features = self.by_head(torch.cat(columns + values, dim=-1)).contiguous()
            self.values = features[..., 2 * width :]
        else:
            features = self.by_head(torch.cat(columns, dim=-1)).contiguous()
            self.values = self.by_head(torch.cat(values, dim=-1)).contiguous()
        self.q_features = features[..., :width]
        self.k_features = features[..., width : 2 * width]
        self.point_weights = functional.softplus(given.head_weights.to(g)).view(heads, 1, 1)
        if given.point_scale != 1.0:
            self.point_weights = self.point_weights * given.point_scale
        weighted = self.q_features.view(self.batch, heads, n, width) * self.point_weights
        self.weighted_q_features = weighted.view(-1, n, width)

    def _project(self, given: Arguments) -> list[Tensor]:
        """The linears of x: q, k, v, and the points of all three kinds side by side."""
        weights = [
            given.q_proj_weight,
            given.k_proj_weight,
            given.v_proj_weight,
            given.q_pts_weight,
            given.k_pts_weight,
            given.v_pts_weight,
        ]
        biases = [
            given.q_proj_bias,
            given.k_proj_bias,
            given.v_proj_bias,
            given.q_pts_bias,
            given.k_pts_bias,
            given.v_pts_bias,
        ]
        sizes = [weight.shape[0] for weight in weights]
        if sum(sizes) * self.channels <= _JOINED_ELEMENTS:
            joined = None
            if any(bias is not None for bias in biases):
                filled = [
                    weight.new_zeros(size) if bias is None else bias
                    for weight, size, bias in zip(weights, sizes, biases, strict=True)
                ]
                joined = torch.cat(filled)
            out = _compose.linear(self.x, torch.cat(weights), joined, self.math)
            return list(out.split([*sizes[:3], sum(sizes[3:])], dim=-1))
        outs = [
            _compose.linear(self.x, weight, bias, self.math)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return [*outs[:3], torch.cat(outs[3:], dim=-1)]

    def by_head(self, x: Tensor, batch: int | None = None) -> Tensor:
        """(batch r, H times something) -> (batch H, r, something); a view if batch is 1.

        ``batch`` is L unless given.
        """
        batch = self.batch if batch is None else batch
        if batch == 1:
            return x.reshape(x.shape[0], self.heads, -1).transpose(0, 1)
        length = x.shape[0] // batch
        x = x.reshape(batch, length, self.heads, -1)
        return x.transpose(1, 2).reshape(batch * self.heads, length, -1)

    def by_position(self, x: Tensor) -> Tensor:
        """(L H, N, something) -> (L N, H times something)."""
        x = x.view(self.batch, self.heads, self.length, -1).transpose(1, 2)
        return x.reshape(self.batch * self.length, -1)

    def lengths(self, local: Tensor) -> Tensor:
        """Of gathered ``local`` points (batch r, H Pv, 3): (batch r, H Pv)."""
        assert self.norm_eps is not None
        return local.square().sum(dim=-1).add_(self.norm_eps).sqrt_()

    def by_pair_row(self, weights: Tensor, block: Block, pairs: Tensor) -> Tensor:
        """Attention weights (batch H, r, N) to be multiplied with a block of ``pairs``."""
        weights = weights.view(-1, self.heads, block.count, self.length)
        return _compose.cast(by_pair_row(weights, block, pairs), self.math.matmul)

    def weights(self, block: Block, pair: Tensor) -> Tensor:
        """Attention weights (batch H, r, N) in the elementwise dtype; ``pair`` (batch r, N, cz)."""
        n = self.length
        scores = torch.bmm(
            block.queries(self.weighted_q_features), block.keys(self.k_features).transpose(1, 2)
        ).to(self.math.elementwise)
        by_batch = scores.view(-1, self.heads, block.count, n)
        # Row by row, so that the product's result has the keys innermost as the scores do.
        weight = self.pair_bias_weight.expand(pair.shape[0], -1, -1)
        if self.pair_bias_bias is None:
            bias = torch.bmm(weight, pair.transpose(1, 2))  # (batch r, H, N)
        else:
            bias = torch.baddbmm(self.pair_bias_bias, weight, pair.transpose(1, 2))
        bias = bias.view(-1, block.count, self.heads, n).transpose(1, 2)
        by_batch.add_(bias, alpha=self.bias_scale)
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


class Gathered:
    """What the queries gather, made into the input of the output projection."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._gathered: Tensor | None = None
        self._pair_values: Tensor | None = None

    def add(self, block: Block, weights: Tensor) -> Tensor:
        """Gather with the ``weights`` of a block, which are in the dtype of gathering.

        Returns scalars, points and -1/2 of the sum of the weights, (batch, r, H, d + E).
        """
        a = self._attention
        values = torch.bmm(weights, block.keys(a.values))
        values = values.view(-1, a.heads, block.count, values.shape[-1]).transpose(1, 2)
        if block.whole:
            self._gathered = values
            return values
        if self._gathered is None:
            self._gathered = values.new_empty(a.batch, a.length, *values.shape[2:])
        self._gathered[block.batch, block.rows] = values
        return values

    def add_pairs(self, block: Block, weights: Tensor, pair_values: Tensor) -> None:
        """Gather a block of ``pair_values`` with ``weights`` as :func:`by_pair_row` gives them."""
        a = self._attention
        values = torch.bmm(weights, pair_values)
        batch = block.batch.stop - block.batch.start
        values = from_pair_rows(values, batch, block.count)
        if block.whole:
            self._pair_values = values
            return
        if self._pair_values is None:
            self._pair_values = values.new_empty(a.batch, a.length, *values.shape[2:])
        self._pair_values[block.batch, block.rows] = values

    def local(self, gathered: Tensor, block: Block | None = None) -> tuple[Tensor, Tensor]:
        """Gathered points less their query's translation, and those in the query's frame.

        ``gathered`` (batch, r, H, d + E) of ``block``, or of everything; results (batch r, H Pv, 3)
        in g.
        """
        a = self._attention
        # A difference of large numbers, of which the first alone is rounded.
        points = _compose.cast(gathered[..., a.width // a.heads :], a.geometry)
        minus_half = points[..., -1:].unsqueeze(-1)
        points = points[..., :-1].view(*points.shape[:3], a.value_points, 3)
        shift = a.translations.view(a.batch, a.length, 1, 1, 3)
        rotations = a.rotations
        if block is not None and not block.whole:
            shift = block.positions(shift)
            rotations = block.positions(rotations.view(a.batch, a.length, 3, 3)).flatten(0, 1)
        # The sum of the weights, gathered as -1/2 of it, is 1 but for rounding; times the
        # coordinates it would not be.
        centred = points.new_empty(points.shape)  # contiguous, which ``points`` need not be
        torch.addcmul(points, minus_half, shift, value=2, out=centred)
        centred = centred.view(rotations.shape[0], -1, 3)
        return centred, torch.bmm(centred, rotations.transpose(1, 2))

    def finish(self) -> tuple[Tensor, Tensor]:
        """Features (L, N, F), and gathered points less their query's (L N, H Pv, 3)."""
        a = self._attention
        assert self._gathered is not None
        scalars = self._gathered[..., : a.width // a.heads]
        centred, local = self.local(self._gathered)
        features = a.x.new_empty(a.batch, a.length, a.features_end)
        features[..., : a.width].view(scalars.shape).copy_(scalars)
        features[..., a.width : a.points_end] = local.view(a.batch, a.length, -1)
        if a.norm_eps is not None:
            lengths = a.lengths(local).view(a.batch, a.length, -1)
            features[..., a.points_end : a.norms_end] = lengths
        if self._pair_values is not None:
            features[..., a.norms_end :].view(self._pair_values.shape).copy_(self._pair_values)
        if a.dead is not None:
            features.masked_fill_(a.dead, 0.0)
        return features, centred


def by_pair_row(values: Tensor, block: Block, pairs: Tensor) -> Tensor:
    """(batch, H, r, something) as rows of pairs: one matrix for each of ``pairs`` (rows, N, c).

    That is (batch r, H, something), or (r, batch H, something) where all batch elements share them.
    """
    if pairs.shape[0] == values.shape[0] * block.count:
        return values.transpose(1, 2).reshape(pairs.shape[0], values.shape[1], -1)
    return values.permute(2, 0, 1, 3).reshape(block.count, -1, values.shape[-1])


def from_pair_rows(values: Tensor, batch: int, count: int) -> Tensor:
    """What :func:`by_pair_row` made, as (batch, r, H, something)."""
    if values.shape[0] == batch * count:
        return values.view(batch, count, -1, values.shape[-1])
    return values.view(count, batch, -1, values.shape[-1]).transpose(0, 1)
