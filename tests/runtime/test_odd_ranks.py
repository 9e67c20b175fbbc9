# SPDX-License-Identifier: Apache-2.0
"""One node of a job is not like the others: an error on every rank that names it, and nobody waits for ever.

Settings that differ, and a rank without the overlay at tensor parallel two: ``test_cross_entropy_ranks.py``.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from scripts.manifest import load

from .test_cross_entropy_ranks import random_call, run_ranks

LIGER = Path("megatron/core/liger")


@pytest.fixture(autouse=True)
def enough_gpus() -> None:
    if 0 < torch.cuda.device_count() < 4:
        pytest.skip("needs four GPUs, or none")


def errors(
    folder: Path, trees: Sequence[Path], *, answers: Sequence[int] | None = None, dies: int | None = None
) -> list[str | None]:
    """What one loss ends in on each rank."""
    calls = [random_call("fused", 2 * len(trees), torch.float32)]
    begun = time.monotonic()
    found = run_ranks(folder, calls, trees, [{}] * len(trees), timeout=3.0, answers=answers, dies=dies)
    assert time.monotonic() - begun < 90
    return [ranks[0]["error"] for ranks in found]


def test_another_version_and_another_set_of_ops_on_one_of_four_each(
    tmp_path: Path, overlaid_tree: Path, release_tree: Callable[..., Path]
) -> None:
    later = tmp_path / "later"
    shutil.copytree(overlaid_tree, later)
    version = later / LIGER / "version.py"
    text = version.read_text(encoding="utf-8")
    assert text.count("OVERLAY_VERSION = 1") == 1
    version.write_text(text.replace("OVERLAY_VERSION = 1", "OVERLAY_VERSION = 2"), encoding="utf-8")
    for error in errors(tmp_path, [overlaid_tree, overlaid_tree, release_tree("cross_entropy"), later]):
        assert error is not None
        assert error.startswith(
            "RankError: cross_entropy: ranks 0, 1, 2, 3 share a loss and do not run the same"
        )
        assert "ranks 2, 3 differ: " in error
        assert (
            f"rank 2 with ops=cross_entropy, overlay=1; rank 3 with ops={','.join(load().ops)}, overlay=2."
            in error
        )


def test_one_of_four_without_the_overlay(tmp_path: Path, overlaid_tree: Path, pristine_tree: Path) -> None:
    """That one is in upstream's all-reduce, which the backend ends when the others are gone."""
    found = errors(tmp_path, [overlaid_tree, pristine_tree, overlaid_tree, overlaid_tree])
    for rank in (0, 2, 3):
        error = found[rank]
        assert error is not None
        assert error.startswith("RankError: cross_entropy: ranks 0, 1, 2, 3 share a loss")
        assert "rank 1 differs: ranks 0, 2, 3 on the kernel; rank 1 without an answer within 3 s" in error
    assert found[1] is not None
    assert found[1].startswith(("RuntimeError: ", "DistBackendError: "))


def test_a_rank_that_dies_inside_the_collective(tmp_path: Path, overlaid_tree: Path) -> None:
    """They have agreed; from there on the backend's word counts."""
    (error,) = errors(tmp_path, [overlaid_tree] * 2, answers=[0], dies=1)
    assert error is not None
    assert error.startswith(("RuntimeError: ", "DistBackendError: "))
