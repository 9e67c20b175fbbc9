# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="misc,no-untyped-call"
"""RMSNorm and LayerNorm: what the taken-over classes build, and which calls of it the kernels serve.

One decision, :func:`unserved`, made from types, dtypes, shapes, devices and settings, never from values. What
no kernel serves runs the forward of the torch class that a norm derives from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .dispatch import NOT_PLAIN, WATCHED, Op, is_plain, later_option, platform, watched

OP = Op("norms", kernel="norms.rms_norm", launches=("norm_",))
_MODULE = OP.entry("LigerMegatronRMSNorm")
_PROVIDER = "LocalSpecProvider.layer_norm"

AUTOCAST = "under autocast"
TRANSFORM = "under a transform of torch.func"
DTYPE = "a dtype other than bfloat16, float16 and float32"
MIXED = "LayerNorm with input and parameters of different dtypes"
DIMENSIONS = "normalization over other than one dimension"
WIDTH = "input whose last dimension is not the norm's size, or zero"
SHAPE = "parameters of a shape other than the norm's"
DEVICES = "tensors on different devices"
NO_EPS = "no eps"
DERIVED = "a class derived from it"

# Why a norm that a spec asks for its residual too gives its output alone.
STREAMS = "fused_residual_rmsnorm with hyper-connections, whose residual is another"
RECOMPUTED = (
    "fused_residual_rmsnorm with a recomputed norm, where a release frees the residual with its output"
)
OVERLAPPED = "fused_residual_rmsnorm with overlapped experts, where a release takes an output alone"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Torch before 2.4 has no RMSNorm; nothing is built there.
_TorchRMSNorm: Any = getattr(nn, "RMSNorm", nn.LayerNorm)


def unserved(norm: _Norm, x: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Why no kernel serves a call, as a short fixed text, or None when one does.

    Args:
        norm: which is called; its ``bias`` is given apart, None for RMSNorm.
        x: the input.
    """
    weight, shape = norm.weight, norm.normalized_shape
    if not is_plain(x) or not is_plain(weight):
        return NOT_PLAIN
    if watched():
        return WATCHED
    device = x.device
    if (reason := platform().unusable(device.type)) is not None:
        return reason
    if torch.is_autocast_enabled(device.type):
        return AUTOCAST
    if torch._C._are_functorch_transforms_active():  # what autograd functions ask, too
        return TRANSFORM
    if x.dtype not in _DTYPES or weight.dtype not in _DTYPES:
        return DTYPE
    if len(shape) != 1:
        return DIMENSIONS
    if not x.dim() or not x.size(-1) or x.size(-1) != shape[0]:
        return WIDTH
    if weight.shape != shape:
        return SHAPE
    if weight.device != device:
        return DEVICES
    if norm.eps is None:
        return NO_EPS
    if weight.dtype != x.dtype and isinstance(norm, nn.LayerNorm):
        return MIXED
    if bias is not None:
        if not is_plain(bias):
            return NOT_PLAIN
        if bias.dtype != x.dtype:
            return MIXED
        if bias.shape != shape:
            return SHAPE
        if bias.device != device:
            return DEVICES
    return None


class _Norm(nn.Module):
    """What both norms add to the torch class that each derives from: kernels, and marks on the parameters.

    Args:
        hidden_size: the size of the last dimension (torch's ``normalized_shape``).
        eps: added to the mean of the squares.
        zero_centered_gamma: the factor is ``1 + weight``, and weights begin at 0.
        sequence_parallel: what each parameter's ``sequence_parallel`` says; where it is True, Megatron-Core
            sums the gradients over the tensor-parallel ranks.
        built_by: the entry that counts the calls.
    """

    weight: nn.Parameter
    normalized_shape: tuple[int, ...]
    eps: Any  # None in RMSNorm: that of the input's dtype
    zero_centered_gamma = False
    sequence_parallel = False
    returns_residual = False  # of RMSNorm, where asked for; later releases read it

    def __init__(
        self,
        hidden_size: int | Sequence[int],
        eps: float | None = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        sequence_parallel: bool = False,
        built_by: str,
    ) -> None:
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        self.built_by = built_by
        super().__init__(hidden_size, eps=eps)  # the torch class's, which resets the parameters

    def reset_parameters(self) -> None:
        """Set weights to one, or to zero where they are zero-centred, and biases to zero."""
        super().reset_parameters()
        if self.zero_centered_gamma:
            nn.init.zeros_(self.weight)
        self._mark()

    def _mark(self) -> None:
        for parameter in self.parameters(recurse=False):
            if not hasattr(parameter, "sequence_parallel"):
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def _apply(self, *args: Any, **named: Any) -> Any:
        result = super()._apply(*args, **named)
        self._mark()  # a move off the meta device makes new parameters
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()  # copies of parameters lose their attributes

    def _forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> Any:
        entry = OP.entry(self.built_by)
        if torch.compiler.is_compiling():
            if OP.enabled:
                entry.traced()
        elif not OP.enabled:
            entry.skipped(x)
        else:
            reason = unserved(self, x, bias)
            if reason is None:
                entry.served(x)
                return self._kernel(x)
            entry.fell_back(reason, x)
        return self._torch(x)

    def _kernel(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def _torch(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, zero_centered_gamma={self.zero_centered_gamma}"


_Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_rms_norm: Callable[..., _Result] | None = None
_layer_norm: Callable[..., torch.Tensor] | None = None


class RMSNorm(_Norm, _TorchRMSNorm):
    """``torch.nn.RMSNorm`` on the kernels, with zero-centred weights and sequence parallelism.

    Where ``returns_residual`` is set, it gives its input too, for the branch past it, whether a kernel runs
    or not; the kernel's backward adds that branch's gradient to the input's before it rounds.
    """

    def forward(self, x: torch.Tensor) -> _Result:
        """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension.

        Args:
            x: ``[..., H]``; bfloat16, float16 or float32 for the kernel, any strides.

        Returns:
            ``[..., H]``, in the dtype that ``torch.nn.RMSNorm`` gives; with ``returns_residual`` a pair of it
            and ``x``, which shares its memory and may be a view of it.

        Raises:
            FallbackError: the kernel does not serve it, and ``LIGER_MEGATRON_STRICT=1``.
            RuntimeError: ``torch.nn.RMSNorm`` does not serve it either.
        """
        result: _Result = self._forward(x, None)
        return result

    def _kernel(self, x: torch.Tensor) -> _Result:
        global _rms_norm
        if _rms_norm is None:
            _rms_norm = OP.load()
        return _rms_norm(
            x,
            self.weight,
            self.eps,
            zero_centered=self.zero_centered_gamma,
            residual=self.returns_residual,
        )

    def _torch(self, x: torch.Tensor) -> _Result:
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        out = F.rms_norm(x, self.normalized_shape, weight, self.eps)
        return (out, x) if self.returns_residual else out


class LayerNorm(_Norm, nn.LayerNorm):
    """``torch.nn.LayerNorm`` on the kernels, with zero-centred weights and sequence parallelism."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(x - mean(x)) / sqrt(var(x) + eps) · weight + bias`` over the last dimension.

        Args:
            x: ``[..., H]``; bfloat16, float16 or float32 for the kernel, any strides.

        Returns:
            ``[..., H]``, in the dtype that ``torch.nn.LayerNorm`` gives.

        Raises:
            FallbackError: the kernel does not serve it, and ``LIGER_MEGATRON_STRICT=1``.
            RuntimeError: ``torch.nn.LayerNorm`` does not serve it either.
        """
        result: torch.Tensor = self._forward(x, self.bias)
        return result

    def _kernel(self, x: torch.Tensor) -> torch.Tensor:
        global _layer_norm
        if _layer_norm is None:
            _layer_norm = OP.load("layer_norm")
        return _layer_norm(x, self.weight, self.bias, self.eps, zero_centered=self.zero_centered_gamma)

    def _torch(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return F.layer_norm(x, self.normalized_shape, weight, self.bias, self.eps)


class LigerMegatronRMSNorm(RMSNorm):
    """RMSNorm for a hand-built spec, with the constructor of Megatron-Core's norms.

    Args:
        config: a ``TransformerConfig``, or an object with some of its attributes. Read are ``normalization``,
            ``layernorm_zero_centered_gamma`` and ``sequence_parallel``.
        hidden_size: the size of the last dimension.
        eps: added to the mean of the squares.
        persist_layer_norm: accepted, and not read.
        zero_centered_gamma: the factor is ``1 + weight``; ``config`` may ask for it, too.
        normalization: accepted, and not read.

    Raises:
        ValueError: ``config`` describes another norm.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int | Sequence[int],
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "RMSNorm",
    ) -> None:
        if (found := getattr(config, "normalization", "RMSNorm")) != "RMSNorm":
            raise ValueError(f"LigerMegatronRMSNorm is RMSNorm, but config.normalization is {found!r}")
        super().__init__(
            hidden_size,
            eps,
            zero_centered_gamma=bool(
                zero_centered_gamma or getattr(config, "layernorm_zero_centered_gamma", False)
            ),
            sequence_parallel=bool(getattr(config, "sequence_parallel", False)),
            built_by=_MODULE.name,
        )
        self.config = config
        self.hidden_size = torch.Size(self.normalized_shape)


class TakenOver:
    """What the ``__new__`` of a taken-over class asks: a norm of ours, or an instance of upstream's class.

    Args:
        upstream: the release's own class, whose signature says which options there are.
    """

    # Upstream does not read the last three: config has the word.
    KNOWN = ("config", "hidden_size", "eps", "persist_layer_norm", "zero_centered_gamma", "normalization")

    def __init__(self, upstream: type[Any]) -> None:
        self.entry = OP.entry(upstream.__name__)
        self.upstream = upstream
        self.signature = inspect.signature(upstream)
        self.is_module = issubclass(upstream, nn.Module)

    def __call__(self, cls: type[Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """What ``cls.__new__(cls, *arguments, **named)`` gives.

        Raises:
            FallbackError: upstream's class has to serve, and ``LIGER_MEGATRON_STRICT=1``.
            Exception: what upstream's class raises, where it has to serve.
        """
        norm = self._ours(cls, arguments, named)
        if norm is not None:
            return norm
        new: Any = self.upstream.__new__
        return new(cls) if new is object.__new__ else new(cls, *arguments, **named)

    def _ours(self, cls: type[Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        try:
            bound = self.signature.bind(*arguments, **named)
        except TypeError:
            return None  # upstream says it in its own words; copies of its instances come without arguments
        bound.apply_defaults()
        given = bound.arguments
        config, hidden_size, eps = (given.pop(name) for name in ("config", "hidden_size", "eps"))
        build = _KINDS.get(config.normalization)
        if build is None:
            return None  # upstream has the error
        if not OP.enabled:
            self.entry.off += 1
            return None
        reason = platform().reason
        if self.is_module and self.upstream not in cls.__bases__:
            reason = DERIVED
        if reason is None:
            reason = later_option(self.signature.parameters, given, self.KNOWN)
        if reason is not None:
            self.entry.declined(reason)
            return None
        norm = build(config, hidden_size, eps, self.entry.name)
        if self.is_module and isinstance(norm, _Norm):
            vars(norm).update(config=config, hidden_size=torch.Size(norm.normalized_shape))
        return norm


def provided(kind: type[Any], has_residual: bool) -> type[Any]:
    """The class of a local spec's RMSNorms.

    Args:
        kind: upstream's.
        has_residual: they stand at the head of a residual branch.

    Returns:
        ``kind``, or :class:`ResidualNorm`, which asks the config whether the two are fused.
    """
    return ResidualNorm if has_residual and OP.enabled and platform().reason is None else kind


class ResidualNorm:
    """Builds what ``WrappedTorchNorm`` does, with the same arguments; an RMSNorm of ours, where the config
    has ``fused_residual_rmsnorm``, gives its residual too.

    Raises:
        FallbackError: the config asks for it, something in this release cannot take it, and
            ``LIGER_MEGATRON_STRICT=1``.
    """

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        norm = WrappedTorchNorm(*arguments, **named)
        config = named["config"] if "config" in named else arguments[0]
        if isinstance(norm, RMSNorm) and getattr(config, "fused_residual_rmsnorm", False):
            reason = _not_taken(config)
            norm.returns_residual = reason is None
            if reason is not None:
                OP.entry(_PROVIDER).declined(reason)
        return norm


def _not_taken(config: Any) -> str | None:
    """Why something in this release and config cannot take a norm's residual, or None."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    if getattr(config, "enable_mhc_connections", False):
        return STREAMS
    # Later releases, which have this option, do both.
    if "retain_input_tensors" in inspect.signature(CheckpointWithoutOutput).parameters:
        return None
    if config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or ()):
        return RECOMPUTED
    return OVERLAPPED if getattr(config, "overlap_moe_expert_parallel_comm", False) else None


def final_norm(spec: Any, upstream: Any) -> Any:
    """The class of the norm after the last layer, for a block that is made of one layer's spec.

    Args:
        spec: the layer's ``ModuleSpec``.
        upstream: what Megatron-Core takes whatever the layers have: TransformerEngine's norm where that can
            be imported, else Apex's, else torch's.

    Returns:
        The layer's own class where all its norms are of those that this op builds, else ``upstream``.
    """
    if not OP.enabled or platform().reason is not None:
        return upstream
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    local = (WrappedTorchNorm, FusedLayerNorm, LigerMegatronRMSNorm)
    submodules = getattr(spec, "submodules", None)
    places = [getattr(submodules, name, None) for name in ("pre_mlp_layernorm", "input_layernorm")]
    norms = [norm for norm in places if norm not in (None, IdentityOp)]
    norms = [WrappedTorchNorm if norm is ResidualNorm else norm for norm in norms]
    return norms[0] if norms and all(norm in local for norm in norms) else upstream


def _build(kind: type[_Norm]) -> Callable[..., Any]:
    def build(config: Any, hidden_size: int | Sequence[int], eps: float, built_by: str) -> _Norm:
        return kind(
            hidden_size,
            eps,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            sequence_parallel=config.sequence_parallel,
            built_by=built_by,
        )

    return build


def _l2_norm(config: Any, hidden_size: int, eps: float, built_by: str) -> nn.Module:
    """Upstream's own, without weights: the class that its ``WrappedTorchNorm`` names is not in torch."""
    from megatron.core.transformer.torch_norm import L2Norm

    norm: nn.Module = L2Norm(hidden_size, eps)
    return norm


_KINDS: dict[str, Callable[..., Any]] = {
    "RMSNorm": _build(RMSNorm),
    "LayerNorm": _build(LayerNorm),
    "L2Norm": _l2_norm,
}
