# SPDX-License-Identifier: Apache-2.0
"""The output layer and its loss over a vocabulary that processes share: on GPUs, else in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from liger_kernels.cross_entropy import cross_entropy_reference, vocab_parallel_cross_entropy
from liger_kernels.linear_cross_entropy import _split

H = 24
RANKS = (2, 4)
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, dict[str, Any]]

# Float32 arithmetic of a dozen operations, and an exponential and a logarithm of 2 units.
ARITHMETIC = 16 * 2.0**-24


def random_case(columns: int, tiles: int, dtype: torch.dtype, ranks: int, **options: Any) -> Case:
    """Whole numbers and eighths, so that the logits are exact.

    Labels on either side of the first tile's and rank's last column, beyond the vocabulary and negative.
    """
    hidden = torch.randint(-2, 3, (4, 2, H)).to(dtype)
    weight = (torch.randint(-8, 9, (ranks * columns, H)) / 8).to(dtype)
    target = torch.randint(0, ranks * columns, (4, 2))
    last = _split(columns, tiles).columns - 1
    target[0] = torch.tensor([columns - 1, columns])
    target[1] = torch.tensor([last, (last + 1) % columns])
    target[2] = torch.tensor([ranks * columns, -100])
    return hidden, weight, target, torch.randn(4, 2), tiles, options


def all_cases(ranks: int) -> dict[str, Case]:
    torch.manual_seed(0)
    cases = {}
    for columns, tiles, dtypes in ((5, 1, [torch.bfloat16]), (100, 3, [torch.bfloat16, torch.float32])):
        for dtype in dtypes:
            for smoothing in (0.0, 0.1):
                for sequence_parallel in (False, True):
                    options = {"label_smoothing": smoothing, "sequence_parallel": sequence_parallel}
                    name = ", ".join(str(x) for x in (columns, dtype, *options.items()))
                    cases[name] = random_case(columns, tiles, dtype, ranks, **options)
    scope = {"label_smoothing": 0.1, "label_smoothing_scope": "partition"}
    cases["partition"] = random_case(100, 3, torch.float32, ranks, **scope)
    cases["main_grad"] = random_case(100, 3, torch.bfloat16, ranks, main_grad=True)
    cases["scale"] = random_case(100, 3, torch.bfloat16, ranks, logit_scale=0.5)
    empty = random_case(5, 1, torch.bfloat16, ranks)
    cases["no tokens"] = (empty[0][:0], empty[1], empty[2][:0], empty[3][:0], 1, {})
    return cases


CASES = {ranks: all_cases(ranks) for ranks in RANKS}


@pytest.fixture(scope="module", params=RANKS)
def results(request: pytest.FixtureRequest, run_ranks: Callable[..., list[Any]]) -> dict[str, list[Any]]:
    """What each rank found, by case."""
    cases = CASES[request.param]
    found = run_ranks("linear_cross_entropy_rank.py", request.param, list(cases.values()))
    return {name: list(ranks) for name, *ranks in zip(cases, *found)}


@pytest.mark.parametrize("name", CASES[2])
def test_against_float64(name: str, results: dict[str, list[Any]], device: torch.device) -> None:
    """Loss to float32's accuracy; gradients to float64 products of the logits' own gradient."""
    ranks = len(results[name])
    hidden, weight, target, dloss, _, options = CASES[ranks][name]
    scale = options.get("logit_scale", 1.0)
    columns = weight.shape[0] // ranks
    logits = hidden.double() @ weight.double().t() * scale
    assert torch.equal(logits.to(hidden.dtype).double(), logits)
    x, w = hidden.double().view(-1, H), weight.double()
    eps = torch.finfo(hidden.dtype).eps
    # A logit's gradient may be rounded the other way where it is in the middle of two numbers.
    rounding = 2.0**-15 if hidden.dtype != torch.float32 else 0.0

    def close(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, roundings: int) -> None:
        exact, reach = a @ b, a.abs() @ b.abs()
        error = (got.double().view(exact.shape) - exact).abs()
        allowed = roundings * eps / 2 * reach + (ARITHMETIC + rounding) * reach + 2.0**-24
        assert (error <= allowed).all(), f"{(error - allowed).max():.2e} too far"

    dlogits = torch.zeros(len(x), len(weight), dtype=torch.float64)
    smoothed = {"label_smoothing": options.get("label_smoothing", 0.0)}
    for rank, (loss, _, dweight, _) in enumerate(results[name]):
        shard = slice(rank * columns, (rank + 1) * columns)
        partition = (shard.start, shard.stop) if name == "partition" else None
        apart = logits.clone().requires_grad_()
        right = cross_entropy_reference(apart, target, partition=partition, **smoothed)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), right, rtol=1e-6, atol=1e-6)
        if not target.numel():
            assert not dweight.any()
            continue
        if partition:
            right.backward(dloss.double())
        else:
            apart = logits.to(device, hidden.dtype).requires_grad_()
            loss = vocab_parallel_cross_entropy(apart, target.to(device), **smoothed)
            loss.backward((dloss * scale).to(device))
        dlogits[:, shard] = apart.grad.view(dlogits.shape)[:, shard]
        close(dweight, dlogits[:, shard].t(), x, 0 if name == "main_grad" else 1)
    parts = [dhidden for _, dhidden, *_ in results[name]]
    for part in [torch.cat(parts)] if options.get("sequence_parallel") else parts:
        assert part.dtype == hidden.dtype
        # Each rank's part is rounded, and so is each partial sum of the parts.
        close(part, dlogits, w, 2 * ranks)


@pytest.mark.parametrize("name", CASES[2])
def test_equal_on_all_ranks(name: str, results: dict[str, list[Any]]) -> None:
    (loss, dhidden, *_), *others = results[name]
    for other_loss, other_dhidden, *_ in others:
        assert torch.equal(loss, other_loss) == (name != "partition")
        if "('sequence_parallel', True)" not in name:
            assert torch.equal(dhidden, other_dhidden)


@pytest.mark.parametrize("name", CASES[2])
def test_collectives(name: str, results: dict[str, list[Any]]) -> None:
    """One in either direction; more where the sequence is split."""
    *_, target, _, tiles, options = CASES[2][name]
    calls: dict[str, int] = {}
    launches: dict[str, int] = {}
    if target.numel():
        calls = {"all_gather_into_tensor": 1, "all_reduce": 1}
        if options.get("sequence_parallel"):
            calls = {"all_gather_into_tensor": 3, "reduce_scatter_tensor": 1}
        launches = {"forward": tiles, "combine": 1, "backward": tiles}
    for *_, counts in results[name]:
        assert counts["calls"] == calls
        assert counts["collectives"] == ({"linear_cross_entropy": sum(calls.values())} if calls else {})
        assert counts["launches"] == {f"linear_cross_entropy_{name}": n for name, n in launches.items()}
