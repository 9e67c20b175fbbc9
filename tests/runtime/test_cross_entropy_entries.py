# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy's taken-over functions on one rank: what they serve, how they deviate, what falls back."""

from __future__ import annotations

import importlib
import inspect
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from liger_kernels.cross_entropy import cross_entropy_reference

from .conftest import Python

FUSED = "fused_vocab_parallel_cross_entropy"
UNFUSED = "vocab_parallel_cross_entropy"
ENTRIES = (FUSED, UNFUSED)
MODULES = {
    FUSED: "megatron.core.fusions.fused_cross_entropy",
    UNFUSED: "megatron.core.tensor_parallel.cross_entropy",
}
LANGUAGE_MODULE = "megatron.core.models.common.language_module.language_module"


class Entries:
    """The two functions, ours and upstream's, called alike: ``(logits, target)`` on the one-rank group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.modules = {name: importlib.import_module(module) for name, module in MODULES.items()}

    def function(self, name: str, upstream: bool = False) -> Callable[..., torch.Tensor]:
        found: Callable[..., torch.Tensor] = getattr(
            self.modules[name], f"_upstream_{name}" if upstream else name
        )
        return found

    def __call__(
        self, name: str, logits: torch.Tensor, target: torch.Tensor, *options: Any, upstream: bool = False
    ) -> torch.Tensor:
        options = (self.group,) if name == FUSED else options
        return self.function(name, upstream)(logits, target, *options)


@pytest.fixture(scope="module")
def entries(fused: ModuleType) -> Iterator[Entries]:
    """Both entries, with Megatron's model parallelism over this one process."""
    from megatron.core import parallel_state

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield Entries(parallel_state.get_tensor_model_parallel_group())
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def both(entries: Entries, liger: ModuleType) -> Entries:
    """The entries with counters at zero."""
    return entries


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Every collective that torch.distributed is asked for, by name."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(dist, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return wrapper

    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier", "reduce")
    for name in (*names, "reduce_scatter_tensor", "all_gather_object", "all_to_all"):
        monkeypatch.setattr(dist, name, counted(name))
    return calls


def setting(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    """As if the variables had been set at import."""
    settings = importlib.import_module("megatron.core.liger.settings")
    read = settings.read(environ)
    for module in ("dispatch", "cross_entropy", "ranks"):
        monkeypatch.setattr(importlib.import_module(f"megatron.core.liger.{module}"), "SETTINGS", read)
    op = importlib.import_module("megatron.core.liger.cross_entropy").OP
    monkeypatch.setattr(op, "enabled", "cross_entropy" in read.enabled)
    monkeypatch.setattr(op, "in_place", "cross_entropy" in read.in_place)


def counts(liger: ModuleType, entry: str) -> dict[str, Any]:
    found: dict[str, Any] = liger.counters()["cross_entropy"]["entries"][entry]
    return found


def launches(liger: ModuleType) -> dict[str, int]:
    found: dict[str, int] = liger.counters()["cross_entropy"]["launches"]
    return found


def out_of_range(liger: ModuleType) -> int:
    found: int = liger.report()["ops"]["cross_entropy"]["device_counts"].get(
        "labels beyond the vocabulary", 0
    )
    return found


def make(
    device: torch.device,
    shape: tuple[int, ...] = (3, 2),
    columns: int = 24,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    logits = (torch.randn(*shape, columns, generator=generator) * 3).to(device, dtype)
    return logits.requires_grad_(), torch.randint(columns, shape, generator=generator).to(device)


def gradient(loss: torch.Tensor, logits: torch.Tensor, dloss: torch.Tensor | None = None) -> torch.Tensor:
    (found,) = torch.autograd.grad(loss, logits, torch.ones_like(loss) if dloss is None else dloss)
    return found


def exact(
    logits: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient in float64, as the results have to be rounded."""
    wide = logits.detach().double().requires_grad_()
    loss = cross_entropy_reference(wide, target, **options)
    return loss.detach().float(), gradient(loss, wide, dloss.double()).to(logits.dtype)


# --- As upstream ---


@pytest.mark.parametrize("name", ENTRIES)
def test_looks_like_upstream(both: Entries, name: str) -> None:
    ours, upstream = both.function(name), both.function(name, upstream=True)
    assert ours is not upstream
    assert inspect.signature(ours) == inspect.signature(upstream)
    assert (ours.__name__, ours.__qualname__, ours.__module__) == (name, name, MODULES[name])
    assert ours.__doc__ == upstream.__doc__
    assert pickle.loads(pickle.dumps(ours)) is ours


@pytest.mark.parametrize("name", ENTRIES)
def test_other_names_stay(both: Entries, pristine_tree: Path, name: str) -> None:
    module = both.modules[name]
    path = pristine_tree / f"{MODULES[name].replace('.', '/')}.py"
    pristine: dict[str, Any] = {"__name__": MODULES[name], "__package__": MODULES[name].rpartition(".")[0]}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), pristine)
    public = {found for found in vars(module) if not found.startswith("_")}
    assert public == {found for found in pristine if not found.startswith("_")}
    for kept in ("VocabParallelCrossEntropy", "_VocabParallelCrossEntropy"):
        theirs = {key for key, value in vars(pristine[kept]).items() if isinstance(value, staticmethod)}
        assert theirs <= set(vars(getattr(module, kept)))
        assert theirs
    if name == UNFUSED:
        from megatron.core import parallel_state

        assert module.get_tensor_model_parallel_group is parallel_state.get_tensor_model_parallel_group


def served_calls(device: torch.device) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """One call for each kind that the kernel serves."""
    logits, target = make(device)
    wide, _ = make(device, columns=48)
    return {
        "[s, b, V]": (logits, target),
        "[tokens, V]": make(device, (5,)),
        "[V]": make(device, ()),
        "bfloat16": make(device, dtype=torch.bfloat16),
        "float16": make(device, dtype=torch.float16),
        "odd vocabulary": make(device, columns=37),
        "one label": make(device, columns=1),
        "parameter": (torch.nn.Parameter(logits.detach().clone()), target),
        "rows apart": (wide[..., :24], target),
        "columns apart": (wide[..., ::2], target),
        "transposed labels": (logits, target.t().contiguous().t()),
        "no tokens": make(device, (0, 1)),
        "no gradient": (logits.detach(), target),
    }


SERVED = [
    "[s, b, V]",
    "[tokens, V]",
    "[V]",
    "bfloat16",
    "float16",
    "odd vocabulary",
    "one label",
    "parameter",
    "rows apart",
    "columns apart",
    "transposed labels",
    "no tokens",
    "no gradient",
]


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("kind", SERVED)
def test_served(
    both: Entries,
    liger: ModuleType,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: str,
) -> None:
    setting(monkeypatch, LIGER_MEGATRON_STRICT="1")
    calls = served_calls(device)
    assert list(calls) == SERVED
    logits, target = calls[kind]
    loss = both(name, logits, target)
    some = bool(target.numel())
    assert counts(liger, name) == {"kernel": 1, "off": 0, "upstream": {}}
    assert launches(liger) == ({"cross_entropy_forward": 1} if some else {})
    assert loss.dtype == torch.float32
    assert loss._base is None
    assert loss.untyped_storage().nbytes() == loss.numel() * 4
    dloss = torch.linspace(-1, 2, loss.numel(), device=device).view(loss.shape)
    if some:
        right, dright = exact(logits, target, dloss)
        torch.testing.assert_close(loss.detach(), right, rtol=1e-6, atol=1e-6)
    assert loss.shape == target.shape
    assert loss.requires_grad == logits.requires_grad
    if loss.requires_grad:
        found = gradient(loss, logits, dloss)
        assert (found.dtype, found.shape) == (logits.dtype, logits.shape)
        if some:
            torch.testing.assert_close(found, dright, rtol=torch.finfo(logits.dtype).eps, atol=1e-6)
            assert launches(liger) == {"cross_entropy_backward": 1, "cross_entropy_forward": 1}


@pytest.mark.parametrize("name", ENTRIES)
def test_equals_upstream(both: Entries, device: torch.device, name: str) -> None:
    logits, target = make(device, dtype=torch.bfloat16)
    ours, upstream = both(name, logits, target), both(name, logits, target, upstream=True)
    torch.testing.assert_close(ours, upstream, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient(ours, logits), gradient(upstream, logits), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("name", ENTRIES)
def test_by_keyword(both: Entries, liger: ModuleType, device: torch.device, name: str) -> None:
    logits, target = make(device)
    options: dict[str, Any] = {"tp_group": both.group} if name == FUSED else {"label_smoothing": 0.25}
    loss = both.function(name)(target=target, vocab_parallel_logits=logits, **options)
    same = both.function(name)(logits, target, *options.values())
    assert torch.equal(loss, same)
    right, _ = exact(
        logits, target, torch.ones_like(loss), label_smoothing=options.get("label_smoothing", 0.0)
    )
    torch.testing.assert_close(loss.detach(), right, rtol=1e-6, atol=1e-6)
    assert counts(liger, name)["kernel"] == 2


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize(
    "layout",
    [
        lambda g: g,
        lambda g: g[:1, :1].expand(g.shape),
        lambda g: g.t().contiguous().t(),
        lambda g: torch.arange(1.0, len(g) + 1, device=g.device)[:, None].expand(g.shape),
        lambda g: torch.zeros_like(g),
        lambda g: torch.stack([g, g], -1)[..., 1],
    ],
    ids=["contiguous", "expanded", "transposed", "row-varying", "masked", "strided"],
)
def test_gradients_of_the_loss(
    both: Entries, device: torch.device, name: str, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    logits, target = make(device)
    dloss = layout(torch.linspace(0.5, 2, 6, device=device).view(3, 2))
    _, right = exact(logits, target, dloss)
    torch.testing.assert_close(
        gradient(both(name, logits, target), logits, dloss), right, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", ENTRIES)
def test_through_a_sum(both: Entries, device: torch.device, name: str) -> None:
    """As a training loop makes it: labels masked afterwards, an expanded gradient."""
    logits, target = make(device)
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], device=device)
    (both(name, logits, target) * mask).sum().backward()
    _, right = exact(logits, target, mask)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, right, rtol=1e-5, atol=1e-6)
    assert not logits.grad[mask == 0].any()


# --- Deviations: each with what upstream gives, so that the day it changes is noticed ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ENTRIES)
def test_the_gradient_has_the_dtype_of_the_logits(
    both: Entries, device: torch.device, name: str, dtype: torch.dtype
) -> None:
    zeros = torch.zeros(1, 1, 3, dtype=dtype, device=device)
    target = torch.zeros(1, 1, dtype=torch.int64, device=device)

    def of(upstream: bool) -> list[float]:
        logits = zeros.clone().requires_grad_()
        found = gradient(both(name, logits, target, upstream=upstream), logits)
        assert found.dtype == dtype
        return [float(value) for value in found.flatten()]

    assert of(False) == pytest.approx([-0.6666667, 0.3333333, 0.3333333], abs=torch.finfo(dtype).eps)
    if name == FUSED:  # through bfloat16
        assert of(True)[1] == pytest.approx(0.33398438)


@pytest.mark.parametrize("name", ENTRIES)
def test_float32_logits_stay(both: Entries, device: torch.device, name: str) -> None:
    target = torch.tensor([[2]], device=device)
    before = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], device=device)
    logits = before.clone().requires_grad_()
    loss = both(name, logits, target)
    assert torch.equal(logits, before)
    loss.backward()
    assert torch.equal(logits, before)
    overwritten = before.clone().requires_grad_()
    both(name, overwritten, target, upstream=True)
    assert not torch.equal(overwritten, before)


def test_label_smoothing(both: Entries, device: torch.device) -> None:
    """The value that every rank has to find; at one rank upstream's is the same."""
    target = torch.tensor([[2]], device=device)
    logits = torch.arange(8.0, device=device).view(1, 1, 8).requires_grad_()
    loss = both(UNFUSED, logits, target, 0.1)
    assert loss.item() == pytest.approx(5.286911, abs=1e-6)
    right = [-0.013709, -0.012718, -0.895739, -0.002704, 0.017196, 0.071291, 0.218336, 0.618047]
    found = gradient(loss, logits)
    torch.testing.assert_close(found.flatten(), torch.tensor(right, device=device), rtol=0, atol=1e-6)
    assert found.sum().item() == pytest.approx(0, abs=1e-6)
    again = logits.detach().clone().requires_grad_()
    assert both(UNFUSED, again, target, 0.1, upstream=True).item() == pytest.approx(5.286911, abs=1e-6)


def test_label_smoothing_with_a_large_gap(both: Entries, device: torch.device) -> None:
    target = torch.tensor([[1]], device=device)
    logits = torch.tensor([[[0.0, 200.0]]], device=device)
    assert both(UNFUSED, logits.clone(), target, 0.1).item() == pytest.approx(20.0, abs=1e-5)
    assert both(UNFUSED, logits, target, 0.1, upstream=True).isinf().all()


@pytest.mark.parametrize("name", ENTRIES)
def test_labels_outside_the_vocabulary(
    both: Entries, liger: ModuleType, device: torch.device, name: str
) -> None:
    target = torch.tensor([[-100], [-1], [4]], device=device)
    before = out_of_range(liger)

    def of(upstream: bool) -> tuple[list[float], list[list[float]]]:
        logits = torch.zeros(3, 1, 4, device=device, requires_grad=True)
        loss = both(name, logits, target, upstream=upstream)
        return loss.flatten().tolist(), gradient(loss, logits)[:, 0].tolist()

    loss, found = of(False)
    assert loss == pytest.approx([0, 0, 1.386294])
    assert found == [[0.0] * 4, [0.0] * 4, [0.25] * 4]
    assert out_of_range(liger) - before == 1
    assert of(True) == (pytest.approx([1.386294] * 3), [[0.25] * 4] * 3)
    assert out_of_range(liger) - before == 1


@pytest.mark.parametrize("name", ENTRIES)
def test_checked_labels(
    both: Entries, liger: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    setting(monkeypatch, LIGER_MEGATRON_CHECK_LABELS="1")
    logits = torch.zeros(3, 1, 4, device=device)
    with pytest.raises(IndexError, match=r"label 4 at position \(2, 0\).*vocabulary of 4 entries"):
        both(name, logits, torch.tensor([[-100], [-1], [4]], device=device))
    assert not launches(liger)
    both(name, logits, torch.tensor([[-100], [-1], [3]], device=device))
    assert launches(liger) == {"cross_entropy_forward": 1}


@pytest.mark.parametrize(("name", "upstream"), [(FUSED, 2), (UNFUSED, 3)])
def test_no_collective_on_one_rank(
    both: Entries,
    liger: ModuleType,
    device: torch.device,
    collectives: Counter[str],
    name: str,
    upstream: int,
) -> None:
    logits, target = make(device, dtype=torch.bfloat16)
    both(name, logits, target).sum().backward()
    assert not collectives
    assert liger.counters()["cross_entropy"]["collectives"] == 0
    both(name, logits, target, upstream=True)
    assert collectives == {"all_reduce": upstream}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ENTRIES)
def test_transposed_logits(both: Entries, device: torch.device, name: str, dtype: torch.dtype) -> None:
    base, target = make(device, (2, 3), dtype=dtype)
    logits = base.transpose(0, 1)
    loss = both(name, logits, target.t())
    straight = logits.detach().contiguous().requires_grad_()
    same = both(name, straight, target.t().contiguous())
    assert torch.equal(loss, same)
    assert torch.equal(gradient(loss, base).transpose(0, 1), gradient(same, straight))
    with pytest.raises(RuntimeError, match="view"):
        both(name, logits.detach(), target.t(), upstream=True)


@pytest.mark.reuse
@pytest.mark.parametrize("name", ENTRIES)
def test_backward_twice(
    both: Entries, device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    leaf, target = make(device)
    logits = leaf * 1
    before = logits.detach().clone()
    loss = both(name, logits, target).sum()
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(logits, before)

    setting(monkeypatch, LIGER_MEGATRON_IN_PLACE="cross_entropy")
    logits = leaf * 1
    loss = both(name, logits, target).sum()
    assert torch.equal(logits, before)
    (found,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    assert torch.equal(found, first)
    assert torch.equal(logits, first)  # the gradient has taken the memory
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaf, retain_graph=True)


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True])
def test_peak_memory(both: Entries, monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    """Above the logits: one gradient in their dtype, or nothing that grows with the vocabulary."""
    setting(monkeypatch, LIGER_MEGATRON_IN_PLACE="cross_entropy" if in_place else "0")
    rows, columns = 8192, 151936
    leaf = torch.zeros(rows, 1, columns, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    target = torch.zeros(rows, 1, dtype=torch.int64, device="cuda")
    logits = leaf.view_as(leaf).clone()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(both(FUSED, logits, target).sum(), logits)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= (0 if in_place else logits.numel() * 2) + rows * 64 + 2**21


# --- Routes ---


def test_every_import_route(both: Entries, liger: ModuleType, device: torch.device) -> None:
    from megatron.core import tensor_parallel
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as package_level
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    language = importlib.import_module(LANGUAGE_MODULE)
    routes = [
        vocab_parallel_cross_entropy,
        package_level,
        tensor_parallel.vocab_parallel_cross_entropy,
        language.tensor_parallel.vocab_parallel_cross_entropy,
        both.modules[UNFUSED].vocab_parallel_cross_entropy,
        fused_vocab_parallel_cross_entropy,
        language.fused_vocab_parallel_cross_entropy,
        both.modules[FUSED].fused_vocab_parallel_cross_entropy,
    ]
    logits, target = make(device)
    for done, route in enumerate(routes):
        assert launches(liger).get("cross_entropy_forward", 0) == done
        route(logits, target, *([both.group] if route.__name__ == FUSED else []))
    assert launches(liger) == {"cross_entropy_forward": len(routes)}


def test_through_the_language_module(both: Entries, liger: ModuleType, device: torch.device) -> None:
    language = importlib.import_module(LANGUAGE_MODULE)
    config = SimpleNamespace(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native")
    model = SimpleNamespace(config=config, pg_collection=SimpleNamespace(tp=both.group), tp_group=both.group)
    logits, target = make(device)
    for fusion, name in ((True, FUSED), (False, UNFUSED)):
        config.cross_entropy_loss_fusion = fusion
        loss = language.LanguageModule.compute_language_model_loss(model, target.t(), logits)
        right, _ = exact(logits, target, torch.ones(3, 2, device=device))
        torch.testing.assert_close(loss.detach(), right.t(), rtol=1e-6, atol=1e-6)
        assert counts(liger, name) == {"kernel": 1, "off": 0, "upstream": {}}
    assert launches(liger) == {"cross_entropy_forward": 2}


IMPORTED_FIRST = """
import torch
from {first} import {name} as early
import megatron.core
from megatron.core import parallel_state, tensor_parallel
from megatron.core.liger import counters
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
early(torch.zeros(2, 1, 4), torch.zeros(2, 1, dtype=torch.int64){group})
assert counters()["cross_entropy"]["launches"] == {{"cross_entropy_forward": 1}}, counters()
"""


@pytest.mark.parametrize(
    ("first", "name"),
    [
        ("megatron.core.tensor_parallel.cross_entropy", UNFUSED),
        ("megatron.core.tensor_parallel", UNFUSED),
        ("megatron.core.fusions.fused_cross_entropy", FUSED),
        (LANGUAGE_MODULE, FUSED),
    ],
)
def test_whatever_is_imported_first(python: Python, first: str, name: str) -> None:
    group = ", parallel_state.get_tensor_model_parallel_group()" if name == FUSED else ""
    python(code=IMPORTED_FIRST.format(first=first, name=name, group=group), TRITON_INTERPRET="1")


def test_the_group_of_upstreams_module(
    both: Entries, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name that users replace is asked at each call, and only where no group is given."""
    asked = []

    def getter() -> dist.ProcessGroup:
        asked.append(1)
        return both.group

    monkeypatch.setattr(both.modules[UNFUSED], "get_tensor_model_parallel_group", getter)
    logits, target = make(device)
    both(UNFUSED, logits, target)
    assert len(asked) == 1
    both(FUSED, logits, target)
    assert len(asked) == 1


def test_before_model_parallelism(
    both: Entries, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream's own error."""
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", None)
    logits, target = make(device)
    with pytest.raises(AssertionError, match="tensor model parallel group is not initialized"):
        both(UNFUSED, logits, target)


# --- Left to upstream ---


class Subclass(torch.Tensor):
    pass


Call = tuple[tuple[Any, ...], dict[str, Any]]
DTYPE = "logits of a dtype other than bfloat16, float16 and float32"
PLAIN = "an argument that is no plain tensor"
LABELS = "labels of a shape other than the logits' without the vocabulary"
OPTIONS = "options that upstream's function does not have"
SMOOTHING = "label smoothing that is no number in [0, 1)"
GROUP = "a group that is not torch.distributed's"
REFUSED: dict[str, tuple[str, str, Callable[[torch.Tensor, torch.Tensor, Any], Call]]] = {
    "float64": (UNFUSED, DTYPE, lambda x, t, g: ((x.double(), t), {})),
    "float64, fused": (FUSED, DTYPE, lambda x, t, g: ((x.double(), t, g), {})),
    "int32 labels": (UNFUSED, "labels of a dtype other than int64", lambda x, t, g: ((x, t.int()), {})),
    "flat labels": (UNFUSED, LABELS, lambda x, t, g: ((x, t.flatten()), {})),
    "flat labels, fused": (FUSED, LABELS, lambda x, t, g: ((x, t.flatten(), g), {})),
    "one label for all": (UNFUSED, LABELS, lambda x, t, g: ((x, t[:1]), {})),
    "no vocabulary": (
        UNFUSED,
        "logits without a vocabulary as the last dimension",
        lambda x, t, g: ((x[..., :0], t), {}),
    ),
    "subclass": (UNFUSED, PLAIN, lambda x, t, g: ((x.as_subclass(Subclass), t), {})),
    "labels, subclass": (FUSED, PLAIN, lambda x, t, g: ((x, t.as_subclass(Subclass), g), {})),
    "no tensor": (UNFUSED, PLAIN, lambda x, t, g: ((x.tolist(), t), {})),
    "meta": (
        UNFUSED,
        "a tensor on a device that is neither CUDA nor CPU",
        lambda x, t, g: ((x.to("meta"), t.to("meta")), {}),
    ),
    "labels, meta": (UNFUSED, "tensors on different devices", lambda x, t, g: ((x, t.to("meta")), {})),
    "smoothing 1": (UNFUSED, SMOOTHING, lambda x, t, g: ((x, t, 1.0), {})),
    "smoothing below 0": (UNFUSED, SMOOTHING, lambda x, t, g: ((x, t, -0.5), {})),
    "smoothing, tensor": (UNFUSED, SMOOTHING, lambda x, t, g: ((x, t, torch.tensor(0.5)), {})),
    "no group": (FUSED, GROUP, lambda x, t, g: ((x, t, None), {})),
    "other group": (FUSED, GROUP, lambda x, t, g: ((x, t, "group"), {})),
    "group left away": (FUSED, OPTIONS, lambda x, t, g: ((x, t), {})),
    "unknown option": (UNFUSED, OPTIONS, lambda x, t, g: ((x, t), {"ignore_index": 3})),
    "option twice": (UNFUSED, OPTIONS, lambda x, t, g: ((x, t, 0.1), {"label_smoothing": 0.1})),
    "too many options": (FUSED, OPTIONS, lambda x, t, g: ((x, t, g, 0.1), {})),
}


def outcome(function: Callable[..., torch.Tensor], call: Call) -> object:
    """The result, or the type and text of the error."""
    try:
        return function(*call[0], **call[1])
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(both: Entries, liger: ModuleType, device: torch.device, kind: str) -> None:
    """Upstream's own function serves it, result or error, and the reason is counted."""
    name, reason, make_call = REFUSED[kind]

    def call() -> Call:
        logits, target = make(device)
        return make_call(logits.detach(), target, both.group)

    ours = outcome(both.function(name), call())
    upstream = outcome(both.function(name, upstream=True), call())
    assert type(ours) is type(upstream)
    if isinstance(ours, torch.Tensor):
        assert isinstance(upstream, torch.Tensor)
        assert "meta" in kind or torch.equal(ours, upstream)  # there, whatever is in fresh memory
    else:
        assert ours == upstream
    assert counts(liger, name) == {"kernel": 0, "off": 0, "upstream": {reason: 1}}
    assert not launches(liger)


@pytest.mark.parametrize("kind", ["float64", "flat labels, fused", "no group"])
def test_strict(
    both: Entries, liger: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    setting(monkeypatch, LIGER_MEGATRON_STRICT="1")
    name, reason, make_call = REFUSED[kind]
    args, named = make_call(*make(device), both.group)
    with pytest.raises(liger.FallbackError) as error:
        both.function(name)(*args, **named)
    assert str(error.value).startswith(f"cross_entropy: {name} ")
    assert reason in str(error.value)
    assert "LIGER_MEGATRON=-cross_entropy" in str(error.value)


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("switch", ["0", "-cross_entropy", "swiglu"])
def test_switched_off(
    both: Entries,
    liger: ModuleType,
    device: torch.device,
    collectives: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    switch: str,
) -> None:
    setting(monkeypatch, LIGER_MEGATRON=switch, LIGER_MEGATRON_STRICT="1")
    logits, target = make(device, dtype=torch.bfloat16)
    assert torch.equal(both(name, logits, target), both(name, logits, target, upstream=True))
    assert counts(liger, name) == {"kernel": 0, "off": 1, "upstream": {}}
    assert collectives["all_reduce"] == (4 if name == FUSED else 6)
    assert not launches(liger)


def test_without_the_interpreter(python: Python) -> None:
    """CPU tensors are upstream's own, on whatever stands for a group: three all-reduces on it."""
    code = """
import torch
from megatron.core.liger import counters
from megatron.core.tensor_parallel import cross_entropy
from megatron.core import parallel_state
class Group:
    def rank(self): return 0
    def size(self): return 1
group, used = Group(), []
torch.distributed.all_reduce = lambda tensor, op=None, group=None: used.append(group)
cross_entropy.get_tensor_model_parallel_group = lambda: group
cross_entropy.get_tensor_model_parallel_rank = lambda: 0
cross_entropy.get_tensor_model_parallel_world_size = lambda: 1
logits, target = torch.tensor([[1.0, 2.0, 3.0], [0.5, -0.5, 1.0]]), torch.tensor([2, 0])
right = torch.nn.functional.cross_entropy(logits.clone(), target, reduction="none")
torch.testing.assert_close(cross_entropy.vocab_parallel_cross_entropy(logits, target), right)
assert used == [group] * 3
reasons = counters()["cross_entropy"]["entries"]["vocab_parallel_cross_entropy"]["upstream"]
assert reasons == {"a CPU tensor without TRITON_INTERPRET=1": 1}, reasons
"""
    python(code=code, TRITON_INTERPRET="0")


def test_under_torch_compile(both: Entries, liger: ModuleType, device: torch.device) -> None:
    logits, target = make(device, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: both.function(UNFUSED)(x * 2, target) + 1, backend="eager")
    expected = both(UNFUSED, logits * 2, target, upstream=True) + 1
    for _ in range(2):
        torch.testing.assert_close(compiled(logits), expected)
    assert counts(liger, UNFUSED)["kernel"] == 0
    assert counts(liger, UNFUSED)["upstream"] == {"traced by torch.compile": 1}


# --- Other releases ---


def tail(name: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """The tail, run below functions of another release's signatures."""
    path = Path(__file__).resolve().parents[2] / f"overlay/{MODULES[name].replace('.', '/')}.py"
    namespace["__name__"] = "another_release"
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
    return namespace


def test_release_with_a_group(both: Entries, device: torch.device) -> None:
    """From 0.19 the unfused entry takes a group; a given one is used without asking for another."""
    asked = []

    def vocab_parallel_cross_entropy(
        vocab_parallel_logits: Any, target: Any, label_smoothing: float = 0.0, tp_group: Any = None
    ) -> object:
        return "upstream", tp_group

    def getter() -> dist.ProcessGroup:
        asked.append(1)
        return both.group

    names = {UNFUSED: vocab_parallel_cross_entropy, "get_tensor_model_parallel_group": getter}
    ours = tail(UNFUSED, names)[UNFUSED]
    logits, target = make(device)
    right = both(UNFUSED, logits, target)
    assert torch.equal(ours(logits, target, tp_group=both.group), right)
    assert not asked
    assert torch.equal(ours(logits, target, 0.0, None), right)
    assert asked
    assert ours(logits, target, 0.0, "group") == ("upstream", "group")


@pytest.mark.parametrize("value", [0.5, 0])
def test_option_of_a_later_release(
    both: Entries, liger: ModuleType, device: torch.device, value: float
) -> None:
    def fused_vocab_parallel_cross_entropy(
        vocab_parallel_logits: Any, target: Any, tp_group: Any, z_loss: Any = None
    ) -> object:
        return "upstream", z_loss

    ours = tail(FUSED, {FUSED: fused_vocab_parallel_cross_entropy})[FUSED]
    logits, target = make(device)
    assert ours(logits, target, both.group, None).shape == (3, 2)
    assert ours(logits, target, both.group, z_loss=value) == ("upstream", value)
    assert ours(logits, target, both.group, value) == ("upstream", value)
    assert counts(liger, FUSED) == {"kernel": 1, "off": 0, "upstream": {"z_loss": 2}}


def test_option_that_is_on_by_default_is_never_dropped(
    both: Entries, liger: ModuleType, device: torch.device
) -> None:
    logits, target = make(device)

    def scaled(
        vocab_parallel_logits: Any, target: Any, label_smoothing: Any = 0.0, scale: Any = 2.0
    ) -> object:
        return "upstream", scale

    module = {UNFUSED: scaled, "get_tensor_model_parallel_group": lambda: both.group}
    ours = tail(UNFUSED, module)[UNFUSED]
    assert ours(logits, target) == ours(logits, target, 0.1) == ("upstream", 2.0)
    assert ours(logits, target, scale=None).shape == (3, 2)

    def smoothed(vocab_parallel_logits: Any, target: Any, label_smoothing: Any = 0.1, **more: Any) -> object:
        return "upstream", more

    ours = tail(UNFUSED, {**module, UNFUSED: smoothed})[UNFUSED]
    right = both.function(UNFUSED)(logits, target, 0.1)
    assert torch.equal(ours(logits, target), right)
    assert ours(logits, target, z=1) == ("upstream", {"z": 1})


# --- What a job says ---


def test_job_lines(python: Python) -> None:
    code = """
import torch, torch.distributed as dist
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
logits = torch.zeros(3, 1, 4, requires_grad=True)
for label in (0, 4):
    target = torch.full((3, 1), label)
    fused_vocab_parallel_cross_entropy(logits, target, dist.group.WORLD).sum().backward()
"""
    first, last = python(code=code, TRITON_INTERPRET="1").stdout.splitlines()
    assert "cross_entropy kernel" in first
    assert (
        "cross_entropy: fused_vocab_parallel_cross_entropy 2 kernel, launches cross_entropy_backward 2, "
        "cross_entropy_forward 2, labels beyond the vocabulary 3" in last
    )


def test_report_of_the_settings(python: Python) -> None:
    done = python(
        "-m",
        "megatron.core.liger",
        "--json",
        LIGER_MEGATRON_CHECK_LABELS="1",
        LIGER_MEGATRON_LABEL_SMOOTHING="partition",
        LIGER_MEGATRON_IN_PLACE="cross_entropy",
    )
    import json

    data = json.loads(done.stdout)
    assert (data["check_labels"], data["label_smoothing"]) == (True, "partition")
    assert data["ops"]["cross_entropy"]["in_place"] is True
    assert data["ops"]["cross_entropy"]["installed"] == "installed"
