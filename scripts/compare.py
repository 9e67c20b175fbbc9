# SPDX-License-Identifier: Apache-2.0
"""Time, memory and losses of the pristine and of the overlaid tree in one table: ``train --compare``.

Both trees train the small GPT on the same ranks, data and seed, with the unfused and with the fused
cross-entropy. Times say something on a GPU only: on a CPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from scripts.train import (
    EXPECTED_LAUNCHES,
    FUSED,
    LOSS_FLOOR,
    UNFUSED,
    Options,
    Result,
    World,
    columns,
    describe,
    in_place,
    plan_run,
    run_runs,
)
from scripts.workers.entries import UNTRAINED

TREES = ("pristine", "overlaid")
RUNS = (UNFUSED, FUSED)
# The share of the steps that no time is taken of: compilation, allocators, clocks.
WARM_UP = 0.25


def compare(pristine: Path, overlaid: Path, ops: Sequence[str], folder: Path, options: Options) -> Result:
    """Train on both trees and put them side by side.

    Args:
        pristine: the tree without the overlay.
        overlaid: the tree with it.
        ops: what ``overlaid`` must run on kernels.
        folder: an empty folder for logs.
        options: how to train.

    Raises:
        ExpectationError: a rank failed or the time ran out.
    """
    runs = [plan_run(UNFUSED), plan_run(FUSED, fused_cross_entropy=True)]
    worlds = {}
    for name, tree in zip(TREES, (pristine, overlaid)):
        ours = name == "overlaid"
        extra = in_place(ops, options) if ours else {}
        parallel = options.sequence_parallel and ours
        worlds[name] = run_runs(runs, tree, folder / name, options, parallel, extra)
    return judge(worlds, ops, options)


def judge(worlds: Mapping[str, World], ops: Sequence[str], options: Options) -> Result:
    """The table, and what has to hold for it to compare anything; with the arguments of :func:`compare`."""
    result = Result(data={"options": asdict(options), **{name: w.reports for name, w in worlds.items()}})
    describe(result, worlds["pristine"].reports[0], options)
    result.table += ["", *worlds["overlaid"].job_lines, ""]
    _table(result, worlds, options)
    _kernels(result, worlds, ops)
    _losses(result, worlds)
    return result


def _table(result: Result, worlds: Mapping[str, World], options: Options) -> None:
    first = min(int(options.iterations * WARM_UP) + 1, options.iterations - 1)
    shown = sorted({0, 1, 2, options.iterations - 1} & set(range(options.iterations)))
    steps = ", ".join(str(step + 1) for step in shown)
    rows: list[tuple[str, ...]] = [("core", "loss", "ms a step", "max allocated", f"loss at steps {steps}")]
    for name in TREES:
        for run in RUNS:
            found = [report["runs"][run] for report in worlds[name].reports]
            # A step takes as long as its slowest rank, a job as much memory as its largest.
            slowest = map(max, zip(*(report["seconds"] for report in found)))
            time = 1e3 * median(list(slowest)[first:])
            peaks = [peak for report in found for peak in report["peak_bytes"] if peak is not None]
            peak = f"{max(peaks) / 1e6:.0f} MB" if peaks else "not counted on a CPU"
            losses = " ".join(f"{found[0]['losses'][step]:.6f}" for step in shown)
            rows.append((name, run, f"{time:.1f}", peak, losses))
    result.table += columns(rows)
    where = (
        "" if options.device == "cuda" else "; on a CPU, in Triton's interpreter, it says nothing of a GPU"
    )
    result.table += [f"ms: the median of steps {first + 1} to {options.iterations}{where}"]


def _kernels(result: Result, worlds: Mapping[str, World], ops: Sequence[str]) -> None:
    """The overlaid tree runs every op on its kernels in each step, the pristine one has none."""
    for op in ops:
        if op in UNTRAINED:
            continue
        steps = list(worlds["overlaid"].steps(op))
        idle = [where for where, counts in steps if not counts["launches"]]
        reasons = {r for _, counts in steps for n in counts["entries"].values() for r in n["upstream"]}
        detail = "; ".join([*idle[:2], *sorted(reasons)]) or f"in each of {len(steps)} steps"
        passed = op in EXPECTED_LAUNCHES and bool(steps) and not idle and not reasons
        result.check(f"kernels of {op}", passed, detail)
    theirs = worlds["pristine"]
    stray = bool(theirs.job_lines) or any(report["overlaid"] for report in theirs.reports)
    result.check("the pristine tree", not stray, "overlaid, too" if stray else "without the overlay")


def _losses(result: Result, worlds: Mapping[str, World]) -> None:
    """The first losses, of the same weights, are the same but for rounding; and all of them learn."""
    curves = {(name, run): worlds[name].run(run)["losses"] for name in TREES for run in RUNS}
    start = curves["pristine", UNFUSED][0]
    limit = max(abs(curves["pristine", FUSED][0] - start), LOSS_FLOOR * abs(start))
    off = [abs(curves["overlaid", run][0] - start) for run in RUNS]
    # Written so that a NaN counts as off.
    passed = all(distance <= limit for distance in off)
    result.check("first loss", passed, f"off by {off[0]:.2e} and {off[1]:.2e}, limit {limit:.2e}")
    for (name, run), losses in curves.items():
        result.check(
            f"learning, {name}, {run}", losses[-1] < losses[0], f"{losses[0]:.4f} -> {losses[-1]:.4f}"
        )
