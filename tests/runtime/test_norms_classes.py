# SPDX-License-Identifier: Apache-2.0
"""The taken-over norm classes: what they build, for which config, and where upstream's own is built."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import pickle
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

CLASSES = {
    "WrappedTorchNorm": "megatron.core.transformer.torch_norm",
    "FusedLayerNorm": "megatron.core.fusions.fused_layer_norm",
}
NORMS = {"RMSNorm": ["weight"], "LayerNorm": ["weight", "bias"]}


def config(normalization: str = "RMSNorm", **changes: Any) -> SimpleNamespace:
    """What of a config the norms read; the values are those that upstream's local norms refuse."""
    right = {
        "normalization": normalization,
        "sequence_parallel": True,
        "persist_layer_norm": True,
        "layernorm_zero_centered_gamma": False,
        "memory_efficient_layer_norm": True,
    }
    return SimpleNamespace(**right | changes)


def plain(normalization: str = "RMSNorm") -> SimpleNamespace:
    """A config that upstream's ``WrappedTorchNorm`` accepts."""
    refused = ("sequence_parallel", "persist_layer_norm", "memory_efficient_layer_norm")
    return config(normalization, **dict.fromkeys(refused, False))


@pytest.fixture(params=CLASSES)
def holder(liger: ModuleType, request: pytest.FixtureRequest) -> ModuleType:
    """The module of each class in turn, with the class's name as ``name``."""
    module = importlib.import_module(CLASSES[request.param])
    return SimpleNamespace(  # type: ignore[return-value]
        name=request.param,
        ours=getattr(module, request.param),
        upstream=vars(module)[f"_upstream_{request.param}"],
    )


def counts(liger: ModuleType, entry: str) -> dict[str, Any]:
    found: dict[str, Any] = liger.counters()["norms"]["entries"][entry]
    return found


UNUSED = {"kernel": 0, "off": 0, "upstream": {}}


def test_looks_like_upstream(holder: Any) -> None:
    ours, upstream = holder.ours, holder.upstream
    assert ours is not upstream
    assert issubclass(ours, upstream)
    assert inspect.signature(ours) == inspect.signature(upstream)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(ours, name) == getattr(upstream, name)
    assert pickle.loads(pickle.dumps(ours)) is ours


@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_builds_ours(
    holder: Any, liger: ModuleType, normalization: str, zero_centered: bool, sequence_parallel: bool
) -> None:
    given = config(
        normalization, layernorm_zero_centered_gamma=zero_centered, sequence_parallel=sequence_parallel
    )
    norm = holder.ours(config=given, hidden_size=8, eps=1e-6)
    assert type(norm).__name__ == normalization
    assert type(norm).__module__ == "megatron.core.liger.norms"
    assert isinstance(norm, getattr(nn, normalization))
    twin = getattr(nn, normalization)(8, 1e-6)
    assert list(norm.state_dict()) == list(twin.state_dict()) == NORMS[normalization]
    assert list(norm.buffers()) == list(norm.children()) == []
    assert (norm.normalized_shape, norm.eps, norm.returns_residual) == ((8,), 1e-6, False)
    for name, parameter in norm.named_parameters():
        assert parameter.sequence_parallel is sequence_parallel
        assert parameter.dtype == torch.float32
        assert parameter.requires_grad
        wanted = 0.0 if zero_centered or name == "bias" else 1.0
        assert parameter.tolist() == [wanted] * 8
    assert repr(norm) == repr(twin)[:-1] + f", zero_centered_gamma={zero_centered})"
    if not zero_centered:
        norm.load_state_dict(twin.state_dict())
        twin.load_state_dict(norm.state_dict())
    assert counts(liger, holder.name) == UNUSED  # which counts calls


def test_only_config_rules(holder: Any) -> None:
    norm = holder.ours(config(), 8, 1e-5, False, True, "LayerNorm")
    assert type(norm).__name__ == "RMSNorm"
    assert not norm.zero_centered_gamma
    norm = holder.ours(config("LayerNorm"), 8, normalization="RMSNorm")
    assert type(norm).__name__ == "LayerNorm"
    assert norm.eps == 1e-5


def test_one_after_the_other(holder: Any) -> None:
    """Neither the class nor the config's later changes bind two norms together."""
    given = config()
    rms = holder.ours(given, 8)
    given.normalization, given.layernorm_zero_centered_gamma = "LayerNorm", True
    layer = holder.ours(copy.deepcopy(given), 4)
    assert [type(norm).__name__ for norm in (rms, layer)] == ["RMSNorm", "LayerNorm"]
    assert type(rms) is not type(layer)
    assert not isinstance(rms, type(layer))
    assert not isinstance(layer, type(rms))
    assert (rms.zero_centered_gamma, layer.zero_centered_gamma) == (False, True)
    assert rms.weight.tolist() == [1.0] * 8


def test_attributes_of_upstreams_module(holder: Any) -> None:
    given = config()
    norm = holder.ours(given, 8)
    if holder.name == "FusedLayerNorm":
        assert norm.config is given
        assert norm.hidden_size == torch.Size([8])
    else:
        assert not hasattr(norm, "config")
    assert norm.sequence_parallel is True


def test_default_dtype_and_device(holder: Any) -> None:
    """As torch's constructors: upstream hands over neither."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        norm = holder.ours(config(), 8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_meta_device(holder: Any, normalization: str, zero_centered: bool) -> None:
    with torch.device("meta"):
        norm = holder.ours(config(normalization, layernorm_zero_centered_gamma=zero_centered), 8)
    assert norm.weight.is_meta
    norm.to_empty(device="cpu")
    for parameter in norm.parameters():
        assert parameter.sequence_parallel is True
        parameter.data.fill_(torch.nan)
    norm.reset_parameters()
    assert norm.weight.tolist() == [0.0 if zero_centered else 1.0] * 8
    if normalization == "LayerNorm":
        assert norm.bias.tolist() == [0.0] * 8


@pytest.mark.parametrize("normalization", NORMS)
def test_copies(holder: Any, device: torch.device, normalization: str) -> None:
    norm = holder.ours(config(normalization, layernorm_zero_centered_gamma=True), 8).to(device)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 8, device=device)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), copy.copy(norm)):
        assert type(twin) is type(norm)
        assert all(parameter.sequence_parallel is True for parameter in twin.parameters())
        assert torch.equal(twin(x), norm(x))


def test_moves_keep_the_mark(holder: Any) -> None:
    norm = holder.ours(config("LayerNorm"), 8)
    norm.bias.sequence_parallel = False  # somebody's own choice stays
    norm.bfloat16().float().to("cpu")
    assert (norm.weight.sequence_parallel, norm.bias.sequence_parallel) == (True, False)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_l2_norm(holder: Any, zero_centered: bool) -> None:
    """Upstream's own class, which has no weights; upstream fails here."""
    given = config("L2Norm", layernorm_zero_centered_gamma=zero_centered)
    norm = holder.ours(config=given, hidden_size=8, eps=1e-6)
    assert type(norm) is importlib.import_module(CLASSES["WrappedTorchNorm"]).L2Norm
    assert (norm.eps, norm.hidden_size) == (1e-6, 8)
    assert norm.state_dict() == {}
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    expected = x.float() / (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x), expected.bfloat16())
    with pytest.raises((AttributeError, AssertionError)):
        holder.upstream(plain("L2Norm"), 8)


def outcome(make: Any, *arguments: Any, **named: Any) -> object:
    """The type of the result, or the type and text of the error."""
    try:
        return type(make(*arguments, **named))
    except Exception as error:
        return type(error), str(error)


ERRORS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "unknown norm": ((plain("GroupNorm"), 8), {}),
    "no normalization": ((plain(None), 8), {}),  # type: ignore[arg-type]
    "nothing": ((), {}),
    "no size": ((plain(),), {}),
    "too many": ((plain(), 8, 1e-5, False, False, "RMSNorm", None), {}),
    "unknown name": ((plain(), 8), {"bias": True}),
    "twice": ((plain(), 8), {"hidden_size": 8}),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_of_upstream(holder: Any, liger: ModuleType, kind: str) -> None:
    arguments, named = ERRORS[kind]
    ours = outcome(holder.ours, *arguments, **named)
    assert isinstance(ours, tuple)
    assert ours == outcome(holder.upstream, *arguments, **named)
    assert counts(liger, holder.name) == UNUSED


def same_as_upstream(holder: Any, given: Any) -> object:
    ours = outcome(holder.ours, given, 8)
    upstream = outcome(holder.upstream, given, 8)
    assert ours == (upstream if upstream is not holder.upstream else holder.ours)
    return ours


@pytest.fixture
def apex(liger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's FusedLayerNorm finds one of Apex's functions: torch's own in its place."""

    class FusedLayerNormAffineFunction:
        @staticmethod
        def forward(ctx: Any, input: Any, weight: Any, bias: Any, shape: Any, eps: Any) -> Any: ...

        @staticmethod
        def apply(x: torch.Tensor, weight: Any, bias: Any, shape: Any, eps: float) -> torch.Tensor:
            return nn.functional.layer_norm(x, shape, weight, bias, eps)

    module = importlib.import_module(CLASSES["FusedLayerNorm"])
    monkeypatch.setattr(module, "HAVE_FUSED_LAYER_NORM", True)
    monkeypatch.setattr(module, "FusedLayerNormAffineFunction", FusedLayerNormAffineFunction, raising=False)


CONFIGS = {
    f"{make.__name__} {name}": make(name)
    for make, name in itertools.product((config, plain), ("RMSNorm", "LayerNorm", "L2Norm"))
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("with_apex", [False, True])
def test_switched_off(
    holder: Any,
    liger: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    kind: str,
    with_apex: bool,
) -> None:
    """Upstream's class, or its error."""
    if with_apex:
        request.getfixturevalue("apex")
    monkeypatch.setattr(importlib.import_module("megatron.core.liger.norms").OP, "enabled", False)
    same_as_upstream(holder, CONFIGS[kind])
    assert counts(liger, holder.name) == {"kernel": 0, "off": 1, "upstream": {}}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("with_apex", [False, True])
def test_unusable_platform(
    holder: Any,
    liger: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    kind: str,
    with_apex: bool,
) -> None:
    if with_apex:
        request.getfixturevalue("apex")
    dispatch = importlib.import_module("megatron.core.liger.dispatch")
    monkeypatch.setattr(dispatch.platform(), "reason", dispatch.NO_TRITON)
    same_as_upstream(holder, CONFIGS[kind])
    assert counts(liger, holder.name) == {"kernel": 0, "off": 0, "upstream": {dispatch.NO_TRITON: 1}}


@pytest.mark.usefixtures("strict")
def test_unusable_platform_under_strict(
    holder: Any, liger: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = importlib.import_module("megatron.core.liger.dispatch")
    monkeypatch.setattr(dispatch.platform(), "reason", dispatch.NO_TRITON)
    with pytest.raises(liger.FallbackError, match=f"norms: {holder.name} .*Triton cannot be imported"):
        holder.ours(plain(), 8)


@pytest.mark.usefixtures("apex")
def test_class_derived_from_upstreams_module(liger: ModuleType) -> None:
    """It is what its author wrote, on upstream's code; so are copies, and pickles of upstream's instances."""
    module = importlib.import_module(CLASSES["FusedLayerNorm"])

    class Mine(module.FusedLayerNorm):  # type: ignore[name-defined,misc]
        def __init__(self, config: Any, hidden_size: int) -> None:
            super().__init__(config, hidden_size, eps=0.5)

    norm = Mine(config("LayerNorm"), 8)
    x = torch.randn(3, 8)
    for twin in (norm, copy.deepcopy(norm)):
        assert type(twin) is Mine
        torch.testing.assert_close(twin(x), nn.functional.layer_norm(x, (8,), eps=0.5))
    assert counts(liger, "FusedLayerNorm") == {
        "kernel": 0,
        "off": 0,
        "upstream": {"a class derived from it": 1},
    }
    upstream = module._upstream_FusedLayerNorm(config("LayerNorm"), 8)
    upstream.__class__ = module.FusedLayerNorm  # where its name leads
    old = pickle.loads(pickle.dumps(upstream))
    assert type(old) is module.FusedLayerNorm
    torch.testing.assert_close(old(x), upstream(x))


def test_class_derived_from_the_wrapper(liger: ModuleType) -> None:
    """Upstream's wrapper gives torch's norm for a derived class, too."""
    module = importlib.import_module(CLASSES["WrappedTorchNorm"])
    derived = type("Mine", (module.WrappedTorchNorm,), {})
    assert type(derived(config(), 8)).__name__ == "RMSNorm"
    assert counts(liger, "WrappedTorchNorm") == UNUSED


def test_option_of_a_later_release(liger: ModuleType) -> None:
    class Later:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, residual: Any = None) -> Any:
            return "upstream", residual

    norms = importlib.import_module("megatron.core.liger.norms")
    ours = norms.TakenOver(Later)
    try:
        assert type(ours(Later, (config(), 8), {})).__name__ == "RMSNorm"
        assert type(ours(Later, (config(), 8, 1e-5, None), {})).__name__ == "RMSNorm"
        assert ours(Later, (config(), 8), {"residual": False}) == ("upstream", False)
        assert counts(liger, "Later") == {"kernel": 0, "off": 0, "upstream": {"residual": 1}}
    finally:
        del norms.OP.entries["Later"]


@pytest.mark.parametrize(("default", "served"), [(None, True), (False, True), (True, False), (0, False)])
def test_option_that_is_on_by_default_is_never_dropped(
    liger: ModuleType, default: object, served: bool
) -> None:
    class Later:
        def __new__(
            cls, config: Any, hidden_size: int, eps: float = 1e-5, residual: Any = default, **more: Any
        ) -> Any:
            return "upstream", residual, more

    norms = importlib.import_module("megatron.core.liger.norms")
    ours = norms.TakenOver(Later)
    try:
        for named in ({}, {"residual": default}):
            built = ours(Later, (config(), 8), named)
            assert type(built).__name__ == "RMSNorm" if served else built == ("upstream", default, {})
        assert ours(Later, (config(), 8), {"residual": 2}) == ("upstream", 2, {})
        assert ours(Later, (config(), 8), {"residual": None, "x": 1}) == ("upstream", None, {"x": 1})
    finally:
        del norms.OP.entries["Later"]


def test_module_with_ligers_signature(liger: ModuleType) -> None:
    make = liger.LigerMegatronRMSNorm
    assert str(inspect.signature(make)).startswith("(config: 'Any', hidden_size: ")
    assert list(inspect.signature(make).parameters) == [
        "config",
        "hidden_size",
        "eps",
        "persist_layer_norm",
        "zero_centered_gamma",
        "normalization",
    ]
    given = config()
    norm = make(given, 8, persist_layer_norm=True, normalization="LayerNorm")
    assert isinstance(norm, nn.RMSNorm)
    assert list(norm.state_dict()) == ["weight"]
    assert norm.weight.sequence_parallel is True
    assert (norm.config, norm.hidden_size, norm.eps) == (given, torch.Size([8]), 1e-5)
    assert not norm.zero_centered_gamma
    for by_config, by_argument in ((True, False), (False, True)):
        given = config(layernorm_zero_centered_gamma=by_config)
        assert make(given, 8, zero_centered_gamma=by_argument).weight.tolist() == [0.0] * 8
    assert make(SimpleNamespace(), 8).weight.sequence_parallel is False
    with pytest.raises(ValueError, match=r"config\.normalization is 'LayerNorm'"):
        make(config("LayerNorm"), 8)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert twin.weight.sequence_parallel is True
        assert twin.config == config()


# --- Norms that give their residual ---


@pytest.fixture
def norms(liger: ModuleType) -> Any:
    return importlib.import_module("megatron.core.liger.norms")


def fused(normalization: str = "RMSNorm", **changes: Any) -> SimpleNamespace:
    """What the later releases' configs say of it."""
    asked = {"fused_residual_rmsnorm": True, "recompute_granularity": None, "recompute_modules": None}
    return config(normalization, **asked | changes)


PROVIDER = "LocalSpecProvider.layer_norm"


def test_only_an_rms_norm_that_the_config_asks_for_gives_its_residual(norms: Any, liger: ModuleType) -> None:
    wrapped = importlib.import_module(CLASSES["WrappedTorchNorm"]).WrappedTorchNorm
    for asked in (True, False):
        assert norms.provided(wrapped, asked) is (norms.ResidualNorm if asked else wrapped)
    built = norms.ResidualNorm
    for norm, wanted in (
        (built(fused(), 8), True),
        (built(config=fused(), hidden_size=8, eps=0.5), True),
        (built(fused(fused_residual_rmsnorm=False), 8), False),
        (built(config(), 8), False),
        (built(fused("LayerNorm"), 8), False),
        (wrapped(fused(), 8), False),
    ):
        assert type(norm).__module__ == "megatron.core.liger.norms"
        assert norm.returns_residual is wanted
        for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
            assert twin.returns_residual is wanted
    assert type(built(fused("L2Norm"), 8)).__name__ == "L2Norm"
    assert pickle.loads(pickle.dumps(built)) is built
    assert PROVIDER not in liger.counters()["norms"]["entries"] or counts(liger, PROVIDER) == UNUSED


NOT_TAKEN: dict[str, dict[str, Any]] = {
    "hyper-connections": {"enable_mhc_connections": True},
    "recomputed": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]},
    "overlapped": {"overlap_moe_expert_parallel_comm": True},
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("why", NOT_TAKEN)
def test_a_residual_that_is_not_taken(
    norms: Any, liger: ModuleType, why: str, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later releases keep the residual of a norm that they recompute; hyper-connections never take it."""
    if later:
        random = importlib.import_module("megatron.core.tensor_parallel.random")

        class Later:
            def __init__(self, fp8: bool = False, retain_input_tensors: bool = False) -> None: ...

        monkeypatch.setattr(random, "CheckpointWithoutOutput", Later)
    taken = later and why != "hyper-connections"
    norm = norms.ResidualNorm(fused(**NOT_TAKEN[why]), 8)
    assert norm.returns_residual is taken
    if not taken:
        ((reason, times),) = counts(liger, PROVIDER)["upstream"].items()
        assert why in reason
        assert times == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "recompute_modules": ["layernorm"]},
        {"overlap_moe_expert_parallel_comm": False, "enable_mhc_connections": False},
    ],
)
def test_what_else_takes_it(norms: Any, changes: dict[str, Any]) -> None:
    assert norms.ResidualNorm(fused(**changes), 8).returns_residual


@pytest.mark.usefixtures("strict")
def test_strict_refuses_what_is_not_taken(norms: Any) -> None:
    norms.ResidualNorm(fused(), 8)
    with pytest.raises(RuntimeError, match=r"layer_norm would run upstream's code \(fused_residual_rmsnorm"):
        norms.ResidualNorm(fused(**NOT_TAKEN["recomputed"]), 8)


def test_switched_off_no_norm_gives_its_residual(norms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = importlib.import_module(CLASSES["WrappedTorchNorm"]).WrappedTorchNorm
    monkeypatch.setattr(norms.OP, "enabled", False)
    assert norms.provided(wrapped, True) is wrapped
    right = vars(plain()) | {"fused_residual_rmsnorm": True}
    assert type(norms.ResidualNorm(SimpleNamespace(**right), 8)) is nn.RMSNorm
