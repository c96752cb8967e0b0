# SPDX-License-Identifier: Apache-2.0
"""One job: some opponents on one case, in one process, on the same weights and inputs."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fused_ops
from benchmarks import timing
from benchmarks.case import (
    ALL_METRICS,
    BOTH,
    FORWARD,
    MODES,
    ONE_GRADIENT,
    Case,
    arithmetic,
)
from benchmarks.opponents import Entry, Opponent, Setting, Skip, find, first_line
from benchmarks.records import Record
from benchmarks.roofline import Rates, floor_ms


class Job(NamedTuple):
    """What is measured together."""

    suite: str
    case: Case
    mode: str
    direction: str
    opponents: tuple[str, ...]
    metrics: frozenset[str] = ALL_METRICS

    def __str__(self) -> str:
        return f"{self.suite}: {self.case.op} {self.case.name} {self.mode} {self.direction}"


class Entered(NamedTuple):
    """An opponent that takes part."""

    opponent: type[Opponent]
    entry: Entry
    call: Callable[[], Any]
    results: int
    """Bytes that a call returns."""


class Outcome(NamedTuple):
    """What came of a job."""

    records: list[Record]
    skipped: list[str]


def run(job: Job, device: torch.device, seconds: float, rates: Rates) -> Outcome:
    """Measure; ``seconds`` is the time spent on each number of each opponent."""
    warnings.simplefilter("ignore")  # about compositions: the record says what ran
    outcome = Outcome([], [])
    with arithmetic(job.mode):
        eager, inputs = job.case.prepare(device, job.mode)
        entered: list[Entered] = []
        for name in job.opponents:
            opponent = find(name, job.case.op)
            if name in job.case.without:
                outcome.skipped.append(
                    f"{name}, {job.case.op} {job.case.name}: {job.case.without[name]}"
                )
                continue
            try:
                opponent.check(Setting(job.case, job.mode, job.direction, device))
                entry = opponent.enter(eager, inputs)
                call = caller(entry, job.direction, MODES[job.mode].dtype)
                results = timing.size(call())
                timing.synchronize(device)
            except Skip as reason:
                outcome.skipped.append(f"{name}, {job.case.op}: {reason}")
            except Exception as error:
                if name in ("fused", "eager", "op"):
                    raise
                kind = type(error).__name__
                reason_text = f"{kind}: {first_line(error)}"
                outcome.skipped.append(f"{name}, {job.case.op} ({job.mode}): {reason_text}")
            else:
                entered.append(Entered(opponent, entry, call, results))
        if entered:
            outcome.records.extend(_measure(job, device, seconds, rates, entered))
    del entered, eager, inputs
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return outcome


def caller(entry: Entry, direction: str, dtype: torch.dtype) -> Callable[[], Any]:
    """A call without arguments that does what ``direction`` says; ``dtype`` is the one measured,
    also where this is its float64 counterpart."""
    module, inputs = entry.module, entry.inputs
    if direction == FORWARD:

        def forward() -> Tensor:
            with torch.no_grad():
                out: Tensor = module(*inputs)
            return out

        return forward
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    if direction == BOTH:
        parameters = [p for p in module.parameters() if p.requires_grad]
        wanted = [x for x in leaves if x.requires_grad] + parameters
        cotangent = _cotangent(module(*leaves), dtype)

        def forward_and_backward() -> tuple[Tensor, ...]:
            # cuEquivariance joins weights, so some of the reference's take no part there
            return torch.autograd.grad(module(*leaves), wanted, cotangent, allow_unused=True)

        return forward_and_backward
    one = ONE_GRADIENT[direction]
    leaves = [x.detach().requires_grad_(i == one) for i, x in enumerate(inputs)]
    result = module(*leaves)
    cotangent = _cotangent(result, dtype)
    return lambda: torch.autograd.grad(result, leaves[one], cotangent, retain_graph=True)


def _cotangent(result: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers for all opponents and, rounded alike, for float64."""
    generator = torch.Generator(result.device).manual_seed(1)
    numbers = torch.randn(result.shape, generator=generator, device=result.device)
    return numbers.to(dtype).to(result.dtype)


def _measure(
    job: Job,
    device: torch.device,
    seconds: float,
    rates: Rates,
    entered: list[Entered],
) -> list[Record]:
    calls = [one.call for one in entered]
    cuda = device.type == "cuda"
    metrics: list[dict[str, float | None]] = [{} for _ in entered]

    def put(name: str, values: list[float]) -> None:
        for one, value in zip(metrics, values, strict=True):
            one[name] = value

    if "time" in job.metrics:
        walls = timing.wall(calls, device, seconds)
        put("wall_ms", walls)
        if cuda:
            put("device_ms", timing.device(calls, seconds))
            put("host_ms", timing.host(calls, walls, seconds))
            if job.direction == FORWARD:
                _time_graphs(calls, metrics, seconds)
    if "launches" in job.metrics and cuda:
        put("launches", [float(len(timing.launches(call))) for call in calls])
    if "memory" in job.metrics:
        for (_, _, call, size), one in zip(entered, metrics, strict=True):
            peak, extra = timing.memory(call, size, device)
            one["peak_mib"], one["extra_mib"] = peak / 2**20, extra / 2**20
    if "error" in job.metrics:
        errors = Errors(job)
        for (_, entry, call, _), one in zip(entered, metrics, strict=True):
            one["error"] = errors.of(entry, call)

    flops, moved = job.case.work(job.direction, job.mode)
    records = []
    for (opponent, entry, _, _), one in zip(entered, metrics, strict=True):
        time = one.get("device_ms") or one.get("wall_ms")
        if time is not None and opponent.same_work:
            one["roofline"] = floor_ms(flops, moved, job.mode, rates) / time
        records.append(
            Record(
                suite=job.suite,
                op=job.case.op,
                sizes=job.case.sizes,
                dtype=job.mode,
                direction=job.direction,
                opponent=opponent.name,
                kind=job.case.kind,
                path=_path(entry, job.direction),
                note=opponent.note,
                flops=flops,
                bytes=moved,
                metrics=one,
            )
        )
    return records


def _path(entry: Entry, direction: str) -> str:
    """Which of our paths runs: forward's, and the backward's where it is another."""
    if not isinstance(entry.module, fused_ops._module.FusedModule):
        return ""
    forward = fused_ops.explain(entry.module, *entry.inputs).path
    if direction == FORWARD:
        return forward
    backward = fused_ops.explain(entry.module, *entry.inputs, backward=True).path
    if direction != BOTH:
        return backward
    return forward if forward == backward else f"{forward}, {backward}"


def _time_graphs(
    calls: list[Callable[[], Any]], metrics: list[dict[str, float | None]], seconds: float
) -> None:
    graphs = []
    for index, call in enumerate(calls):
        # An opponent that synchronizes or allocates outside cannot be captured; nor replayed.
        with contextlib.suppress(RuntimeError):
            graphs.append((index, timing.capture(call)))
    if graphs:
        times = timing.graph([graph for _, graph in graphs], seconds)
        for (index, _), value in zip(graphs, times, strict=True):
            metrics[index]["graph_ms"] = value


class Errors:
    """Relative L2 errors against float64: of the result in a forward, otherwise of the gradients
    of the inputs, taken as one vector. Definitions are run once for all that share them."""

    def __init__(self, job: Job) -> None:
        self._direction = job.direction
        self._dtype = MODES[job.mode].dtype
        self._known: dict[tuple[int, int], list[Tensor]] = {}

    def of(self, entry: Entry, call: Callable[[], Any]) -> float:
        definition = entry.definition
        key = (id(definition), id(entry.inputs[0]))  # both stay alive as long as this does
        if key not in self._known:
            self._known[key] = self._exact(definition, entry.inputs)
        exact = self._known[key]
        result = call()
        results = [result] if isinstance(result, Tensor) else list(result)
        return relative_error(results[: len(exact)], exact)

    def _exact(self, definition: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        exact = Entry(copy.deepcopy(definition).double(), wide, definition)
        result = caller(exact, self._direction, self._dtype)()
        if isinstance(result, Tensor):
            return [result]
        return list(result)[: sum(x.is_floating_point() for x in inputs)]


def relative_error(results: list[Tensor], exact: list[Tensor]) -> float:
    """``||results - exact|| / ||exact||`` over all tensors, on their device, block by block: the
    largest results here would not fit twice in float64 on the host."""
    off = norm = 0.0
    for a, b in zip(results, exact, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"expected a result of shape {tuple(b.shape)}, got {tuple(a.shape)}")
        for one, true in zip(a.flatten().split(2**26), b.flatten().split(2**26), strict=True):
            off += (one.double() - true).square().sum().item()
            norm += true.square().sum().item()
    return math.sqrt(off / norm) if norm else math.inf * math.sqrt(off)
