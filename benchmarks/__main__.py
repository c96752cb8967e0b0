# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks``: our ops against their opponents, as tables and as JSON.

Needs nothing but PyTorch and fused-ops. ``python -m benchmarks.plots FILE.json`` makes the
pictures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pathlib
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks import accuracy, measure, records, report, suites
from benchmarks.case import BOTH, FORWARD, MODES, ONE_GRADIENT
from benchmarks.opponents import OPPONENTS, Fused, FusedOp, first_line
from benchmarks.roofline import Rates, measure_rates

RESULTS = pathlib.Path(__file__).with_name("results")
# Seconds: for one number of one opponent, and for the whole run.
DEFAULTS = {"cuda": (0.05, 180.0), "cpu": (0.5, 300.0)}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    many = "; may be given several times, default all"
    named = (*suites.SUITES, *suites.EXTRA)
    extra = f"; may be given several times, default all but {', '.join(suites.EXTRA)}"
    add("--suite", action="append", choices=named, help="what to measure" + extra)
    add("--op", action="append", choices=suites.OPS, help="op to measure" + many)
    add("--dtype", action="append", choices=list(MODES), help="default: what each case names")
    directions = [FORWARD, BOTH, *ONE_GRADIENT]
    add("--direction", action="append", choices=directions, help="what to run" + many)
    add("--size", action="append", type=_size, metavar="N=512", help="cases to measure" + many)
    everybody = sorted({o.name for o in OPPONENTS} | {FusedOp.name})
    add("--opponent", action="append", choices=everybody, help="who takes part" + many)
    add("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    add("--seconds", type=float, help="on one number of one opponent; 0.05 on cuda, 0.5 on cpu")
    add("--budget", type=float, help="seconds for the whole run; 180 on cuda, 300 on cpu")
    add("--core", metavar="MODULE:FUNCTION", help="attention of ours to measure alone")
    add("--no-compile", action="store_true", help="leave out torch.compile and FlexAttention")
    add("--output", type=pathlib.Path, help="JSON file, default in benchmarks/results")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no CUDA device")
    seconds, budget = DEFAULTS[options.device]
    options.seconds = options.seconds if options.seconds is not None else seconds
    options.budget = options.budget if options.budget is not None else budget
    if options.seconds < 0 or options.budget < 0:
        parser.error("--seconds and --budget must not be negative")
    if options.output is not None and options.output.is_dir():
        parser.error(f"--output must name a file, {options.output} is a folder")
    return options


def _size(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not name.isalpha() or not value.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a size such as N=512, got {text!r}")
    return name, int(value)


def default_output(machine: dict[str, Any], part: bool = False) -> pathlib.Path:
    """Named after the GPU, where there is one; a part of the cases has a file of its own."""
    name = machine.get("gpu", "cpu").lower().replace(" ", "-")
    return RESULTS / f"{name}{'-part' if part else ''}.json"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    Fused.core = options.core or ""  # it is measured on CUDA, in this process
    work = list(
        suites.plan(
            options.device,
            options.suite or suites.SUITES,
            options.op or suites.OPS,
            options.dtype,
            not options.no_compile,
            directions=options.direction,
            sizes=options.size or (),
            names=options.opponent,
        )
    )
    device = torch.device(options.device)
    results = records.Results(records.machine(device))
    choices = ("suite", "op", "dtype", "direction", "size", "opponent", "no_compile")
    part = any(getattr(options, choice) for choice in choices)
    output = options.output or default_output(results.machine, part)
    if options.device == "cpu" and "tf32" in (options.dtype or []):
        results.skipped.append("tf32: the CPU has no such mode")
    if options.no_compile:
        results.skipped.append("compile, flex: --no-compile")
    progress = report.Progress(len(work), options.budget)
    progress.show("the machine's limits")
    rates = measure_rates(device)
    results.machine |= {"rates": rates, "seconds": options.seconds, "budget": options.budget}
    left_out = 0
    for job in work:
        if progress.over:
            left_out += 1
            continue
        progress.show(str(job))
        try:
            outcome = _run(job, device, options.seconds, rates)
        except Exception as error:
            traceback.print_exc()
            results.failed.append(f"{job}: {type(error).__name__}: {first_line(error)}")
        else:
            results.records += outcome.records
            for reason in outcome.skipped:
                if reason not in results.skipped:
                    results.skipped.append(reason)
                    progress.say(f"left out: {reason}")
        progress.advance()
        results.write(output)  # after every job: a run may be killed
    if left_out:
        results.skipped.append(
            f"{left_out} of {len(work)} jobs, the last ones: the budget of {options.budget:.0f} s "
            f"was spent"
        )
    progress.close()
    results.write(output)
    print(report.text(results))
    print(f"\nwritten to {output}")
    return 1 if results.failed else 0


def _run(
    job: measure.Job | str, device: torch.device, seconds: float, rates: Rates
) -> measure.Outcome:
    """One job. On the CPU each that is timed has a process of its own.

    How long a large temporary takes to allocate depends on what the process freed before: the
    allocator first returns such memory to the system and later learns to keep it.
    """
    if isinstance(job, str):
        return measure.Outcome(list(accuracy.run(device)), [])
    if device.type == "cuda" or "time" not in job.metrics:
        return measure.run(job, device, seconds, rates)
    context = multiprocessing.get_context("forkserver")
    # PyTorch imports its compiler at the first call of a custom op: seconds, if in every process.
    context.set_forkserver_preload(["benchmarks.suites", "torch._dynamo"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure.run, job, device, seconds, rates).result()


if __name__ == "__main__":
    sys.exit(main())
