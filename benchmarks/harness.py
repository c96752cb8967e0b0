# SPDX-License-Identifier: Apache-2.0
"""What a benchmark case is, and how one is measured.

Protocol: both modules hold the same weights and get the same inputs, in one process, their runs
interleaved so that a drift of the machine meets both; the medians are compared. Error is the
relative L2 distance from the reference in float64 on the same (rounded) inputs and weights.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fused_ops
from fused_ops.testing import peak_memory, relative_error

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of one op."""

    op: str
    suite: str
    """"headline" (the small shapes of the reference modules) or "real" (shapes of models)."""
    sizes: dict[str, int]
    make: Callable[..., tuple[nn.Module, list[Tensor]]]
    """``make(**sizes)`` gives the eager reference module and its fp32 CPU inputs."""
    flops: Callable[..., int]
    """Floating-point operations of a forward, from ``sizes``."""
    elements: Callable[..., int]
    """Elements that a forward must read and write once, from ``sizes``."""

    @property
    def name(self) -> str:
        """The sizes in one word."""
        return " ".join(f"{key}={value}" for key, value in self.sizes.items())


def prepare(
    case: Case, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, nn.Module, list[Tensor]]:
    """The fused module, the reference with the same weights, and inputs; frames stay in fp32."""
    torch.manual_seed(0)
    eager, inputs = case.make(**case.sizes)
    eager = eager.to(device, dtype)
    placed = []
    for tensor in inputs:
        keep = not tensor.is_floating_point() or tensor.shape[-1] == 3  # masks, frames
        placed.append(tensor.to(device, tensor.dtype if keep else dtype))
    cls = getattr(fused_ops, type(eager).__name__)
    return cls.from_reference(eager), eager, placed


def _runner(module: nn.Module, inputs: Sequence[Tensor], backward: bool) -> Callable[[], object]:
    if not backward:

        def forward() -> object:
            with torch.no_grad():
                return module(*inputs)

        return forward
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs[:2]]
    leaves += list(inputs[2:])
    wanted = [x for x in leaves if x.requires_grad] + list(module.parameters())
    cotangent = torch.randn_like(module(*leaves))

    def forward_and_backward() -> object:
        return torch.autograd.grad(module(*leaves), wanted, cotangent)

    return forward_and_backward


def _wall_times(
    runs: Sequence[Callable[[], object]], device: torch.device, seconds: float
) -> list[float]:
    """Median seconds of each run, interleaved, for about ``seconds`` in all."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
        run()
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times[0]) < 3:
        for run, samples in zip(runs, times, strict=True):
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            samples.append(time.perf_counter() - start)
    return [statistics.median(samples) for samples in times]


def _device_times(runs: Sequence[Callable[[], object]], repeats: int = 20) -> list[float]:
    """Median seconds of each run on the GPU by events, the second-level cache emptied before."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, samples in zip(runs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            run()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3)
    return [statistics.median(samples) for samples in times]


def measure(
    case: Case, device: torch.device, dtype_name: str, backward: bool, seconds: float
) -> dict[str, Any]:
    """Everything that is known of one case, as plain data; times in ms, memory in MiB."""
    warnings.simplefilter("ignore")  # about compositions: the row says what ran
    dtype = DTYPES[dtype_name]
    fused, eager, inputs = prepare(case, device, dtype)
    runs = [_runner(module, inputs, backward) for module in (fused, eager)]
    wall = _wall_times(runs, device, seconds)
    row: dict[str, Any] = {
        "op": case.op,
        "suite": case.suite,
        "sizes": case.sizes,
        "dtype": dtype_name,
        "pass": "forward+backward" if backward else "forward",
        "path": fused_ops.explain(fused, *inputs).path,
        "fused_wall_ms": wall[0] * 1e3,
        "eager_wall_ms": wall[1] * 1e3,
        "speedup": wall[1] / wall[0],
    }
    if device.type == "cuda":
        timed = _device_times(runs)
        row["fused_device_ms"], row["eager_device_ms"] = (t * 1e3 for t in timed)
        row["device_speedup"] = timed[1] / timed[0]
    row["fused_peak_mib"], row["eager_peak_mib"] = (
        peak_memory(run, device) / 2**20 for run in runs
    )
    if not backward:
        flops = case.flops(**case.sizes)
        row["tflops"] = flops / row.get("fused_device_ms", row["fused_wall_ms"]) / 1e9
        with torch.no_grad():
            exact = copy.deepcopy(eager).double()(
                *(x.double() if x.is_floating_point() else x for x in inputs)
            )
            row["fused_error"] = relative_error(fused(*inputs), exact)
            row["eager_error"] = relative_error(eager(*inputs), exact)
    return row


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    facts: dict[str, Any] = {
        "fused_ops": fused_ops.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": str(device),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    else:
        facts["threads"] = torch.get_num_threads()
        facts["cpu"] = torch.backends.cpu.get_cpu_capability()
    return facts


def _commit() -> str:
    """The commit measured; ``FUSED_OPS_COMMIT`` names it where there is no repository."""
    if named := os.environ.get("FUSED_OPS_COMMIT"):
        return named

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
