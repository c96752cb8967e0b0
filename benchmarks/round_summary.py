# SPDX-License-Identifier: Apache-2.0
"""The end of a GPU round: a short table, and the same as JSON.

``python -m benchmarks.round_summary FOLDER step=verdict ...`` reads the JUnit report of the gpu
tests and the benchmark's ``gpu.json`` in FOLDER and writes ``gpu-round.json`` there. The exit
status is 1 if any step failed.
"""

from __future__ import annotations

import json
import pathlib
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import torch

from benchmarks.records import Record, machine, read, where


def test_counts(report: pathlib.Path) -> dict[str, Any]:
    """Counts of the gpu tests, and the names of those that failed."""
    if not report.exists():
        return {"ran": False}
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = int(suite.get("skipped", 0))
    total = int(suite.get("tests", 0))
    return {
        "ran": True,
        "passed": total - skipped - len(failed),
        "skipped": skipped,
        "failed": failed,
        "seconds": round(float(suite.get("time", 0))),
    }


test_counts.__test__ = False  # type: ignore[attr-defined]  # no test, whatever pytest thinks


SHORT = {
    "tensor_matmul": "matmul",
    "triangular_multiplicative_update": "triangle",
    "msa_row_attention": "msa row",
    "triangle_attention": "tri attn",
    "invariant_point_attention": "ipa",
}


def speeds(records: list[Record]) -> list[str]:
    """A line for each contest of the headline and the real shapes: ours, eager, best rival."""
    contests: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        if record.suite in ("headline", "real") and record.kind != "scaling" and record.time:
            contests.setdefault(record.contest, {})[record.opponent] = record
    lines = []
    for contest in contests.values():
        ours, eager = contest.get("fused"), contest.get("eager")
        if ours is None or eager is None or not ours.time or not eager.time:
            continue
        line = f"  {SHORT[ours.op]:<9}{ours.shape:<34}{ours.dtype:<5}{ours.direction:<17}"
        line += f"{ours.time:8.3g} ms  {eager.time / ours.time:5.2f}x eager"
        others = [
            (r.time, name)
            for name, r in contest.items()
            if r.time and name not in ("fused", "eager", "sdpa core")
        ]
        if others:
            time, name = min(others)
            line += f"  {time / ours.time:5.2f}x {name}"
        lines.append(line)
    return lines


def accuracy(records: list[Record]) -> list[str]:
    """The accuracy suite in one line: its worst case."""
    ratios = [(r["ratio"] or 0.0, r) for r in records if r.suite == "accuracy"]
    if not ratios:
        return []
    worst, record = max(ratios, key=lambda pair: pair[0])
    where_ = f"{record.inputs}, {record.shape}, {record.direction}"
    return [f"  largest error: {worst:.2f} of what is allowed ({where_})"]


def main(folder: str, *steps: str) -> int:
    verdicts = dict(step.split("=", 1) for step in steps)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {
        "machine": machine(device),
        "tests": test_counts(pathlib.Path(folder) / "gpu-tests.xml"),
        "steps": verdicts,
    }
    (pathlib.Path(folder) / "gpu-round.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"\nGPU round on {where(facts['machine'])}, {facts['machine']['commit']}")
    benchmark = pathlib.Path(folder) / "gpu.json"
    if benchmark.exists():
        measured = read(benchmark).records
        print("\n".join(speeds(measured) + accuracy(measured)))
    for name, verdict in verdicts.items():
        print(f"  {name:<20} {verdict}")
    tests = facts["tests"]
    if tests["ran"]:
        print(f"  gpu tests: {tests['passed']} passed, {len(tests['failed'])} failed")
        for name in tests["failed"]:
            print(f"    {name}")
    return int(any(not verdict.startswith("ok") for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
