# SPDX-License-Identifier: Apache-2.0
"""Building blocks shared by the PyTorch compositions of all ops.

A composition computes an op with stock PyTorch calls but keeps no large intermediate: it walks
the input in blocks, and its backward recomputes what the forward did not keep.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# Block sizes in elements of the widest tensor of a block. CPU: a block and its temporaries stay
# in the second-level cache. Elsewhere: large enough to fill a GPU with each launch.
_CPU_BLOCK_ELEMENTS = 1 << 18
_DEVICE_BLOCK_ELEMENTS = 1 << 21


class Arithmetic(NamedTuple):
    """The two dtypes a composition works in."""

    matmul: torch.dtype
    """dtype of the operands of matrix products."""
    elementwise: torch.dtype
    """dtype of everything else (normalisation, softmax, gates, sums)."""


def arithmetic(device: torch.device, dtype: torch.dtype) -> Arithmetic:
    """Choose the working dtypes for results of type ``dtype`` on ``device``.

    16-bit products run in 16 bits where there are units for them. CPUs without such units are
    several times slower in bf16 than in fp32, and fp32 is the more accurate of the two.
    """
    if dtype == torch.float64:
        return _DOUBLE
    if dtype == torch.float32 or (device.type == "cpu" and not _cpu_multiplies(dtype)):
        return _SINGLE
    return Arithmetic(dtype, torch.float32)


_SINGLE = Arithmetic(torch.float32, torch.float32)
_DOUBLE = Arithmetic(torch.float64, torch.float64)


@functools.cache
def _cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether PyTorch has fast matrix products in the 16-bit ``dtype`` on this CPU.

    Not asked for fp16, whose results can overflow on the way (logits, the triangular sum).
    """
    if dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return False


def geometry_dtype(device: torch.device) -> torch.dtype:
    """dtype for point coordinates: float64 wherever the device has it (MPS has not)."""
    return torch.float32 if device.type == "mps" else torch.float64


def block_length(device: torch.device, elements_per_row: int) -> int:
    """Number of rows to take at a time when a row has ``elements_per_row`` elements."""
    budget = _CPU_BLOCK_ELEMENTS if device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS
    return max(1, budget // max(1, elements_per_row))


def blocks(total: int, length: int) -> Iterator[slice]:
    """Yield consecutive slices of at most ``length`` that cover ``range(total)``."""
    for start in range(0, total, length):
        yield slice(start, min(start + length, total))


def lead_indices(lead: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield every index of the leading (batch) axes; one empty index when there are none."""
    return itertools.product(*(range(size) for size in lead))


def broadcast_index(index: tuple[int, ...], lead: tuple[int, ...]) -> tuple[int, ...]:
    """Index into leading axes of shape ``lead`` that broadcast against those of ``index``."""
    aligned = index[len(index) - len(lead) :]
    return tuple(0 if size == 1 else i for i, size in zip(aligned, lead, strict=True))


class Rows:
    """All but the last ``tail`` axes of a tensor seen as one axis, without copying the tensor.

    Where the strides allow it a block of rows is a view; otherwise only the block is copied, so
    that an expanded or transposed input never doubles in memory.
    """

    def __init__(self, tensor: Tensor, tail: int) -> None:
        self._tensor = tensor
        lead = tuple(tensor.shape[: tensor.dim() - tail])
        self._tail_shape = tuple(tensor.shape[tensor.dim() - tail :])
        self._lead = lead
        self.length = math.prod(lead)
        self._view: Tensor | None = None
        with contextlib.suppress(RuntimeError):  # not expressible with one stride
            self._view = tensor.view(self.length, *self._tail_shape)

    @property
    def viewable(self) -> bool:
        """Whether every block is a view."""
        return self._view is not None

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensor."""
        return self._tensor.dtype

    def __getitem__(self, rows: slice) -> Tensor:
        if self._view is not None:
            whole = rows.start == 0 and rows.stop == self.length
            return self._view if whole else self._view[rows]
        pieces = list(self._pieces(rows))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def write(self, rows: slice, value: Tensor) -> None:
        """Store a block of rows in the tensor, rounded to its dtype."""
        if self._view is not None:
            self._view[rows] = value
            return
        start = 0
        for piece in self._pieces(rows):
            piece.copy_(value[start : start + len(piece)])
            start += len(piece)

    def _pieces(self, rows: slice) -> Iterator[Tensor]:
        inner = self._lead[-1]
        position = rows.start
        while position < rows.stop:
            outer, first = divmod(position, inner)
            last = min(inner, first + rows.stop - position)
            index = []
            for size in reversed(self._lead[:-1]):
                outer, i = divmod(outer, size)
                index.append(i)
            yield self._tensor[tuple(reversed(index))][first:last]
            position += last - first


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, without the price of the call where nothing changes.

    A small problem asks thirty times.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, math_: Arithmetic) -> Tensor:
    """``x @ weight.T + bias`` with operands in the matmul dtype, result in the elementwise one."""
    out = functional.linear(
        cast(x, math_.matmul),
        cast(weight, math_.matmul),
        None if bias is None else cast(bias, math_.matmul),
    )
    return cast(out, math_.elementwise)


def linear_channel_first(
    x: Tensor, weight: Tensor, bias: Tensor | None, math_: Arithmetic
) -> Tensor:
    """Like :func:`linear` for ``x`` (rows, in), but returned as (out, rows)."""
    columns = cast(x, math_.matmul).t()
    w = cast(weight, math_.matmul)
    if bias is None:
        return cast(torch.mm(w, columns), math_.elementwise)
    out = torch.addmm(cast(bias, math_.matmul).unsqueeze(1), w, columns)
    return cast(out, math_.elementwise)


def matmul(a: Tensor, b: Tensor, math_: Arithmetic) -> Tensor:
    """``a @ b`` with operands in the matmul dtype, result in the elementwise one."""
    return cast(torch.matmul(cast(a, math_.matmul), cast(b, math_.matmul)), math_.elementwise)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, math_: Arithmetic
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm over the last axis in the elementwise dtype; returns (y, mean, rstd)."""
    e = math_.elementwise
    return torch.native_layer_norm(cast(x, e), [x.shape[-1]], cast(weight, e), cast(bias, e), eps)


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    math_: Arithmetic,
    need_parameters: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of :func:`layer_norm` with respect to (x, weight, bias)."""
    e = math_.elementwise
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        cast(grad, e),
        cast(x, e),
        [x.shape[-1]],
        mean,
        rstd,
        cast(weight, e),
        cast(bias, e),
        [True, need_parameters, need_parameters],
    )
    return dx, dweight, dbias


class Gradients:
    """Collects the gradients a backward was asked for, in the order of its arguments.

    ``needs`` says for each name whether its gradient is wanted; the others are never allocated.
    Accumulation is in ``dtype``; :meth:`result` rounds once, to each tensor's own dtype.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor | None],
        needs: list[bool],
        dtype: torch.dtype,
    ) -> None:
        self._tensors = tensors
        self._needed = [name for name, need in zip(tensors, needs, strict=True) if need]
        self._wanted = frozenset(self._needed)
        self._sums: dict[str, Tensor] = {}
        self._dtype = dtype
        for name in self._needed:
            if tensors[name] is None:
                raise RuntimeError(f"gradient of {name} asked for, but it is None")

    def needs(self, *names: str) -> bool:
        """Whether any of ``names`` is wanted."""
        return not self._wanted.isdisjoint(names)

    def buffer(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The zero-initialised contiguous sum of ``name``, in the shape of its tensor."""
        if name not in self._sums:
            tensor = self._tensors[name]
            assert tensor is not None
            self._sums[name] = torch.zeros(
                tensor.shape, dtype=dtype or self._dtype, device=tensor.device
            )
        return self._sums[name]

    def add(self, name: str, value: Tensor | None) -> None:
        """Add ``value`` to the gradient of ``name`` if that is wanted."""
        if value is not None and name in self._wanted:
            buffer = self.buffer(name)
            buffer += value

    def result(self) -> list[Tensor]:
        """The wanted gradients in argument order."""
        return [self.one(name) for name in self._needed]

    def one(self, name: str) -> Tensor:
        """The gradient of ``name`` in the dtype of its tensor."""
        tensor = self._tensors[name]
        assert tensor is not None
        return self.buffer(name).to(tensor.dtype)
