# SPDX-License-Identifier: Apache-2.0
"""The small GPT on both trees, through the command's own functions; and that the comparison can fail."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest
import torch

from scripts import train
from scripts.errors import UsageError
from scripts.overlay import load_overlay

FUSION = Path("megatron/core/fusions/fused_bias_swiglu.py")
KERNEL = Path("megatron/core/liger/kernels/swiglu.py")
OPS = load_overlay().ops


def _options(device: torch.device, *, ranks: int = 1, **changes: int | bool) -> train.Options:
    ranks = min(ranks, torch.cuda.device_count()) if device.type == "cuda" else ranks
    return train.Options(device.type, ranks, **{"iterations": 2, **changes})  # type: ignore[arg-type]


def _failed(result: train.Result) -> set[str]:
    return {check.name for check in result.checks if not check.passed}


def test_both_trees_learn_alike_on_two_data_parallel_ranks(
    pristine_tree: Path, overlaid_tree: Path, tmp_path: Path, device: torch.device
) -> None:
    result = train.train(pristine_tree, overlaid_tree, OPS, tmp_path, _options(device, ranks=2, iterations=5))
    assert _failed(result) == set()
    assert result.passed
    names = {check.name for check in result.checks}
    assert {f"launches of {op}" for op in OPS} <= names
    assert {
        "losses",
        "gradients",
        "checkpoint pristine -> overlaid",
        "checkpoint overlaid -> pristine",
    } <= names
    text = "\n".join(result.table)
    for entry in ("bias_swiglu_impl", "vocab_parallel_cross_entropy", "fused_vocab_parallel_cross_entropy"):
        assert f"\n{entry} " in text


def test_both_trees_learn_alike_on_two_tensor_parallel_ranks_in_place(
    pristine_tree: Path, overlaid_tree: Path, tmp_path: Path, device: torch.device
) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    options = _options(device, ranks=2, tp=2, in_place=True, sequence_parallel=True)
    result = train.train(pristine_tree, overlaid_tree, OPS, tmp_path, options)
    assert _failed(result) == set()
    checks = {check.name: check.detail for check in result.checks}
    assert "collectives of cross_entropy" in checks
    assert checks["norm slots"] == "5 of 5 ours"
    assert checks["norms' gradients on all ranks, unfused"] == "the same bits"


def _changed(tree: Path, folder: Path, file: Path, old: str, new: str) -> Path:
    """A copy of ``tree`` in which ``old``, which is in ``file`` once, is ``new``."""
    copy = folder / "changed"
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (copy / file).write_text(text.replace(old, new), encoding="utf-8")
    return copy


def test_a_tail_that_was_not_applied_fails(
    pristine_tree: Path, overlaid_tree: Path, tmp_path: Path, device: torch.device
) -> None:
    copy = tmp_path / "changed"
    shutil.copytree(overlaid_tree, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(pristine_tree / FUSION, copy / FUSION)
    failed = _failed(train.train(pristine_tree, copy, OPS, tmp_path / "work", _options(device)))
    assert {"launches of swiglu", "code behind bias_swiglu_impl", "the job's own line"} <= failed


def test_a_kernel_that_stores_nothing_fails(
    pristine_tree: Path, overlaid_tree: Path, tmp_path: Path, device: torch.device
) -> None:
    store = "tl.store(out + o_r * n + o_n, b_out.to(out.dtype.element_ty), mask=m)"
    tree = _changed(overlaid_tree, tmp_path, KERNEL, store, "pass")
    failed = _failed(train.train(pristine_tree, tree, OPS, tmp_path / "work", _options(device)))
    assert "gradients" in failed
    assert "launches of swiglu" not in failed


def test_a_gradient_of_the_wrong_sign_fails(
    pristine_tree: Path, overlaid_tree: Path, tmp_path: Path, device: torch.device
) -> None:
    tree = _changed(overlaid_tree, tmp_path, KERNEL, "b_dgate = b_dout", "b_dgate = -b_dout")
    failed = _failed(train.train(pristine_tree, tree, OPS, tmp_path / "work", _options(device)))
    assert {"gradients", "losses"} <= failed
    assert "launches of swiglu" not in failed


def test_a_loss_without_its_target_fails(
    pristine_tree: Path, overlaid_tree: Path, tmp_path: Path, device: torch.device
) -> None:
    """The loss itself is right, and its gradient is the softmax alone."""
    right = (
        "return tl.where(o == b_local[None, :, None, None], b_dx - b_at_target[None, :, None, None], b_dx)"
    )
    file = Path("megatron/core/liger/kernels/cross_entropy.py")
    tree = _changed(overlaid_tree, tmp_path, file, right, "return b_dx")
    failed = _failed(train.train(pristine_tree, tree, OPS, tmp_path / "work", _options(device)))
    assert {"gradients", "losses"} <= failed
    assert "launches of cross_entropy" not in failed


def test_norms_that_are_not_marked_for_sequence_parallelism_fail(
    pristine_tree: Path, overlaid_tree: Path, tmp_path: Path, device: torch.device
) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    file = Path("megatron/core/liger/norms.py")
    right = "parameter.sequence_parallel = self.sequence_parallel"
    tree = _changed(overlaid_tree, tmp_path, file, right, "parameter.sequence_parallel = False")
    options = _options(device, ranks=2, tp=2, sequence_parallel=True)
    failed = _failed(train.train(pristine_tree, tree, OPS, tmp_path / "work", options))
    assert {"gradients", "norms' gradients on all ranks, unfused"} <= failed
    assert "norm slots" not in failed


def _arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["--tp", "3", "--nproc", "4"], "--tp 3 --nproc 4"),
        (["--tp", "4"], "--tp 4"),
        (["--iterations", "1"], "--iterations 1"),
        (["--sequence-parallel"], "--sequence-parallel alone"),
        ([], "neither"),
        (["megatron==0.16.1", "--tree", "."], "both"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(argv: list[str], found: str) -> None:
    with pytest.raises(UsageError) as caught:
        train.run(_arguments("--device", "cpu", *argv))
    assert caught.value.found == found


def test_sequence_parallelism_is_refused_while_the_norms_are_upstreams() -> None:
    arguments = ("--ops", "swiglu", "--device", "cpu", "--tp", "2", "--sequence-parallel")
    with pytest.raises(UsageError, match="upstream's local norms refuse"):
        train.run(_arguments("megatron==0.16.1", *arguments))
