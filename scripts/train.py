# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT on the pristine and on the overlaid tree, and compare the two.

Both trees run the same steps on the same ranks, data and seed, with the unfused and with the fused
cross-entropy. On the overlaid tree two more run: a model made by hand of the overlay's public classes, and
upstream's under ``LIGER_MEGATRON=0``. How far upstream's own alternatives (fused and unfused cross-entropy,
fused and eager activation) are from each other is the band by which all of their losses and gradients are
judged. Checkpoints go both ways between the trees, between the two models, and between on and off.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts import pair
from scripts.arguments import path
from scripts.errors import UsageError
from scripts.workers.entries import ENTRIES, NORM_SLOTS, PUBLIC_CLASSES, UNTRAINED
from scripts.workers.spawn import detect_device, log_lines, run_world

# Below this share of the loss a difference says nothing, whatever the band: the logits are bfloat16, with 8
# bits, and averaging over the few hundred tokens of a step here takes about 4 more off their rounding.
LOSS_FLOOR = 2.0**-12
# A parameter's gradient may be this many times as far from the pristine one as the worst of upstream's own
# alternatives is (each is one sample of the same rounding), and always one unit of bfloat16.
GRADIENT_FACTOR = 3.0
GRADIENT_FLOOR = 2.0**-8
JOB_LINE = "liger overlay "
SWITCH = "LIGER_MEGATRON"

# The runs of a world that train from the first step.
UNFUSED, FUSED, EAGER, BY_HAND = "unfused", "fused", "eager", "by hand"
# The worlds, in the order of who reads whose checkpoints, and the tree of each. In "off" the overlay is
# switched off; "back" and "on" only go on from what others have saved.
WORLDS = {
    "pristine": "pristine",
    "overlaid": "overlaid",
    "back": "pristine",
    "off": "overlaid",
    "on": "overlaid",
}
# The curves that are judged, by their heading: world, run, and the pristine run they are to be like.
JUDGED = {
    UNFUSED: ("overlaid", UNFUSED, UNFUSED),
    FUSED: ("overlaid", FUSED, FUSED),
    BY_HAND: ("overlaid", BY_HAND, UNFUSED),
    f"{SWITCH}=0": ("off", UNFUSED, UNFUSED),
}


@dataclass(frozen=True)
class Crossing:
    """A checkpoint of the run ``saver`` (world and run) with which the world ``loader`` goes on.

    ``like`` is the uninterrupted run whose code the loader runs. The loader's run bears the crossing's name.
    """

    name: str
    saver: tuple[str, str]
    loader: str
    like: tuple[str, str]

    @property
    def by_hand(self) -> bool:
        return self.like[1] == BY_HAND


_PRISTINE, _OVERLAID, _BY_HAND = ("pristine", UNFUSED), ("overlaid", UNFUSED), ("overlaid", BY_HAND)
# By hand first: so the overlaid job's last run, whose counts it prints at exit, is of upstream's spec.
CROSSINGS = (
    Crossing("pristine -> by hand", _PRISTINE, "overlaid", _BY_HAND),
    Crossing("by hand -> by hand", _BY_HAND, "overlaid", _BY_HAND),
    Crossing("by hand -> pristine", _BY_HAND, "back", _PRISTINE),
    Crossing("pristine -> overlaid", _PRISTINE, "overlaid", _OVERLAID),
    Crossing("overlaid -> overlaid", _OVERLAID, "overlaid", _OVERLAID),
    Crossing("overlaid -> pristine", _OVERLAID, "back", _PRISTINE),
    Crossing("on -> off", _OVERLAID, "off", _PRISTINE),
    Crossing("off -> on", ("off", UNFUSED), "on", _OVERLAID),
)
RUNS_BY_HAND = (BY_HAND, *(crossing.name for crossing in CROSSINGS if crossing.by_hand))


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
# Large enough that the host is not the limit, small enough for 40 GB.
TIMED_ON_GPU = Sizes(
    layers=4,
    hidden=2048,
    ffn=7168,
    heads=16,
    groups=8,
    vocabulary=32768,
    sequence=2048,
    micro_batches=1,
    learning_rate=3e-4,
)

# Calls that each op must serve in one step of one rank.
EXPECTED_CALLS: dict[str, Callable[[Sizes], int]] = {
    "swiglu": lambda s: s.layer_calls,
    "cross_entropy": lambda s: s.micro_batches,
    "norms": lambda s: s.norm_calls,
}
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
MEGATRONS_MLP = "megatron.core.transformer.mlp.MLP"
IN_PLACE_OPS = ("swiglu", "cross_entropy")


@dataclass(frozen=True)
class Options:
    """How to train. ``sequence_parallel`` applies to norms of ours: upstream's local ones refuse it."""

    device: str
    ranks: int
    sizes: Sizes
    tp: int = 1
    iterations: int = 5
    sequence_parallel: bool = False
    in_place: bool = False
    timeout: float = 600.0

    @property
    def save_after(self) -> int:
        """The step after which checkpoints are written: at least one step is before it and one after."""
        return (self.iterations + 1) // 2


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
    parser = argparse.ArgumentParser(
        prog="python -m scripts train", description=(__doc__ or "").split("\n\n")[0]
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    pair.add_arguments(parser)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    parser.add_argument("--nproc", type=int, help="ranks (default: every GPU, or 2 on CPU; at least --tp)")
    parser.add_argument(
        "--iterations", type=int, help="training steps (default 5, at least 2; --compare: 20)"
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="needs --tp 2 or more and the op norms"
    )
    parser.add_argument(
        "--in-place", action="store_true", help="let the ops that can reuse the saved activation"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help=f"for each of the {len(WORLDS)} jobs"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="time a step, memory and losses of both trees in one table, instead of the checks",
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
        if arguments.compare:
            from scripts.compare import compare as measured
        else:
            measured = train
        result = measured(trees.pristine, trees.overlaid, trees.ops, trees.folder, options)
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
    tp, ranks = arguments.tp, arguments.nproc
    if ranks is None and tp > 0:
        ranks = max(tp, gpus // tp * tp if device == "cuda" else 2)
    sizes = ON_CPU if device != "cuda" else TIMED_ON_GPU if arguments.compare else ON_GPU
    iterations = arguments.iterations if arguments.iterations is not None else 20 if arguments.compare else 5
    groups = sizes.groups
    wrong = None
    if tp < 1 or ranks < 1 or ranks % tp:
        wrong = (
            f"--tp {tp}" if ranks is None else f"--tp {tp} --nproc {ranks}",
            "a multiple of --tp ranks",
            "give --nproc as a multiple of --tp",
        )
    elif groups % tp:
        wrong = (f"--tp {tp}", f"a divisor of the {groups} query groups", "use --tp 1 or --tp 2")
    elif device == "cuda" and ranks > gpus:
        wrong = (f"{ranks} ranks", f"at most {gpus} GPUs' worth", "use fewer ranks, or --device cpu")
    elif iterations < 2:
        wrong = (
            f"--iterations {iterations}",
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
        sizes,
        tp,
        iterations,
        arguments.sequence_parallel,
        arguments.in_place,
        arguments.timeout,
    )


@dataclass(frozen=True)
class World:
    """A process group that has ended: each rank's report, and the overlay's lines in rank 0's log."""

    reports: list[dict[str, Any]]
    job_lines: list[str]

    def run(self, name: str) -> dict[str, Any]:
        """What rank 0 reports of a run."""
        run: dict[str, Any] = self.reports[0]["runs"][name]
        return run

    def steps(self, op: str, runs: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every rank's counters of ``op`` in each step of these runs (default: of all), and where that is."""
        for rank, report in enumerate(self.reports):
            for name in runs or report["runs"]:
                run = report["runs"][name]
                for number, counters in enumerate(run["counters"], run["first_step"] + 1):
                    counts = counters.get(op, {"entries": {}, "launches": {}, "collectives": 0})
                    yield f"rank {rank}, {name}, step {number}", counts


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
    return judge(measure(pristine, overlaid, ops, folder, options), ops, options)


def measure(
    pristine: Path,
    overlaid: Path,
    ops: Sequence[str],
    folder: Path,
    options: Options,
    names: Sequence[str] = tuple(WORLDS),
) -> dict[str, World]:
    """Run these worlds, with the arguments of :func:`train`; what they load has to be in ``folder``.

    Raises:
        ExpectationError: a rank failed or the time ran out.
    """
    store = {"gradients": str(folder / "gradients"), "compare": False}
    compare = {**store, "compare": True}
    runs = {
        "pristine": [
            plan_run(UNFUSED, **store),
            plan_run(FUSED, fused_cross_entropy=True, **compare),
            plan_run(EAGER, fused_activation=False, **compare),
        ],
        "overlaid": [
            plan_run(UNFUSED, **compare),
            plan_run(FUSED, fused_cross_entropy=True, **compare),
            plan_run(BY_HAND, by_hand=True, **compare),
        ],
        "back": [],
        "off": [plan_run(UNFUSED, **compare)],
        "on": [],
    }

    def checkpoint(world: str, run: str) -> str:
        return str(folder / f"checkpoint-{world}-{run}".replace(" ", "-"))

    savers = {crossing.saver for crossing in CROSSINGS}
    for world, of_world in runs.items():
        for run in of_world:
            if (world, run["name"]) in savers:
                run.update(save=checkpoint(world, run["name"]), save_after=options.save_after)
    for crossing in CROSSINGS:
        load = checkpoint(*crossing.saver)
        runs[crossing.loader].append(plan_run(crossing.name, by_hand=crossing.by_hand, load=load))

    worlds = {}
    for name in names:
        tree = {"pristine": pristine, "overlaid": overlaid}[WORLDS[name]]
        parallel = options.sequence_parallel and name in ("overlaid", "on")
        extra = in_place(ops, options) | ({SWITCH: "0"} if name == "off" else {})
        worlds[name] = run_runs(runs[name], tree, folder / name, options, parallel, extra)
    return worlds


def in_place(ops: Sequence[str], options: Options) -> dict[str, str]:
    """The variable that lets the ops reuse the saved activation, where the options say so."""
    names = ",".join(op for op in ops if op in IN_PLACE_OPS) if options.in_place else ""
    return {f"{SWITCH}_IN_PLACE": names}


def run_runs(
    runs: Sequence[Mapping[str, Any]],
    tree: Path,
    folder: Path,
    options: Options,
    sequence_parallel: bool,
    extra: Mapping[str, str],
) -> World:
    """One process group on ``tree`` that makes these runs, one after another; ``extra``: its variables.

    Raises:
        ExpectationError: a rank failed or the time ran out.
    """
    plan = {
        "tp": options.tp,
        "sequence_parallel": sequence_parallel,
        "iterations": options.iterations,
        "sizes": asdict(options.sizes),
        "runs": runs,
    }
    reports = run_world(
        "train_worker",
        plan,
        tree=tree,
        folder=folder,
        ranks=options.ranks,
        device=options.device,
        timeout=options.timeout,
        extra=extra,
    )
    return World(reports, log_lines(folder, JOB_LINE))


def plan_run(name: str, **changes: Any) -> dict[str, Any]:
    """A run as the worker takes it: what is asked for, and upstream's defaults."""
    run = {"name": name, "fused_cross_entropy": False, "fused_activation": True, "by_hand": False}
    return {**run, **changes}


def judge(worlds: Mapping[str, World], ops: Sequence[str], options: Options) -> Result:
    """Compare what :func:`measure` gives of all worlds, with the arguments of :func:`train`."""
    installed, ops = ops, [op for op in ops if op not in UNTRAINED]
    reports = {name: world.reports for name, world in worlds.items()}
    result = Result(data={"options": asdict(options), **reports})
    describe(result, worlds["pristine"].reports[0], options)
    _job_line(result, worlds, ops)
    _slots(result, worlds, ops)
    _entries(result, worlds, installed)
    _launches(result, worlds, ops, options)
    _by_hand(result, worlds["overlaid"], options)
    _off(result, worlds["off"], ops, options)
    limits = _losses(result, worlds)
    _gradients(result, worlds)
    _crossings(result, worlds, limits, options)
    return result


def describe(result: Result, report: Mapping[str, Any], options: Options) -> None:
    versions, sizes = report["versions"], options.sizes
    where = "CPU, Triton's interpreter" if options.device == "cpu" else versions["device"]
    result.table += [
        f"{options.ranks} ranks on {where} (tensor parallel {options.tp}), torch {versions['torch']}, "
        f"triton {versions['triton']}, Python {versions['python']}",
        f"{sizes.layers} layers, hidden {sizes.hidden}, ffn {sizes.ffn}, vocabulary {sizes.vocabulary}; "
        f"{sizes.micro_batches} micro-batches of {sizes.micro_batch} x {sizes.sequence} tokens a rank; bf16",
        *report["adapted"],
    ]


def _job_line(result: Result, worlds: Mapping[str, World], ops: Sequence[str]) -> None:
    """The line by which a job shows on rank 0 that it runs the overlay; a pristine one must not have it."""
    ours = worlds["overlaid"].job_lines
    result.table += ["", *ours]
    missing = [op for op in ops if not any(f"{op} kernel" in line for line in ours)]
    theirs = [name for name, tree in WORLDS.items() if tree == "pristine"]
    stray = any(worlds[name].job_lines for name in theirs)
    detail = (
        f"no line says that {', '.join(missing)} runs on a kernel" if missing else "in the overlaid job only"
    )
    result.check(
        "the job's own line", not missing and not stray, "also in the pristine job" if stray else detail
    )


def _slots(result: Result, worlds: Mapping[str, World], ops: Sequence[str]) -> None:
    """The classes in the norms' places, which are ours in all of them, or in none without that op."""
    after = worlds["overlaid"]
    runs = [worlds["pristine"].run(UNFUSED), after.run(UNFUSED), after.run(BY_HAND)]
    rows, ours, public = [], 0, 0
    for slot in NORM_SLOTS:
        theirs, classes, by_hand = (run["norms"][slot] for run in runs)
        rows.append((slot, *map(", ".join, (theirs, classes, by_hand))))
        wanted = "norms" in ops
        ours += bool(classes) and all(name.startswith(OUR_NORMS) for name in classes)
        public += by_hand == [OUR_NORMS + PUBLIC_CLASSES["norms"]]
        if not theirs or not classes:
            result.check(f"norm slot {slot}", False, "no module in it")
        elif any(name.startswith(OUR_NORMS) for name in theirs):
            result.check(f"norm slot {slot}", False, "ours in the pristine tree")
        elif any(name.startswith(OUR_NORMS) is not wanted for name in classes):
            result.check(f"norm slot {slot}", False, f"not {'ours' if wanted else 'upstream'}: {classes}")
    result.table += ["", *columns([("norm slot", "pristine", "overlaid", BY_HAND), *rows])]
    if "norms" in ops:
        result.check("norm slots", ours == len(NORM_SLOTS), f"{ours} of {len(NORM_SLOTS)} ours")
    detail = f"{public} of {len(NORM_SLOTS)} {PUBLIC_CLASSES['norms']}"
    result.check(f"norm slots, {BY_HAND}", public == len(NORM_SLOTS), detail)
    for run in (UNFUSED, FUSED, BY_HAND) if "norms" in ops else (BY_HAND,):
        digests = {report["runs"][run]["norm_gradients"] for report in after.reports}
        detail = "the same bits" if len(digests) == 1 else "DIFFER"
        result.check(f"norms' gradients on all ranks, {run}", len(digests) == 1, detail)


def _entries(result: Result, worlds: Mapping[str, World], ops: Sequence[str]) -> None:
    """Who is behind each name, and how many calls of a step were the kernel's."""
    before, after = worlds["pristine"], worlds["overlaid"]
    rows = []
    for entry in ENTRIES:
        theirs, ours = (world.reports[0]["entries"][entry.name] for world in (before, after))
        wanted = "ours" if entry.op in ops else "upstream"
        wrong = [module for module, origin in ours.items() if origin not in (wanted, "absent")]
        wrong += [module for module, origin in theirs.items() if origin not in ("upstream", "absent")]
        wrong += [module for module in ours if ours[module] == "absent" != theirs[module]]
        present = sum(origin != "absent" for origin in ours.values())
        if wrong:
            result.check(f"code behind {entry.name}", False, f"not {wanted} through {', '.join(wrong)}")
        elif entry.op in ops and present:
            result.check(f"code behind {entry.name}", True, f"ours through all {present} names")
        calls = [_served(after.run(run)["counters"][0], entry.op, entry.name) for run in (UNFUSED, FUSED)]
        names = (" / ".join(sorted(set(origins.values()))) for origins in (theirs, ours))
        rows.append((entry.name, *names, *(map(str, calls) if wanted == "ours" else "--")))
    header = ("entry", "pristine", "overlaid", "calls on the kernel a step: unfused", "fused")
    result.table += ["", *columns([header, *rows])]


def _served(counters: Mapping[str, Any], op: str, entry: str) -> int:
    return int(counters.get(op, {}).get("entries", {}).get(entry, {}).get("kernel", 0))


def _launches(result: Result, worlds: Mapping[str, World], ops: Sequence[str], options: Options) -> None:
    """What each step of the overlaid tree launched; for an op not among ``ops``, of the model by hand."""
    rows: list[tuple[str, ...]] = [("kernel", "launches a step", "expected")]
    for op in dict.fromkeys((*ops, *PUBLIC_CLASSES)):
        counts_of = EXPECTED_LAUNCHES.get(op, {})
        expected = {kernel: n for kernel, f in counts_of.items() if (n := f(options.sizes, options.tp))}
        steps = list(worlds["overlaid"].steps(op, () if op in ops else RUNS_BY_HAND))
        steps += worlds["on"].steps(op) if op in ops else ()
        wrong = [
            f"{where}: {counts['launches']}" for where, counts in steps if counts["launches"] != expected
        ]
        passed = bool(expected and steps) and not wrong
        detail = (
            f"{expected} in each of {len(steps)} steps" if passed else f"expected {expected or 'a known op'}"
        )
        result.check(f"launches of {op}", passed, "; ".join([detail, *wrong[:2]]))
        if op in EXPECTED_COLLECTIVES:
            wanted = EXPECTED_COLLECTIVES[op](options.sizes, options.tp)
            wrong = [
                f"{where}: {counts['collectives']}"
                for where, counts in steps
                if counts["collectives"] != wanted
            ]
            detail = f"{wanted} in each of {len(steps)} steps expected"
            result.check(f"collectives of {op}", not wrong, "; ".join([detail, *wrong[:2]]))
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
        rows += [(kernel, "/".join(map(str, seen[kernel])), str(n)) for kernel, n in expected.items()]
    result.table += ["", *columns(rows)]


def _by_hand(result: Result, world: World, options: Options) -> None:
    """The model made by hand calls the public classes alone, whichever ops are installed."""
    rows: list[tuple[str, ...]] = [("made by hand of", "calls a step", "expected", "Megatron's own entries")]
    for op, name in PUBLIC_CLASSES.items():
        expected = EXPECTED_CALLS[op](options.sizes)
        steps = list(world.steps(op, RUNS_BY_HAND))
        calls = sorted({counts["entries"].get(name, {}).get("kernel", 0) for _, counts in steps})
        others = sorted(
            {
                entry
                for _, counts in steps
                for entry, calls in counts["entries"].items()
                if entry != name and any(calls.values())
            }
        )
        rows.append((name, "/".join(map(str, calls)), str(expected), ", ".join(others) or "none"))
        detail = (
            f"{name} {expected} times" if calls == [expected] else f"{name} {calls}, not {expected} times"
        )
        detail += f" in each of {len(steps)} steps; Megatron's own: {', '.join(others) or 'never'}"
        result.check(f"calls of {op}, {BY_HAND}", calls == [expected] and not others, detail)
    mlp = ", ".join(world.run(BY_HAND)["mlp"])
    own = "" if mlp == MEGATRONS_MLP else " (an MLP's spec has no activation in this release)"
    result.table += ["", *columns(rows), f"{PUBLIC_CLASSES['swiglu']} is the activation of {mlp}{own}"]


def _off(result: Result, world: World, ops: Sequence[str], options: Options) -> None:
    """Under ``LIGER_MEGATRON=0`` the same tree does upstream's work, and counts that it does."""
    rows: list[tuple[str, ...]] = [
        (f"{SWITCH}=0", "launches a step", "calls on the kernel", "handed to upstream")
    ]
    for op in ops:
        steps = [counts for _, counts in world.steps(op)]
        entries = [list(counts["entries"].values()) for counts in steps]
        launches = {sum(counts["launches"].values()) + counts["collectives"] for counts in steps}
        served = {sum(calls["kernel"] + len(calls["upstream"]) for calls in step) for step in entries}
        handed = {sum(calls["off"] for calls in step) for step in entries}
        # A norm's class hands over when it is built, before the first step: the slots show it.
        wanted = 0 if op == "norms" else EXPECTED_CALLS[op](options.sizes)
        rows.append((op, *("/".join(map(str, sorted(found))) for found in (launches, served, handed))))
        detail = f"{wanted} calls a step to upstream expected, nothing else, in {len(steps)} steps"
        result.check(f"{SWITCH}=0, {op}", (launches, served, handed) == ({0}, {0}, {wanted}), detail)
    result.table += ["", *world.job_lines[:1], *columns(rows)]
    silent = [op for op in ops if not any(f"{op} off by {SWITCH}" in line for line in world.job_lines)]
    result.check(f"{SWITCH}=0, the job's own line", not silent, f"missing: {silent}" if silent else "says so")
    ours = [
        f"{slot} in {name}"
        for name, run in world.reports[0]["runs"].items()
        for slot, classes in run["norms"].items()
        if not classes or any(found.startswith(OUR_NORMS) for found in classes)
    ]
    result.check(f"{SWITCH}=0, norm slots", not ours, f"not upstream's: {ours}" if ours else "all upstream's")


def _losses(result: Result, worlds: Mapping[str, World]) -> list[float]:
    """All curves side by side; returns how far each step's loss may be off."""
    theirs = {name: worlds["pristine"].run(name)["losses"] for name in (UNFUSED, FUSED, EAGER)}
    ours = {heading: worlds[world].run(run)["losses"] for heading, (world, run, _) in JUDGED.items()}
    first, *others = ours
    header = ["step", f"pristine: {UNFUSED}", FUSED, EAGER, f"overlaid: {first}", *others]
    rows: list[tuple[str, ...]] = [(*header, f"off by: {first}", *others, "band", "limit")]
    limits, band, off = [], 0.0, set()
    for step, reference in enumerate(theirs[UNFUSED]):
        spread = [abs(theirs[name][step] - reference) for name in (FUSED, EAGER)]
        band = max(band, *spread)
        limits.append(max(band, LOSS_FLOOR * abs(reference)))
        distances = [abs(ours[name][step] - theirs[like][step]) for name, (_, _, like) in JUDGED.items()]
        # Written so that a NaN counts as off.
        off |= {f"{name} at step {step + 1}" for name, d in zip(ours, distances) if not d <= limits[-1]}
        losses = [f"{curve[step]:.6f}" for curve in (*theirs.values(), *ours.values())]
        numbers = (f"{d:.2e}" for d in (*distances, max(spread), limits[-1]))
        rows.append((str(step + 1), *losses, *numbers))
    result.table += [
        "",
        *columns(rows),
        "eager: bias_activation_fusion off. band: the pristine curves' largest distance at that step.",
        f"limit: the largest band so far, at least {LOSS_FLOOR:.1e} of the loss (rounding of bf16 logits).",
    ]
    result.check("losses", not off, f"off: {', '.join(sorted(off))}" if off else "all steps within the limit")
    for name, losses in ours.items():
        result.check(f"learning, {name}", losses[-1] < losses[0], f"{losses[0]:.4f} -> {losses[-1]:.4f}")
    return limits


def _gradients(result: Result, worlds: Mapping[str, World]) -> None:
    """Step 1's gradients, by parameter: the largest difference over the largest value."""

    def worst(world: World, run: str) -> dict[str, float]:
        tables = [report["runs"][run]["gradients"] for report in world.reports]
        return {name: _largest([table[name] for table in tables]) for name in tables[0]}

    theirs = {name: worst(worlds["pristine"], name) for name in (FUSED, EAGER)}
    ours = {heading: worst(worlds[world], run) for heading, (world, run, _) in JUDGED.items()}
    band = max(value for table in theirs.values() for value in table.values())
    limit = max(GRADIENT_FACTOR * band, GRADIENT_FLOOR)
    first, *others = ours
    rows: list[tuple[str, ...]] = [
        ("gradient at step 1", f"pristine: {FUSED}", EAGER, f"overlaid: {first}", *others)
    ]
    rows += [(name, *(f"{t[name]:.1e}" for t in (*theirs.values(), *ours.values()))) for name in ours[first]]
    result.table += [
        "",
        *columns(rows),
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


def _crossings(
    result: Result, worlds: Mapping[str, World], limits: Sequence[float], options: Options
) -> None:
    """Checkpoints of one run, loaded by another: the same bytes, the losses of an uninterrupted run."""
    rows: list[tuple[str, ...]] = [("checkpoint", "step", "resumed", "uninterrupted", "off by", "limit")]
    for crossing in CROSSINGS:
        saver, run = crossing.saver
        loader = worlds[crossing.loader]
        uninterrupted = worlds[crossing.like[0]].run(crossing.like[1])["losses"]
        resumed = loader.run(crossing.name)
        same = all(
            a["runs"][run]["saved"] == b["runs"][crossing.name]["loaded"]
            for a, b in zip(worlds[saver].reports, loader.reports)
        )
        off = []
        for step, loss in enumerate(resumed["losses"], resumed["first_step"]):
            difference = abs(loss - uninterrupted[step])
            if not difference <= limits[step]:
                off.append(step + 1)
            numbers = (f"{loss:.6f}", f"{uninterrupted[step]:.6f}")
            distance = (f"{difference:.2e}", f"{limits[step]:.2e}")
            rows.append((crossing.name, str(step + 1), *numbers, *distance))
        steps = (resumed["first_step"], resumed["first_step"] + len(resumed["losses"]))
        complete = steps == (options.save_after, options.iterations)
        detail = "keys and bytes of model and optimizer " + ("equal" if same else "DIFFER")
        detail += f", losses off at steps {off}" if off else ", losses within the limit"
        detail += "" if complete else f", but of steps {steps[0] + 1} to {steps[1]}"
        result.check(f"checkpoint {crossing.name}", same and complete and not off, detail)
    result.table += ["", *columns(rows), ""]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
