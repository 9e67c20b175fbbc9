# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="misc"
"""Cross-entropy: which calls the kernel serves, for the taken-over functions and for
:class:`LigerMegatronCrossEntropy`.

One decision, :func:`decide`. It rests on what is the same on all tensor-parallel ranks: types, dtypes,
shapes, devices and settings. Values, strides and addresses may differ between them and count for nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from . import ranks
from .dispatch import (
    NOT_PLAIN,
    OFF,
    ON_CPU,
    OTHER_DEVICE,
    Op,
    interpreter_wanted,
    is_plain,
    kernel_module,
    later_option,
    platform,
)
from .settings import LABEL_SMOOTHING_SCOPES, SETTINGS

OUT_OF_RANGE = "labels beyond the vocabulary"
OPTIONS = "options that upstream's function does not have"
DTYPE = "logits of a dtype other than bfloat16, float16 and float32"
LABELS_DTYPE = "labels of a dtype other than int64"
VOCABULARY = "logits without a vocabulary as the last dimension"
LABELS_SHAPE = "labels of a shape other than the logits' without the vocabulary"
DEVICES = "tensors on different devices"
SMOOTHING = "label smoothing that is no number in [0, 1)"
GROUP = "a group that is not torch.distributed's"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _out_of_range(wait: bool) -> dict[str, int | None]:
    module = kernel_module("cross_entropy")
    return {OUT_OF_RANGE: module.out_of_range_labels(wait)} if module else {}


OP = Op(
    "cross_entropy",
    kernel="cross_entropy.vocab_parallel_cross_entropy",
    launches=("cross_entropy_",),
    device_counts=_out_of_range,
)
_MODULE = OP.entry("LigerMegatronCrossEntropy")

_kernel: Callable[..., torch.Tensor] | None = None


def unserved(logits: torch.Tensor, target: torch.Tensor, label_smoothing: Any = 0.0) -> str | None:
    """Why no kernel serves these arguments on any rank, as a short fixed text, or None when it does."""
    if not is_plain(logits) or not is_plain(target):
        return NOT_PLAIN
    if logits.dtype not in _DTYPES:
        return DTYPE
    if target.dtype != torch.int64:
        return LABELS_DTYPE
    if not logits.dim() or not logits.size(-1):
        return VOCABULARY
    if target.shape != logits.shape[:-1]:
        return LABELS_SHAPE
    if target.device != logits.device:
        return DEVICES
    if not isinstance(label_smoothing, (int, float)) or not 0.0 <= label_smoothing < 1.0:
        return SMOOTHING
    return None


def decide(
    logits: torch.Tensor, target: torch.Tensor, label_smoothing: Any, group: Callable[[], Any]
) -> tuple[str | None, Any]:
    """Whether the kernel serves a call, in agreement with the other ranks.

    Args:
        logits, target, label_smoothing: of the call.
        group: gives its tensor-parallel group, or None where the vocabulary is whole. Called only if need be.

    Returns:
        Why the kernel does not serve it, or None when it does; and the group, None for one rank.

    Raises:
        RankError: the ranks of the group would not decide alike.
    """
    reason = unserved(logits, target, label_smoothing)
    if reason is not None:
        return reason, None
    device = logits.device.type
    if OP.enabled:
        reason = platform().unusable(device)
        if reason in (ON_CPU, OTHER_DEVICE):
            return reason, None
    else:
        reason = OFF
        if device != "cuda" and not interpreter_wanted():
            return reason, None
    # From here on another rank may be on the kernel, even where this one is not.
    found = group()
    if found is None:
        return reason, None
    size = found.size() if hasattr(found, "size") else 0
    if size == 1:
        return reason, None
    if not ranks.known(found):
        return reason or GROUP, None
    ranks.agree(found, OP.name, reason or ranks.KERNEL)
    return reason, found


def run(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: torch.distributed.ProcessGroup | None,
    label_smoothing: float,
    scope: str,
    ignore_index: int = -100,
) -> torch.Tensor:
    """The kernel's loss, ``[...]`` float32, for a call that :func:`decide` has nothing against."""
    global _kernel
    if _kernel is None:
        _kernel = OP.load()
    return _kernel(
        logits,
        target,
        group=group,
        label_smoothing=label_smoothing,
        label_smoothing_scope=scope,
        ignore_index=ignore_index,
        check_labels=SETTINGS.check_labels,
        in_place=OP.in_place,
    )


class TakenOver:
    """What stands in a taken-over function's place: decides, counts, and runs the kernel or ``upstream``.

    Args:
        name: the function's name.
        upstream: the release's own function, of ``(logits, target, …)``, whose signature says which options
            there are.
        module: the names of upstream's module, among them where it asks for a group that is not given.
    """

    def __init__(self, name: str, upstream: Callable[..., torch.Tensor], module: Mapping[str, Any]) -> None:
        self.entry = OP.entry(name)
        self.upstream = upstream
        self.module = module
        self.options = dict(list(inspect.signature(upstream).parameters.items())[2:])
        named = [p for p in self.options.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.required = {p.name for p in named if p.default is p.empty}
        optional = {p.name: p.default for p in named if p.default is not p.empty}
        self.by_default = {"label_smoothing": 0.0, "tp_group": None, **optional}

    def read(self, options: Sequence[Any], named: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """The options by name; first, why the kernel does not serve them, or None when it does."""
        given = dict(zip(self.options, options))
        if (
            len(options) > len(self.options)
            or not named.keys() <= self.options.keys() - given.keys()
            or not self.required <= given.keys() | named.keys()
        ):
            return OPTIONS, {}
        given = {**self.by_default, **given, **named}
        if "tp_group" in self.required and given["tp_group"] is None:
            return GROUP, {}
        return later_option(self.options, given, ("label_smoothing", "tp_group")), given

    def group(self, given: Any) -> Any:
        """The tensor-parallel group: the given one, else what upstream's module asks for it."""
        if given is not None:
            return given
        # Looked up at each call: upstream's own code does, and users replace the name.
        return self.module["get_tensor_model_parallel_group"]()

    def __call__(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        options: Sequence[Any],
        named: Mapping[str, Any],
    ) -> torch.Tensor:
        """Serve one call: logits and labels, and the options that followed by position and by name."""
        entry = self.entry
        if torch.compiler.is_compiling():
            if OP.enabled:
                entry.traced()
            return self.upstream(logits, target, *options, **named)
        reason, given = self.read(options, named)
        group = None
        label_smoothing = given.get("label_smoothing", 0.0)
        if reason is None:
            reason, group = decide(logits, target, label_smoothing, lambda: self.group(given["tp_group"]))
        if reason is None:
            entry.served(logits)
            return run(logits, target, group, label_smoothing, SETTINGS.label_smoothing)
        if OP.enabled:
            entry.fell_back(reason, logits)
        else:
            entry.skipped(logits)
        return self.upstream(logits, target, *options, **named)


FORMULAS = ("megatron", "pytorch")
REDUCTIONS = ("none", "mean", "sum")


class LigerMegatronCrossEntropy(nn.Module):
    """Cross-entropy as a module, over a vocabulary that tensor-parallel ranks share.

    Args:
        ignore_index: a label with loss 0 and gradient 0, beside all negative ones.
        label_smoothing: in [0, 1).
        reduction: ``none``; ``mean`` over the labels that are not ignored (NaN without any); ``sum``.
        label_smoothing_formula: of K labels, ``megatron`` spreads ``label_smoothing`` over the K - 1 others
            than the target; ``pytorch`` over all K, as ``torch.nn.functional.cross_entropy`` does.
        label_smoothing_mode: ``global``: the K labels are the whole vocabulary's, and all ranks have the same
            loss. ``partition``: those of the rank's own part, as upstream has it.

    Raises:
        ValueError: an argument has none of these values.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "none",
        label_smoothing_formula: str = "megatron",
        label_smoothing_mode: str = "global",
    ) -> None:
        super().__init__()
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1), not {label_smoothing!r}")
        for name, value, right in (
            ("reduction", reduction, REDUCTIONS),
            ("label_smoothing_formula", label_smoothing_formula, FORMULAS),
            ("label_smoothing_mode", label_smoothing_mode, LABEL_SMOOTHING_SCOPES),
        ):
            if value not in right:
                raise ValueError(f"{name} must be one of {', '.join(right)}, not {value!r}")
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.label_smoothing_formula = label_smoothing_formula
        self.label_smoothing_mode = label_smoothing_mode

    def forward(
        self,
        vocab_parallel_logits: torch.Tensor,
        target: torch.Tensor,
        tp_group: torch.distributed.ProcessGroup | None = None,
    ) -> torch.Tensor:
        """The loss of ``target`` under the softmax of the logits.

        Args:
            vocab_parallel_logits: ``[..., V_local]``, such as ``[s, b, V_local]``: the part of the vocabulary
                that this rank of the group has, in rank order; bfloat16, float16 or float32.
            target: ``[...]`` int64, of the whole vocabulary.
            tp_group: the ranks that share the vocabulary. None: Megatron-Core's tensor-parallel group; the
                vocabulary is whole where model parallelism is not initialised.

        Returns:
            ``[...]`` float32, a scalar if reduced. The gradient has the logits' dtype.

        Raises:
            ValueError: the shapes do not fit.
            RuntimeError: the kernel does not serve the call.
            RankError: the ranks of the group do not run the same.
            IndexError: ``LIGER_MEGATRON_CHECK_LABELS=1`` and a label is beyond the vocabulary.
        """
        if target.shape != vocab_parallel_logits.shape[:-1]:
            raise ValueError(
                f"target must have the logits' shape without the last dimension, "
                f"{list(vocab_parallel_logits.shape[:-1])}, not {list(target.shape)}"
            )
        serve: Callable[..., torch.Tensor] = (
            _serve_outside_graphs if torch.compiler.is_compiling() else LigerMegatronCrossEntropy._serve
        )
        loss = serve(self, vocab_parallel_logits, target, tp_group)
        if self.reduction == "none":
            return loss
        total = loss.sum()
        if self.reduction == "sum":
            return total
        return total / ((target >= 0) & (target != self.ignore_index)).sum()

    def _serve(self, logits: torch.Tensor, target: torch.Tensor, tp_group: Any) -> torch.Tensor:
        reason, group = decide(
            logits, target, self.label_smoothing, lambda: _default_group() if tp_group is None else tp_group
        )
        if reason is not None:
            raise RuntimeError(
                f"LigerMegatronCrossEntropy does not serve this call: {reason}. Use Megatron-Core's "
                "fused_vocab_parallel_cross_entropy or vocab_parallel_cross_entropy for it"
            )
        label_smoothing = self.label_smoothing
        if self.label_smoothing_formula == "pytorch":
            labels = logits.size(-1)
            if group is not None and self.label_smoothing_mode == "global":
                labels *= group.size()
            label_smoothing *= (labels - 1) / labels
        _MODULE.served(logits)
        return run(logits, target, group, label_smoothing, self.label_smoothing_mode, self.ignore_index)

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
            f"reduction={self.reduction!r}, label_smoothing_formula={self.label_smoothing_formula!r}, "
            f"label_smoothing_mode={self.label_smoothing_mode!r}"
        )

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Empty: there is nothing to save."""
        return {}


_compiler: Any = torch.compiler
_serve_outside_graphs = _compiler.disable(LigerMegatronCrossEntropy._serve)


def _default_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group(check_initialized=False)
