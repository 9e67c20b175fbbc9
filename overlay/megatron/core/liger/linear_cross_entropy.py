# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="misc,no-untyped-call"
"""Output layer and loss in one, without the logits: which calls of a language model the kernel serves.

Off unless ``LIGER_MEGATRON`` names it. One decision, :func:`decide`, made from what is the same on all
tensor-parallel ranks: types, dtypes, shapes, devices and settings, never values. What is not served runs
upstream's next lines, the layer and then the loss.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch

from . import ranks
from .cross_entropy import DEVICES, GROUP, LABELS_DTYPE
from .dispatch import NOT_PLAIN, Op, is_plain, platform
from .settings import SETTINGS

LOSS = "a loss other than the language model's own"
SCALE = "logits scaled otherwise than by a factor"
TE = "the loss is TransformerEngine's by configuration"
LOGGED = "logits that the configuration's logger writes"
READ = "logits that acceptance counts read"
BATCH_INVARIANT = "batch-invariant mode, whose products are others"
LAYER = "an output layer that is no plain ColumnParallelLinear"
PRODUCT = "a matrix product of the output layer that somebody has replaced"
HOOKS = "hooks on the output layer"
DEFERRED = "the weight's gradient is deferred (defer_embedding_wgrad_compute)"
BIAS = "an output layer with a bias"
LOGIT_DTYPE = "logits of a dtype of their own"
GATHERED = "logits gathered over the tensor-parallel ranks"
NO_REDUCE = "an output layer that does not reduce its gradient"
SHARDED = "a weight that is sharded otherwise than over the vocabulary"
DTYPE = "hidden state and weight not both bfloat16, float16 or float32"
AUTOCAST = "under autocast"
TRANSFORM = "under a transform of torch.func"
SHAPES = "hidden state, weight and labels whose shapes do not fit"
MAIN_GRAD = "gradient accumulation fusion without a main_grad of float32 or the weight's dtype"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INVARIANT = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
# What a ColumnParallelLinear multiplies with.
_PRODUCTS = ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight")
_AUTOCAST = "torch.amp.autocast_mode"
_PRODUCT_CLASSES = ("LinearWithGradAccumulationAndAsyncCommunication", "LinearWithFrozenWeight")
# Waits for a parameter that is being gathered, and gives nothing back: it can run before the kernel, too.
_WAITS = "megatron.core.distributed.distributed_data_parallel"

OP = Op(
    "linear_cross_entropy",
    kernel="linear_cross_entropy.linear_cross_entropy",
    launches=("linear_cross_entropy_",),
)
_MODEL = OP.entry("GPTModel")
_MTP = OP.entry("MTP")

_kernel: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True)
class Call:
    """One call of the output layer, and the loss that it is made for.

    ``hidden`` ``[s, b, h]``, or a tensor-parallel rank's part of ``s``; ``weight`` ``[v, h]``, None for the
    layer's own; ``labels`` ``[b, s]``; ``gather``: as the call has it, None for the layer's own word;
    ``compute``: the loss of labels and logits; ``scale``: a factor for the logits.
    """

    layer: Any
    hidden: torch.Tensor
    weight: Any
    labels: torch.Tensor
    gather: Any
    compute: Callable[..., Any]
    scale: float = 1.0

    def __mul__(self, factor: float) -> Call:
        """What upstream does to logits that a model scales."""
        return replace(self, scale=self.scale * factor)

    @property
    def matrix(self) -> Any:
        return self.layer.weight if self.weight is None else self.weight

    @property
    def group(self) -> Any:
        """The ranks that share the vocabulary, or None for one rank."""
        group = getattr(self.layer, "tp_group", None)
        if group is None:
            from megatron.core import parallel_state

            group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
        return None if group is None or group.size() == 1 else group


@functools.cache
def _classes() -> tuple[Any, Any]:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    return LanguageModule, ColumnParallelLinear


def _written_in(function: Any, module: str) -> bool:
    """Whether a function stands in a module's file: not one that somebody has put in its place since."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == getattr(sys.modules.get(module), "__file__", None)


def _own(holder: Any, name: str, upstream: Any) -> bool:
    """Whether ``holder`` has the method that upstream wrote: not a derived class's, none put there."""
    of_class = getattr(type(holder), name, None)
    if of_class is not getattr(upstream, name, None) or name in vars(holder):
        return False
    return name not in vars(upstream) or _written_in(of_class, upstream.__module__)


def _loss_is_upstreams(model: Any) -> bool:
    """Whether the loss that the kernel stands for is what the model would compute of its logits."""
    language_module, _ = _classes()
    from megatron.core import tensor_parallel

    module = sys.modules[language_module.__module__]
    losses = {
        "megatron.core.fusions.fused_cross_entropy": vars(module).get("fused_vocab_parallel_cross_entropy"),
        "megatron.core.tensor_parallel.cross_entropy": tensor_parallel.vocab_parallel_cross_entropy,
    }
    return (
        _own(model, "compute_language_model_loss", language_module)
        and vars(module).get("tensor_parallel", tensor_parallel) is tensor_parallel
        and all(function is None or _written_in(function, name) for name, function in losses.items())
        and all(_classes_are_upstreams(name) for name in losses)
    )


def _classes_are_upstreams(name: str) -> bool:
    """Whether the classes of a module have the functions that upstream wrote."""
    own = [x for x in vars(sys.modules[name]).values() if isinstance(x, type) and x.__module__ == name]
    members = [getattr(member, "__func__", member) for kind in own for member in vars(kind).values()]
    return all(_written_in(member, name) for member in members if isinstance(member, FunctionType))


def _products_are_upstreams(layers: Any) -> bool:
    """Whether the module of the output layer has the matrix products that upstream wrote."""
    functions = [getattr(layers, name) for name in _PRODUCTS]
    for name in _PRODUCT_CLASSES:
        for way in ("forward", "backward"):
            function = getattr(getattr(layers, name), way)
            while _written_in(function, _AUTOCAST):  # upstream's own decorators
                function = function.__wrapped__
            functions.append(function)
    return all(_written_in(function, layers.__name__) for function in functions)


def _batch_invariant() -> bool:
    module = sys.modules.get(_INVARIANT)
    return module is not None and bool(module.is_batch_invariant_mode_enabled())


def unserved(call: Call, ranks_sharing: int) -> str | None:
    """Why no kernel serves a call, as a short fixed text, or None when one does.

    Args:
        call: the call.
        ranks_sharing: how many ranks share the vocabulary.
    """
    return _of_model(call) or _of_layer(call, ranks_sharing) or _of_tensors(call, ranks_sharing)


def _of_model(call: Call) -> str | None:
    from megatron.core.config_logger import has_config_logger_enabled

    language_module, _ = _classes()
    model = getattr(call.compute, "__self__", None)
    if (
        not isinstance(model, language_module)
        or getattr(call.compute, "__func__", None) is not language_module.compute_language_model_loss
        or not _loss_is_upstreams(model)
    ):
        return LOSS
    if not _own(model, "_scale_logits", language_module) or not math.isfinite(call.scale) or not call.scale:
        return SCALE
    config = model.config
    if config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl != "native":
        return TE
    if _batch_invariant():
        return BATCH_INVARIANT
    return LOGGED if has_config_logger_enabled(config) else None


def _of_layer(call: Call, ranks_sharing: int) -> str | None:
    layer = call.layer
    _, linear = _classes()
    # Before 0.14 a layer has a _forward_impl of its own, which upstream's forward sets.
    methods = ("forward", "__call__", *(["_forward_impl"] if hasattr(linear, "_forward_impl") else []))
    if not isinstance(layer, linear) or not all(_own(layer, name, linear) for name in methods):
        return LAYER
    if getattr(layer, "explicit_expert_comm", False):
        return LAYER
    if not _products_are_upstreams(sys.modules[linear.__module__]):
        return PRODUCT
    if _hooked(layer):
        return HOOKS
    if getattr(layer.config, "defer_embedding_wgrad_compute", False):
        return DEFERRED
    if layer.bias is not None:
        return BIAS
    if getattr(layer, "output_dtype", None) is not None:
        return LOGIT_DTYPE
    if getattr(layer, "gtp_remat_size", 1) != 1:
        return SHARDED
    if ranks_sharing > 1:
        if layer.gather_output if call.gather is None else call.gather:
            return GATHERED
        if getattr(layer, "disable_grad_reduce", False):
            return NO_REDUCE
    return None


def _hooked(layer: Any) -> bool:
    """Whether somebody waits for the layer's logits or their gradient."""
    everywhere = torch.nn.modules.module
    kinds = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_pre_hooks")
    if any(getattr(everywhere, f"_global{kind}") for kind in kinds):
        return True
    if any(getattr(layer, kind) for kind in kinds[:-1]):
        return True
    return any(getattr(hook, "__module__", None) != _WAITS for hook in layer._forward_pre_hooks.values())


def _of_tensors(call: Call, ranks_sharing: int) -> str | None:
    layer, hidden, weight, labels = call.layer, call.hidden, call.matrix, call.labels
    if not all(isinstance(x, torch.Tensor) and is_plain(x) for x in (hidden, weight, labels)):
        return NOT_PLAIN
    if hasattr(weight, "__fsdp_param__"):
        return SHARDED
    if hidden.dtype not in _DTYPES or weight.dtype != hidden.dtype:
        return DTYPE
    if labels.dtype != torch.int64:
        return LABELS_DTYPE
    device = hidden.device
    if weight.device != device or labels.device != device:
        return DEVICES
    if (reason := platform().unusable(device.type)) is not None:
        return reason
    if torch.is_autocast_enabled(device.type):
        return AUTOCAST
    if torch._C._are_functorch_transforms_active():  # what autograd functions ask, too
        return TRANSFORM
    if hidden.dim() != 3 or weight.shape != (layer.output_size_per_partition, layer.input_size):
        return SHAPES
    tokens = hidden.shape[0] * (ranks_sharing if layer.sequence_parallel else 1)
    if hidden.shape[2] != layer.input_size or labels.shape != (hidden.shape[1], tokens):
        return SHAPES
    if layer.gradient_accumulation_fusion and weight.requires_grad and torch.is_grad_enabled():
        main_grad = getattr(weight, "main_grad", None)
        if not isinstance(main_grad, torch.Tensor) or main_grad.dtype not in (torch.float32, weight.dtype):
            return MAIN_GRAD
        if main_grad.shape != weight.shape or main_grad.device != device:
            return MAIN_GRAD
    return None


def decide(call: Call, entry: str) -> tuple[str | None, Any]:
    """Whether the kernel serves a call of ``entry``, in agreement with the other ranks.

    Returns:
        Why the kernel does not serve it, or None when it does; and the group, None for one rank.

    Raises:
        RankError: the ranks of the group would not decide alike.
    """
    group = call.group
    reason = unserved(call, 1 if group is None else group.size())
    if group is None:
        return reason, None
    if not ranks.known(group):
        return reason or GROUP, None
    ranks.decided(group, OP.name, entry, reason or ranks.KERNEL)
    if reason is None:
        # A rank that does not come here asks the others in the loss that upstream has for it.
        if call.layer.sequence_parallel and not ranks.asked(group):
            _meet(call.hidden, group)
        ranks.agree(group, OP.name, ranks.KERNEL)
    return reason, group


def _meet(hidden: torch.Tensor, group: Any) -> None:
    """The collective that a rank without the kernel is in before its loss: upstream's layer gathers."""
    whole = torch.empty(
        (hidden.shape[0] * group.size(), *hidden.shape[1:]), dtype=hidden.dtype, device=hidden.device
    )
    torch.distributed.all_gather_into_tensor(whole, hidden.detach().contiguous(), group=group)


def run(call: Call, group: Any, keep: bool) -> torch.Tensor:
    """The kernel's loss, ``[b, s]`` float32, for a call that :func:`decide` has nothing against."""
    global _kernel
    if _kernel is None:
        _kernel = OP.load()
    layer, weight = call.layer, call.matrix
    for hook in layer._forward_pre_hooks.values():
        hook(layer, (call.hidden,))
    fused = layer.gradient_accumulation_fusion and weight.requires_grad and torch.is_grad_enabled()
    loss = _kernel(
        call.hidden,
        weight,
        call.labels.transpose(0, 1),
        group=group,
        sequence_parallel=bool(layer.sequence_parallel),
        check_labels=SETTINGS.check_labels,
        logit_scale=call.scale,
        main_grad=weight.main_grad if fused else None,
        budget_mb=SETTINGS.linear_ce_mb,
        keep=keep,
    )
    return loss.transpose(0, 1).contiguous()


def model_loss(
    model: Any, hidden: torch.Tensor, weight: Any, labels: torch.Tensor | None, gather: Any
) -> torch.Tensor | None:
    """The loss of a language model's last hidden state, or None where upstream's next lines shall make it.

    Args:
        model: a ``LanguageModule`` with an ``output_layer``.
        hidden: ``[s, b, h]``, or a tensor-parallel rank's part of ``s``.
        weight: ``[v, h]`` in place of the layer's own, or None.
        labels: ``[b, s]`` int64, or None where logits are asked for.
        gather: ``runtime_gather_output``.

    Returns:
        ``[b, s]`` float32, as ``compute_language_model_loss`` gives it.

    Raises:
        FallbackError: the kernel does not serve it, and ``LIGER_MEGATRON_STRICT=1``.
        RankError: the ranks of the group do not run the same.
        IndexError: ``LIGER_MEGATRON_CHECK_LABELS=1`` and a label is beyond the vocabulary.
    """
    if not OP.enabled or labels is None:
        return None
    if torch.compiler.is_compiling():
        _MODEL.traced()
        return None
    config = model.config
    # A release without MuP passes over what a configuration says of it.
    scaled = getattr(config, "use_mup", False) and hasattr(model, "_scale_logits")
    scale = float(config.mup_output_mult) if scaled else 1.0
    compute = model.compute_language_model_loss
    call = Call(model.output_layer, hidden, weight, labels, gather, compute, scale)
    reason, group = decide(call, _MODEL.name)
    if reason is not None:
        _MODEL.fell_back(reason, hidden)
        return None
    _MODEL.served(hidden)
    return run(call, group, keep=True)


def mtp_heads(
    layer: Any, compute: Callable[..., Any], labels: torch.Tensor, logits_read: bool = False
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Output layer and loss for the heads of multi-token prediction, called in turn.

    Where the kernel serves a head, what the layer gives is no tensor: its product with a number and its loss
    are all that can be had of it.

    Args:
        layer: the model's output layer.
        compute: the model's ``compute_language_model_loss``.
        labels: ``[b, s]``, of the shape and dtype that each head's labels have.
        logits_read: upstream looks at the logits beside the loss, so they have to be made.

    Returns:
        What to call in place of ``layer`` and ``compute``; they themselves while the op is off.

    Raises:
        FallbackError: the kernel does not serve it, and ``LIGER_MEGATRON_STRICT=1``; here or by the layer.
    """
    if not OP.enabled:
        return layer, compute
    if torch.compiler.is_compiling():
        _MTP.traced()
        return layer, compute
    if logits_read:
        _MTP.fell_back(READ, labels)
        return layer, compute

    def head(hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        call = Call(layer, hidden, weight, labels, runtime_gather_output, compute)
        reason, _ = decide(call, _MTP.name)
        if reason is not None:
            _MTP.fell_back(reason, hidden)
            return layer(hidden, weight=weight, runtime_gather_output=runtime_gather_output)
        return call, None

    def loss(labels: torch.Tensor, logits: Any) -> Any:
        if not isinstance(logits, Call):
            return compute(labels, logits)
        _MTP.served(logits.hidden)
        # Several heads are between forward and backward at a time, and the budget is one call's.
        return run(replace(logits, labels=labels), logits.group, keep=False)

    return head, loss
