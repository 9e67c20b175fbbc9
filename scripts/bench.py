# SPDX-License-Identifier: Apache-2.0
"""Measure the kernels beside upstream, PyTorch and other libraries: time, host time, memory.

Each provider runs in a process of its own, and is measured only where its results and gradients are right
against float64. Writes bench.csv and, where matplotlib is, plots. Megatron's own entries, overlaid and
upstream, join in with a release or a tree.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import measurements, pair, plots
from scripts.arguments import path
from scripts.errors import ExpectationError, UsageError
from scripts.measurements import FAILED, MISSING, WRONG, Row
from scripts.overlay import ROOT, load_overlay
from scripts.workers.bench_ops import (
    ELEMENT_SIZES,
    LARGEST,
    MODES,
    OPS,
    PROVIDERS,
    RESULTS,
    TINY,
    Provider,
    Shape,
)
from scripts.workers.spawn import detect_device, run_world

CSV = "bench.csv"
OUT = ROOT / "build" / "bench"

#: Op, rows and columns.
Case = tuple[str, int, int]
Result = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """How to measure.

    ``trees``: by their names in :class:`Provider`, empty where none are asked for. ``largest``: measure
    only how many rows fit, up to so many.
    """

    cases: tuple[Case, ...]
    dtype: str
    repeats: int
    device: str
    timeout: float
    trees: dict[str, Path]
    largest: int | None = None


def main(argv: list[str]) -> int:
    """``bench [megatron==V]``; raises OverlayError when refused."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts bench", description=(__doc__ or "").split("\n\n")[0]
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    return redraw(arguments) if arguments.plot else run(arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "release", nargs="?", metavar="megatron==VERSION", help="with the entries of this release"
    )
    parser.add_argument("--tree", type=path, metavar="PATH", help="or of this tree; copied, not changed")
    parser.add_argument("--op", metavar="OP,…", help=f"only these: {', '.join(OPS)}")
    parser.add_argument("--providers", metavar="NAME,…", help=f"only these: {', '.join(PROVIDERS)}")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--shapes", metavar="ROWSxCOLUMNS,…", help="these for every op")
    sizes.add_argument("--quick", action="store_true", help="one or two shapes of each op")
    sizes.add_argument(
        "--tiny", action="store_true", help="a few rows: for a CPU, where only results are judged"
    )
    parser.add_argument(
        "--largest",
        type=int,
        nargs="?",
        const=2**20,
        metavar="ROWS",
        help="measure how many rows fit into the device's memory, of ROWS at most (default 1048576)",
    )
    parser.add_argument("--dtype", choices=tuple(ELEMENT_SIZES), default="bf16")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="calls of each (default 20)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="for each provider's process"
    )
    parser.add_argument(
        "--out", type=path, metavar="FOLDER", help="where CSV and plots go, over older ones (build/bench)"
    )
    parser.add_argument(
        "--plot", type=path, nargs="+", metavar="CSV", help="measure nothing: draw the plots of these"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure as the arguments say; 1 when a result of this project's is wrong, or it failed.

    Raises:
        UsageError: arguments that do not fit each other or the machine.
        ExpectationError: no torch, or no GPU where one is wanted.
        OverlayError: whatever building the trees refuses.
    """
    providers = [PROVIDERS[name] for name in _names("--providers", arguments.providers, PROVIDERS)]
    cases = _cases(arguments)
    if arguments.repeats < 1:
        raise UsageError("--repeats", "1 or more", str(arguments.repeats), "leave --repeats away")
    if arguments.largest is not None and arguments.largest < 1:
        raise UsageError("--largest", "1 or more", str(arguments.largest), "leave the number away")
    device, _ = ("cpu", 0) if arguments.device == "cpu" else detect_device(arguments.device)
    if device == "cpu" and not (arguments.tiny or arguments.shapes):
        raise UsageError("command line", "a GPU, or --tiny", "no GPU in use", "add --tiny, or run on a GPU")
    if device == "cpu" and arguments.largest is not None:
        raise UsageError("--largest", "a GPU", "no GPU in use", "run on a GPU")
    out = arguments.out or OUT
    with _trees(arguments) as trees, measurements.Writer(out / CSV) as writer:
        options = Options(
            cases, arguments.dtype, arguments.repeats, device, arguments.timeout, trees, arguments.largest
        )
        rows = measure(providers, options, writer.write, _progress(len(cases) * len(providers)))
    print("\n".join(measurements.table(rows)))
    print(f"\nwrote {out / CSV}")
    if not plots.available():
        print(f"no plots: matplotlib is not importable (bench --plot {out / CSV} draws them elsewhere)")
    for plot in plots.draw(rows, out) if plots.available() else ():
        print(f"wrote {plot}")
    problems = ours_wrong(rows)
    for problem in problems:
        print(f"FAILED  {problem}")
    return 1 if problems else 0


def redraw(arguments: argparse.Namespace) -> int:
    """Draw the plots of CSVs, beside the first one unless ``--out`` says where.

    Raises:
        UsageError: no matplotlib, a file that is no such CSV, or with nothing to draw.
    """
    if not plots.available():
        remedy = "pip install matplotlib (nox -s bench has it)"
        raise UsageError(sys.executable, "a Python that has matplotlib", "none", remedy)
    rows = measurements.read(arguments.plot)
    drawn = plots.draw(rows, arguments.out or arguments.plot[0].parent)
    if not drawn:
        raise UsageError(
            arguments.plot[0], "rows with device times", "none", "name a CSV that was measured on a GPU"
        )
    for plot in drawn:
        print(f"wrote {plot}")
    return 0


def ours_wrong(rows: Sequence[Row]) -> list[str]:
    """What this project got wrong, or failed at."""
    problems = [
        f"{row.provider} {row.op} {row.rows} × {row.columns}: {row.status}, {row.reason}"
        for row in rows
        if PROVIDERS[row.provider].ours and row.status in (WRONG, FAILED)
    ]
    return list(dict.fromkeys(problems))


# --- Arguments ---


def _names(option: str, wanted: str | None, known: dict[str, Any]) -> list[str]:
    """The known names of a comma-separated list, in the order of ``known``; all without a list."""
    if wanted is None:
        return list(known)
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(option, f"of {', '.join(known)}", repr(name), "name some of those")
    return [name for name in known if name in names]


def _cases(arguments: argparse.Namespace) -> tuple[Case, ...]:
    given = _shapes(arguments.shapes) if arguments.shapes is not None else None
    found: list[Case] = []
    for name in _names("--op", arguments.op, OPS):
        op = OPS[name]
        few = arguments.quick or arguments.largest is not None
        shapes = given or ((TINY,) if arguments.tiny else op.quick if few else op.shapes)
        found += [(name, rows, columns) for rows, columns in shapes]
    return tuple(found)


def _shapes(text: str) -> tuple[Shape, ...]:
    shapes = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)[x×]([1-9]\d*)\s*", word)
        if match is None:
            raise UsageError(
                "--shapes", "ROWSxCOLUMNS, as in 8192x4096", repr(word), "separate several by commas"
            )
        shapes.append((int(match[1]), int(match[2])))
    return tuple(shapes)


@contextmanager
def _trees(arguments: argparse.Namespace) -> Iterator[dict[str, Path]]:
    if arguments.release is None and arguments.tree is None:
        yield {}
        return
    both = argparse.Namespace(release=arguments.release, tree=arguments.tree, ops=None)
    with pair.open_pair(both) as trees:
        yield {"pristine": trees.pristine, "overlaid": trees.overlaid}


# --- Measuring ---


def _progress(total: int) -> Callable[[str, Result], None]:
    """Tells on stderr of each case as it is done; of one reason why cases are missing, once."""
    done = 0
    told = ""

    def show(provider: str, result: Result) -> None:
        nonlocal done, told
        done += 1
        full = result.get("modes", {}).get("full", {}).get("gpu_us")
        text = f"{result['op']} {result['rows']} × {result['columns']}: "
        text += result["status"] if full is None else f"{full:.1f} µs"
        if result["status"] == MISSING:
            text = result["reason"]
        elif result["reason"]:
            text += f", {result['reason']}"
        if f"{provider} {text}" != told:
            told = f"{provider} {text}"
            print(f"[{done}/{total}] {told}", file=sys.stderr, flush=True)

    return show


def measure(
    providers: Sequence[Provider],
    options: Options,
    write: Callable[[Sequence[Row]], None],
    progress: Callable[[str, Result], None],
) -> list[Row]:
    """Every case of every provider, one after the other; rows are written as they come."""
    commit = load_overlay().commit or "unknown"
    rows: list[Row] = []
    for provider in providers:

        def take(result: Result, name: str = provider.name) -> None:
            found = measurements.rows_of(
                result,
                name,
                dtype=options.dtype,
                repeats=options.repeats,
                device=options.device,
                commit=commit,
                modes=MODES if options.largest is None else (LARGEST,),
            )
            rows.extend(found)
            write(found)
            progress(name, result)

        _measure(provider, options, take)
    return rows


def _measure(provider: Provider, options: Options, take: Callable[[Result], None]) -> None:
    why = _missing(provider, options)
    done = 0
    status = MISSING
    if not why:
        plan = {
            "provider": provider.name,
            "cases": options.cases,
            "dtype": options.dtype,
            "repeats": options.repeats,
            "largest": options.largest,
        }
        # Memory in pieces that do not fit together is no limit of the provider's.
        extra = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if options.largest else None
        with tempfile.TemporaryDirectory(prefix="megatron-bench-") as temporary:
            folder = Path(temporary) / provider.name
            results = _new_lines(folder / RESULTS)

            def watch() -> None:
                nonlocal done
                for line in next(results):
                    take(json.loads(line))
                    done += 1

            try:
                run_world(
                    "bench_worker",
                    plan,
                    tree=options.trees[provider.tree] if provider.tree else None,
                    folder=folder,
                    device=options.device,
                    timeout=options.timeout,
                    watch=watch,
                    extra=extra,
                )
            except ExpectationError as error:
                said = error.found.splitlines()
                status, why = FAILED, f"{said[0]} {said[-1].strip()}"
            watch()
    for op, rows, columns in options.cases[done:]:
        take({"op": op, "rows": rows, "columns": columns, "status": status, "reason": why})


def _missing(provider: Provider, options: Options) -> str:
    """Why ``provider`` cannot be asked here; empty where it can."""
    if provider.tree and provider.tree not in options.trees:
        return "no tree: name megatron==VERSION, or --tree PATH"
    if options.device == "cpu" and (provider.module or provider.name == "compile"):
        return "measured on a GPU only"
    if provider.module and importlib.util.find_spec(provider.module) is None:
        return f"no package {provider.module} (pip install {provider.distribution})"
    return ""


def _new_lines(file: Path) -> Iterator[list[str]]:
    """With each ``next``, the whole lines that ``file`` has gained; none while there is no file."""
    offset = 0
    while True:
        data = b""
        if file.exists():
            with file.open("rb") as stream:
                stream.seek(offset)
                data = stream.read()
        whole = data[: data.rfind(b"\n") + 1]
        offset += len(whole)
        yield whole.decode().splitlines()
