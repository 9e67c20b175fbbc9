# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy's entries at tensor parallel two: on two GPUs, else two gloo processes in the interpreter."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from liger_kernels.cross_entropy import cross_entropy_reference

PROGRAM = Path(__file__).with_name("cross_entropy_rank.py")
Call = tuple[str, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]


def run_ranks(
    folder: Path,
    calls: Sequence[Call],
    trees: Sequence[Path],
    environs: Sequence[Mapping[str, str]],
    timeout: float | None = None,
    answers: Sequence[int] | None = None,
    dies: int | None = None,
) -> list[list[dict[str, Any]]]:
    """What each of ``answers`` (by default all) found; the others are ended when these are done.

    ``dies`` is a rank that ends inside its first collective.
    """
    torch.save({"calls": list(calls), "timeout": timeout, "dies": dies}, folder / "plan")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LIGER_")}
    kept |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    if torch.cuda.device_count() < len(trees):
        kept |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(len(trees)), str(folder)],
            env={**kept, "PYTHONPATH": str(tree), **environ},
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"errors{rank}").open("w"),
        )
        for rank, (tree, environ) in enumerate(zip(trees, environs, strict=True))
    ]
    wanted = range(len(trees)) if answers is None else answers
    deadline = time.monotonic() + 110
    try:
        for rank in wanted:
            code = processes[rank].wait(max(deadline - time.monotonic(), 1))
            assert code == 0, (folder / f"errors{rank}").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"result{rank}") for rank in wanted]


def random_call(entry: str, columns: int, dtype: torch.dtype, **options: Any) -> Call:
    """Labels on either rank, on their border, beyond the vocabulary and negative."""
    logits = (torch.randn(4, 2, 2 * columns) * 3).to(dtype)
    target = torch.randint(0, 2 * columns, (4, 2))
    target[0], target[1] = torch.tensor([columns - 1, columns]), torch.tensor([2 * columns, -100])
    return entry, logits, target, torch.randn(4, 2), options


def all_calls() -> dict[str, Call]:
    torch.manual_seed(3)
    one = torch.ones(1, 1)
    known = (torch.arange(8.0).view(1, 1, 8), torch.tensor([[2]]), one)
    found: dict[str, Call] = {"known value": ("unfused", *known, {"label_smoothing": 0.1})}
    for columns in (1, 5, 1025):
        found[f"fused, {columns}"] = random_call("fused", columns, torch.float32)
        found[f"unfused, {columns}"] = random_call("unfused", columns, torch.bfloat16)
        found[f"smoothed, {columns}"] = random_call("unfused", columns, torch.float32, label_smoothing=0.2)
    found["fused, 18992"] = random_call("fused", 18992, torch.bfloat16)
    found["module"] = random_call("module", 5, torch.float32, label_smoothing=0.2)
    found["module, default group"] = random_call("module without group", 5, torch.float32)
    found["module, pytorch"] = random_call(
        "module", 5, torch.float32, label_smoothing=0.2, label_smoothing_formula="pytorch"
    )
    found["module, partition"] = random_call(
        "module", 5, torch.float32, label_smoothing=0.2, label_smoothing_mode="partition"
    )
    empty = (torch.zeros(0, 1, 8), torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1))
    found["no tokens"] = ("fused", *empty, {})
    return found


CALLS = all_calls()
ENTRY_NAMES = {"fused": "fused_vocab_parallel_cross_entropy", "unfused": "vocab_parallel_cross_entropy"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, overlaid_tree: Path) -> dict[str, list[dict[str, Any]]]:
    """What each rank found, by call."""
    folder = tmp_path_factory.mktemp("ranks")
    strict = {"LIGER_MEGATRON_STRICT": "1"}
    ranks = run_ranks(folder, list(CALLS.values()), [overlaid_tree] * 2, [strict] * 2)
    return {name: list(found) for name, *found in zip(CALLS, *ranks)}


@pytest.mark.parametrize("name", CALLS)
def test_equal_to_float64(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    _, logits, target, dloss, options = CALLS[name]
    columns = logits.shape[-1] // 2
    smoothing = options.get("label_smoothing", 0.0)
    if options.get("label_smoothing_formula") == "pytorch":
        smoothing *= (2 * columns - 1) / (2 * columns)
    for rank, found in enumerate(results[name]):
        assert found["error"] is None
        part = (rank * columns, (rank + 1) * columns)
        exact = logits.double().requires_grad_()
        if target.numel():
            partition = part if options.get("label_smoothing_mode") == "partition" else None
            expected = cross_entropy_reference(exact, target, label_smoothing=smoothing, partition=partition)
            (gradient,) = torch.autograd.grad(expected, exact, dloss.double())
            torch.testing.assert_close(found["loss"], expected.detach().float(), rtol=1e-6, atol=1e-6)
            right = gradient[..., slice(*part)].to(logits.dtype)
            eps = torch.finfo(logits.dtype).eps
            torch.testing.assert_close(found["gradient"], right, rtol=max(eps, 1e-5), atol=1e-7)
        assert found["loss"].shape == target.shape
        assert found["gradient"].shape == (*target.shape, columns)


def test_known_value(results: dict[str, list[dict[str, Any]]]) -> None:
    """On every rank, and as at one."""
    right = [-0.013709, -0.012718, -0.895739, -0.002704, 0.017196, 0.071291, 0.218336, 0.618047]
    for found in results["known value"]:
        assert found["loss"].item() == pytest.approx(5.286911, abs=1e-6)
    together = torch.cat([found["gradient"] for found in results["known value"]], -1).flatten()
    torch.testing.assert_close(together, torch.tensor(right), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CALLS)
def test_the_loss_is_the_same_on_all_ranks(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    first, second = (found["loss"] for found in results[name])
    assert torch.equal(first, second) == ("partition" not in name)


@pytest.mark.parametrize("name", CALLS)
def test_one_collective_to_a_loss(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    """Asking each other takes none, at the first loss or later."""
    entry, _, target, _, _ = CALLS[name]
    once = bool(target.numel())
    for found in results[name]:
        assert found["calls"] == ({"all_gather_into_tensor": 1} if once else {})
        counters = found["counters"]
        assert counters["collectives"] == once
        kernels = ("backward", "combine", "forward")
        assert counters["launches"] == ({f"cross_entropy_{kernel}": 1 for kernel in kernels} if once else {})
        entry_name = ENTRY_NAMES.get(entry, "LigerMegatronCrossEntropy")
        assert counters["entries"][entry_name] == {"kernel": 1, "off": 0, "upstream": {}}


def test_partition_by_setting(tmp_path: Path, overlaid_tree: Path, pristine_tree: Path) -> None:
    """Upstream's scope: each rank's loss is upstream's on that rank."""
    calls = [random_call("unfused", 5, torch.float32, label_smoothing=0.2)]
    calls[0][2].clamp_(0, 9)
    losses = []
    for name, tree in (("ours", overlaid_tree), ("upstream", pristine_tree)):
        (tmp_path / name).mkdir()
        setting = {"LIGER_MEGATRON_LABEL_SMOOTHING": "partition"}
        found = run_ranks(tmp_path / name, calls, [tree] * 2, [setting] * 2)
        losses.append([ranks[0]["loss"] for ranks in found])
    ours, upstream = losses
    assert not torch.equal(*ours)
    torch.testing.assert_close(ours, upstream, rtol=1e-5, atol=1e-5)


def test_off_on_all_ranks(tmp_path: Path, overlaid_tree: Path) -> None:
    calls = [random_call(entry, 5, torch.float32) for entry in ("fused", "unfused")]
    for ranks in run_ranks(tmp_path, calls, [overlaid_tree] * 2, [{"LIGER_MEGATRON": "swiglu"}] * 2):
        for (entry, *_), found, reductions in zip(calls, ranks, (2, 3), strict=True):
            assert found["error"] is None
            assert found["calls"] == {"all_reduce": reductions}
            entry_counts = found["counters"]["entries"][ENTRY_NAMES[entry]]
            assert entry_counts == {"kernel": 0, "off": 1, "upstream": {}}


# Of rank 1, and what every message says of it.
ODD: dict[str, tuple[dict[str, str], str]] = {
    "off": ({"LIGER_MEGATRON": "0"}, "LIGER_MEGATRON=0"),
    "off, Triton's other yes": ({"LIGER_MEGATRON": "0", "TRITON_INTERPRET": "true"}, "LIGER_MEGATRON=0"),
    "another op off": ({"LIGER_MEGATRON": "-swiglu"}, "LIGER_MEGATRON=activations,cross_entropy"),
    "partition": (
        {"LIGER_MEGATRON_LABEL_SMOOTHING": "partition"},
        "LIGER_MEGATRON_LABEL_SMOOTHING=partition",
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_another_setting_on_one_rank(tmp_path: Path, overlaid_tree: Path, kind: str) -> None:
    """An error on both, at the first loss and at each later one, and no collective begun."""
    environ, said = ODD[kind]
    calls = [random_call(entry, 5, torch.float32) for entry in ("fused", "unfused")]
    for ranks in run_ranks(tmp_path, calls, [overlaid_tree] * 2, [{}, environ]):
        for found in ranks:
            assert found["error"].startswith("RankError: cross_entropy: ranks 0, 1 share a loss and do not")
            assert f"rank 1 with {said}" in found["error"] or f", {said}" in found["error"]
            assert found["calls"] == {}


def test_one_rank_without_the_overlay(tmp_path: Path, overlaid_tree: Path, pristine_tree: Path) -> None:
    """That one waits in upstream's all-reduce; the other does not wait with it."""
    calls = [random_call("fused", 5, torch.float32)] * 2
    trees = [overlaid_tree, pristine_tree]
    begun = time.monotonic()
    ((first, again),) = run_ranks(tmp_path, calls, trees, [{}, {}], timeout=3.0, answers=[0])
    assert time.monotonic() - begun < 60
    for found in (first, again):
        assert found["error"].startswith("RankError: cross_entropy: ranks 0, 1 share a loss")
        assert "rank 1 differs" in found["error"]
        assert "rank 1 without an answer within 3 s: without this overlay" in found["error"]
        assert found["calls"] == {}


def test_off_beside_a_rank_without_the_overlay(
    tmp_path: Path, overlaid_tree: Path, pristine_tree: Path
) -> None:
    """Upstream's code on both: nothing to stop."""
    calls = [random_call("fused", 5, torch.float32)]
    environ = {"LIGER_MEGATRON": "0"}
    ranks = run_ranks(tmp_path, calls, [overlaid_tree, pristine_tree], [environ, {}], timeout=2.0)
    first, second = (found[0] for found in ranks)
    assert first["error"] is second["error"] is None
    assert torch.equal(first["loss"], second["loss"])
    assert "ranks 1 do not say what they run" in (tmp_path / "errors0").read_text()


# --- What is said, without processes ---


@pytest.fixture
def ranks(liger: ModuleType) -> ModuleType:
    return importlib.import_module("megatron.core.liger.ranks")


KERNEL = {"overlay": "1", "LIGER_MEGATRON": "cross_entropy", "cross_entropy": "kernel"}
OFF = {**KERNEL, "LIGER_MEGATRON": "0", "cross_entropy": "off by LIGER_MEGATRON"}
LINEAR = {"overlay": "1", "LIGER_MEGATRON": "cross_entropy", "linear_cross_entropy": "kernel"}
OLDER = {"overlay": "0", "LIGER_MEGATRON": "cross_entropy", "cross_entropy": "kernel"}


@pytest.mark.parametrize(
    ("environ", "matters"),
    [
        ({"LIGER_MEGATRON": "0"}, True),
        ({"LIGER_MEGATRON": "-swiglu"}, True),
        ({"LIGER_MEGATRON_STRICT": "1"}, True),
        ({"LIGER_MEGATRON_CHECK_LABELS": "1"}, True),
        ({"LIGER_MEGATRON_LABEL_SMOOTHING": "partition"}, True),
        ({"LIGER_MEGATRON_LABEL_SMOOTHING": "global"}, False),
        ({"LIGER_MEGATRON_IN_PLACE": "cross_entropy"}, False),
    ],
)
def test_what_must_be_the_same(
    ranks: ModuleType, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], matters: bool
) -> None:
    settings = importlib.import_module("megatron.core.liger.settings")
    found = []
    for values in ({}, environ):
        monkeypatch.setattr(ranks, "SETTINGS", settings.read(values))
        found.append(ranks.fingerprint("cross_entropy", "kernel"))
    assert (found[0] != found[1]) == matters
    assert ranks.fingerprint("cross_entropy", "Triton cannot be imported") != found[1]


def test_agreement(ranks: ModuleType) -> None:
    assert ranks.judge({4: KERNEL, 5: dict(KERNEL)}, [4, 5], "cross_entropy") is None
    assert ranks.judge({4: OFF, 5: OFF}, [4, 5], "cross_entropy") is None
    assert ranks.judge({4: OFF}, [4, 5], "cross_entropy") is None


@pytest.mark.parametrize(
    ("said", "odd", "parts"),
    [
        ({0: KERNEL, 1: OFF, 2: KERNEL}, "rank 1 differs", ["ranks 0, 2 with LIGER_MEGATRON=cross_entropy"]),
        ({0: OFF, 1: OFF, 2: KERNEL}, "rank 2 differs", ["rank 2 with", "cross_entropy=kernel"]),
        (
            {0: KERNEL, 1: KERNEL, 2: OLDER},
            "rank 2 differs",
            ["rank 2 with overlay=0", "0, 1 with overlay=1"],
        ),
        (
            {0: KERNEL, 1: KERNEL, 2: LINEAR},
            "rank 2 differs",
            [
                "ranks 0, 1 with cross_entropy=kernel, linear_cross_entropy=not asked;",
                "rank 2 with cross_entropy=not asked, linear_cross_entropy=kernel.",
            ],
        ),
        ({0: KERNEL, 2: KERNEL}, "rank 1 differs", ["ranks 0, 2 on the kernel", "rank 1 without an answer"]),
        ({0: KERNEL}, "ranks 1, 2 differ", ["rank 0 on the kernel", "ranks 1, 2 without an answer"]),
        ({0: KERNEL, 1: OFF}, "ranks 1, 2 differ", ["rank 2 without an answer"]),
    ],
)
def test_who_is_named(ranks: ModuleType, said: dict[int, dict[str, str]], odd: str, parts: list[str]) -> None:
    message = ranks.judge(said, [0, 1, 2], "cross_entropy")
    assert message is not None
    for part in (odd, *parts, "the same LIGER_MEGATRON* variables"):
        assert part in message
