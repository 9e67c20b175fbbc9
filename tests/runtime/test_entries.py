# SPDX-License-Identifier: Apache-2.0
"""The taken-over functions: they look like upstream's, run on the kernel, fall back where they must."""

from __future__ import annotations

import importlib
import inspect
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

FUSIONS = "megatron.core.fusions"
ENTRIES = ("bias_swiglu_impl", "weighted_bias_swiglu_impl")
GEGLU, QUICK, SQUARED = "bias_geglu_impl", "weighted_bias_quick_geglu_impl", "weighted_squared_relu_impl"
# By file: the entries, and some of the other names, which upstream's own code and its users go by.
FILES = {
    "fused_bias_swiglu": (
        ENTRIES,
        (
            "swiglu",
            "bias_swiglu",
            "weighted_swiglu",
            "swiglu_back",
            "bias_swiglu_back",
            "weighted_swiglu_back",
            "BiasSwiGLUFunction",
            "SwiGLUFunction",
            "WeightedSwiGLUFunction",
        ),
    ),
    "fused_bias_geglu": (
        (GEGLU, QUICK),
        ("geglu", "bias_geglu", "quick_gelu", "quick_geglu", "GeGLUFunction", "WeightedQuickGeGLUFunction"),
    ),
    "fused_weighted_squared_relu": ((SQUARED,), ("weighted_squared_relu", "WeightedSquaredReLUFunction")),
}
KINDS = {GEGLU: "geglu", QUICK: "quick_geglu", SQUARED: "squared_relu"}
OPS = dict.fromkeys(ENTRIES, "swiglu") | dict.fromkeys(KINDS, "activations")

Call = tuple[tuple[Any, ...], dict[str, Any]]


def counts(liger: ModuleType, entry: str) -> dict[str, Any]:
    found: dict[str, Any] = liger.counters()[OPS[entry]]["entries"][entry]
    return found


def launches(liger: ModuleType, op: str = "swiglu") -> dict[str, int]:
    found: dict[str, int] = liger.counters()[op]["launches"]
    return found


def functions(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An entry, ours and upstream's, of the tree that ``fused`` has imported."""
    (file,) = (file for file, (entries, _) in FILES.items() if name in entries)
    module = importlib.import_module(f"{FUSIONS}.{file}")
    return getattr(module, name), getattr(module, f"_upstream_{name}")


@pytest.mark.parametrize("name", OPS)
@pytest.mark.usefixtures("fused")
def test_looks_like_upstream(name: str) -> None:
    ours, upstream = functions(name)
    assert ours is not upstream
    assert inspect.signature(ours) == inspect.signature(upstream)
    assert (ours.__name__, ours.__qualname__, ours.__module__) == (name, name, upstream.__module__)
    assert ours.__doc__ == upstream.__doc__
    assert pickle.loads(pickle.dumps(ours)) is ours


@pytest.mark.parametrize("file", FILES)
@pytest.mark.usefixtures("fused")
def test_other_names_stay(file: str, pristine_tree: Path) -> None:
    """No public name is added, and those of upstream's own code are upstream's."""
    entries, untouched = FILES[file]
    path = pristine_tree / f"megatron/core/fusions/{file}.py"
    pristine: dict[str, Any] = {"__name__": "pristine"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), pristine)
    module = importlib.import_module(f"{FUSIONS}.{file}")
    public = {name for name in vars(module) if not name.startswith("_")}
    assert public == {name for name in pristine if not name.startswith("_")}
    for name in untouched:
        assert type(getattr(module, name)) is type(pristine[name])
        assert getattr(module, name).__module__ == module.__name__
    star: dict[str, Any] = {}
    exec(f"from {FUSIONS}.{file} import *", star)
    assert all(star[entry] is getattr(module, entry) for entry in entries)


@pytest.mark.usefixtures("fused")
def test_configurations_and_layers_mean_the_same_quick_gelu() -> None:
    """It is compared by identity."""
    modules = ("fusions.fused_bias_geglu", "transformer.transformer_config", "transformer.mlp")
    found = [importlib.import_module(f"megatron.core.{name}").quick_gelu for name in modules]
    assert found[0] is found[1] is found[2]


def served_calls(device: torch.device, generator: torch.Generator) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """One call for each kind that the kernel serves."""

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator).requires_grad_()

    dense, weighted = ENTRIES
    x = rand(5, 14)
    return {
        "2-D": (dense, (x, None)),
        "options off": (dense, (x, None, False, False)),
        "3-D, bias": (dense, (rand(3, 2, 14), rand(14), False, False)),
        "bfloat16": (dense, (rand(5, 14, dtype=torch.bfloat16), rand(14, dtype=torch.bfloat16))),
        "float16": (dense, (rand(5, 14, dtype=torch.float16), None)),
        "parameter": (dense, (torch.nn.Parameter(x.detach().clone()), None)),
        "strided rows": (dense, (rand(5, 28)[:, 7:21], None)),
        "no tokens": (dense, (rand(0, 14), rand(14))),
        "no gradient": (dense, (x.detach(), None)),
        "weighted": (weighted, (x, None, rand(5, 1), False)),
        "weighted, 3-D": (weighted, (rand(3, 2, 14), None, rand(6, 1))),
        "weighted, bfloat16": (weighted, (rand(5, 14, dtype=torch.bfloat16), None, rand(5, 1))),
        "weighted, no tokens": (weighted, (rand(0, 14), None, rand(0, 1))),
        "fp8 store": (dense, (x, None, True)),
        "fp8 store, 3-D, bias": (dense, (rand(3, 2, 14), rand(14), True, False)),
        "fp8 store, bfloat16": (dense, (rand(5, 14, dtype=torch.bfloat16), None, True)),
        "fp8 store, weighted": (weighted, (x, None, rand(5, 1), True)),
        "offload": (dense, (x, None, False, True)),
        "offload, 3-D, bias": (dense, (rand(3, 2, 14), rand(14), False, True)),
        "offload, fp8 store": (dense, (x, rand(14), True, True)),
        "geglu": (GEGLU, (x, None)),
        "geglu, 3-D, bias": (GEGLU, (rand(3, 2, 14), rand(14))),
        "geglu, no tokens": (GEGLU, (rand(0, 14), rand(14))),
        "geglu, bfloat16": (GEGLU, (rand(5, 14, dtype=torch.bfloat16), None)),
        "quick": (QUICK, (x, None, rand(5, 1))),
        "quick, options off": (QUICK, (x, None, rand(5, 1), False, 0.0, None)),
        "quick, 3-D, bias": (QUICK, (rand(3, 2, 14), rand(14), rand(6, 1), False, 1.0)),
        "quick, clamped": (QUICK, (x, None, rand(5, 1), False, 1.0, 0.5)),
        "quick, bias, clamped": (QUICK, (x, rand(14), rand(5, 1), False, 1, 1)),
        "quick, fp8 store": (QUICK, (x, None, rand(5, 1), True, 1.0)),
        "quick, bias, fp8 store": (QUICK, (x, rand(14), rand(5, 1), True)),
        "quick, no tokens": (QUICK, (rand(0, 14), rand(14), rand(0, 1), False, 1.0, 0.5)),
        "squared": (SQUARED, (x, rand(5, 1))),
        "squared, odd": (SQUARED, (rand(5, 7), rand(5, 1))),
        "squared, 3-D": (SQUARED, (rand(3, 2, 14), rand(6, 1))),
        "squared, bfloat16": (SQUARED, (rand(5, 14, dtype=torch.bfloat16), rand(5, 1))),
        "squared, no tokens": (SQUARED, (rand(0, 14), rand(0, 1))),
    }


def gradients(output: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if not output.requires_grad:
        return []
    seed = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape).to(output.dtype)
    return list(torch.autograd.grad(output, tensors, seed))


SERVED = [
    "2-D",
    "options off",
    "3-D, bias",
    "bfloat16",
    "float16",
    "parameter",
    "strided rows",
    "no tokens",
    "no gradient",
    "weighted",
    "weighted, 3-D",
    "weighted, bfloat16",
    "weighted, no tokens",
    "fp8 store",
    "fp8 store, 3-D, bias",
    "fp8 store, bfloat16",
    "fp8 store, weighted",
    "offload",
    "offload, 3-D, bias",
    "offload, fp8 store",
    "geglu",
    "geglu, 3-D, bias",
    "geglu, no tokens",
    "geglu, bfloat16",
    "quick",
    "quick, options off",
    "quick, 3-D, bias",
    "quick, clamped",
    "quick, bias, clamped",
    "quick, fp8 store",
    "quick, bias, fp8 store",
    "quick, no tokens",
    "squared",
    "squared, odd",
    "squared, 3-D",
    "squared, bfloat16",
    "squared, no tokens",
]


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.usefixtures("strict")
def test_served(
    fused: ModuleType, liger: ModuleType, device: torch.device, generator: torch.Generator, kind: str
) -> None:
    calls = served_calls(device, generator)
    assert list(calls) == SERVED
    name, arguments = calls[kind]
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    ours, upstream = functions(name)
    output = ours(*arguments)
    expected = upstream(*arguments)
    assert counts(liger, name) == {"kernel": 1, "off": 0, "upstream": {}}
    some = bool(output.numel())
    forward = f"{KINDS.get(name, 'swiglu')}_forward"
    assert launches(liger, OPS[name]) == ({forward: 1} if some else {})
    torch.testing.assert_close(output, expected)
    for ours, upstream in zip(gradients(output, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(ours, upstream)
    backward = sum(n for launched, n in launches(liger, OPS[name]).items() if launched != forward)
    assert (backward > 0) == (some and output.requires_grad)


def test_by_keyword_and_without_gradients(fused: ModuleType, liger: ModuleType, device: torch.device) -> None:
    x = torch.ones(2, 4, device=device, requires_grad=True)
    w = torch.ones(2, 1, device=device)
    with torch.no_grad():
        dense = fused.bias_swiglu_impl(bias=None, input=x, cpu_offload_input=False)
        weighted = fused.weighted_bias_swiglu_impl(x, bias=None, weights=w, fp8_input_store=False)
    assert torch.equal(dense, weighted)
    assert not dense.requires_grad
    assert [counts(liger, name)["kernel"] for name in ENTRIES] == [1, 1]


def test_reach(
    fused: ModuleType, liger: ModuleType, device: torch.device, generator: torch.Generator
) -> None:
    """Where upstream raises on three dimensions: rows that cannot be viewed flat, and no tokens."""
    x = torch.randn(3, 2, 8, device=device, generator=generator).transpose(0, 1)
    with pytest.raises(RuntimeError, match="view"):
        fused._upstream_bias_swiglu_impl(x, None)
    torch.testing.assert_close(
        fused.bias_swiglu_impl(x, None), fused._upstream_bias_swiglu_impl(x.contiguous(), None)
    )
    empty = torch.randn(0, 1, 8, device=device)
    with pytest.raises(RuntimeError):
        fused._upstream_bias_swiglu_impl(empty, None)
    assert fused.bias_swiglu_impl(empty, None).shape == (0, 1, 4)
    weights = torch.ones(6, 1, device=device)
    torch.testing.assert_close(
        fused.weighted_bias_swiglu_impl(x, None, weights), fused.bias_swiglu_impl(x, None)
    )
    assert counts(liger, "weighted_bias_swiglu_impl") == {"kernel": 1, "off": 0, "upstream": {}}
    for name in KINDS:
        extra = {QUICK: (None, weights), SQUARED: (weights,)}.get(name, (None,))
        ours, upstream = functions(name)
        with pytest.raises(RuntimeError, match="view"):
            upstream(x, *extra)
        torch.testing.assert_close(ours(x, *extra), upstream(x.contiguous(), *extra))
        empty = torch.randn(0, 1, 8, device=device)
        extra = {QUICK: (None, weights[:0]), SQUARED: (weights[:0],)}.get(name, (None,))
        with pytest.raises(RuntimeError):
            upstream(empty, *extra)
        assert ours(empty, *extra).shape == (0, 1, 8 if name == SQUARED else 4)
        assert counts(liger, name) == {"kernel": 2, "off": 0, "upstream": {}}


class Subclass(torch.Tensor):
    pass


DENSE, WEIGHTED = ENTRIES
REFUSED: dict[str, tuple[str, str, Callable[[torch.Tensor], Call]]] = {
    "mixed": (DENSE, "input and bias of different dtypes", lambda x: ((x, x[0].bfloat16()), {})),
    "bias, one": (DENSE, "bias of a shape other than [2n]", lambda x: ((x, x[0, :1]), {})),
    "bias, 2-D": (DENSE, "bias of a shape other than [2n]", lambda x: ((x, x[:1]), {})),
    "float64": (
        DENSE,
        "a dtype other than bfloat16, float16 and float32",
        lambda x: ((x.double(), None), {}),
    ),
    "integers": (DENSE, "a dtype other than bfloat16, float16 and float32", lambda x: ((x.int(), None), {})),
    "1-D": (DENSE, "input with other than 2 or 3 dimensions", lambda x: ((x[0], None), {})),
    "4-D": (DENSE, "input with other than 2 or 3 dimensions", lambda x: ((x[None, None], None), {})),
    "odd": (DENSE, "a last dimension that is not 2n with n > 0", lambda x: ((x[:, :7].clone(), None), {})),
    "odd, works": (
        DENSE,
        "a last dimension that is not 2n with n > 0",
        lambda x: ((x[:, :3].clone(), None), {}),
    ),
    "n = 0": (DENSE, "a last dimension that is not 2n with n > 0", lambda x: ((x[:, :0], None), {})),
    "bias, weights": (WEIGHTED, "bias together with weights", lambda x: ((x, x[0], x[:, :1]), {})),
    "no weights": (WEIGHTED, "an argument that is no plain tensor", lambda x: ((x, None, None), {})),
    "weights, 1-D": (
        WEIGHTED,
        "weights of a shape other than [tokens, 1]",
        lambda x: ((x, None, torch.ones(1, device=x.device)), {}),
    ),
    "weights, one": (
        WEIGHTED,
        "weights of a shape other than [tokens, 1]",
        lambda x: ((x, None, x[:1, :1]), {}),
    ),
    "weights, wide": (
        WEIGHTED,
        "weights of a shape other than [tokens, 1]",
        lambda x: ((x, None, x[:, :4]), {}),
    ),
    "weights, integers": (
        WEIGHTED,
        "weights of a dtype other than bfloat16, float16 and float32",
        lambda x: ((x, None, x[:, :1].int()), {}),
    ),
    "weights, float64": (
        WEIGHTED,
        "weights of a dtype other than bfloat16, float16 and float32",
        lambda x: ((x, None, x[:, :1].double()), {}),
    ),
    "negation": (DENSE, "an argument that is no plain tensor", lambda x: ((torch._neg_view(x), None), {})),
    "subclass": (
        DENSE,
        "an argument that is no plain tensor",
        lambda x: ((x.as_subclass(Subclass), None), {}),
    ),
    "bias, subclass": (
        DENSE,
        "an argument that is no plain tensor",
        lambda x: ((x, x[0].as_subclass(Subclass)), {}),
    ),
    "no tensor": (DENSE, "an argument that is no plain tensor", lambda x: (([[1.0, 2.0]], None), {})),
    "meta": (
        DENSE,
        "a tensor on a device that is neither CUDA nor CPU",
        lambda x: ((x.to("meta"), None), {}),
    ),
    "bias, meta": (DENSE, "tensors on different devices", lambda x: ((x, x[0].to("meta")), {})),
    "weights, meta": (
        WEIGHTED,
        "tensors on different devices",
        lambda x: ((x, None, x[:, :1].to("meta")), {}),
    ),
    "unknown option": (
        DENSE,
        "options that upstream's function does not have",
        lambda x: ((x, None), {"clamp_value": None}),
    ),
    "option twice": (
        DENSE,
        "options that upstream's function does not have",
        lambda x: ((x, None, False), {"fp8_input_store": False}),
    ),
    "too many options": (
        DENSE,
        "options that upstream's function does not have",
        lambda x: ((x, None, False, False, None), {}),
    ),
    "geglu, mixed": (GEGLU, "input and bias of different dtypes", lambda x: ((x, x[0].bfloat16()), {})),
    "geglu, odd": (GEGLU, "a last dimension that is not 2n with n > 0", lambda x: ((x[:, :7], None), {})),
    "geglu, option": (
        GEGLU,
        "options that upstream's function does not have",
        lambda x: ((x, None, False), {}),
    ),
    "quick, fp8 store, clamped": (
        QUICK,
        "fp8_input_store together with a clamp",
        lambda x: ((x, None, x[:, :1], True, 1.0, 0.5), {}),
    ),
    "quick, clamp 0": (
        QUICK,
        "a clamp_value that is not positive",
        lambda x: ((x, None, x[:, :1]), {"clamp_value": 0.0}),
    ),
    "quick, clamp negative": (
        QUICK,
        "a clamp_value that is not positive",
        lambda x: ((x, x[0], x[:, :1]), {"clamp_value": -1}),
    ),
    "quick, a tensor for an offset": (
        QUICK,
        "a linear_offset or clamp_value that is no number",
        lambda x: ((x, None, x[:, :1]), {"linear_offset": x.new_tensor(1.0)}),
    ),
    "quick, a text for a clamp": (
        QUICK,
        "a linear_offset or clamp_value that is no number",
        lambda x: ((x, None, x[:, :1]), {"clamp_value": "1"}),
    ),
    "quick, bias for each token": (
        QUICK,
        "bias of a shape other than [2n]",
        lambda x: ((x, x[:, :1], x[:, :1]), {}),
    ),
    "quick, no weights": (
        QUICK,
        "an argument that is no plain tensor",
        lambda x: ((x, None, None), {}),
    ),
    "squared, no columns": (SQUARED, "a last dimension of 0", lambda x: ((x[:, :0], x[:, :1]), {})),
    "squared, one weight": (
        SQUARED,
        "weights of a shape other than [tokens, 1]",
        lambda x: ((x, x[:1, :1]), {}),
    ),
    "squared, float64": (
        SQUARED,
        "a dtype other than bfloat16, float16 and float32",
        lambda x: ((x.double(), x[:, :1]), {}),
    ),
}


def outcome(function: Callable[..., torch.Tensor], call: Call) -> object:
    """The result, or the type and text of the error."""
    try:
        return function(*call[0], **call[1])
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(
    fused: ModuleType, liger: ModuleType, device: torch.device, generator: torch.Generator, kind: str
) -> None:
    """Upstream's own function serves it, result or error, and the reason is counted."""
    name, reason, make = REFUSED[kind]
    call = make(torch.randn(5, 8, device=device, generator=generator))
    ours, upstream = (outcome(function, call) for function in functions(name))
    assert type(ours) is type(upstream)
    if isinstance(ours, torch.Tensor) and not ours.is_meta:
        assert isinstance(upstream, torch.Tensor)
        assert torch.equal(ours, upstream)
    elif not isinstance(ours, torch.Tensor):
        assert ours == upstream
    assert counts(liger, name) == {"kernel": 0, "off": 0, "upstream": {reason: 1}}
    assert not launches(liger, OPS[name])


def test_refusals_of_upstream(fused: ModuleType, device: torch.device) -> None:
    """The errors people meet are upstream's own."""
    x = torch.ones(2, 8, device=device)
    with pytest.raises(AssertionError):
        fused.bias_swiglu_impl(x[0], None)
    with pytest.raises(NotImplementedError, match="Bias is not supported"):
        fused.weighted_bias_swiglu_impl(x, x[0], x[:, :1])
    with pytest.raises(TypeError, match="clamp_value"):
        fused.bias_swiglu_impl(x, None, clamp_value=1.0)
    with pytest.raises(TypeError, match="bias"):
        fused.bias_swiglu_impl(x)


@pytest.mark.parametrize(
    "kind", ["no weights", "weights, wide", "mixed", "4-D", "subclass", "quick, clamp 0", "squared, float64"]
)
@pytest.mark.usefixtures("strict")
def test_strict(fused: ModuleType, liger: ModuleType, device: torch.device, kind: str) -> None:
    name, reason, make = REFUSED[kind]
    call = make(torch.ones(5, 8, device=device))
    with pytest.raises(liger.FallbackError) as error:
        functions(name)[0](*call[0], **call[1])
    message = str(error.value)
    assert message.startswith(f"{OPS[name]}: {name} ")
    assert reason in message
    assert f"LIGER_MEGATRON=-{OPS[name]}" in message
    assert counts(liger, name)["upstream"] == {}


def test_logged_once_a_reason(
    fused: ModuleType,
    liger: ModuleType,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.import_module("megatron.core.liger.dispatch"), "_logged", set())
    x = torch.ones(2, 8, device=device)
    with caplog.at_level(logging.WARNING, "megatron.core.liger"):
        for _ in range(3):
            fused.bias_swiglu_impl(x, x[0].bfloat16())
            fused.bias_swiglu_impl(x.double(), None)
    texts = [r.getMessage() for r in caplog.records if r.name == "megatron.core.liger"]
    assert texts == [
        "swiglu: bias_swiglu_impl runs upstream's code: input and bias of different dtypes",
        "swiglu: bias_swiglu_impl runs upstream's code: a dtype other than bfloat16, float16 and float32",
    ]
    assert [r.levelname for r in caplog.records if r.name == "megatron.core.liger"] == ["WARNING"] * 2
    assert set(counts(liger, "bias_swiglu_impl")["upstream"].values()) == {3}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.usefixtures("strict")
def test_what_is_saved_is_upstreams(
    fused: ModuleType, device: torch.device, generator: torch.Generator, with_bias: bool, fp8: bool
) -> None:
    """The same dtypes and values, marked for offloading alike; the caller's input carries no mark."""
    saved: dict[str, list[tuple[bool, torch.Tensor]]] = {"": [], "_upstream_": []}
    for prefix, kept in saved.items():
        x = torch.randn(3, 2, 8, device=device, generator=generator.manual_seed(7), requires_grad=True) * 1
        bias = torch.ones(8, device=device, requires_grad=True) if with_bias else None

        def pack(tensor: torch.Tensor, kept: list[tuple[bool, torch.Tensor]] = kept) -> torch.Tensor:
            kept.append((getattr(tensor, "activation_offloading", False), tensor.detach().float().flatten()))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            getattr(fused, f"{prefix}bias_swiglu_impl")(x, bias, fp8, True)
        assert not hasattr(x, "activation_offloading")
        assert bias is None or bias.activation_offloading is True  # type: ignore[attr-defined]
    assert [mark for mark, _ in saved[""]] == [True] * (1 + with_bias)
    assert [mark for mark, _ in saved["_upstream_"]] == [True] * (1 + with_bias)
    for (_, ours), (_, upstream) in zip(*saved.values(), strict=True):
        assert torch.equal(ours, upstream)


def test_fp8_store_on_a_device_without(
    fused: ModuleType, liger: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device decides, and only where the option is asked for."""
    decides = importlib.import_module("megatron.core.liger.gated")
    for capability, served in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        decides._converts_float8.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", lambda index, c=capability: c)
            assert decides._converts_float8(0) == served
    decides._converts_float8.cache_clear()
    reason = "fp8_input_store on a GPU below compute capability 8.9"
    monkeypatch.setattr(decides, "unserved_options", lambda x, asked: reason if any(asked.values()) else None)
    x = torch.randn(2, 8, device=device)
    assert torch.equal(fused.bias_swiglu_impl(x, None, True), fused._upstream_bias_swiglu_impl(x, None, True))
    fused.bias_swiglu_impl(x, None, False)
    assert counts(liger, DENSE) == {"kernel": 1, "off": 0, "upstream": {reason: 1}}


@pytest.mark.reuse
@pytest.mark.parametrize("name", ["bias_swiglu_impl", GEGLU, QUICK, SQUARED])
def test_in_place_is_asked_for(
    fused: ModuleType, liger: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The setting reaches the kernel: the gradient takes the saved memory, and autograd knows."""
    x = torch.randn(4, 8, device=device, requires_grad=True)
    weights = torch.ones(4, 1, device=device)
    extra = {QUICK: (None, weights), SQUARED: (weights,)}.get(name, (None,))

    def backward() -> tuple[torch.Tensor, torch.Tensor]:
        hidden = x * 2
        before = hidden.detach().clone()
        functions(name)[0](hidden, *extra).sum().backward()
        return before, hidden.detach()

    before, after = backward()
    assert torch.equal(before, after)
    monkeypatch.setattr(importlib.import_module(f"megatron.core.liger.{OPS[name]}").OP, "in_place", True)
    x.grad = None
    before, after = backward()
    assert not torch.equal(before, after)


def test_every_import_route(fused: ModuleType, liger: ModuleType, device: torch.device) -> None:
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    modules = {
        "megatron.core.transformer.mlp": ENTRIES,
        "megatron.core.transformer.moe.experts": ENTRIES[1:],
        "megatron.core.transformer.moe.shared_experts": ENTRIES[:1],
    }
    routes = [bias_swiglu_impl, fused.bias_swiglu_impl]
    routes += [getattr(importlib.import_module(m), name) for m, names in modules.items() for name in names]
    x = torch.ones(2, 8, device=device)
    for done, route in enumerate(routes):
        assert launches(liger).get("swiglu_forward", 0) == done
        extra = (x[:, :1].clone(),) if route.__name__.startswith("weighted") else ()
        route(x, None, *extra)
    assert launches(liger) == {"swiglu_forward": len(routes)}


def test_every_import_route_of_the_activations(
    fused: ModuleType, liger: ModuleType, device: torch.device
) -> None:
    modules = {
        "megatron.core.transformer.mlp": (GEGLU, QUICK),
        "megatron.core.transformer.moe.experts": (QUICK, SQUARED),
        "megatron.core.transformer.moe.shared_experts": (GEGLU,),
    }
    x, weights = torch.ones(2, 8, device=device), torch.ones(2, 1, device=device)
    extra: dict[str, tuple[Any, ...]] = {GEGLU: (None,), QUICK: (None, weights), SQUARED: (weights,)}
    for module, names in modules.items():
        for name in names:
            getattr(importlib.import_module(module), name)(x, *extra[name])
    expected = {"geglu_forward": 2, "quick_geglu_forward": 2, "squared_relu_forward": 1}
    assert launches(liger, "activations") == expected
    assert not launches(liger)


@pytest.mark.usefixtures("fused")
def test_switched_off(liger: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from SwiGLU, whose kernels these are."""
    monkeypatch.setattr(importlib.import_module("megatron.core.liger.activations").OP, "enabled", False)
    x = torch.randn(4, 8, device=device)
    for name, extra in ((GEGLU, (None,)), (QUICK, (None, x[:, :1])), (SQUARED, (x[:, :1],))):
        ours, upstream = functions(name)
        assert torch.equal(ours(x, *extra), upstream(x, *extra))
        assert counts(liger, name) == {"kernel": 0, "off": 1, "upstream": {}}
    functions(DENSE)[0](x, None)
    assert counts(liger, DENSE)["kernel"] == 1


@pytest.mark.usefixtures("fused")
def test_activations_under_torch_compile(liger: ModuleType, device: torch.device) -> None:
    x, weights = torch.randn(4, 8, device=device), torch.rand(4, 1, device=device)
    calls = {GEGLU: (x, None), QUICK: (x, None, weights, False, 1.0, 0.5), SQUARED: (x, weights)}
    for name, arguments in calls.items():
        torch._dynamo.reset()
        ours, upstream = functions(name)
        compiled = torch.compile(ours, backend="aot_eager")
        torch.testing.assert_close(compiled(*arguments), upstream(*arguments))
        assert counts(liger, name)["upstream"] == {"traced by torch.compile": 1}
        assert counts(liger, name)["kernel"] == 0


def tail(namespace: dict[str, Any], file: str = "fused_bias_swiglu") -> dict[str, Any]:
    """The tail, run below functions of another release's signatures."""
    path = Path(__file__).resolve().parents[2] / f"overlay/megatron/core/fusions/{file}.py"
    namespace["__name__"] = "another_release"
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
    return namespace


def test_release_without_the_weighted_form(liger: ModuleType, device: torch.device) -> None:
    def bias_swiglu_impl(input: Any, bias: Any, fp8_input_store: bool = False) -> str:
        return "upstream"

    names = tail({"bias_swiglu_impl": bias_swiglu_impl})
    assert not any("weighted" in name for name in names)
    x = torch.ones(2, 8, device=device)
    assert names["bias_swiglu_impl"](x, None, False).shape == (2, 4)
    assert names["bias_swiglu_impl"](x, None, True).shape == (2, 4)
    assert names["bias_swiglu_impl"](x.double(), None) == "upstream"
    with pytest.raises(TypeError, match="cpu_offload_input"):
        names["bias_swiglu_impl"](x, None, cpu_offload_input=False)


def clamped_swiglu(x: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = x.float().chunk(2, -1)
    return (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).to(x.dtype)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_clamp_of_a_later_release_runs_on_the_kernel(
    liger: ModuleType, device: torch.device, weighted: bool
) -> None:
    """By position and by name; what is None or not positive clamps nothing, as upstream has it."""

    def upstream(input: Any, bias: Any, fp8_input_store: Any = False, clamp_value: Any = None) -> object:
        return "upstream", clamp_value

    def upstream_weighted(
        input: Any, bias: Any, weights: Any, fp8_input_store: Any = False, clamp_value: Any = None
    ) -> object:
        return "upstream", clamp_value

    name = "weighted_bias_swiglu_impl" if weighted else "bias_swiglu_impl"
    ours = tail({"bias_swiglu_impl": upstream, "weighted_bias_swiglu_impl": upstream_weighted})[name]
    x = torch.linspace(-3, 3, 32, device=device).view(2, 16)
    x[0, 0], x[0, 8] = 0.5, -0.5  # at the clamp, where the gradient passes
    weights = (torch.tensor([[2.0], [0.5]], device=device),) if weighted else ()
    scale = weights[0] if weighted else 1.0
    for options, named in (((False, 0.5), {}), ((), {"clamp_value": 0.5}), ((), {"clamp_value": 1})):
        limit = float(named.get("clamp_value", 0.5))
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        found, expected = ours(one, None, *weights, *options, **named), clamped_swiglu(other, limit) * scale
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found.sum(), one), torch.autograd.grad(expected.sum(), other)
        )
    for value in (None, False, 0.0, -1.0):
        torch.testing.assert_close(ours(x, None, *weights, clamp_value=value), clamped_swiglu(x, 1e9) * scale)
    assert counts(liger, name) == {"kernel": 7, "off": 0, "upstream": {}}


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"clamp_value": 1.0, "fp8_input_store": True}, "fp8_input_store together with a clamp"),
        ({"clamp_value": "much"}, "a linear_offset or clamp_value that is no number"),
        ({"clamp_value": torch.tensor(1.0)}, "a linear_offset or clamp_value that is no number"),
    ],
)
def test_a_clamp_that_falls_back(
    liger: ModuleType, device: torch.device, named: dict[str, Any], reason: str
) -> None:
    def upstream(input: Any, bias: Any, fp8_input_store: Any = False, clamp_value: Any = None) -> object:
        return fp8_input_store, clamp_value

    ours = tail({"bias_swiglu_impl": upstream})["bias_swiglu_impl"]
    given = ours(torch.ones(2, 8, device=device), None, **named)
    assert given == (named.get("fp8_input_store", False), named["clamp_value"])
    assert counts(liger, "bias_swiglu_impl") == {"kernel": 0, "off": 0, "upstream": {reason: 1}}


def test_release_without_quick_geglu(liger: ModuleType, device: torch.device) -> None:
    def bias_geglu_impl(input: Any, bias: Any) -> str:
        return "upstream"

    names = tail({"bias_geglu_impl": bias_geglu_impl}, "fused_bias_geglu")
    assert not any("weighted" in name for name in names)
    assert names["bias_geglu_impl"](torch.ones(2, 8, device=device), None).shape == (2, 4)


def test_later_quick_geglu(liger: ModuleType, device: torch.device) -> None:
    """Options are served by their names; one that is new or has another default is not passed over."""

    def geglu(input: Any, bias: Any) -> str:
        return "upstream"

    def quick(
        input: Any,
        bias: Any,
        weights: Any,
        clamp_value: Any = 0.5,
        linear_offset: Any = 1.0,
        alpha: Any = None,
    ) -> str:
        return "upstream"

    names = {"bias_geglu_impl": geglu, "weighted_bias_quick_geglu_impl": quick}
    ours = tail(dict(names), "fused_bias_geglu")["weighted_bias_quick_geglu_impl"]
    upstream = functions(QUICK)[1]
    x, weights = torch.randn(2, 8, device=device), torch.ones(2, 1, device=device)
    torch.testing.assert_close(ours(x, None, weights), upstream(x, None, weights, False, 1.0, 0.5))
    torch.testing.assert_close(ours(x, None, weights, None, 0.0), upstream(x, None, weights))
    assert ours(x, None, weights, alpha=1.702) == "upstream"


@pytest.mark.parametrize("value", [7.0, 0.0])
def test_option_of_a_later_release(liger: ModuleType, device: torch.device, value: float) -> None:
    def bias_swiglu_impl(
        input: Any,
        bias: Any,
        fp8_input_store: Any = False,
        cpu_offload_input: Any = False,
        slope: Any = None,
    ) -> object:
        return "upstream", slope

    ours = tail({"bias_swiglu_impl": bias_swiglu_impl})["bias_swiglu_impl"]
    x = torch.ones(2, 8, device=device)
    assert ours(x, None, False, False, None).shape == (2, 4)
    assert ours(x, None, slope=None).shape == (2, 4)
    assert ours(x, None, False, False, value) == ("upstream", value)
    assert ours(x, None, slope=value) == ("upstream", value)
    assert counts(liger, "bias_swiglu_impl") == {"kernel": 2, "off": 0, "upstream": {"slope": 2}}


def test_option_that_is_on_by_default_is_never_dropped(liger: ModuleType, device: torch.device) -> None:
    """Nobody has to give it; one that is None or False by default changes nothing until it is given."""
    x = torch.ones(2, 8, device=device)

    def clamped(input: Any, bias: Any, fp8_input_store: Any = False, limit: Any = 7.0) -> object:
        return "upstream", limit

    ours = tail({"bias_swiglu_impl": clamped})["bias_swiglu_impl"]
    assert ours(x, None) == ours(x, None, False) == ("upstream", 7.0)
    assert ours(x, None, limit=None).shape == (2, 4)

    def stored(input: Any, bias: Any, fp8_input_store: Any = True, quiet: Any = False) -> object:
        return "upstream", fp8_input_store, quiet

    ours = tail({"bias_swiglu_impl": stored})["bias_swiglu_impl"]
    assert ours(x, None).shape == (2, 4)
    assert ours(x, None, False).shape == ours(x, None, False, False).shape == (2, 4)
    assert ours(x, None, False, True) == ("upstream", False, True)

    def open_ended(input: Any, bias: Any, **options: Any) -> object:
        return "upstream", options

    ours = tail({"bias_swiglu_impl": open_ended})["bias_swiglu_impl"]
    assert ours(x, None).shape == (2, 4)
    assert ours(x, None, anything=1) == ("upstream", {"anything": 1})


@pytest.mark.parametrize("fullgraph", [False, True])
def test_under_torch_compile(
    fused: ModuleType, liger: ModuleType, device: torch.device, fullgraph: bool
) -> None:
    """Upstream's code is traced: its compiled results, no new trace at later calls, counted once a trace.

    Its compiled gradients, right or not: torch 2.11 compiles upstream's own functions to wrong ones.
    """

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dense: torch.Tensor = fused.bias_swiglu_impl(x * 2, None, False, False)
        weighted: torch.Tensor = fused.weighted_bias_swiglu_impl(x, None, w, False)
        return dense + weighted

    def upstream(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dense: torch.Tensor = fused._upstream_bias_swiglu_impl(x * 2, None, False, False)
        weighted: torch.Tensor = fused._upstream_weighted_bias_swiglu_impl(x, None, w, False)
        return dense + weighted

    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=fullgraph)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    w = torch.randn(4, 1, device=device, requires_grad=True)
    expected = block(x, w)
    before = {name: counts(liger, name)["kernel"] for name in ENTRIES}
    for _ in range(3):
        output = compiled(x, w)
        torch.testing.assert_close(output, expected)
    theirs = torch.compile(upstream, backend="aot_eager", fullgraph=fullgraph)(x, w)
    torch.testing.assert_close(gradients(output, [x, w]), gradients(theirs, [x, w]))
    for name in ENTRIES:
        assert counts(liger, name) == {
            "kernel": before[name],
            "off": 0,
            "upstream": {"traced by torch.compile": 1},
        }


@pytest.mark.usefixtures("strict")
def test_strict_under_torch_compile(fused: ModuleType, liger: ModuleType, device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fused.bias_swiglu_impl(x, None), backend="eager")
    with pytest.raises(
        RuntimeError, match=r"FallbackError: swiglu: bias_swiglu_impl .*traced by torch\.compile"
    ):
        compiled(torch.ones(4, 8, device=device))


class Watch(TorchDispatchMode):
    """Records the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_watched(fused: ModuleType, liger: ModuleType, device: torch.device) -> None:
    """What records PyTorch's operators gets upstream's: a kernel's launch is none of them."""
    x = torch.randn(3, 8, device=device)
    with Watch() as watch:
        output = fused.bias_swiglu_impl(x, None)
    torch.testing.assert_close(output, fused._upstream_bias_swiglu_impl(x, None))
    assert any("mul" in name for name in watch.seen)
    reason = "watched by a torch dispatch mode or torch.jit.trace"
    assert counts(liger, DENSE) == {"kernel": 0, "off": 0, "upstream": {reason: 1}}
