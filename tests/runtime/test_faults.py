# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in training and what saves memory in it: as on the pristine tree.

Activations that are recomputed, offloaded or watched, gradients that are deferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.workers.spawn import run_world

from .test_models import SEEDS, distances, too_far, where

PROGRAM = str(Path(__file__).with_name("faults_worker.py"))
# The models whose results differ, in float64 too.
MODELS = ("plain", "distilled, squares", "distilled, divergence", "experts")
# The ways that change nothing about a result, and by way, how often they run the forward of a norm and of a
# SwiGLU again, in a step of two micro-batches: a layer has four norms and one SwiGLU, or one of all routed
# experts and one of the shared one.
SAME = {
    "full, uniform": ("plain", 2 * 8, 2 * 2),
    "full, block": ("plain", 2 * 4, 2 * 1),
    "core_attn": ("plain", 0, 0),
    "layernorm": ("plain", 2 * 4, 0),
    "mlp": ("plain", 0, 2 * 2),
    "saved on the host": ("plain", 0, 0),
    "deterministic": ("plain", 0, 0),
    "accumulated": ("plain", 0, 0),
    "deferred": ("plain", 0, 0),
    "distilled, squares after": ("distilled, squares", 0, 0),
    "experts, full": ("experts", 2 * 8, 2 * 3),
    "experts, moe_act": ("experts", 0, 2 * 1),
    "experts, layernorm": ("experts", 2 * 4, 0),
    "experts, moe": ("experts", 0, 2 * 2),
    "experts, shared_experts": ("experts", 0, 2 * 1),
}
Run = dict[str, Any]
Found = dict[str, dict[str, Any]]  # by the run's name


def runs(ways: Sequence[str], dtype: str, seeds: Sequence[int], **choice: Any) -> list[Run]:
    suffix = "".join(f" {name}" for name in choice)
    return [
        {"name": f"{way} {dtype} {seed}{suffix}", "way": way, "dtype": dtype, "seed": seed, **choice}
        for way in ways
        for seed in seeds
    ]


def run_job(folder: Path, tree: Path, device: str, plan: Sequence[Run]) -> Found:
    # The last of these is what PyTorch asks for before cuBLAS may be deterministic.
    extra = {
        "TORCHDYNAMO_DISABLE": "1",
        "LIGER_MEGATRON_STRICT": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    run_world(PROGRAM, {"runs": plan}, tree=tree, folder=folder, device=device, timeout=300, extra=extra)
    return {run["name"]: torch.load(folder / f"{run['name']}-rank0.pt") for run in plan}


@pytest.fixture(scope="module")
def found(
    pristine_tree: Path, overlaid_tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Found, Found, Found]:
    """On the overlaid tree, on the pristine one, and there in float64; each way once, each model often."""
    folder = tmp_path_factory.mktemp("faults")
    once = SEEDS[:1]
    compared = runs(MODELS, "bfloat16", SEEDS) + runs(list(SAME), "bfloat16", once)
    compared += runs(["deterministic"], "bfloat16", once, again=True)
    more = runs([*MODELS, *SAME], "bfloat16", once, in_place=True)
    truth = runs(MODELS, "float64", SEEDS)
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(run_job, folder / "ours", overlaid_tree, where(1), compared + more)
        if where(1) == "cpu":
            theirs = right = pool.submit(run_job, folder / "theirs", pristine_tree, "cpu", compared + truth)
        else:
            theirs = pool.submit(run_job, folder / "theirs", pristine_tree, "cuda", compared)
            right = pool.submit(run_job, folder / "truth", pristine_tree, "cpu", truth)
        return ours.result(), theirs.result(), right.result()


@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients(found: tuple[Found, Found, Found], model: str) -> None:
    """Of a step, as far from float64 as upstream's: by the bound of the other models' tests."""
    ours, theirs, truth = found
    samples = [[each[f"{model} bfloat16 {seed}"] for seed in SEEDS] for each in (ours, theirs)]
    right = [truth[f"{model} float64 {seed}"] for seed in SEEDS]
    assert len(right[0]["losses"]) == 2
    failures = too_far(*samples, right)
    assert not failures, "\n".join(failures)


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """All losses and gradients: to the bit, but where a GPU may add them up in any order."""
    assert one["error"] is None
    limit = 2.0**-8 if where(1) == "cuda" else 0.0
    for name, far in distances([one], [other]).items():
        assert far <= limit, f"{name}: {far:.1e}"


@pytest.mark.parametrize("way", SAME)
def test_what_changes_no_result(found: tuple[Found, Found, Found], way: str) -> None:
    """Recomputed, saved elsewhere, accumulated later: the losses and gradients of the plain step."""
    model, norms, swiglus = SAME[way]
    for each in found[:2]:
        assert_same(each[f"{way} bfloat16 {SEEDS[0]}"], each[f"{model} bfloat16 {SEEDS[0]}"])
    counters = found[0][f"{way} bfloat16 {SEEDS[0]}"]["counters"]
    launched = {name: n for op in counters.values() for name, n in op["launches"].items()}
    once = 2 * 9, 2 * (3 if model == "experts" else 2)
    assert launched == {
        "norm_forward": once[0] + norms,
        **dict.fromkeys(("norm_backward", "norm_reduce"), once[0]),
        "swiglu_forward": once[1] + swiglus,
        "swiglu_backward": once[1],
        **dict.fromkeys(("cross_entropy_forward", "cross_entropy_backward"), 2),
    }


def test_deterministic_algorithms(found: tuple[Found, Found, Found]) -> None:
    """Nothing raises under them, and two runs are equal to the bit, on a GPU too."""
    one, again = (found[0][f"deterministic bfloat16 {SEEDS[0]}{which}"] for which in ("", " again"))
    assert one["error"] is again["error"] is None
    assert max(distances([again], [one]).values()) == 0


@pytest.mark.parametrize("way", [*MODELS, *SAME])
def test_in_place(found: tuple[Found, Found, Found], way: str) -> None:
    """The same gradients; or autograd's error, where a term of a hook's own reads the logits afterwards."""
    ours = found[0]
    one = ours[f"{way} bfloat16 {SEEDS[0]} in_place"]
    if way == "distilled, squares":
        assert "modified by an inplace operation" in one["error"]
        assert one["gradients"] is None
    else:
        assert_same(one, ours[f"{way} bfloat16 {SEEDS[0]}"])
