# SPDX-License-Identifier: Apache-2.0
"""Parity of every pinned release: all names and some calls of each, all calls where a touched file differs.

Two releases whose files of an op have the same bytes run the same entries. So the newest release of each set
of variants answers for all calls of the op, and each release for itself for what is around them: that it can
be imported, that every name leads to ours, that a call through each of them runs on the kernel, and a model's
step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from scripts import pair, parity, plots
from scripts.apply import split_ops
from scripts.errors import OverlayError, UsageError
from scripts.manifest import Manifest, Release, load, span
from scripts.overlay import load_overlay
from scripts.verify import select_ops
from scripts.workers.entries import ENTRIES, LINEAR
from scripts.workers.spawn import detect_device

ALL, FEW = "all", "few"
KERNEL, NOT_THERE, FAILED = "kernel", "not there", "FAILED"
MAX_JOBS = 8


@dataclass(frozen=True)
class Checked:
    """One release: which calls were compared, and what came of it; or the refusal that kept it from that."""

    version: str
    calls: Mapping[str, str]
    result: parity.Result | None = None
    refusal: str | None = None
    seconds: float = 0.0
    ops: Sequence[str] = field(default=())

    @property
    def problems(self) -> list[str]:
        if self.result is None:
            return [self.refusal or "not compared"]
        problems = list(self.result.problems)
        problems += [f"{op}: no call ran" for op in self.calls if op in self.ops and not self._rows(op)]
        return problems if problems or self.result.passed else ["nothing was compared"]

    def cell(self, op: str) -> str:
        """What an op comes to in this release: on the kernel, left to upstream and why, or not there."""
        if self.result is None:
            return FAILED
        if op not in self.ops:
            return NOT_THERE
        rows = [row for row in self._rows(op) if row["served"] == "kernel"]
        reasons = sorted({reason for row in rows for reason in row["reasons"]})
        absent = [
            entry.name
            for entry in ENTRIES
            if entry.op == op and self.result.entries[entry.name][entry.module] == "absent"
        ]
        words = [f"upstream's ({reason})" for reason in reasons] or [KERNEL if rows else "not called"]
        words += [f"{name} {NOT_THERE}" for name in absent]
        return "; ".join(words if not any(row["problems"] for row in rows) else [FAILED, *words])

    def compared(self) -> str:
        """How many calls were compared, and of which ops all of them."""
        if self.result is None:
            return "none"
        full = [op for op, which in self.calls.items() if which == ALL]
        n = sum(row["served"] != "missing" for row in self.result.rows)
        return f"{n}{' (all of ' + ', '.join(full) + ')' if full else ''}"

    def _rows(self, op: str) -> list[dict[str, Any]]:
        wanted = "model" if op == LINEAR else op  # it has no calls but the model's
        return [row for row in (self.result.rows if self.result else ()) if row["op"] == wanted]


def run(arguments: argparse.Namespace) -> int:
    """``parity all``: check every pinned release and print the table; 1 when something differs.

    Raises:
        UsageError: arguments that are for one tree, an unknown op, or no job.
    """
    for name in ("tree", "wiring"):
        if getattr(arguments, name):
            found = f"all with --{name}"
            raise UsageError("command line", "all, or one release or tree", found, f"leave --{name} away")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise UsageError("--jobs", "1 or more", str(arguments.jobs), "leave it away")
    if arguments.plot and not plots.available():
        raise UsageError("--plot", "a Python that has matplotlib", sys.executable, "pip install matplotlib")
    manifest = load()
    overlay = load_overlay(manifest=manifest)
    ops = select_ops(overlay, split_ops(arguments.ops))
    device, _ = ("cpu", 0) if arguments.device == "cpu" else detect_device(arguments.device)
    jobs = arguments.jobs or (1 if device == "cuda" else min(os.cpu_count() or 1, MAX_JOBS))
    begun = time.monotonic()
    checked = check(manifest, ops, device, jobs, arguments.timeout)
    lines = text(checked, manifest, ops, time.monotonic() - begun)
    print("\n".join(lines))
    if arguments.plot:
        cells = [row[: 1 + len(ops)] for row in _cells(checked, ops)]
        plots.draw_matrix(cells, "Parity of every release with its own upstream", lines[0], arguments.plot)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(markdown(checked, ops)) + "\n", encoding="utf-8")
    if arguments.json:
        documents = [_document(one, ops) for one in checked]
        arguments.json.write_text(json.dumps(documents, indent=1) + "\n", encoding="utf-8")
    return 1 if any(one.problems for one in checked) else 0


def plan(manifest: Manifest, ops: Iterable[str]) -> dict[str, dict[str, str]]:
    """For each release and op, whether all calls are compared or a few."""
    calls: dict[str, dict[str, str]] = {version: {} for version in manifest.releases}
    for op in ops:
        newest = {group[-1] for group in groups(manifest, op)}
        for version in calls:
            calls[version][op] = ALL if version in newest else FEW
    return calls


def groups(manifest: Manifest, op: str) -> list[list[str]]:
    """The releases whose entries of an op are the same, in order.

    Entries are in extended files; a patched one is a call site, which every release's model and tests pass
    through. An op that has nothing but call sites goes by those.
    """
    files = manifest.files_of(op)
    files = tuple(file for file in files if file.action == "extend") or files
    found: dict[tuple[str | None, ...], list[str]] = {}
    for version in manifest.releases:
        variants = tuple(
            next((v.sha256 for v in file.variants if version in v.releases), None) for file in files
        )
        found.setdefault(variants, []).append(version)
    return list(found.values())


def check(
    manifest: Manifest, ops: Sequence[str], device: str, jobs: int, timeout: float = 600.0
) -> list[Checked]:
    """Check every pinned release, ``jobs`` at a time. One that fails or is refused does not end it."""
    calls = plan(manifest, ops)

    def one(release: Release) -> Checked:
        found = check_release(release, calls[release.version], device, timeout)
        word = f"{FAILED}" if found.problems else "ok"
        print(f"{release.version} {word}, {found.seconds:.0f} s", file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, manifest.releases.values()))


def check_release(release: Release, calls: Mapping[str, str], device: str, timeout: float = 600.0) -> Checked:
    """Compare a release with itself overlaid with the ops of ``calls``: all names, and those calls."""
    begun = time.monotonic()
    try:
        with pair.open_release(release, calls) as trees:
            ops = trees.ops
            there = {op: which for op, which in calls.items() if op in ops}
            result = parity.compare(
                trees.pristine,
                trees.overlaid,
                ops,
                trees.folder,
                device=device,
                calls=there,
                timeout=timeout,
            )
    except OverlayError as error:
        refusal = f"{error.file}: expected {error.expected}, found {error.found}"
        return Checked(release.version, calls, refusal=refusal, seconds=time.monotonic() - begun)
    return Checked(release.version, calls, result, None, time.monotonic() - begun, ops)


def text(checked: Sequence[Checked], manifest: Manifest, ops: Sequence[str], seconds: float) -> list[str]:
    """The lines to print: a row per release, what stands for what, and whatever is wrong."""
    first = next((one.result for one in checked if one.result is not None), None)
    lines = []
    if first is not None:
        versions = first.versions
        where = "CPU, Triton's interpreter" if first.device == "cpu" else versions["device"]
        tools = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton"))
        lines.append(f"{where}, {tools}, Python {versions['python']}, {seconds:.0f} s")
    rows = _cells(checked, ops)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for op in ops:
        same = "; ".join(span(group) for group in groups(manifest, op))
        lines.append(f"{op}: the same entries in {same}; all calls in the last one of each")
    for preview in manifest.previews.values():
        lines.append(f"{preview.version}: a preview, not here; parity --tree CHECKOUT of {preview.commit}")
    problems = [f"{one.version}: {problem}" for one in checked for problem in one.problems]
    lines += [f"{FAILED}  {problem}" for problem in problems[: parity.MAX_PROBLEMS]]
    if len(problems) > parity.MAX_PROBLEMS:
        lines.append(f"... and {len(problems) - parity.MAX_PROBLEMS} more (--json has all)")
    return lines


def markdown(checked: Sequence[Checked], ops: Sequence[str]) -> list[str]:
    """The same table, for a page."""
    header, *rows = _cells(checked, ops)
    lines = [header, tuple("---" for _ in header), *rows]
    return [f"| {' | '.join(row)} |" for row in lines]


def _cells(checked: Sequence[Checked], ops: Sequence[str]) -> list[tuple[str, ...]]:
    rows = [("release", *ops, "calls compared", "names", "verdict")]
    for one in checked:
        names = str(one.result.names) if one.result else "0"
        verdict = f"{len(one.problems)} {FAILED}" if one.problems else "ok"
        rows.append((one.version, *map(one.cell, ops), one.compared(), names, verdict))
    return rows


def _document(one: Checked, ops: Sequence[str]) -> dict[str, Any]:
    return {
        "release": one.version,
        "ops": {op: one.cell(op) for op in ops},
        "calls": dict(one.calls),
        "seconds": round(one.seconds, 1),
        "problems": one.problems,
        **(parity.document(one.result) if one.result else {}),
    }
