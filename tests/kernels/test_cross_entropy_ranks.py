# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over a vocabulary that two processes share: on two GPUs, else in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from liger_kernels.cross_entropy import cross_entropy_reference

RANKS = 2
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]


def random_case(columns: int, dtype: torch.dtype, **options: Any) -> Case:
    """Labels on either rank, on their border, beyond the vocabulary and negative."""
    logits = (torch.randn(4, 2, RANKS * columns) * 4).to(dtype)
    target = torch.randint(0, RANKS * columns, (4, 2))
    target[0], target[1] = torch.tensor([columns - 1, columns]), torch.tensor([RANKS * columns, -100])
    return logits, target, torch.randn(4, 2), options


def all_cases() -> dict[str, Case]:
    torch.manual_seed(0)
    one = torch.ones(1, 1)
    cases: dict[str, Case] = {
        "known": (torch.arange(8.0).view(1, 1, 8), torch.tensor([[2]]), one, {"label_smoothing": 0.1}),
        "no tokens": (torch.zeros(0, 1, 8), torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1), {}),
        "partition": random_case(24, torch.float32, label_smoothing=0.1, label_smoothing_scope="partition"),
    }
    for columns in (1, 5, 1025, 18992):
        for dtype in (torch.bfloat16, torch.float32):
            for smoothing in (0.0, 0.1):
                name = f"{columns}, {dtype}, {smoothing}"
                cases[name] = random_case(columns, dtype, label_smoothing=smoothing)
    return cases


CASES = all_cases()


@pytest.fixture(scope="module")
def results(run_ranks: Callable[..., list[Any]]) -> dict[str, list[Any]]:
    """What each rank found, by case."""
    found = run_ranks("cross_entropy_rank.py", RANKS, list(CASES.values()))
    return {name: list(ranks) for name, *ranks in zip(CASES, *found)}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_float64(name: str, results: dict[str, list[Any]]) -> None:
    logits, target, dloss, options = CASES[name]
    columns = logits.shape[-1] // RANKS
    for rank, (loss, dlogits, _) in enumerate(results[name]):
        part = (rank * columns, (rank + 1) * columns)
        exact = logits.double().requires_grad_()
        expected = cross_entropy_reference(
            exact,
            target,
            label_smoothing=options.get("label_smoothing", 0.0),
            partition=part if options.get("label_smoothing_scope") == "partition" else None,
        )
        expected.backward(dloss.double())
        torch.testing.assert_close(loss, expected.detach().float(), rtol=1e-6, atol=1e-6)
        assert exact.grad is not None
        right = exact.grad[..., slice(*part)].to(logits.dtype)
        eps = torch.finfo(logits.dtype).eps
        torch.testing.assert_close(dlogits, right, rtol=max(eps, 1e-5), atol=1e-8)


def test_known_values(results: dict[str, list[Any]]) -> None:
    gradient = [-0.013709, -0.012718, -0.895739, -0.002704, 0.017196, 0.071291, 0.218336, 0.618047]
    for loss, _, _ in results["known"]:
        assert loss.item() == pytest.approx(5.286911, abs=1e-6)
    together = torch.cat([dlogits for _, dlogits, _ in results["known"]], -1).flatten()
    torch.testing.assert_close(together, torch.tensor(gradient), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_same_on_all_ranks(name: str, results: dict[str, list[Any]]) -> None:
    first, second = (loss for loss, _, _ in results[name])
    assert torch.equal(first, second) == (name != "partition")


@pytest.mark.parametrize("name", CASES)
def test_one_collective_to_a_loss(name: str, results: dict[str, list[Any]]) -> None:
    once = bool(CASES[name][1].numel())
    for _, _, counts in results[name]:
        assert counts["calls"] == ({"all_gather_into_tensor": 1} if once else {})
        assert counts["collectives"] == ({"cross_entropy": 1} if once else {})
        kernels = ("forward", "combine", "backward")
        assert counts["launches"] == ({f"cross_entropy_{kernel}": 1 for kernel in kernels} if once else {})
