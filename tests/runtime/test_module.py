# SPDX-License-Identifier: Apache-2.0
"""``LigerMegatronSwiGLU``: alone, with a fallback, and built by Megatron-Core's MLP from a spec."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn


def counts(liger: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = liger.counters()["swiglu"]["entries"]["LigerMegatronSwiGLU"]
    return found


def reference(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("shape", [(5, 8), (3, 2, 8), (0, 8)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_served(
    liger: ModuleType,
    device: torch.device,
    generator: torch.Generator,
    shape: tuple[int, ...],
    with_bias: bool,
) -> None:
    x = torch.randn(shape, device=device, generator=generator, requires_grad=True)
    bias = torch.randn(8, device=device, generator=generator, requires_grad=True) if with_bias else None
    module = liger.LigerMegatronSwiGLU()
    output = module(x, bias, False, False)
    torch.testing.assert_close(output, reference(x, bias))
    inputs = [x] if bias is None else [x, bias]
    torch.testing.assert_close(
        torch.autograd.grad(output.sum(), inputs), torch.autograd.grad(reference(x, bias).sum(), inputs)
    )
    assert counts(liger) == {"kernel": 1, "off": 0, "upstream": {}}
    assert liger.counters()["swiglu"]["launches"].get("swiglu_forward", 0) == bool(x.numel())


UNSERVED: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    "input and bias of different dtypes": lambda x: (x, x[0].bfloat16()),
    "a dtype other than bfloat16, float16 and float32": lambda x: (x.double(),),
    "a tensor on a device that is neither CUDA nor CPU": lambda x: (x.to("meta"),),
}


@pytest.mark.parametrize("reason", UNSERVED)
def test_unserved(liger: ModuleType, device: torch.device, reason: str) -> None:
    arguments = UNSERVED[reason](torch.ones(2, 8, device=device))
    with pytest.raises(RuntimeError, match=rf"does not serve this call: {reason}\..*fallback_impl"):
        liger.LigerMegatronSwiGLU()(*arguments)
    assert counts(liger) == {"kernel": 0, "off": 0, "upstream": {}}
    module = liger.LigerMegatronSwiGLU(fallback_impl=lambda *passed: passed)
    assert module(*arguments) == (*arguments, *(None, False, False)[len(arguments) - 1 :])
    assert counts(liger) == {"kernel": 0, "off": 0, "upstream": {reason: 1}}


@pytest.mark.usefixtures("strict")
def test_strict(liger: ModuleType, device: torch.device) -> None:
    module = liger.LigerMegatronSwiGLU(fallback_impl=lambda *_: pytest.fail("fell back"))
    with pytest.raises(liger.FallbackError, match=r"swiglu: LigerMegatronSwiGLU .*a dtype other than"):
        module(torch.ones(2, 8, device=device).double())


def test_switched_off(
    fused: ModuleType, liger: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("megatron.core.liger.swiglu").OP, "enabled", False)
    x = torch.ones(2, 8, device=device)
    with pytest.raises(RuntimeError, match="off by LIGER_MEGATRON"):
        liger.LigerMegatronSwiGLU()(x)
    module = liger.LigerMegatronSwiGLU(fallback_impl=fused.bias_swiglu_impl)
    torch.testing.assert_close(module(x), reference(x))
    assert counts(liger) == {"kernel": 0, "off": 1, "upstream": {}}


@pytest.mark.parametrize("shape", [(8,), (1, 1, 1, 8), (2, 7), (2, 0)])
@pytest.mark.parametrize("fallback", [None, reference])
def test_wrong_shapes(liger: ModuleType, device: torch.device, shape: tuple[int, ...], fallback: Any) -> None:
    with pytest.raises(ValueError, match="2n"):
        liger.LigerMegatronSwiGLU(fallback)(torch.ones(shape, device=device))


@pytest.mark.reuse
@pytest.mark.parametrize("in_place", [False, True])
def test_in_place(liger: ModuleType, device: torch.device, in_place: bool) -> None:
    x = torch.randn(4, 8, device=device, requires_grad=True)
    hidden = x * 2
    before = hidden.detach().clone()
    output = liger.LigerMegatronSwiGLU(in_place=in_place)(hidden)
    output.sum().backward(retain_graph=True)
    assert torch.equal(hidden.detach(), before) is not in_place
    first = x.grad.clone() if x.grad is not None else None
    assert first is not None
    torch.testing.assert_close(first, torch.autograd.grad(reference(x * 2).sum(), x)[0])
    if in_place:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
    else:
        output.sum().backward()
        torch.testing.assert_close(x.grad, 2 * first)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gated_linear_unit": False},
        {"activation_func": F.gelu},
        {"activation_func_clamp_value": 0.0},
        {"glu_linear_offset": 1.0},
    ],
)
def test_config_of_another_activation(liger: ModuleType, wrong: dict[str, Any]) -> None:
    right = {
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
    }
    liger.LigerMegatronSwiGLU(config=SimpleNamespace(**right))
    with pytest.raises(ValueError, match=f"config.{next(iter(wrong))} is "):
        liger.LigerMegatronSwiGLU(config=SimpleNamespace(**right | wrong))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_clamped(
    liger: ModuleType, device: torch.device, generator: torch.Generator, with_bias: bool, fp8: bool
) -> None:
    """What Megatron-Core's MLP computes unfused: the gate from above, the other half from both sides."""
    x = torch.randn(5, 8, device=device, generator=generator, requires_grad=True)
    bias = torch.randn(8, device=device, generator=generator, requires_grad=True) if with_bias else None
    module = liger.LigerMegatronSwiGLU(config=SimpleNamespace(activation_func_clamp_value=0.5))

    def clamped(x: torch.Tensor) -> torch.Tensor:
        gate, up = (x if bias is None else x + bias).chunk(2, -1)
        return F.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5)

    inputs = [x] if bias is None else [x, bias]
    output = module(x, bias, fp8)
    torch.testing.assert_close(output, clamped(x))
    for_backward = x + (x.to(torch.float8_e4m3fn).float() - x).detach() if fp8 else x
    torch.testing.assert_close(
        torch.autograd.grad(output.sum(), inputs), torch.autograd.grad(clamped(for_backward).sum(), inputs)
    )
    assert counts(liger) == {"kernel": 1, "off": 0, "upstream": {}}


def test_a_fallback_is_given_the_clamp(fused: ModuleType, liger: ModuleType, device: torch.device) -> None:
    """A function that cannot clamp raises; none drops it."""
    config = SimpleNamespace(activation_func_clamp_value=7.0)
    x = torch.ones(2, 8, device=device, dtype=torch.float64)
    module = liger.LigerMegatronSwiGLU(lambda *_, **named: named, config=config)
    assert module(x) == {"clamp_value": 7.0}
    with pytest.raises(TypeError, match="clamp_value"):
        liger.LigerMegatronSwiGLU(fused.bias_swiglu_impl, config=config)(x)


def test_copies(liger: ModuleType, device: torch.device) -> None:
    module = liger.LigerMegatronSwiGLU(in_place=True)
    x = torch.ones(2, 8, device=device)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.in_place
        torch.testing.assert_close(twin(x), reference(x))
    assert module.state_dict() == {}


@pytest.mark.parametrize("with_fallback", [False, True])
def test_under_torch_compile(liger: ModuleType, device: torch.device, with_fallback: bool) -> None:
    """The fallback is traced; without one the kernel runs outside the graph. Equal results both ways."""
    torch._dynamo.reset()
    module = liger.LigerMegatronSwiGLU(fallback_impl=lambda x, *_: reference(x) if with_fallback else None)
    if not with_fallback:
        module.fallback_impl = None
    compiled = torch.compile(lambda x: module(x * 2) + 1, backend="eager")
    x = torch.randn(4, 8, device=device, requires_grad=True)
    for _ in range(2):
        output = compiled(x)
        torch.testing.assert_close(output, reference(x * 2) + 1)
    torch.testing.assert_close(
        torch.autograd.grad(output.sum(), x), torch.autograd.grad(reference(x * 2).sum(), x)
    )
    traced = {"traced by torch.compile": 1} if with_fallback else {}
    assert counts(liger) == {"kernel": 0 if with_fallback else 2, "off": 0, "upstream": traced}


class Linear(nn.Linear):
    """A linear layer with the constructor and result that Megatron-Core's MLP expects."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        return F.linear(x, self.weight), self.bias

    def sharded_state_dict(self, *_: Any) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("with_bias", [False, True])
def test_in_a_spec(fused: ModuleType, liger: ModuleType, device: torch.device, with_bias: bool) -> None:
    """Megatron-Core's own MLP builds it, gives the result of its fused path, and can list its checkpoint."""
    mlp = importlib.import_module("megatron.core.transformer.mlp")
    config_class = importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig
    torch.manual_seed(3)

    def build(**choice: bool) -> Any:
        config = config_class(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            ffn_hidden_size=6,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=with_bias,
            **choice,
        )
        submodules = mlp.MLPSubmodules(Linear, liger.LigerMegatronSwiGLU, Linear)
        return mlp.MLP(config, submodules, ffn_hidden_size=6).to(device)

    built = build(use_te_activation_func=True, bias_activation_fusion=False)
    fused_path = build(use_te_activation_func=False, bias_activation_fusion=True)
    fused_path.load_state_dict(built.state_dict())
    x = torch.randn(3, 2, 8, device=device)
    torch.testing.assert_close(built(x), fused_path(x))
    assert isinstance(built.activation_func, liger.LigerMegatronSwiGLU)
    assert counts(liger)["kernel"] == 1
    assert liger.counters()["swiglu"]["entries"]["bias_swiglu_impl"]["kernel"] == 1
    assert built.sharded_state_dict() == {}
