# SPDX-License-Identifier: Apache-2.0
"""The blocks of query rows in which the composition visits pairs of residues.

Shapes: *lead are the leading axes of the nodes, L their product, N residues, H heads, r the rows
of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fused_ops import _compose


class Block:
    """Some query rows of some batch elements: all rows, or a part of them of one element."""

    def __init__(
        self,
        outer: tuple[int, ...],
        part: slice,
        start: int,
        rows: slice,
        heads: int,
        whole: bool,
    ) -> None:
        self.whole = whole
        """Whether these are all rows of all batch elements: slices of everything cost time too."""
        self.outer = outer
        """Index into the leading axes that are looped over."""
        self.part = part
        """Of the batch axis behind them."""
        self.batch = slice(start + part.start, start + part.stop)
        """Of the flattened leading axes."""
        self.heads = slice(self.batch.start * heads, self.batch.stop * heads)
        """The same in (batch, head) flattened."""
        self.rows = rows
        self.count = rows.stop - rows.start
        """Query rows of a batch element."""

    def keys(self, tensor: Tensor) -> Tensor:
        """The heads of the block, all N, of ``tensor`` (L H, N, ...)."""
        return tensor if self.whole else tensor[self.heads]

    def queries(self, tensor: Tensor) -> Tensor:
        """The heads and the rows of the block."""
        return tensor if self.whole else tensor[self.heads, self.rows]

    def positions(self, tensor: Tensor) -> Tensor:
        """The rows of the block, of ``tensor`` (L, N, ...)."""
        return tensor if self.whole else tensor[self.batch, self.rows]


class Pairs:
    """A tensor of pairs of residues (*lead or 1, N, N, channels) as the blocks see it."""

    def __init__(self, view: Tensor, lead: tuple[int, ...]) -> None:
        self.view = view
        """(*outer or 1, batch or 1, N, N, channels)"""
        self.accumulates = view.shape[:-3] != lead
        """Whether several batch elements share a block of it."""
        self._outer = tuple(view.shape[:-4])
        self._shared = view.shape[-4] == 1

    def index(self, block: Block) -> tuple[int | slice, ...]:
        """Index of the block into the view."""
        part = slice(0, 1) if self._shared else block.part
        return (*_compose.broadcast_index(block.outer, self._outer), part, block.rows)

    def rows(self, block: Block, dtype: torch.dtype) -> Tensor:
        """The block as (batch r, N, channels) in ``dtype``; only the block is copied."""
        pair = _compose.cast(self.view[self.index(block)], dtype)
        return pair.reshape(-1, *pair.shape[-2:]).contiguous()


class Walk:
    """The order in which blocks are visited, and the tensors of pairs seen in that order."""

    def __init__(self, tensors: list[Tensor], lead: tuple[int, ...], heads: int) -> None:
        tensors = [t[(None,) * (len(lead) + 3 - t.dim())] for t in tensors]
        self._heads = heads
        self._length = tensors[0].shape[-2]
        self._device = tensors[0].device
        self._channels = max(t.shape[-1] for t in tensors)
        # As many trailing lead axes as possible become one batch axis, over which every tensor
        # is either full or broadcast; the others are looped over.
        for split in range(len(lead) + 1):
            views = [_merged(t, lead, split) for t in tensors]
            if all(view is not None for view in views):
                break
        self._outer, self._batch = lead[:split], math.prod(lead[split:])
        axes = (*self._outer, self._batch)
        self.pairs = [Pairs(view, axes) for view in views if view is not None]

    def __iter__(self) -> Iterator[Block]:
        n, device = self._length, self._device
        rows = min(n, _compose.block_length(device, self._heads * n))
        if rows < n:
            # No last block of a row or two, which takes as many calls as the others.
            even = math.ceil(n / math.ceil(n / rows))
            rows = min(rows, 8 * math.ceil(even / 8))
        together = 1
        if rows == n:
            # A block of pairs counts too: it is copied where it is strided, expanded or 16-bit.
            widest = max(self._heads, self._channels)
            together = _compose.block_length(device, widest * n * n)
        whole = rows == n and together >= self._batch and not self._outer
        for position, outer in enumerate(_compose.lead_indices(self._outer)):
            start = position * self._batch
            for part in _compose.blocks(self._batch, together):
                for some in _compose.blocks(n, rows):
                    yield Block(outer, part, start, some, self._heads, whole)


def _merged(tensor: Tensor, lead: tuple[int, ...], split: int) -> Tensor | None:
    """``tensor`` with the leading axes from ``split`` on as one, if that takes no copy."""
    size = math.prod(tensor.shape[split : len(lead)])
    if size not in (1, math.prod(lead[split:])):
        return None
    try:
        return tensor.view((*tensor.shape[:split], size, *tensor.shape[-3:]))
    except RuntimeError:  # not expressible with one stride, and never to be copied
        return None
