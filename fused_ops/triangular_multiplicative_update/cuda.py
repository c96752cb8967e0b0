# SPDX-License-Identifier: Apache-2.0
"""Backward on CUDA: the room's kernels, with matrix products between them.

Nothing but the inputs is kept by the forward: a, b and o are formed again. Then, some lines of
pairs at a time, back through the output gate, the output projection and the second LayerNorm (the
gradient of o takes o's place); through the contraction, to the gradients of a and b; and, some
lines at a time, through the gates, the projections and the first LayerNorm. docs/ops/ has the
formulae.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_ops.triangular_multiplicative_update.composition import DIFFERENTIABLE

_PLACES = 8  # lines of pairs are padded to a multiple of so many
_ROWS = 1 << 18  # of pairs at a time: their matrices are small beside the planes, and fill a GPU
_INPUT_SIDE = DIFFERENTIABLE[:11]  # the pair and what comes before the contraction


def _stage(name: str) -> Any:
    return getattr(torch.ops.fused_ops, f"triangular_multiplicative_update_stage_{name}").default


class _Plan(NamedTuple):
    """What every step is told, and the sizes."""

    hidden: int
    precision: str
    dtype: torch.dtype


class _Sums(NamedTuple):
    """Sums over all pairs: gradient times input of a linear, and of its bias."""

    product: Tensor
    """(out, in)"""
    bias: Tensor
    """(out,)"""


def _matmul(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """``a @ b`` in their dtype; fp32 to the accuracy that ``precision`` asks for."""
    if a.dtype == torch.float32:
        return torch.ops.fused_ops.tensor_matmul_forward.default(a, b, precision, None)
    return torch.mm(a, b)


def _sum_over_rows(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """``a.T @ b`` in fp32 for two matrices of many rows, a multiple of 8, summed in fixed order."""
    if a.dtype == torch.float32:
        return torch.ops.fused_ops.tensor_matmul_reduce.default(a, b, precision, None)
    # Slabs of rows are a batch: one product of few results would leave most of the GPU idle.
    slabs = next(s for s in (64, 32, 16, 8) if len(a) % s == 0)
    left = a.view(slabs, -1, a.shape[1]).transpose(1, 2)
    right = b.view(slabs, -1, b.shape[1])
    return torch.bmm(left, right, out_dtype=torch.float32).sum(0)


class _Backward:
    """One backward of one call."""

    def __init__(self, grad: Tensor, args: dict[str, Any], needs: list[bool]) -> None:
        self.grad = grad
        self.args = args
        pair = self.pair = args["pair"]
        self.needed = {name for name, need in zip(DIFFERENTIABLE, needs, strict=True) if need}
        self.n, self.channels = pair.shape[-2:]
        self.hidden = args["proj_a_weight"].shape[0]
        self.pitch = -(-self.n // _PLACES) * _PLACES
        self.batch = math.prod(pair.shape[:-3])
        self.pairs = self.batch * self.n * self.pitch
        self.dtype = args["dtype"] or pair.dtype
        self.precision = args["precision"]
        self.plan = _Plan(self.hidden, self.precision, self.dtype)
        self.eps = args["eps"]
        self.outgoing = args["outgoing"]
        self.gate_normalized = args["gate_normalized"]
        self.split = self.dtype == torch.float32 and self.precision == "ieee"
        self.brain = self.dtype == torch.bfloat16
        self.wide = torch.bfloat16 if self.brain else torch.float32
        self.results: dict[str, Tensor] = {}
        self.parameters = self._in_fp32(args)

    def _in_fp32(self, args: dict[str, Any]) -> dict[str, Tensor]:
        """The parameters in fp32, by name; a missing bias is zeros."""
        names = DIFFERENTIABLE[1:]
        values = {name: args[name] for name in names}
        for name, value in values.items():
            if value is None:
                weight = args[name.replace("_bias", "_weight")]
                values[name] = torch.zeros(weight.shape[0], device=weight.device)
        wide = {n: v for n, v in values.items() if v.dtype != torch.float32}
        casts = [torch.empty(v.shape, device=v.device) for v in wide.values()]
        if casts:
            torch._foreach_copy_(casts, list(wide.values()))
        return values | dict(zip(wide, casts, strict=True))

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.pair.device)

    def needs(self, *names: str) -> bool:
        return not self.needed.isdisjoint(names)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(first pair, number of pairs): whole lines."""
        lines = self.batch * self.n
        step = max(1, _ROWS // self.pitch)
        for first in range(0, lines, step):
            yield first * self.pitch, min(step, lines - first) * self.pitch

    def matrices(self, plane: Tensor) -> Tensor:
        """A plane as (hidden * batch, n, n)."""
        return plane.view(-1, self.n, self.pitch)[..., : self.n]

    def run(self) -> list[Tensor]:
        a_parts = 2 if self.split else 1
        half = torch.bfloat16 if self.brain else torch.float16
        a = self.empty(a_parts, self.hidden, self.pairs, dtype=half)
        b = torch.empty_like(a)
        o = self.empty(self.hidden, self.pairs, dtype=self.wide)
        names = list(self.args)
        parameters = [self.args[name] for name in names[: names.index("eps")]]
        packed = _stage("forward")(*parameters, self.eps, self.precision, self.dtype, a, b, o)
        self.block_rows = _stage("block_rows")(self.pair, *self.plan)

        input_side = self.needs(*_INPUT_SIDE)
        through_gate = self.output_side(packed, o, input_side)
        if input_side:
            da, db, undo = self.contraction(packed, o, a, b)
            del o, a, b
            self.input_side(packed, da, db, undo, through_gate)
        wanted = [name for name in DIFFERENTIABLE if name in self.needed]
        grads = {name: self.results[name] for name in wanted}
        # A tensor of its own for each, in its parameter's dtype.
        own = {n: torch.empty_like(self.args[n]) for n in wanted if n != "pair"}
        if own:
            torch._foreach_copy_(list(own.values()), [grads[name] for name in own])
        return [own.get(name, grads[name]) for name in wanted]

    # Output side --------------------------------------------------------------------------------

    def output_side(self, packed: Tensor, o: Tensor, input_side: bool) -> Tensor | None:
        """Gradients of what comes after the contraction; o becomes its own gradient.

        Returns what came through the output gate, in its rows, for all pairs.
        """
        norm = self.parameters["layer_norm_out_weight"]
        weight = self.parameters["out_proj_weight"]
        folded = (weight * norm).to(self.dtype)
        gate_weight = self.parameters["out_gate_weight"]
        gate_folded = gate_weight
        if self.gate_normalized:
            gate_folded = gate_weight * self.parameters["layer_norm_in_weight"]
        gate_folded = gate_folded.to(self.dtype)
        self.largest = None
        if not self.brain and input_side:
            self.largest = torch.zeros(self.hidden, dtype=torch.int32, device=o.device)
        need_pair = self.needs("pair")
        # With the gate on LayerNorm(pair), its weight and bias have a share in it.
        need_gate = self.needs("out_gate_weight") or (
            self.gate_normalized and self.needs("layer_norm_in_weight", "layer_norm_in_bias")
        )
        need_gate = need_gate or self.gate_normalized and self.needs("pair")
        need_proj = self.needs("out_proj_weight", "layer_norm_out_weight")
        plain = (
            self.n == self.pitch
            and self.pair.is_contiguous()
            and self.pair.dtype == self.dtype
            and not self.gate_normalized
        )
        gate_input = None
        if need_gate:
            gate_input = self.pair if plain else self.empty(self.pairs, self.channels)
            gate_input = gate_input.view(-1, self.channels)
        d_gate = self.empty(self.pairs, self.channels)

        proj_sums, columns = [], []
        for first, count in self.chunks():
            chunk = slice(first, first + count)
            d_proj = self.empty(count, self.channels)
            normalised = self.empty(count, self.hidden)
            sums = self.column_sums(count, 2 * self.channels)
            kept = None if plain or gate_input is None else gate_input[chunk]
            _stage("output_backward")(
                self.pair, *self.plan, self.gate_normalized, self.eps, packed, o, self.grad,
                first, count, d_proj, d_gate[chunk], normalised, kept, sums,
            )  # fmt: skip
            columns.append(sums.sum(0))
            if need_proj:
                proj_sums.append(_sum_over_rows(d_proj, normalised, self.precision))
            if input_side:
                d_normalised = _matmul(d_proj, folded, self.precision)
                _stage("norm_out_backward")(
                    self.pair, *self.plan, self.eps, packed, d_normalised, first, count, o,
                    self.largest,
                )  # fmt: skip
                del d_normalised
            del d_proj, normalised

        bias = _total(columns)
        d_proj_bias, d_gate_bias = bias[: self.channels], bias[self.channels :]
        self.results["out_proj_bias"] = d_proj_bias
        self.results["out_gate_bias"] = d_gate_bias
        norm_bias = self.parameters["layer_norm_out_bias"]
        self.results["layer_norm_out_bias"] = d_proj_bias @ weight
        if need_proj:
            product = _total(proj_sums)
            self.results["out_proj_weight"] = product * norm + torch.outer(d_proj_bias, norm_bias)
            self.results["layer_norm_out_weight"] = (weight * product).sum(0)
        self.gate_sums = None
        if need_gate:
            assert gate_input is not None
            product = _sum_over_rows(d_gate, gate_input, self.precision)
            del gate_input
            if self.gate_normalized:
                self.gate_sums = _Sums(product, d_gate_bias)
                product = product * self.parameters["layer_norm_in_weight"] + torch.outer(
                    d_gate_bias, self.parameters["layer_norm_in_bias"]
                )
            self.results["out_gate_weight"] = product
        return _matmul(d_gate, gate_folded, self.precision) if need_pair else None

    def column_sums(self, count: int, columns: int) -> Tensor:
        """Room for a row of column sums from each block of ``count`` pairs."""
        return self.empty(-(-count // self.block_rows), columns, dtype=torch.float32)

    # Contraction --------------------------------------------------------------------------------

    def contraction(
        self, packed: Tensor, d_o: Tensor, a: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Planes da and db; times what is returned last, and the scales of b and a, in fp16."""
        da = self.empty(self.hidden, self.pairs, dtype=self.wide)
        if self.brain:
            db = torch.empty_like(da)
            d = self.matrices(d_o)
            torch.bmm(d, self.matrices(b[0]), out=self.matrices(da))
            torch.bmm(d.transpose(1, 2), self.matrices(a[0]), out=self.matrices(db))
            return da, db, None
        assert self.largest is not None
        parts = self.empty(len(a), self.hidden, self.pairs, dtype=torch.float16)
        undo = self.empty(self.hidden, dtype=torch.float32)
        lo = parts[1] if self.split else None
        _stage("split_plane")(self.pair, *self.plan, d_o, self.largest, parts[0], lo, undo)
        # o is not needed any more, and its memory is as large as that of db.
        db = d_o
        if self.split:
            contract = _stage("contract_backward")
            contract(self.pair, *self.plan, packed, parts, undo, b, False, da)
            contract(self.pair, *self.plan, packed, parts, undo, a, True, db)
            return da, db, None
        d = self.matrices(parts[0])
        torch.bmm(d, self.matrices(b[0]), out_dtype=torch.float32, out=self.matrices(da))
        torch.bmm(
            d.transpose(1, 2), self.matrices(a[0]), out_dtype=torch.float32, out=self.matrices(db)
        )
        return da, db, undo

    # Input side ---------------------------------------------------------------------------------

    def input_side(
        self,
        packed: Tensor,
        da: Tensor,
        db: Tensor,
        undo: Tensor | None,
        through_gate: Tensor | None,
    ) -> None:
        """Gradients of what comes before the contraction."""
        order = ("proj_a", "gate_a", "proj_b", "gate_b")  # of the columns of the gradient
        weight = torch.cat([self.parameters[f"{name}_weight"] for name in order])
        norm = self.parameters["layer_norm_in_weight"]
        folded = (weight * norm).to(self.dtype)
        weights = [f"{name}_weight" for name in order]
        need_sums = self.needs(*weights, "layer_norm_in_weight")
        d_pair = None
        if self.needs("pair"):
            d_pair = torch.empty(self.pair.shape, dtype=self.pair.dtype, device=self.pair.device)
        products, columns = [], []
        for first, count in self.chunks():
            d = self.empty(count, 4 * self.hidden)
            normalised = self.empty(count, self.channels)
            sums = self.column_sums(count, 4 * self.hidden)
            _stage("project_backward")(
                self.pair, self.args["mask"], *self.plan, self.outgoing, self.eps, packed, da, db,
                undo, first, count, d, normalised, sums,
            )  # fmt: skip
            columns.append(sums.sum(0))
            if need_sums:
                products.append(_sum_over_rows(d, normalised, self.precision))
            if d_pair is not None:
                d_normalised = _matmul(d, folded, self.precision)
                _stage("norm_in_backward")(
                    self.pair, *self.plan, self.outgoing, self.gate_normalized, self.eps,
                    d_normalised, through_gate, first, count, d_pair,
                )  # fmt: skip
                self.results["pair"] = d_pair
        bias = _total(columns)
        for name, part in zip(order, bias.chunk(4), strict=True):
            self.results[f"{name}_bias"] = part
        norm_bias = self.parameters["layer_norm_in_bias"]
        d_norm_bias = bias @ weight
        if need_sums:
            product = _total(products)
            d_weight = product * norm + torch.outer(bias, norm_bias)
            for name, part in zip(weights, d_weight.chunk(4), strict=True):
                self.results[name] = part
            d_norm = (weight * product).sum(0)
            if self.gate_sums is not None:
                d_norm += (self.parameters["out_gate_weight"] * self.gate_sums.product).sum(0)
            self.results["layer_norm_in_weight"] = d_norm
        if self.gate_sums is not None:
            d_norm_bias += self.gate_sums.bias @ self.parameters["out_gate_weight"]
        self.results["layer_norm_in_bias"] = d_norm_bias


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def cuda_backward(grad: Tensor, *args: Any) -> list[Tensor] | None:
    """Gradients of the wanted tensors among ``DIFFERENTIABLE``; None where there are no pairs.

    Arguments as :func:`composition.backward` takes them.
    """
    if grad.numel() == 0:
        return None
    *inputs, needs = args
    return _Backward(grad, dict(zip(_NAMES, inputs, strict=True)), needs).run()


_NAMES = (
    "pair",
    "mask",
    *DIFFERENTIABLE[1:],
    "outgoing",
    "gate_normalized",
    "eps",
    "max_workspace",
    "precision",
    "dtype",
)
