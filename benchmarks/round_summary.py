# SPDX-License-Identifier: Apache-2.0
"""The end of a GPU round: a short table, and the same as JSON.

``python -m benchmarks.round_summary FOLDER step=verdict ...`` reads the JUnit report of the gpu
tests in FOLDER and writes ``gpu-round.json`` there. The exit status is 1 if any step failed.
"""

from __future__ import annotations

import json
import pathlib
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import torch

from benchmarks.harness import machine


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


def main(folder: str, *steps: str) -> int:
    verdicts = dict(step.split("=", 1) for step in steps)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {
        "machine": machine(device),
        "tests": test_counts(pathlib.Path(folder) / "gpu-tests.xml"),
        "steps": verdicts,
    }
    (pathlib.Path(folder) / "gpu-round.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"\nGPU round on {facts['machine'].get('gpu', device)}")
    for name, verdict in verdicts.items():
        print(f"  {name:<12} {verdict}")
    tests = facts["tests"]
    if tests["ran"]:
        print(f"  gpu tests: {tests['passed']} passed, {len(tests['failed'])} failed")
        for name in tests["failed"]:
            print(f"    {name}")
    return any(not verdict.startswith("ok") for verdict in verdicts.values())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
