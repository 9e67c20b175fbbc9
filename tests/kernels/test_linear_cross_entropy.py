# SPDX-License-Identifier: Apache-2.0
"""Output layer and cross-entropy in one, in Triton's interpreter or, where there is a GPU, compiled.

Most tests use small whole numbers and eighths, of which every product of the output layer is exact in every
dtype and in any order. So the logits are known, the loss is held to float64, and the gradients to float64
products of the logits' gradient from the cross-entropy on its own, which has tests of its own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from liger_kernels import linear_cross_entropy as module
from liger_kernels.cross_entropy import out_of_range_labels, vocab_parallel_cross_entropy
from liger_kernels.linear_cross_entropy import (
    BUDGET_MB,
    FEWEST_COLUMNS,
    add_product,
    choose_tiling,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SMOOTHINGS = [0.0, 0.1]
H = 24

# Float32 arithmetic of a dozen operations, and an exponential and a logarithm of 2 units.
ARITHMETIC = 16 * 2.0**-24


@dataclass
class Result:
    loss: torch.Tensor
    dhidden: torch.Tensor | None
    dweight: torch.Tensor | None

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Result)
        pairs = zip(vars(self).values(), vars(other).values())
        return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def run(
    function: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    dloss: torch.Tensor,
    **options: Any,
) -> Result:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = function(hidden, weight, target, **options)
    loss.backward(dloss.to(loss.dtype))
    return Result(loss.detach(), hidden.grad, weight.grad)


def separate(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    logit_scale: float = 1.0,
    **options: Any,
) -> torch.Tensor:
    """Output layer, then loss: what is replaced."""
    return vocab_parallel_cross_entropy(hidden @ weight.t() * logit_scale, target, **options)


def make(
    tokens: tuple[int, ...], vocabulary: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden state, weight, labels (of five and more two are negative) and gradient of the loss."""
    hidden = torch.randint(-2, 3, (*tokens, H), device=device).to(dtype)
    weight = (torch.randint(-8, 9, (vocabulary, H), device=device) / 8).to(dtype)
    target = torch.randint(0, vocabulary, tokens, device=device)
    if target.numel() >= 5:
        target.view(-1)[1], target.view(-1)[4] = -100, -1
    return hidden, weight, target, torch.randn(tokens, device=device)


def check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    dloss: torch.Tensor,
    got: Result,
    **options: Any,
) -> None:
    """Loss and each gradient at one rounding from what the exact logits give."""
    scale = options.pop("logit_scale", 1.0)
    hidden, weight = hidden.detach(), weight.detach()
    logits = hidden.double() @ weight.double().t() * scale
    assert torch.equal(logits.to(hidden.dtype).double(), logits)
    right = linear_cross_entropy_reference(
        hidden.double(), weight.double(), target, logit_scale=scale, **options
    )
    assert got.loss.dtype == torch.float32
    assert got.loss.shape == target.shape
    assert ((got.loss.double() - right).abs() - ARITHMETIC * (right.abs() + 1)).max() <= 0

    rounded = logits.to(hidden.dtype).requires_grad_()
    vocab_parallel_cross_entropy(rounded, target, **options).backward(dloss * scale)
    dlogits = rounded.grad.double().reshape(-1, weight.shape[0])
    x, w = hidden.double().reshape(-1, H), weight.double()
    for gradient, like, a, b in (
        (got.dhidden, hidden, dlogits, w),
        (got.dweight, weight, dlogits.t(), x),
    ):
        assert gradient.dtype == like.dtype
        assert gradient.shape == like.shape
        exact, reach = a @ b, a.abs() @ b.abs()
        error = (gradient.double().reshape(exact.shape) - exact).abs()
        # One rounding of the result, and a float32 sum of many terms, whose roundings are as good as random.
        sums = ARITHMETIC + 2.0**-24 * a.shape[1] ** 0.5
        allowed = torch.finfo(like.dtype).eps / 2 * exact.abs() + sums * reach + 2.0**-24
        # A logit's gradient may be rounded the other way where it is in the middle of two numbers.
        if like.dtype != torch.float32:
            allowed += 2.0**-15 * reach
        assert (error - allowed).max() <= 0, f"{(error - allowed).max():.2e} too far"


@pytest.fixture(autouse=True)
def float32_sums() -> Iterator[None]:
    """Where cuBLAS splits the sum of a small product, PyTorch lets it add the parts in the result's dtype."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = settings.allow_fp16_reduced_precision_reduction = False
    yield
    settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction = before


Tiles = Callable[[int], None]


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Tiles:
    """Sets how many tiles a vocabulary is to have."""

    def split(count: int) -> None:
        monkeypatch.setattr(
            module, "choose_tiling", lambda r, h, vocabulary, *_: module._split(vocabulary, count)
        )

    return split


# Vocabularies and the tiles that they come to. 1 and 5: less than a tile's alignment. 96: three equal tiles.
# 100: an uneven last tile, not a multiple of 16. 1025: odd and wide. 4100: a loop over columns in a tile.
CASES = [(1, 1), (5, 1), (96, 1), (96, 3), (100, 3), (1025, 4), (4100, 2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocabulary", "count"), CASES)
def test_against_float64(
    vocabulary: int, count: int, dtype: torch.dtype, device: torch.device, tiles: Tiles
) -> None:
    tiles(count)
    assert module._split(vocabulary, count).count == count
    # float16 differs from bfloat16 in the conversion only
    for smoothing in SMOOTHINGS[: 1 if vocabulary == 1 or dtype == torch.float16 else 2]:
        inputs = make((3, 2), vocabulary, dtype, device)
        got = run(linear_cross_entropy, *inputs, label_smoothing=smoothing)
        check(*inputs, got, label_smoothing=smoothing)


@pytest.mark.parametrize("tokens", [(), (7,), (1, 5), (2, 1, 3)], ids=str)
def test_any_number_of_dimensions(tokens: tuple[int, ...], device: torch.device, tiles: Tiles) -> None:
    tiles(2)
    inputs = make(tokens, 40, torch.bfloat16, device)
    check(*inputs, run(linear_cross_entropy, *inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_no_worse_than_layer_and_loss(
    count: int, dtype: torch.dtype, device: torch.device, tiles: Tiles
) -> None:
    """On numbers that round: against float64, no further away than PyTorch's layer before our loss."""
    tiles(count)
    hidden, weight = (
        torch.randn(40, 64, device=device).to(dtype),
        torch.randn(150, 64, device=device).to(dtype),
    )
    weight *= 0.5
    target, dloss = torch.randint(0, 150, (40,), device=device), torch.rand(40, device=device)
    inputs = (hidden, weight, target, dloss)
    exact = run(linear_cross_entropy_reference, hidden.double(), weight.double(), target, dloss)
    ours, theirs = (vars(run(function, *inputs)) for function in (linear_cross_entropy, separate))
    for name, right in vars(exact).items():
        error = (ours[name].double() - right).norm() / right.norm()
        allowed = (theirs[name].double() - right).norm() / right.norm()
        # Of 40 tokens some logit may be rounded the other way, as its float32 sum has another order.
        assert error <= 1.02 * allowed + ARITHMETIC, name


# --- Tiles ---


def test_labels_at_the_borders_of_tiles(device: torch.device, tiles: Tiles) -> None:
    tiles(3)
    (first, second), (_, size), (start, last) = module._split(100, 3).tiles()
    edges = [first, second - 1, second, second + size - 1, start, start + last - 1]
    hidden, weight, _, dloss = make((len(edges),), 100, torch.bfloat16, device)
    target = torch.tensor(edges, device=device)
    check(hidden, weight, target, dloss, run(linear_cross_entropy, hidden, weight, target, dloss))


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_many_tiles_and_one(smoothing: float, device: torch.device, tiles: Tiles) -> None:
    inputs = make((6,), 250, torch.float32, device)
    results = []
    for count in (1, 2, 16):
        tiles(count)
        results.append(run(linear_cross_entropy, *inputs, label_smoothing=smoothing))
        check(*inputs, results[-1], label_smoothing=smoothing)
    for result in results[1:]:
        torch.testing.assert_close(vars(result), vars(results[0]), rtol=1e-5, atol=1e-6)


def test_far_apart_tiles(device: torch.device, tiles: Tiles) -> None:
    """Smoothing sums distances to the maximum, which another tile may have, in tiles of unequal size."""
    tiles(3)
    weight = torch.zeros(100, H, device=device)
    weight[:48], weight[96:] = 2.0, -3.0
    hidden, target = torch.full((5, H), 2.0, device=device), torch.tensor([0, 50, 99, 47, 96], device=device)
    inputs = (hidden, weight, target, torch.ones(5, device=device))
    check(*inputs, run(linear_cross_entropy, *inputs, label_smoothing=0.1), label_smoothing=0.1)


def test_infinite_logits_of_a_tile(device: torch.device, tiles: Tiles) -> None:
    tiles(3)
    hidden, weight, target, _ = make((4,), 96, torch.float32, device)
    hidden.abs_().add_(1)
    target[:] = torch.tensor([3, 40, 90, 95], device=device)
    for part in (slice(0, 32), slice(64, 96)):
        masked = weight.clone()
        masked[part] = -float("inf")
        for smoothing in SMOOTHINGS:
            options = {"label_smoothing": smoothing}
            got = linear_cross_entropy(hidden, masked, target, **options)
            right = linear_cross_entropy_reference(hidden.double(), masked.double(), target, **options)
            torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 512, 4096, 8192, 32768, 131072])
@pytest.mark.parametrize("ranks", [1, 8])
def test_tilings(rows: int, ranks: int) -> None:
    for vocabulary, size in itertools.product(
        (1, 5, 2048, 4097, 32000, 50257, 128256, 151936, 262144), (2, 4)
    ):
        for budget in (64, BUDGET_MB, 4096):
            tiling = choose_tiling(rows, 4096, vocabulary, size, budget * 2**20, ranks)
            columns = list(tiling.tiles())
            assert sum(n for _, n in columns) == vocabulary
            assert [first for first, _ in columns] == [i * tiling.columns for i in range(tiling.count)]
            assert tiling.width % 16 == 0
            assert tiling.columns <= tiling.width < tiling.columns + 256
            if tiling.count > 1:
                assert tiling.columns >= FEWEST_COLUMNS
                assert 2 * tiling.last >= tiling.columns
                sums = rows * 4096 * 4 if size < 4 else 0
                fits = rows * tiling.width * size + sums <= budget * 2**20
                assert fits or tiling.columns < 2 * FEWEST_COLUMNS


def test_a_large_budget_makes_the_logits_once(device: torch.device, launched: Counter[str]) -> None:
    inputs = make((2, 3), FEWEST_COLUMNS * 2 + 1, torch.bfloat16, device)
    for budget, count in ((1, 1), (1e-3, 2)):
        launched.clear()
        got = run(linear_cross_entropy, *inputs, budget_mb=budget)
        kernels = {"forward": count, "backward": count} | ({"combine": 1} if count > 1 else {})
        assert launched == {f"linear_cross_entropy_{kernel}": n for kernel, n in kernels.items()}
        check(*inputs, got)


@pytest.mark.reuse
@pytest.mark.parametrize("keep", [False, True])
def test_the_last_tile_is_made_once(
    keep: bool, device: torch.device, tiles: Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles(3)
    made: list[int] = []
    logits = module._logits
    monkeypatch.setattr(module, "_logits", lambda *args: (made.append(1), logits(*args)))
    inputs = make((6,), 100, torch.bfloat16, device)
    hidden, weight = (x.requires_grad_() for x in inputs[:2])
    loss = linear_cross_entropy(hidden, weight, inputs[2], keep=keep)
    gradients = []
    for expected in (5, 8) if keep else (6, 9):
        gradients.append(torch.autograd.grad(loss, (hidden, weight), inputs[3], retain_graph=True))
        assert len(made) == expected
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, inputs[2], keep=keep), loss)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        assert linear_cross_entropy(hidden, weight, inputs[2], keep=keep).grad_fn.kept is None


# --- Labels ---


def test_labels_beyond_the_vocabulary(device: torch.device, tiles: Tiles) -> None:
    tiles(3)
    hidden, weight, target, dloss = make((9,), 100, torch.float32, device)
    target[5:8] = torch.tensor([100, 111, 2**33], device=device)
    before = out_of_range_labels()
    got = run(linear_cross_entropy, hidden, weight, target, dloss)
    assert out_of_range_labels() - before == 3
    check(hidden, weight, target, dloss, got)
    with pytest.raises(IndexError, match=r"linear_cross_entropy: label 100 at position \(5,\).*100 entries"):
        linear_cross_entropy(hidden, weight, target, check_labels=True)


def test_ignore_index(device: torch.device, tiles: Tiles) -> None:
    tiles(2)
    hidden, weight, target, dloss = make((9,), 40, torch.bfloat16, device)
    target[5:7] = 7
    got = run(linear_cross_entropy, hidden, weight, target, dloss, ignore_index=7)
    check(hidden, weight, target, dloss, got, ignore_index=7)
    assert not got.dhidden[target == 7].any()


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_all_labels_ignored(smoothing: float, device: torch.device, tiles: Tiles) -> None:
    tiles(3)
    hidden, weight, target, dloss = make((5,), 100, torch.bfloat16, device)
    target.fill_(-100)
    got = run(linear_cross_entropy, hidden, weight, target, dloss, label_smoothing=smoothing)
    assert not any(x.any() for x in vars(got).values())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tokens", [(0, 1), (3, 0), (0,)], ids=str)
def test_no_tokens(
    tokens: tuple[int, ...], fused: bool, device: torch.device, launched: Counter[str]
) -> None:
    hidden, weight, target, dloss = make(tokens, 8, torch.bfloat16, device)
    main_grad = torch.ones(8, H, device=device) if fused else None
    got = run(linear_cross_entropy, hidden, weight, target, dloss, main_grad=main_grad)
    assert got.loss.shape == tokens
    assert got.dhidden.shape == (*tokens, H)
    if fused:
        assert got.dweight is None
        assert torch.equal(main_grad, torch.ones(8, H, device=device))
    else:
        assert not got.dweight.any()
    assert not launched


# --- Gradients ---


def test_tokens_without_a_gradient(device: torch.device, tiles: Tiles) -> None:
    tiles(3)
    hidden, weight, target, dloss = make((9,), 100, torch.bfloat16, device)
    dloss[2:6] = 0
    got = run(linear_cross_entropy, hidden, weight, target, dloss)
    check(hidden, weight, target, dloss, got)
    assert not got.dhidden[2:6].any()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("scale", [0.5, -2.0])
def test_logit_scale(scale: float, count: int, device: torch.device, tiles: Tiles) -> None:
    """Powers of two, with which the logits stay exact."""
    tiles(count)
    inputs = make((9,), 100, torch.bfloat16, device)
    check(*inputs, run(linear_cross_entropy, *inputs, logit_scale=scale), logit_scale=scale)


def test_the_labels_memory_may_be_used_again(device: torch.device, tiles: Tiles) -> None:
    tiles(2)
    hidden, weight, target, dloss = make((9,), 100, torch.bfloat16, device)
    right = run(linear_cross_entropy, hidden, weight, target, dloss)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target)
    target.fill_(3)
    loss.backward(dloss)
    assert torch.equal(hidden.grad, right.dhidden)
    assert torch.equal(weight.grad, right.dweight)


def test_a_logit_scale_that_rounds(device: torch.device, tiles: Tiles) -> None:
    tiles(2)
    hidden, weight, target, dloss = make((9,), 100, torch.float32, device)
    got = run(linear_cross_entropy, hidden, weight, target, dloss, logit_scale=0.3)
    right = run(
        linear_cross_entropy_reference, hidden.double(), weight.double(), target, dloss, logit_scale=0.3
    )
    for value, exact in zip(vars(got).values(), vars(right).values()):
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("trained", ["hidden", "weight", "nothing"])
@pytest.mark.parametrize("count", [1, 3])
def test_frozen(trained: str, count: int, device: torch.device, tiles: Tiles) -> None:
    tiles(count)
    inputs = make((6,), 100, torch.bfloat16, device)
    expected = run(linear_cross_entropy, *inputs)
    hidden, weight, target, dloss = inputs
    hidden.requires_grad_(trained == "hidden")
    weight.requires_grad_(trained == "weight")
    loss = linear_cross_entropy(hidden, weight, target)
    assert torch.equal(loss, expected.loss)
    assert loss.requires_grad == (trained != "nothing")
    if trained != "nothing":
        loss.backward(dloss)
    assert hidden.grad is None if trained != "hidden" else torch.equal(hidden.grad, expected.dhidden)
    assert weight.grad is None if trained != "weight" else torch.equal(weight.grad, expected.dweight)


def test_a_tied_weight(device: torch.device, tiles: Tiles) -> None:
    tiles(2)
    _, weight, target, dloss = make((6,), 40, torch.float32, device)
    index = torch.randint(0, 40, (6,), device=device)
    gradients = []
    for function in (linear_cross_entropy, separate):
        tied = weight.clone().requires_grad_()
        function(torch.nn.functional.embedding(index, tied), tied, target).backward(dloss)
        gradients.append(tied.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def spread_out(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def sliced(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (3, 2))[..., 3:-2]


@pytest.mark.parametrize("layout", [spread_out, transposed, sliced])
@pytest.mark.parametrize("changed", ["hidden", "weight", "labels", "main_grad"])
def test_strides(
    changed: str, layout: Callable[[torch.Tensor], torch.Tensor], device: torch.device, tiles: Tiles
) -> None:
    tiles(3)
    hidden, weight, target, dloss = make((3, 2), 100, torch.bfloat16, device)
    options: dict[str, Any] = {}
    if changed == "hidden":
        hidden = layout(hidden)
    elif changed == "weight":
        weight = layout(weight)
    elif changed == "labels":
        target, dloss = layout(target), layout(dloss)
    else:
        options["main_grad"] = layout(torch.zeros(100, H, device=device))
    got = run(linear_cross_entropy, hidden, weight, target, dloss, **options)
    if options:
        got.dweight = options["main_grad"].to(weight.dtype)
    check(hidden, weight, target, dloss, got)


@pytest.mark.parametrize("power", [1, 2])
def test_double_backward_is_refused(power: int, device: torch.device) -> None:
    hidden, weight, target, _ = make((5,), 24, torch.float32, device)
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, target)
    (dhidden,) = torch.autograd.grad(loss.pow(power).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dhidden.sum().backward()


def test_inputs_changed_after_the_forward_are_refused(device: torch.device) -> None:
    hidden, weight, target, _ = make((5,), 24, torch.float32, device)
    loss = linear_cross_entropy(hidden.requires_grad_() * 1, weight, target)
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.sum().backward()


@pytest.mark.parametrize("how", ["hooks", "checkpoint"])
def test_saved_tensors_that_come_back_changed(how: str, device: torch.device, tiles: Tiles) -> None:
    tiles(3)
    hidden, weight, target, dloss = make((6,), 100, torch.bfloat16, device)
    expected = run(linear_cross_entropy, hidden, weight, target, dloss)

    def hooks(*args: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(spread_out, lambda x: x):
            return linear_cross_entropy(*args)

    def checkpoint(*args: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(linear_cross_entropy, *args, use_reentrant=False)

    got = run({"hooks": hooks, "checkpoint": checkpoint}[how], hidden, weight, target, dloss)
    if how == "checkpoint":
        assert got == expected
    check(hidden, weight, target, dloss, got)


@pytest.mark.parametrize("count", [1, 3])
def test_two_runs_are_bitwise_equal(count: int, device: torch.device, tiles: Tiles) -> None:
    tiles(count)
    hidden, weight = (torch.randn(n, 64, device=device).bfloat16() for n in (40, 250))
    target, dloss = torch.randint(0, 250, (40,), device=device), torch.randn(40, device=device)
    first, second = (run(linear_cross_entropy, hidden, weight, target, dloss) for _ in range(2))
    assert first == second


# --- Gradients that are accumulated elsewhere ---


@pytest.mark.parametrize("accumulated", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_main_grad(accumulated: torch.dtype, count: int, device: torch.device, tiles: Tiles) -> None:
    """Over micro-batches; float32 is the float64 sum to float32's own accuracy."""
    tiles(count)
    main_grad = torch.zeros(100, H, dtype=accumulated, device=device)
    _, weight, _, _ = make((1,), 100, torch.bfloat16, device)
    exact, reach = (torch.zeros(100, H, dtype=torch.float64, device=device) for _ in range(2))
    for _ in range(3):
        hidden, _, target, dloss = make((7,), 100, torch.bfloat16, device)
        got = run(linear_cross_entropy, hidden, weight, target, dloss, main_grad=main_grad)
        assert got.dweight is None
        logits = (hidden @ weight.t()).requires_grad_()
        vocab_parallel_cross_entropy(logits, target).backward(dloss)
        exact += logits.grad.double().t() @ hidden.double()
        reach += logits.grad.double().abs().t() @ hidden.double().abs()
    # A logit's gradient at the border of two bfloat16 numbers may be rounded to either.
    allowed = ARITHMETIC * reach + 2.0**-15 * reach
    if accumulated == torch.bfloat16:
        allowed += 3 * torch.finfo(accumulated).eps / 2 * reach
    assert ((main_grad.double() - exact).abs() - allowed).max() <= 0


@pytest.mark.parametrize("zeros", [False, True])
def test_marks_of_a_fused_weight(zeros: bool, device: torch.device, tiles: Tiles) -> None:
    tiles(2)
    hidden, values, target, dloss = make((7,), 40, torch.bfloat16, device)
    weight = torch.nn.Parameter(values)
    weight.grad_added_to_main_grad = False
    if zeros:
        weight.zero_out_wgrad = True
    main_grad = torch.zeros(40, H, device=device)
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, target, main_grad=main_grad)
    assert not weight.grad_added_to_main_grad
    loss.backward(dloss)
    assert weight.grad_added_to_main_grad
    assert weight.grad.shape == weight.shape
    assert weight.grad.dtype == weight.dtype
    if zeros:
        assert not weight.grad.any()
    check(hidden, weight, target, dloss, Result(loss, hidden.grad, main_grad.bfloat16()))


def test_main_grad_of_a_frozen_weight_is_left_alone(device: torch.device) -> None:
    hidden, weight, target, dloss = make((7,), 40, torch.bfloat16, device)
    main_grad = torch.zeros(40, H, device=device)
    linear_cross_entropy(hidden.requires_grad_(), weight, target, main_grad=main_grad).backward(dloss)
    assert not main_grad.any()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_in_float32(
    dtype: torch.dtype, first: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the library where it can, and in blocks of rows."""
    a, b = torch.randn(40, 30, device=device).to(dtype), torch.randn(30, 50, device=device).to(dtype)
    start = torch.randn(40, 50, device=device)
    for blocks in (False, True):
        if blocks:
            monkeypatch.setattr(module, "_sums_in_place", lambda *_: False)
            monkeypatch.setattr(module, "BLOCK_ELEMENTS", 50 * 7)
        total = torch.full_like(start, float("nan")) if first else start.clone()
        add_product(total, a, b, first=first)
        exact = a.double() @ b.double() + (0 if first else start.double())
        allowed = 2.0**-24 * 32 * (a.double().abs() @ b.double().abs() + start.double().abs())
        assert ((total.double() - exact).abs() - allowed).max() <= 0


# --- Refusals ---


def test_refusals(device: torch.device) -> None:
    hidden, weight, target, _ = make((4, 2), 8, torch.float32, device)
    call = linear_cross_entropy
    with pytest.raises(TypeError, match="float64"):
        call(hidden.double(), weight.double(), target)
    with pytest.raises(TypeError, match=r"float32.*bfloat16"):
        call(hidden, weight.bfloat16(), target)
    with pytest.raises(TypeError, match="int32"):
        call(hidden, weight, target.int())
    with pytest.raises(ValueError, match=r"\(4,\).*\(4, 2, 24\).*\(4, 2\)"):
        call(hidden, weight, target[:, 0])
    with pytest.raises(ValueError, match=r"\(4, 2, 24\).*\(8, 23\)"):
        call(hidden, weight[:, 1:], target)
    with pytest.raises(ValueError, match=r"\(0, 24\)"):
        call(hidden, weight[:0], target)
    with pytest.raises(ValueError, match="meta"):
        call(hidden, weight.to("meta"), target)
    with pytest.raises(ValueError, match="meta"):
        call(hidden, weight, target.to("meta"))
    with pytest.raises(ValueError, match="label_smoothing is 1"):
        call(hidden, weight, target, label_smoothing=1.0)
    with pytest.raises(ValueError, match="two entries"):
        call(hidden, weight[:1], target, label_smoothing=0.1)
    with pytest.raises(ValueError, match="'shard'"):
        call(hidden, weight, target, label_smoothing_scope="shard")
    with pytest.raises(TypeError, match="float64"):
        call(hidden, weight, target, main_grad=torch.zeros_like(weight).double())
    with pytest.raises(ValueError, match=r"\(24, 8\)"):
        call(hidden, weight, target, main_grad=torch.zeros_like(weight).t())
    for scale in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="logit_scale"):
            call(hidden, weight, target, logit_scale=scale)
    for budget in (0, -1.0, float("nan"), float("inf"), 1e308, 2**43):
        with pytest.raises(ValueError, match="budget_mb"):
            call(hidden, weight, target, budget_mb=budget)


# --- Only on a GPU ---


def large(
    rows: int, vocabulary: int, device: torch.device, hidden_size: int = 4096
) -> tuple[torch.Tensor, ...]:
    hidden = torch.randn(rows, 1, hidden_size, dtype=torch.bfloat16, device=device)
    weight = torch.randn(vocabulary, hidden_size, dtype=torch.bfloat16, device=device) * hidden_size**-0.5
    target = torch.randint(0, vocabulary, (rows, 1), device=device)
    return hidden, weight, target, torch.randn(rows, 1, device=device) / rows


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [32000, 50257, 151936])
def test_real_vocabularies(vocabulary: int, device: torch.device) -> None:
    """No further from float64 than layer and loss apart; both round each logit and its gradient once."""
    inputs = large(256, vocabulary, device, 512)
    exact = run(linear_cross_entropy_reference, *(x.double() for x in inputs[:2]), *inputs[2:])
    for budget in (16, BUDGET_MB):
        ours = vars(run(linear_cross_entropy, *inputs, budget_mb=budget))
        theirs = vars(run(separate, *inputs))
        for name, right in vars(exact).items():
            error, allowed = ((x[name].double() - right).norm() / right.norm() for x in (ours, theirs))
            assert error <= 1.02 * allowed + ARITHMETIC, name


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits_in_a_tile(device: torch.device) -> None:
    rows, vocabulary = 16384, 151936
    hidden, weight, target, dloss = large(rows, vocabulary, device, 64)
    got = run(linear_cross_entropy, hidden, weight, target, dloss, budget_mb=6000)
    part = slice(rows - 64, rows)
    exact = run(
        linear_cross_entropy_reference, hidden[part].double(), weight.double(), target[part], dloss[part]
    )
    theirs = run(separate, hidden[part], weight, target[part], dloss[part])
    for name in ("loss", "dhidden"):
        value, right, other = (vars(x)[name].double() for x in (got, exact, theirs))
        assert (value[part] - right).norm() <= 1.02 * (other - right).norm() + ARITHMETIC * right.norm()
    assert not got.dweight.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize(("vocabulary", "most"), [(128256, 600), (262144, 700)])
@pytest.mark.parametrize("fused", [False, True])
def test_peak_memory(vocabulary: int, most: int, fused: bool, device: torch.device) -> None:
    """MiB above tensors and their gradients, of 8192 tokens whose logits alone are 2004 and 4096."""
    hidden, weight, target, dloss = large(8192, vocabulary, device)
    hidden.requires_grad_()
    weight.requires_grad_()
    main_grad = torch.zeros(weight.shape, device=device) if fused else None
    linear_cross_entropy(hidden, weight, target, main_grad=main_grad).sum().backward()  # takes what lasts
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(hidden, weight, target, main_grad=main_grad)
    loss.backward(dloss)
    gradients = hidden.nbytes + (0 if fused else weight.nbytes)
    peak = (torch.cuda.max_memory_allocated() - before - gradients) / 2**20
    assert peak <= BUDGET_MB
    assert peak <= most


@pytest.mark.gpu
def test_graph_capture(device: torch.device, capture: Any) -> None:
    hidden, weight, target, dloss = large(256, 32000, device, 512)
    hidden.requires_grad_()
    weight.requires_grad_()

    def step() -> Result:
        loss = linear_cross_entropy(hidden, weight, target, budget_mb=8)
        return Result(loss, *torch.autograd.grad(loss, (hidden, weight), dloss))

    replay = capture(step, (hidden, weight, target, dloss))
    for _ in range(2):
        fresh = large(256, 32000, device, 512)
        expected = run(linear_cross_entropy, *fresh, budget_mb=8)
        for value, right in zip(vars(replay(fresh)).values(), vars(expected).values()):
            torch.testing.assert_close(value, right)
