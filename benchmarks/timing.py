# SPDX-License-Identifier: Apache-2.0
"""The clocks. Each takes several calls and visits them in turn, so that a drift of the machine
meets all of them, and gives the median of each, in milliseconds; the calls have been made
once before.

``device``  CUDA events around one call, the second-level cache overwritten before it, as often as
            the host needs to issue the call meanwhile: what the device takes when it need not wait
            for the host. What the host costs stands under ``wall`` and ``host``.
``wall``    ``perf_counter`` around one call and a synchronization: how long one call takes.
``host``    ``perf_counter`` around calls that are issued back to back, none of them waited for:
            how long the host is busy. Where the device cannot keep up it may include a wait.
``graph``   replays of a CUDA graph of one call, back to back, so with a warm cache: what remains
            when the host costs nothing.

On the CPU there is only ``wall``.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import torch

from fused_ops.testing import peak_memory

Call = Callable[[], object]
_CACHE_BYTES = 256 * 2**20  # several times the 60 MB of an H200
_FEWEST = 5


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_turn(
    samples: Sequence[Callable[[], float]], seconds: float, fewest: int = _FEWEST
) -> list[float]:
    """Median of each sampler over about ``seconds`` each, and at least ``fewest`` samples."""
    taken: list[list[float]] = [[] for _ in samples]
    stop = time.perf_counter() + seconds * len(samples)
    while len(taken[0]) < fewest or time.perf_counter() < stop:
        for sample, times in zip(samples, taken, strict=True):
            times.append(sample())
    return [statistics.median(times) for times in taken]


def wall(calls: Sequence[Call], device: torch.device, seconds: float) -> list[float]:
    def sampler(call: Call) -> Callable[[], float]:
        def sample() -> float:
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            return 1e3 * (time.perf_counter() - start)

        return sample

    return _in_turn([sampler(call) for call in calls], seconds, 3)


def device(calls: Sequence[Call], seconds: float) -> list[float]:
    cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda")

    def issue_ms(call: Call) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def elapsed_ms(call: Call, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def sampler(call: Call) -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        fill = max(1e-3, min(elapsed_ms(cache.zero_, start, end) for _ in range(3)))
        issue = statistics.median(issue_ms(call) for _ in range(3))
        # Twice as long as it should take: the host is disturbed now and then. Not longer than the
        # queue of the device lasts, nor than is worth waiting for.
        fills = max(1, min(200, math.ceil(2 * issue / fill)))

        def sample() -> float:
            for _ in range(fills):
                cache.zero_()
            return elapsed_ms(call, start, end)

        return sample

    return _in_turn([sampler(call) for call in calls], seconds)


def host(calls: Sequence[Call], wall_ms: Sequence[float], seconds: float) -> list[float]:
    """``wall_ms`` of each call decides how many are issued together: about 20 ms of them."""

    def sampler(call: Call, one: float) -> Callable[[], float]:
        count = max(2, min(50, int(20 / max(one, 1e-3))))

        def sample() -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            return 1e3 * (time.perf_counter() - start) / count

        return sample

    pairs = zip(calls, wall_ms, strict=True)
    return _in_turn([sampler(call, one) for call, one in pairs], seconds, 3)


def capture(call: Call) -> torch.cuda.CUDAGraph:
    """A graph of one call, which must not need gradients."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def graph(graphs: Sequence[torch.cuda.CUDAGraph], seconds: float) -> list[float]:
    def sampler(one: torch.cuda.CUDAGraph) -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def replay(count: int) -> float:
            start.record()
            for _ in range(count):
                one.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / count

        replay(1)
        count = max(1, min(50, int(2 / max(replay(1), 1e-3))))  # about 2 ms together
        return lambda: replay(count)

    return _in_turn([sampler(one) for one in graphs], seconds)


def launches(call: Call) -> list[str]:
    """Names of the kernels that one call launches, in order; copies and fills are not kernels."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="fused_ops_") as folder:
        path = pathlib.Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    return [event["name"] for event in sorted(kernels, key=lambda event: event["ts"])]


def size(results: object) -> int:
    """Bytes of a tensor, or of all in a tuple."""
    tensors = results if isinstance(results, (tuple, list)) else (results,)
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


def memory(call: Call, results: int, device: torch.device) -> tuple[int, int]:
    """Peak bytes of a call beyond its inputs, and beyond its inputs and its ``results``."""
    peak = peak_memory(call, device)
    return peak, max(0, peak - results)
