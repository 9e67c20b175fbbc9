# SPDX-License-Identifier: Apache-2.0
"""What the benchmark has found: its rows, the CSV that keeps them, and the table for the terminal."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from scripts.errors import UsageError
from scripts.workers.bench_ops import ELEMENT_SIZES, LARGEST, MODES, OPS, PROVIDERS

OK, WRONG, FAILED, MISSING = "ok", "wrong", "failed", "missing"
MIB = 2.0**20
GIB = 2.0**30


@dataclass(frozen=True)
class Row:
    """One op, shape, provider and mode; a line of the CSV.

    Attributes:
        status: ``ok``; ``wrong``, so not timed; ``failed``, it raised; ``missing``, or without this op.
        reason: of any status but ``ok``; of ``largest`` what more rows came to.
        error: of result and gradients against float64, however the mode; see ``bench_worker.rms_error``.
        mode: forward, backward, full; or ``largest``, where ``rows`` is the most that fit.
        gpu_us: device time. share: the fewest bytes over that time, of the copy's bandwidth; where matrix
            products bound an op, their time over that time, of a full call alone if its forward makes the
            gradients.
        host_us: until the host had made the call.
        peak_mib: memory above the inputs and the result's gradient; of ``largest`` all of it.
        products_us: the three bare matrix products of an output layer's call, in the same process.
        copy_gb_s: bytes read plus written by a large copy in the same process, in GB/s.
        version: of the provider. commit: of this repository.
    """

    op: str
    rows: int
    columns: int
    dtype: str
    provider: str
    mode: str
    status: str
    reason: str
    error: float | None
    gpu_us: float | None
    share: float | None
    fewest_bytes: int
    host_us: float | None
    peak_mib: float | None
    copy_gb_s: float | None
    products_us: float | None
    repeats: int
    device: str
    torch: str
    triton: str
    python: str
    version: str
    commit: str

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns


def share(fewest_bytes: int, gpu_us: float, copy_gb_s: float) -> float:
    """The part of the copy's bandwidth (GB/s) that ``fewest_bytes`` in ``gpu_us`` microseconds make."""
    return fewest_bytes / (gpu_us * 1e-6) / (copy_gb_s * 1e9)


def rows_of(
    result: Mapping[str, Any],
    provider: str,
    *,
    dtype: str,
    repeats: int,
    device: str,
    commit: str,
    modes: Sequence[str] = MODES,
) -> list[Row]:
    """A worker's result for one op and shape as rows, one for each mode."""
    shape, op = (result["rows"], result["columns"]), OPS[result["op"]]
    copy, products = result.get("copy"), result.get("products_us")
    found = []
    backward_us = result.get("modes", {}).get("backward", {}).get("gpu_us")
    # A backward shorter than one of its products: the forward has made the gradients.
    whole = bool(products and backward_us and backward_us < products / op.products_of("full"))
    for mode in modes:
        measured = result.get("modes", {}).get(mode, {})
        gpu, peak = measured.get("gpu_us"), measured.get("peak_bytes")
        fewest = 0 if mode == LARGEST else op.fewest_bytes(mode, shape, ELEMENT_SIZES[dtype])
        part = None
        if gpu and products:
            if mode == "full" or not whole:
                part = products * op.products_of(mode) / op.products_of("full") / gpu
        elif gpu and copy and fewest:
            part = share(fewest, gpu, copy / 1e9)
        found.append(
            Row(
                op=result["op"],
                rows=shape[0],
                columns=shape[1],
                dtype=dtype,
                provider=provider,
                mode=mode,
                status=result["status"],
                reason=result["reason"],
                error=result.get("error"),
                gpu_us=gpu,
                share=part,
                fewest_bytes=fewest,
                host_us=measured.get("host_us"),
                peak_mib=None if peak is None else peak / MIB,
                copy_gb_s=copy / 1e9 if copy else None,
                products_us=products,
                repeats=repeats,
                device=result.get("device", device),
                torch=result.get("torch", ""),
                triton=result.get("triton", ""),
                python=result.get("python", ""),
                version=result.get("version", ""),
                commit=commit,
            )
        )
    return found


# --- CSV ---

FIELDS = tuple(field.name for field in fields(Row))
_DIGITS = {
    "error": ".3e",
    "gpu_us": ".2f",
    "share": ".4f",
    "host_us": ".1f",
    "peak_mib": ".3f",
    "copy_gb_s": ".1f",
    "products_us": ".2f",
}


class Writer:
    """Writes rows to a CSV as they come, so that a run that is cut short leaves what it has."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._stream, FIELDS)
        self._writer.writeheader()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def write(self, rows: Iterable[Row]) -> None:
        """Append ``rows``."""
        for row in rows:
            values = asdict(row)
            for name, digits in _DIGITS.items():
                values[name] = "" if values[name] is None else format(values[name], digits)
            self._writer.writerow(values)
        self._stream.flush()


def read(paths: Sequence[Path]) -> list[Row]:
    """The rows of the CSVs of one or more runs.

    Raises:
        UsageError: a file is not such a CSV.
        OSError: a file cannot be read.
    """
    found: list[Row] = []
    for path in paths:
        with path.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            if tuple(reader.fieldnames or ()) != FIELDS:
                columns = ",".join(reader.fieldnames or ()) or "nothing"
                raise UsageError(path, f"the columns {','.join(FIELDS)}", columns, "name a CSV of bench")
            for number, values in enumerate(reader, 2):
                try:
                    found.append(Row(**{f.name: _value(f.type, values[f.name]) for f in fields(Row)}))
                except (KeyError, TypeError, ValueError) as error:
                    place = f"{path}, line {number}"
                    raise UsageError(place, "a row of bench", str(error), "name a CSV of bench") from None
    return found


def _value(kind: Any, text: str) -> Any:
    """``kind`` as the dataclass spells it."""
    if kind == "str":
        return text
    if kind == "int":
        return int(text)
    return float(text) if text else None


# --- The table ---

_TIMES = tuple(cell for mode in MODES for cell in (f"{mode} µs", "%"))
_HEADER = ("shape", "provider", "error", *_TIMES, "host µs", "peak MiB")
_LEFT = 2  # columns of text, the rest are numbers
_ALWAYS = 3  # columns that are never left away


def table(rows: Sequence[Row]) -> list[str]:
    """The lines to print: how it was measured, then for each op its shapes and providers."""
    lines = _about(rows)
    if any(row.mode == LARGEST for row in rows):
        fitted = [_largest_cells(row) for row in rows if row.status != MISSING]
        lines += ["", *_aligned([_LARGEST_HEADER, *fitted])] if fitted else []
    else:
        for op in OPS:
            lines += _table_of(op, [row for row in rows if row.op == op and row.status != MISSING])
    missing: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.status == MISSING:
            missing.setdefault((row.provider, row.reason), {})[row.op] = None
    asked = {row.op for row in rows}
    lines += [""] if missing else []
    for (provider, reason), ops in missing.items():
        which = "" if ops.keys() == asked else f" ({', '.join(ops)})"
        lines.append(f"not measured  {provider}: {reason}{which}")
    return lines


def _table_of(op: str, rows: Sequence[Row]) -> list[str]:
    cells: list[Sequence[str]] = [_HEADER]
    seen = None
    for (shape, _), modes in _groups(rows):
        cells.append(_cells(modes, "" if shape == seen else f"{shape[0]} × {shape[1]}"))
        seen = shape
    return ["", f"{op}, {OPS[op].columns} in columns", *_aligned(cells)] if rows else []


def _about(rows: Sequence[Row]) -> list[str]:
    device = next((row.device for row in rows if row.torch), rows[0].device if rows else "")
    versions = sorted(
        {f"torch {row.torch}, triton {row.triton}, Python {row.python}" for row in rows if row.torch}
    )
    of_providers = {row.provider: row.version for row in rows if row.status == OK}
    lines = [f"{device}, {'; '.join(versions)}; commit {rows[0].commit if rows else ''}"]
    lines += [", ".join(f"{provider} ({version})" for provider, version in of_providers.items())]
    copies = [row.copy_gb_s for row in rows if row.copy_gb_s]
    if any(row.mode == LARGEST for row in rows):
        lines += [f"{rows[0].dtype}; the most rows of which a forward and backward fit, and their memory"]
    elif copies:
        lines += [
            f"{rows[0].dtype}; medians of {rows[0].repeats} calls, cold cache; %: the fewest bytes over the "
            f"time, of what a copy reached in the same process, {min(copies):.0f} to {max(copies):.0f} GB/s; "
            "with an output layer the time of its bare products over the time",
            "host: of a full call; peak: of a full call, above its inputs; error: rms of the worst row, "
            "relative, against float64",
        ]
    else:
        lines += [
            "Triton's interpreter: host times say nothing about any device, and there is no share of its copy"
        ]
    return lines


def _groups(rows: Iterable[Row]) -> list[tuple[tuple[tuple[int, int], str], dict[str, Row]]]:
    """By shape and provider, in the order of shapes and providers, the rows by mode."""
    groups: dict[tuple[tuple[int, int], str], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.shape, row.provider), {})[row.mode] = row
    order = list(PROVIDERS)
    return sorted(groups.items(), key=lambda item: (item[0][0][::-1], order.index(item[0][1])))


def _cells(modes: Mapping[str, Row], shape: str) -> list[str]:
    full = modes["full"]
    error = "" if full.error is None else f"{full.error:.1e}"
    if full.status != OK:
        return [shape, full.provider, error, f"{full.status.upper()}: {full.reason}"]
    numbers = [text for mode in MODES for text in (_number(modes[mode].gpu_us), _percent(modes[mode].share))]
    return [shape, full.provider, error, *numbers, _number(full.host_us), _number(full.peak_mib)]


_LARGEST_HEADER = ("op", "provider", "columns", "rows", "GiB", "more rows")


def _largest_cells(row: Row) -> Sequence[str]:
    about = row.op, row.provider, str(row.columns)
    if row.status != OK:
        return *about, f"{row.status.upper()}: {row.reason}"
    return *about, str(row.rows), _number((row.peak_mib or 0.0) * MIB / GIB), row.reason


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 1000 or value == 0 else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Text to the left, numbers to the right, empty columns left away.

    A row that is shorter than the header ends in a text of any length.
    """
    whole = [row for row in cells if len(row) == len(cells[0])]
    kept = [i for i in range(len(cells[0])) if i < _ALWAYS or any(row[i] for row in whole[1:])]
    widths = {i: max(len(row[i]) for row in (cells if i < _ALWAYS else whole)) for i in kept}
    lines = []
    for row in cells:
        shown = kept if len(row) == len(cells[0]) else range(len(row))
        padded = [
            row[i].ljust(widths[i]) if i < _LEFT else row[i].rjust(widths.get(i, 0)) for i in shown[:_ALWAYS]
        ]
        rest = [row[i].rjust(widths[i]) if shown is kept else row[i] for i in shown[_ALWAYS:]]
        lines.append("  ".join(padded + rest).rstrip())
    return lines
