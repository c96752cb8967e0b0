# SPDX-License-Identifier: Apache-2.0
"""The picture of the myoglobin example."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

# Okabe and Ito's palette, told apart under every common form of colour blindness; cividis likewise.
FUSED, REFERENCE = "#0072B2", "#E69F00"
HELIX_NAMES = string.ascii_uppercase  # as globin helices are called, in order
PAIR = "Cα\N{EN DASH}Cα"
INK, QUIET = "#222222", "#8A8A8A"
ATTENTION = "cividis"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 24,
    "axes.labelsize": 9.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
}


@dataclass(frozen=True)
class Measurement:
    """One module in one dtype; each pair of numbers is (fused, reference)."""

    module: str
    dtype: str
    errors: Sequence[float]  # relative, against float64
    seconds: Sequence[float]
    memory: Sequence[float]  # bytes at the peak
    kernel: str


@dataclass
class Picture:
    """Everything the figure shows."""

    name: str
    residue_numbers: np.ndarray  # (N,)
    helices: Sequence[tuple[int, int]]
    msa_mask: np.ndarray  # (S, N) bool
    msa_attention: np.ndarray  # (N, N) of the query row, mean of the heads
    ipa_attention: np.ndarray  # (N, N) mean of the heads
    ca_distance: np.ndarray  # (N, N) in Å
    contact: float  # Å
    measurements: Sequence[Measurement]
    machine: str = ""


def draw(picture: Picture, path: Path) -> None:
    """Write the figure as a PNG."""
    # Only inside this block: a caller's own matplotlib settings and backend stay as they are.
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.5, 14.2), facecolor="white")
        FigureCanvasAgg(figure)
        maps = figure.add_gridspec(
            2, 2, left=0.08, right=0.89, top=0.88, bottom=0.345, hspace=0.34, wspace=0.42
        )
        figure.text(
            0.02, 0.98, f"Sperm whale myoglobin (PDB {picture.name}) through one fused block",
            fontsize=18, weight="bold", va="top",
        )  # fmt: skip
        figure.text(
            0.02, 0.956,
            "Real structure and alignment, random weights: the maps show what the inputs alone "
            f"impose on attention.\n{_numbering(picture)}",
            fontsize=10, color="#555555", va="top", linespacing=1.4,
        )  # fmt: skip
        _msa_attention(figure.add_subplot(maps[0, 0]), picture)
        _alignment(figure.add_subplot(maps[0, 1]), picture)
        _ipa_attention(figure.add_subplot(maps[1, 0]), picture)
        _contacts(figure.add_subplot(maps[1, 1]), picture)

        bars = figure.add_gridspec(
            1, 4, left=0.145, right=0.975, top=0.255, bottom=0.075, wspace=0.12
        )
        axes = [figure.add_subplot(bars[0, column]) for column in range(4)]
        _bars(axes[:2], picture, "seconds", "time of a call, ms", 1e3, common=False)
        _bars(axes[2:], picture, "memory", "peak memory of a call, MiB", 2.0**-20, common=True)
        for axis in axes[1:]:
            axis.set_yticklabels([])
        _panel_title(axes[0], "e", f"Time on {picture.machine}")
        _panel_title(axes[2], "f", "Memory above inputs and weights")
        figure.legend(
            handles=[Patch(color=FUSED, label="fused"), Patch(color=REFERENCE, label="reference")],
            loc="lower right", bbox_to_anchor=(0.98, 0.008), ncols=2, frameon=False,
            handlelength=1.2, columnspacing=1.4,
        )  # fmt: skip
        figure.savefig(path, dpi=160)


def _numbering(picture: Picture) -> str:
    text = "Axes carry the residue numbers of the PDB file"
    if not picture.helices:
        return f"{text}."
    last = HELIX_NAMES[len(picture.helices) - 1]
    return f"{text}; grey bars are its helices, A to {last} from the N terminus."


def _panel_title(axis: Axes, letter: str, text: str) -> None:
    axis.set_title(f"{letter}   {text}")


def _residue_axis(axis: Axes, picture: Picture, which: str) -> None:
    """Ticks at every twentieth residue number, and the helices as bars along the edge."""
    numbers = picture.residue_numbers
    places = np.flatnonzero(numbers % 20 == 0)
    on_x = which == "x"
    (axis.set_xticks if on_x else axis.set_yticks)(places, [str(n) for n in numbers[places]])
    size = 0.018
    for name, (first, last) in zip(HELIX_NAMES, picture.helices, strict=False):
        extent = last - first + 1
        start = first - 0.5
        corner = (start, 1.012) if on_x else (1.012, start)
        box = (extent, size) if on_x else (size, extent)
        transform = axis.get_xaxis_transform() if on_x else axis.get_yaxis_transform()
        axis.add_patch(
            Rectangle(corner, *box, transform=transform, color=QUIET, lw=0, clip_on=False)
        )
        if on_x:
            axis.text((first + last) / 2, 1.036, name, transform=transform, ha="center", fontsize=8)


def _colour_bar(axis: Axes, image: AxesImage, label: str, extend: str) -> None:
    place = axis.inset_axes((1.06, 0, 0.035, 1))
    bar = axis.figure.colorbar(image, cax=place, extend=extend)
    bar.set_label(label, labelpad=3)
    if isinstance(image.norm, LogNorm):
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        bar.ax.yaxis.set_major_formatter("{x:g}")
        bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.outline.set_linewidth(0.5)


def _attention_map(axis: Axes, picture: Picture, attention: np.ndarray) -> None:
    # At most three decades: below, a weight is too small to matter; above, single cells dominate.
    bottom, top = np.quantile(attention, (0.01, 0.999))
    norm = LogNorm(max(bottom, top / 1e3), top)
    image = axis.imshow(attention, cmap=ATTENTION, norm=norm, interpolation="nearest")
    for which in "xy":
        _residue_axis(axis, picture, which)
    axis.set_xlabel("attended residue (key)")
    axis.set_ylabel("attending residue (query)")
    _colour_bar(axis, image, "attention, mean of heads", "both")


def _msa_attention(axis: Axes, picture: Picture) -> None:
    _panel_title(axis, "a", "MSA row attention of the query sequence")
    _attention_map(axis, picture, picture.msa_attention)


def _alignment(axis: Axes, picture: Picture) -> None:
    mask = picture.msa_mask
    _panel_title(axis, "b", f"Alignment: {1 - mask.mean():.0%} gaps, masked (white)")
    axis.imshow(mask, cmap=ListedColormap(["#FFFFFF", "#B9CDE0"]), aspect="auto",
                interpolation="nearest")  # fmt: skip
    axis.set_box_aspect(1)
    _residue_axis(axis, picture, "x")
    axis.set_xlabel("residue")
    axis.set_ylabel("row of the alignment")
    rows = len(mask)
    ticks = np.unique(np.r_[1, np.arange(10, rows + 1, 10)])
    axis.set_yticks(ticks - 1, ["query" if tick == 1 else str(tick) for tick in ticks])


def _ipa_attention(axis: Axes, picture: Picture) -> None:
    near = picture.ca_distance < picture.contact
    share = float((picture.ipa_attention * near).sum() / picture.ipa_attention.sum())
    _panel_title(axis, "c", f"IPA: {share:.0%} of attention within {picture.contact:.0f} Å")
    _attention_map(axis, picture, picture.ipa_attention)


def _contacts(axis: Axes, picture: Picture) -> None:
    near = picture.ca_distance < picture.contact
    title = f"Contacts, {PAIR} < {picture.contact:.0f} Å: {near.mean():.0%} of pairs"
    _panel_title(axis, "d", title)
    edges = np.arange(5) * picture.contact / 2 + picture.contact
    shades = matplotlib.colormaps["Blues_r"](np.linspace(0.35, 1, len(edges)))
    shades[0] = to_rgba("#08214A")
    # One step for contacts, then fainter ones, so that the shape of the fold stays visible.
    colours, norm = ListedColormap(shades), BoundaryNorm([0, *edges], len(shades))
    image = axis.imshow(picture.ca_distance, cmap=colours, norm=norm, interpolation="nearest")
    _colour_bar(axis, image, f"{PAIR} distance, Å", "max")
    for which in "xy":
        _residue_axis(axis, picture, which)
    axis.set_xlabel("residue")
    axis.set_ylabel("residue")


def _bars(
    axes: Sequence[Axes], picture: Picture, field: str, label: str, scale: float, common: bool
) -> None:
    """Two panels, one a dtype; ``common`` puts both on one scale."""
    dtypes = list(dict.fromkeys(item.dtype for item in picture.measurements))
    tops = [
        max(max(getattr(item, field)) for item in picture.measurements if item.dtype == dtype)
        for dtype in dtypes
    ]
    for axis, dtype, own in zip(axes, dtypes, tops, strict=True):
        top = (max(tops) if common else own) * scale
        rows = [item for item in picture.measurements if item.dtype == dtype]
        places = np.arange(len(rows))
        for offset, which, colour in ((-0.2, 0, FUSED), (0.2, 1, REFERENCE)):
            values = [getattr(item, field)[which] * scale for item in rows]
            axis.barh(places + offset, values, height=0.38, color=colour)
            for place, value in zip(places + offset, values, strict=True):
                text = f"{value:.1f}" if value < 100 else f"{value:.0f}"
                axis.text(value + 0.015 * top, place, text, va="center", fontsize=8)
        axis.set_yticks(places, [item.module.replace(" point ", " point\n") for item in rows])
        axis.set_xlim(0, 1.2 * top)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.invert_yaxis()
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.text(0, 1.03, dtype, transform=axis.transAxes, fontsize=9.5, color="#555555")
        axis.set_xlabel(label)
