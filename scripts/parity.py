# SPDX-License-Identifier: Apache-2.0
"""Show that the overlaid Megatron computes what the pristine one does.

Each tree runs the same cases in a process of its own. Results are compared with each other and with float64;
the overlay's counters must show that kernels ran where they should and nothing else did; and every name,
signature and binding that users of the touched modules could notice must be as it was.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts import pair
from scripts.arguments import path
from scripts.errors import UsageError
from scripts.workers.entries import ENTRIES
from scripts.workers.spawn import detect_device, run_world

RESULTS = "results.pt"
MAX_PROBLEMS = 20


@dataclass
class Result:
    """What a comparison found.

    Attributes:
        rows: one per case.
        wiring: what is wrong with names and bindings.
        names: how many names of the touched modules were compared.
        entries: who is behind each entry in the overlaid tree, by the modules that hold it.
        bindings: the same for each import of an entry in the tree's sources.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    wiring: list[str] = field(default_factory=list)
    names: int = 0
    entries: dict[str, dict[str, str]] = field(default_factory=dict)
    bindings: dict[str, dict[str, str]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"

    @property
    def problems(self) -> list[str]:
        """Everything that is not as it must be."""
        cases = [f"{row['id']}: {problem}" for row in self.rows for problem in row["problems"]]
        return [*(f"wiring: {problem}" for problem in self.wiring), *cases]

    @property
    def passed(self) -> bool:
        return bool(self.names) and not self.problems


def main(argv: list[str]) -> int:
    """``parity megatron==V``, ``--tree PATH`` or ``all``; raises OverlayError when refused."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts parity", description=(__doc__ or "").split("\n\n")[0]
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.release == "all":
        from scripts.matrix import run as run_all

        return run_all(arguments)
    return run(arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    pair.add_arguments(parser, "; all: every pinned release")
    parser.add_argument("--jobs", type=int, metavar="N", help="with all: how many releases at a time")
    parser.add_argument(
        "--markdown", type=path, metavar="FILE", help="with all: write the table as Markdown, too"
    )
    parser.add_argument(
        "--plot", type=path, metavar="FILE", help="with all: draw the table as a picture (PNG)"
    )
    parser.add_argument("--wiring", action="store_true", help="imports, names and bindings only")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for each of three processes"
    )
    parser.add_argument("--json", type=path, metavar="FILE", help="write every case's numbers")


def run(arguments: argparse.Namespace) -> int:
    """Compare as the arguments say and print the table; 1 when something differs.

    Raises:
        UsageError: arguments that are for all releases.
        ExpectationError: a process failed or the time ran out.
        OverlayError: whatever building the trees refuses.
    """
    for name in ("jobs", "markdown", "plot"):
        if getattr(arguments, name) is not None:
            raise UsageError(
                "command line", f"--{name} with all", "one release or tree", f"leave --{name} away"
            )
    device, _ = ("cpu", 0) if arguments.device == "cpu" else detect_device(arguments.device)
    with pair.open_pair(arguments) as trees:
        result = compare(
            trees.pristine,
            trees.overlaid,
            trees.ops,
            trees.folder,
            device=device,
            calls={} if arguments.wiring else None,
            timeout=arguments.timeout,
        )
        print("\n".join([f"parity {trees.name}", *trees.left]))
    print("\n".join(table(result)))
    if arguments.json:
        arguments.json.write_text(json.dumps(document(result), indent=1) + "\n", encoding="utf-8")
    return 0 if result.passed else 1


def document(result: Result) -> dict[str, Any]:
    """A result as plain data."""
    names = ("versions", "wiring", "names", "entries", "bindings", "rows")
    return {name: getattr(result, name) for name in names}


def compare(
    pristine: Path,
    overlaid: Path,
    ops: Sequence[str],
    folder: Path,
    *,
    device: str,
    calls: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> Result:
    """Run the cases on both trees and compare.

    Args:
        pristine: the tree without the overlay.
        overlaid: the tree with it.
        ops: the ops whose entries ``overlaid`` must have taken over.
        folder: an empty folder for results and logs.
        device: ``"cpu"`` (Triton's interpreter) or ``"cuda"``.
        calls: ``"all"`` or ``"few"`` for each op whose calls are compared, beside names and bindings; None:
            all of all ops.
        timeout: seconds for each process.

    Raises:
        ExpectationError: a process failed or the time ran out.
    """
    calls = dict.fromkeys(ops, "all") if calls is None else dict(calls)
    plan = {"calls": calls, "ops": list(ops)}
    reports = {}
    for name, tree in (("pristine", pristine), ("overlaid", overlaid)):
        world = folder / name
        reports[name] = run_world(
            "parity_worker", plan, tree=tree, folder=world, device=device, timeout=timeout
        )[0]
    before, after = reports["pristine"], reports["overlaid"]
    result = Result(versions=after["versions"], device=device)
    result.names = sum(len(names or {}) for names in before["wiring"].values())
    result.wiring = _wiring(before, after, ops)
    result.entries, result.bindings = after["entries"], after["bindings"]
    if calls:
        compared = {
            "calls": calls,
            "ops": list(ops),
            **{name: str(folder / name / RESULTS) for name in reports},
        }
        done = run_world("parity_compare", compared, tree=None, folder=folder / "compare", timeout=timeout)
        result.rows = done[0]["rows"]
    return result


def _wiring(before: Mapping[str, Any], after: Mapping[str, Any], ops: Sequence[str]) -> list[str]:
    problems = []
    if before["overlaid"]:
        problems.append("the pristine tree has megatron.core.liger")
    if not after["overlaid"]:
        problems.append("the overlaid tree has no megatron.core.liger")
    for module, names in before["wiring"].items():
        found = after["wiring"][module]
        if names is None or found is None:
            if names is not found:
                problems.append(f"{module} is in one of the trees only")
            continue
        problems += [f"{module}.{name} is gone" for name in names.keys() - found.keys()]
        problems += [
            f"{module}.{name} is new and public" for name in found.keys() - names.keys() if name[0] != "_"
        ]
        problems += [
            f"{module}.{name}: {key} is {found[name].get(key)!r}, was {value!r}"
            for name in names.keys() & found.keys()
            for key, value in names[name].items()
            if found[name].get(key) != value
        ]
    for route, same in after["routes"].items():
        if same is not True or before["routes"].get(route) is not True:
            problems.append(f"{route} is not the defining module's object")
    for entry in ENTRIES:
        for tree, report in (("pristine", before), ("overlaid", after)):
            wanted = "ours" if tree == "overlaid" and entry.op in ops else "upstream"
            origins = report["entries"][entry.name].items()
            problems += [
                f"{entry.name} through {module} is {origin} in the {tree} tree, not {wanted}"
                for module, origin in origins
                if origin not in (wanted, "absent")
            ]
    for name, was in before["bindings"].items():
        op, found = was["op"], after["bindings"].get(name, {}).get("found", "gone")
        wanted = "ours" if was["found"] == "upstream" and op in ops else was["found"]
        if found != wanted:
            problems.append(f"{name} is {found} in the overlaid tree, not {wanted}")
    return sorted(problems)


def table(result: Result) -> list[str]:
    """The lines to print: a row per entry and dtype, then whatever is wrong."""
    versions = result.versions
    where = "CPU, Triton's interpreter" if result.device == "cpu" else versions["device"]
    lines = [f"{where}, torch {versions['torch']}, triton {versions['triton']}, Python {versions['python']}"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result.rows:
        groups.setdefault((row["entry"], row["dtype"]), []).append(row)
    cells: list[tuple[str, ...]] = [
        (
            "entry",
            "dtype",
            "cases",
            "on kernel",
            "left",
            "raise",
            "not there",
            "error: pristine",
            "overlaid",
            "launches",
            "verdict",
        )
    ]
    for (entry, dtype), rows in groups.items():
        served = [row["served"] for row in rows]
        bad = sum(bool(row["problems"]) for row in rows)
        cells.append(
            (
                entry,
                dtype,
                str(len(rows)),
                *(str(served.count(kind)) for kind in ("kernel", "upstream", "raises", "missing")),
                f"{max(row['pristine'] for row in rows):.2e}",
                f"{_worst(rows):.2e}",
                str(sum(row["launches"] for row in rows)),
                f"{bad} FAILED" if bad else "ok" if {*served} != {"missing"} else "not there",
            )
        )
    if result.rows:
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
        lines.append("error: against float64, the worst case's largest error over its largest true value")
    deviations = Counter(text for row in result.rows for text in set(row["deviates"].values()))
    lines += [f"deviates in {count} cases: {text}" for text, count in sorted(deviations.items())]
    held = sum(binding["found"] in ("ours", "upstream") for binding in result.bindings.values())
    names = f"{result.names} names compared: signature, module, documentation, pickle; {held} bindings"
    lines.append(f"wiring: {names}; {f'{len(result.wiring)} FAILED' if result.wiring else 'ok'}")
    problems = result.problems
    lines += [f"FAILED  {problem}" for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"... and {len(problems) - MAX_PROBLEMS} more (--json has all)")
    return lines


def _worst(rows: Sequence[Mapping[str, Any]]) -> float:
    errors = [float(row["overlaid"]) for row in rows]
    return next((error for error in errors if error != error), max(errors))
