# SPDX-License-Identifier: Apache-2.0
"""What a person sees: a progress bar on stderr while it runs, tables on stdout at the end.

Plain text and no libraries, for the machines with the GPUs often have none.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable

from benchmarks.records import Record, Results, where


class Progress:
    """A bar where stderr is a terminal; elsewhere a line now and then, so that logs stay short."""

    _SILENCE = 15.0  # seconds between lines in a log

    def __init__(self, total: int, budget: float) -> None:
        self._total, self._budget = total, budget
        self._start = time.monotonic()
        self._done = 0
        self._last = -self._SILENCE
        self._live = sys.stderr.isatty()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def over(self) -> bool:
        """Whether the time for the whole run is spent."""
        return self.elapsed >= self._budget

    def show(self, what: str) -> None:
        """Tell what is being measured now."""
        clock = f"{_clock(self.elapsed)} of {_clock(self._budget)}"
        if self._live:
            full = round(20 * self._done / max(1, self._total))
            bar = "█" * full + "·" * (20 - full)
            text = f"{bar} {self._done}/{self._total}  {clock}  {what}"
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\r" + text[:width].ljust(width))
            sys.stderr.flush()
        elif self.elapsed - self._last >= self._SILENCE:
            self._last = self.elapsed
            print(f"[{self._done}/{self._total}, {clock}] {what}", file=sys.stderr)

    def advance(self) -> None:
        self._done += 1

    def say(self, line: str) -> None:
        """Print a line without breaking the bar."""
        if self._live:
            sys.stderr.write("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r")
        print(line, file=sys.stderr)

    def close(self) -> None:
        if self._live:
            self.say(f"{self._done} of {self._total} jobs in {_clock(self.elapsed)}")


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


# Tables


def _number(value: float | None) -> str:
    """Three digits, without an exponent."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3f}" if value < 1 else f"{value:.3g}"


def _metric(name: str, scale: float = 1.0) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        value = record[name]
        return _number(None if value is None else scale * value)

    return cell


def _count(record: Record) -> str:
    value = record["launches"]
    return "-" if value is None else f"{value:.0f}"


def _error(name: str) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        value = record[name]
        return "-" if value is None else f"{value:.1e}"

    return cell


def _roofline(record: Record) -> str:
    value = record["roofline"]
    return "-" if value is None else f"{100 * value:.0f}%"


Column = tuple[str, Callable[[Record], str]]
_TIMES: list[Column] = [
    ("device ms", _metric("device_ms")),
    ("wall ms", _metric("wall_ms")),
    ("host us", _metric("host_ms", 1e3)),
    ("graph ms", _metric("graph_ms")),
    ("launches", _count),
]
_ALL: list[Column] = [
    *_TIMES,
    ("peak MiB", _metric("peak_mib")),
    ("error", _error("error")),
    ("roofline", _roofline),
]
COLUMNS: dict[str, list[Column]] = {
    "headline": _ALL,
    "real": _ALL,
    "issue": _ALL,
    "lengths": _ALL,
    "channels": _ALL,
    "large": _ALL,
    "core": _ALL,
    "overhead": _TIMES,
    "memory": [
        ("beyond inputs and results, MiB", _metric("extra_mib")),
        ("beyond inputs, MiB", _metric("peak_mib")),
    ],
    "accuracy": [
        ("error", _error("error")),
        ("torch.matmul's", _error("reference_error")),
        ("allowed", _error("allowed")),
        ("of it", _metric("ratio")),
    ],
}
# What "ours" is compared by, and the heading of that column.
_COMPARED: dict[str, tuple[str, Callable[[Record], float | None]]] = {
    "headline": ("ours is", lambda record: record.time),
    "real": ("ours is", lambda record: record.time),
    "issue": ("ours is", lambda record: record.time),
    "lengths": ("ours is", lambda record: record.time),
    "channels": ("ours is", lambda record: record.time),
    "large": ("ours is", lambda record: record.time),
    "core": ("ours is", lambda record: record.time),
    "overhead": ("ours is", lambda record: record["host_ms"] or record["wall_ms"]),
    "memory": ("ours needs", lambda record: record["extra_mib"]),
}


def text(results: Results) -> str:
    """All tables and what stands above them."""
    lines = [_heading(results)]
    for (suite, op), records in _grouped(results.records, lambda r: (r.suite, r.op)):
        lines += ["", f"{suite}: {op}", *_table(suite, records)]
    for title, entries in (("Not taking part", results.skipped), ("FAILED", results.failed)):
        if entries:
            lines += ["", f"{title}:", *(f"  {entry}" for entry in dict.fromkeys(entries))]
    return "\n".join(lines)


def _heading(results: Results) -> str:
    facts = results.machine
    line = f"fused-ops {facts['fused_ops']} ({facts['commit']}), torch {facts['torch']}, "
    line += where(facts)
    rates = facts.get("rates")
    if rates:
        shown = [f"copy {rates['copy'] / 1e12:.3g} TB/s"]
        shown += [f"{k} {v / 1e12:.3g}" for k, v in rates.items() if k != "copy"]
        line += f"\nmeasured limits: {', '.join(shown)} TFLOP/s"
        if "split" in rates:
            line += " (split: fp32-accurate, three fp16 products)"
    return line


def _grouped(
    records: Iterable[Record], key: Callable[[Record], tuple[str, ...]]
) -> Iterable[tuple[tuple[str, ...], list[Record]]]:
    """Records that agree in ``key``, in the order of its first appearance."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups.items()


def _table(suite: str, records: list[Record]) -> list[str]:
    """Lines of one table. A shape stands above its rows, dtype and direction in the first of
    those that share them."""
    columns = COLUMNS[suite]
    compared = _COMPARED.get(suite)
    header = ["dtype", "direction", "", *(title for title, _ in columns)]
    if compared:
        header.append(compared[0])
    rows: list[list[str]] = []
    notes: dict[str, None] = {}
    previous = ["", "", ""]
    for _, contest in _grouped(records, lambda r: r.contest):
        ours = next((r for r in contest if r.opponent == "fused"), None)
        for record in contest:
            shape = record.shape + (f", {record.inputs}" if record.inputs else "")
            keys = [shape, record.dtype, record.direction]
            if shape != previous[0]:
                rows.append([shape])
            new = [keys[: i + 1] != previous[: i + 1] for i in (1, 2)]
            previous = keys
            name = record.opponent + (f" ({record.path})" if record.path else "")
            if record.note:
                name += " *"
                notes[f"* {record.opponent}: {record.note}"] = None
            cells = [cell(record) for _, cell in columns]
            if compared:
                cells.append(_compared(suite, compared[1], ours, record))
            shown = [key if is_new else "" for key, is_new in zip(keys[1:], new, strict=True)]
            rows.append([*shown, name, *cells])
    return [*_aligned(header, rows), *notes]


def _compared(
    suite: str, value: Callable[[Record], float | None], ours: Record | None, theirs: Record
) -> str:
    if ours is None or theirs is ours:
        return ""
    mine, other = value(ours), value(theirs)
    if mine is None or other is None or not mine or not other:
        return "-"
    if suite == "memory":
        return f"{mine / other:.2f} of it"
    return f"{other / mine:.2f}x as fast"


def _aligned(header: list[str], rows: list[list[str]]) -> list[str]:
    """Three columns of words, then numbers; a row of one cell is a heading."""
    full = [row for row in [header, *rows] if len(row) > 1]
    widths = [max(len(row[i]) for row in full) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        left = [cell.ljust(width) for cell, width in zip(cells[:3], widths[:3], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(cells[3:], widths[3:], strict=True)]
        return "  ".join(["", *left, *right]).rstrip()

    rule = "─" * (sum(widths) + 2 * len(widths))
    return [line(header), rule, *(row[0] if len(row) == 1 else line(row) for row in rows)]
