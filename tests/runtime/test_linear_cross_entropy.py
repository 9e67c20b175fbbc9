# SPDX-License-Identifier: Apache-2.0
"""``linear_cross_entropy`` in a model: losses and gradients against the plain way and float64, in every
release that has it; what it leaves to upstream, and that it is off unless asked for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.apply import build_tree
from scripts.errors import TreeError
from scripts.manifest import load
from scripts.overlay import load_overlay
from scripts.workers.parity_compare import STEP_FACTOR, ULPS
from scripts.workers.spawn import run_world

from .conftest import KERNELS, Python
from .test_models import DTYPES, SEEDS, tensors, too_far, where

PROGRAM = str(Path(__file__).with_name("linear_cross_entropy_rank.py"))
NAME = "linear_cross_entropy"
# Beside it the norms alone, which upstream has not got for sequence parallelism: activation and loss are its.
ON = {"LIGER_MEGATRON": f"norms,{NAME}", "TORCHDYNAMO_DISABLE": "1"}
MANIFEST = load()
CALL_SITE = MANIFEST.files["megatron/core/models/gpt/gpt_model.py"]
RELEASES = [v for variant in CALL_SITE.variants if variant.has_entries for v in variant.releases]

Found = dict[str, list[dict[str, Any]]]


def run_job(
    tree: Path, folder: Path, runs: Sequence[Mapping[str, Any]], *, tp: int = 1, device: str, **more: str
) -> Found:
    """What each run found, by name and rank."""
    plan = {"tp": tp, "runs": runs, "sizes": "step" if runs[0].get("simple") else ""}
    run_world(
        PROGRAM, plan, tree=tree, folder=folder, ranks=tp, device=device, timeout=200, extra={**ON, **more}
    )
    return {
        run["name"]: [torch.load(folder / f"{run['name']}-rank{rank}.pt") for rank in range(tp)]
        for run in runs
    }


def runs_of(kind: str, seeds: Sequence[int], dtypes: Sequence[str], **choice: Any) -> list[dict[str, Any]]:
    """With the op, without it, and without it in float64."""
    ways = [*itertools.product(("on", "off"), dtypes), ("off", "float64")]
    return [
        {"name": f"{kind} {way} {dtype} {seed}", "dtype": dtype, "seed": seed, **choice, "on": way == "on"}
        for (way, dtype), seed in itertools.product(ways, seeds)
    ]


def assert_served(found: Mapping[str, Any], heads: int, tp: int) -> None:
    counters = found["counters"]
    calls = {name: n["kernel"] for name, n in counters[NAME]["entries"].items()}
    assert calls == {"GPTModel": 1, "MTP": heads}
    assert not any(n["upstream"] or n["off"] for n in counters[NAME]["entries"].values())
    assert not any(any(n.values()) for n in counters["cross_entropy"]["entries"].values())
    launches = counters[NAME]["launches"]
    assert launches[f"{NAME}_forward"] == launches[f"{NAME}_backward"] >= 1 + heads
    assert not counters["cross_entropy"]["launches"]
    assert bool(counters[NAME]["collectives"]) == (tp > 1)


KINDS = {
    "untied": {},
    "tied": {"tied": True},
    "fused": {"fused": True},
    "fused and tied": {"fused": True, "tied": True},
    "mtp": {"mtp": True, "tied": True},
    "tiles": {"tiles": True},
}


def compare(found: Found, kind: str, heads: int = 0, tp: int = 1) -> list[str]:
    problems = []
    for dtype in DTYPES:
        ways: dict[str, list[dict[str, Any]]] = {"on": [], "off": [], "truth": []}
        for seed, way in itertools.product(SEEDS, ways):
            name = f"{kind} off float64 {seed}" if way == "truth" else f"{kind} {way} {dtype} {seed}"
            ways[way].append(found[name][0])
            for rank in found[name]:
                if way == "on":
                    assert_served(rank, heads, tp)
                else:
                    counters = rank["counters"][NAME]
                    assert not any(any(n.values()) for n in counters["entries"].values())
                    assert not counters["launches"]
                assert torch.equal(rank["losses"][0], found[name][0]["losses"][0])
        assert all(a["layout"] == b["layout"] for a, b in zip(ways["on"], ways["off"]))
        problems += [f"{kind}, {dtype}: {line}" for line in too_far(ways["on"], ways["off"], ways["truth"])]
    return problems


def test_a_model_with_it_is_as_near_to_float64(overlaid_tree: Path, tmp_path: Path) -> None:
    device = where(1)
    small = {"LIGER_MEGATRON_LINEAR_CE_MB": "0.006"}
    found = {}
    for kinds, more in ((("tiles",), small), (tuple(k for k in KINDS if k != "tiles"), {})):
        runs = [run for kind in kinds for run in runs_of(kind, SEEDS, DTYPES, **KINDS[kind])]
        found |= run_job(overlaid_tree, tmp_path / kinds[0], runs, device=device, **more)
    problems = [line for kind in KINDS for line in compare(found, kind, 2 if kind == "mtp" else 0)]
    assert not problems, "\n".join(problems)
    launched = found[f"tiles on float32 {SEEDS[0]}"][0]["counters"][NAME]["launches"]
    assert launched[f"{NAME}_forward"] > 1


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_tensor_parallel_ranks(overlaid_tree: Path, tmp_path: Path, sequence_parallel: bool) -> None:
    choice = {"sequence_parallel": sequence_parallel}
    runs = [
        run
        for kind in ("untied", "mtp")
        for run in runs_of(kind, SEEDS, DTYPES, **KINDS[kind], **choice)
    ]
    found = run_job(overlaid_tree, tmp_path, runs, tp=2, device=where(2))
    problems = [line for kind in ("untied", "mtp") for line in compare(found, kind, 2 * (kind == "mtp"), 2)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("version", RELEASES)
def test_a_release_holds(version: str, tmp_path: Path) -> None:
    tree = build_tree(MANIFEST.releases[version], None, tmp_path / "tree", overlaid=True, nearest=True)
    scales = tuple(map(int, version.split("."))) >= (0, 17)
    kinds: dict[str, dict[str, Any]] = {"plain": {}} | ({"mup": {"mup": True}} if scales else {})
    runs = [
        run
        for kind, choice in kinds.items()
        for run in runs_of(kind, SEEDS[:1], ["float32"], simple=True, **choice)
    ]
    found = run_job(tree, tmp_path / "work", runs, device=where(1))
    for kind in kinds:
        ours, theirs = (found[f"{kind} {way} float32 {SEEDS[0]}"][0] for way in ("on", "off"))
        truth = found[f"{kind} off float64 {SEEDS[0]}"][0]
        assert_served(ours, 0, 1)
        errors = [
            {
                name: ((value.double() - right).abs().max() / right.abs().max()).item()
                for (name, value), (_, right) in zip(tensors(one), tensors(truth), strict=True)
            }
            for one in (ours, theirs)
        ]
        limit = STEP_FACTOR * max(errors[1].values()) + ULPS
        assert all(error <= limit for error in errors[0].values()), (kind, errors, limit)
    if scales:
        losses = [found[f"{kind} off float64 {SEEDS[0]}"][0]["losses"][0] for kind in kinds]
        assert not torch.allclose(*losses)
