# SPDX-License-Identifier: Apache-2.0
"""All jobs, the most important first: when the time is over, what is left out stands last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks import (
    attention_core,
    invariant_point_attention,
    msa_row_attention,
    opponents,
    tensor_matmul,
    triangular_multiplicative_update,
)
from benchmarks.case import ALL_METRICS, FORWARD, MODES, ONE_GRADIENT, Case
from benchmarks.measure import Job

CASES = [
    *tensor_matmul.CASES,
    *triangular_multiplicative_update.CASES,
    *msa_row_attention.CASES,
    *invariant_point_attention.CASES,
    *attention_core.CASES,
]
OPS = tuple(dict.fromkeys(case.op for case in CASES))
SUITES = ("headline", "real", "memory", "accuracy", "overhead")
# Measured only when asked for. "issue" has the headline and the table that an op is judged by,
# "lengths" and "channels" what is beside it, "large" what an eager model cannot hold, "core" the
# attention without its projections.
EXTRA = ("issue", "lengths", "channels", "large", "core")
ACCURACY = "accuracy"  # no jobs: accuracy.py


def plan(
    device: str,
    suites: Iterable[str] = SUITES,
    ops: Iterable[str] = OPS,
    modes: Iterable[str] | None = None,
    compiling: bool = True,
    *,
    directions: Iterable[str] | None = None,
    sizes: Iterable[tuple[str, int]] = (),
    names: Iterable[str] | None = None,
) -> Iterator[Job | str]:
    """Jobs in order, and the word "accuracy" where that suite has its turn.

    ``modes`` stands for the cases' own choice of dtypes. The last three choose among the jobs:
    ``sizes`` holds pairs such as ("N", 512), of which a case must agree with one for each name;
    ``names`` are opponents.
    """
    wanted: dict[str, set[int]] = {}
    for key, value in sizes:
        wanted.setdefault(key, set()).add(value)
    for job in _plan(device, suites, ops, modes, compiling):
        if isinstance(job, str):
            if directions is None and names is None and not wanted:
                yield job
            continue
        if directions is not None and job.direction not in directions:
            continue
        if any(job.case.sizes.get(key) not in values for key, values in wanted.items()):
            continue
        if names is not None:
            job = job._replace(opponents=tuple(n for n in job.opponents if n in names))
        if job.opponents:
            yield job


def _plan(
    device: str,
    suites: Iterable[str],
    ops: Iterable[str],
    modes: Iterable[str] | None,
    compiling: bool,
) -> Iterator[Job | str]:
    suites, ops = set(suites), set(ops)
    cases = [c for c in CASES if c.op in ops and c.device in ("", device)]

    def modes_of(case: Case) -> tuple[str, ...]:
        if modes is not None:
            return tuple(m for m in MODES if m in modes and (m != "tf32" or device == "cuda"))
        return ("fp32",) if device == "cpu" else case.modes

    def kind(wanted: str) -> list[Case]:
        return [case for case in cases if case.kind == wanted]

    def timed(suite: str, chosen: list[Case]) -> Iterator[Job]:
        for case in chosen:
            for mode in modes_of(case):
                for direction in case.directions:
                    rivals = opponents.names(case.op)
                    yield Job(suite, case, mode, direction, rivals, case.metrics)

    def compiled(suite: str, chosen: list[Case]) -> Iterator[Job]:
        # The products last, of which a compiler makes the same library call.
        for case in sorted(chosen, key=lambda c: c.op == "tensor_matmul"):
            for mode in modes_of(case):
                for direction in case.directions:
                    if mode in ("fp32", "bf16") and direction not in ONE_GRADIENT:
                        names = opponents.names(case.op, compiles=True)
                        yield Job(suite, case, mode, direction, names, case.metrics)

    if "headline" in suites:
        yield from timed("headline", kind("headline"))
    if ACCURACY in suites and "tensor_matmul" in ops:
        yield ACCURACY
    if "overhead" in suites:
        # At the headline shape of the products, 51 GFLOP, nobody would see the host.
        small = [c for c in kind("headline") if c.op != "tensor_matmul"] + kind("small")
        for case in small:
            names: tuple[str, ...] = ("op", "fused", "eager")
            if case.op == "tensor_matmul":
                names += ("torch.matmul",)
            yield from (
                Job("overhead", case, mode, FORWARD, names, frozenset({"time", "launches"}))
                for mode in modes_of(case)[:1]
            )
    if "real" in suites:
        yield from timed("real", kind("real"))
    if "memory" in suites:
        for case in kind("scaling"):
            for direction in case.directions:
                yield from (
                    Job("memory", case, mode, direction, ("fused", "eager"), frozenset({"memory"}))
                    for mode in modes_of(case)[:1]
                )
    if "headline" in suites and compiling:
        yield from compiled("headline", kind("headline"))
    if "real" in suites:
        for case in kind("scaling"):
            rivals = tuple(n for n in opponents.names(case.op) if n != "sdpa core")
            yield from (
                Job("real", case, mode, FORWARD, rivals, ALL_METRICS - {"launches"})
                for mode in modes_of(case)
            )
        if compiling:
            yield from compiled("real", kind("real"))
    beside = {suite: kind(suite) for suite in EXTRA if suite in suites}
    if "issue" in beside:
        own = beside["issue"]
        beside["issue"] = [
            headline
            for headline in kind("headline")
            if any(c.op == headline.op for c in own)
            and not any(c.op == headline.op and c.sizes == headline.sizes for c in own)
        ] + own
    for suite, chosen in beside.items():
        yield from timed(suite, chosen)
    if compiling:
        for suite, chosen in beside.items():
            yield from compiled(suite, chosen)
