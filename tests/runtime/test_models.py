# SPDX-License-Identifier: Apache-2.0
"""Models wider than a plain GPT, forward and backward: pristine against overlaid against float64.

The truth is the pristine tree itself on CPU, with float64 wherever it asks for float32. A loss or gradient
may be as far from it as the pristine tree's own in the same dtype: see :func:`too_far`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.workers.entries import ENTRIES
from scripts.workers.spawn import run_world

PROGRAM = str(Path(__file__).with_name("models_worker.py"))
DTYPES = ("float32", "bfloat16")
# Of weights and data. With these no token is so near to two experts that rounding decides (asserted), and
# with two of them there are experts without a token.
SEEDS = (100, 294, 238, 265)

# A distance is measured on few independent roundings, at the worst on one of each of the four seeds (the two
# numbers of the smallest gradient, BERT's binary_head.bias, are each other's negative). Two measurements of
# the same accuracy are then less than 3 times apart in 97 % of cases (F(4, 4) < 9). It was 1.8 there, on CPU.
EACH = 3.0
# The geometric mean over a model's tensors. All have the roundings of the layers above in them, so that it is
# not exactly 1 either: on CPU upstream's eager activation came to 0.88 to 1.02 of its fused one, ours to 0.92
# to 1.15.
TOGETHER = 1.25

CROSS_ENTROPY = "vocab_parallel_cross_entropy"
OUR_NORMS = "megatron.core.liger.norms."
TORCH_NORMS = "torch.nn.modules.normalization."
Run = dict[str, Any]
Trees = tuple[Path, Path]  # pristine and overlaid
Found = dict[str, list[dict[str, Any]]]  # by the run's name and rank


def run_job(
    folder: Path, tree: Path, device: str, runs: Sequence[Run], *, tp: int = 1, ranks: int = 1, wanted: str
) -> Found:
    """What every run found on each of ``ranks``; ``wanted``: whose the entries are, ours or upstream's."""
    plan = {"runs": runs, "tp": tp}
    # On a GPU too upstream's functions run uncompiled: there are a hundred shapes of them.
    extra = {"TORCHDYNAMO_DISABLE": "1"} | ({"LIGER_MEGATRON_STRICT": "1"} if wanted == "ours" else {})
    reports = run_world(
        PROGRAM, plan, tree=tree, folder=folder, ranks=ranks, device=device, timeout=300, extra=extra
    )
    for report, entry in itertools.product(reports, ENTRIES):
        origins = report["entries"][entry.name]
        assert set(origins.values()) <= {wanted, "absent"}, f"{entry.name}: {origins}"
    return {
        run["name"]: [torch.load(folder / f"{run['name']}-rank{rank}.pt") for rank in range(ranks)]
        for run in runs
    }


def find(
    trees: Trees,
    folder: Path,
    device: str,
    compared: Sequence[Run],
    truth: Sequence[Run],
    more: Sequence[Run] = (),
    *,
    tp: int = 1,
    ranks: int = 1,
) -> tuple[Found, Found, Found]:
    """What the runs found on the overlaid tree, which has ``more`` of them, and on the pristine one.

    Then the truth, on CPU and on as many ranks as are tensor-parallel.
    """
    pristine, overlaid = trees
    # Without a wait where there are cores enough: the ranks of one world wait for each other already.
    with ThreadPoolExecutor(1 if tp > 1 else 2) as pool:

        def start(name: str, tree: Path, device: str, runs: Sequence[Run], ranks: int) -> Future[Found]:
            wanted = "ours" if tree == overlaid else "upstream"
            return pool.submit(run_job, folder / name, tree, device, runs, tp=tp, ranks=ranks, wanted=wanted)

        ours = start("overlaid", overlaid, device, [*compared, *more], ranks)
        if device == "cpu" and ranks == tp:
            theirs = right = start("pristine", pristine, device, [*compared, *truth], ranks)
        else:
            theirs = start("pristine", pristine, device, compared, ranks)
            right = start("truth", pristine, "cpu", truth, tp)
        return ours.result(), theirs.result(), right.result()


def runs(models: Sequence[str], dtypes: Sequence[str], **choice: Any) -> list[Run]:
    return [
        {"name": f"{model} {dtype} {seed}", "model": model, "dtype": dtype, "seed": seed, **choice}
        for model, dtype, seed in itertools.product(models, dtypes, SEEDS)
    ]


def where(ranks: int) -> str:
    """On GPUs if there are as many, else on CPU in Triton's interpreter."""
    return "cuda" if torch.cuda.device_count() >= ranks else "cpu"


def tensors(found: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of all that is compared."""
    for number, losses in enumerate(found["losses"]):
        yield f"loss {number}", losses
    for name, gradient in found["gradients"].items():
        yield name, gradient
    for name, parameter in found.get("stepped", {}).items():
        yield f"{name} after the step", parameter


def distances(found: Sequence[Mapping[str, Any]], truth: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The root mean square, over seeds, of each tensor's relative distance from the truth; 0 if that is 0."""
    squares: dict[str, list[float]] = {}
    for one, true in zip(found, truth, strict=True):
        for (name, value), (right_name, right) in zip(tensors(one), tensors(true), strict=True):
            assert name == right_name
            assert value.shape == right.shape, name
            scale = right.double().norm().item()
            far = (value.double() - right.double()).norm().item()
            assert scale or not far, f"{name} is not zero"
            squares.setdefault(name, []).append((far / scale) ** 2 if scale else 0.0)
    return {name: math.sqrt(sum(values) / len(values)) for name, values in squares.items()}


def too_far(
    ours: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
    truth: Sequence[Mapping[str, Any]],
) -> list[str]:
    """What is further from the truth than upstream's own, by EACH of it or, all together, by TOGETHER.

    Args:
        ours, theirs, truth: what a run found, by seed.
    """
    right, band = distances(ours, truth), distances(theirs, truth)
    assert right.keys() == band.keys()
    # Written so that a NaN is found.
    found = [
        f"{name}: {right[name]:.1e}, upstream {band[name]:.1e}"
        for name in band
        if not right[name] <= EACH * band[name]
    ]
    logarithms = [math.log(max(right[name] / band[name], 1e-9)) for name in band if band[name]]
    mean = math.exp(sum(logarithms) / len(logarithms))
    return found if mean <= TOGETHER else [*found, f"all together {mean:.2f} times upstream's distance"]


def routes(found: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Which token went to which expert, of all ranks' tokens."""
    return [torch.cat(parts) for parts in zip(*(rank["routes"] for rank in found), strict=True)]


# By model: norms, calls of bias_swiglu_impl and of weighted_bias_swiglu_impl, losses. A layer has a norm
# before attention and MLP, for query and key (or for what they are made from), and in T5's decoder before the
# cross attention; then there are the last one, BERT's head's, and three of each further token.
CALLS = {
    "t5": (2 * 2 + 1 + 2 * 3 + 1, 4, 0, 1),
    "bert": (2 * 2 + 1 + 1, 0, 0, 1),
    "fsdp2": (2 * 4 + 1, 2, 0, 1),
    "megatron-fsdp": (2 * 4 + 1, 2, 0, 1),
    "mla": (2 * 4 + 1, 2, 0, 1),
    "mtp": (2 * 4 + 1 + 2 * (4 + 3), 4, 0, 3),
    "moe": (2 * 4 + 1, 2, 8, 1),
    "moe overlapped": (2 * 4 + 1, 2, 8, 1),
}


def assert_served(
    model: str, found: Mapping[str, Any], *, entry: str = CROSS_ENTROPY, empty: int, tp: int = 1
) -> None:
    """The kernels served every call, and launched for all but ``empty`` experts without a token."""
    norms, plain, weighted, losses = CALLS[model]
    counters = found["counters"]
    calls = {
        name: counts
        for op in counters.values()
        for name, counts in op["entries"].items()
        if any(counts.values())
    }
    expected = {
        "WrappedTorchNorm": norms,
        "bias_swiglu_impl": plain,
        "weighted_bias_swiglu_impl": weighted,
        entry: losses,
    }
    assert calls == {name: {"kernel": n, "off": 0, "upstream": {}} for name, n in expected.items() if n}
    swiglu = plain + weighted - empty
    launches = {
        **{f"norm_{kernel}": norms for kernel in ("forward", "backward", "reduce")},
        **{f"swiglu_{kernel}": swiglu for kernel in ("forward", "backward")},
        "swiglu_bias_reduce": swiglu if model == "t5" else 0,
        **{f"cross_entropy_{kernel}": losses for kernel in ("forward", "backward")},
        "cross_entropy_combine": losses if tp > 1 else 0,
    }
    launched = {name: n for op in counters.values() for name, n in op["launches"].items()}
    assert launched == {name: n for name, n in launches.items() if n}
    assert counters["cross_entropy"]["collectives"] == (losses if tp > 1 else 0)


def assert_norms(model: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """In each place the same norm, ours in the one and torch's in the other."""
    kind = "LayerNorm" if model in ("t5", "bert") else "RMSNorm"
    assert len(theirs["norms"]) == CALLS[model][0]
    assert theirs["norms"] == dict.fromkeys(theirs["norms"], f"{TORCH_NORMS}{kind}")
    assert ours["norms"] == dict.fromkeys(theirs["norms"], f"{OUR_NORMS}{kind}")


def empty_experts(routes: Sequence[torch.Tensor]) -> int:
    return sum(int((route.sum(0) == 0).sum()) for route in routes)


def compare(models: Sequence[str], ours: Found, theirs: Found, truth: Found, *, tp: int = 1) -> None:
    """Every run by itself, and each model in each dtype over all seeds."""
    failures = []
    for model, dtype in itertools.product(models, DTYPES):
        samples = []
        for seed in SEEDS:
            mine, other = ours[f"{model} {dtype} {seed}"], theirs[f"{model} {dtype} {seed}"]
            true = truth[f"{model} float64 {seed}"]
            right = routes(true)
            for ranks in (mine, other):
                assert all(map(torch.equal, routes(ranks), right)), f"{model} {dtype} {seed}: other experts"
                for rank, (name, gradient) in itertools.product(ranks[1:], ranks[0]["gradients"].items()):
                    assert torch.equal(rank["gradients"][name], gradient), f"{name} differs between ranks"
            for rank in mine:
                assert_served(model, rank, empty=empty_experts(right), tp=tp)
                assert_norms(model, rank, other[0])
            samples.append((mine[0], other[0], true[0]))
        failures += [f"{model}, {dtype}: {line}" for line in too_far(*zip(*samples))]
    assert not failures, "\n".join(failures)


@pytest.fixture
def trees(pristine_tree: Path, overlaid_tree: Path) -> Trees:
    return pristine_tree, overlaid_tree


@pytest.mark.parametrize("models", [("t5", "bert"), ("mla", "mtp"), ("moe", "moe overlapped")], ids=", ".join)
def test_models(trees: Trees, tmp_path: Path, models: Sequence[str]) -> None:
    """On one rank. The fused cross-entropy, and the ops in place, then give the same bits.

    On a GPU upstream's experts and embeddings may add up gradients in any order: there, the same within a
    unit of bfloat16.
    """
    seed = SEEDS[0]
    again = {"fused": {"fused_cross_entropy": True}, "in place": {"in_place": True}}
    more = [
        {"name": f"{model} {kind}", "model": model, "dtype": "bfloat16", "seed": seed, **choice}
        for model, (kind, choice) in itertools.product(models, again.items())
    ]
    found = find(trees, tmp_path, where(1), runs(models, DTYPES), runs(models, ["float64"]), more)
    compare(models, *found)
    ours, _, truth = found
    for model, kind in itertools.product(models, again):
        (one,), (wanted,) = ours[f"{model} {kind}"], ours[f"{model} bfloat16 {seed}"]
        entry = "fused_vocab_parallel_cross_entropy" if kind == "fused" else CROSS_ENTROPY
        assert_served(model, one, entry=entry, empty=empty_experts(one["routes"]))
        limit = 2.0**-8 if where(1) == "cuda" else 0.0
        for name, far in distances([one], [wanted]).items():
            assert far <= limit, f"{model}, {kind}: {name}"
    if "moe" in models:  # both kinds of seeds
        assert {bool(empty_experts(routes(truth[f"moe float64 {seed}"]))) for seed in SEEDS} == {True, False}


def test_two_tensor_parallel_ranks(trees: Trees, tmp_path: Path) -> None:
    """With sequence parallelism, for which the pristine tree is given torch's norms by hand.

    The truth is of two ranks, too: upstream's local MLA drops, at more than one, what the other ranks' heads
    have to say of the key's rotary part.
    """
    models = ("mla", "moe")
    found = find(trees, tmp_path, where(2), runs(models, DTYPES), runs(models, ["float64"]), tp=2, ranks=2)
    compare(models, *found, tp=2)


def test_fully_sharded(trees: Trees, tmp_path: Path) -> None:
    """PyTorch's FSDP2 and Megatron's: two ranks with a batch each, a step of SGD, and the loss after it.

    The truth has both batches on one rank that shares nothing out.
    """
    ranks = 1 if torch.cuda.device_count() == 1 else 2
    kinds = ("fsdp2", "megatron-fsdp")
    compared = [{**run, "model": "gpt", "wrap": run["model"], "step": True} for run in runs(kinds, DTYPES)]
    whole = runs(["gpt"], ["float64"], batches=ranks, step=True)
    ours, theirs, found = find(trees, tmp_path, where(ranks), compared, whole, ranks=ranks)
    truth = {}
    for kind, (name, (true,)) in itertools.product(kinds, found.items()):
        first, *_, stepped = true["losses"]  # of the batch that rank 0 has
        truth[name.replace("gpt", kind)] = [{**true, "losses": [first, stepped]}]
    compare(kinds, ours, theirs, truth)


def test_the_comparison_can_fail() -> None:
    """By one tensor a little beside, by all of them a very little, by one that is not a number."""
    torch.manual_seed(1)
    truth = [
        {
            "losses": [torch.randn(2, 8).double()],
            "gradients": {f"{n}": torch.randn(64).double() for n in range(9)},
        }
        for _ in SEEDS
    ]

    def beside(size: float) -> list[dict[str, Any]]:
        def off(value: torch.Tensor) -> torch.Tensor:
            return value + size * value.norm() / value.numel() ** 0.5 * torch.randn_like(value)

        return [
            {"losses": [off(one["losses"][0])], "gradients": {n: off(g) for n, g in one["gradients"].items()}}
            for one in truth
        ]

    theirs = beside(1e-6)
    assert too_far(beside(1e-6), theirs, truth) == []
    assert too_far(beside(1e-7), theirs, truth) == []
    assert [line.split()[0] for line in too_far(beside(1.5e-6), theirs, truth)] == ["all"]
    ours = beside(1e-6)
    ours[2]["gradients"]["4"] *= 1 + 1e-5
    assert [line.split(":")[0] for line in too_far(ours, theirs, truth)] == ["4"]
    ours[2]["gradients"]["4"][3] = math.nan
    assert too_far(ours, theirs, truth)[0].startswith("4: nan")
