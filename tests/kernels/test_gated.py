# SPDX-License-Identifier: Apache-2.0
"""SwiGLU and its kin against float64, in Triton's interpreter or, where there is a GPU, compiled."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from liger_kernels import gated as module
from liger_kernels import launches
from liger_kernels.gated import quick_geglu, squared_relu, swiglu, swiglu_reference
from torch.utils.checkpoint import checkpoint

Inputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

# All types can hold it, and some values of bfloat16 are equal to it, which still have their gradients.
CLAMP = 0.6875


@dataclass(frozen=True)
class Mode:
    """A function of the kernels' module, its operands beside y, and options."""

    kind: str = "swiglu"
    operands: tuple[str, ...] = ()
    options: tuple[tuple[str, float], ...] = ()

    @property
    def parts(self) -> int:
        """How many times as wide as the result y is."""
        return 1 if self.kind == "squared_relu" else 2

    def _call(self, function: Callable[..., torch.Tensor], inputs: Inputs, **options: Any) -> torch.Tensor:
        named = {k: x for k, x in zip(("bias", "weights"), inputs[1:]) if x is not None}
        return function(inputs[0], **named, **{**dict(self.options), **options})

    def __call__(
        self,
        y: torch.Tensor,
        bias: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        return self._call(getattr(module, self.kind), (y, bias, weights), **options)

    def reference(
        self,
        y: torch.Tensor,
        bias: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        return self._call(getattr(module, f"{self.kind}_reference"), (y, bias, weights), **options)

    def launches(self, *, bias: bool = False, weights: bool = False) -> dict[str, int]:
        """Those of a forward and a backward where these gradients are asked for."""
        counts = {f"{self.kind}_forward": 1, f"{self.kind}_backward": 1 + (bias and weights)}
        return counts | ({f"{self.kind}_bias_reduce": 1} if bias else {})


# What each launch is given, and each entry of Megatron-Core: the clamp is not that of the kernels' users
# there, but one that cuts off a good part of these numbers.
FORMS = {
    "plain": Mode(),
    "bias": Mode(operands=("bias",)),
    "weights": Mode(operands=("weights",)),
    "geglu": Mode("geglu"),
    "geglu-bias": Mode("geglu", ("bias",)),
    "quick-weights": Mode("quick_geglu", ("weights",)),
    "quick-bias-weights": Mode(
        "quick_geglu", ("bias", "weights"), (("linear_offset", 1.0), ("clamp_value", CLAMP))
    ),
    "squared": Mode("squared_relu"),
    "squared-weights": Mode("squared_relu", ("weights",)),
}
SWIGLU_MODES = ["plain", "bias", "weights"]
MODES = list(FORMS)
FLOAT8_MODES = [name for name, mode in FORMS.items() if mode.kind in ("swiglu", "quick_geglu")]

# The regimes of a launch. n = 1 and 3: odd, no wide access, a hundred rows and more to a program. 128: many
# rows to a program, all lanes used. 1000: a multiple of 8 only, masked tail. 1536: a tail that is a multiple
# of 16 (an expert of Qwen3-235B). 4864 (Qwen2.5-0.5B) and 14336 (Llama 3 8B): one and several column blocks,
# whatever the element size.
COLUMNS = [1, 3, 128, 1000, 1536, 4864, 14336]
# One row, an even and an odd number, and more than the rows of one program or of one split of the bias
# gradient.
ROWS = [1, 2, 7, 33]

# Beyond the one rounding at the store: float32 arithmetic of a dozen operations and an exponential of 2
# units.
ARITHMETIC = 16 * 2.0**-24

# The interpreter's NumPy warns of what these tests are about.
IGNORE_OVERFLOW = pytest.mark.filterwarnings("ignore::RuntimeWarning")


NO_FLOAT8 = "a GPU without float8 conversions"
FLOAT8 = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)
needs_float8 = pytest.mark.skipif(not FLOAT8, reason=NO_FLOAT8)


@dataclass
class Result:
    out: torch.Tensor
    dy: torch.Tensor | None
    dbias: torch.Tensor | None
    dweights: torch.Tensor | None

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}


def leaf(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.detach().requires_grad_()


def run(
    function: Callable[..., torch.Tensor],
    inputs: Inputs,
    dout: torch.Tensor,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Result:
    """Output and gradients of `function`, all computed in `dtype` if given."""
    y, bias, weights = (x if x is None or dtype is None else x.to(dtype) for x in inputs)
    y, bias, weights = leaf(y), leaf(bias), leaf(weights)
    out = function(y, bias, weights, **options)
    out.backward(dout if dtype is None else dout.to(dtype))
    return Result(
        out.detach(), y.grad, None if bias is None else bias.grad, None if weights is None else weights.grad
    )


def make(
    mode: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Inputs, torch.Tensor]:
    """Fresh random inputs and an output gradient. `shape` is that of the output."""
    form = FORMS[mode]
    wide = (*shape[:-1], form.parts * shape[-1])
    y = torch.randn(wide, device=device).to(dtype)
    bias = torch.randn(wide[-1], device=device).to(dtype) if "bias" in form.operands else None
    weights = torch.rand(*shape[:-1], 1, device=device) if "weights" in form.operands else None
    return (y, bias, weights), torch.randn(shape, device=device).to(dtype)


def scales(mode: Mode, inputs: Inputs, dout: torch.Tensor) -> dict[str, torch.Tensor]:
    """For each result the magnitudes of its terms, summed in float64: what its error scales with."""
    y, bias, weights = (None if x is None else x.double().abs() for x in inputs)
    dout = dout.double().abs()
    y = y if bias is None else y + bias
    if mode.kind == "squared_relu":
        out, dy = y * y, (2 * dout * y,)
    else:
        gate, up = y.chunk(2, -1)
        up = up + dict(mode.options).get("linear_offset", 0.0)
        out, dy = gate * up, (dout * up * (1 + gate), dout * gate)
    found = {}
    if weights is not None:
        found["dweights"] = (dout * out).sum(-1, keepdim=True)
        out, dy = out * weights, tuple(half * weights for half in dy)
    found |= {"out": out, "dy": torch.cat(dy, -1)}
    return found | {"dbias": found["dy"].reshape(y.shape[:-1].numel(), y.shape[-1]).sum(0)}


def check(inputs: Inputs, dout: torch.Tensor, got: Result, mode: str = "plain", **options: Any) -> None:
    """`got` is rounded once, and no further from float64 than PyTorch's computation in these dtypes."""
    form = FORMS[mode]
    exact = run(form.reference, inputs, dout, torch.float64, **options).tensors()
    native = run(form.reference, inputs, dout, **options).tensors()
    scale = scales(form, inputs, dout)
    assert got.tensors().keys() == exact.keys()
    for name, value in got.tensors().items():
        assert value.dtype == native[name].dtype, name
        assert value.shape == native[name].shape, name
        half_unit = torch.finfo(value.dtype).eps / 2
        error = (value.double() - exact[name]).abs()
        # 2^-24: half the smallest subnormal of float16; the other two's are far smaller still.
        allowed = half_unit * exact[name].abs() + ARITHMETIC * scale[name]
        allowed += 2.0**-25 if value.dtype == torch.float16 else 1e-37
        worst = (error - allowed).max() if error.numel() else torch.zeros(())
        assert worst <= 0, f"{name}: {worst:.2e} above one rounding"
        if value.numel() >= 256:  # fewer can be lucky in PyTorch's computation and unlucky in ours
            theirs = (native[name].double() - exact[name]).norm()
            assert error.norm() <= theirs + ARITHMETIC * exact[name].norm(), name


# The launches of all are alike, so that SwiGLU's go through all regimes, the others' through some.
@pytest.mark.parametrize(
    ("mode", "n"),
    [(mode, n) for mode in MODES for n in (COLUMNS if mode in SWIGLU_MODES else (3, 1000, 2688, 4864))],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(n: int, dtype: torch.dtype, mode: str, device: torch.device) -> None:
    for rows in ROWS if n < 10000 else ROWS[:3]:
        inputs, dout = make(mode, (rows, n), dtype, device)
        check(inputs, dout, run(FORMS[mode], inputs, dout), mode)


@pytest.mark.parametrize("mode", ["plain", "bias", "quick-bias-weights", "squared-weights"])
@pytest.mark.parametrize("shape", [(5,), (1, 24), (3, 2, 24), (2, 1, 3, 24)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...], mode: str, device: torch.device) -> None:
    inputs, dout = make(mode, shape, torch.bfloat16, device)
    check(inputs, dout, run(FORMS[mode], inputs, dout), mode)


@pytest.mark.parametrize("mode", ["bias", "quick-bias-weights"])
def test_many_rows_to_a_split_of_the_bias_gradient(mode: str, device: torch.device) -> None:
    rows = 2000 if device.type == "cpu" else 100_000
    inputs, dout = make(mode, (rows, 24), torch.bfloat16, device)
    check(inputs, dout, run(FORMS[mode], inputs, dout), mode)


# --- Clamped ---


@pytest.mark.parametrize("mode", SWIGLU_MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 128, 1000, 4864])
def test_clamped(n: int, dtype: torch.dtype, mode: str, device: torch.device) -> None:
    for rows in (1, 7):
        inputs, dout = make(mode, (rows, n), dtype, device)
        check(inputs, dout, run(swiglu, inputs, dout, clamp_value=CLAMP), clamp_value=CLAMP)


def test_known_values_clamped(device: torch.device) -> None:
    """At the bound there is a gradient, beyond none; the other half sees the bound. NaN and infinities."""
    inf, nan = float("inf"), float("nan")
    y = torch.tensor([[1.0, 2.0, -9.0, inf, 1.0, 1.0, 2.0, nan], [1.0, 2.0, 1.0, 1.0, -2.0, -9.0, inf, 1.0]])
    y = y.t().contiguous().to(device)
    result = run(swiglu, (y, None, None), torch.ones(8, 1, device=device), clamp_value=1.0)
    silu, slope = 0.7310586, 0.9276705
    low, low_slope = -9.0 * 1.2339458e-4, 1.2339458e-4 * (1 - 9 * (1 - 1.2339458e-4))
    out = [silu, silu, low, silu, -silu, -silu, silu, nan]
    dgate = [slope, 0.0, low_slope, 0.0, -slope, -slope, 0.0, nan]
    dup = [silu, 0.0, low, silu, 0.0, 0.0, 0.0, nan]
    expected = torch.tensor(out)[:, None]
    torch.testing.assert_close(result.out.cpu(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    expected = torch.tensor([dgate, dup]).t()
    torch.testing.assert_close(result.dy.cpu(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    with pytest.raises(ValueError, match=r"clamp_value is 0\.0"):
        swiglu(y, clamp_value=0)


@IGNORE_OVERFLOW
def test_known_values_clamped_before_the_bias(device: torch.device) -> None:
    """The bias goes beyond the bound, and has the gradients that the input has not."""
    y = torch.tensor([[1.0, 1.0], [2.0, -2.0], [-9.0, 0.0]], device=device)
    bias = torch.tensor([1.0, 2.0], device=device)
    weights = torch.tensor([[1.0], [2.0], [1.0]], device=device)

    options = {"linear_offset": 1.0, "clamp_value": 1.0}

    result = run(quick_geglu, (y, bias, weights), torch.ones(3, 1, device=device), **options)
    # quick_gelu and its slope at 2 and -8; up is 1, -1 and 0, and 3 more.
    act, slope, low, low_slope = 1.9356586, 1.0738154, -9.7664289e-6, -1.5401638e-5
    expected = {
        "out": [[4 * act], [2 * 2 * act], [3 * low]],
        "dy": [[4 * slope, act], [0.0, 0.0], [3 * low_slope, low]],
        "dbias": [4 * slope + 2 * 2 * slope + 3 * low_slope, act + 2 * act + low],
        "dweights": [[4 * act], [2 * act], [3 * low]],
    }
    for name, value in result.tensors().items():
        right = torch.tensor(expected[name])
        torch.testing.assert_close(value.cpu(), right, rtol=1e-5, atol=1e-9, msg=name)
    nan, inf = float("nan"), float("inf")
    strange = torch.tensor([[nan, 0.5], [0.5, nan], [inf, 0.5], [0.5, -inf], [-inf, 0.5]], device=device)
    ones = torch.ones(5, 1, device=device)
    got = run(quick_geglu, (strange, bias, ones), ones, **options)
    exact = run(module.quick_geglu_reference, (strange, bias, ones), ones, **options)
    for name, value in got.tensors().items():
        torch.testing.assert_close(value, exact.tensors()[name], equal_nan=True, msg=name)
    with pytest.raises(ValueError, match=r"quick_geglu: clamp_value is -1\.0"):
        quick_geglu(y, clamp_value=-1)


# --- Kept for the backward as float8 ---


def in_float8(y: torch.Tensor) -> torch.Tensor:
    """The values of `y` as a float8 store keeps them, in its dtype."""
    return y.clamp(-448, 448).to(torch.float8_e4m3fn).to(y.dtype)


@needs_float8
@pytest.mark.parametrize("mode", FLOAT8_MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 128, 1000, 4864])
def test_float8_store(n: int, dtype: torch.dtype, mode: str, device: torch.device) -> None:
    """The output is that of the input, the gradients those of the copy, before the bias, in all shapes."""
    for shape in ((1, n), (7, n), (3, 2, n)):
        inputs, dout = make(mode, shape, dtype, device)
        got = run(FORMS[mode], inputs, dout, fp8_input_store=True)
        assert torch.equal(got.out, FORMS[mode](*inputs))
        stored = (in_float8(inputs[0]), *inputs[1:])
        got.out = FORMS[mode](*stored)
        check(stored, dout, got, mode)


@needs_float8
@pytest.mark.parametrize("mode", FLOAT8_MODES)
def test_float8_store_strides_in_place_and_clamped(mode: str, device: torch.device) -> None:
    inputs, dout = make(mode, (6, 40), torch.bfloat16, device)
    stored = (in_float8(inputs[0]), *inputs[1:])
    expected = run(FORMS[mode], stored, dout, clamp_value=CLAMP)
    for layout in (torch.clone, sliced, every_second, rows_last):
        source = leaf(inputs[0])
        y = layout(source * 1)
        bias, weights = leaf(inputs[1]), leaf(inputs[2])
        out = FORMS[mode](y, bias, weights, in_place=True, fp8_input_store=True, clamp_value=CLAMP)
        out.backward(dout)
        assert torch.equal(y, inputs[0])
        assert torch.equal(source.grad, expected.dy)


@contextmanager
def packed() -> Iterator[list[torch.Tensor]]:
    """What is saved for the backward."""
    kept: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept


@needs_float8
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@IGNORE_OVERFLOW
def test_float8_store_saturates(dtype: torch.dtype, device: torch.device) -> None:
    """Every bfloat16 and some more: to the nearest, ties to even, and no NaN that was none."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    more = torch.tensor([464.0, 465.0, 480.0, 1.0625, 1.06251, 2.0**-10, 1.01 * 2.0**-10, -(2.0**-7)])
    y = torch.cat((bits.float(), more)).to(dtype).view(-1, 2).to(device)
    with packed() as kept:
        swiglu(leaf(y), fp8_input_store=True)
    assert [x.dtype for x in kept] == [torch.float8_e4m3fn]
    expected = y.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(kept[0].float().nan_to_num(nan=-1e9), expected.nan_to_num(nan=-1e9))


@needs_float8
@pytest.mark.parametrize("mode", FLOAT8_MODES)
def test_float8_store_keeps_the_copy_alone(mode: str, device: torch.device) -> None:
    """A byte an element, its own storage; the input goes when its maker lets it go."""
    inputs, dout = make(mode, (33, 1000), torch.bfloat16, device)
    source, bias, weights = (leaf(x) for x in inputs)
    y = source * 1
    memory = weakref.ref(y.untyped_storage())
    with packed() as kept:
        out = FORMS[mode](y, bias, weights, fp8_input_store=True)
    del y
    gc.collect()  # the interpreter leaves a cycle behind
    assert memory() is None
    assert [x.untyped_storage().nbytes() for x in kept if x is not bias and x is not weights] == [33 * 2000]
    out.backward(dout)
    assert source.grad.dtype == torch.bfloat16


@needs_float8
def test_float8_store_of_what_needs_no_backward(device: torch.device) -> None:
    (y, _, _), _ = make("plain", (5, 40), torch.bfloat16, device)
    with packed() as kept:
        frozen = swiglu(y, fp8_input_store=True)
        with torch.no_grad():
            unwatched = swiglu(leaf(y), fp8_input_store=True)
    assert torch.equal(frozen, unwatched)
    assert not kept


# --- Marked for offloading ---


@pytest.mark.parametrize("mode", SWIGLU_MODES)
@pytest.mark.parametrize("options", [{}, {"fp8_input_store": True}, {"in_place": True}], ids=str)
def test_offloaded(mode: str, options: dict[str, bool], device: torch.device) -> None:
    """What is saved of the input, and the bias, carry the mark; the caller's input and the weights do not."""
    if "fp8_input_store" in options and not FLOAT8:
        pytest.skip(NO_FLOAT8)
    inputs, dout = make(mode, (3, 2, 40), torch.bfloat16, device)
    expected = run(swiglu, inputs, dout, **options)
    source, bias, weights = (leaf(x) for x in inputs)
    y = source * 1
    before = y.detach().clone()
    with packed() as kept:
        out = swiglu(y, bias, weights, cpu_offload_input=True, **options)
    assert [hasattr(x, "activation_offloading") for x in kept] == [x is not weights for x in kept]
    assert all(x.activation_offloading is True for x in kept if x is not weights)
    assert len(kept) == (1 if mode == "plain" else 2)
    assert any(x is bias for x in kept) == (mode == "bias")
    assert not hasattr(y, "activation_offloading")
    out.backward(dout)
    assert torch.equal(y, before)
    for got, right in ((source, expected.dy), (bias, expected.dbias), (weights, expected.dweights)):
        assert got is None or torch.equal(got.grad, right)


def test_offloaded_is_never_in_place(device: torch.device) -> None:
    """Without hooks too, and a bias that is no contiguous tensor carries the mark itself."""
    (y, bias, _), dout = make("bias", (6, 40), torch.bfloat16, device)
    source, strided = leaf(y), bias.repeat_interleave(2)[::2]
    hidden = source * 1
    swiglu(hidden, strided, in_place=True, cpu_offload_input=True).backward(dout)
    assert torch.equal(hidden, y)
    assert strided.activation_offloading is True
    assert swiglu(y[:0], strided, cpu_offload_input=True).shape == (0, 40)


# --- Values known in advance ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_known_values(dtype: torch.dtype, device: torch.device) -> None:
    y = torch.tensor([[1.0, 2.0]], dtype=dtype, device=device)
    result = run(swiglu, (y, None, None), torch.ones(1, 1, dtype=dtype, device=device))
    close = torch.finfo(dtype).eps
    torch.testing.assert_close(
        result.out.cpu().double(), torch.tensor([[1.462117]]).double(), rtol=close, atol=1e-6
    )
    expected = torch.tensor([[1.855341, 0.731059]]).double()
    assert result.dy is not None
    torch.testing.assert_close(result.dy.cpu().double(), expected, rtol=close, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "out", "dy"),
    [
        # gelu(1) by tanh is 0.841192 and its slope 1.082964; quick_gelu(1) is 0.845796, its slope 1.067780.
        ("geglu", 1.68238398, [2.16592817, 0.84119199]),
        ("quick-weights", 1.69159153, [2.13555921, 0.84579577]),
        ("squared", [1.0, 4.0], [2.0, 4.0]),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_known_values_of_the_kin(
    dtype: torch.dtype, mode: str, out: Any, dy: list[float], device: torch.device
) -> None:
    y = torch.tensor([[1.0, 2.0]], dtype=dtype, device=device)
    columns = 2 // FORMS[mode].parts
    result = run(FORMS[mode], (y, None, None), torch.ones(1, columns, dtype=dtype, device=device))
    close = torch.finfo(dtype).eps
    for value, right in ((result.out, out), (result.dy, dy)):
        expected = torch.tensor(right).double().view(1, -1)
        torch.testing.assert_close(value.cpu().double(), expected, rtol=close, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_known_values_with_bias(dtype: torch.dtype, rows: int, device: torch.device) -> None:
    """A sum kept in bfloat16 stops growing long before 4096 rows."""
    y = torch.tensor([[0.5, 1.0]], dtype=dtype, device=device).repeat(rows, 1)
    bias = torch.tensor([0.5, 1.0], dtype=dtype, device=device)
    result = run(swiglu, (y, bias, None), torch.ones(rows, 1, dtype=dtype, device=device))
    close = torch.finfo(dtype).eps
    assert result.dy is not None
    assert result.dbias is not None
    torch.testing.assert_close(
        result.out.cpu().double(), torch.full((rows, 1), 1.462117).double(), rtol=close, atol=1e-6
    )
    expected = torch.tensor([1.85534102, 0.73105858], dtype=torch.float64)
    torch.testing.assert_close(result.dy.cpu().double(), expected.repeat(rows, 1), rtol=close, atol=1e-6)
    torch.testing.assert_close(result.dbias.cpu().double(), expected * rows, rtol=max(close, 1e-6), atol=0)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_known_values_with_weights(weight_dtype: torch.dtype, device: torch.device) -> None:
    y = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16, device=device)
    weights = torch.tensor([[0.5]], dtype=weight_dtype, device=device)
    result = run(swiglu, (y, None, weights), torch.ones(1, 1, dtype=torch.bfloat16, device=device))
    close = torch.finfo(torch.bfloat16).eps
    assert result.dy is not None
    assert result.dweights is not None
    assert (result.out.dtype, result.dy.dtype, result.dweights.dtype) == (y.dtype, y.dtype, weight_dtype)
    torch.testing.assert_close(
        result.out.cpu().double(), torch.tensor([[0.731059]]).double(), rtol=close, atol=0
    )
    expected = torch.tensor([[0.927671, 0.365529]]).double()
    torch.testing.assert_close(result.dy.cpu().double(), expected, rtol=close, atol=0)
    close = max(torch.finfo(weight_dtype).eps, 1e-6)
    torch.testing.assert_close(
        result.dweights.cpu().double(), torch.tensor([[1.462117]]).double(), rtol=close, atol=0
    )


@pytest.mark.parametrize("mode", ["plain", "geglu", "quick-weights", "squared"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@IGNORE_OVERFLOW
def test_extreme_values(dtype: torch.dtype, mode: str, device: torch.device) -> None:
    """Infinities and NaN come out where float64 has them; nothing overflows on the way to a finite result."""
    inf, nan, tiny = float("inf"), float("nan"), torch.finfo(dtype).smallest_normal / 8
    values = [0.0, -0.0, 1.0, -1.0, 20.0, -20.0, 1e4, -1e4, inf, -inf, nan, tiny, -tiny]
    pairs = torch.tensor(list(itertools.product(values, values)), dtype=torch.float64)
    inputs: Inputs = (pairs.to(dtype).to(device), None, None)
    dout = torch.ones(len(pairs), 2 // FORMS[mode].parts, dtype=dtype, device=device)
    got, exact = (
        run(FORMS[mode], inputs, dout).tensors(),
        run(FORMS[mode].reference, inputs, dout, torch.float64).tensors(),
    )
    smallest = max(torch.finfo(dtype).smallest_normal, 1e-37)
    # Where what goes into an exponential is rounded, the result is off by that times its size, 34 at -20.
    close = max(2 * torch.finfo(dtype).eps, 0.0 if mode == "plain" else 64 * 2.0**-24)
    # Autograd adds two parts of quick-GELU's slope, infinite ones of other signs where up is infinite.
    compared = torch.full((len(pairs),), True) if mode != "quick-weights" else ~pairs[:, 1].isinf()
    for name, value in got.items():
        rows = compared if name == "dy" else slice(None)
        rounded = exact[name].to(dtype).double()[rows]
        torch.testing.assert_close(
            value.double()[rows], rounded, rtol=close, atol=smallest, equal_nan=True, msg=name
        )


@IGNORE_OVERFLOW
def test_gelu_of_numbers_whose_cube_overflows(device: torch.device) -> None:
    """As upstream's formula, which is finite as far as the square is."""
    gate = torch.tensor([1e14, -1e14, 1e18, -1e18], device=device)
    y = torch.stack((gate, torch.full_like(gate, 2.0)), 1)
    result = run(FORMS["geglu"], (y, None, None), torch.ones(4, 1, device=device))
    assert torch.equal(result.out[:, 0], torch.where(gate > 0, 2 * gate, 0.0))
    expected = torch.stack((2.0 * (gate > 0), gate.clamp(min=0)), 1)
    assert torch.equal(result.dy, expected)


def test_subnormal_results_survive(device: torch.device) -> None:
    """Not flushed to zero: neither a subnormal bfloat16 nor a subnormal float16."""
    for dtype, gate in ((torch.bfloat16, 1e-39), (torch.float16, 1e-6)):
        y = torch.tensor([[gate, 1.0]], device=device).to(dtype)
        out = swiglu(y)
        assert out.item() == pytest.approx(y[0, 0].item() / 2, rel=0.1, abs=0)


@IGNORE_OVERFLOW
def test_an_infinite_bias_leaves_no_nan_of_rows_past_the_end(device: torch.device) -> None:
    """Three rows leave most rows of the tile empty; with the bias alone in them, gradients are 0 · inf."""
    y, dout = torch.rand(3, 4, device=device), torch.rand(3, 2, device=device) + 0.5
    bias = torch.tensor(
        [float("inf"), 1.0, 1.0, float("inf")], device=device
    )  # gate of one column, up of the other
    got = run(swiglu, (y, bias, None), dout)
    exact = run(swiglu_reference, (y, bias, None), dout, torch.float64)
    assert exact.dbias[1] == exact.dbias[2] == float("inf")
    torch.testing.assert_close(got.dbias.double(), exact.dbias, equal_nan=True, rtol=1e-5, atol=1e-6)


# --- Strides ---


def sliced(x: torch.Tensor) -> torch.Tensor:
    """The same values, in the middle of a wider buffer and off its 16-byte boundaries."""
    buffer = torch.full((*x.shape[:-1], x.shape[-1] + 5), float("nan"), dtype=x.dtype, device=x.device)
    buffer[..., 3:-2] = x
    return buffer[..., 3:-2]


def every_second(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, dim=0)[::2]


def rows_last(x: torch.Tensor) -> torch.Tensor:
    """Columns are not adjacent."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def batch_first(x: torch.Tensor) -> torch.Tensor:
    """The two leading dimensions are swapped in memory: no single row stride, unless one of them is 1."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("shape", [(6, 40), (3, 2, 40), (4, 1, 24)], ids=str)
@pytest.mark.parametrize("dout_layout", [torch.clone, sliced, every_second, rows_last, batch_first])
@pytest.mark.parametrize("y_layout", [torch.clone, sliced, every_second, rows_last, batch_first])
def test_strides(
    y_layout: Callable[[torch.Tensor], torch.Tensor],
    dout_layout: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    (y, bias, _), dout = make("bias", shape, torch.bfloat16, device)
    for extra in (None, bias):
        expected = run(swiglu, (y, extra, None), dout)
        strided = y_layout(y).requires_grad_()
        out = swiglu(strided, extra)
        (dy,) = torch.autograd.grad(out, strided, dout_layout(dout))
        assert torch.equal(out, expected.out)
        assert torch.equal(dy, expected.dy)


def test_row_stride(device: torch.device) -> None:
    x = torch.zeros(4, 3, 8, device=device)
    assert launches.row_stride(x) == 8
    assert launches.row_stride(x[..., 1:6]) == 8
    assert launches.row_stride(x[:, 1:2]) == 24
    assert launches.row_stride(x[::2, :1]) == 48
    assert launches.row_stride(x[:, :2]) is None
    assert launches.row_stride(x.transpose(0, 1)) is None
    assert launches.row_stride(x[..., ::2]) is None
    assert launches.row_stride(x[0].t()) is None
    assert launches.row_stride(x[0, :1].expand(5, 8)) == 0
    assert launches.row_stride(x[0, 0]) == 8
    assert launches.row_stride(x[..., :1]) == 8
    assert launches.row_stride(torch.zeros(1, device=device).expand(4, 8)) is None
    assert launches.row_stride(torch.zeros(1, 1, device=device).expand(4, 1)) == 0
    assert launches.as_rows(x[..., 1:6])[0].data_ptr() == x[..., 1:6].data_ptr()
    copy, stride = launches.as_rows(x.transpose(0, 1))
    assert copy.is_contiguous()
    assert stride == 8


@pytest.mark.parametrize("mode", MODES)
def test_output_gradients_that_repeat(mode: str, device: torch.device) -> None:
    """Gradients as `.sum()`, `.mean(0)` and a per-row loss make them: strides of 0."""
    inputs, dout = make(mode, (5, 40), torch.float32, device)
    one = torch.ones((), device=device)
    per_row = torch.arange(1.0, 6.0, device=device)[:, None]
    for repeated in (one.expand(5, 40), dout[:1].expand(5, 40), per_row.expand(5, 40)):
        got = run(FORMS[mode], inputs, repeated)
        check(inputs, repeated.contiguous(), got, mode)
    dy = [run(FORMS[mode], inputs, repeated).dy for repeated in (one.expand(5, 40), per_row.expand(5, 40))]
    torch.testing.assert_close(dy[1], dy[0] * per_row, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", ["expanded", "column", "transposed"])
def test_strides_of_weights(layout: str, device: torch.device) -> None:
    (y, _, _), dout = make("plain", (6, 40), torch.bfloat16, device)
    weights = {
        "expanded": torch.rand(1, 1, device=device).expand(6, 1),
        "column": torch.rand(6, 3, device=device)[:, 1:2],
        "transposed": torch.rand(1, 6, device=device).t(),
    }[layout]
    check((y, None, weights.contiguous()), dout, run(swiglu, (y, None, weights), dout))


def test_weights_for_leading_dimensions(device: torch.device) -> None:
    """One weight a row, whether the weights keep the leading dimensions of y or not."""
    (y, _, weights), dout = make("weights", (6, 40), torch.bfloat16, device)
    flat = run(swiglu, (y, None, weights), dout)
    for shape in ((3, 2, 1), (6, 1)):
        deep = run(swiglu, (y.view(3, 2, 80), None, weights.view(shape)), dout.view(3, 2, 40))
        assert torch.equal(deep.out, flat.out.view(3, 2, 40))
        assert torch.equal(deep.dweights, flat.dweights.view(shape))


def test_a_strided_bias(device: torch.device) -> None:
    (y, bias, _), dout = make("bias", (6, 40), torch.bfloat16, device)
    check((y, bias, None), dout, run(swiglu, (y, bias.repeat_interleave(2)[::2], None), dout))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    leading=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    n=st.integers(0, 37),
    pad=st.tuples(st.integers(0, 3), st.integers(0, 17)),
    order=st.permutations(range(3)),
    dout_order=st.permutations(range(4)),
    dtype=st.sampled_from(DTYPES),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_strides(
    leading: list[int],
    n: int,
    pad: tuple[int, int],
    order: list[int],
    dout_order: list[int],
    dtype: torch.dtype,
    mode: str,
    seed: int,
    device: torch.device,
) -> None:
    torch.manual_seed(seed)
    inputs, dout = make(mode, (*leading, n), dtype, device)
    y = inputs[0]
    # Leading dimensions in another order in memory, columns in the middle of a wider buffer, any order for
    # dout.
    memory = [d for d in order if d < len(leading)]
    width = y.shape[-1]
    buffer = torch.zeros([*(leading[d] for d in memory), pad[0] + width + pad[1]], dtype=dtype, device=device)
    strided = buffer[..., pad[0] : pad[0] + width].permute(
        *(memory.index(d) for d in range(len(leading))), -1
    )
    strided.copy_(y)
    memory = [d for d in dout_order if d < dout.dim()]
    strided_dout = dout.permute(memory).contiguous().permute(*(memory.index(d) for d in range(dout.dim())))
    check(inputs, dout, run(FORMS[mode], (strided, *inputs[1:]), strided_dout), mode)


# --- Nothing to do ---


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0, 0), (4, 0)], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("in_place", [False, True])
def test_empty(
    shape: tuple[int, ...], mode: str, in_place: bool, device: torch.device, launched: Counter[str]
) -> None:
    inputs, dout = make(mode, shape, torch.bfloat16, device)
    result = run(lambda *args: FORMS[mode](*args, in_place=in_place), inputs, dout)
    assert result.out.shape == shape
    assert result.out.dtype == torch.bfloat16
    assert result.dy.shape == inputs[0].shape
    for grad, parameter in ((result.dbias, inputs[1]), (result.dweights, inputs[2])):
        if parameter is not None:
            assert torch.equal(grad, torch.zeros_like(parameter))
    assert not launched


# --- Autograd ---


@pytest.mark.parametrize("mode", [name for name, mode in FORMS.items() if mode.operands])
def test_only_the_gradients_asked_for(mode: str, device: torch.device, launched: Counter[str]) -> None:
    inputs, dout = make(mode, (5, 40), torch.bfloat16, device)
    full = run(FORMS[mode], inputs, dout)
    expected = (full.dy, full.dbias, full.dweights)
    there = [i for i, x in enumerate(inputs) if x is not None]
    for wanted in itertools.chain(*(itertools.combinations(there, count) for count in range(1, 4))):
        launched.clear()
        tensors = [None if x is None else x.clone().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
        FORMS[mode](*tensors).backward(dout)
        for i in there:
            if i in wanted:  # another kernel may have computed it, so it need not be equal to the bit
                eps = torch.finfo(expected[i].dtype).eps
                torch.testing.assert_close(tensors[i].grad, expected[i], rtol=eps, atol=1e-6)
            else:
                assert tensors[i].grad is None
        assert launched == FORMS[mode].launches(bias=1 in wanted, weights=2 in wanted)


def test_no_gradient_no_backward(device: torch.device, launched: Counter[str]) -> None:
    (y, _, _), _ = make("plain", (5, 40), torch.bfloat16, device)
    with torch.no_grad():
        out = swiglu(y.requires_grad_())
    assert not out.requires_grad
    assert launched == {"swiglu_forward": 1}


@pytest.mark.parametrize("mode", MODES)
def test_the_output_owns_its_storage(mode: str, device: torch.device) -> None:
    for shape in ((5, 40), (5, 2, 40), (0, 40)):
        inputs, _ = make(mode, shape, torch.bfloat16, device)
        out = FORMS[mode](leaf(inputs[0]), *inputs[1:])
        assert out._base is None
        assert out.is_contiguous()
        assert out.storage_offset() == 0
        assert out.untyped_storage().nbytes() == out.numel() * out.element_size()


@pytest.mark.parametrize("mode", MODES)
def test_backward_twice_gives_the_same(mode: str, device: torch.device) -> None:
    inputs, dout = make(mode, (33, 1000), torch.bfloat16, device)
    y, bias, weights = leaf(inputs[0]), leaf(inputs[1]), leaf(inputs[2])
    leaves = [x for x in (y, bias, weights) if x is not None]
    out = FORMS[mode](y, bias, weights)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    second = torch.autograd.grad(out, leaves, dout)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("mode", MODES)
def test_two_runs_are_bitwise_equal(mode: str, device: torch.device) -> None:
    inputs, dout = make(mode, (257, 1000), torch.bfloat16, device)
    first, second = (run(FORMS[mode], inputs, dout).tensors() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_double_backward_is_refused(mode: str, constant: bool, device: torch.device) -> None:
    """Also where the output's gradient is a constant, as in a penalty on gradients."""
    inputs, _ = make(mode, (5, 40), torch.float32, device)
    y, bias, weights = (None if x is None else leaf(x) for x in inputs)
    leaves = [x for x in (y, bias, weights) if x is not None]
    dout = torch.ones(5, 40, device=device, requires_grad=not constant)
    gradients = torch.autograd.grad(FORMS[mode](y, bias, weights), leaves, dout, create_graph=True)
    for gradient in gradients:
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (gradient.sum() + y.sum()).backward(retain_graph=True)


def test_an_input_changed_after_the_forward_is_refused(device: torch.device) -> None:
    (y, _, _), _ = make("plain", (5, 40), torch.float32, device)
    y = y.requires_grad_() * 1
    out = swiglu(y)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


# --- In place ---


@pytest.mark.reuse
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", [torch.clone, sliced, every_second])
def test_in_place(mode: str, layout: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    inputs, dout = make(mode, (33, 1000), torch.bfloat16, device)
    expected = run(FORMS[mode], inputs, dout)
    source = leaf(inputs[0])
    bias, weights = leaf(inputs[1]), leaf(inputs[2])
    y = layout(source)
    grads: list[torch.Tensor] = []
    y.register_hook(grads.append)
    out = FORMS[mode](y, bias, weights, in_place=True)
    out.backward(dout)
    assert torch.equal(out, expected.out)
    assert grads[0].data_ptr() == y.data_ptr()
    assert torch.equal(source.grad, expected.dy)
    assert torch.equal(source, inputs[0])
    if bias is not None:
        assert torch.equal(bias.grad, expected.dbias)
    if weights is not None:
        # Another stride can be compiled to another order of the sum over a row.
        torch.testing.assert_close(weights.grad, expected.dweights, rtol=1e-5, atol=1e-5)


def test_in_place_leaves_the_rest_of_a_buffer_alone(device: torch.device) -> None:
    (wide, _, _), dout = make("plain", (7, 40), torch.bfloat16, device)
    buffer = torch.cat((wide, torch.ones_like(wide)), dim=1).requires_grad_() * 1
    swiglu(buffer[:, :80], in_place=True).backward(dout)
    assert torch.equal(buffer[:, 80:], torch.ones_like(wide))


@pytest.mark.reuse
@pytest.mark.parametrize("mode", MODES)
def test_in_place_a_second_backward_is_refused(mode: str, device: torch.device) -> None:
    inputs, dout = make(mode, (5, 40), torch.bfloat16, device)
    out = FORMS[mode](leaf(inputs[0]) * 1, leaf(inputs[1]), leaf(inputs[2]), in_place=True)
    out.backward(dout, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


@pytest.mark.reuse
def test_in_place_another_use_of_the_input(device: torch.device) -> None:
    """Refused if its backward comes after ours, right if it comes before."""
    (x, _, _), _ = make("plain", (5, 40), torch.float32, device)
    source = leaf(x)
    y = source * 1
    square = y.pow(2).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (swiglu(y, in_place=True).sum() + square).backward()

    grads = []
    for in_place in (False, True):
        source = leaf(x)
        y = source * 1
        out = swiglu(y, in_place=in_place).sum()
        (out + y.pow(2).sum()).backward()
        grads.append(source.grad)
    assert torch.equal(*grads)


def test_in_place_never_takes_the_memory_of_a_leaf(device: torch.device) -> None:
    (x, _, _), dout = make("plain", (6, 40), torch.bfloat16, device)
    expected = run(swiglu, (x, None, None), dout)
    for view in (lambda y: y, lambda y: y.view(3, 2, 80), lambda y: y[:]):
        source = leaf(x.clone())
        out = swiglu(view(source), in_place=True)
        out.backward(dout.view(out.shape), retain_graph=True)
        assert torch.equal(source, x)
        assert torch.equal(source.grad, expected.dy)
        assert source.grad.data_ptr() != source.data_ptr()
        out.backward(dout.view(out.shape))


def test_in_place_with_a_frozen_input(device: torch.device) -> None:
    for mode in ("bias", "weights"):
        inputs, dout = make(mode, (6, 40), torch.bfloat16, device)
        y = inputs[0].clone()
        swiglu(y, leaf(inputs[1]), leaf(inputs[2]), in_place=True).backward(dout)
        assert torch.equal(y, inputs[0])


@pytest.mark.parametrize("layout", ["expanded", "transposed", "overlapping"])
def test_in_place_takes_new_memory_where_rows_overlap_or_are_copied(
    layout: str, device: torch.device
) -> None:
    (x, _, _), dout = make("plain", (6, 40), torch.bfloat16, device)
    if layout == "expanded":
        source = leaf(x[:1].clone())
        y = (source * 1).expand(6, 80)
    elif layout == "transposed":
        source = leaf(x.t().contiguous())
        y = (source * 1).t()
    else:
        source = leaf(torch.randn(200, device=device).bfloat16())
        y = (source * 1).as_strided((6, 80), (20, 1))
    before = y.detach().clone()
    swiglu(y, in_place=True).backward(dout)
    assert torch.equal(y, before)
    reference = leaf(before.double())
    swiglu_reference(reference).backward(dout.double())
    other = leaf(source)
    expanded = {"expanded": lambda s: s.expand(6, 80), "transposed": torch.t}.get(
        layout, lambda s: s.as_strided((6, 80), (20, 1))
    )(other.double())
    (expected,) = torch.autograd.grad(expanded, other, reference.grad)
    torch.testing.assert_close(source.grad, expected, rtol=0.02, atol=0.02)


def test_in_place_and_saved_tensor_hooks(device: torch.device) -> None:
    """An offloaded input comes back as other memory, as often as it is asked for."""
    (x, _, _), dout = make("plain", (5, 40), torch.bfloat16, device)
    expected = run(swiglu, (x, None, None), dout)
    source = leaf(x)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        out = swiglu(source * 1, in_place=True)
    for _ in range(2):
        source.grad = None
        out.backward(dout, retain_graph=True)
        assert torch.equal(source.grad, expected.dy)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_saved_tensors_that_come_back_with_other_strides(
    mode: str, in_place: bool, device: torch.device
) -> None:
    """A clone of some columns of a wider buffer has rows that follow each other."""
    inputs, dout = make(mode, (5, 40), torch.bfloat16, device)
    expected = run(FORMS[mode], inputs, dout)
    source = leaf(torch.cat((inputs[0], inputs[0]), dim=1))
    bias, weights = (None if x is None else leaf(x) for x in inputs[1:])
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        width = inputs[0].shape[1]
        FORMS[mode]((source * 1)[:, :width], bias, weights, in_place=in_place).backward(dout)
    assert torch.equal(source.grad[:, :width], expected.dy)


def test_in_place_and_hooks_that_keep_the_tensor(device: torch.device) -> None:
    """Autograd checks no version under hooks, so the second backward would read the first one's gradient."""
    (x, _, _), dout = make("plain", (5, 40), torch.bfloat16, device)
    source = leaf(x)
    expected = run(swiglu, (x, None, None), dout)
    with torch.autograd.graph.saved_tensors_hooks(lambda y: y, lambda y: y):
        y = source * 1
        out = swiglu(y, in_place=True)
    for _ in range(2):
        source.grad = None
        out.backward(dout, retain_graph=True)
        assert torch.equal(source.grad, expected.dy)
    assert torch.equal(y, x)


@pytest.mark.parametrize("mode", MODES)
def test_in_place_and_recomputation(mode: str, device: torch.device) -> None:
    """The region's other operations saved the same memory, and autograd checks no version there."""
    inputs, dout = make(mode, (5, 40), torch.float32, device)

    def region(y: torch.Tensor, *rest: torch.Tensor | None, in_place: bool) -> torch.Tensor:
        return FORMS[mode](torch.tanh(y), *rest, in_place=in_place)

    grads = []
    for in_place in (False, True):
        leaves = [None if x is None else leaf(x) for x in inputs]
        out = checkpoint(region, *leaves, in_place=in_place, use_reentrant=False)
        out.backward(dout)
        grads.append([x.grad for x in leaves if x is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("operand", ["bias", "weights", "dout"])
def test_in_place_beside_an_operand_in_the_same_memory(operand: str, device: torch.device) -> None:
    (x, _, _), dout = make("plain", (300, 8), torch.float32, device)

    def call(in_place: bool) -> torch.Tensor:
        source = leaf(x)
        y = source * 1
        if operand == "bias":
            swiglu(y, y[0].detach(), in_place=in_place).backward(dout)
        elif operand == "weights":
            swiglu(y, None, y[:, :1].detach(), in_place=in_place).backward(dout)
        else:
            swiglu(y, in_place=in_place).backward(y.detach()[:1, :8].expand(300, 8))
        return source.grad

    assert torch.equal(call(True), call(False))


def test_pending_negation(device: torch.device) -> None:
    """A view whose sign is not in memory: every operand, and the output's gradient."""
    for mode in MODES:
        inputs, dout = make(mode, (5, 40), torch.float32, device)
        expected = run(FORMS[mode], inputs, dout)
        negated = tuple(None if x is None else torch._neg_view(-x) for x in inputs)
        result = run(FORMS[mode], negated, torch._neg_view(-dout))
        for name, value in expected.tensors().items():
            assert torch.equal(result.tensors()[name], value), name


# --- Refusals ---


def test_refusals(device: torch.device) -> None:
    y = torch.zeros(4, 8, device=device)
    bias, weights = torch.zeros(8, device=device), torch.zeros(4, 1, device=device)
    with pytest.raises(NotImplementedError, match="bias together with weights"):
        swiglu(y, bias, weights)
    with pytest.raises(ValueError, match=r"\(4, 7\)"):
        swiglu(y[:, :7])
    with pytest.raises(ValueError, match=r"shape \(\)"):
        swiglu(y[0, 0])
    with pytest.raises(ValueError, match=r"\(4,\).*\(4, 8\).*\(8,\)"):
        swiglu(y, bias[:4])
    with pytest.raises(ValueError, match=r"\(3, 1\).*\(4, 8\).*\(4, 1\)"):
        swiglu(y, None, weights[:3])
    with pytest.raises(ValueError, match=r"\(4,\)"):
        swiglu(y, None, weights[:, 0])
    with pytest.raises(TypeError, match="float64"):
        swiglu(y.double())
    with pytest.raises(TypeError, match=r"bfloat16.*float32"):
        swiglu(y, bias.bfloat16())
    with pytest.raises(TypeError, match="int64"):
        swiglu(y, None, weights.long())
    with pytest.raises(ValueError, match="meta"):
        swiglu(y, bias.to("meta"))
    with pytest.raises(ValueError, match="meta"):
        swiglu(y, None, weights.to("meta"))


def test_refusals_of_the_kin(device: torch.device) -> None:
    y, weights = torch.zeros(4, 7, device=device), torch.zeros(4, 1, device=device)
    assert squared_relu(y, weights).shape == (4, 7)
    with pytest.raises(ValueError, match=r"squared_relu: weights .*\(3, 1\)"):
        squared_relu(y, weights[:3])
    with pytest.raises(ValueError, match=r"squared_relu: y has shape \(\)"):
        squared_relu(y[0, 0])
    with pytest.raises(TypeError, match=r"quick_geglu: y is torch\.float64"):
        quick_geglu(y[:, :6].double())
    with pytest.raises(ValueError, match=r"quick_geglu: y has shape \(4, 7\)"):
        quick_geglu(y)


# --- Launch choices ---


def test_launches_fit_the_hardware() -> None:
    kernels = (("forward", 1), ("backward", 1), ("forward", 2), ("backward", 2), ("bias_backward", 2))
    for (kernel, parts), n, size in itertools.product(
        kernels, (1, 2, 3, 17, 2880, *range(100, 40000, 777)), (2, 4)
    ):
        for warp_size in (32, 64):
            launch = module.choose_launch(kernel, n, size, parts, warp_size)
            threads = launch.warps * warp_size
            assert launch.warps & (launch.warps - 1) == 0
            assert threads <= 1024
            assert launch.block * launch.column_blocks(n) >= n
            # no element of a tile is held by two threads: in place relies on it
            assert launch.rows * launch.block >= threads


# --- Only on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["plain", "bias", "weights", "quick-bias-weights", "squared-weights"])
def test_more_than_two_to_the_31_elements(mode: str, device: torch.device) -> None:
    n, form = 14336, FORMS[mode]
    rows = 2**31 // (form.parts * n) + 1000
    (y, bias, weights), dout = make(mode, (rows, n), torch.bfloat16, device)
    result = run(form, (y, bias, weights), dout)
    for part in (slice(0, 3), slice(rows - 3, rows)):
        inputs = (y[part], bias, None if weights is None else weights[part])
        dweights = None if result.dweights is None else result.dweights[part]
        if bias is None:
            got = Result(result.out[part], result.dy[part], None, dweights)
            check(inputs, dout[part], got, mode)
        else:
            exact = run(form.reference, inputs, dout[part], torch.float64)
            torch.testing.assert_close(result.out[part].double(), exact.out, rtol=2.0**-8, atol=1e-5)
            torch.testing.assert_close(result.dy[part].double(), exact.dy, rtol=2.0**-8, atol=1e-5)
    assert not result.dy.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_graph_capture(mode: str, device: torch.device, capture: Any) -> None:
    inputs, dout = make(mode, (64, 1536), torch.bfloat16, device)
    y, bias, weights = (leaf(x) for x in inputs)
    leaves = [x for x in (y, bias, weights) if x is not None]

    def step() -> tuple[torch.Tensor, ...]:
        out = FORMS[mode](y, bias, weights)
        return (out, *torch.autograd.grad(out, leaves, dout))

    replay = capture(step, (*leaves, dout))
    for _ in range(3):
        fresh, fresh_dout = make(mode, (64, 1536), torch.bfloat16, device)
        captured = replay((*(x for x in fresh if x is not None), fresh_dout))
        expected = list(run(FORMS[mode], fresh, fresh_dout).tensors().values())
        assert all(torch.equal(a, b) for a, b in zip(captured, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_row_counts_do_not_specialise(mode: str, device: torch.device, compiled_variants: Any) -> None:
    def step(rows: int) -> None:
        inputs, dout = make(mode, (rows, 1536), torch.bfloat16, device)
        run(FORMS[mode], inputs, dout)

    before = compiled_variants(module)
    step(5)
    first = compiled_variants(module)
    for rows in (1, 2, 15, 16, 17, 32, 64, 100, 128, 1000, 1024, 4096, 8192, 8191):
        step(rows)
    assert compiled_variants(module) == first
    assert first - before <= 3


@needs_float8
@pytest.mark.gpu
def test_memory_of_the_float8_store(device: torch.device) -> None:
    """Between the passes half of what the input takes; at the peak that, one gradient and the output."""
    rows, n = 8192, 4096
    source = torch.randn(rows, 2 * n, dtype=torch.bfloat16, device=device).requires_grad_()
    dout = torch.randn(rows, n, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = swiglu(source.view_as(source), fp8_input_store=True)
    output = rows * n * 2
    assert torch.cuda.memory_allocated() - before <= 2 * output + 2**20
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, source, dout)
    assert torch.cuda.max_memory_allocated() - before <= 4 * output + 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True])
def test_peak_memory(in_place: bool, device: torch.device) -> None:
    rows, n = 8192, 4096
    source = torch.randn(rows, 2 * n, dtype=torch.bfloat16, device=device).requires_grad_()
    dout = torch.randn(rows, n, dtype=torch.bfloat16, device=device)
    y = source * 1
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = swiglu(y, in_place=in_place)
    torch.autograd.grad(out, y, dout)
    peak = torch.cuda.max_memory_allocated() - before
    output = rows * n * 2
    assert peak <= (1 if in_place else 3) * output + 2**20
