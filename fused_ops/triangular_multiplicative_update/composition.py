# SPDX-License-Identifier: Apache-2.0
"""Memory-lean PyTorch composition of the op, forward and backward.

The two projected planes a and b are written channel-first, so that the contraction is a plain
batched matrix product, and its result replaces them channel by channel. The forward therefore
holds two planes of N*N*hidden, the backward three; everything else lives in blocks of rows. A
forward with too little room for that holds one plane, the result's, and a and b of a few channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fused_ops._compose import (
    Arithmetic,
    Gradients,
    Rows,
    arithmetic,
    block_length,
    blocks,
    cast,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_channel_first,
    matmul,
)

DIFFERENTIABLE = (
    "pair",
    "layer_norm_in_weight",
    "layer_norm_in_bias",
    "proj_a_weight",
    "proj_a_bias",
    "gate_a_weight",
    "gate_a_bias",
    "proj_b_weight",
    "proj_b_bias",
    "gate_b_weight",
    "gate_b_bias",
    "layer_norm_out_weight",
    "layer_norm_out_bias",
    "out_proj_weight",
    "out_proj_bias",
    "out_gate_weight",
    "out_gate_bias",
)

Weights = tuple[Tensor, Tensor | None]
"""Weight and optional bias of a linear."""
Norm = tuple[Tensor, Tensor]
"""Weight and bias of a LayerNorm."""


# What a block's temporaries come to, in blocks of its widest tensor.
_TEMPORARIES = 8
# Weights of no more elements than this are copied in less time than four products take more than
# one.
_FEW_WEIGHTS = 1 << 16


class _Problem:
    """Sizes and working dtypes that forward and backward share."""

    def __init__(
        self, pair: Tensor, mask: Tensor | None, hidden: int, dtype: torch.dtype | None
    ) -> None:
        self.lead = tuple(pair.shape[:-3])
        self.batch = math.prod(self.lead)
        self.n = pair.shape[-2]
        self.channels = pair.shape[-1]
        self.hidden = hidden
        self.device = pair.device
        self.result = dtype or pair.dtype
        self.math = arithmetic(pair.device, self.result)
        self.pair_rows = Rows(pair, 2)  # (batch*n, n, channels)
        self.mask_rows: Rows | None = None
        if mask is not None:
            self.mask_rows = Rows(mask.expand(*self.lead, self.n, self.n), 1)
        self.row_block = block_length(pair.device, self.n * max(self.channels, hidden))
        self.channel_block = block_length(pair.device, self.batch * self.n * self.n)
        # The LayerNorm of a single hidden channel is enlarged rounding and nothing else; there the
        # products are left to round as those of the reference do.
        self.small = (
            pair.device.type == "cpu"
            and hidden > 1
            and 4 * hidden * self.channels <= _FEW_WEIGHTS
            and 4 * hidden <= self.channel_block
        )
        """Whether the four projections of the input are better done as one product."""

    def group(self, max_workspace: int | None) -> int:
        """How many hidden channels of a and b the forward is to hold at a time.

        All of them cost two planes, whose place o takes. Fewer cost a plane for o besides, which
        in fp16 is one in fp32: nothing would be won.
        """
        if max_workspace is None or self.result == torch.float16:
            return self.hidden
        pairs = self.batch * self.n * self.n
        block = max(
            self.row_block * self.n * max(self.channels, self.hidden), self.channel_block * pairs
        )
        left = max_workspace - _TEMPORARIES * block * self.math.elementwise.itemsize
        plane = pairs * self.result.itemsize  # of one channel
        if 2 * self.hidden * plane <= left:
            return self.hidden
        return max(1, (left - self.hidden * plane) // (2 * plane))

    def mask_factor(self, rows: slice) -> Tensor | None:
        """Mask of a block of rows as a (1, rows*n) factor."""
        if self.mask_rows is None:
            return None
        return cast(self.mask_rows[rows].reshape(1, -1), self.math.elementwise)

    def matrices(self, plane: Tensor) -> Tensor:
        """A (channels, batch*n, n) plane as (channels*batch, n, n) matrices."""
        return cast(plane.reshape(-1, self.n, self.n), self.math.matmul)


def _gated(x: Tensor, projection: Weights, gate: Weights, math_: Arithmetic) -> Tensor:
    """``proj(x) * sigmoid(gate(x))`` for ``x`` (rows, channels), returned as (hidden, rows)."""
    product = linear_channel_first(x, *gate, math_).sigmoid_()
    return product.mul_(linear_channel_first(x, *projection, math_))


def _joined(weights: tuple[tuple[Weights, Weights], ...], math_: Arithmetic) -> Weights:
    """The gates of a and b, then their projections, as one linear (4 * hidden, channels)."""
    linears = [gate for _, gate in weights] + [projection for projection, _ in weights]
    m = math_.matmul
    weight = torch.cat([cast(w, m) for w, _ in linears])
    if all(bias is None for _, bias in linears):
        return weight, None
    biases = [w.new_zeros(len(w)) if bias is None else bias for w, bias in linears]
    return weight, torch.cat([cast(bias, m) for bias in biases])


def _bmm(a: Tensor, b: Tensor, elementwise: torch.dtype) -> Tensor:
    """Batched product; 16-bit operands give an fp32 result.

    Sums of fp16 products need it: they can exceed 65504.
    """
    if a.dtype == elementwise:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=elementwise)
    if a.dtype == torch.bfloat16:  # the range is that of fp32
        return torch.bmm(a, b).to(elementwise)
    return torch.bmm(a.to(elementwise), b.to(elementwise))


def _products(
    p: _Problem,
    rows: slice,
    norm: Norm,
    eps: float,
    weights: tuple[tuple[Weights, Weights], tuple[Weights, Weights]],
) -> tuple[Tensor, ...]:
    """The gated and masked projections a and b of a block of rows, as (hidden, rows, n)."""
    x = layer_norm(p.pair_rows[rows].reshape(-1, p.channels), *norm, eps, p.math)[0]
    factor = p.mask_factor(rows)
    if p.small:
        gates, projected = linear_channel_first(x, *_joined(weights, p.math), p.math).chunk(2)
        both = gates.sigmoid_().mul_(projected)
        if factor is not None:
            both.mul_(factor)
        return both.view(2, len(both) // 2, -1, p.n).unbind()
    products = []
    for projection, gate in weights:
        product = _gated(x, projection, gate, p.math)
        if factor is not None:
            product.mul_(factor)
        products.append(product.view(len(product), -1, p.n))
    return tuple(products)


def _project(
    p: _Problem,
    a: Tensor,
    b: Tensor,
    norm: Norm,
    eps: float,
    weights: tuple[tuple[Weights, Weights], tuple[Weights, Weights]],
) -> None:
    """Fill the planes ``a`` and ``b`` (channels, batch*n, n); ``weights`` are those channels'."""
    for rows in blocks(p.pair_rows.length, p.row_block):
        a[:, rows], b[:, rows] = _products(p, rows, norm, eps, weights)


def _contract(p: _Problem, a: Tensor, b: Tensor, out: Tensor, outgoing: bool) -> Tensor:
    """Triangular contraction, a few channels at a time into ``out``.

    ``out`` may share memory with both operands. When one step does it all, its own result is
    returned instead.
    """
    for group in blocks(len(a), p.channel_block):
        left, right = p.matrices(a[group]), p.matrices(b[group])
        if outgoing:
            right = right.transpose(1, 2)
        else:
            left = left.transpose(1, 2)
        product = _bmm(left, right, p.math.elementwise)
        if p.channel_block >= len(a) and out.dtype == product.dtype:
            return product.view(out.shape)
        out[group] = product.view(out[group].shape)
    return out


def _few_channels_at_a_time(
    p: _Problem,
    size: int,
    norm: Norm,
    eps: float,
    weights: tuple[tuple[Weights, Weights], tuple[Weights, Weights]],
    outgoing: bool,
) -> Tensor:
    """The plane o from a and b of ``size`` channels each, which read the input again every time."""
    rows = p.pair_rows.length
    o = torch.empty((p.hidden, rows, p.n), dtype=p.result, device=p.device)
    planes = torch.empty((2, size, rows, p.n), dtype=p.result, device=p.device)
    (projection_a, gate_a), (projection_b, gate_b) = weights

    def part(linear: Weights, group: slice) -> Weights:
        weight, bias = linear
        return weight[group], None if bias is None else bias[group]

    for group in blocks(p.hidden, size):
        a, b = planes[:, : group.stop - group.start]
        weights_a = (part(projection_a, group), part(gate_a, group))
        weights_b = (part(projection_b, group), part(gate_b, group))
        _project(p, a, b, norm, eps, (weights_a, weights_b))
        out = o[group]
        result = _contract(p, a, b, out, outgoing)
        if result is not out:
            out.copy_(result)
    return o


def forward(
    pair: Tensor,
    mask: Tensor | None,
    layer_norm_in_weight: Tensor,
    layer_norm_in_bias: Tensor,
    proj_a_weight: Tensor,
    proj_a_bias: Tensor | None,
    gate_a_weight: Tensor,
    gate_a_bias: Tensor | None,
    proj_b_weight: Tensor,
    proj_b_bias: Tensor | None,
    gate_b_weight: Tensor,
    gate_b_bias: Tensor | None,
    layer_norm_out_weight: Tensor,
    layer_norm_out_bias: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    out_gate_weight: Tensor,
    out_gate_bias: Tensor | None,
    outgoing: bool,
    gate_normalized: bool,
    eps: float,
    max_workspace: int | None,
    precision: str,
    dtype: torch.dtype | None,
) -> Tensor:
    """Result (*lead, N, N, pair_dim) for checked arguments."""
    p = _Problem(pair, mask, proj_a_weight.shape[0], dtype)
    if pair.numel() == 0:
        return torch.empty(pair.shape, dtype=p.result, device=pair.device)
    total = p.pair_rows.length
    norm_in = (layer_norm_in_weight, layer_norm_in_bias)
    weights = (
        ((proj_a_weight, proj_a_bias), (gate_a_weight, gate_a_bias)),
        ((proj_b_weight, proj_b_bias), (gate_b_weight, gate_b_bias)),
    )
    size = p.group(max_workspace)
    split = size < p.hidden
    # A small problem is one block, whose products are the planes and whose gate is the result.
    one_block = not split and total <= p.row_block and p.result == p.math.elementwise

    if split:
        o = _few_channels_at_a_time(p, size, norm_in, eps, weights, outgoing)
    elif one_block:
        a, b = _products(p, slice(0, total), norm_in, eps, weights)
        o = _contract(p, a, b, a, outgoing)
        del a, b
    else:
        if p.result.itemsize == 2:
            # One buffer holds a and b side by side in 16 bits, and later o in their place in fp32:
            # o may exceed the range of fp16.
            both = pair.new_empty((p.hidden, 2, total, p.n), dtype=p.result)
            a, b = both[:, 0], both[:, 1]
            o = both.view(p.hidden, -1).view(torch.float32).view(p.hidden, total, p.n)
        else:
            a = pair.new_empty((p.hidden, total, p.n), dtype=p.result)
            b = torch.empty_like(a)
            o = a
        _project(p, a, b, norm_in, eps, weights)
        o = _contract(p, a, b, o, outgoing)
        del a, b

    out = None
    if not one_block:
        out = torch.empty(pair.shape, dtype=p.result, device=pair.device)
        out_rows = out.view(total, p.n, p.channels)
    for rows in blocks(total, p.row_block):
        raw = p.pair_rows[rows].reshape(-1, p.channels)
        gate_in = layer_norm(raw, *norm_in, eps, p.math)[0] if gate_normalized else raw
        gate = linear(gate_in, out_gate_weight, out_gate_bias, p.math).sigmoid_()
        y = layer_norm(
            o[:, rows].reshape(p.hidden, -1).t(),
            layer_norm_out_weight,
            layer_norm_out_bias,
            eps,
            p.math,
        )[0]
        gate.mul_(linear(y, out_proj_weight, out_proj_bias, p.math))
        if out is None:
            return gate.view(pair.shape)
        out_rows[rows] = gate.view(-1, p.n, p.channels)
    assert out is not None
    return out


def backward(
    grad: Tensor,
    pair: Tensor,
    mask: Tensor | None,
    layer_norm_in_weight: Tensor,
    layer_norm_in_bias: Tensor,
    proj_a_weight: Tensor,
    proj_a_bias: Tensor | None,
    gate_a_weight: Tensor,
    gate_a_bias: Tensor | None,
    proj_b_weight: Tensor,
    proj_b_bias: Tensor | None,
    gate_b_weight: Tensor,
    gate_b_bias: Tensor | None,
    layer_norm_out_weight: Tensor,
    layer_norm_out_bias: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    out_gate_weight: Tensor,
    out_gate_bias: Tensor | None,
    outgoing: bool,
    gate_normalized: bool,
    eps: float,
    max_workspace: int | None,
    precision: str,
    dtype: torch.dtype | None,
    needs: list[bool],
) -> list[Tensor]:
    """Gradients of the wanted tensors among :data:`DIFFERENTIABLE`."""
    p = _Problem(pair, mask, proj_a_weight.shape[0], dtype)
    sums = Gradients(
        {name: value for name, value in locals().items() if name in DIFFERENTIABLE},
        needs,
        p.math.elementwise,
    )
    if grad.numel() == 0:
        return sums.result()
    total = p.pair_rows.length
    norm_in = (layer_norm_in_weight, layer_norm_in_bias)
    norm_out = (layer_norm_out_weight, layer_norm_out_bias)
    weights_a = ((proj_a_weight, proj_a_bias), (gate_a_weight, gate_a_bias))
    weights_b = ((proj_b_weight, proj_b_bias), (gate_b_weight, gate_b_bias))

    # fp16 cannot hold the contraction (see forward) nor, safely, its gradient.
    wide = torch.float32 if p.result == torch.float16 else p.result
    a = pair.new_empty((p.hidden, total, p.n), dtype=p.result)
    b = torch.empty_like(a)
    o = torch.empty_like(a, dtype=wide)
    _project(p, a, b, norm_in, eps, (weights_a, weights_b))
    o = _contract(p, a, b, o, outgoing)

    grad_rows = Rows(grad, 2)
    need_pair = sums.needs("pair")
    d_pair = sums.buffer("pair", wide).view(total, p.n, p.channels) if need_pair else None
    need_norm_in = sums.needs("layer_norm_in_weight", "layer_norm_in_bias")

    def add_linear(name: str, d_out: Tensor, x: Tensor) -> None:
        """Accumulate the gradients of one linear from ``d_out`` (out, rows) and ``x``."""
        if sums.needs(f"{name}_weight"):
            sums.add(f"{name}_weight", matmul(d_out, x, p.math))
        if sums.needs(f"{name}_bias"):
            sums.add(f"{name}_bias", d_out.sum(dim=1))

    def add_norm_in(d_x: Tensor, raw: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        d_raw, d_weight, d_bias = layer_norm_backward(
            d_x, raw, mean, rstd, *norm_in, p.math, need_norm_in
        )
        sums.add("layer_norm_in_weight", d_weight)
        sums.add("layer_norm_in_bias", d_bias)
        return d_raw

    # Through the output gate, the output projection and the second LayerNorm; o becomes d_o.
    for rows in blocks(total, p.row_block):
        raw = p.pair_rows[rows].reshape(-1, p.channels)
        x, mean, rstd = raw, None, None
        if gate_normalized:
            x, mean, rstd = layer_norm(raw, *norm_in, eps, p.math)
        gate = torch.sigmoid(linear(x, out_gate_weight, out_gate_bias, p.math))
        columns = o[:, rows].reshape(p.hidden, -1).t().to(p.math.elementwise).contiguous()
        y, o_mean, o_rstd = layer_norm(columns, *norm_out, eps, p.math)
        g = grad_rows[rows].reshape(-1, p.channels).to(p.math.elementwise)

        d_projected = g * gate
        d_gate = g * linear(y, out_proj_weight, out_proj_bias, p.math) * gate * (1 - gate)
        add_linear("out_proj", d_projected.t(), y)
        add_linear("out_gate", d_gate.t(), x)
        d_columns, d_weight, d_bias = layer_norm_backward(
            matmul(d_projected, out_proj_weight, p.math),
            columns,
            o_mean,
            o_rstd,
            *norm_out,
            p.math,
            sums.needs("layer_norm_out_weight", "layer_norm_out_bias"),
        )
        sums.add("layer_norm_out_weight", d_weight)
        sums.add("layer_norm_out_bias", d_bias)
        o[:, rows] = d_columns.t().reshape(p.hidden, -1, p.n)
        if d_pair is not None or (gate_normalized and need_norm_in):
            d_x = matmul(d_gate, out_gate_weight, p.math)
            if gate_normalized:
                assert mean is not None and rstd is not None
                d_x = add_norm_in(d_x, raw, mean, rstd)
            if d_pair is not None:
                d_pair[rows] = d_x.view(-1, p.n, p.channels)

    # Through the contraction; a and b become their gradients.
    for group in blocks(p.hidden, p.channel_block):
        left, right, d_o = (p.matrices(plane[group]) for plane in (a, b, o))
        if outgoing:  # o = a b^T
            d_left = _bmm(d_o, right, p.math.elementwise)
            d_right = _bmm(d_o.transpose(1, 2), left, p.math.elementwise)
        else:  # o = a^T b
            d_left = _bmm(right, d_o.transpose(1, 2), p.math.elementwise)
            d_right = _bmm(left, d_o, p.math.elementwise)
        a[group] = d_left.view(a[group].shape)
        b[group] = d_right.view(b[group].shape)

    # Through the gated projections and the first LayerNorm.
    for rows in blocks(total, p.row_block):
        raw = p.pair_rows[rows].reshape(-1, p.channels)
        x, mean, rstd = layer_norm(raw, *norm_in, eps, p.math)
        factor = p.mask_factor(rows)
        d_x = torch.zeros_like(x)
        for name, plane, (projection, gate_weights) in (("a", a, weights_a), ("b", b, weights_b)):
            d_product = plane[:, rows].reshape(p.hidden, -1).to(p.math.elementwise)
            if factor is not None:
                d_product = d_product * factor
            gate = torch.sigmoid(linear_channel_first(x, *gate_weights, p.math))
            d_projection = d_product * gate
            projected = linear_channel_first(x, *projection, p.math)
            d_gate = d_projection * projected * (1 - gate)
            add_linear(f"proj_{name}", d_projection, x)
            add_linear(f"gate_{name}", d_gate, x)
            d_x += matmul(d_projection.t(), projection[0], p.math)
            d_x += matmul(d_gate.t(), gate_weights[0], p.math)
        if d_pair is not None or need_norm_in:
            d_raw = add_norm_in(d_x, raw, mean, rstd)
            if d_pair is not None:
                d_pair[rows] += d_raw.view(-1, p.n, p.channels)
    return sums.result()
