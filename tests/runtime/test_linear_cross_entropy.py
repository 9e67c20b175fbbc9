# SPDX-License-Identifier: Apache-2.0
"""``linear_cross_entropy`` in a model: losses and gradients against the plain way and float64, in every
release that has it; what it leaves to upstream, and that it is off unless asked for."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.apply import build_tree
from scripts.errors import TreeError
from scripts.manifest import load
from scripts.overlay import load_overlay
from scripts.workers.parity_compare import STEP_FACTOR, ULPS
from scripts.workers.spawn import run_world

from .conftest import KERNELS, Python
from .test_models import DTYPES, SEEDS, tensors, too_far, where

PROGRAM = str(Path(__file__).with_name("linear_cross_entropy_rank.py"))
NAME = "linear_cross_entropy"
# Beside it the norms alone, which upstream has not got for sequence parallelism: activation and loss are its.
ON = {"LIGER_MEGATRON": f"norms,{NAME}", "TORCHDYNAMO_DISABLE": "1"}
MANIFEST = load()
CALL_SITE = MANIFEST.files["megatron/core/models/gpt/gpt_model.py"]
RELEASES = [
    version
    for variant in CALL_SITE.variants
    if variant.has_entries
    for version in variant.releases
    if version in MANIFEST.releases
]

Found = dict[str, list[dict[str, Any]]]


def run_job(
    tree: Path,
    folder: Path,
    runs: Sequence[Mapping[str, Any]],
    *,
    tp: int = 1,
    device: str,
    environs: Mapping[int, Mapping[str, str]] | None = None,
    **more: str,
) -> Found:
    """What each run found, by name and rank; ``environs``: what is set on some ranks alone."""
    plan = {
        "tp": tp,
        "runs": runs,
        "sizes": "step" if runs[0].get("simple") else "",
        "environs": environs or {},
    }
    run_world(
        PROGRAM, plan, tree=tree, folder=folder, ranks=tp, device=device, timeout=200, extra={**ON, **more}
    )
    return {
        run["name"]: [torch.load(folder / f"{run['name']}-rank{rank}.pt") for rank in range(tp)]
        for run in runs
    }


def runs_of(kind: str, seeds: Sequence[int], dtypes: Sequence[str], **choice: Any) -> list[dict[str, Any]]:
    """With the op, without it, and without it in float64."""
    ways = [*itertools.product(("on", "off"), dtypes), ("off", "float64")]
    return [
        {"name": f"{kind} {way} {dtype} {seed}", "dtype": dtype, "seed": seed, **choice, "on": way == "on"}
        for (way, dtype), seed in itertools.product(ways, seeds)
    ]


def assert_served(found: Mapping[str, Any], heads: int, tp: int) -> None:
    counters = found["counters"]
    calls = {name: n["kernel"] for name, n in counters[NAME]["entries"].items()}
    assert calls == {"GPTModel": 1, "MTP": heads}
    assert not any(n["upstream"] or n["off"] for n in counters[NAME]["entries"].values())
    assert not any(any(n.values()) for n in counters["cross_entropy"]["entries"].values())
    launches = counters[NAME]["launches"]
    assert launches[f"{NAME}_forward"] == launches[f"{NAME}_backward"] >= 1 + heads
    assert not counters["cross_entropy"]["launches"]
    assert bool(counters[NAME]["collectives"]) == (tp > 1)


KINDS = {
    "untied": {},
    "tied": {"tied": True},
    "fused": {"fused": True},
    "fused and tied": {"fused": True, "tied": True},
    "mtp": {"mtp": True, "tied": True},
    "tiles": {"tiles": True},
}


def compare(found: Found, kind: str, heads: int = 0, tp: int = 1) -> list[str]:
    problems = []
    for dtype in DTYPES:
        ways: dict[str, list[dict[str, Any]]] = {"on": [], "off": [], "truth": []}
        for seed, way in itertools.product(SEEDS, ways):
            name = f"{kind} off float64 {seed}" if way == "truth" else f"{kind} {way} {dtype} {seed}"
            ways[way].append(found[name][0])
            for rank in found[name]:
                if way == "on":
                    assert_served(rank, heads, tp)
                else:
                    counters = rank["counters"][NAME]
                    assert not any(any(n.values()) for n in counters["entries"].values())
                    assert not counters["launches"]
                assert torch.equal(rank["losses"][0], found[name][0]["losses"][0])
        assert all(a["layout"] == b["layout"] for a, b in zip(ways["on"], ways["off"]))
        problems += [f"{kind}, {dtype}: {line}" for line in too_far(ways["on"], ways["off"], ways["truth"])]
    return problems


def test_a_model_with_it_is_as_near_to_float64(overlaid_tree: Path, tmp_path: Path) -> None:
    device = where(1)
    small = {"LIGER_MEGATRON_LINEAR_CE_MB": "0.006"}
    found = {}
    for kinds, more in ((("tiles",), small), (tuple(k for k in KINDS if k != "tiles"), {})):
        runs = [run for kind in kinds for run in runs_of(kind, SEEDS, DTYPES, **KINDS[kind])]
        found |= run_job(overlaid_tree, tmp_path / kinds[0], runs, device=device, **more)
    problems = [line for kind in KINDS for line in compare(found, kind, 2 if kind == "mtp" else 0)]
    assert not problems, "\n".join(problems)
    launched = found[f"tiles on float32 {SEEDS[0]}"][0]["counters"][NAME]["launches"]
    assert launched[f"{NAME}_forward"] > 1


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_tensor_parallel_ranks(overlaid_tree: Path, tmp_path: Path, sequence_parallel: bool) -> None:
    choice = {"sequence_parallel": sequence_parallel}
    runs = [
        run for kind in ("untied", "mtp") for run in runs_of(kind, SEEDS, DTYPES, **KINDS[kind], **choice)
    ]
    found = run_job(overlaid_tree, tmp_path, runs, tp=2, device=where(2))
    problems = [line for kind in ("untied", "mtp") for line in compare(found, kind, 2 * (kind == "mtp"), 2)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("kind", "sequence_parallel", "switch"),
    [("untied", False, "norms"), ("untied", True, "norms"), ("mtp", True, "cross_entropy,norms")],
)
def test_it_is_off_on_one_rank(
    overlaid_tree: Path, tmp_path: Path, kind: str, sequence_parallel: bool, switch: str
) -> None:
    """An error on both, at once: with sequence parallelism, too, where upstream's layer has a collective."""
    choice = {**KINDS[kind], "sequence_parallel": sequence_parallel, "as_set": True}
    run = {"name": "run", "dtype": "float32", "seed": SEEDS[0], **choice}
    odd = {1: {"LIGER_MEGATRON": switch}}
    for rank in run_job(overlaid_tree, tmp_path, [run], tp=2, device=where(2), environs=odd)["run"]:
        assert f"rank 1 differs: rank 0 with LIGER_MEGATRON={NAME},norms" in rank["error"]
        assert f"rank 1 with LIGER_MEGATRON={switch}" in rank["error"]


@pytest.mark.parametrize("version", ["0.14.0", "0.17.1", "0.18.2"])
def test_the_heads_of_multi_token_prediction(version: str, tmp_path: Path) -> None:
    """In the model's own file and in the file of its own."""
    tree = build_tree(MANIFEST.releases[version], None, tmp_path / "tree", overlaid=True, nearest=True)
    runs = runs_of("mtp", SEEDS, DTYPES, mtp=True)
    found = run_job(tree, tmp_path / "work", runs, device=where(1))
    problems = compare(found, "mtp", 2)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("version", RELEASES)
def test_a_release_holds(version: str, tmp_path: Path) -> None:
    tree = build_tree(MANIFEST.releases[version], None, tmp_path / "tree", overlaid=True, nearest=True)
    scales = tuple(map(int, version.split("."))) >= (0, 17)
    kinds: dict[str, dict[str, Any]] = {"plain": {}} | ({"mup": {"mup": True}} if scales else {})
    runs = [
        run
        for kind, choice in kinds.items()
        for run in runs_of(kind, SEEDS[:1], ["float32"], simple=True, **choice)
    ]
    found = run_job(tree, tmp_path / "work", runs, device=where(1))
    for kind in kinds:
        ours, theirs = (found[f"{kind} {way} float32 {SEEDS[0]}"][0] for way in ("on", "off"))
        truth = found[f"{kind} off float64 {SEEDS[0]}"][0]
        assert_served(ours, 0, 1)
        errors = [
            {
                name: ((value.double() - right).abs().max() / right.abs().max()).item()
                for (name, value), (_, right) in zip(tensors(one), tensors(truth), strict=True)
            }
            for one in (ours, theirs)
        ]
        limit = STEP_FACTOR * max(errors[1].values()) + ULPS
        assert all(error <= limit for error in errors[0].values()), (kind, errors, limit)
    if scales:
        losses = [found[f"{kind} off float64 {SEEDS[0]}"][0]["losses"][0] for kind in kinds]
        assert not torch.allclose(*losses)


JOBS: dict[str, dict[str, bool]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "fused": {"overlap": True, "fused": True},
    "tied": {"overlap": True, "fused": True, "tied": True},
    "recompute": {"recompute": True},
}
# Sums of float32 in another order, over three steps.
JOB_ULPS = 8 * 2.0**-23


@pytest.mark.parametrize(("stages", "parts"), [(1, 1), (2, 1), (1, 2)], ids=["data", "pipeline", "context"])
def test_in_upstreams_training_loop(stages: int, parts: int, overlaid_tree: Path, tmp_path: Path) -> None:
    """Two ranks: data-parallel ones whose reductions overlap the backward, stages of a pipeline, or parts of
    each sequence."""
    runs = [
        {"name": f"{kind} {way}", "on": way == "on", **choice}
        for (kind, choice), way in itertools.product(JOBS.items(), ("on", "off"))
    ]
    plan = {"pp": stages, "cp": parts, "runs": runs}
    run_world(
        str(Path(__file__).with_name("linear_cross_entropy_job.py")),
        plan, tree=overlaid_tree, folder=tmp_path, ranks=2, device=where(2), timeout=200, extra=ON,
    )  # fmt: skip
    for kind, rank in itertools.product(JOBS, (0, 1)):
        on, off = (torch.load(tmp_path / f"{kind} {way}-rank{rank}.pt") for way in ("on", "off"))
        last = stages == 1 or rank == 1
        calls = [found["counters"][NAME]["entries"]["GPTModel"] for found in (on, off)]
        assert calls == [
            {"kernel": 12 if last else 0, "off": 0, "upstream": {}},
            {"kernel": 0, "off": 0, "upstream": {}},
        ]
        assert len(on["losses"]) == (12 if last else 0)
        torch.testing.assert_close(on["losses"], off["losses"], rtol=JOB_ULPS, atol=0)
        assert on["parameters"].keys() == off["parameters"].keys()
        for name, parameter in on["parameters"].items():
            torch.testing.assert_close(parameter, off["parameters"][name], rtol=0, atol=JOB_ULPS)


# --- What is left to upstream ---


@pytest.fixture
def linear(liger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The overlay's module, its op on."""
    monkeypatch.setattr(liger.linear_cross_entropy.OP, "enabled", True)
    module: ModuleType = liger.linear_cross_entropy
    return module


def _parts(device: torch.device) -> tuple[Any, Any]:
    """A language model without layers, and an output layer of 32 columns for a hidden size of 16."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    model = LanguageModule.__new__(LanguageModule)
    torch.nn.Module.__init__(model)
    model.config = config
    model.output_layer = ColumnParallelLinear(
        16, 32, config=config, init_method=torch.nn.init.normal_, bias=False
    )
    return model, model.output_layer.to(device)


@pytest.fixture
def call(linear: ModuleType, device: torch.device) -> Any:
    model, layer = _parts(device)
    hidden = torch.randn(4, 2, 16, device=device, requires_grad=True)
    labels = torch.arange(8, device=device).view(2, 4)
    return linear.Call(layer, hidden, None, labels, None, model.compute_language_model_loss)


def _set(name: str, value: Any) -> Callable[[Any], None]:
    """Sets an attribute, ``model.config.x`` or ``layer.x``, of a call's model or layer."""

    def change(call: Any) -> None:
        *path, last = name.split(".")
        holder = {"model": call.compute.__self__, "layer": call.layer}[path[0]]
        for step in path[1:]:
            holder = getattr(holder, step)
        setattr(holder, last, value)

    return change


def _field(name: str, value: Any) -> Callable[[Any], None]:
    return lambda call: object.__setattr__(call, name, value(call) if callable(value) else value)


def _another_class(call: Any) -> None:
    class Derived(type(call.layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **named: Any) -> Any:
            return super().forward(*args, **named)

    call.layer.__class__ = Derived


REASONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "another loss": ("LOSS", _field("compute", lambda call: lambda labels, logits: None)),
    "another scale": ("SCALE", _set("model._scale_logits", lambda logits: logits)),
    "scaled by nothing": ("SCALE", _field("scale", 0.0)),
    "TransformerEngine": (
        "TE",
        lambda call: (
            _set("model.config.cross_entropy_loss_fusion", True)(call),
            _set("model.config.cross_entropy_fusion_impl", "te")(call),
        ),
    ),
    "logged": ("LOGGED", _set("model.config.config_logger_dir", "/nowhere")),
    "another class": ("LAYER", _another_class),
    "another forward": ("LAYER", _set("layer.forward", lambda *args: None)),
    "no linear layer": ("LAYER", _field("layer", lambda call: torch.nn.Linear(16, 32))),
    "experts": ("LAYER", _set("layer.explicit_expert_comm", True)),
    "forward hook": ("HOOKS", lambda call: call.layer.register_forward_hook(lambda *_: None)),
    "forward pre-hook": ("HOOKS", lambda call: call.layer.register_forward_pre_hook(lambda *_: None)),
    "backward hook": ("HOOKS", lambda call: call.layer.register_full_backward_hook(lambda *_: None)),
    "backward pre-hook": ("HOOKS", lambda call: call.layer.register_full_backward_pre_hook(lambda *_: None)),
    "deferred": ("DEFERRED", _set("layer.config.defer_embedding_wgrad_compute", True)),
    "logits' dtype": ("LOGIT_DTYPE", _set("layer.output_dtype", torch.float32)),
    "bias": ("BIAS", _set("layer.bias", torch.nn.Parameter(torch.zeros(32)))),
    "sharded": ("SHARDED", _set("layer.gtp_remat_size", 2)),
    "Megatron's FSDP": ("SHARDED", _set("layer.weight.__fsdp_param__", True)),
    "subclass": ("NOT_PLAIN", _field("hidden", lambda call: call.hidden.as_subclass(Derived))),
    "dtypes": ("DTYPE", _field("hidden", lambda call: call.hidden.bfloat16())),
    "float64": (
        "DTYPE",
        lambda call: (
            _field("hidden", call.hidden.double())(call),
            _field("weight", call.layer.weight.double())(call),
        ),
    ),
    "labels of int32": ("LABELS_DTYPE", _field("labels", lambda call: call.labels.int())),
    "labels elsewhere": ("DEVICES", _field("labels", lambda call: call.labels.to("meta"))),
    "labels transposed": ("SHAPES", _field("labels", lambda call: call.labels.t())),
    "another width": ("SHAPES", _field("hidden", lambda call: call.hidden[..., :8])),
    "two dimensions": ("SHAPES", _field("hidden", lambda call: call.hidden[:, 0])),
    "another weight": ("SHAPES", _field("weight", lambda call: call.layer.weight[:16])),
    "no main_grad": ("MAIN_GRAD", _set("layer.gradient_accumulation_fusion", True)),
}


class Derived(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", REASONS)
def test_what_is_left_to_upstream(kind: str, call: Any, linear: ModuleType) -> None:
    assert linear.unserved(call, 1) is None
    reason, change = REASONS[kind]
    change(call)
    assert linear.unserved(call, 1) == getattr(linear, reason)


def _functions() -> dict[str, tuple[Any, str, str]]:
    """What users replace at run time, not on one model but for all: the holder, the name, the reason."""
    from megatron.core import tensor_parallel
    from megatron.core.fusions import fused_cross_entropy
    from megatron.core.models.common.language_module import language_module
    from megatron.core.tensor_parallel import cross_entropy, layers

    loss = "compute_language_model_loss"
    return {
        "the loss's method": (language_module.LanguageModule, loss, "LOSS"),
        "the loss": (tensor_parallel, "vocab_parallel_cross_entropy", "LOSS"),
        "the fused loss": (language_module, "fused_vocab_parallel_cross_entropy", "LOSS"),
        "a part of the loss": (
            cross_entropy.VocabParallelCrossEntropy,
            "calculate_cross_entropy_loss",
            "LOSS",
        ),
        "the loss's backward": (cross_entropy._VocabParallelCrossEntropy, "backward", "LOSS"),
        "the fused loss's forward": (fused_cross_entropy._VocabParallelCrossEntropy, "forward", "LOSS"),
        "the layer's forward": (tensor_parallel.ColumnParallelLinear, "forward", "LAYER"),
        "the product": (layers, "linear_with_grad_accumulation_and_async_allreduce", "PRODUCT"),
        "a frozen product": (layers, "linear_with_frozen_weight", "PRODUCT"),
        "its forward": (layers.LinearWithGradAccumulationAndAsyncCommunication, "forward", "PRODUCT"),
        "its backward": (layers.LinearWithFrozenWeight, "backward", "PRODUCT"),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "the loss's method", "the loss", "the fused loss", "a part of the loss", "the loss's backward",
        "the fused loss's forward", "the layer's forward", "the product",
        "a frozen product", "its forward", "its backward",
    ],
)  # fmt: skip
def test_what_somebody_replaced_is_not_passed_over(
    kind: str, call: Any, linear: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert linear.unserved(call, 1) is None
    holder, name, reason = _functions()[kind]
    upstream = getattr(holder, name)

    @functools.wraps(upstream)
    def replaced(*args: Any, **named: Any) -> Any:
        return upstream(*args, **named)

    monkeypatch.setattr(holder, name, replaced)
    model = call.compute.__self__
    object.__setattr__(call, "compute", model.compute_language_model_loss)
    assert linear.unserved(call, 1) == getattr(linear, reason)


def test_what_is_left_to_upstream_on_more_ranks(call: Any, linear: ModuleType) -> None:
    assert linear.unserved(call, 2) is None
    for change, reason in (
        (_field("gather", True), linear.GATHERED),
        (_field("gather", None), None),
        (_set("layer.gather_output", True), linear.GATHERED),
        (_field("gather", False), None),
        (_set("layer.disable_grad_reduce", True), linear.NO_REDUCE),
        (_set("layer.disable_grad_reduce", False), None),
        (_set("layer.sequence_parallel", True), linear.SHAPES),  # hidden is not half of the labels' tokens
    ):
        change(call)
        assert linear.unserved(call, 2) == reason
    assert linear.unserved(call, 1) is None


def test_under_autocast_and_transforms(call: Any, linear: ModuleType) -> None:
    with torch.autocast(call.hidden.device.type):
        assert linear.unserved(call, 1) == linear.AUTOCAST
    found = []

    def f(x: torch.Tensor) -> torch.Tensor:
        found.append(linear.unserved(call, 1))
        return x

    torch.func.vmap(f)(torch.zeros(2))
    assert found == [linear.TRANSFORM]


def test_batch_invariant_products_are_upstreams(
    call: Any, linear: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.custom_layers import batch_invariant_kernels

    assert linear.unserved(call, 1) is None
    monkeypatch.setattr(batch_invariant_kernels, "_batch_invariant_MODE", True)
    assert linear.unserved(call, 1) == linear.BATCH_INVARIANT


@pytest.mark.parametrize("release_has_it", [False, True])
def test_a_scale_that_the_release_does_not_know(
    call: Any, linear: ModuleType, release_has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration may say more than a release without MuP reads."""
    model = call.compute.__self__
    plain = linear.model_loss(model, call.hidden, None, call.labels, None)
    model.config.use_mup, model.config.mup_output_mult = True, 0.25
    if release_has_it:
        monkeypatch.setattr(type(model), "_scale_logits", lambda self, logits: logits * 0.25, raising=False)
        monkeypatch.setattr(linear, "unserved", lambda call, ranks: None)
    scaled = linear.model_loss(model, call.hidden, None, call.labels, None)
    assert torch.equal(plain, scaled) != release_has_it


def test_hooks_on_every_module_count(call: Any, linear: ModuleType) -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert linear.unserved(call, 1) == linear.HOOKS
    finally:
        handle.remove()


def test_the_wait_of_a_data_parallel_wrapper_is_waited_for(call: Any, linear: ModuleType) -> None:
    waited = []

    def hook(module: Any, *unused: Any) -> None:
        waited.append(module)

    hook.__module__ = "megatron.core.distributed.distributed_data_parallel"
    call.layer.register_forward_pre_hook(hook)
    model = call.compute.__self__
    assert linear.model_loss(model, call.hidden, None, call.labels, None) is not None
    assert waited == [call.layer]


def test_a_call_that_is_not_served_is_counted_and_an_error_when_strict(
    call: Any, linear: ModuleType, liger: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hidden, labels = call.compute.__self__, call.hidden, call.labels

    def counts() -> Any:
        return {name: n["upstream"] for name, n in liger.counters()[NAME]["entries"].items()}

    assert linear.model_loss(model, hidden, None, None, None) is None  # logits are asked for
    assert counts() == {"GPTModel": {}, "MTP": {}}
    assert linear.model_loss(model, hidden, None, labels.int(), None) is None
    head, _ = linear.mtp_heads(call.layer, call.compute, labels.int())
    logits, bias = head(hidden, weight=None, runtime_gather_output=None)
    assert bias is None
    assert torch.equal(logits, call.layer(hidden)[0])
    read = linear.mtp_heads(call.layer, call.compute, labels, logits_read=True)
    assert read == (call.layer, call.compute)
    assert counts() == {
        "GPTModel": {linear.LABELS_DTYPE: 1},
        "MTP": {linear.LABELS_DTYPE: 1, linear.READ: 1},
    }
    dispatch = liger.dispatch
    monkeypatch.setattr(dispatch, "SETTINGS", liger.settings.read({"LIGER_MEGATRON_STRICT": "1"}))
    with pytest.raises(liger.FallbackError, match="labels of a dtype"):
        linear.model_loss(model, hidden, None, labels.int(), None)
    with pytest.raises(liger.FallbackError, match="acceptance"):
        linear.mtp_heads(call.layer, call.compute, labels, logits_read=True)


def test_while_it_is_off_nothing_is_looked_at(linear: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear.OP, "enabled", False)
    nothing: Any = SimpleNamespace()
    assert linear.model_loss(nothing, nothing, None, nothing, None) is None
    assert linear.mtp_heads(nothing, nothing, nothing, logits_read=True) == (nothing, nothing)


def test_a_heads_logits_are_scaled_as_upstream_scales_them(call: Any, linear: ModuleType) -> None:
    head, loss = linear.mtp_heads(call.layer, call.compute, call.labels)
    found = loss(call.labels, head(call.hidden)[0] * 0.5)
    logits = call.layer(call.hidden)[0] * 0.5
    right = torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1), call.labels.t().flatten(), reduction="none"
    ).view(4, 2)
    assert torch.allclose(found.double(), right.t(), rtol=1e-5)


# --- Off by default, and where it is not ---


def test_off_by_default_and_said_so(python: Python) -> None:
    for environ, enabled in (({}, False), ({"LIGER_MEGATRON": "1"}, False), (ON, True)):
        kept = {name: value for name, value in environ.items() if name == "LIGER_MEGATRON"}
        done = python("-m", "megatron.core.liger", **KERNELS, **kept)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"  {NAME}:"))
        assert line.startswith(f"  {NAME}: installed, {'enabled' if enabled else 'not enabled'}, usable here")
        data = json.loads(python("-m", "megatron.core.liger", "--json", **KERNELS, **kept).stdout)
        assert data["ops"][NAME]["enabled"] is enabled
        assert data["linear_ce_mb"] == 512


@pytest.mark.parametrize(
    ("value", "enabled"),
    [
        ("default", {"swiglu", "cross_entropy", "norms", "activations"}),
        ("-norms", {"swiglu", "cross_entropy", "activations"}),
        (f"default,{NAME}", {"swiglu", "cross_entropy", "norms", "activations", NAME}),
        (f"default,{NAME},-cross_entropy", {"swiglu", "norms", "activations", NAME}),
        (NAME, {NAME}),
        (f"-{NAME}", {"swiglu", "cross_entropy", "norms", "activations"}),
    ],
)
def test_switch(liger: ModuleType, value: str, enabled: set[str]) -> None:
    assert liger.settings.read({"LIGER_MEGATRON": value}).enabled == enabled


def test_ranks_tell_each_other_their_budgets(liger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    prints = []
    for value in ("512", "256"):
        settings = liger.settings.read({"LIGER_MEGATRON_LINEAR_CE_MB": value})
        monkeypatch.setattr(liger.ranks, "SETTINGS", settings)
        prints.append(liger.ranks.fingerprint(NAME, "kernel"))
    verdict = liger.ranks.judge(dict(enumerate(prints)), [0, 1], NAME)
    assert "LIGER_MEGATRON_LINEAR_CE_MB=512" in verdict


def test_a_release_without_the_call_site(tmp_path: Path) -> None:
    old = MANIFEST.releases["0.12.3"]
    tree = build_tree(old, None, tmp_path / "tree", overlaid=True, nearest=True)
    record = json.loads((tree / "megatron/core/liger/overlay.json").read_text(encoding="utf-8"))
    assert record["ops"] == [op for op in load_overlay().ops if op != NAME]
    with pytest.raises(TreeError, match="a release without any"):
        build_tree(old, [NAME], tmp_path / "other", overlaid=True, nearest=True)
