# SPDX-License-Identifier: Apache-2.0
"""What a benchmark case is: one shape of one op, and the work that it takes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

ALL_METRICS = frozenset({"time", "launches", "memory", "error"})
FORWARD, BOTH = "forward", "forward+backward"
# Backward alone, for one operand of a matrix product; these follow an untimed forward.
ONE_GRADIENT = {"dA": 0, "dB": 1}


class Mode(NamedTuple):
    """Arithmetic of a run."""

    dtype: torch.dtype
    matmul_precision: str
    """For ``torch.set_float32_matmul_precision``: the one setter that leaves PyTorch's older and
    newer switches in agreement, without which torch.compile refuses to look at them."""


MODES = {
    "fp32": Mode(torch.float32, "highest"),
    "tf32": Mode(torch.float32, "high"),
    "bf16": Mode(torch.bfloat16, "highest"),
    "fp16": Mode(torch.float16, "highest"),
}


@contextlib.contextmanager
def arithmetic(mode: str) -> Iterator[None]:
    """Run fp32 products as ``mode`` says; IEEE again afterwards."""
    _set(MODES[mode].matmul_precision)
    try:
        yield
    finally:
        _set("highest")


def _set(matmul_precision: str) -> None:
    torch.set_float32_matmul_precision(matmul_precision)
    wanted = "tf32" if matmul_precision == "high" else "ieee"
    if torch.backends.cuda.matmul.fp32_precision != wanted:
        torch.backends.cuda.matmul.fp32_precision = wanted


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of one op."""

    op: str
    kind: str
    """"headline" (the shapes that the library is judged by), "real" (shapes of models), "scaling"
    (one shape over its length), "small" (odd and tiny, for the overhead), or the name of the suite
    that alone measures it."""
    sizes: dict[str, int]
    make: Callable[..., tuple[nn.Module, list[Tensor]]]
    """``make(**sizes)`` gives the eager reference module and its fp32 inputs, on the device that
    is the default one."""
    flops: Callable[..., int]
    """Floating-point operations of a forward, from ``sizes``."""
    elements: Callable[..., int]
    """Elements that a forward must read and write once, from ``sizes``."""
    backward_elements: Callable[..., int] | None = None
    """The same of a backward; twice the forward's where it is not given."""
    directions: tuple[str, ...] = (FORWARD, BOTH)
    modes: tuple[str, ...] = ("fp32", "bf16")
    """What is measured on CUDA by default; on the CPU that is fp32."""
    device: str = ""
    """"cuda" or "cpu" where the case is meant for one of them alone."""
    without: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Opponents that do not take part, and why: too large or too slow for them."""
    metrics: frozenset[str] = ALL_METRICS
    """What is measured; the error needs room for the reference in float64."""

    @property
    def name(self) -> str:
        """The sizes on one line."""
        return " ".join(f"{key}={value}" for key, value in self.sizes.items())

    def work(self, direction: str, mode: str) -> tuple[int, int]:
        """Floating-point operations and bytes that ``direction`` takes at least.

        Each product of a forward becomes two in the backward. Recomputing is not counted, for an
        implementation need not do it.
        """
        flops, elements = self.flops(**self.sizes), self.elements(**self.sizes)
        if direction == BOTH:
            flops *= 3
            if self.backward_elements is None:
                elements *= 3
            else:
                elements += self.backward_elements(**self.sizes)
        return flops, elements * MODES[mode].dtype.itemsize

    def prepare(self, device: torch.device, mode: str) -> tuple[nn.Module, list[Tensor]]:
        """The reference module and its inputs; masks keep their dtype and frames stay in fp32."""
        torch.manual_seed(0)
        with torch.device(device):
            eager, inputs = self.make(**self.sizes)
        dtype = MODES[mode].dtype
        placed = []
        for tensor in inputs:
            frames = self.op == "invariant_point_attention" and tensor.shape[-1] == 3
            keep = frames or not tensor.is_floating_point()
            placed.append(tensor if keep else tensor.to(dtype))
        return eager.to(dtype), placed
