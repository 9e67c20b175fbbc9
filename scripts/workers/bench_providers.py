# SPDX-License-Identifier: Apache-2.0
"""How each provider is called: by the functions that its own users call, on the same tensors.

A provider's loader imports it and returns, by op, a function that is given a case's tensors once and returns
the call: tensors in, result out, ``[rows, columns]``, or ``[rows]`` of the cross-entropy, or its mean with
the output layer. Tensors are ``x`` (``[rows, 2 columns]`` of gated activations, ``[rows, HIDDEN_SIZE]`` of
the output layer, else ``[rows, columns]``), ``bias``, ``weights`` (``[rows, 1]``, float32), ``target``,
``weight`` (a norm's, or ``[columns, HIDDEN_SIZE]``) and ``branch``, the gradient that comes back past a norm.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from scripts.overlay import OVERLAY_VERSION
from scripts.workers import runtime
from scripts.workers.bench_ops import OPS, PROVIDERS
from scripts.workers.cases import REFUSED_BY_UPSTREAM

Tensors = dict[str, torch.Tensor]
Call = Callable[[Tensors], torch.Tensor]
#: Is given the tensors of a case, of which parameters stay the same objects in all its calls.
Bind = Callable[[Tensors], Call]

EPS = 1e-5
#: By op the function of the kernels' module and what it is given beside the tensors.
ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "swiglu": ("swiglu", {}),
    "swiglu_fp8": ("swiglu", {"fp8_input_store": True}),
    "swiglu_bias": ("swiglu", {}),
    "swiglu_weighted": ("swiglu", {}),
    "geglu": ("geglu", {}),
    "geglu_bias": ("geglu", {}),
    "quick_geglu_weighted": ("quick_geglu", {"linear_offset": 1.0, "clamp_value": 7.0}),
    "squared_relu_weighted": ("squared_relu", {}),
}
_KERNELS = "liger_kernels"


class UnavailableError(Exception):
    """A provider or an op of it is not there; says why."""


def kernels(name: str) -> ModuleType:
    """A module of this repository's ``kernels/``, which must not be importable under that name."""
    if _KERNELS not in sys.modules:
        folder = Path(__file__).resolve().parents[2] / "kernels"
        spec = importlib.util.spec_from_file_location(
            _KERNELS, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[_KERNELS] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return importlib.import_module(f"{_KERNELS}.{name}")


def version(provider: str) -> str:
    """The version of ``provider``, as far as it tells."""
    of = PROVIDERS[provider]
    if of.tree:
        from megatron.core.package_info import __version__

        overlay = runtime.overlay()
        return __version__ if overlay is None else f"{__version__}, overlay {overlay.version.OVERLAY_VERSION}"
    if of.ours:
        return f"overlay {OVERLAY_VERSION}"
    if of.distribution is None:
        return str(torch.__version__)
    try:
        return metadata.version(of.distribution)
    except metadata.PackageNotFoundError:  # a folder on the path
        return str(getattr(sys.modules.get(of.module or ""), "__version__", "unknown"))


def load(provider: str) -> Mapping[str, Bind]:
    """Import ``provider``; the ops that it offers.

    Raises:
        UnavailableError: it cannot be imported, or is another package of that name.
    """
    try:
        ops = LOADERS[provider]()
        # Upstream's functions are compiled ones.
        return {op: _anew(bind) for op, bind in ops.items()} if PROVIDERS[provider].tree else ops
    except UnavailableError:
        raise
    except Exception as error:  # a package that finds no driver raises what it likes
        raise UnavailableError(f"{type(error).__name__}: {error}".splitlines()[0]) from error


class _Branch(torch.autograd.Function):
    """``apply(out, x, gradient)``: ``out``, and in the backward ``gradient`` for ``x``.

    That is what a layer hands back that adds ``x`` to its own result.
    """

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return dout, gradient, None


_branch: Callable[..., torch.Tensor] = _Branch.apply


def with_branch(norm: Call) -> Call:
    """A norm whose input goes on beside it; autograd adds the gradients of the two."""

    def call(t: Tensors) -> torch.Tensor:
        return _branch(norm(t), t["x"], t["branch"])

    return call


def _always(call: Call) -> Bind:
    return lambda _: call


def _anew(bind: Bind) -> Bind:
    """``bind`` with nothing compiled before each case, as in a job whose shapes stay.

    Of a process's second shape torch.compile would make code for shapes that vary, and that is slower; of the
    ninth none.
    """

    def bound(t: Tensors) -> Call:
        torch.compiler.reset()
        return bind(t)

    return bound


def activation(op: str, *, reference: bool = False, **options: Any) -> Call:
    """The call of one of :data:`ACTIVATIONS`, by its kernel or in plain PyTorch, which keeps its input."""
    name, more = ACTIVATIONS[op]
    function = getattr(kernels("gated"), f"{name}_reference" if reference else name)
    if reference:
        more = {key: value for key, value in more.items() if key != "fp8_input_store"}

    def call(t: Tensors) -> torch.Tensor:
        operands = {key: t[key] for key in ("bias", "weights") if key in t}
        result: torch.Tensor = function(t["x"], **operands, **more, **options)
        return result

    return call


def _kernels(*, in_place: bool = False) -> dict[str, Bind]:
    cross_entropy = kernels("cross_entropy").vocab_parallel_cross_entropy
    norms = kernels("norms")
    ops = {
        **{op: _always(activation(op, in_place=in_place)) for op in ACTIVATIONS},
        "cross_entropy": _always(lambda t: cross_entropy(t["x"], t["target"], in_place=in_place)),
    }
    if not in_place:
        linear = kernels("linear_cross_entropy").linear_cross_entropy
        ops["linear_cross_entropy"] = _always(lambda t: linear(t["x"], t["weight"], t["target"]).mean())
        ops["rms_norm"] = _always(lambda t: norms.rms_norm(t["x"], t["weight"], EPS))
        ops["layer_norm"] = _always(lambda t: norms.layer_norm(t["x"], t["weight"], t["bias"], EPS))

        def residual(t: Tensors) -> torch.Tensor:
            out, x = norms.rms_norm(t["x"], t["weight"], EPS, residual=True)
            return _branch(out, x, t["branch"])

        ops["rms_norm_residual"] = _always(residual)
    return ops


def _kernels_plain() -> dict[str, Bind]:
    loss = kernels("cross_entropy").vocab_parallel_cross_entropy
    return {"linear_cross_entropy": _always(lambda t: loss(_logits(t), t["target"]).mean())}


def _logits(t: Tensors) -> torch.Tensor:
    return t["x"] @ t["weight"].t()


def _torch_calls() -> dict[str, Call]:
    norms = kernels("norms")

    def rms_norm(t: Tensors) -> torch.Tensor:
        result: torch.Tensor = norms.rms_norm_reference(t["x"], t["weight"], EPS)
        return result

    return {
        **{op: activation(op, reference=True) for op in ACTIVATIONS if not OPS[op].stored},
        "cross_entropy": lambda t: F.cross_entropy(t["x"].float(), t["target"], reduction="none"),
        "linear_cross_entropy": lambda t: F.cross_entropy(_logits(t).float(), t["target"]),
        "rms_norm": rms_norm,
        "rms_norm_residual": with_branch(rms_norm),
        "layer_norm": lambda t: norms.layer_norm_reference(t["x"], t["weight"], t["bias"], EPS),
    }


def _torch() -> dict[str, Bind]:
    return {op: _always(call) for op, call in _torch_calls().items()}


def _compile() -> dict[str, Bind]:
    def compiled(call: Call) -> Bind:
        return _anew(lambda _: torch.compile(call, dynamic=False))

    return {op: compiled(call) for op, call in _torch_calls().items()}


# --- Megatron's entries, of whichever tree is on the path ---


def _loss(entry: Callable[..., torch.Tensor], *more: Any) -> Bind:
    """A loss of logits ``[rows, 1, V]`` and labels ``[rows, 1]``."""
    return _always(lambda t: entry(t["x"].unsqueeze(1), t["target"].unsqueeze(1), *more).squeeze(1))


def _linear(loss: Bind) -> Bind:
    """The mean of a loss, of the logits of the output layer."""

    def bind(t: Tensors) -> Call:
        call = loss(t)
        return lambda t: call({"x": _logits(t), "target": t["target"]}).mean()

    return bind


def _megatron() -> dict[str, Bind]:
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def norm(normalization: str, around: Callable[[Call], Call] = lambda call: call) -> Bind:
        def bind(t: Tensors) -> Call:
            config = SimpleNamespace(normalization=normalization, **dict.fromkeys(REFUSED_BY_UPSTREAM, False))
            module = WrappedTorchNorm(config=config, hidden_size=t["x"].shape[-1], eps=EPS)
            module.weight = t["weight"]
            if "bias" in t:
                module.bias = t["bias"]
            return around(lambda t: module(t["x"]))

        return bind

    plain = _always(lambda t: bias_swiglu_impl(t["x"], t.get("bias")))
    loss = _loss(fused_vocab_parallel_cross_entropy, parallel_state.get_tensor_model_parallel_group())
    # Overlaid, the first would be the kernels' loss behind a product: that is `kernels-plain`. The second's
    # switch is without effect in upstream's local specs.
    of_pristine = {
        "linear_cross_entropy": _linear(loss),
        "rms_norm_residual": norm("RMSNorm", with_branch),
    }
    return {
        **({} if runtime.overlay() else of_pristine),
        **_megatron_activations(),
        "swiglu": plain,
        "swiglu_bias": plain,
        "swiglu_fp8": _always(lambda t: bias_swiglu_impl(t["x"], None, True)),
        "swiglu_weighted": _always(lambda t: weighted_bias_swiglu_impl(t["x"], None, t["weights"])),
        "cross_entropy": loss,
        "rms_norm": norm("RMSNorm"),
        "layer_norm": norm("LayerNorm"),
    }


def _megatron_activations() -> dict[str, Bind]:
    """Those beside SwiGLU that the release has."""
    from megatron.core.fusions import fused_bias_geglu

    geglu = _always(lambda t: fused_bias_geglu.bias_geglu_impl(t["x"], t.get("bias")))
    found = {"geglu": geglu, "geglu_bias": geglu}
    if hasattr(fused_bias_geglu, "weighted_bias_quick_geglu_impl"):
        _, named = ACTIVATIONS["quick_geglu_weighted"]
        found["quick_geglu_weighted"] = _always(
            lambda t: fused_bias_geglu.weighted_bias_quick_geglu_impl(t["x"], None, t["weights"], **named)
        )
    if importlib.util.find_spec("megatron.core.fusions.fused_weighted_squared_relu") is not None:
        from megatron.core.fusions.fused_weighted_squared_relu import weighted_squared_relu_impl

        found["squared_relu_weighted"] = _always(lambda t: weighted_squared_relu_impl(t["x"], t["weights"]))
    return found


def _megatron_unfused() -> dict[str, Bind]:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    loss = _loss(vocab_parallel_cross_entropy)
    return {"cross_entropy": loss, "linear_cross_entropy": _linear(loss)}


# --- Other libraries ---


def _liger() -> dict[str, Bind]:
    from liger_kernel.megatron import LigerMegatronCrossEntropy
    from liger_kernel.ops import (
        LigerFusedGateUpSiLUMulFunction,
        LigerFusedLinearCrossEntropyFunction,
        LigerLayerNormFunction,
        LigerRMSNormFunction,
    )

    swiglu, rms_norm = LigerFusedGateUpSiLUMulFunction.apply, LigerRMSNormFunction.apply
    layer_norm, linear = LigerLayerNormFunction.apply, LigerFusedLinearCrossEntropyFunction.apply
    return {
        "swiglu": _always(lambda t: swiglu(t["x"], False)),
        "cross_entropy": _loss(LigerMegatronCrossEntropy()),
        "linear_cross_entropy": _always(lambda t: linear(t["x"], t["weight"], t["target"])[0]),
        # As its own module for Megatron calls it: no offset, and not in place.
        "rms_norm": _always(lambda t: rms_norm(t["x"], t["weight"], EPS, 0.0, "llama", False)),
        "layer_norm": _always(lambda t: layer_norm(t["x"], t["weight"], t["bias"], EPS)),
    }


def _liger_in_place() -> dict[str, Bind]:
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    return {"swiglu": _always(lambda t: LigerFusedGateUpSiLUMulFunction.apply(t["x"], True))}


def _te_triton() -> ModuleType:
    """TransformerEngine's Triton cross-entropy, without the packages above it, which need its libraries."""
    found = importlib.util.find_spec("transformer_engine")
    if found is None or found.submodule_search_locations is None:
        raise UnavailableError("no package transformer_engine")
    for inner in ((), ("common",), ("common", "triton"), ("pytorch",), ("pytorch", "triton")):
        name = ".".join(("transformer_engine", *inner))
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [
            str(Path(place, *inner)) for place in found.submodule_search_locations
        ]
        sys.modules[name] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{name}.cross_entropy")


class _TELoss(torch.autograd.Function):
    """``apply(logits, target, module, overwrite)``: TransformerEngine's Triton cross-entropy ``module``.

    ``overwrite`` None: an older interface, whose forward writes the gradient over the logits in any case.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, module: Any, overwrite: bool | None
    ) -> torch.Tensor:
        ctx.module, ctx.old = module, overwrite is None
        if ctx.old:
            loss, saved = module.cross_entropy_forward(logits, target, 0.0, False, None, -100)
            ctx.save_for_backward(saved.detach())
        else:
            loss, saved, statistics, target, _, ctx.rank, ctx.ranks = module.cross_entropy_forward(
                logits, target, 0.0, False, None, -100, overwrite
            )
            ctx.save_for_backward(saved.detach(), statistics, target)
        result: torch.Tensor = loss
        return result

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.old:
            (saved,) = ctx.saved_tensors
            gradient = ctx.module.cross_entropy_backward(saved, dloss)
        else:
            saved, statistics, target = ctx.saved_tensors
            gradient = ctx.module.cross_entropy_backward(
                saved, statistics, target, None, dloss, 0.0, False, ctx.rank, ctx.ranks, -100
            )
        return gradient, None, None, None


def _te(*, in_place: bool) -> dict[str, Bind]:
    module = _te_triton()
    if "overwrite_input" in inspect.signature(module.cross_entropy_forward).parameters:
        return {"cross_entropy": _loss(_TELoss.apply, module, in_place)}
    if not in_place:
        raise UnavailableError("this version always writes over the logits")
    return {"cross_entropy": _loss(_TELoss.apply, module, None)}


def _quack() -> dict[str, Bind]:
    from quack import cross_entropy, rmsnorm

    return {
        "cross_entropy": _always(lambda t: cross_entropy(t["x"], t["target"], reduction="none")),
        "rms_norm": _always(lambda t: rmsnorm(t["x"], t["weight"], eps=EPS)),
    }


def _cce(implementation: str) -> dict[str, Bind]:
    from cut_cross_entropy import linear_cross_entropy

    return {
        "linear_cross_entropy": _always(
            lambda t: linear_cross_entropy(t["x"], t["weight"], t["target"], impl=implementation)
        )
    }


LOADERS: dict[str, Callable[[], Mapping[str, Bind]]] = {
    "kernels": _kernels,
    "kernels-in-place": lambda: _kernels(in_place=True),
    "kernels-plain": _kernels_plain,
    "overlaid": _megatron,
    "upstream": _megatron,
    "upstream-unfused": _megatron_unfused,
    "torch": _torch,
    "compile": _compile,
    "liger": _liger,
    "liger-in-place": _liger_in_place,
    "te": lambda: _te(in_place=False),
    "te-in-place": lambda: _te(in_place=True),
    "quack": _quack,
    "cce": lambda: _cce("cce"),
    "cce-exact": lambda: _cce("cce_exact"),
}


def join_megatron(folder: Path, device: str) -> None:
    """Import the tree on the path as Megatron, with one rank and its groups.

    Raises:
        RuntimeError: another ``megatron.core`` comes first.
    """
    runtime.check_tree()
    if device == "cpu":
        runtime.use_cpu_for_cuda()
    runtime.init_group(folder, device)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
