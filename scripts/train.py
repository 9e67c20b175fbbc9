# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT on the pristine and on the overlaid tree, and compare the two.

Both trees run the same steps on the same ranks, data and seed, with the unfused and with the fused
cross-entropy. How far upstream's own alternatives (fused and unfused cross-entropy, fused and eager
activation) are from each other is the band by which the overlaid losses and gradients are judged. Checkpoints
go both ways between the trees.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts import pair
from scripts.arguments import path
from scripts.errors import UsageError
from scripts.workers.entries import ENTRIES, NORM_SLOTS
from scripts.workers.spawn import detect_device, log_lines, run_world

# Below this share of the loss a difference says nothing, whatever the band: the logits are bfloat16, with 8
# bits, and averaging over the few hundred tokens of a step here takes about 4 more off their rounding.
LOSS_FLOOR = 2.0**-12
# A parameter's gradient may be this many times as far from the pristine one as the worst of upstream's own
# alternatives is (each is one sample of the same rounding), and always one unit of bfloat16.
GRADIENT_FACTOR = 3.0
GRADIENT_FLOOR = 2.0**-8
JOB_LINE = "liger overlay "


@dataclass(frozen=True)
class Sizes:
    """Sizes of model and step; see ``scripts.workers.gpt.Sizes``."""

    layers: int = 2
    hidden: int = 64
    ffn: int = 160
    heads: int = 4
    groups: int = 2
    vocabulary: int = 256
    sequence: int = 32
    micro_batch: int = 2
    micro_batches: int = 2
    learning_rate: float = 2e-3

    @property
    def layer_calls(self) -> int:
        """How often one rank runs a layer in a step."""
        return self.layers * self.micro_batches

    @property
    def norm_calls(self) -> int:
        """How often one rank runs a norm in a step: a layer's input, query, key and pre-MLP, and the last."""
        return 4 * self.layer_calls + self.micro_batches


ON_CPU = Sizes()
# At a rate of 2e-3 this one is not stable: a change of one pristine weight matrix by at most a unit of
# bfloat16 moved the fourth loss by up to 1.7e-2 (on an H200). At 3e-4 it moved none of six by more than 4e-4.
ON_GPU = Sizes(hidden=512, ffn=1408, heads=8, groups=4, vocabulary=8192, sequence=512, learning_rate=3e-4)

# Launches that each op must make in one step of one rank, by kernel, and collectives, from the sizes and the
# tensor-parallel size. An op that is not among the launches fails.
EXPECTED_LAUNCHES: dict[str, dict[str, Callable[[Sizes, int], int]]] = {
    "swiglu": {
        "swiglu_forward": lambda s, tp: s.layer_calls,
        "swiglu_backward": lambda s, tp: s.layer_calls,
    },
    "cross_entropy": {
        "cross_entropy_forward": lambda s, tp: s.micro_batches,
        "cross_entropy_combine": lambda s, tp: s.micro_batches if tp > 1 else 0,
        "cross_entropy_backward": lambda s, tp: s.micro_batches,
    },
    "norms": {
        "norm_forward": lambda s, tp: s.norm_calls,
        "norm_backward": lambda s, tp: s.norm_calls,
        "norm_reduce": lambda s, tp: s.norm_calls,
    },
}
EXPECTED_COLLECTIVES: dict[str, Callable[[Sizes, int], int]] = {
    "cross_entropy": lambda s, tp: s.micro_batches if tp > 1 else 0,
}
OUR_NORMS = "megatron.core.liger.norms."
IN_PLACE_OPS = ("swiglu", "cross_entropy")


@dataclass(frozen=True)
class Options:
    """How to train. ``sequence_parallel`` applies to the overlaid tree; upstream's local norms refuse it."""

    device: str
    ranks: int
    tp: int = 1
    iterations: int = 5
    sequence_parallel: bool = False
    in_place: bool = False
    timeout: float = 600.0

    @property
    def sizes(self) -> Sizes:
        return _sizes(self.device)

    @property
    def save_after(self) -> int:
        """The step after which checkpoints are written: at least one step is before it and one after."""
        return (self.iterations + 1) // 2


def _sizes(device: str) -> Sizes:
    return ON_GPU if device == "cuda" else ON_CPU


@dataclass(frozen=True)
class Check:
    """One thing that had to hold."""

    name: str
    passed: bool
    detail: str


@dataclass
class Result:
    """What a comparison found; ``table`` is the text for the reader."""

    checks: list[Check] = field(default_factory=list)
    table: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def check(self, name: str, passed: bool, detail: str) -> None:
        self.checks.append(Check(name, passed, detail))


def main(argv: list[str]) -> int:
    """``train megatron==V``; raises OverlayError when refused."""
    parser = argparse.ArgumentParser(prog="nox -s train --", description=(__doc__ or "").split("\n\n")[0])
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    pair.add_arguments(parser)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    parser.add_argument("--nproc", type=int, help="ranks (default: every GPU, or 2 on CPU; at least --tp)")
    parser.add_argument("--iterations", type=int, default=5, help="training steps (default 5, at least 2)")
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="needs --tp 2 or more and the op norms"
    )
    parser.add_argument(
        "--in-place", action="store_true", help="let the ops that can reuse the saved activation"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for each of three worlds"
    )
    parser.add_argument("--json", type=path, metavar="FILE", help="write everything that was measured")


def run(arguments: argparse.Namespace) -> int:
    """Train as the arguments say and print the comparison; 1 when something is out of the band.

    Raises:
        UsageError: arguments that do not fit each other or the machine.
        ExpectationError: a rank failed or the time ran out.
        OverlayError: whatever building the trees refuses.
    """
    device, gpus = ("cpu", 0) if arguments.device == "cpu" else detect_device(arguments.device)
    options = _options(arguments, device, gpus)
    with pair.open_pair(arguments) as trees:
        if options.sequence_parallel and "norms" not in trees.ops:
            raise UsageError(
                "--sequence-parallel",
                "an overlaid tree with the op norms",
                f"ops {', '.join(trees.ops)}: upstream's local norms refuse sequence parallelism",
                "leave --sequence-parallel away",
            )
        result = train(trees.pristine, trees.overlaid, trees.ops, trees.folder, options)
        print(f"train {trees.name}")
    print("\n".join(result.table))
    for check in result.checks:
        print(f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.detail}")
    if arguments.json:
        checks = [asdict(check) for check in result.checks]
        arguments.json.write_text(
            json.dumps({**result.data, "checks": checks}, indent=1) + "\n", encoding="utf-8"
        )
    return 0 if result.passed else 1


def _options(arguments: argparse.Namespace, device: str, gpus: int) -> Options:
    tp = arguments.tp
    ranks = arguments.nproc or max(tp, (gpus // tp) * tp if device == "cuda" else 2)
    groups = _sizes(device).groups
    wrong = None
    if tp < 1 or ranks % tp:
        wrong = (
            f"--tp {tp} --nproc {ranks}",
            "a multiple of --tp ranks",
            "give --nproc as a multiple of --tp",
        )
    elif groups % tp:
        wrong = (f"--tp {tp}", f"a divisor of the {groups} query groups", "use --tp 1 or --tp 2")
    elif device == "cuda" and ranks > gpus:
        wrong = (f"{ranks} ranks", f"at most {gpus} GPUs' worth", "use fewer ranks, or --device cpu")
    elif arguments.iterations < 2:
        wrong = (
            f"--iterations {arguments.iterations}",
            "at least 2",
            "a checkpoint needs a step on either side",
        )
    elif arguments.sequence_parallel and tp < 2:
        wrong = ("--sequence-parallel alone", "--tp 2 with it", "add --tp 2")
    if wrong is not None:
        found, expected, remedy = wrong
        raise UsageError("command line", expected, found, remedy)
    return Options(
        device,
        ranks,
        tp,
        arguments.iterations,
        arguments.sequence_parallel,
        arguments.in_place,
        arguments.timeout,
    )


def train(pristine: Path, overlaid: Path, ops: Sequence[str], folder: Path, options: Options) -> Result:
    """Train on both trees and compare.

    Args:
        pristine: the tree without the overlay.
        overlaid: the tree with it.
        ops: what ``overlaid`` must run on kernels.
        folder: an empty folder for checkpoints, gradients and logs.
        options: how to train.

    Raises:
        ExpectationError: a rank failed or the time ran out.
    """
    gradients = str(folder / "gradients")
    store = {"gradients": gradients, "compare": False}
    compare = {"gradients": gradients, "compare": True}
    in_place = [op for op in ops if op in IN_PLACE_OPS]

    def world(
        name: str, tree: Path, sequence_parallel: bool, runs: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        plan = {
            "tp": options.tp,
            "sequence_parallel": sequence_parallel,
            "iterations": options.iterations,
            "sizes": asdict(options.sizes),
            "runs": runs,
        }
        return run_world(
            "train_worker",
            plan,
            tree=tree,
            folder=folder / name,
            ranks=options.ranks,
            device=options.device,
            timeout=options.timeout,
            extra={"LIGER_MEGATRON_IN_PLACE": ",".join(in_place)} if options.in_place and in_place else None,
        )

    def saved(name: str) -> dict[str, Any]:
        return {"save": str(folder / f"checkpoint-{name}"), "save_after": options.save_after}

    before = world(
        "pristine",
        pristine,
        False,
        [
            _run("unfused", **store, **saved("pristine")),
            _run("fused", fused_cross_entropy=True, **compare),
            _run("eager", fused_activation=False, **compare),
        ],
    )
    after = world(
        "overlaid",
        overlaid,
        options.sequence_parallel,
        [
            _run("unfused", **compare, **saved("overlaid")),
            _run("fused", fused_cross_entropy=True, **compare),
            _run("resumed", load=str(folder / "checkpoint-pristine")),
        ],
    )
    back = world("back", pristine, False, [_run("resumed", load=str(folder / "checkpoint-overlaid"))])
    result = Result(data={"options": asdict(options), "pristine": before, "overlaid": after, "back": back})
    _describe(result, before[0], options)
    _job_line(result, folder, ops)
    _slots(result, before, after, ops)
    _entries(result, before, after, ops, options)
    limits = _losses(result, before[0]["runs"], after[0]["runs"])
    _gradients(result, before, after)
    _round_trip(result, before, after, back, limits, options)
    return result


def _run(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "fused_cross_entropy": False, "fused_activation": True, **changes}


def _describe(result: Result, report: Mapping[str, Any], options: Options) -> None:
    versions, sizes = report["versions"], options.sizes
    where = "CPU, Triton's interpreter" if options.device == "cpu" else versions["device"]
    result.table += [
        f"{options.ranks} ranks on {where} (tensor parallel {options.tp}), torch {versions['torch']}, "
        f"triton {versions['triton']}, Python {versions['python']}",
        f"{sizes.layers} layers, hidden {sizes.hidden}, ffn {sizes.ffn}, vocabulary {sizes.vocabulary}; "
        f"{sizes.micro_batches} micro-batches of {sizes.micro_batch} x {sizes.sequence} tokens a rank; bf16",
    ]


def _job_line(result: Result, folder: Path, ops: Sequence[str]) -> None:
    """The line by which a job shows on rank 0 that it runs the overlay; a pristine one must not have it."""
    ours, theirs = (log_lines(folder / name, JOB_LINE) for name in ("overlaid", "pristine"))
    result.table += ["", *ours]
    missing = [op for op in ops if not any(f"{op} kernel" in line for line in ours)]
    detail = (
        f"no line says that {', '.join(missing)} runs on a kernel" if missing else "in the overlaid job only"
    )
    result.check(
        "the job's own line", not missing and not theirs, "also in the pristine job" if theirs else detail
    )


def _slots(
    result: Result,
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    ops: Sequence[str],
) -> None:
    """The classes in the norms' places, which are ours in all of them, or in none without that op."""
    rows, ours = [], 0
    for slot in NORM_SLOTS:
        found = [reports[0]["runs"]["unfused"]["norms"][slot] for reports in (before, after)]
        rows.append((slot, *map(", ".join, found)))
        theirs, classes = found
        wanted = "norms" in ops
        ours += bool(classes) and all(name.startswith(OUR_NORMS) for name in classes)
        if not theirs or not classes:
            result.check(f"norm slot {slot}", False, "no module in it")
        elif any(name.startswith(OUR_NORMS) for name in theirs):
            result.check(f"norm slot {slot}", False, "ours in the pristine tree")
        elif any(name.startswith(OUR_NORMS) is not wanted for name in classes):
            result.check(f"norm slot {slot}", False, f"not {'ours' if wanted else 'upstream'}: {classes}")
    result.table += ["", *_columns([("norm slot", "pristine", "overlaid"), *rows])]
    if "norms" in ops:
        result.check("norm slots", ours == len(NORM_SLOTS), f"{ours} of {len(NORM_SLOTS)} ours")
        for run in ("unfused", "fused"):
            digests = {report["runs"][run]["norm_gradients"] for report in after}
            detail = "the same bits" if len(digests) == 1 else "DIFFER"
            result.check(f"norms' gradients on all ranks, {run}", len(digests) == 1, detail)


def _entries(
    result: Result,
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    ops: Sequence[str],
    options: Options,
) -> None:
    """Who is behind each name, and what each step launched."""
    rows = []
    for entry in ENTRIES:
        origins = {key: reports[0]["entries"][entry.name] for key, reports in (("a", before), ("b", after))}
        wanted = "ours" if entry.op in ops else "upstream"
        wrong = [module for module, origin in origins["b"].items() if origin not in (wanted, "absent")]
        wrong += [module for module, origin in origins["a"].items() if origin not in ("upstream", "absent")]
        present = sum(origin != "absent" for origin in origins["b"].values())
        if wrong:
            result.check(f"code behind {entry.name}", False, f"not {wanted} through {', '.join(wrong)}")
        elif entry.op in ops:
            result.check(f"code behind {entry.name}", True, f"ours through all {present} names")
        calls = [
            _served(run["counters"][0], entry.op, entry.name)
            for run in (after[0]["runs"][m] for m in ("unfused", "fused"))
        ]
        names = (" / ".join(sorted(set(origins[key].values()))) for key in ("a", "b"))
        rows.append(
            (entry.name, *names, *map(str, calls)) if wanted == "ours" else (entry.name, *names, "-", "-")
        )
    header = ("entry", "pristine", "overlaid", "calls on the kernel a step: unfused", "fused")
    result.table += ["", *_columns([header, *rows])]

    launch_rows: list[tuple[str, ...]] = [("kernel", "launches a step", "expected")]
    for op in ops:
        counts_of = EXPECTED_LAUNCHES.get(op, {})
        expected = {kernel: n for kernel, f in counts_of.items() if (n := f(options.sizes, options.tp))}
        steps = [
            (f"rank {rank}, {name}, step {number}", counters.get(op, {"launches": {}, "entries": {}}))
            for rank, report in enumerate(after)
            for name, run in report["runs"].items()
            for number, counters in enumerate(run["counters"], run["first_step"] + 1)
        ]
        wrong_counts = [
            f"{where}: {counts['launches']}" for where, counts in steps if counts["launches"] != expected
        ]
        passed = bool(expected and steps) and not wrong_counts
        detail = (
            f"{expected} in each of {len(steps)} steps" if passed else f"expected {expected or 'a known op'}"
        )
        result.check(f"launches of {op}", passed, "; ".join([detail, *wrong_counts[:2]]))
        if op in EXPECTED_COLLECTIVES:
            wanted_collectives = EXPECTED_COLLECTIVES[op](options.sizes, options.tp)
            wrong_counts = [
                f"{where}: {counts.get('collectives')}"
                for where, counts in steps
                if counts.get("collectives") != wanted_collectives
            ]
            detail = f"{wanted_collectives} in each of {len(steps)} steps expected"
            result.check(f"collectives of {op}", not wrong_counts, "; ".join([detail, *wrong_counts[:2]]))
        fallbacks = sorted(
            {
                f"{name}: {reason}"
                for _, counts in steps
                for name, calls in counts["entries"].items()
                for reason in (*calls["upstream"], *(["off"] if calls["off"] else []))
            }
        )
        result.check(f"fallbacks of {op}", not fallbacks, "; ".join(fallbacks) or "none")
        seen = {
            kernel: sorted({counts["launches"].get(kernel, 0) for _, counts in steps}) for kernel in expected
        }
        launch_rows += [(kernel, "/".join(map(str, seen[kernel])), str(n)) for kernel, n in expected.items()]
    result.table += ["", *_columns(launch_rows)]


def _served(counters: Mapping[str, Any], op: str, entry: str) -> int:
    return int(counters.get(op, {}).get("entries", {}).get(entry, {}).get("kernel", 0))


def _losses(result: Result, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[float]:
    """Both curves side by side; returns how far each step's loss may be off."""
    curves = {name: run["losses"] for name, run in before.items()}
    ours = {name: after[name]["losses"] for name in ("unfused", "fused")}
    rows: list[tuple[str, ...]] = [
        (
            "step",
            "pristine: unfused",
            "fused",
            "eager",
            "overlaid: unfused",
            "fused",
            "off by",
            "fused by",
            "band",
            "limit",
        )
    ]
    limits, band, off = [], 0.0, []
    for step, reference in enumerate(curves["unfused"]):
        spread = [abs(curves[name][step] - reference) for name in ("fused", "eager")]
        band = max(band, *spread)
        limits.append(max(band, LOSS_FLOOR * abs(reference)))
        differences = [abs(ours[name][step] - curves[name][step]) for name in ("unfused", "fused")]
        # Written so that a NaN counts as off.
        off += [step + 1 for difference in differences if not difference <= limits[-1]]
        losses = (*(curves[n][step] for n in ("unfused", "fused", "eager")), *(ours[n][step] for n in ours))
        numbers = [f"{loss:.6f}" for loss in losses]
        rows.append((str(step + 1), *numbers, *(f"{d:.2e}" for d in (*differences, max(spread), limits[-1]))))
    result.table += [
        "",
        *_columns(rows),
        "eager: bias_activation_fusion off. band: the pristine curves' largest distance at that step.",
        f"limit: the largest band so far, at least {LOSS_FLOOR:.1e} of the loss (rounding of bf16 logits).",
    ]
    result.check(
        "losses", not off, f"off at steps {sorted(set(off))}" if off else "all steps within the limit"
    )
    for name, losses in ours.items():
        result.check(f"learning, {name}", losses[-1] < losses[0], f"{losses[0]:.4f} -> {losses[-1]:.4f}")
    return limits


def _gradients(
    result: Result, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> None:
    """Step 1's gradients, by parameter: the largest difference over the largest value."""

    def worst(reports: Sequence[Mapping[str, Any]], run: str) -> dict[str, float]:
        tables = [report["runs"][run]["gradients"] for report in reports]
        return {name: _largest([table[name] for table in tables]) for name in tables[0]}

    theirs = {name: worst(before, name) for name in ("fused", "eager")}
    ours = {name: worst(after, name) for name in ("unfused", "fused")}
    band = max(value for table in theirs.values() for value in table.values())
    limit = max(GRADIENT_FACTOR * band, GRADIENT_FLOOR)
    rows: list[tuple[str, ...]] = [
        ("gradient at step 1", "pristine: fused", "eager", "overlaid: unfused", "fused")
    ]
    rows += [
        (name, *(f"{t[name]:.1e}" for t in (*theirs.values(), *ours.values()))) for name in ours["unfused"]
    ]
    result.table += [
        "",
        *_columns(rows),
        f"largest difference from the pristine unfused gradient over its largest value; limit {limit:.1e}, "
        f"{GRADIENT_FACTOR:g} times the worst of the pristine columns",
    ]
    off = [
        f"{name} ({run}) {value:.2e}"
        for run, t in ours.items()
        for name, value in t.items()
        if not value <= limit
    ]
    value, name = max((value, name) for table in ours.values() for name, value in table.items())
    result.check("gradients", not off, "; ".join(off) or f"worst {name} {value:.2e}, limit {limit:.2e}")


def _largest(values: Sequence[float]) -> float:
    return next((value for value in values if value != value), max(values))


def _round_trip(
    result: Result,
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    back: Sequence[Mapping[str, Any]],
    limits: Sequence[float],
    options: Options,
) -> None:
    """Checkpoints of one tree, loaded by the other: the same bytes, the losses of an uninterrupted run."""
    rows: list[tuple[str, ...]] = [("checkpoint", "step", "resumed", "uninterrupted", "off by", "limit")]
    for way, saver, loader in (
        ("pristine -> overlaid", before, after),
        ("overlaid -> pristine", after, back),
    ):
        uninterrupted = (after if loader is after else before)[0]["runs"]["unfused"]["losses"]
        resumed = loader[0]["runs"]["resumed"]
        same = all(
            a["runs"]["unfused"]["saved"] == b["runs"]["resumed"]["loaded"] for a, b in zip(saver, loader)
        )
        off = []
        for step, loss in enumerate(resumed["losses"], resumed["first_step"]):
            difference = abs(loss - uninterrupted[step])
            if not difference <= limits[step]:
                off.append(step + 1)
            numbers = (
                f"{loss:.6f}",
                f"{uninterrupted[step]:.6f}",
                f"{difference:.2e}",
                f"{limits[step]:.2e}",
            )
            rows.append((way, str(step + 1), *numbers))
        complete = resumed["first_step"] == options.save_after and len(resumed["losses"]) > 0
        detail = "model and optimizer bytes " + ("equal" if same else "DIFFER")
        detail += f", losses off at steps {off}" if off else ", losses within the limit"
        result.check(f"checkpoint {way}", same and complete and not off, detail)
    result.table += ["", *_columns(rows), ""]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
