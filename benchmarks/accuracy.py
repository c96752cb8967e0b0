# SPDX-License-Identifier: Apache-2.0
"""The accuracy suite: tensor_matmul in fp32 on easy and hard numbers, against float64.

The rule is the tests' (docs/numerics.md): our error may be 1.5 times that of torch.matmul in IEEE
fp32, plus 2e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import fused_ops
from benchmarks.case import FORWARD, ONE_GRADIENT, arithmetic
from benchmarks.measure import relative_error
from benchmarks.records import Record

Operands = tuple[Tensor, Tensor]


def _decades(count: int, device: torch.device) -> Tensor:
    """Ten decades around 1, in a random order."""
    return torch.logspace(-5, 5, count, device=device)[torch.randperm(count, device=device)]


def normal(rows: int, inner: int, columns: int, device: torch.device) -> Operands:
    return torch.randn(rows, inner, device=device), torch.randn(inner, columns, device=device)


def scaled_rows(rows: int, inner: int, columns: int, device: torch.device) -> Operands:
    a, b = normal(rows, inner, columns, device)
    return a * _decades(rows, device).unsqueeze(1), b


def scaled_inner(rows: int, inner: int, columns: int, device: torch.device) -> Operands:
    """Large columns of A meet small rows of B: every product is of the usual size."""
    a, b = normal(rows, inner, columns, device)
    scale = _decades(inner, device)
    return a * scale, b / scale.unsqueeze(1)


def same_sign(rows: int, inner: int, columns: int, device: torch.device) -> Operands:
    a, b = normal(rows, inner, columns, device)
    return a.abs(), b.abs()


PATTERNS: dict[str, Callable[[int, int, int, torch.device], Operands]] = {
    "normal": normal,
    "rows over ten decades": scaled_rows,
    "A D times B / D": scaled_inner,
    "same sign": same_sign,
}
INNER = (64, 256, 1024, 8192)


def run(device: torch.device) -> Iterator[Record]:
    """One record for each pattern, length of the sums and direction."""
    rows, columns = (4096, 768) if device.type == "cuda" else (192, 128)
    with arithmetic("fp32"):
        for pattern, make in PATTERNS.items():
            for inner in INNER:
                torch.manual_seed(0)
                a, b = make(rows, inner, columns, device)
                for direction in (FORWARD, *ONE_GRADIENT):
                    yield _compare(pattern, direction, a, b)


def _compare(pattern: str, direction: str, a: Tensor, b: Tensor) -> Record:
    exact = _result(torch.matmul, direction, a.double(), b.double())
    theirs = relative_error([_result(torch.matmul, direction, a, b)], [exact])
    ours = relative_error([_result(fused_ops.tensor_matmul, direction, a, b)], [exact])
    allowed = 1.5 * theirs + 2e-7
    return Record(
        suite="accuracy",
        op="tensor_matmul",
        sizes={"M": a.shape[0], "K": a.shape[1], "N": b.shape[1]},
        dtype="fp32",
        direction=direction,
        opponent="fused",
        inputs=pattern,
        metrics={
            "error": ours,
            "reference_error": theirs,
            "allowed": allowed,
            "ratio": ours / allowed,
        },
    )


def _result(
    multiply: Callable[[Tensor, Tensor], Tensor], direction: str, a: Tensor, b: Tensor
) -> Tensor:
    if direction == FORWARD:
        with torch.no_grad():
            return multiply(a, b)
    a, b = (x.detach().requires_grad_() for x in (a, b))
    out = multiply(a, b)
    generator = torch.Generator(a.device).manual_seed(1)
    cotangent = torch.randn(out.shape, generator=generator, device=a.device).to(out.dtype)
    (gradient,) = torch.autograd.grad(out, (a, b)[ONE_GRADIENT[direction]], cotangent)
    return gradient
