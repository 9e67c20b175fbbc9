# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in training and what saves memory in it: as on the pristine tree.

Activations that are recomputed, offloaded or watched, gradients that are deferred.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from scripts.workers.spawn import run_world

from .test_models import SEEDS, distances, too_far, where

PROGRAM = str(Path(__file__).with_name("faults_worker.py"))
# The models whose results differ, in float64 too.
MODELS = ("plain", "distilled, squares", "distilled, divergence", "experts")
# The ways that change nothing about a result, and by way, how often they run the forward of a norm and of a
# SwiGLU again, in a step of two micro-batches: a layer has four norms and one SwiGLU, or one of all routed
# experts and one of the shared one.
SAME = {
    "full, uniform": ("plain", 2 * 8, 2 * 2),
    "full, block": ("plain", 2 * 4, 2 * 1),
    "core_attn": ("plain", 0, 0),
    "layernorm": ("plain", 2 * 4, 0),
    "mlp": ("plain", 0, 2 * 2),
    "saved on the host": ("plain", 0, 0),
    "deterministic": ("plain", 0, 0),
    "accumulated": ("plain", 0, 0),
    "deferred": ("plain", 0, 0),
    "distilled, squares after": ("distilled, squares", 0, 0),
    "experts, full": ("experts", 2 * 8, 2 * 3),
    "experts, moe_act": ("experts", 0, 2 * 1),
    "experts, layernorm": ("experts", 2 * 4, 0),
    "experts, moe": ("experts", 0, 2 * 2),
    "experts, shared_experts": ("experts", 0, 2 * 1),
}
Run = dict[str, Any]
Found = dict[str, dict[str, Any]]  # by the run's name


def runs(ways: Sequence[str], dtype: str, seeds: Sequence[int], **choice: Any) -> list[Run]:
    suffix = "".join(f" {name}" for name in choice)
    return [
        {"name": f"{way} {dtype} {seed}{suffix}", "way": way, "dtype": dtype, "seed": seed, **choice}
        for way in ways
        for seed in seeds
    ]


def run_job(folder: Path, tree: Path, device: str, plan: Sequence[Run]) -> Found:
    # The last of these is what PyTorch asks for before cuBLAS may be deterministic.
    extra = {
        "TORCHDYNAMO_DISABLE": "1",
        "LIGER_MEGATRON_STRICT": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    run_world(PROGRAM, {"runs": plan}, tree=tree, folder=folder, device=device, timeout=300, extra=extra)
    return {run["name"]: torch.load(folder / f"{run['name']}-rank0.pt") for run in plan}


@pytest.fixture(scope="module")
def found(
    pristine_tree: Path, overlaid_tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Found, Found, Found]:
    """On the overlaid tree, on the pristine one, and there in float64; each way once, each model often."""
    folder = tmp_path_factory.mktemp("faults")
    once = SEEDS[:1]
    compared = runs(MODELS, "bfloat16", SEEDS) + runs(list(SAME), "bfloat16", once)
    compared += runs(["deterministic"], "bfloat16", once, again=True)
    more = runs([*MODELS, *SAME], "bfloat16", once, in_place=True)
    truth = runs(MODELS, "float64", SEEDS)
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(run_job, folder / "ours", overlaid_tree, where(1), compared + more)
        if where(1) == "cpu":
            theirs = right = pool.submit(run_job, folder / "theirs", pristine_tree, "cpu", compared + truth)
        else:
            theirs = pool.submit(run_job, folder / "theirs", pristine_tree, "cuda", compared)
            right = pool.submit(run_job, folder / "truth", pristine_tree, "cpu", truth)
        return ours.result(), theirs.result(), right.result()


@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients(found: tuple[Found, Found, Found], model: str) -> None:
    """Of a step, as far from float64 as upstream's: by the bound of the other models' tests."""
    ours, theirs, truth = found
    samples = [[each[f"{model} bfloat16 {seed}"] for seed in SEEDS] for each in (ours, theirs)]
    right = [truth[f"{model} float64 {seed}"] for seed in SEEDS]
    assert len(right[0]["losses"]) == 2
    failures = too_far(*samples, right)
    assert not failures, "\n".join(failures)


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """All losses and gradients: to the bit, but where a GPU may add them up in any order."""
    assert one["error"] is None
    limit = 2.0**-8 if where(1) == "cuda" else 0.0
    for name, far in distances([one], [other]).items():
        assert far <= limit, f"{name}: {far:.1e}"


@pytest.mark.parametrize("way", SAME)
def test_what_changes_no_result(found: tuple[Found, Found, Found], way: str) -> None:
    """Recomputed, saved elsewhere, accumulated later: the losses and gradients of the plain step."""
    model, norms, swiglus = SAME[way]
    for each in found[:2]:
        assert_same(each[f"{way} bfloat16 {SEEDS[0]}"], each[f"{model} bfloat16 {SEEDS[0]}"])
    counters = found[0][f"{way} bfloat16 {SEEDS[0]}"]["counters"]
    launched = {name: n for op in counters.values() for name, n in op["launches"].items()}
    once = 2 * 9, 2 * (3 if model == "experts" else 2)
    assert launched == {
        "norm_forward": once[0] + norms,
        **dict.fromkeys(("norm_backward", "norm_reduce"), once[0]),
        "swiglu_forward": once[1] + swiglus,
        "swiglu_backward": once[1],
        **dict.fromkeys(("cross_entropy_forward", "cross_entropy_backward"), 2),
    }


def test_deterministic_algorithms(found: tuple[Found, Found, Found]) -> None:
    """Nothing raises under them, and two runs are equal to the bit, on a GPU too."""
    one, again = (found[0][f"deterministic bfloat16 {SEEDS[0]}{which}"] for which in ("", " again"))
    assert one["error"] is again["error"] is None
    assert max(distances([again], [one]).values()) == 0


@pytest.mark.reuse
@pytest.mark.parametrize("way", [*MODELS, *SAME])
def test_in_place(found: tuple[Found, Found, Found], way: str) -> None:
    """The same gradients; or autograd's error, where a term of a hook's own reads the logits afterwards."""
    ours = found[0]
    one = ours[f"{way} bfloat16 {SEEDS[0]} in_place"]
    if way == "distilled, squares":
        assert "modified by an inplace operation" in one["error"]
        assert one["gradients"] is None
    else:
        assert_same(one, ours[f"{way} bfloat16 {SEEDS[0]}"])


# --- Each entry by itself ---


@dataclass(frozen=True)
class Entry:
    """An entry of ours and what upstream has in its place, of an activation and of parameters.

    Attributes:
        shape: of the activation, after the number of tokens.
        parameters: the shapes of the others, a None standing for the number of tokens.
    """

    ours: Callable[..., torch.Tensor]
    upstream: Callable[..., torch.Tensor]
    shape: tuple[int, ...]
    parameters: tuple[tuple[int | None, ...], ...] = ()

    def draw(self, tokens: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        """Leaves: the activation, and the parameters."""
        generator = torch.Generator().manual_seed(3)
        shapes = [(tokens, *self.shape), *self.parameters]
        drawn = [torch.randn([size or tokens for size in shape], generator=generator) for shape in shapes]
        return [each.to(device, dtype).requires_grad_() for each in drawn]


N = 16
ENTRIES = ("swiglu", "swiglu, bias", "swiglu, weights", "fused loss", "unfused loss", "RMSNorm", "LayerNorm")


@pytest.fixture(scope="module")
def entries(fused: ModuleType) -> Iterator[dict[str, Entry]]:
    """With Megatron's model parallelism over this one process, which the losses ask for."""
    from megatron.core import parallel_state
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    parallel_state.initialize_model_parallel()
    group = parallel_state.get_tensor_model_parallel_group()
    losses = importlib.import_module("megatron.core.fusions.fused_cross_entropy")
    unfused = importlib.import_module("megatron.core.tensor_parallel.cross_entropy")

    def dense(name: str) -> Callable[..., torch.Tensor]:
        return lambda x, bias=None: getattr(fused, f"{name}bias_swiglu_impl")(x, bias)

    def weighted(name: str) -> Callable[..., torch.Tensor]:
        return lambda x, weights: getattr(fused, f"{name}weighted_bias_swiglu_impl")(x, None, weights)

    def loss(module: ModuleType, name: str, *options: Any) -> Callable[..., torch.Tensor]:
        def of(x: torch.Tensor) -> torch.Tensor:
            target = torch.arange(len(x), device=x.device).remainder(N)[:, None]
            found: torch.Tensor = getattr(module, name)(x, target, *options)
            return found

        return of

    def norm(kind: str) -> Callable[..., torch.Tensor]:
        config = SimpleNamespace(
            normalization=kind,
            sequence_parallel=False,
            persist_layer_norm=False,
            layernorm_zero_centered_gamma=False,
            memory_efficient_layer_norm=False,
        )

        def of(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            made: Any = built[kind]
            for name, parameter in zip(("weight", "bias"), parameters):
                del made._parameters[name]
                made._parameters[name] = parameter
            found: torch.Tensor = made(x)
            return found

        built[kind] = WrappedTorchNorm(config, N, 1e-5)
        return of

    built: dict[str, Any] = {}
    name = "vocab_parallel_cross_entropy"
    yield {
        "swiglu": Entry(dense(""), dense("_upstream_"), (2 * N,)),
        "swiglu, bias": Entry(dense(""), dense("_upstream_"), (2 * N,), ((2 * N,),)),
        "swiglu, weights": Entry(weighted(""), weighted("_upstream_"), (2 * N,), ((None, 1),)),
        "fused loss": Entry(
            loss(losses, f"fused_{name}", group), loss(losses, f"_upstream_fused_{name}", group), (1, N)
        ),
        "unfused loss": Entry(loss(unfused, name), loss(unfused, f"_upstream_{name}"), (1, N)),
        "RMSNorm": Entry(norm("RMSNorm"), lambda x, w: F.rms_norm(x, (N,), w, 1e-5), (N,), ((N,),)),
        "LayerNorm": Entry(
            norm("LayerNorm"), lambda x, w, b: F.layer_norm(x, (N,), w, b, 1e-5), (N,), ((N,), (N,))
        ),
    }
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def step(function: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the gradients of the leaves, of which the activation is given as a product."""
    # A copy for each: upstream's losses overwrite what they are given in float32.
    out = function(leaves[0] * 1, *leaves[1:])
    dout = torch.linspace(-1, 2, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


EXTREMES = [float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.usefixtures("strict")
def test_infinities_and_nan(
    entries: dict[str, Entry], device: torch.device, name: str, dtype: torch.dtype
) -> None:
    entry = entries[name]
    leaves = entry.draw(12, device, dtype)
    with torch.no_grad():
        rows = leaves[0].view(12, -1)
        for column in (0, N - 1):
            for row, value in enumerate(EXTREMES, 3 * bool(column)):
                rows[row, column] = value
        for row, value in enumerate(EXTREMES, 6):
            rows[row] = value
        rows[9, 2], rows[9, 3] = EXTREMES[:2]
    ours = [each.cpu() for each in step(entry.ours, leaves)]
    # On a CPU: some of PyTorch's GPU kernels make a whole row NaN of one infinity.
    theirs = step(entry.upstream, [leaf.detach().cpu().requires_grad_() for leaf in leaves])
    assert not any(each.isfinite().all() for each in theirs[:2])
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        # Finite numbers as they are rounded on the way; how well is for the kernels' tests.
        most = other[other.isfinite()].abs().max().item() if other.isfinite().any() else 0.0
        torch.testing.assert_close(
            one,
            other,
            rtol=0,
            atol=2.0**-6 * most,
            equal_nan=True,
            msg=lambda text, number=number: f"{number}: {text}",
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.usefixtures("strict")
def test_what_was_saved_and_changed(
    entries: dict[str, Entry], device: torch.device, name: str, dtype: torch.dtype
) -> None:
    """The activation, or a parameter other than a bias that no gradient needs: autograd's error."""
    entry = entries[name]
    for changed in range(1 + len(entry.parameters)):
        if name == "LayerNorm" and changed == 2:
            continue
        operands = [leaf * 1 for leaf in entry.draw(5, device, dtype)]
        out = entry.ours(*operands)
        with torch.no_grad():
            operands[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.reuse
@pytest.mark.parametrize("name", [name for name in ENTRIES if "loss" not in name and "Norm" not in name])
@pytest.mark.usefixtures("strict")
def test_a_second_backward_in_place(
    entries: dict[str, Entry], device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(importlib.import_module("megatron.core.liger.swiglu").OP, "in_place", True)
    leaves = entries[name].draw(5, device, torch.float32)
    loss = entries[name].ours(leaves[0] * 1, *leaves[1:]).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.usefixtures("strict")
def test_a_second_derivative(entries: dict[str, Entry], device: torch.device, name: str) -> None:
    leaves = entries[name].draw(5, device, torch.float32)
    loss = entries[name].ours(*leaves).square().sum()
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    penalty = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    with pytest.raises(RuntimeError, match="twice"):
        (loss + penalty).backward()


# --- A thousand steps ---


def kept() -> dict[str, int]:
    """How many objects and tensors live, and how much lies in the containers and caches of our modules."""
    gc.collect()
    objects = gc.get_objects()
    found = {"objects": len(objects), "tensors": sum(isinstance(each, torch.Tensor) for each in objects)}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("megatron.core.liger"):
            continue
        for name, value in vars(module).items():
            if isinstance(value, functools._lru_cache_wrapper):
                found[f"{module_name}.{name}"] = value.cache_info().currsize
            elif isinstance(value, (dict, list, set)) and not name.startswith("__"):
                found[f"{module_name}.{name}"] = len(value)
    return found


class NotLaunched:
    """In a kernel's place; the interpreter would take a second for fifty steps."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **named: None


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.usefixtures("strict")
def test_a_thousand_steps_keep_nothing(
    entries: dict[str, Entry], device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No tensor, and nothing that grows with the numbers of tokens, of which there are ever new ones."""

    def run(steps: range) -> dict[str, int]:
        for number in steps:
            step(entries[name].ours, entries[name].draw(1 + number % 97, device, torch.bfloat16))
        return kept()

    names = (f"megatron.core.liger.kernels.{op}" for op in ("gated", "cross_entropy", "norms"))
    modules = [importlib.import_module(name) for name in names]
    early = run(range(20))
    if device.type == "cpu":
        for module in modules:
            for kernel in [each for each in vars(module) if each.endswith("_kernel")]:
                monkeypatch.setattr(module, kernel, NotLaunched())
    # Some objects come with what is counted and with the interpreter's own; 980 would come with the steps.
    late = run(range(20, 1000))
    assert late.pop("objects") < early.pop("objects") + 490
    # Fewer than before: what other tests had left has been collected in the meantime.
    assert late.keys() == early.keys()
    assert all(late[name] <= count for name, count in early.items()), (early, late)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.usefixtures("strict")
def test_a_thousand_steps_keep_no_memory(entries: dict[str, Entry], device: torch.device, name: str) -> None:
    def run(steps: range) -> int:
        for number in steps:
            step(entries[name].ours, entries[name].draw(1 + number % 97, device, torch.bfloat16))
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    early = run(range(50))
    assert run(range(50, 1000)) == early
