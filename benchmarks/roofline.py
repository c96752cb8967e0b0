# SPDX-License-Identifier: Apache-2.0
"""What the machine can do at best, measured in the same process as everything else."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.case import MODES, arithmetic
from fused_ops.testing import median_time

Rates = dict[str, float]
"""Bytes a second under "copy"; floating-point operations a second under the name of each mode, and
under "split" those of an fp32-accurate product made of three fp16 products."""


def measure_rates(device: torch.device) -> Rates:
    """A large copy, bytes read and written both counted, and a large product in each mode."""
    if device.type != "cuda":
        # The op multiplies 16-bit tensors in fp32 there, so that rate is the limit for all.
        return {"copy": _copy(2**27, device), "fp32": _product(1536, "fp32", device)}
    rates = {"copy": _copy(2**30, device)}
    rates |= {mode: _product(8192, mode, device) for mode in MODES}
    return rates | {"split": rates["fp16"] / 3}


def _best_time(call: Callable[[], object], device: torch.device) -> float:
    """The best of several medians: a limit is not what a disturbed machine came to."""
    return min(median_time(call, device, warmup=1, repeats=3) for _ in range(4))


def _copy(size: int, device: torch.device) -> float:
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_time(lambda: target.copy_(source), device)


def _product(n: int, mode: str, device: torch.device) -> float:
    with arithmetic(mode):
        a, b = torch.randn(2, n, n, device=device).to(MODES[mode].dtype)
        out = torch.empty_like(a)
        time = _best_time(lambda: torch.mm(a, b, out=out), device)
    return 2 * n**3 / time


def rate(mode: str, rates: Rates) -> float:
    """The best rate at which the machine multiplies with the accuracy of ``mode``."""
    if mode == "fp32":
        return max(rates["fp32"], rates.get("split", 0.0))
    return rates.get(mode, rates["fp32"])


def floor_ms(flops: int, moved: int, mode: str, rates: Rates) -> float:
    """The time under which ``flops`` operations on ``moved`` bytes cannot come."""
    return 1e3 * max(moved / rates["copy"], flops / rate(mode, rates))
