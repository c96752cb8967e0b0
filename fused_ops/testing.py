# SPDX-License-Identifier: Apache-2.0
"""Measuring helpers shared by the example, the benchmarks, the tests and the self-test.

``import fused_ops`` does not import this module; ask for it by name: ``from fused_ops import
testing``.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["median_time", "peak_memory", "relative_error"]


def relative_error(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance of ``a`` from ``b``, computed in float64.

    Parameters
    ----------
    a : Tensor
        The result under test, any shape, floating dtype and device.
    b : Tensor
        What it is held against, of the same shape; its norm is the unit of the answer.

    Returns
    -------
    float
        ``||a - b|| / ||b||``. 0 where ``a`` equals ``b`` or both are empty, infinity where only
        ``b`` is zero, NaN where either holds a NaN.

    Raises
    ------
    ValueError
        If the shapes differ: broadcasting would hide a wrong shape behind a plausible number.
    """
    if a.shape != b.shape:
        raise ValueError(
            f"relative_error: expected a of shape {tuple(b.shape)}, like b, got {tuple(a.shape)}"
        )
    left = a.detach().to(device="cpu", dtype=torch.float64)
    right = b.detach().to(device="cpu", dtype=torch.float64)
    distance = torch.linalg.vector_norm(left - right).item()
    if distance == 0.0:
        return 0.0
    norm = torch.linalg.vector_norm(right).item()
    return distance / norm if norm else math.inf * distance


def median_time(
    fn: Callable[[], object],
    device: torch.device | str,
    *,
    warmup: int = 3,
    repeats: int = 10,
) -> float:
    """Median time of one call of ``fn``, in seconds.

    On CUDA each call stands between two events on the current stream, so a call that the host
    cannot issue fast enough is charged for the wait, as it is in a model. Elsewhere the clock is
    ``time.perf_counter``.

    Parameters
    ----------
    fn : callable
        Called without arguments.
    device : torch.device or str
        Where ``fn`` does its work.
    warmup : int
        Calls before the clock starts: caches fill, libraries load, lazy handles are made.
    repeats : int
        Timed calls, at least 1.

    Returns
    -------
    float
        Seconds. The median, because other processes only ever make a call slower.
    """
    if repeats < 1:
        raise ValueError(f"median_time: expected repeats >= 1, got {repeats}")
    device = torch.device(device)
    for _ in range(warmup):
        fn()
    if device.type != "cuda":
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            fn()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        pairs = []
        for _ in range(repeats):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            fn()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def peak_memory(fn: Callable[[], object], device: torch.device | str) -> int:
    """Peak of the memory allocated during one call of ``fn`` above the level at its start.

    The result of ``fn`` counts, as do temporaries inside an operator; what was alive before the
    call does not. On CUDA ``fn`` is called twice: once to let libraries take their lasting
    workspaces (cuBLAS holds 32 MiB on Hopper), which are not the op's own, and once to measure.

    Parameters
    ----------
    fn : callable
        Called without arguments.
    device : torch.device or str
        ``cuda``: the caching allocator's ``max_memory_allocated``. ``cpu``: the allocations and
        frees that PyTorch's CPU allocator reports to ``torch.profiler``, in order, added up.

    Returns
    -------
    int
        Bytes. On CUDA tensors round up to 512 bytes, as the allocator does. On the CPU scratch
        space that bypasses PyTorch's allocator (inside MKL or oneDNN) is not seen, and freeing
        what was alive before the call does not lower the level.
    """
    device = torch.device(device)
    if device.type == "cuda":
        fn()
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            level = torch.cuda.memory_allocated()
            result = fn()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - level
        del result
        return peak
    if device.type != "cpu":
        raise ValueError(f"peak_memory: expected device cpu or cuda, got {device}")
    return _cpu_peak_memory(fn)


def _cpu_peak_memory(fn: Callable[[], object]) -> int:
    # Kineto logs two lines to stderr per profile and reads its level at the first one.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        result = fn()
    del result
    # The exported trace is the public form of the events; their Python form is not.
    with tempfile.TemporaryDirectory(prefix="fused_ops_") as folder:
        path = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            trace = json.load(file)
    events = [
        (event["ts"], event["args"]["Ev Idx"], event["args"]["Bytes"])
        for event in trace["traceEvents"]
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    ]
    level = peak = 0
    for _, _, size in sorted(events):
        level += size
        peak = max(peak, level)
    return peak
