# SPDX-License-Identifier: Apache-2.0
"""Backward on CUDA: the room's kernels, with matrix products between them.

Nothing but the inputs is kept by the forward: a, b and o are formed again. Then, some lines of
pairs at a time, back through the output gate, the output projection and the second LayerNorm (the
gradient of o takes o's place); through the contraction, to the gradients of a and b; and, some
lines at a time, through the gates, the projections and the first LayerNorm. The parameters'
gradients follow at the end from sums over pairs. docs/ops/ has the formulae.

Calls into PyTorch are few: up to N of some 500 their host time decides how fast the whole is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_ops.triangular_multiplicative_update.composition import DIFFERENTIABLE

_OPS = torch.ops.fused_ops
_PLACES = 8  # lines of pairs are padded to a multiple of so many
_ROWS = 1 << 18  # of pairs at a time: their matrices are small beside the planes, and fill a GPU
_PARAMETERS = DIFFERENTIABLE[1:]
_INPUT_SIDE = DIFFERENTIABLE[:11]  # the pair and what comes before the contraction
_LINES = 16  # chunks are so many lines, that is, whole blocks of rows, or up to the last line


@functools.cache
def _stage(name: str) -> Any:
    return getattr(torch.ops.fused_ops, f"triangular_multiplicative_update_stage_{name}").default


class _Plan(NamedTuple):
    """What every step is told, and the sizes."""

    hidden: int
    precision: str
    dtype: torch.dtype


def _matmul(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """``a @ b`` in their dtype; fp32 to the accuracy that ``precision`` asks for."""
    if a.dtype == torch.float32:
        return _OPS.tensor_matmul_forward.default(a, b, precision, None)
    return torch.mm(a, b)


def _slabs(rows: int, left: int, right: int) -> int:
    """Slabs of rows are a batch: one product of few results would leave most of the GPU idle."""
    tiles = -(-left // 128) * -(-right // 128)
    return next(s for s in (64, 32, 16, 8) if rows % s == 0 and (s * tiles <= 256 or s == 8))


class _Products:
    """``left.T @ right`` of chunks of rows in fp32: slabs (slabs, left, right), to be added.

    The number of rows of a chunk is a multiple of 8.
    """

    def __init__(self, chunks: list[tuple[int, int]], precision: str) -> None:
        self.chunks = chunks
        self.precision = precision
        self.parts: list[Tensor] = []
        self.used = 0

    def add(self, left: Tensor, right: Tensor) -> None:
        """The product of the next chunk."""
        if left.dtype == torch.float32:
            reduce = _OPS.tensor_matmul_reduce.default
            self.parts.append(reduce(left, right, self.precision, None))
            return
        shape = (left.shape[1], right.shape[1])
        if not self.parts:
            total = sum(_slabs(count, *shape) for _, count in self.chunks)
            self.parts = [torch.empty(total, *shape, dtype=torch.float32, device=left.device)]
        slabs = _slabs(len(left), *shape)
        rows = len(left) // slabs
        row, column = left.stride()
        lefts = left.as_strided((slabs, shape[0], rows), (rows * row, column, row))
        rights = right.view(slabs, rows, shape[1])
        out = _rows(self.parts[0], self.used, slabs)
        torch.bmm(lefts, rights, out_dtype=torch.float32, out=out)
        self.used += slabs

    def slabs(self) -> Tensor | None:
        """What was added; None if nothing was."""
        if not self.parts:
            return None
        return self.parts[0] if len(self.parts) == 1 else torch.stack(self.parts)


def _rows(tensor: Tensor, first: int, count: int) -> Tensor:
    return tensor if count == len(tensor) else tensor[first : first + count]


def _walkable(pairs: Tensor) -> Tensor:
    """A tensor of pairs as kernels take it: channels side by side, one stride for batches."""
    if pairs.stride(-1) == 1 and (pairs.dim() <= 4 or pairs.is_contiguous()):
        return pairs
    return pairs.contiguous()


def _aligned(pairs: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes and of eight numbers."""
    return pairs.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in pairs.stride()[:-1])


class _Backward:
    """One backward of one call."""

    def __init__(self, grad: Tensor, args: dict[str, Any], needs: list[bool]) -> None:
        # Here once, where the steps would do it each for itself.
        self.grad = _walkable(grad.to(args["dtype"] or args["pair"].dtype))
        pair = self.pair = _walkable(args["pair"])
        self.args = {**args, "pair": pair}
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
        self.parameters = [args[name] for name in _PARAMETERS]
        self.chunks = list(self._chunks())
        self.resident_blocks = 0
        self.out_proj_products = self._products()
        self.out_gate_products = _Products([(0, self.pairs)], self.precision)
        self.input_products = self._products()
        self.input_sums: Tensor | None = None

    def _products(self) -> _Products:
        return _Products(self.chunks, self.precision)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.pair.device)

    def needs(self, *names: str) -> bool:
        return not self.needed.isdisjoint(names)

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """(first pair, number of pairs): whole lines."""
        lines = self.batch * self.n
        step = max(1, _ROWS // self.pitch // _LINES) * _LINES
        for first in range(0, lines, step):
            yield first * self.pitch, min(step, lines - first) * self.pitch

    def matrices(self, plane: Tensor, transposed: bool = False, padded: bool = False) -> Tensor:
        """A plane, or the first of several, as (hidden * batch, n, n) or with all places."""
        n, pitch = self.n, self.pitch
        strides = (n * pitch, 1, pitch) if transposed else (n * pitch, pitch, 1)
        return plane.as_strided((self.hidden * self.batch, n, pitch if padded else n), strides)

    def run(self) -> list[Tensor]:
        input_side = self.needs(*_INPUT_SIDE)
        half = torch.bfloat16 if self.brain else torch.float16
        a = self.empty(2 if self.split else 1, self.hidden, self.pairs, dtype=half)
        # cuBLAS reads as many lines of a matrix as it has places: csrc/, room_behind().
        b = self.empty(a.numel() + (self.pitch - self.n) * self.pitch, dtype=half)
        o = self.empty(self.hidden, self.pairs, dtype=self.wide)
        # Weights to multiply gradients with, where gradients must come so far.
        self.folded_input = self.folded_gate = self.folded_out = self.largest = None
        if input_side:
            self.folded_out = self.empty(self.channels, self.hidden)
            if not self.brain:
                self.largest = self.empty(self.hidden, dtype=torch.int32)
        if self.needs("pair"):
            self.folded_input = self.empty(4 * self.hidden, self.channels)
            self.folded_gate = self.empty(self.channels, self.channels)
        packed, self.block_rows, self.resident_blocks = _stage("forward")(
            self.pair, self.args["mask"], *self.parameters, self.outgoing,
            self.gate_normalized, self.eps, self.precision, self.dtype, a, b, o,
            self.folded_input, self.folded_out, self.folded_gate, self.largest,
        )  # fmt: skip

        if self.resident_blocks and not _aligned(self.grad):
            self.grad = self.grad.clone(memory_format=torch.contiguous_format)
        through_gate = self.output_side(packed, o)
        d_pair = None
        if input_side:
            da, db, undo = self.contraction(packed, o, a, b)
            del o, a, b
            d_pair = self.input_side(packed, da, db, undo, through_gate)
        grads = self.finish()
        if d_pair is not None:
            grads["pair"] = d_pair
        return [grads[name] for name in DIFFERENTIABLE if name in self.needed]

    # Output side --------------------------------------------------------------------------------

    def output_side(self, packed: Tensor, o: Tensor) -> Tensor | None:
        """Gradients of what comes after the contraction; o becomes its own gradient.

        Returns what came through the output gate, in its rows, for all pairs.
        """
        need_proj = self.needs("out_proj_weight", "layer_norm_out_weight")
        # With the gate on LayerNorm(pair), the weight of that has a share in it.
        need_gate = self.needs("out_gate_weight") or (
            self.gate_normalized and self.needs("layer_norm_in_weight")
        )
        plain = (
            self.n == self.pitch
            and self.pair.is_contiguous()
            and self.pair.dtype == self.dtype
            and not self.gate_normalized
        )
        gate_input = None
        if need_gate:
            if plain:
                gate_input = self.pair.view(-1, self.channels)
            else:
                gate_input = self.empty(self.pairs, self.channels)
        d_gate = self.empty(self.pairs, self.channels)

        self.output_sums = self.line_sums(2 * self.channels)
        for first, count in self.chunks:
            d_proj = self.empty(count, self.channels)
            normalised = self.empty(count, self.hidden)
            kept = None
            if gate_input is not None and not plain:
                kept = _rows(gate_input, first, count)
            _stage("output_backward")(
                self.pair, *self.plan, self.gate_normalized, self.eps, packed, o, self.grad,
                first, count, d_proj, _rows(d_gate, first, count), normalised, kept,
                self.of_chunk(self.output_sums, first, count), self.resident_blocks,
            )  # fmt: skip
            if need_proj:
                self.out_proj_products.add(d_proj, normalised)
            if self.folded_out is not None:
                d_normalised = _matmul(d_proj, self.folded_out, self.precision)
                _stage("norm_out_backward")(
                    self.pair, *self.plan, self.eps, packed, d_normalised, first, count, o,
                    self.largest,
                )  # fmt: skip
                del d_normalised
            del d_proj, normalised

        if gate_input is not None:
            self.out_gate_products.add(d_gate, gate_input)
            del gate_input
        if self.folded_gate is None:
            return None
        return _matmul(d_gate, self.folded_gate, self.precision)

    def line_sums(self, lines: int) -> Tensor:
        """Room for a row of sums from each block of pairs, or from each that stays, a chunk."""
        if self.resident_blocks:
            rows = len(self.chunks) * self.resident_blocks
        else:
            rows = -(-self.pairs // self.block_rows)
        return self.empty(rows, lines, dtype=torch.float32)

    def of_chunk(self, sums: Tensor, first: int, count: int) -> Tensor:
        """The rows of a chunk, which begins with a block."""
        if self.resident_blocks:
            chunk = first // self.chunks[0][1]
            return _rows(sums, chunk * self.resident_blocks, self.resident_blocks)
        return _rows(sums, first // self.block_rows, -(-count // self.block_rows))

    # Contraction --------------------------------------------------------------------------------

    def contraction(
        self, packed: Tensor, d_o: Tensor, a: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Planes da and db; times what is returned last, and the scales of b and a, in fp16."""
        da = self.empty(self.hidden, self.pairs, dtype=self.wide)
        if self.brain:
            db = torch.empty_like(da)
            for d, plane, out in ((self.matrices(d_o), b, da), (self.matrices(d_o, True), a, db)):
                torch.bmm(d, self.matrices(plane, padded=True), out=self.matrices(out, padded=True))
            return da, db, None
        assert self.largest is not None
        parts = self.empty(len(a), self.hidden, self.pairs, dtype=torch.float16)
        undo = self.empty(self.hidden, dtype=torch.float32)
        lo = parts[1] if self.split else None
        _stage("split_plane")(self.pair, *self.plan, d_o, self.largest, parts, lo, undo)
        # o is not needed any more, and its memory is as large as that of db.
        db = d_o
        if self.split:
            contract = _stage("contract_backward")
            contract(self.pair, *self.plan, packed, parts, undo, b, False, da)
            contract(self.pair, *self.plan, packed, parts, undo, a, True, db)
            return da, db, None
        for d, plane, out in (
            (self.matrices(parts), b, da),
            (self.matrices(parts, True), a, db),
        ):
            torch.bmm(
                d,
                self.matrices(plane, padded=True),
                out_dtype=torch.float32,
                out=self.matrices(out, padded=True),
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
    ) -> Tensor | None:
        """Through what comes before the contraction, to the gradient of the pair."""
        need_products = self.needs(
            "proj_a_weight", "gate_a_weight", "proj_b_weight", "gate_b_weight",
            "layer_norm_in_weight",
        )  # fmt: skip
        d_pair = None
        if self.folded_input is not None:
            d_pair = self.empty(*self.pair.shape, dtype=self.pair.dtype)
        self.input_sums = self.line_sums(4 * self.hidden)
        for first, count in self.chunks:
            d = self.empty(count, 4 * self.hidden)
            if self.resident_blocks:  # which write it transposed
                d = d.view(4 * self.hidden, count)
            normalised = self.empty(count, self.channels)
            _stage("project_backward")(
                self.pair, self.args["mask"], *self.plan, self.outgoing, self.eps, packed, da, db,
                undo, first, count, d, normalised, self.of_chunk(self.input_sums, first, count),
                self.resident_blocks,
            )  # fmt: skip
            if self.resident_blocks:
                d = d.t()
            if need_products:
                self.input_products.add(d, normalised)
            if self.folded_input is not None:
                d_normalised = _matmul(d, self.folded_input, self.precision)
                _stage("norm_in_backward")(
                    self.pair, *self.plan, self.outgoing, self.gate_normalized, self.eps,
                    d_normalised, through_gate, first, count, d_pair,
                )  # fmt: skip
        return d_pair

    # Parameters ---------------------------------------------------------------------------------

    def finish(self) -> dict[str, Tensor]:
        """Of the wanted parameters: each a tensor of its own, in its parameter's dtype."""
        grads = {
            name: torch.empty_like(self.args[name], memory_format=torch.contiguous_format)
            for name in _PARAMETERS
            if name in self.needed
        }
        if grads:
            _stage("finish")(
                self.pair, *self.parameters, self.gate_normalized, self.input_products.slabs(),
                self.out_proj_products.slabs(), self.out_gate_products.slabs(), self.input_sums,
                self.output_sums, *(grads.get(name) for name in _PARAMETERS),
            )  # fmt: skip
        return grads


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
