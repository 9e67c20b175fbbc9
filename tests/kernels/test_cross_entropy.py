# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy's kernels against float64, in Triton's interpreter or, where there is a GPU, compiled."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from liger_kernels import cross_entropy as module
from liger_kernels.cross_entropy import (
    choose_tile,
    cross_entropy_reference,
    out_of_range_labels,
    vocab_parallel_cross_entropy,
)
from torch._subclasses.fake_tensor import FakeTensorMode

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SMOOTHINGS = [0.0, 0.1]

# numpy, which computes in the interpreter, warns of every infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# The regimes of a tile. 1 and 5: a hundred rows to a program, lanes that hold nothing. 128: many rows, all
# lanes used. 1025: odd, no wide access, a masked part. 4096: one whole tile to a row. 18992 (an eighth of
# Qwen2.5's 151936): wide, with a part that is a multiple of 16. 20480: wide and whole tiles only.
COLUMNS = [1, 5, 128, 1025, 4096, 18992, 20480]
# Fewer and more rows than a program takes where it takes several.
TOKENS = [(1, 1), (7, 1), (5, 27)]

# Float32 arithmetic of a dozen operations, and an exponential and a logarithm of 2 units.
ARITHMETIC = 16 * 2.0**-24


@dataclass
class Result:
    loss: torch.Tensor
    dlogits: torch.Tensor

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Result)
        return torch.equal(self.loss, other.loss) and torch.equal(self.dlogits, other.dlogits)


def run(
    function: Callable[..., torch.Tensor],
    logits: torch.Tensor,
    target: torch.Tensor,
    dloss: torch.Tensor,
    **options: Any,
) -> Result:
    logits = logits.detach().requires_grad_()
    loss = function(logits, target, **options)
    loss.backward(dloss.to(loss.dtype))
    return Result(loss.detach(), logits.grad)


def make(
    tokens: tuple[int, ...], columns: int, dtype: torch.dtype, device: torch.device, scale: float = 4.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fresh random logits, labels (of five and more, two are negative) and gradient of the loss."""
    logits = (torch.randn(*tokens, columns, device=device) * scale).to(dtype)
    target = torch.randint(0, columns, tokens, device=device)
    flat = target.view(-1)
    if flat.numel() >= 5:
        flat[1], flat[4] = -100, -1
    return logits, target, torch.randn(tokens, device=device)


def check(
    logits: torch.Tensor,
    target: torch.Tensor,
    dloss: torch.Tensor,
    got: Result,
    part: slice = slice(None),
    **options: Any,
) -> None:
    """`got` (for the columns `part`) is rounded once, and no further from float64 than PyTorch in float32."""
    exact = run(cross_entropy_reference, logits.double(), target, dloss, **options)
    native = run(cross_entropy_reference, logits.float(), target, dloss, **options)
    assert got.loss.dtype == torch.float32
    assert got.loss.shape == target.shape
    error = (got.loss.double() - exact.loss).abs()
    # Near a sum of 1 the logarithm has the sum's error, so the 1.
    allowed = ARITHMETIC * (exact.loss.abs() + 1)
    assert (error - allowed).max() <= 0, f"loss: {(error - allowed).max():.2e} too far"
    if target.numel() >= 64:
        theirs = (native.loss.double() - exact.loss).norm()
        assert error.norm() <= theirs + ARITHMETIC * exact.loss.norm()

    assert got.dlogits.dtype == logits.dtype
    assert got.dlogits.shape == logits[..., part].shape
    right, x, dloss = exact.dlogits[..., part], logits.double(), dloss.double().abs().unsqueeze(-1)
    distance = (x.amax(-1, keepdim=True) - x)[..., part]
    softmax = x.softmax(-1)[..., part]
    here = torch.arange(logits.shape[-1], device=x.device)[part] == target.unsqueeze(-1)
    # float32 rounds the exponent, so the probability's error grows with the distance to the maximum.
    scale = dloss * (softmax * (1 + distance.nan_to_num(posinf=0)) + here)
    if options.get("label_smoothing"):
        scale += dloss / logits.shape[-1]
    error = (got.dlogits.double() - right).abs()
    allowed = torch.finfo(logits.dtype).eps / 2 * right.abs() + ARITHMETIC * scale
    # 2^-25: half the smallest subnormal of float16; the other two's are far smaller still.
    allowed += 2.0**-25 if logits.dtype == torch.float16 else 1e-37
    assert (error - allowed).max() <= 0, f"gradient: {(error - allowed).max():.2e} above one rounding"
    if error.numel() >= 256:
        theirs = (native.dlogits[..., part].to(logits.dtype).double() - right).norm()
        assert error.norm() <= theirs + ARITHMETIC * right.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("columns", "smoothing"),
    [(1, 0.0), *itertools.product(COLUMNS[1:], SMOOTHINGS)],  # one entry leaves nothing to spread over
)
def test_against_float64(columns: int, dtype: torch.dtype, smoothing: float, device: torch.device) -> None:
    for tokens in TOKENS if columns <= 128 else TOKENS[:2]:
        logits, target, dloss = make(tokens, columns, dtype, device)
        got = run(vocab_parallel_cross_entropy, logits, target, dloss, label_smoothing=smoothing)
        check(logits, target, dloss, got, label_smoothing=smoothing)


@pytest.mark.parametrize("tokens", [(), (24,), (2, 12), (3, 2, 4)], ids=str)
def test_any_number_of_dimensions(tokens: tuple[int, ...], device: torch.device) -> None:
    logits, target, dloss = make(tokens, 24, torch.bfloat16, device)
    check(logits, target, dloss, run(vocab_parallel_cross_entropy, logits, target, dloss))


def test_the_first_and_last_label_of_tiles(device: torch.device) -> None:
    columns = 18992
    block = choose_tile(columns, 2).block
    edges = [0, 1, block - 1, block, columns // block * block - 1, columns // block * block, columns - 1]
    logits, _, dloss = make((len(edges),), columns, torch.bfloat16, device)
    target = torch.tensor(edges, device=device)
    check(logits, target, dloss, run(vocab_parallel_cross_entropy, logits, target, dloss))


# --- Values known in advance ---


def close(got: torch.Tensor, expected: list[float], tolerance: float = 2e-6) -> None:
    expected_tensor = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got.detach().flatten().cpu().double(), expected_tensor, rtol=0, atol=tolerance)


SMOOTHED_GRADIENT = [-0.013709, -0.012718, -0.895739, -0.002704, 0.017196, 0.071291, 0.218336, 0.618047]


def test_known_values_with_smoothing(device: torch.device) -> None:
    logits, target = torch.arange(8.0, device=device).view(1, 1, 8), torch.tensor([[2]], device=device)
    result = run(
        vocab_parallel_cross_entropy, logits, target, torch.ones(1, 1, device=device), label_smoothing=0.1
    )
    close(result.loss, [5.286911])
    close(result.dlogits, SMOOTHED_GRADIENT)


@pytest.mark.parametrize("gap", [200.0, 2000.0, 1e30])
def test_smoothing_with_a_large_gap(gap: float, device: torch.device) -> None:
    """The logarithm of a probability that underflows is not taken."""
    logits, target = torch.tensor([[[0.0, gap]]], device=device), torch.tensor([[1]], device=device)
    loss = vocab_parallel_cross_entropy(logits, target, label_smoothing=0.1)
    assert loss.item() == pytest.approx(gap / 10, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_has_the_dtype_of_the_logits(dtype: torch.dtype, device: torch.device) -> None:
    logits, target = (
        torch.zeros(1, 1, 3, dtype=dtype, device=device),
        torch.zeros(1, 1, dtype=torch.int64, device=device),
    )
    result = run(vocab_parallel_cross_entropy, logits, target, torch.ones(1, 1, device=device))
    assert result.dlogits.dtype == dtype
    close(result.dlogits, [-0.6666667, 0.3333333, 0.3333333], max(torch.finfo(dtype).eps / 2, 1e-7))
    if dtype != torch.bfloat16:  # through bfloat16 it would be .33398438
        assert abs(result.dlogits[0, 0, 1].item() - 1 / 3) < 2e-4


def test_labels_outside_the_vocabulary(device: torch.device) -> None:
    logits = torch.zeros(4, 1, 4, device=device)
    target = torch.tensor([[-100], [-1], [4], [2**40]], device=device)
    before = out_of_range_labels()
    result = run(vocab_parallel_cross_entropy, logits, target, torch.ones(4, 1, device=device))
    close(result.loss, [0, 0, 1.386294, 1.386294])
    close(result.dlogits, [0.0] * 8 + [0.25] * 8)
    assert out_of_range_labels() - before == 2
    assert out_of_range_labels(wait=False) == out_of_range_labels()  # the device has nothing left to do


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("columns", [5, 1025])
def test_labels_beyond_the_vocabulary_against_float64(
    columns: int, smoothing: float, device: torch.device
) -> None:
    logits, target, dloss = make((9, 2), columns, torch.float32, device)
    target[2:6, 1] = columns + torch.tensor([0, 1, 100, 2**33], device=device)
    got = run(vocab_parallel_cross_entropy, logits, target, dloss, label_smoothing=smoothing)
    check(logits, target, dloss, got, label_smoothing=smoothing)


def test_checked_labels(device: torch.device, launched: Counter[str]) -> None:
    logits = torch.zeros(3, 2, 4, device=device)
    target = torch.tensor([[-100, 0], [3, -1], [7, 4]], device=device)
    with pytest.raises(IndexError, match=r"label 7 at position \(2, 0\).*4 entries \(2 such"):
        vocab_parallel_cross_entropy(logits, target, check_labels=True)
    assert not launched
    target[2] = 3
    vocab_parallel_cross_entropy(logits, target, check_labels=True)
    target[2] = 9
    vocab_parallel_cross_entropy(logits, target, check_labels=True, ignore_index=9)


def test_a_mode_of_fake_tensors_leaves_nothing_behind(device: torch.device) -> None:
    target = torch.tensor([0, 9], device=device)
    module._OUT_OF_RANGE.pop(device, None)
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(Exception):  # as it comes
        vocab_parallel_cross_entropy(torch.zeros(2, 5, device=device), target)
    assert vocab_parallel_cross_entropy(torch.zeros(2, 5, device=device), target).shape == (2,)
    assert out_of_range_labels() == 1


def test_ignore_index(device: torch.device) -> None:
    """Any label can be left out, within the vocabulary or beyond, and then is not counted as beyond."""
    logits, target, dloss = make((9, 2), 24, torch.float32, device)
    target[3:5] = 7
    target[7] = 30
    before = out_of_range_labels()
    for index, others in ((7, 2), (30, 0)):
        got = run(vocab_parallel_cross_entropy, logits, target, dloss, ignore_index=index)
        check(logits, target, dloss, got, ignore_index=index)
        assert not got.loss[target == index].any()
        assert not got.dlogits[target == index].any()
        assert out_of_range_labels() - before == others
        before = out_of_range_labels()


@pytest.mark.parametrize("columns", [5, 1025, 8200])
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_infinities_and_nan(columns: int, smoothing: float, device: torch.device) -> None:
    """Where float64 has them; a row without a label stays zero whatever is in it."""
    inf, nan = float("inf"), float("nan")
    logits, _, _ = make((12,), columns, torch.float32, device)
    target = torch.arange(12, device=device) % min(columns, 4)
    logits[0] = -inf
    logits[1] = nan
    logits[2, 2] = inf
    logits[3] = inf
    logits[4, 0] = nan
    logits[5, 1:] = -inf  # the target too
    logits[6, :2] = -inf
    logits[7, -1] = -inf
    logits[8, :-1] = -inf
    logits[9:11] = nan
    target[9:11] = torch.tensor([-100, -1], device=device)
    logits[11] = -inf
    target[11] = columns  # nor does a label beyond the vocabulary make a number of it
    dloss = torch.ones(12, device=device)
    got = run(vocab_parallel_cross_entropy, logits, target, dloss, label_smoothing=smoothing)
    exact = run(cross_entropy_reference, logits.double(), target, dloss, label_smoothing=smoothing)
    for value, right in ((got.loss, exact.loss), (got.dlogits, exact.dlogits)):
        torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-6, equal_nan=True)
    # A gradient of zero is zero, but for NaN.
    got = run(vocab_parallel_cross_entropy, logits, target, dloss * 0, label_smoothing=smoothing)
    assert torch.equal(got.dlogits.isnan(), exact.dlogits.isnan())
    assert not got.dlogits.nan_to_num().any()


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_far_from_zero(smoothing: float, device: torch.device) -> None:
    """Neither loss nor gradient sees how far all logits are from zero; no part of one overflows."""
    logits, target, dloss = make((9,), 1025, torch.bfloat16, device, scale=1.0)
    for shifted in (logits.float() + 4096, logits.float() - 4096, logits.float().clamp(-3, 3) * 1e38):
        got = run(vocab_parallel_cross_entropy, shifted, target, dloss, label_smoothing=smoothing)
        if shifted.abs().max() < 1e6:
            check(shifted, target, dloss, got, label_smoothing=smoothing)
        else:
            assert got.dlogits.isfinite().all()


def test_a_certain_prediction_costs_nothing(device: torch.device) -> None:
    """Exactly: the exponential at the maximum is 1, whatever the maximum."""
    logits = torch.tensor([[0.1, 777.7], [-3.3e4, -0.7]], device=device)
    target = torch.tensor([1, 1], device=device)
    result = run(vocab_parallel_cross_entropy, logits, target, torch.ones(2, device=device))
    assert not result.loss.any()
    assert not result.dlogits.any()


def test_rising_and_falling_logits(device: torch.device) -> None:
    """The running maximum changes in every tile, and in none but the first."""
    rising = torch.linspace(-60, 60, 18992, device=device)
    logits = torch.stack((rising, rising.flip(0), torch.full_like(rising, 3.0)))
    target, dloss = torch.tensor([18000, 5, 7], device=device), torch.ones(3, device=device)
    for smoothing in SMOOTHINGS:
        got = run(vocab_parallel_cross_entropy, logits, target, dloss, label_smoothing=smoothing)
        check(logits, target, dloss, got, label_smoothing=smoothing)


# --- Strides ---


def sliced(x: torch.Tensor) -> torch.Tensor:
    """The same values, in the middle of a wider buffer and off its 16-byte boundaries."""
    buffer = torch.full((*x.shape[:-1], x.shape[-1] + 5), 99, dtype=x.dtype, device=x.device)
    buffer[..., 3:-2] = x
    return buffer[..., 3:-2]


def every_second(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, dim=0)[::2]


def last_first(x: torch.Tensor) -> torch.Tensor:
    """Columns are not adjacent; of labels, it is rows that are swapped."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def batch_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


LAYOUTS = [torch.clone, sliced, every_second, last_first, batch_first]


@pytest.mark.parametrize("tokens", [(6, 3), (4, 1), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(
    layout: Callable[[torch.Tensor], torch.Tensor], tokens: tuple[int, ...], device: torch.device
) -> None:
    logits, target, dloss = make(tokens, 40, torch.bfloat16, device)
    expected = run(vocab_parallel_cross_entropy, logits, target, dloss)
    check(logits, target, dloss, expected)
    # Off the 16-byte boundaries the order of the sum is another, so its last bit may be.
    check(logits, target, dloss, run(vocab_parallel_cross_entropy, layout(logits), target, dloss))
    for other in LAYOUTS:
        assert run(vocab_parallel_cross_entropy, logits, other(target), layout(dloss)) == expected


def test_transposed_logits_are_read_where_they_are(device: torch.device) -> None:
    logits, target, dloss = make((2, 4), 8, torch.float32, device)
    swapped = logits.transpose(0, 1)[:, :, ::1]
    assert module._as_tokens(swapped, 2)[0] is swapped
    contiguous = run(
        vocab_parallel_cross_entropy, swapped.contiguous(), target.t().contiguous(), dloss.t().contiguous()
    )
    assert run(vocab_parallel_cross_entropy, swapped, target.t(), dloss.t()) == contiguous


@pytest.mark.parametrize("kind", ["sum", "mean", "rows", "expanded", "transposed"])
def test_gradients_of_the_loss(kind: str, device: torch.device) -> None:
    logits, target, _ = make((4, 3), 24, torch.float32, device)
    rows = torch.arange(1.0, 13.0, device=device).view(4, 3)
    losses: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": torch.sum,
        "mean": torch.mean,
        "rows": lambda loss: (loss * rows).sum(),
        "expanded": lambda loss: (loss.sum(0) * rows[0]).sum(),
        "transposed": lambda loss: (loss.t().contiguous() * rows.view(3, 4)).sum(),
    }
    dloss = torch.autograd.grad(
        losses[kind](leaf := torch.zeros(4, 3, device=device).requires_grad_()), leaf
    )[0]
    source = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(source, target)
    losses[kind](loss).backward()
    check(logits, target, dloss, Result(loss.detach(), source.grad))


def test_rows_scale_with_their_gradient(device: torch.device) -> None:
    logits, _, _ = make((1, 1), 24, torch.float32, device)
    logits, target = logits.expand(3, 1, 24), torch.full((3, 1), 5, device=device)
    dloss = torch.tensor([[1.0], [2.0], [3.0]], device=device)
    result = run(vocab_parallel_cross_entropy, logits.contiguous(), target, dloss)
    for row, factor in enumerate((1, 2, 3)):
        torch.testing.assert_close(result.dlogits[row], result.dlogits[0] * factor)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    columns=st.integers(2, 300),
    pad=st.tuples(st.integers(0, 3), st.integers(0, 17)),
    orders=st.tuples(*[st.permutations(range(3))] * 3),
    dtype=st.sampled_from(DTYPES),
    smoothing=st.sampled_from([0.0, 0.3]),
    scale=st.sampled_from([0.01, 3.0, 300.0]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_strides(
    tokens: list[int],
    columns: int,
    pad: tuple[int, int],
    orders: tuple[list[int], ...],
    dtype: torch.dtype,
    smoothing: float,
    scale: float,
    seed: int,
    device: torch.device,
) -> None:
    torch.manual_seed(seed)
    logits, target, dloss = make(tuple(tokens), columns, dtype, device, scale)
    target[torch.rand(tokens) < 0.2] = columns

    def reorder(x: torch.Tensor, order: list[int], keep: int) -> torch.Tensor:
        """The same tensor with its leading dimensions in another order in memory."""
        last = list(range(len(tokens), len(tokens) + keep))
        memory = [d for d in order if d < len(tokens)]
        return (
            x.permute(memory + last)
            .contiguous()
            .permute([memory.index(d) for d in range(len(tokens))] + last)
        )

    wide = torch.nn.functional.pad(logits, pad, value=float("inf"))
    strided = reorder(wide, orders[0], 1)[..., pad[0] : pad[0] + columns]
    options = {"label_smoothing": smoothing}
    got = run(
        vocab_parallel_cross_entropy,
        strided,
        reorder(target, orders[1], 0),
        reorder(dloss, orders[2], 0),
        **options,
    )
    if target.numel():
        check(logits, target, dloss, got, **options)


# --- Nothing to do ---


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tokens", [(0, 1), (3, 0), (0,)], ids=str)
def test_no_tokens(
    tokens: tuple[int, ...], in_place: bool, device: torch.device, launched: Counter[str]
) -> None:
    logits, target, dloss = make(tokens, 8, torch.bfloat16, device)
    result = run(vocab_parallel_cross_entropy, logits, target, dloss, in_place=in_place)
    assert result.loss.shape == tokens
    assert result.loss.dtype == torch.float32
    assert result.dlogits.shape == (*tokens, 8)
    assert not launched


# --- Autograd ---


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_logits_stay_as_they_are(dtype: torch.dtype, smoothing: float, device: torch.device) -> None:
    for logits in (torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.randn(3, 2, 1025)):
        logits = logits.to(dtype).to(device)
        before = logits.clone()
        target = torch.ones(logits.shape[:-1], dtype=torch.int64, device=device)
        run(vocab_parallel_cross_entropy, logits, target, torch.ones_like(target), label_smoothing=smoothing)
        assert torch.equal(logits, before)


def test_launches(device: torch.device, launched: Counter[str]) -> None:
    logits, target, dloss = make((5, 1), 24, torch.bfloat16, device)
    run(vocab_parallel_cross_entropy, logits, target, dloss)
    assert launched == {"cross_entropy_forward": 1, "cross_entropy_backward": 1}
    launched.clear()
    with torch.no_grad():
        loss = vocab_parallel_cross_entropy(logits.requires_grad_(), target)
    assert not loss.requires_grad
    assert launched == {"cross_entropy_forward": 1}


def test_the_loss_owns_its_storage(device: torch.device) -> None:
    logits, target, _ = make((5, 2), 24, torch.bfloat16, device)
    loss = vocab_parallel_cross_entropy(logits.requires_grad_(), target.t().contiguous().t())
    assert loss._base is None
    assert loss.is_contiguous()
    assert loss.untyped_storage().nbytes() == loss.numel() * 4


def test_backward_twice_gives_the_same(device: torch.device) -> None:
    logits, target, dloss = make((5, 2), 1025, torch.bfloat16, device)
    logits.requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, target, label_smoothing=0.1)
    (first,) = torch.autograd.grad(loss, logits, dloss, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits, dloss)
    assert torch.equal(first, second)


def test_two_runs_are_bitwise_equal(device: torch.device) -> None:
    logits, target, dloss = make((5, 2), 18992, torch.bfloat16, device)
    for smoothing in SMOOTHINGS:
        first, second = (
            run(vocab_parallel_cross_entropy, logits, target, dloss, label_smoothing=smoothing)
            for _ in range(2)
        )
        assert first == second


@pytest.mark.parametrize("power", [1, 2])
def test_double_backward_is_refused(power: int, device: torch.device) -> None:
    """Also where the loss's gradient is a constant, as in a penalty on gradients."""
    logits, target, _ = make((5,), 24, torch.float32, device)
    logits.requires_grad_()
    (dlogits,) = torch.autograd.grad(
        vocab_parallel_cross_entropy(logits, target).pow(power).sum(), logits, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dlogits.sum().backward()


def test_the_labels_memory_may_be_used_again(device: torch.device) -> None:
    logits, target, dloss = make((9, 2), 20, torch.float32, device)
    right = run(vocab_parallel_cross_entropy, logits, target, dloss)
    logits.requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, target)
    target.fill_(3)
    loss.backward(dloss)
    assert torch.equal(logits.grad, right.dlogits)


def test_logits_changed_after_the_forward_are_refused(device: torch.device) -> None:
    logits, target, _ = make((5,), 24, torch.float32, device)
    logits = logits.requires_grad_() * 1
    loss = vocab_parallel_cross_entropy(logits, target)
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.sum().backward()


# --- In place ---


@pytest.mark.reuse
@pytest.mark.parametrize("layout", [torch.clone, sliced, every_second, batch_first])
@pytest.mark.parametrize("columns", [5, 128, 1025, 18992])
def test_in_place(columns: int, layout: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    logits, target, dloss = make((5, 2), columns, torch.bfloat16, device)
    source = logits.clone().requires_grad_()
    used = layout(source)
    expected = run(vocab_parallel_cross_entropy, used, target, dloss)
    grads: list[torch.Tensor] = []
    used.register_hook(grads.append)
    loss = vocab_parallel_cross_entropy(used, target, in_place=True)
    assert torch.equal(used, logits)
    loss.backward(dloss)
    assert Result(loss, source.grad) == expected
    assert grads[0].data_ptr() == used.data_ptr()
    assert torch.equal(source, logits)


def test_in_place_leaves_the_rest_of_a_buffer_alone(device: torch.device) -> None:
    logits, target, dloss = make((7,), 1025, torch.bfloat16, device)
    buffer = torch.cat((logits, torch.ones_like(logits)), dim=1).requires_grad_() * 1
    vocab_parallel_cross_entropy(buffer[:, :1025], target, in_place=True).backward(dloss)
    assert torch.equal(buffer[:, 1025:], torch.ones_like(logits))


@pytest.mark.reuse
def test_in_place_a_second_backward_is_refused(device: torch.device) -> None:
    logits, target, dloss = make((5,), 24, torch.bfloat16, device)
    loss = vocab_parallel_cross_entropy(logits.requires_grad_() * 1, target, in_place=True)
    loss.backward(dloss, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(dloss)


@pytest.mark.reuse
def test_in_place_another_use_of_the_logits(device: torch.device) -> None:
    """Refused if its backward comes after ours, right if it comes before."""
    x, target, _ = make((5,), 24, torch.float32, device)
    logits = x.clone().requires_grad_() * 1
    square = logits.pow(2).sum()
    loss = vocab_parallel_cross_entropy(logits, target, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss.sum() + square).backward()

    grads = []
    for in_place in (False, True):
        source = x.clone().requires_grad_()
        logits = source * 1
        loss = vocab_parallel_cross_entropy(logits, target, in_place=in_place).sum()
        (loss + logits.pow(2).sum()).backward()
        grads.append(source.grad)
    assert torch.equal(*grads)


def test_in_place_never_takes_the_memory_of_a_leaf(device: torch.device) -> None:
    x, target, dloss = make((6,), 40, torch.bfloat16, device)
    expected = run(vocab_parallel_cross_entropy, x, target, dloss)
    for view in (lambda y: y, lambda y: y.view(3, 2, 40), lambda y: y[:]):
        source = x.clone().requires_grad_()
        used = view(source)
        loss = vocab_parallel_cross_entropy(used, target.view(used.shape[:-1]), in_place=True)
        loss.backward(dloss.view(loss.shape), retain_graph=True)
        assert torch.equal(source, x)
        assert torch.equal(source.grad, expected.dlogits)
        loss.backward(dloss.view(loss.shape))


@pytest.mark.parametrize("layout", ["expanded", "columns", "overlapping"])
def test_in_place_takes_new_memory_where_rows_overlap_or_are_copied(
    layout: str, device: torch.device
) -> None:
    x, target, dloss = make((6,), 40, torch.float32, device)
    view: Callable[[torch.Tensor], torch.Tensor] = {
        "expanded": lambda s: s[:1].expand(6, 40),
        "columns": lambda s: s.view(40, 6).t(),
        "overlapping": lambda s: s.as_strided((6, 40), (20, 1)),
    }[layout]
    source = x.clone().requires_grad_()
    logits = view(source * 1)
    before = logits.detach().clone()
    vocab_parallel_cross_entropy(logits, target, in_place=True).backward(dloss)
    assert torch.equal(logits, before)
    other = x.double().requires_grad_()
    cross_entropy_reference(view(other), target).backward(dloss.double())
    torch.testing.assert_close(source.grad.double(), other.grad, rtol=1e-5, atol=1e-6)


def test_in_place_and_saved_tensor_hooks(device: torch.device) -> None:
    """Offloaded logits come back as other memory: overwriting that is right, as often as it comes back."""
    x, target, dloss = make((5,), 40, torch.bfloat16, device)
    expected = run(vocab_parallel_cross_entropy, x, target, dloss)
    source = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        loss = vocab_parallel_cross_entropy(source * 1, target, in_place=True)
    for _ in range(2):
        source.grad = None
        loss.backward(dloss, retain_graph=True)
        assert torch.equal(source.grad, expected.dlogits)


# --- A split vocabulary, its ranks one after the other (test_cross_entropy_ranks.py has processes) ---


class Ranks:
    """A group of `size` ranks in one process: a gather gets what the other ranks left in a first pass."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shards: list[torch.Tensor | None] = [None] * size
        self.current = 0
        self.gathers = 0
        monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", self.gather)

    def size(self) -> int:
        return len(self.shards)

    def rank(self) -> int:
        return self.current

    def gather(self, output: torch.Tensor, shard: torch.Tensor, group: object) -> None:
        assert group is self
        self.gathers += 1
        self.shards[self.current] = shard.clone()
        for part, known in zip(output.chunk(self.size()), self.shards):
            part.copy_(shard if known is None else known)

    def run(
        self, logits: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, **options: Any
    ) -> list[Result]:
        for _ in range(2):
            results = []
            for rank, part in enumerate(logits.chunk(self.size(), -1)):
                self.current = rank
                results.append(run(vocab_parallel_cross_entropy, part, target, dloss, group=self, **options))
        return results


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("columns", "size"), [(1, 2), (5, 3), (1025, 2), (24, 8), (18992, 2)])
def test_a_split_vocabulary(
    columns: int,
    size: int,
    dtype: torch.dtype,
    smoothing: float,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    launched: Counter[str],
) -> None:
    logits, target, dloss = make((3, 2), columns * size, dtype, device)
    # A label of each of the first ranks, one beyond all, and a negative one.
    target.view(-1)[:4] = torch.tensor([columns - 1, columns, columns * size, -100], device=device)
    ranks = Ranks(size, monkeypatch)
    results = ranks.run(logits, target, dloss, label_smoothing=smoothing)
    assert ranks.gathers == 2 * size
    assert launched == {f"cross_entropy_{kernel}": 2 * size for kernel in ("forward", "combine", "backward")}
    for rank, result in enumerate(results):
        assert torch.equal(result.loss, results[0].loss)
        part = slice(rank * columns, (rank + 1) * columns)
        check(logits, target, dloss, result, part, label_smoothing=smoothing)


def test_smoothing_over_a_part(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target, dloss = make((3, 2), 48, torch.float32, device)
    options: dict[str, Any] = {"label_smoothing": 0.1}
    results = Ranks(2, monkeypatch).run(logits, target, dloss, label_smoothing_scope="partition", **options)
    for part, result in zip((slice(0, 24), slice(24, 48)), results):
        exact = run(
            cross_entropy_reference,
            logits.double(),
            target,
            dloss,
            partition=(part.start, part.stop),
            **options,
        )
        torch.testing.assert_close(result.loss.double(), exact.loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result.dlogits.double(), exact.dlogits[..., part], rtol=1e-5, atol=1e-7)
    assert not torch.equal(results[0].loss, results[1].loss)
    # On one rank the two scopes are the same.
    whole = [
        run(vocab_parallel_cross_entropy, logits, target, dloss, label_smoothing_scope=scope, **options)
        for scope in ("global", "partition")
    ]
    assert whole[0] == whole[1]


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_infinities_and_nan_of_one_rank(
    smoothing: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, target, dloss = make((8,), 16, torch.float32, device)
    target[:] = torch.arange(8, device=device) * 2
    inf = float("inf")
    logits[0, 8:] = -inf
    logits[1, :8] = -inf
    logits[2] = -inf
    logits[3, 9] = inf
    logits[4, 9] = float("nan")
    logits[5], target[5] = float("nan"), -1
    logits[6], target[6] = -inf, 16
    for rank, got in enumerate(Ranks(2, monkeypatch).run(logits, target, dloss, label_smoothing=smoothing)):
        exact = run(cross_entropy_reference, logits.double(), target, dloss, label_smoothing=smoothing)
        part = slice(8 * rank, 8 * rank + 8)
        for value, right in ((got.loss, exact.loss), (got.dlogits, exact.dlogits[..., part])):
            torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_group_of_one_rank_needs_no_collective(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, target, dloss = make((3, 2), 24, torch.float32, device)
    ranks = Ranks(1, monkeypatch)
    assert ranks.run(logits, target, dloss)[0] == run(vocab_parallel_cross_entropy, logits, target, dloss)
    assert not ranks.gathers


def test_checked_labels_of_a_split_vocabulary(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target, dloss = make((4,), 24, torch.float32, device)
    ranks = Ranks(2, monkeypatch)
    target[2] = 24
    with pytest.raises(IndexError, match=r"label 24 at position \(2,\).*24 entries"):
        ranks.run(logits, target, dloss, check_labels=True)
    assert not ranks.gathers
    target[2] = 23
    ranks.run(logits, target, dloss, check_labels=True)


def test_a_part_that_starts_elsewhere(device: torch.device) -> None:
    logits, target, dloss = make((9,), 24, torch.float32, device)
    expected = run(vocab_parallel_cross_entropy, logits, target, dloss)
    moved = torch.where(target >= 0, target + 1000, target)
    assert run(vocab_parallel_cross_entropy, logits, moved, dloss, vocab_start=1000) == expected


# --- Refusals ---


def test_refusals(device: torch.device) -> None:
    logits, target, _ = make((4, 2), 8, torch.float32, device)
    call = vocab_parallel_cross_entropy
    with pytest.raises(TypeError, match="float64"):
        call(logits.double(), target)
    with pytest.raises(TypeError, match="int32"):
        call(logits, target.int())
    with pytest.raises(ValueError, match=r"\(4,\).*\(4, 2, 8\).*\(4, 2\)"):
        call(logits, target[:, 0])
    with pytest.raises(ValueError, match=r"\(4, 2, 0\)"):
        call(logits[..., :0], target)
    with pytest.raises(ValueError, match=r"shape \(\)"):
        call(logits[0, 0, 0], target[0, 0])
    with pytest.raises(ValueError, match="meta"):
        call(logits, target.to("meta"))
    for smoothing in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="label_smoothing"):
            call(logits, target, label_smoothing=smoothing)
    with pytest.raises(ValueError, match="two entries"):
        call(logits[..., :1], target, label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"'shard'.*global, partition"):
        call(logits, target, label_smoothing_scope="shard")


# --- Launch choices ---


def test_tiles_fit_the_hardware() -> None:
    for columns, size, aligned in itertools.product(
        (1, 2, 3, 17, *range(100, 40000, 777), 151936), (2, 4), (False, True)
    ):
        for warp_size in (32, 64):
            tile = choose_tile(columns, size, aligned, warp_size)
            threads = tile.warps * warp_size
            assert tile.warps >= 1
            assert tile.warps & (tile.warps - 1) == 0
            assert threads <= 1024
            # one thread to an element: in place relies on it
            assert tile.rows * tile.lanes == threads
            assert tile.block < 2 * max(columns, tile.vector)


def test_the_sum_of_many_tiles(device: torch.device) -> None:
    # One value is nearly all of its lane's sum, to which each tile adds the same, rounded in the same way.
    logits = (torch.rand(8, 4096, device=device) - 13).repeat(1, 16)
    logits[:, 0] = 0
    target = torch.zeros(8, dtype=torch.int64, device=device)
    loss = vocab_parallel_cross_entropy(logits, target)
    exact = cross_entropy_reference(logits.double(), target)
    error = ((loss.double().exp() - exact.exp()) / exact.exp()).abs()
    assert error.max() <= 8 * 2.0**-24, f"{error.max():.1e}"  # the values of one tile


# --- Only on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("columns", [32000, 50257, 128256, 151936])
def test_real_vocabularies(columns: int, smoothing: float, device: torch.device) -> None:
    for dtype in DTYPES:
        logits, target, dloss = make((61, 3), columns, dtype, device)
        got = run(vocab_parallel_cross_entropy, logits, target, dloss, label_smoothing=smoothing)
        check(logits, target, dloss, got, label_smoothing=smoothing)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device: torch.device) -> None:
    columns = 151936
    rows = 2**31 // columns + 1000
    logits = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
    target = torch.randint(0, columns, (rows,), device=device)
    dloss = torch.randn(rows, device=device)
    result = run(vocab_parallel_cross_entropy, logits, target, dloss)
    for part in (slice(0, 3), slice(rows - 3, rows)):
        check(logits[part], target[part], dloss[part], Result(result.loss[part], result.dlogits[part]))
    assert not result.dlogits.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_graph_capture(smoothing: float, device: torch.device, capture: Any) -> None:
    logits, target, dloss = make((64, 2), 32000, torch.bfloat16, device)
    logits.requires_grad_()

    def step() -> Result:
        loss = vocab_parallel_cross_entropy(logits, target, label_smoothing=smoothing)
        return Result(loss, torch.autograd.grad(loss, logits, dloss)[0])

    replay = capture(step, (logits, target, dloss))
    for _ in range(3):
        fresh = make((64, 2), 32000, torch.bfloat16, device)
        assert replay(fresh) == run(vocab_parallel_cross_entropy, *fresh, label_smoothing=smoothing)
    with pytest.raises(RuntimeError, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        vocab_parallel_cross_entropy(logits, target, check_labels=True)


@pytest.mark.gpu
def test_token_counts_do_not_specialise(device: torch.device, compiled_variants: Any) -> None:
    def step(*tokens: int) -> None:
        logits, target, dloss = make(tokens, 32000, torch.bfloat16, device)
        run(vocab_parallel_cross_entropy, logits, target, dloss.t().contiguous().t())

    before = compiled_variants(module)
    step(5, 3)
    first = compiled_variants(module)
    for tokens in itertools.product((1, 2, 15, 16, 17, 100, 128, 1000), (1, 2, 3, 16)):
        step(*tokens)
    assert compiled_variants(module) == first
    assert first - before <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True])
def test_peak_memory(in_place: bool, device: torch.device) -> None:
    rows, columns = 8192, 151936
    source = torch.zeros(rows, 1, columns, dtype=torch.bfloat16, device=device).requires_grad_()
    logits = source * 1  # not a leaf
    target = torch.randint(0, columns, (rows, 1), device=device)
    dloss = torch.ones(rows, 1, device=device)
    vocab_parallel_cross_entropy(logits[:1], target[:1])  # the count of labels, for the process's life
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = vocab_parallel_cross_entropy(logits, target, in_place=in_place)
    assert torch.cuda.max_memory_allocated() - before <= 64 * rows
    (gradient,) = torch.autograd.grad(loss, logits, dloss)
    peak = torch.cuda.max_memory_allocated() - before
    assert (gradient.data_ptr() == logits.data_ptr()) == in_place
    assert peak <= (0 if in_place else rows * columns * 2) + 64 * rows
