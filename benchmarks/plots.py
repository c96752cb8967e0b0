# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.plots FILE.json ...``: pictures of stored results, as PNG and SVG.

Beside each file come FILE-headline and FILE-real (speed against the eager reference),
FILE-scaling (time over the length), FILE-memory (the same of the peak) and FILE-roofline; a picture
without data is left out. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.case import BOTH, FORWARD
from benchmarks.records import Record, Results, read, where
from benchmarks.roofline import rate

# Okabe and Ito's colours, which colour-blind readers tell apart; each also has its own marker.
COLOURS = {
    "fused": "#0072B2",
    "eager": "#666666",
    "compile": "#E69F00",
    "torch.matmul": "#009E73",
    "sdpa": "#CC79A7",
    "sdpa core": "#F0C4DC",
    "flex": "#56B4E9",
    "cuequivariance": "#D55E00",
    "trifast": "#B8A800",
}
MARKERS = {
    "fused": "o",
    "eager": "s",
    "compile": "^",
    "torch.matmul": "D",
    "sdpa": "v",
    "sdpa core": "<",
    "flex": ">",
    "cuequivariance": "P",
    "trifast": "X",
}
LINES: dict[str, Any] = {"fp32": "-", "tf32": (0, (5, 1)), "bf16": (0, (1, 1)), "fp16": "-."}
TITLES = {
    "tensor_matmul": "tensor × matrix",
    "triangular_multiplicative_update": "triangular update",
    "msa_row_attention": "MSA row attention",
    "triangle_attention": "triangle attention",
    "invariant_point_attention": "invariant point attention",
}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fused-ops",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="JSON of python -m benchmarks")
    for path in parser.parse_args(arguments).files:
        for written in draw(path):
            print(written)
    return 0


def draw(path: pathlib.Path) -> list[pathlib.Path]:
    """All pictures of one file; returns what was written."""
    results = read(path)
    pictures: dict[str, Callable[[Results], Figure | None]] = {
        "headline": headline,
        "real": real,
        "scaling": scaling,
        "memory": memory,
        "roofline": roofline,
    }
    written = []
    with plt.rc_context(STYLE):
        for name, picture in pictures.items():
            figure = picture(results)
            if figure is None:
                continue
            for suffix, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
                target = path.with_name(f"{path.stem}-{name}.{suffix}")
                figure.savefig(target, bbox_inches="tight", **options)
                written.append(target)
            plt.close(figure)
    return written


def _subtitle(results: Results) -> str:
    facts = results.machine
    return f"{where(facts)}; PyTorch {facts['torch']}; {facts['commit']}, {facts['date']}"


def _finish(figure: Figure, title: str, results: Results, handles: Sequence[Any]) -> Figure:
    """Title, machine, and one legend under all panels."""
    height = figure.get_figheight()
    lines = math.ceil(1.35 * len(handles) / figure.get_figwidth())  # inches that one takes
    figure.text(0.0, 1 + 0.36 / height, title, fontsize=12, fontweight="bold", va="bottom")
    figure.text(0.0, 1 + 0.16 / height, _subtitle(results), fontsize=8, color="#555555")
    figure.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.08 / height),
        ncols=math.ceil(len(handles) / lines),
        handlelength=2.6,
    )
    return figure


def _ordered(names: Iterable[str], order: Iterable[str]) -> list[str]:
    present = set(names)
    return [name for name in order if name in present]


def _ops(records: Iterable[Record]) -> list[str]:
    return _ordered((r.op for r in records), TITLES)


def _plain(value: float, _position: int | None = None) -> str:
    """A tick's number as people write it."""
    return f"{value:g}" if 1e-3 <= value < 1e5 else f"{value:.0e}"


# Speed-up bars

Panel = dict[str, dict[str, float]]
"""Case -> opponent -> times faster than the eager reference."""


def headline(results: Results) -> Figure | None:
    title = "Speed against eager PyTorch: the headline shapes"
    return _speedup(results, [r for r in results.records if r.suite == "headline"], title)


def real(results: Results) -> Figure | None:
    title = "Speed against eager PyTorch: shapes of models"
    chosen = [r for r in results.records if r.suite == "real" and r.kind != "scaling"]
    return _speedup(results, chosen, title)


def _speedup(results: Results, records: list[Record], title: str) -> Figure | None:
    """One panel an op and direction; both panels of an op have the same rows."""
    contests: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        if record.time is not None and record.direction in (FORWARD, BOTH):
            contests.setdefault(record.contest, {})[record.opponent] = record
    panels: dict[str, dict[str, Panel]] = {}  # op -> direction
    for contest in contests.values():
        eager = contest.get("eager")
        if eager is None or eager.time is None:
            continue
        bars = {
            name: eager.time / r.time
            for name, r in contest.items()
            if r.time and name not in ("eager", "sdpa core")
        }
        panel = panels.setdefault(eager.op, {}).setdefault(eager.direction, {})
        panel[f"{_short(eager)}, {eager.dtype}"] = bars
    if not panels:
        return None
    ops = _ordered(panels, TITLES)
    directions = _ordered((d for op in ops for d in panels[op]), (FORWARD, BOTH))
    rows = {op: _rows(panels[op].values()) for op in ops}
    heights = [sum(map(len, rows[op].values())) + 0.8 * len(rows[op]) for op in ops]
    figure, axes = plt.subplots(
        len(ops),
        len(directions),
        figsize=(4.6 * len(directions) + 1.4, 0.17 * sum(heights) + 0.7 * len(ops)),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for line, op in zip(axes, ops, strict=True):
        for place, (axis, direction) in enumerate(zip(line, directions, strict=True)):
            _bars(axis, rows[op], panels[op].get(direction, {}), labelled=place == 0)
            axis.set_title(f"{TITLES[op]}, {direction}", loc="left")
    values = [
        v for op in ops for p in panels[op].values() for bars in p.values() for v in bars.values()
    ]
    axis = axes[0, 0]
    axis.set_xscale("log")
    axis.set_xlim(min(0.6, min(values) / 1.5), max(2.0, max(values) * 1.5))
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(_plain))
    for axis in axes[-1]:
        axis.set_xlabel("times faster than eager PyTorch (logarithmic)")
    present = [name for op in ops for names in rows[op].values() for name in names]
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=COLOURS[name], label=name)
        for name in _ordered(present, COLOURS)
    ]
    return _finish(figure, title, results, handles)


def _rows(panels: Iterable[Panel]) -> dict[str, list[str]]:
    """Opponents of each case over all directions, in the order of their bars."""
    present: dict[str, set[str]] = {}
    for panel in panels:
        for case, bars in panel.items():
            present.setdefault(case, set()).update(bars)
    return {case: _ordered(names, COLOURS) for case, names in present.items()}


def _short(record: Record) -> str:
    """The sizes without those that are 1."""
    return " ".join(f"{k}={v}" for k, v in record.sizes.items() if v != 1)


def _bars(axis: Axes, rows: dict[str, list[str]], panel: Panel, *, labelled: bool) -> None:
    """Groups of bars from the top down; they start at 1, where nothing is gained or lost."""
    position = 0.0
    ticks = []
    for case, names in rows.items():
        ticks.append(position + (len(names) - 1) / 2)
        for name in names:
            value = panel.get(case, {}).get(name)
            if value is not None:
                axis.barh(position, value - 1, left=1, height=0.85, color=COLOURS[name])
                place, side = (value * 1.04, "left") if value >= 1 else (value / 1.04, "right")
                axis.text(place, position, f"{value:.2f}", va="center", ha=side, fontsize=7.5)
            position += 1
        position += 0.8
    axis.axvline(1, color="#333333", linewidth=0.9)
    axis.set_yticks(ticks, list(rows) if labelled else [""] * len(ticks))
    axis.set_ylim(position - 1.1, -0.7)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelbottom=True)
    axis.grid(visible=False, axis="y")


# Lines over the length


def _length(record: Record) -> int:
    return record.sizes.get("N", record.sizes.get("j", 0))


def scaling(results: Results) -> Figure | None:
    chosen = [
        r
        for r in results.records
        if r.suite == "real" and r.kind == "scaling" and r.time is not None
    ]
    on_gpu = any(r["device_ms"] is not None for r in chosen)
    label = "device time, ms" if on_gpu else "wall time, ms"
    return _lines(results, chosen, lambda r: r.time, label, "Time of a forward over the length N")


def memory(results: Results) -> Figure | None:
    chosen = [r for r in results.records if r.suite == "memory" and r.direction == FORWARD]

    def value(record: Record) -> float | None:
        return record["peak_mib"] or None

    title = "Peak memory of a forward over the length N, result included"
    return _lines(results, chosen, value, "peak beyond the inputs, MiB", title)


def _lines(
    results: Results,
    records: list[Record],
    value: Callable[[Record], float | None],
    label: str,
    title: str,
) -> Figure | None:
    if not records:
        return None
    ops = _ops(records)
    columns = min(2, len(ops))
    lines = math.ceil(len(ops) / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.6 * columns, 3.2 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(ops) :]:
        axis.remove()
    for axis, op in zip(axes.flat, ops, strict=False):
        mine = [r for r in records if r.op == op]
        fixed = {k: v for k, v in mine[0].sizes.items() if k not in ("N", "i", "j") and v != 1}
        axis.set_title(TITLES[op], loc="left")
        sizes = " ".join(f"{k}={v}" for k, v in fixed.items())
        axis.text(0.03, 0.95, sizes, transform=axis.transAxes, fontsize=8, color="#555555")
        for name in _ordered((r.opponent for r in mine), reversed(COLOURS)):
            for dtype in _ordered((r.dtype for r in mine), LINES):
                points = sorted(
                    (_length(r), y)
                    for r in mine
                    if (r.opponent, r.dtype) == (name, dtype) and (y := value(r)) is not None
                )
                axis.plot(
                    [x for x, _ in points],
                    [y for _, y in points],
                    color=COLOURS[name],
                    linestyle=LINES[dtype],
                    marker=MARKERS[name],
                    markersize=4.5,
                    linewidth=2.2 if name == "fused" else 1.4,
                )
        lengths = sorted({_length(r) for r in mine})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.yaxis.set_major_formatter(FuncFormatter(_plain))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_ylim(axis.get_ylim()[0], axis.get_ylim()[1] * 2)  # room for the sizes
        axis.set_xlabel("length N")
        axis.set_ylabel(label)
    handles = _legend(records)
    return _finish(figure, title, results, handles)


def _legend(records: list[Record]) -> list[Line2D]:
    """Opponents by colour and marker; dtypes by line, where there are several."""
    handles = [
        Line2D([], [], color=COLOURS[name], marker=MARKERS[name], label=name)
        for name in _ordered((r.opponent for r in records), COLOURS)
    ]
    dtypes = _ordered((r.dtype for r in records), LINES)
    if len(dtypes) > 1:
        handles += [Line2D([], [], color="#333333", linestyle=LINES[d], label=d) for d in dtypes]
    return handles


# Roofline


def roofline(results: Results) -> Figure | None:
    """Rate against operations for each byte, under what the machine does at best."""
    rates = results.machine.get("rates")
    chosen = [
        r
        for r in results.records
        if r.direction == FORWARD
        and r.opponent in ("fused", "eager")
        and r.suite in ("headline", "real")
        and r.time is not None
        and r.flops
    ]
    if not rates or not chosen:
        return None
    dtypes = _ordered((r.dtype for r in chosen), LINES)
    columns = min(2, len(dtypes))
    lines = math.ceil(len(dtypes) / columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(4.9 * columns, 3.6 * lines),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(dtypes) :]:
        axis.remove()
    intensities = [r.flops / r.bytes for r in chosen]
    left, right = min(intensities) / 1.6, max(intensities) * 1.6
    colours = dict(
        zip(TITLES, ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7"), strict=True)
    )
    for axis, dtype in zip(axes.flat, dtypes, strict=False):
        mine = [r for r in chosen if r.dtype == dtype]
        top = rate(dtype, rates)
        _ceiling(axis, left, right, rates["copy"], top, solid=True)
        limits = f"{top / 1e12:.3g} TFLOP/s, {rates['copy'] / 1e12:.3g} TB/s"
        if top > rates.get(dtype, top):  # fp32 by three fp16 products; the fp32 units come below
            _ceiling(axis, left, right, rates["copy"], rates[dtype], solid=False)
            limits += f" (dashed: {rates[dtype] / 1e12:.3g} on the fp32 units)"
        for op in _ops(mine):
            for name, filled in (("eager", False), ("fused", True)):
                points = [r for r in mine if r.op == op and r.opponent == name]
                axis.scatter(
                    [r.flops / r.bytes for r in points],
                    [r.flops / r.time / 1e9 for r in points if r.time],
                    s=26,
                    facecolors=colours[op] if filled else "none",
                    edgecolors=colours[op],
                    linewidths=1.2,
                )
        axis.set_xscale("log")
        axis.set_yscale("log")
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.set_major_formatter(FuncFormatter(_plain))
            ticks.set_minor_formatter(NullFormatter())
        axis.tick_params(labelbottom=True, labelleft=True)
        axis.set_title(dtype, loc="left")
        axis.set_title(limits, loc="right", fontsize=8, fontweight="normal", color="#555555")
        axis.set_xlabel("operations for each byte that must move")
        axis.set_ylabel("TFLOP/s")
    _more_ticks(axes.flat[0])
    handles = [
        Line2D([], [], linestyle="", marker="o", color=colours[op], label=TITLES[op])
        for op in _ops(chosen)
    ]
    for label, fill in (("fused", "#333333"), ("eager", "none")):
        handles.append(
            Line2D(
                *([], []),
                linestyle="",
                marker="o",
                markerfacecolor=fill,
                markeredgecolor="#333333",
                label=label,
            )
        )
    return _finish(figure, "Forwards under the machine's measured limits", results, handles)


def _ceiling(
    axis: Axes, left: float, right: float, bandwidth: float, top: float, *, solid: bool
) -> None:
    corner = min(max(top / bandwidth, left), right)
    xs = [left, corner, right] if solid else [corner, right]
    ys = [min(top, x * bandwidth) / 1e12 for x in xs]
    axis.plot(xs, ys, color="#333333", linewidth=1.4, linestyle="-" if solid else (0, (4, 2)))


def _more_ticks(axis: Axes) -> None:
    """Where an axis spans less than two decades, numbers at 2 and 5 too."""
    for ticks, (low, high) in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
        if high / low < 100:
            ticks.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))


if __name__ == "__main__":
    sys.exit(main())
