# SPDX-License-Identifier: Apache-2.0
"""MSA row attention from stock PyTorch calls, without the attention weights in memory.

Of the large intermediates only the pair bias (heads, N, N) exists as a whole. Rows of the MSA are
taken a few at a time, their attention maps fewer at a time, and the backward recomputes them.

Everything between the two LayerNorms is channel-first: a projection of a block of rows x
(rows, N, c) is the batched product of the weight (H*d, c) with x transposed, so that its result
(rows, H*d, N) is also (rows * H, d, N), one matrix a head, and nothing is ever moved.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fused_ops import _compose
from fused_ops._compose import Arithmetic, Rows, blocks

# Bit patterns of minus infinity, as the signed integer of the same width.
_BITS = {
    torch.float32: (torch.int32, -(1 << 23)),
    torch.float64: (torch.int64, -(1 << 52)),
}


def forward(
    msa: Tensor,
    pair: Tensor,
    mask: Tensor | None,
    dropout_seed: Tensor | None,
    layer_norm_weight: Tensor,
    layer_norm_bias: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    pair_norm_weight: Tensor | None,
    pair_norm_bias: Tensor | None,
    pair_bias_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    num_heads: int,
    dropout: float,
    eps: float,
    precision: str,
    dtype: torch.dtype | None,
) -> Tensor:
    """The op on checked arguments; see :mod:`fused_ops.msa_row_attention.op` for their shapes.

    ``precision`` is already in force when this is called.
    """
    result_dtype = dtype or msa.dtype
    out = torch.empty(msa.shape, dtype=result_dtype, device=msa.device)
    if out.numel() == 0:
        return out
    math_ = _compose.arithmetic(msa.device, result_dtype)
    m, e = math_
    layout = _Layout.of(msa, pair, num_heads, query_weight.shape[0])
    drop = _Dropout.make(dropout_seed, dropout, layout)
    wq, wk, wv, wg, wo = (
        _compose.cast(w, m)
        for w in (query_weight, key_weight, value_weight, gate_weight, out_proj_weight)
    )
    bg, bo = _column(gate_bias, math_), _cast(out_proj_bias, math_)
    if layout.one_block and drop is None and result_dtype == m == e:
        x, _, _ = _compose.layer_norm(msa, layer_norm_weight, layer_norm_bias, eps, math_)
        bias = _whole_bias(
            pair, pair_norm_weight, pair_norm_bias, pair_bias_weight, eps, layout, math_
        )
        present = _Present.make(layout.whole_mask(mask), e)
        _attend_in_one_block(out, x, bias, present, wq, wk, wv, wg, bg, wo, bo, layout)
        return out

    x_rows, mask_rows = layout.rows(msa, 2), layout.mask_rows(mask)
    out_rows = layout.rows(out, 2)
    in_place = out_rows.viewable and result_dtype == m
    pair_bias = _PairBias(
        pair, pair_norm_weight, pair_norm_bias, pair_bias_weight, eps, layout, math_
    )

    logits_space = _Space(layout, e)
    for groups in blocks(layout.groups, layout.groups_per_block):
        bias = pair_bias.forward(groups)
        for rows in layout.row_blocks(groups):
            count = rows.stop - rows.start
            x, _, _ = _compose.layer_norm(
                x_rows[rows], layer_norm_weight, layer_norm_bias, eps, math_
            )
            xt = _compose.cast(x, m).transpose(1, 2)
            q, k, v = (layout.heads(_project(w, xt)) for w in (wq, wk, wv))
            present = _Present.make(None if mask_rows is None else mask_rows[rows], e)
            attended = torch.empty_like(v, memory_format=torch.contiguous_format)
            for chunk in layout.chunks(count):
                weights = _attention_weights(
                    chunk, logits_space, bias, present, q, k, layout, math_
                )
                if drop is not None:
                    weights.mul_(drop.keep(chunk, rows, e))
                _store(
                    attended, chunk, chunk.of(v), _compose.cast(weights, v.dtype).transpose(1, 2)
                )
            attended = attended.view(count, layout.width, layout.length)
            gate = _compose.cast(_project(wg, xt, bg), e).sigmoid_()
            gated = _compose.cast(_scaled(attended, drop), e).mul_(gate)
            if present is not None:
                present.zero_absent_rows(gated)
            target = out_rows[rows] if in_place else None
            result = _project_out(_compose.cast(gated, m), wo, bo, target)
            if target is None:
                out_rows.write(rows, result)
    return out


def _attend_in_one_block(
    out: Tensor,
    x: Tensor,
    bias: Tensor,
    present: _Present | None,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wg: Tensor,
    bg: Tensor | None,
    wo: Tensor,
    bo: Tensor | None,
    layout: _Layout,
) -> None:
    """All of the forward after the LayerNorm ``x`` and the bias, written to ``out``.

    The same steps as for a block of rows, without the loops, slices and bookkeeping that would
    take as long as the arithmetic when a problem is so small. All tensors are of one dtype.
    """
    n = layout.length
    out = out.view(-1, n, out.shape[-1])
    xt = x.view(out.shape).transpose(1, 2)
    q, k, v = layout.heads(_project(wq, xt)), layout.heads(_project(wk, xt)), _project(wv, xt)
    logits = x.new_empty((q.shape[0], n, n))
    grouped = logits.view(layout.groups, -1, layout.num_heads, n, n)
    if present is None:
        grouped.copy_(bias)
    else:
        present.put_bias(grouped, bias, None)
    logits.baddbmm_(q.transpose(1, 2), k, alpha=layout.scale)
    weights = torch.softmax(logits, -1, out=logits)
    attended = torch.bmm(layout.heads(v), weights.transpose(1, 2)).view(v.shape)
    gated = attended.mul_(_project(wg, xt, bg).sigmoid_())
    if present is not None:
        present.zero_absent_rows(gated)
    _project_out(gated, wo, bo, out)


def backward(
    grad: Tensor,
    msa: Tensor,
    pair: Tensor,
    mask: Tensor | None,
    dropout_seed: Tensor | None,
    layer_norm_weight: Tensor,
    layer_norm_bias: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    pair_norm_weight: Tensor | None,
    pair_norm_bias: Tensor | None,
    pair_bias_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    num_heads: int,
    dropout: float,
    eps: float,
    precision: str,
    dtype: torch.dtype | None,
    needs: list[bool],
) -> list[Tensor]:
    """Gradients of the tensors marked in ``needs``, in schema order.

    The order is msa, pair, layer_norm_weight, layer_norm_bias, query_weight, key_weight,
    value_weight, gate_weight, gate_bias, pair_norm_weight, pair_norm_bias, pair_bias_weight,
    out_proj_weight, out_proj_bias.
    """
    math_ = _compose.arithmetic(msa.device, dtype or msa.dtype)
    m, e = math_
    tensors = {
        "msa": msa,
        "pair": pair,
        "layer_norm_weight": layer_norm_weight,
        "layer_norm_bias": layer_norm_bias,
        "query_weight": query_weight,
        "key_weight": key_weight,
        "value_weight": value_weight,
        "gate_weight": gate_weight,
        "gate_bias": gate_bias,
        "pair_norm_weight": pair_norm_weight,
        "pair_norm_bias": pair_norm_bias,
        "pair_bias_weight": pair_bias_weight,
        "out_proj_weight": out_proj_weight,
        "out_proj_bias": out_proj_bias,
    }
    grads = _compose.Gradients(tensors, needs, e)
    if msa.numel() == 0:
        return grads.result()

    # What the wanted gradients depend on.
    norm = grads.needs("layer_norm_weight", "layer_norm_bias")
    need_x = norm or grads.needs("msa")
    need_q = need_x or grads.needs("query_weight")
    need_k = need_x or grads.needs("key_weight")
    need_v = need_x or grads.needs("value_weight")
    need_gate = need_x or grads.needs("gate_weight", "gate_bias")
    need_bias = grads.needs("pair", "pair_norm_weight", "pair_norm_bias", "pair_bias_weight")
    need_logits = need_q or need_k or need_bias
    need_attended = need_gate or grads.needs("out_proj_weight")
    need_cotangent = need_gate or need_v or need_logits

    layout = _Layout.of(msa, pair, num_heads, query_weight.shape[0])
    x_rows, grad_rows = layout.rows(msa, 2), layout.rows(grad, 2)
    mask_rows = layout.mask_rows(mask)
    dx_rows = layout.rows(grads.buffer("msa", msa.dtype), 2) if grads.needs("msa") else None
    drop = _Dropout.make(dropout_seed, dropout, layout)
    pair_bias = _PairBias(
        pair, pair_norm_weight, pair_norm_bias, pair_bias_weight, eps, layout, math_
    )
    wq, wk, wv, wg, wo = (
        _compose.cast(w, m)
        for w in (query_weight, key_weight, value_weight, gate_weight, out_proj_weight)
    )
    bg = _column(gate_bias, math_)

    logits_space, grad_space = _Space(layout, e), _Space(layout, e)
    for groups in blocks(layout.groups, layout.groups_per_block):
        bias = pair_bias.forward(groups)
        dbias = torch.zeros_like(bias) if need_bias else None
        for rows in layout.row_blocks(groups):
            count = rows.stop - rows.start
            g = grad_rows[rows].to(m)
            if grads.needs("out_proj_bias"):
                grads.add("out_proj_bias", g.to(e).sum((0, 1)))
            if not (need_attended or need_cotangent):
                continue
            source = x_rows[rows]
            normed, mean, rstd = _compose.layer_norm(
                source, layer_norm_weight, layer_norm_bias, eps, math_
            )
            x = normed.to(m)
            xt = x.transpose(1, 2)
            q, k, v = (layout.heads(_project(w, xt)) for w in (wq, wk, wv))
            gate = _compose.cast(_project(wg, xt, bg), e).sigmoid_()
            present = _Present.make(None if mask_rows is None else mask_rows[rows], e)
            dgated = dattended = None
            if need_cotangent:
                dgated = _project(wo.t(), g.transpose(1, 2)).to(e)
                dattended = _scaled(dgated * gate, drop)
                if present is not None:
                    present.zero_absent_rows(dattended)
                dattended = layout.heads(dattended.to(m))

            attended = torch.empty_like(v) if need_attended else None
            # With whole maps each chunk writes its part of these once; with blocks of queries
            # they are sums over the blocks.
            make = torch.empty_like if layout.whole_maps else torch.zeros_like
            dq = torch.empty_like(q) if need_q else None
            dk = make(k) if need_k else None
            dv = make(v) if need_v else None
            for chunk in layout.chunks(count):
                weights = _attention_weights(
                    chunk, logits_space, bias, present, q, k, layout, math_
                )
                keep = drop.keep(chunk, rows, e) if drop is not None else None
                dropped = (weights if keep is None else weights * keep).to(m)
                if attended is not None:
                    _store(attended, chunk, chunk.of(v), dropped.transpose(1, 2))
                if dattended is None:
                    continue
                cotangent = chunk.queries_of(dattended)
                if dv is not None:
                    _accumulate(chunk.of(dv), cotangent, dropped, layout)
                if not need_logits:
                    continue
                dweights = grad_space.take(chunk)
                _product(dweights, cotangent.transpose(1, 2), chunk.of(v))
                if keep is not None:
                    dweights.mul_(keep)
                # In place: each row of the gradient is read in full before it is written.
                torch._softmax_backward_data(dweights, weights, -1, e, grad_input=dweights)
                if dbias is not None:
                    layout.add_bias(dbias, dweights, chunk)
                dlogits = dweights.to(m)
                if dq is not None:
                    _store(dq, chunk, chunk.of(k), dlogits.transpose(1, 2))
                if dk is not None:
                    _accumulate(chunk.of(dk), chunk.queries_of(q), dlogits, layout)

            dx = None
            if attended is not None:
                attended = _scaled(attended.view_as(gate), drop).to(e)
                if present is not None:
                    present.zero_absent_rows(attended)
                if grads.needs("out_proj_weight"):
                    gated = _flat((attended * gate).to(m))
                    _add_product(grads, "out_proj_weight", g.reshape(-1, g.shape[-1]).t(), gated)
            if need_gate:
                assert attended is not None and dgated is not None
                dpre = attended.mul_(dgated).mul_(gate).mul_(1 - gate)
                if grads.needs("gate_bias"):
                    grads.add("gate_bias", dpre.sum((0, 2)))
                dx = _linear_backward(grads, "gate_weight", dpre.to(m), x, wg, need_x, dx)
            for name, w, d, factor in (
                ("query_weight", wq, dq, layout.scale),
                ("key_weight", wk, dk, layout.scale),
                ("value_weight", wv, dv, None),
            ):
                if d is not None:
                    d = d.view_as(gate) if factor is None else d.view_as(gate).mul_(factor)
                    dx = _linear_backward(grads, name, d, x, w, need_x, dx)
            if need_x:
                assert dx is not None
                dsource, dweight, dshift = _compose.layer_norm_backward(
                    dx, source, mean, rstd, layer_norm_weight, layer_norm_bias, math_, norm
                )
                grads.add("layer_norm_weight", dweight)
                grads.add("layer_norm_bias", dshift)
                if dx_rows is not None:
                    dx_rows.write(rows, dsource)
        if dbias is not None:
            pair_bias.backward(groups, dbias, grads)
    return grads.result()


# Blocks of this many elements keep a GPU busy.
_ENOUGH_ELEMENTS = 1 << 20
# A chunk of maps takes eight times the block that the shared budget allows on a GPU: the maps are
# the bulk of the work, and with fewer at a time the host's calls would take longer than it.
_DEVICE_MAPS = 8


def _share(budget: int, total: int) -> int:
    """Elements of a block when there are ``total``: of large problems no more than a quarter.

    Without this a GPU, whose budget is large, would hold whole intermediates in fp32 where the
    reference holds them in 16 bits. The CPU's budget is below all this.
    """
    return min(budget, max(_ENOUGH_ELEMENTS, total // 4))


class _Chunk(NamedTuple):
    """A piece of the attention maps of a block of rows that is computed at once."""

    rows: slice
    """Rows, counted within the block."""
    heads: slice
    queries: slice
    maps: slice
    """The same rows and heads in the flattened (rows * heads) axis."""
    every_map: bool
    """Whether these are all maps of the block: then slicing, dear for small tensors, is left."""
    every_query: bool

    def of(self, maps: Tensor) -> Tensor:
        """The chunk's part of a tensor (rows * heads, ...)."""
        return maps if self.every_map else maps[self.maps]

    def queries_of(self, maps: Tensor) -> Tensor:
        """The chunk's part of a tensor (rows * heads, d, N), with only its queries."""
        part = self.of(maps)
        return part if self.every_query else part[:, :, self.queries]


class _Layout:
    """How a call is cut into groups, blocks of rows and chunks of attention maps.

    Leading axes that the pair tensor shares (size 1 in it) are moved behind the others, so that
    MSA rows that use one pair bias are consecutive: (groups, rows per group). A block of rows is
    some rows of one group or, when they are small, several whole groups. Only shapes and the
    device type enter.
    """

    def __init__(
        self,
        msa: tuple[int, ...],
        pair: tuple[int, ...],
        num_heads: int,
        width: int,
        device: torch.device,
        budget: int,
    ) -> None:
        lead = msa[:-3]
        self.pair_lead = (1,) * (len(lead) - (len(pair) - 3)) + pair[:-3]
        shared = [a for a, n in enumerate(lead) if self.pair_lead[a] == 1 and n != 1]
        self._own = [a for a in range(len(lead)) if a not in shared]
        self._order = self._own + shared
        self._in_place = self._order == sorted(self._order)
        self._lead = lead
        self.device = device
        self.num_heads = num_heads
        self.width = width
        self.depth = width // num_heads
        self.scale = 1.0 / math.sqrt(max(1, self.depth))
        self.rows_per_lead, self.length = msa[-3], msa[-2]
        self.groups = math.prod(lead[a] for a in self._own)
        self.rows_per_group = math.prod(lead[a] for a in shared) * self.rows_per_lead

        n = self.length
        rows, channels = self.groups * self.rows_per_group, max(msa[-1], width)
        maps_budget = budget if device.type == "cpu" else _DEVICE_MAPS * budget
        maps_budget = _share(maps_budget, rows * num_heads * n * n)
        self._maps = max(1, maps_budget // (n * n))
        self._queries = min(n, max(1, maps_budget // n))
        self.whole_maps = self._queries == n
        self._rows = max(1, _share(budget, rows * n * channels) // (n * channels))
        fitting = min(self._rows, self._maps // num_heads)
        self.groups_per_block = max(1, min(self.groups, fitting // max(1, self.rows_per_group)))
        at_once = max(1, min(self._maps // num_heads, self._rows, rows))
        self.one_block = (
            device.type == "cpu"
            and self._in_place
            and rows <= fitting
            and self.groups * n * n * max(pair[-1], num_heads) <= budget
        )
        """Whether all of a CPU call is one block of rows with one chunk of maps."""
        self.chunk_elements = at_once * min(self._maps, num_heads) * self._queries * n

    @staticmethod
    def of(msa: Tensor, pair: Tensor, num_heads: int, width: int) -> _Layout:
        """The layout of a call; none of its sizes may be 0."""
        budget = _compose.block_length(msa.device, 1)
        return _layout(tuple(msa.shape), tuple(pair.shape), num_heads, width, msa.device, budget)

    def _in_order(self, tensor: Tensor, tail: int) -> Tensor:
        if self._in_place:
            return tensor
        axes = len(self._lead)
        return tensor.permute(*self._order, *range(axes, axes + tail))

    def rows(self, tensor: Tensor, tail: int) -> Rows:
        """The rows of a tensor (*lead, S, then ``tail`` more axes)."""
        return Rows(self._in_order(tensor, tail + 1), tail)

    def mask_rows(self, mask: Tensor | None) -> Rows | None:
        """The rows of a mask whose leading axes may broadcast."""
        if mask is None:
            return None
        return self.rows(mask.expand(*self._lead, self.rows_per_lead, self.length), 1)

    def whole_mask(self, mask: Tensor | None) -> Tensor | None:
        """All rows (rows, N) of a mask whose leading axes may broadcast."""
        if mask is None:
            return None
        if mask.dim() != len(self._lead) + 2 or mask.shape[:-2] != self._lead:
            mask = mask.expand(*self._lead, self.rows_per_lead, self.length)
        return mask.reshape(-1, self.length)

    def pair_rows(self, pair: Tensor) -> Rows:
        """The rows (groups * N) of a tensor (*pair lead, N, N, channels)."""
        offset = len(self.pair_lead) - (pair.dim() - 3)
        index = tuple(
            slice(None) if axis in self._own else 0 for axis in range(offset, len(self.pair_lead))
        )
        return Rows(pair[index], 2)

    def row_blocks(self, groups: slice) -> Iterator[slice]:
        """Blocks of rows of the given groups."""
        first, last = groups.start * self.rows_per_group, groups.stop * self.rows_per_group
        length = last - first if self.groups_per_block > 1 else self._rows
        for block in blocks(last - first, max(1, length)):
            yield slice(first + block.start, first + block.stop)

    def row_ids(self, rows: slice) -> Tensor:
        """Position of each row in the caller's own order, lead index * S + s."""
        ids = torch.arange(math.prod(self._lead) * self.rows_per_lead, device=self.device)
        ids = self._in_order(ids.view(*self._lead, self.rows_per_lead), 1)
        return ids.reshape(-1)[rows]

    def chunks(self, count: int) -> Iterator[_Chunk]:
        """The attention maps of a block of ``count`` rows, a cache's worth at a time."""
        h = self.num_heads
        every, whole = slice(0, h), slice(0, self.length)
        if self.whole_maps and self._maps >= h:
            length = self._maps // h
            for rows in blocks(count, length):
                maps = slice(rows.start * h, rows.stop * h)
                yield _Chunk(rows, every, whole, maps, count <= length, True)
            return
        for row in range(count):
            for heads in blocks(h, self._maps):
                maps = slice(row * h + heads.start, row * h + heads.stop)
                for queries in blocks(self.length, self._queries):
                    yield _Chunk(slice(row, row + 1), heads, queries, maps, False, self.whole_maps)

    def heads(self, projected: Tensor) -> Tensor:
        """(rows, H * d, N) -> (rows * H, d, N)."""
        return projected.view(projected.shape[0] * self.num_heads, self.depth, self.length)

    def grouped(self, maps: Tensor, chunk: _Chunk, groups: int) -> Tensor:
        """(rows * heads, queries, N) -> (groups, rows per group, heads, queries, N)."""
        heads = chunk.heads.stop - chunk.heads.start
        return maps.view(groups, -1, heads, *maps.shape[1:])

    def bias_of(self, bias: Tensor, chunk: _Chunk) -> Tensor:
        """(H, groups * N, N) -> the chunk's part (groups, heads, queries, N), a view."""
        n = self.length
        by_group = bias.view(self.num_heads, -1, n, n).transpose(0, 1)
        return by_group[:, chunk.heads, chunk.queries]

    def add_bias(self, dbias: Tensor, dlogits: Tensor, chunk: _Chunk) -> None:
        """Add the chunk's gradients of the logits, summed over its rows, to those of the bias."""
        target = self.bias_of(dbias, chunk)
        source = self.grouped(dlogits, chunk, target.shape[0])
        target += source[:, 0] if source.shape[1] == 1 else source.sum(1)


# Shapes repeat from call to call, and for small ones working this out is a tenth of the time.
_layout = functools.lru_cache(maxsize=64)(_Layout)


class _Space:
    """Memory for one chunk of attention maps, reused for all of them."""

    def __init__(self, layout: _Layout, dtype: torch.dtype) -> None:
        self._size = layout.chunk_elements
        self._memory = torch.empty(self._size, dtype=dtype, device=layout.device)
        self._length = layout.length

    def take(self, chunk: _Chunk) -> Tensor:
        """An uninitialised (maps, queries, N)."""
        maps = chunk.maps.stop - chunk.maps.start
        queries = chunk.queries.stop - chunk.queries.start
        size = maps * queries * self._length
        memory = self._memory if size == self._size else self._memory[:size]
        return memory.view(maps, queries, self._length)


class _PairBias:
    """The projection of the pair tensor to one bias a head, and its gradients."""

    def __init__(
        self,
        pair: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        weight: Tensor,
        eps: float,
        layout: _Layout,
        math_: Arithmetic,
    ) -> None:
        self._rows = layout.pair_rows(pair)
        self._view: Callable[[Tensor], Rows] = layout.pair_rows
        self._norm = None
        if norm_weight is not None and norm_bias is not None:  # both or neither
            self._norm = (norm_weight, norm_bias)
        self._weight = _compose.cast(weight, math_.matmul)
        self._eps = eps
        self._math = math_
        self._length = layout.length
        self._device = layout.device
        channels = max(pair.shape[-1], layout.num_heads)
        budget = _share(
            _compose.block_length(self._device, 1), self._rows.length * layout.length * channels
        )
        self._block = max(1, budget // (layout.length * channels))

    def _blocks(self, groups: slice) -> Iterator[tuple[slice, slice]]:
        """Rows of the pair tensor, counted from the start of all groups and of these groups."""
        first = groups.start * self._length
        for local in blocks((groups.stop - groups.start) * self._length, self._block):
            yield slice(first + local.start, first + local.stop), local

    def forward(self, groups: slice) -> Tensor:
        """The bias (H, groups * N, N) in the elementwise dtype."""
        m, e = self._math
        n = self._length
        heads = self._weight.shape[0]
        bias = torch.empty(
            (heads, (groups.stop - groups.start) * n, n), dtype=e, device=self._device
        )
        for rows, local in self._blocks(groups):
            x = self._rows[rows]
            if self._norm is not None:
                x, _, _ = _compose.layer_norm(x, *self._norm, self._eps, self._math)
            # Channel-first output straight from the product takes three times as long as the
            # product and the copy.
            projected = torch.mm(_compose.cast(x, m).reshape(-1, x.shape[-1]), self._weight.t())
            bias[:, local] = projected.view(-1, n, heads).permute(2, 0, 1)
        return bias

    def backward(self, groups: slice, dbias: Tensor, grads: _compose.Gradients) -> None:
        """Carry the gradient of the bias on to the pair tensor and the parameters."""
        m, _ = self._math
        heads = dbias.shape[0]
        need_norm = grads.needs("pair_norm_weight", "pair_norm_bias")
        need_weight = grads.needs("pair_bias_weight")
        target = None
        if grads.needs("pair"):
            pair_grad = grads.buffer("pair", self._rows.dtype)
            target = self._view(pair_grad)
        for rows, local in self._blocks(groups):
            d = dbias[:, local].reshape(heads, -1).to(m)
            source = x = self._rows[rows]
            if self._norm is not None:
                x, mean, rstd = _compose.layer_norm(source, *self._norm, self._eps, self._math)
            if need_weight:
                _add_product(grads, "pair_bias_weight", d, x.to(m).reshape(-1, x.shape[-1]))
            if target is None and not need_norm:
                continue
            dx = torch.mm(d.t(), self._weight).view(x.shape)
            if self._norm is not None:
                dx, dweight, dshift = _compose.layer_norm_backward(
                    dx, source, mean, rstd, *self._norm, self._math, need_norm
                )
                grads.add("pair_norm_weight", dweight)
                grads.add("pair_norm_bias", dshift)
            if target is not None:
                target.write(rows, dx)


def _whole_bias(
    pair: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    eps: float,
    layout: _Layout,
    math_: Arithmetic,
) -> Tensor:
    """What :class:`_PairBias` gives for all groups, as (groups, 1, H, N, N).

    Of so few rows the channel-first product is the faster one, and needs no copy.
    """
    if norm_weight is not None and norm_bias is not None:
        pair, _, _ = _compose.layer_norm(pair, norm_weight, norm_bias, eps, math_)
    x = _compose.cast(pair, math_.matmul).reshape(-1, pair.shape[-1])
    bias = torch.mm(_compose.cast(weight, math_.matmul), x.t())
    n = layout.length
    return bias.view(layout.num_heads, 1, layout.groups, n, n).transpose(0, 2)


class _Present:
    """Which keys of a block of rows exist, as bit patterns.

    A key is removed by writing the bits of minus infinity over its logit: exact whatever stood
    there, and the bitwise operations run at memory speed where ``where`` and ``masked_fill`` on
    a broadcast mask are several times slower on the CPU. In a row without any key the bias gives
    way to zero instead, so that its softmax is finite, and its result is set to zero afterwards.
    """

    def __init__(self, keep: Tensor, infinity: int) -> None:
        # All bits set where a key exists, none elsewhere; the same for rows that have keys.
        self._keep = keep
        self._alive = keep.amin(-1, keepdim=True)
        self._fill = (keep ^ self._alive).bitwise_and_(infinity)

    @staticmethod
    def make(mask: Tensor | None, dtype: torch.dtype) -> _Present | None:
        """The keys of the rows of ``mask`` (rows, N); None when there is no mask."""
        if mask is None:
            return None
        integer, infinity = _BITS[dtype]
        present = mask if mask.dtype == torch.bool else mask != 0
        return _Present(present.to(integer).neg_(), infinity)

    def put_bias(self, logits: Tensor, bias: Tensor, rows: slice | None) -> None:
        """``logits`` (groups, rows, heads, queries, N) = bias, minus infinity at absent keys.

        ``rows`` are those of the logits within the block, None for all.
        """
        shape = (logits.shape[0], logits.shape[1], 1, 1, logits.shape[-1])
        keep, fill = (
            (part if rows is None else part[rows]).view(shape) for part in (self._keep, self._fill)
        )
        bits = logits.view(keep.dtype)
        torch.bitwise_and(bias.view(keep.dtype), keep, out=bits)
        bits.bitwise_or_(fill)

    def zero_absent_rows(self, tensor: Tensor) -> None:
        """Set rows without keys of ``tensor`` (rows, H * d, N) to zero, in place."""
        tensor.view(self._alive.dtype).bitwise_and_(self._alive.unsqueeze(-1))


class _Dropout:
    """Which attention weights are kept: a hash of the seed and of the weight's own position.

    The position is (row of the whole call, head, query, key), so blocks, the backward and a
    recomputed forward agree, and so do the kernels (csrc/msa_row_attention/dropout.cuh). Each
    (row, head, query) gets a 64-bit key, a hash of hashes; two neighbouring keys share one hash of
    it in 32 bits, which is what a GPU multiplies at once, and have 16 bits of that each.
    """

    _GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, SplitMix64's increment
    _FIRST = -49064778989728563  # 0xFF51AFD7ED558CCD, MurmurHash3's fmix64
    _SECOND = -4265267296055464877  # 0xC4CEB9FE1A85EC53
    _WORD = 0xFFFFFFFF
    NUMBERS = 1 << 16

    def __init__(self, seed: Tensor, probability: float, layout: _Layout) -> None:
        self._layout = layout
        self._seed = self._hash(seed.reshape(()).clone())
        self._threshold = round(probability * self.NUMBERS)
        # Of what is kept indeed, so that the mean is exact.
        kept = self.NUMBERS - self._threshold
        self.factor = self.NUMBERS / kept if kept > 0 else 0.0
        pairs = torch.arange((layout.length + 1) // 2, device=layout.device)
        self._pairs = pairs.mul_(0x9E3779B9).bitwise_and_(self._WORD)
        self._ids: tuple[slice, Tensor] | None = None

    @staticmethod
    def make(seed: Tensor | None, probability: float, layout: _Layout) -> _Dropout | None:
        """None when nothing is dropped."""
        if seed is None or probability == 0.0:
            return None
        return _Dropout(seed, probability, layout)

    @classmethod
    def _hash(cls, x: Tensor) -> Tensor:
        """Mix ``x`` in place. Shifts of signed numbers need their sign bits cleared."""
        shifted = x >> 33
        x ^= shifted.bitwise_and_((1 << 31) - 1)
        x *= cls._FIRST
        torch.bitwise_right_shift(x, 33, out=shifted)
        x ^= shifted.bitwise_and_((1 << 31) - 1)
        x *= cls._SECOND
        torch.bitwise_right_shift(x, 33, out=shifted)
        x ^= shifted.bitwise_and_((1 << 31) - 1)
        return x

    def _hash_pairs(self, keys: Tensor) -> Tensor:
        """32 bits for each key and two neighbours: (..., pairs), in int64 without their signs."""
        word = self._WORD
        x = ((keys & word).unsqueeze(-1) + self._pairs).bitwise_and_(word)
        shifted = x >> 16
        x ^= shifted
        x *= 0x7FEB352D
        x &= word
        torch.bitwise_right_shift(x, 15, out=shifted)
        x ^= shifted
        x ^= (keys >> 32).bitwise_and_(word).unsqueeze(-1)
        x *= 0x846CA68B
        x &= word
        torch.bitwise_right_shift(x, 16, out=shifted)
        x ^= shifted
        return x

    def keys(self, rows: Tensor, heads: slice, queries: slice) -> Tensor:
        """The 64-bit keys (rows * heads, queries) of rows of the call."""
        device = rows.device
        maps = rows[:, None] * self._layout.num_heads
        maps = maps + torch.arange(heads.start, heads.stop, device=device)
        x = self._hash(maps.mul_(self._GOLDEN).add_(self._seed)).view(-1, 1)
        positions = torch.arange(queries.start, queries.stop, device=device)
        return self._hash(x + positions * self._GOLDEN)

    def keep(self, chunk: _Chunk, rows: slice, dtype: torch.dtype) -> Tensor:
        """1 where a weight of the chunk is kept, else 0: (maps, queries, N)."""
        if self._ids is None or self._ids[0] != rows:
            self._ids = (rows, self._layout.row_ids(rows))
        x = self._hash_pairs(self.keys(self._ids[1][chunk.rows], chunk.heads, chunk.queries))
        keep = torch.empty((*x.shape, 2), dtype=dtype, device=x.device)
        keep[..., 1] = (x >> 16) >= self._threshold
        keep[..., 0] = x.bitwise_and_(self.NUMBERS - 1) >= self._threshold
        return keep.view(*x.shape[:-1], -1)[..., : self._layout.length]


def _attention_weights(
    chunk: _Chunk,
    space: _Space,
    bias: Tensor,
    present: _Present | None,
    q: Tensor,
    k: Tensor,
    layout: _Layout,
    math_: Arithmetic,
) -> Tensor:
    """softmax(q k / sqrt(d) + bias) of one chunk: (maps, queries, N) in the elementwise dtype."""
    logits = space.take(chunk)
    part = layout.bias_of(bias, chunk).unsqueeze(1)
    grouped = layout.grouped(logits, chunk, part.shape[0])
    if present is None:
        grouped.copy_(part)
    else:
        present.put_bias(grouped, part, None if chunk.every_map else chunk.rows)
    left, right = chunk.queries_of(q).transpose(1, 2), chunk.of(k)
    if left.dtype == logits.dtype:
        logits.baddbmm_(left, right, alpha=layout.scale)
    elif left.device.type == "cuda":  # a large 16-bit product stays finite in fp32
        torch.baddbmm(logits, left, right, out_dtype=logits.dtype, alpha=layout.scale, out=logits)
    else:
        logits.add_(torch.bmm(left, right), alpha=layout.scale)
    # In place: each row is read in full before it is written.
    return torch.softmax(logits, -1, out=logits)


def _product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """``out = left @ right`` for a contiguous ``out`` in the elementwise dtype."""
    if left.dtype == out.dtype:
        torch.bmm(left, right, out=out)
    elif left.device.type == "cuda":
        torch.bmm(left, right, out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.bmm(left, right))


def _store(out: Tensor, chunk: _Chunk, left: Tensor, right: Tensor) -> None:
    """``out[maps, :, queries] = left @ right``."""
    target = chunk.of(out)
    if chunk.every_query:
        torch.bmm(left, right, out=target)
    else:
        target[:, :, chunk.queries] = torch.bmm(left, right)


def _accumulate(out: Tensor, left: Tensor, right: Tensor, layout: _Layout) -> None:
    """``out = left @ right``, or ``+=`` when ``out`` is a sum over blocks of queries."""
    if layout.whole_maps:
        torch.bmm(left, right, out=out)
    else:
        out.baddbmm_(left, right)


def _each(matrix: Tensor, count: int) -> Tensor:
    """The same matrix for every row of a block, without copying it."""
    return matrix.expand(count, -1, -1)


def _project(weight: Tensor, xt: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight (out, c), xt (rows, c, N), bias (out, 1) -> (rows, out, N)."""
    if bias is None:
        return torch.bmm(_each(weight, xt.shape[0]), xt)
    return torch.baddbmm(bias, _each(weight, xt.shape[0]), xt)


def _project_out(gated: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """gated (rows, H * d, N), weight (c, H * d), bias (c,) -> (rows, N, c), in ``out`` if any."""
    left, right = gated.transpose(1, 2), _each(weight.t(), gated.shape[0])
    if bias is None:
        return torch.bmm(left, right, out=out)
    return torch.baddbmm(bias, left, right, out=out)


def _cast(bias: Tensor | None, math_: Arithmetic) -> Tensor | None:
    return None if bias is None else _compose.cast(bias, math_.matmul)


def _column(bias: Tensor | None, math_: Arithmetic) -> Tensor | None:
    return None if bias is None else _compose.cast(bias, math_.matmul).unsqueeze(1)


def _scaled(x: Tensor, drop: _Dropout | None) -> Tensor:
    """Make up for the dropped weights."""
    return x if drop is None else x.mul_(drop.factor)


def _flat(x: Tensor) -> Tensor:
    """(rows, out, N) -> (rows * N, out); a view for one row."""
    return x.transpose(1, 2).reshape(-1, x.shape[1])


def _add_product(grads: _compose.Gradients, name: str, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to the gradient of ``name``."""
    buffer = grads.buffer(name)
    if left.dtype == buffer.dtype:
        buffer.addmm_(left, right)
    else:
        buffer += torch.mm(left, right)


def _linear_backward(
    grads: _compose.Gradients,
    name: str,
    d: Tensor,
    x: Tensor,
    weight: Tensor,
    need_x: bool,
    dx: Tensor | None,
) -> Tensor | None:
    """Gradients of a projection: of its weight into ``grads``, of x added to ``dx``."""
    if grads.needs(name):
        _add_product(grads, name, _flat(d).t(), x.reshape(-1, x.shape[-1]))
    if not need_x:
        return None
    left, right = d.transpose(1, 2), _each(weight, d.shape[0])
    return torch.bmm(left, right) if dx is None else dx.baddbmm_(left, right)
