# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks``: measure the ops, print a table, write the numbers as JSON."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pathlib
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import (
    harness,
    invariant_point_attention,
    msa_row_attention,
    tensor_matmul,
    triangular_multiplicative_update,
)

CASES = [
    *tensor_matmul.CASES,
    *triangular_multiplicative_update.CASES,
    *msa_row_attention.CASES,
    *invariant_point_attention.CASES,
]
RESULTS = pathlib.Path(__file__).with_name("results")
# A single forward of it takes seconds on a small CPU and shows nothing there.
GPU_ONLY = {("tensor_matmul", "headline")}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--op", action="append", choices=sorted({case.op for case in CASES}))
    parser.add_argument("--suite", action="append", choices=["headline", "small", "real"])
    parser.add_argument("--dtype", action="append", choices=list(harness.DTYPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-backward", action="store_true", help="measure the forward only")
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on one number")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file, default benchmarks/results")
    options = parser.parse_args(arguments)

    device = torch.device(options.device)
    work = [
        (case, dtype, backward)
        for case in CASES
        if not options.op or case.op in options.op
        if not options.suite or case.suite in options.suite
        if device.type == "cuda" or (case.op, case.suite) not in GPU_ONLY
        for dtype in options.dtype or ["fp32", "bf16"]
        for backward in ([False] if options.no_backward else [False, True])
    ]
    rows = []
    console = Console(width=None if sys.stdout.isatty() else 140)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=len(work))
        for case, dtype, backward in work:
            progress.update(task, description=f"{case.op} {case.name} {dtype}"[:60])
            rows.append(measure(case, device, dtype, backward, options.seconds))
            progress.advance(task)

    facts = harness.machine(device)
    where = facts.get("gpu") or f"CPU, {facts['threads']} threads, {facts['cpu']}"
    console.print(f"fused-ops {facts['fused_ops']} against eager, torch {facts['torch']}, {where}")
    for op in dict.fromkeys(row["op"] for row in rows):
        console.print(table([row for row in rows if row["op"] == op], on_gpu="gpu" in facts))
    name = facts.get("gpu", "cpu").lower().replace(" ", "-")
    output = options.output or RESULTS / f"{name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    console.print(f"written to {output}")
    return 0


def measure(*args: Any) -> dict[str, Any]:
    """One row. On the CPU each has a process of its own.

    How long a large temporary takes to allocate depends on what the process freed before: the
    allocator first returns such memory to the system and later learns to keep it.
    """
    if args[1].type == "cuda":
        return harness.measure(*args)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(harness.measure, *args).result()


def table(rows: list[dict[str, Any]], on_gpu: bool) -> Table:
    """The rows of one op for people: times in ms, peak memory in MiB."""
    out = Table(title=rows[0]["op"], title_justify="left", title_style="bold")
    for header in ("sizes", "dtype", "pass", "path"):
        out.add_column(header, no_wrap=True)
    headers = ["wall ms", "eager", "ratio"]
    headers += ["device ms", "eager", "ratio"] if on_gpu else []
    headers += ["peak MiB", "eager", "error", "eager"]
    for header in headers:
        out.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            " ".join(f"{k}={v}" for k, v in row["sizes"].items()),
            row["dtype"],
            "fwd+bwd" if "backward" in row["pass"] else "fwd",
            row["path"],
            f"{row['fused_wall_ms']:.3g}",
            f"{row['eager_wall_ms']:.3g}",
            f"{row['speedup']:.2f}x",
        ]
        if on_gpu:
            cells += [
                f"{row['fused_device_ms']:.3g}",
                f"{row['eager_device_ms']:.3g}",
                f"{row['device_speedup']:.2f}x",
            ]
        cells += [f"{row['fused_peak_mib']:.3g}", f"{row['eager_peak_mib']:.3g}"]
        errors = [row.get("fused_error"), row.get("eager_error")]
        cells += ["" if e is None else f"{e:.1e}" for e in errors]
        out.add_row(*cells)
    return out


if __name__ == "__main__":
    sys.exit(main())
