# SPDX-License-Identifier: Apache-2.0
"""The JSON file: what was measured on which machine.

``{"schema": 2, "machine": {...}, "records": [...], "skipped": [...], "failed": [...]}``. A record
is one opponent in one job: suite, kind of the case, op, sizes, dtype (with "tf32" for fp32 under
TF32), direction, opponent, path (which of our paths ran), note (what the opponent does
differently), the operations and bytes that the op needs at least, and the metrics. What was not
measured is absent.

device_ms, wall_ms, host_ms, graph_ms
    See ``timing.py``.
launches
    Kernels that one call launches.
peak_mib, extra_mib
    Peak memory of a call beyond its inputs, and beyond its inputs and results.
error
    Against float64, as ``||a - b|| / ||b||``.
reference_error, allowed, ratio
    Accuracy suite: the error of torch.matmul, 1.5 times that plus 2e-7, and ours over that.
roofline
    The time that the machine's measured rates allow, over the time taken.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import time
from typing import Any

import torch

import fused_ops

SCHEMA = 2
_PEERS = ("triton", "cuequivariance-torch", "trifast")


@dataclasses.dataclass(frozen=True)
class Record:
    """One opponent in one job."""

    suite: str
    op: str
    sizes: dict[str, int]
    dtype: str
    direction: str
    opponent: str
    metrics: dict[str, float | None]
    kind: str = ""
    """Kind of the case; "scaling" marks the points of a line over the length."""
    path: str = ""
    note: str = ""
    inputs: str = ""
    """How the inputs are distributed, in the accuracy suite."""
    flops: int = 0
    bytes: int = 0

    def __getitem__(self, metric: str) -> float | None:
        return self.metrics.get(metric)

    @property
    def time(self) -> float | None:
        """Device time, or wall time where there is no device."""
        return self["device_ms"] if self["device_ms"] is not None else self["wall_ms"]

    @property
    def shape(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.sizes.items())

    @property
    def contest(self) -> tuple[Any, ...]:
        """Equal for the records that are to be compared with each other."""
        shape = (self.suite, self.kind, self.op, self.shape)
        return (*shape, self.dtype, self.direction, self.inputs)


@dataclasses.dataclass
class Results:
    """What a file holds."""

    machine: dict[str, Any]
    records: list[Record] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)

    def write(self, path: pathlib.Path) -> None:
        """Replace ``path`` in one step, so that a run that is killed leaves what it had."""
        data = {
            "schema": SCHEMA,
            "machine": self.machine,
            "records": [_without_blanks(dataclasses.asdict(record)) for record in self.records],
            "skipped": self.skipped,
            "failed": self.failed,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(data, indent=1) + "\n")
        partial.replace(path)


def _without_blanks(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value not in ("", 0)}


def read(path: pathlib.Path) -> Results:
    data = json.loads(path.read_text())
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path}: expected a benchmark file of schema {SCHEMA}")
    records = [Record(**record) for record in data["records"]]
    return Results(data["machine"], records, data["skipped"], data["failed"])


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    facts: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "fused_ops": fused_ops.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
        facts["driver"] = _driver()
    return facts | {package: version for package in _PEERS if (version := _version(package))}


def where(facts: dict[str, Any]) -> str:
    """The machine in a few words."""
    if gpu := facts.get("gpu"):
        return str(gpu)
    return f"{facts['cpu']}, {facts['threads']} threads"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=20
    ).stdout.strip()


def _cpu_name() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver() -> str:
    try:
        return _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ).splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _commit() -> str:
    """The commit measured; ``FUSED_OPS_COMMIT`` names it where there is no repository."""
    if named := os.environ.get("FUSED_OPS_COMMIT"):
        return named
    try:
        dirty = _output("git", "status", "--porcelain", "--untracked-files=no")
        return _output("git", "rev-parse", "--short", "HEAD") + ("+changes" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
