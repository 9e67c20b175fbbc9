# SPDX-License-Identifier: Apache-2.0
"""Calls of the norms: on the kernels, and, where these do not serve, as the torch class under them."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .conftest import Python
from .test_norms_classes import CLASSES, config, counts

NORMS = ("RMSNorm", "LayerNorm")
H = 24
MIXED = "LayerNorm with input and parameters of different dtypes"
ENTRY = "WrappedTorchNorm"


@pytest.fixture
def wrapped(liger: ModuleType) -> Any:
    return importlib.import_module(CLASSES[ENTRY]).WrappedTorchNorm


def launches(liger: ModuleType) -> dict[str, int]:
    found: dict[str, int] = liger.counters()["norms"]["launches"]
    return found


class Twin(nn.Module):
    """The same norm by torch's functions: what upstream's class gives, and its zero-centred form."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.rms, self.zero_centered = isinstance(norm, nn.RMSNorm), norm.zero_centered_gamma
        self.eps, self.shape = norm.eps, norm.normalized_shape
        for name, parameter in norm.named_parameters():
            self.register_parameter(name, nn.Parameter(parameter.detach().clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = 1 + self.weight if self.zero_centered else self.weight
        if self.rms:
            return nn.functional.rms_norm(x, self.shape, weight, self.eps)
        return nn.functional.layer_norm(x, self.shape, weight, self.bias, self.eps)


def build(
    wrapped: Any, normalization: str, device: torch.device, size: Any = H, **changes: Any
) -> tuple[Any, Twin]:
    """A norm with random parameters, and its twin."""
    norm = wrapped(config(normalization, **changes), size).to(device)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm, Twin(norm).to(device)


def results(norm: nn.Module, x: torch.Tensor, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Output and gradients, in a random direction that is the same each time; of values in ``dtype``."""
    leaves = {"x": x, **dict(norm.named_parameters())}
    out = norm(x)
    generator = torch.Generator().manual_seed(5)
    dout = torch.randn(out.shape, generator=generator).to(dtype or out.dtype).to(out)
    gradients = torch.autograd.grad(out, list(leaves.values()), dout) if out.requires_grad else []
    return {"out": out, **{f"d {name}": g for name, g in zip(leaves, gradients)}}


def assert_results(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert ours[name].dtype == tensor.dtype, name
        torch.testing.assert_close(ours[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


def test_known_values(wrapped: Any, liger: ModuleType, device: torch.device) -> None:
    """Also zero-centred, where weights of 0 are factors of 1."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device, requires_grad=True)
    for zero_centered in (False, True):
        norm = wrapped(config(layernorm_zero_centered_gamma=zero_centered), 4, 1e-5).to(device)
        out = norm(x)
        dx, dw = torch.autograd.grad(out, [x, norm.weight], torch.eye(4, device=device)[0])
        for found, wanted in (
            (out, [0.365148, 0.730296, 1.095444, 1.460593]),
            (dx, [0.352977, -0.024343, -0.036515, -0.048686]),
            (dw, [0.365148, 0, 0, 0]),
        ):
            torch.testing.assert_close(found.cpu(), torch.tensor(wanted), rtol=0, atol=1e-6)
    assert launches(liger) == {"norm_backward": 2, "norm_forward": 2, "norm_reduce": 2}


INPUTS: dict[str, Callable[[Callable[..., torch.Tensor]], torch.Tensor]] = {
    "one row": lambda rand: rand(H),
    "2-D": lambda rand: rand(5, H),
    "3-D": lambda rand: rand(3, 2, H),
    "4-D": lambda rand: rand(3, 2, 2, H),
    # A head slice of one buffer, as query and key norms get it, and MLA's part of a down projection.
    "heads": lambda rand: rand(3, 2, 2, 3 * H)[..., H : 2 * H],
    "compressed": lambda rand: rand(3, 2, H + 7).split([H, 7], dim=-1)[0],
    "transposed": lambda rand: rand(2, 3, H).transpose(0, 1),
    "columns apart": lambda rand: rand(3, 2 * H)[:, ::2],
    "expanded": lambda rand: rand(1, H).expand(4, H),
    "no tokens": lambda rand: rand(0, 1, H),
    "parameter": lambda rand: nn.Parameter(rand(3, H)),
}


@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.usefixtures("strict")
def test_served(
    wrapped: Any,
    liger: ModuleType,
    device: torch.device,
    generator: torch.Generator,
    normalization: str,
    zero_centered: bool,
    kind: str,
) -> None:
    norm, twin = build(wrapped, normalization, device, layernorm_zero_centered_gamma=zero_centered)
    x = INPUTS[kind](lambda *shape: torch.randn(shape, device=device, generator=generator))
    x = x.detach().requires_grad_()
    ours = results(norm, x)
    assert_results(ours, results(twin, x))
    assert counts(liger, ENTRY) == {"kernel": 1, "off": 0, "upstream": {}}
    if kind == "no tokens":
        assert launches(liger) == {}
        assert all(not tensor.any() for name, tensor in ours.items() if name != "out")
    else:
        assert launches(liger) == {"norm_backward": 1, "norm_forward": 1, "norm_reduce": 1}


@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(
    wrapped: Any, liger: ModuleType, device: torch.device, normalization: str, dtype: torch.dtype
) -> None:
    norm, _ = build(wrapped, normalization, device)
    norm.to(dtype)
    x = torch.randn(5, H, device=device).to(dtype).requires_grad_()
    ours = results(norm, x)
    exact = results(Twin(norm).double(), x.detach().double().requires_grad_(), dtype)
    assert_results(ours, {name: tensor.to(dtype) for name, tensor in exact.items()})
    assert counts(liger, ENTRY)["kernel"] == 1


def test_without_gradients(wrapped: Any, liger: ModuleType, device: torch.device) -> None:
    norm, twin = build(wrapped, "RMSNorm", device)
    x = torch.randn(3, H, device=device)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), twin(x))
    norm.requires_grad_(False)
    assert not norm(x).requires_grad
    assert launches(liger) == {"norm_forward": 2}


def outcome(norm: nn.Module, x: torch.Tensor) -> Any:
    """Output and gradients, or the error."""
    try:
        return results(norm, x)
    except Exception as error:
        return type(error), str(error)


def assert_same_outcome(ours: Any, twin: Any) -> None:
    """Torch's own, to the last bit or word."""
    assert type(ours) is type(twin)
    if isinstance(ours, tuple):
        assert ours == twin
        return
    for name, tensor in twin.items():
        assert ours[name].dtype == tensor.dtype, name
        assert tensor.is_meta or torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(
    ("of_x", "of_weight"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
    ids=str,
)
def test_mixed_dtypes(
    wrapped: Any,
    liger: ModuleType,
    device: torch.device,
    normalization: str,
    zero_centered: bool,
    of_x: torch.dtype,
    of_weight: torch.dtype,
) -> None:
    """RMSNorm as torch's, its result's dtype too; LayerNorm is torch's, which may have an error for it."""
    norm, _ = build(wrapped, normalization, device, layernorm_zero_centered_gamma=zero_centered)
    norm.to(of_weight)
    twin = Twin(norm)
    x = torch.randn(4, H, device=device).to(of_x).requires_grad_()
    ours, wanted = outcome(norm, x), outcome(twin, x)
    if normalization == "LayerNorm":
        assert_same_outcome(ours, wanted)
        assert counts(liger, ENTRY)["upstream"] == {MIXED: 1}
        return
    assert isinstance(wanted, dict)
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in wanted.items()}
    exact = results(Twin(norm).double(), x.detach().double().requires_grad_(), wanted["out"].dtype)
    assert_results(ours, {name: tensor.to(wanted[name].dtype) for name, tensor in exact.items()})
    assert counts(liger, ENTRY) == {"kernel": 1, "off": 0, "upstream": {}}


class Subclass(torch.Tensor):
    pass


def with_parameter(norm: Any, name: str, value: torch.Tensor | None) -> Any:
    norm.register_parameter(name, None if value is None else nn.Parameter(value.detach().clone()))
    return norm


DTYPE = "a dtype other than bfloat16, float16 and float32"
WIDTH = "input whose last dimension is not the norm's size, or zero"
SHAPE = "parameters of a shape other than the norm's"
OTHER_DEVICE = "a tensor on a device that is neither CUDA nor CPU"
REFUSED: dict[str, tuple[str, Callable[[Any, torch.Tensor], tuple[Any, Any]]]] = {
    "float64": (DTYPE, lambda norm, x: (norm.double(), x.double())),
    "weight, float64": (DTYPE, lambda norm, x: (norm.double(), x)),
    "integers": (DTYPE, lambda norm, x: (norm, x.int())),
    "meta": (OTHER_DEVICE, lambda norm, x: (norm.to("meta"), x.to("meta"))),
    "weight, meta": ("tensors on different devices", lambda norm, x: (norm.to("meta"), x)),
    "subclass": ("an argument that is no plain tensor", lambda norm, x: (norm, x.as_subclass(Subclass))),
    "no tensor": ("an argument that is no plain tensor", lambda norm, x: (norm, x.tolist())),
    "narrow": (WIDTH, lambda norm, x: (norm, x[:, :5])),
    "one column": (WIDTH, lambda norm, x: (norm, x[:, :1])),
    "a number": (WIDTH, lambda norm, x: (norm, x[0, 0])),
    "other weight": (SHAPE, lambda norm, x: (with_parameter(norm, "weight", norm.weight[1:]), x)),
    "two rows of weight": (SHAPE, lambda norm, x: (with_parameter(norm, "weight", norm.weight[None]), x)),
}


@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", REFUSED)
def test_refused(
    wrapped: Any,
    liger: ModuleType,
    device: torch.device,
    normalization: str,
    zero_centered: bool,
    kind: str,
) -> None:
    reason, change = REFUSED[kind]
    norm, _ = build(wrapped, normalization, device, layernorm_zero_centered_gamma=zero_centered)
    norm, x = change(norm, torch.randn(4, H, device=device))
    twin = Twin(norm)
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        x = x.detach().requires_grad_()
    assert_same_outcome(outcome(norm, x), outcome(twin, x))
    assert counts(liger, ENTRY) == {"kernel": 0, "off": 0, "upstream": {reason: 1}}
    assert launches(liger) == {}


@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_two_dimensions(
    wrapped: Any, liger: ModuleType, device: torch.device, normalization: str, zero_centered: bool
) -> None:
    norm, twin = build(wrapped, normalization, device, (3, 4), layernorm_zero_centered_gamma=zero_centered)
    x = torch.randn(2, 3, 4, device=device, requires_grad=True)
    assert_same_outcome(results(norm, x), results(twin, x))
    assert counts(liger, ENTRY)["upstream"] == {"normalization over other than one dimension": 1}


PARTS: dict[str, tuple[str | None, torch.dtype, Callable[[torch.Tensor], torch.Tensor | None]]] = {
    "none": (None, torch.float32, lambda bias: None),
    "none, mixed": (MIXED, torch.bfloat16, lambda bias: None),
    "another dtype": (MIXED, torch.float32, lambda bias: bias.bfloat16()),
    "another shape": (SHAPE, torch.float32, lambda bias: bias[1:]),
    "another device": ("tensors on different devices", torch.float32, lambda bias: bias.to("meta")),
}


@pytest.mark.parametrize("kind", PARTS)
def test_bias(wrapped: Any, liger: ModuleType, device: torch.device, kind: str) -> None:
    reason, dtype, change = PARTS[kind]
    norm, _ = build(wrapped, "LayerNorm", device)
    with_parameter(norm, "bias", change(norm.bias))
    twin = Twin(norm)
    if norm.bias is None:
        twin.register_parameter("bias", None)
    x = torch.randn(4, H, device=device).to(dtype).requires_grad_()
    ours, wanted = outcome(norm, x), outcome(twin, x)
    if reason is None:
        assert_results(ours, wanted)
    else:
        assert_same_outcome(ours, wanted)
    upstream = {} if reason is None else {reason: 1}
    assert counts(liger, ENTRY) == {"kernel": int(reason is None), "off": 0, "upstream": upstream}


def test_no_eps(wrapped: Any, liger: ModuleType, device: torch.device) -> None:
    norm = wrapped(config(), H, None).to(device)
    x = torch.randn(2, H, device=device)
    assert torch.equal(norm(x), nn.functional.rms_norm(x, (H,), norm.weight))
    assert counts(liger, ENTRY)["upstream"] == {"no eps": 1}


@pytest.mark.parametrize("normalization", NORMS)
def test_autocast(wrapped: Any, liger: ModuleType, device: torch.device, normalization: str) -> None:
    norm, twin = build(wrapped, normalization, device)
    x = torch.randn(2, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert_same_outcome(outcome(norm, x), outcome(twin, x))
        assert counts(liger, ENTRY) == {"kernel": 0, "off": 0, "upstream": {"under autocast": 1}}
        with torch.autocast(device.type, enabled=False):
            norm.bfloat16()(x)
    assert counts(liger, ENTRY)["kernel"] == 1


@pytest.mark.parametrize("normalization", NORMS)
def test_function_transforms(
    wrapped: Any, liger: ModuleType, device: torch.device, normalization: str
) -> None:
    norm, twin = build(wrapped, normalization, device)
    x = torch.randn(3, H, device=device)
    found, wanted = (
        torch.func.vmap(torch.func.grad(lambda row, norm=norm: norm(row).square().sum()))(x)
        for norm in (norm, twin)
    )
    torch.testing.assert_close(found, wanted)
    assert counts(liger, ENTRY)["upstream"] == {"under a transform of torch.func": 1}


@pytest.mark.parametrize("normalization", NORMS)
def test_sharded_weight(
    wrapped: Any, liger: ModuleType, device: torch.device, normalization: str, tmp_path: Path
) -> None:
    """A distributed tensor as parameter, as a norm has it outside of FSDP's forward."""
    distributed = importlib.import_module("torch.distributed.tensor")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (1,))
        norm, twin = build(wrapped, normalization, device)
        for module in (norm, twin):
            for name, parameter in list(module.named_parameters()):
                sharded = distributed.distribute_tensor(parameter.detach(), mesh)
                module.register_parameter(name, nn.Parameter(sharded))
        x = distributed.distribute_tensor(torch.randn(2, H, device=device), mesh)
        assert torch.equal(norm(x).full_tensor(), twin(x).full_tensor())
        assert counts(liger, ENTRY)["upstream"] == {"an argument that is no plain tensor": 1}
    finally:
        torch.distributed.destroy_process_group()


def test_fallback_is_logged_once(
    wrapped: Any, liger: ModuleType, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    importlib.import_module("megatron.core.liger.dispatch")._logged.clear()
    norm, _ = build(wrapped, "RMSNorm", device)
    with caplog.at_level(logging.WARNING, "megatron.core.liger"):
        for _ in range(3):
            norm.double()(torch.ones(2, H, device=device, dtype=torch.float64))
    assert [record.getMessage() for record in caplog.records] == [
        f"norms: WrappedTorchNorm runs upstream's code: {DTYPE}"
    ]
    assert counts(liger, ENTRY)["upstream"] == {DTYPE: 3}


@pytest.mark.usefixtures("strict")
def test_strict(wrapped: Any, liger: ModuleType, device: torch.device) -> None:
    norm, _ = build(wrapped, "LayerNorm", device)
    with pytest.raises(liger.FallbackError, match="norms: WrappedTorchNorm would run upstream's code"):
        norm.double()(torch.ones(2, H, device=device, dtype=torch.float64))


def test_switched_off(
    wrapped: Any, liger: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm of ours in a process where the op is off, from a pickle, say."""
    norm, twin = build(wrapped, "LayerNorm", device, layernorm_zero_centered_gamma=True)
    own = liger.LigerMegatronRMSNorm(config(), H).to(device)
    monkeypatch.setattr(importlib.import_module("megatron.core.liger.norms").OP, "enabled", False)
    x = torch.randn(2, H, device=device, requires_grad=True)
    assert_same_outcome(results(norm, x), results(twin, x))
    assert torch.equal(own(x), nn.functional.rms_norm(x, (H,), own.weight, 1e-5))
    for name in (ENTRY, "LigerMegatronRMSNorm"):
        assert counts(liger, name) == {"kernel": 0, "off": 1, "upstream": {}}
    assert launches(liger) == {}


@pytest.mark.parametrize("zero_centered", [False, True])
def test_module(liger: ModuleType, device: torch.device, zero_centered: bool) -> None:
    norm = liger.LigerMegatronRMSNorm(config(), H, zero_centered_gamma=zero_centered).to(device)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 2, H, device=device, requires_grad=True)
    assert_results(results(norm, x), results(Twin(norm), x))
    assert counts(liger, "LigerMegatronRMSNorm") == {"kernel": 1, "off": 0, "upstream": {}}


def test_fused_layer_norm_counts_its_own(liger: ModuleType, device: torch.device) -> None:
    fused = importlib.import_module(CLASSES["FusedLayerNorm"]).FusedLayerNorm
    for normalization in NORMS:
        norm, twin = build(fused, normalization, device)
        x = torch.randn(3, H, device=device, requires_grad=True)
        assert_results(results(norm, x), results(twin, x))
    assert counts(liger, "FusedLayerNorm") == {"kernel": 2, "off": 0, "upstream": {}}
    assert counts(liger, ENTRY)["kernel"] == 0


@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed(
    wrapped: Any, liger: ModuleType, device: torch.device, normalization: str, reentrant: bool
) -> None:
    """In an activation checkpoint: the same gradients, one more forward."""
    norm, _ = build(wrapped, normalization, device)
    x = torch.randn(3, H, device=device, requires_grad=True)
    leaves = [x, *norm.parameters()]

    def gradients(apply: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        for leaf in leaves:
            leaf.grad = None
        (apply(x) * torch.linspace(-1, 1, H, device=device)).sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    wanted = gradients(norm)
    liger.reset_counters()
    found = gradients(lambda x: checkpoint(norm, x, use_reentrant=reentrant))
    assert len(found) == len(leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert launches(liger) == {"norm_backward": 1, "norm_forward": 2, "norm_reduce": 1}


@pytest.mark.parametrize("normalization", NORMS)
def test_backward_twice(wrapped: Any, device: torch.device, normalization: str) -> None:
    norm, _ = build(wrapped, normalization, device)
    x = torch.randn(3, H, device=device, requires_grad=True)
    out = norm(x).square().sum()
    first = torch.autograd.grad(out, [x, norm.weight], retain_graph=True)
    second = torch.autograd.grad(out, [x, norm.weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_under_torch_compile(
    wrapped: Any, liger: ModuleType, device: torch.device, normalization: str, fullgraph: bool
) -> None:
    """Torch's code is traced: equal results, no new trace at later calls, counted once a trace."""
    torch._dynamo.reset()
    norm, twin = build(wrapped, normalization, device, layernorm_zero_centered_gamma=True)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=fullgraph)
    x = torch.randn(3, H, device=device, requires_grad=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), twin(x))
    assert counts(liger, ENTRY) == {"kernel": 0, "off": 0, "upstream": {"traced by torch.compile": 1}}
    copied = copy.deepcopy(norm)
    torch.testing.assert_close(copied(x), twin(x))
    assert counts(liger, ENTRY)["kernel"] == 1


ON_CPU = """
import torch
from types import SimpleNamespace
from megatron.core.transformer.torch_norm import WrappedTorchNorm
import megatron.core.liger as liger
config = SimpleNamespace(normalization="RMSNorm", sequence_parallel=True, persist_layer_norm=True,
                         layernorm_zero_centered_gamma=True, memory_efficient_layer_norm=False)
norm = WrappedTorchNorm(config, 4)
x = torch.tensor([1.0, 2.0, 3.0, 4.0])
norm(x).sum().backward()
torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (4,), eps=1e-5))
torch.testing.assert_close(norm.weight.grad, norm(x).detach())
print(type(norm).__name__, liger.counters()["norms"])
"""


@pytest.mark.parametrize("interpreted", [False, True])
def test_on_cpu(python: Python, interpreted: bool) -> None:
    """Without the interpreter torch's own code serves what ours built. The job's two lines say so."""
    done = python(code=ON_CPU, **({"TRITON_INTERPRET": "1"} if interpreted else {}))
    found = next(line for line in done.stdout.splitlines() if line.startswith("RMSNorm "))
    first, last = (line for line in done.stdout.splitlines() if line.startswith("liger overlay"))
    if interpreted:
        assert "norms kernel" in first
        assert (
            "norms: WrappedTorchNorm 3 kernel, launches norm_backward 1, norm_forward 3, norm_reduce 1"
            in last
        )
        assert "'WrappedTorchNorm': {'kernel': 3, 'off': 0, 'upstream': {}}" in found
        assert "'launches': {'norm_backward': 1, 'norm_forward': 3, 'norm_reduce': 1}" in found
    else:
        assert "norms upstream (a CPU tensor without TRITON_INTERPRET=1)" in first
        assert "norms: WrappedTorchNorm 3 upstream (a CPU tensor without TRITON_INTERPRET=1)" in last
        assert "{'a CPU tensor without TRITON_INTERPRET=1': 3}" in found
        assert "'launches': {}" in found


# --- Norms that give their residual ---


def pair_results(norm: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output, residual and gradients of a norm with its residual, or of one without and its input."""
    found = norm(x)
    out, residual = found if isinstance(found, tuple) else (found, x)
    generator = torch.Generator().manual_seed(5)
    gradients = [torch.randn(t.shape, generator=generator).to(t) for t in (out, residual)]
    leaves = [x, *norm.parameters()]
    dx, *others = torch.autograd.grad([out, residual], leaves, gradients)
    return {"out": out, "residual": residual, "dx": dx, **{f"d{i}": d for i, d in enumerate(others)}}


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("name", ["2-D", "3-D", "heads", "transposed", "columns apart", "no tokens"])
def test_a_norm_with_its_residual(
    wrapped: Any, liger: ModuleType, device: torch.device, name: str, zero_centered: bool
) -> None:
    norm, twin = build(wrapped, "RMSNorm", device, layernorm_zero_centered_gamma=zero_centered)
    norm.returns_residual = True
    x = INPUTS[name](lambda *shape: torch.randn(*shape, device=device)).detach().requires_grad_()
    ours, wanted = pair_results(norm, x), pair_results(twin, x)
    assert ours["residual"].data_ptr() == x.data_ptr()
    assert_results(ours, wanted)
    assert counts(liger, ENTRY) == {"kernel": 1, "off": 0, "upstream": {}}
    assert launches(liger) == (
        {} if name == "no tokens" else dict.fromkeys(("norm_backward", "norm_forward", "norm_reduce"), 1)
    )


@pytest.mark.parametrize("why", ["off", "dtype", "autocast", "traced"])
def test_a_residual_whatever_runs(
    wrapped: Any, liger: ModuleType, device: torch.device, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that was built for a pair gets one, also from torch's own norm."""
    norm, twin = build(wrapped, "RMSNorm", device)
    norm.returns_residual = True
    x = torch.randn(5, H, device=device, dtype=torch.float64 if why == "dtype" else None, requires_grad=True)
    if why == "off":
        monkeypatch.setattr(importlib.import_module("megatron.core.liger.norms").OP, "enabled", False)
    elif why == "traced":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.autocast(device.type, enabled=why == "autocast"):
        ours, wanted = pair_results(norm, x), pair_results(twin, x)
    assert ours["residual"] is x
    assert_results(ours, wanted)
    assert launches(liger) == {}
    found = counts(liger, ENTRY)
    assert (found["kernel"], found["off"], len(found["upstream"])) == (0, why == "off", why != "off")
