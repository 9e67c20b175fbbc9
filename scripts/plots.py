# SPDX-License-Identifier: Apache-2.0
"""Plots of the benchmark (speed over an op's width, and memory) and of parity (release by op).

Needs matplotlib, once something is drawn.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.measurements import OK, Row
from scripts.workers.bench_ops import LARGEST, MODES, OPS, PROVIDERS

# One colour for each provider in all plots (Okabe and Ito's, which the colour-blind can tell apart).
_OURS = "#0072B2"
COLOURS = {
    "kernels": _OURS,
    "kernels-in-place": _OURS,
    "kernels-plain": "#56B4E9",
    "overlaid": _OURS,
    "upstream": "#D55E00",
    "upstream-unfused": "#D55E00",
    "torch": "#7F7F7F",
    "compile": "#CC79A7",
    "liger": "#E69F00",
    "liger-in-place": "#E69F00",
    "te": "#009E73",
    "te-in-place": "#009E73",
    "quack": "#000000",
    "cce": "#999933",
    "cce-exact": "#999933",
}
# What is no variant of another line.
_LINES = (
    "overlaid",
    "kernels",
    "kernels-plain",
    "upstream",
    "torch",
    "compile",
    "liger",
    "te",
    "te-in-place",  # the only way of its older versions
    "quack",
    "cce",
)
_SPEED_OPS = ("cross_entropy", "swiglu", "rms_norm", "layer_norm", "linear_cross_entropy")
_TITLES = {"forward": "forward", "backward": "backward", "full": "forward + backward"}
_DPI = 150


def available() -> bool:
    """Whether this Python has matplotlib."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(rows: Sequence[Row], out: Path) -> list[Path]:
    """Draw what ``rows`` hold of their first dtype into the folder ``out``; of one measured twice the last.

    Returns:
        The files: of each op with two shapes or more its speed, the memory of all ops, and the most rows that
        fit. Of rows of a CPU there are none.
    """
    out.mkdir(parents=True, exist_ok=True)
    fitted = [row for row in rows if row.status == OK and row.mode == LARGEST]
    largest = list({(row.op, row.columns, row.provider): row for row in fitted}.values())
    files = [_save(_largest(largest), out / "largest.png")] if largest else []
    good = [row for row in rows if row.status == OK and row.gpu_us and row.share]
    last = {(r.op, r.shape, r.provider, r.mode): r for r in good if r.dtype == good[0].dtype}
    measured = list(last.values())
    both = {row.op for row in measured if row.provider == "overlaid"}  # the same kernels
    measured = [row for row in measured if row.provider != "kernels" or row.op not in both]
    for op in _SPEED_OPS:
        of_op = [row for row in measured if row.op == op and row.provider in _LINES]
        if len({row.columns for row in of_op}) > 1:
            files.append(_save(_speed(of_op), out / f"{op}.png"))
    if any(row.peak_mib is not None for row in measured):
        files.append(_save(_memory(measured), out / "memory.png"))
    return files


#: What a cell of the parity picture says, by the first words that fit, and its colour.
_VERDICTS = (
    ("FAILED", "#D55E00", "failed"),
    ("kernel", "#56B4E9", "on the kernel"),
    ("not there", "#D9D9D9", "not in this release"),
    ("", "#F0E442", "upstream's own"),
)


def draw_matrix(cells: Sequence[Sequence[str]], title: str, note: str, file: Path) -> Path:
    """Draw parity's table: ``cells`` are rows of a release's name and a cell for each op, a header first."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    (_, *ops), *rows = cells
    figure = Figure(figsize=(2.2 + 2.3 * len(ops), 1.6 + 0.27 * len(rows)), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    axis = figure.add_subplot()
    for y, (_, *row) in enumerate(rows):
        for x, cell in enumerate(row):
            words, colour, _ = next(verdict for verdict in _VERDICTS if cell.startswith(verdict[0]))
            axis.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
            more = cell.removeprefix(words).lstrip("; ")
            axis.text(x + 0.5, y + 0.5, more, ha="center", va="center", fontsize=6)
    axis.set(xlim=(0, len(ops)), ylim=(len(rows), 0))
    axis.set_xticks([x + 0.5 for x in range(len(ops))], ops)
    axis.set_yticks([y + 0.5 for y in range(len(rows))], [row[0] for row in rows])
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_xlabel(note, fontsize=7, color="#555555", loc="left")
    handles = [Patch(facecolor=colour, label=label) for _, colour, label in _VERDICTS]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8)
    return _save(figure, file)


def _save(figure: Any, file: Path) -> Path:
    figure.savefig(file, dpi=_DPI)
    return file


def _figure(width: float, height: float, title: str, rows: Sequence[Row]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    row = rows[0]
    versions = {PROVIDERS[r.provider].distribution: r.version for r in rows}
    others = "".join(f", {name} {text}" for name, text in versions.items() if name)
    copy = sorted(r.copy_gb_s for r in rows if r.copy_gb_s)
    speed = f"copy {copy[len(copy) // 2] / 1e3:.2f} TB/s; " if copy else ""
    note = f"{row.device}; {speed}torch {row.torch}, triton {row.triton}"
    figure.supxlabel(note + others, fontsize=7, color="#555555", x=0.01, ha="left")
    return figure


def _speed(rows: Sequence[Row]) -> Any:
    """Above the share of the copy's bandwidth, below the time; a panel for each mode."""
    from matplotlib.ticker import LogLocator

    op = OPS[rows[0].op]
    tokens = Counter(row.rows for row in rows).most_common(1)[0][0]
    other = {row.columns: row.rows for row in rows if row.rows != tokens}
    figure = _figure(11, 6.4, f"{op.title}, {tokens} tokens, {rows[0].dtype}", rows)
    axes = figure.subplots(2, len(MODES), sharex=True, sharey="row")
    for column, mode in enumerate(MODES):
        of_mode = [row for row in rows if row.mode == mode]
        _lines(axes[0][column], [row for row in of_mode if row.rows == tokens], "share", 100.0)
        _lines(axes[1][column], [row for row in of_mode if row.rows == tokens], "gpu_us", 1.0)
        # Times of another number of rows are no part of the line, and no comparison.
        _lines(axes[0][column], [row for row in of_mode if row.rows != tokens], "share", 100.0, "")
        axes[0][column].set_title(_TITLES[mode], fontsize=10)
        axes[0][column].axhline(100, color="#999999", linewidth=0.8, linestyle=":", zorder=0)
        axes[1][column].set_yscale("log")
        _ticks(axes[1][column], sorted({row.columns for row in rows}))
        note = "".join(f" ({n}: {of} rows)" for n, of in other.items())
        axes[1][column].set_xlabel(op.columns + note, fontsize=9)
    of = "bare products' share of the time, %" if op.products_of("full") else "share of a copy's bandwidth, %"
    axes[0][0].set_ylabel(of, fontsize=9)
    axes[0][0].set_ylim(bottom=0)
    axes[1][0].set_ylabel("device time, µs", fontsize=9)
    axes[1][0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[1][0].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure.align_ylabels()
    for axis in axes[:, -1]:
        _name_lines(axis)
    return figure


def _lines(axis: Any, rows: Sequence[Row], field: str, scale: float, line: str = "-") -> None:
    for provider in _LINES:
        points = sorted(
            (row.columns, scale * getattr(row, field)) for row in rows if row.provider == provider
        )
        if points:
            ours = PROVIDERS[provider].ours
            axis.plot(
                *zip(*points),
                color=COLOURS[provider],
                label=PROVIDERS[provider].label if line else None,
                linestyle=line,
                linewidth=2.4 if ours else 1.3,
                marker="o",
                markersize=4 if ours else 3,
                zorder=3 if ours else 2,
            )
    axis.grid(axis="y", color="#E5E5E5", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def _ticks(axis: Any, columns: Sequence[int]) -> None:
    """Powers of two, every one or every other, whatever the shapes are; the markers show those."""
    axis.set_xscale("log", base=2)
    low, high = (round(math.log2(n)) for n in (columns[0], columns[-1]))
    powers = range(low, high + 1, 1 if high - low <= 5 else 2)
    axis.set_xticks([2**power for power in powers], [_short(2**power) for power in powers])
    axis.minorticks_off()


def _short(n: int) -> str:
    return f"{n // 1024}K" if n >= 1024 else str(n)


def _name_lines(axis: Any) -> None:
    """Each line's name beside its right end, in its colour."""
    low, high = axis.get_ylim()
    linear = axis.get_yscale() == "linear"
    place = (lambda y: y) if linear else math.log
    ends = [(line, line.get_ydata()[-1]) for line in axis.get_lines() if line.get_label()[0] != "_"]
    heights = [(place(y) - place(low)) / (place(high) - place(low)) for _, y in ends]
    for (line, _), height in zip(ends, spread(heights, 0.075)):
        axis.annotate(
            line.get_label(),
            (1.03, height),
            xycoords="axes fraction",
            color=line.get_color(),
            fontsize=8.5,
            fontweight="bold" if line.get_label() == PROVIDERS["kernels"].label else "normal",
            va="center",
            annotation_clip=False,
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """``places`` moved as little as it takes to be ``gap`` apart and between 0 and 1, in the same order.

    Those that touch form a block about the mean of where they belong.
    """

    def middle(members: Sequence[int]) -> float:
        half = gap * (len(members) - 1) / 2
        mean = sum(places[i] for i in members) / len(members)
        return max(min(mean, 1 - half), half)

    blocks: list[tuple[float, list[int]]] = []  # centre, members from the lowest
    for index in sorted(range(len(places)), key=lambda i: places[i]):
        centre, members = middle([index]), [index]
        while blocks and centre - blocks[-1][0] < gap * (len(members) + len(blocks[-1][1])) / 2:
            members = blocks.pop()[1] + members
            centre = middle(members)
        blocks.append((centre, members))
    moved = [0.0] * len(places)
    for centre, members in blocks:
        for position, index in enumerate(members):
            moved[index] = centre + gap * (position - (len(members) - 1) / 2)
    return moved


def _largest(rows: Sequence[Row]) -> Any:
    """A bar for each provider of each op and width: the most rows that fit."""
    panels: dict[str, list[Row]] = {}
    order = list(COLOURS)
    for row in sorted(rows, key=lambda row: order.index(row.provider)):
        panels.setdefault(f"{OPS[row.op].title}, {OPS[row.op].columns} {row.columns}", []).append(row)
    height = 0.8 + sum(0.5 + 0.26 * len(bars) for bars in panels.values())
    figure = _figure(9, height, "the most tokens of which a forward and backward fit", rows)
    ratios = [len(bars) for bars in panels.values()]
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": ratios})
    for axis, (title, bars) in zip(axes.flat, panels.items()):
        for place, row in enumerate(bars):
            drawn = axis.barh(place, row.rows, 0.7, color=COLOURS[row.provider])
            more = " (more were not tried)" if "not tried" in row.reason else ""
            axis.bar_label(drawn, [f"{row.rows:,}{more}"], padding=3, fontsize=8)
        axis.set_yticks(range(len(bars)), [PROVIDERS[row.provider].label for row in bars])
        axis.set_ylim(len(bars) - 0.4, -0.6)
        axis.set_xlim(0, 1.35 * max(row.rows for row in bars))
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xticks([])
        axis.spines[:].set_visible(False)
        axis.tick_params(labelsize=8, length=0)
    return figure


def _memory(rows: Sequence[Row]) -> Any:
    """A bar for each provider of each op, at the op's shape that most of them did."""
    panels: dict[str, dict[str, float]] = {}
    for op in OPS:
        full = [row for row in rows if row.op == op and row.mode == "full" and row.peak_mib is not None]
        if full:
            counts = Counter(row.shape for row in full)
            shape = max(counts, key=lambda s: (counts[s], s[0] * s[1]))
            peaks = {row.provider: row.peak_mib or 0.0 for row in full if row.shape == shape}
            panels[f"{OPS[op].title}, {shape[0]} × {shape[1]}"] = {
                name: peaks[name] for name in COLOURS if name in peaks
            }
    across = 2 if len(panels) > 1 else 1
    # As many bars' room in each panel of a line as the fullest of them has, so that all bars are alike.
    counts_of = [len(peaks) for peaks in panels.values()]
    room = [max(counts_of[i : i + across]) for i in range(0, len(counts_of), across)]
    title = "peak memory above the inputs, forward + backward, MiB"
    figure = _figure(5.5 * across, 0.7 + sum(0.5 + 0.19 * n for n in room), title, rows)
    axes = figure.subplots(len(room), across, squeeze=False, gridspec_kw={"height_ratios": room})
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for index, (axis, (title, peaks)) in enumerate(zip(axes.flat, panels.items())):
        for place, (name, peak) in enumerate(peaks.items()):
            variant = name not in _LINES
            drawn = axis.barh(place, peak, 0.7, color=COLOURS[name], alpha=0.55 if variant else 1)
            axis.bar_label(drawn, [f"{peak:,.0f}"], padding=3, fontsize=8)
        axis.set_yticks(range(len(peaks)), [PROVIDERS[name].label for name in peaks])
        axis.set_ylim(room[index // across] - 0.4, -0.6)
        axis.set_xlim(0, 1.25 * max(peaks.values()) or 1)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xticks([])
        axis.spines[:].set_visible(False)
        axis.tick_params(labelsize=8, length=0)
    return figure
