# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="misc"
"""SwiGLU: which calls the kernel serves, for the taken-over functions and for :class:`LigerMegatronSwiGLU`.

One decision, :func:`unserved`, made from types, dtypes, shapes, devices and settings, never from values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .dispatch import COMPILING, NOT_PLAIN, OFF, WATCHED, Op, is_plain, later_option, platform, watched

OP = Op("swiglu", kernel="swiglu.swiglu", launches=("swiglu_",))
_MODULE = OP.entry("LigerMegatronSwiGLU")

FP8_INPUT_STORE = "fp8_input_store"
CPU_OFFLOAD_INPUT = "cpu_offload_input"
CLAMP_VALUE = "clamp_value"
CLAMP = "a clamp that is no number"
CLAMP_AND_FP8 = "clamp_value together with fp8_input_store"
FP8_DEVICE = "fp8_input_store on a GPU below compute capability 8.9"
_SWITCHES = (FP8_INPUT_STORE, CPU_OFFLOAD_INPUT)
OPTIONS = "options that upstream's function does not have"
DTYPE = "a dtype other than bfloat16, float16 and float32"
DIMENSIONS = "input with other than 2 or 3 dimensions"
ODD = "a last dimension that is not 2n with n > 0"
BIAS_AND_WEIGHTS = "bias together with weights"
MIXED = "input and bias of different dtypes"
BIAS_SHAPE = "bias of a shape other than [2n]"
WEIGHTS_DTYPE = "weights of a dtype other than bfloat16, float16 and float32"
WEIGHTS_SHAPE = "weights of a shape other than [tokens, 1]"
DEVICES = "tensors on different devices"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_kernel: Callable[..., torch.Tensor] | None = None


def unserved(input: torch.Tensor, bias: torch.Tensor | None, *weights: torch.Tensor | None) -> str | None:
    """Why the kernel does not serve these tensors, as a short fixed text, or None when it does.

    ``weights`` is given, once, for the weighted form only.
    """
    if not is_plain(input):
        return NOT_PLAIN
    if watched():
        return WATCHED
    device = input.device
    if (reason := platform().unusable(device.type)) is not None:
        return reason
    if (dtype := input.dtype) not in _DTYPES:
        return DTYPE
    if input.dim() not in (2, 3):
        return DIMENSIONS
    width = input.size(-1)
    if width % 2 or not width:
        return ODD
    if bias is not None:
        if weights:
            return BIAS_AND_WEIGHTS
        if not is_plain(bias):
            return NOT_PLAIN
        if bias.dtype != dtype:
            return MIXED
        if bias.dim() != 1 or bias.size(0) != width:
            return BIAS_SHAPE
        if bias.device != device:
            return DEVICES
    for weight in weights:
        if weight is None or not is_plain(weight):
            return NOT_PLAIN
        if weight.dtype not in _DTYPES:
            return WEIGHTS_DTYPE
        if weight.dim() != 2 or weight.size(1) != 1 or weight.size(0) * width != input.numel():
            return WEIGHTS_SHAPE
        if weight.device != device:
            return DEVICES
    return None


@functools.cache
def _converts_float8(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 9)


def unserved_options(input: torch.Tensor, asked: Mapping[str, Any]) -> str | None:
    """The same of the options that are asked for, where the tensors are served."""
    if asked.get(FP8_INPUT_STORE) and input.is_cuda and not _converts_float8(input.get_device()):
        return FP8_DEVICE
    return None


def run(
    in_place: bool,
    input: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None = None,
    **asked: Any,
) -> torch.Tensor:
    """The kernel's result, ``[..., n]``, for what :func:`unserved` and :func:`unserved_options` allow."""
    global _kernel
    if _kernel is None:
        _kernel = OP.load()
    return _kernel(input, bias, weights, in_place=in_place, **asked)


def _serve(in_place: bool, input: torch.Tensor, bias: torch.Tensor | None, **asked: Any) -> torch.Tensor:
    output = run(in_place, input, bias, **asked)
    _MODULE.served(input)
    return output


_compiler: Any = torch.compiler
_serve_outside_graphs = _compiler.disable(_serve)


class TakenOver:
    """What stands in a taken-over function's place: decides, counts, and runs the kernel or ``upstream``.

    Args:
        name: the function's name.
        upstream: the release's own function, whose signature says which options there are.
        tensors: how many of its leading parameters are tensors.
    """

    def __init__(self, name: str, upstream: Callable[..., torch.Tensor], tensors: int) -> None:
        self.entry = OP.entry(name)
        self.upstream = upstream
        self.options = dict(list(inspect.signature(upstream).parameters.items())[tensors:])
        self.by_default = self.asks_for((), {})

    def asks_for(self, options: Sequence[Any], named: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """What these options, by position and by name, ask of the kernel, and why it does not serve them:
        None when it does.
        """
        given = dict(zip(self.options, options))
        if len(given) != len(options) or not named.keys() <= self.options.keys() - given.keys():
            return OPTIONS, {}
        given.update(named)
        asked: dict[str, Any] = {
            name: True
            for name in _SWITCHES
            if name in self.options and given.get(name, self.options[name].default)
        }
        reason = later_option(self.options, given, (*_SWITCHES, CLAMP_VALUE))
        if CLAMP_VALUE in self.options:
            clamp = given.get(CLAMP_VALUE, self.options[CLAMP_VALUE].default)
            if clamp is not None and not isinstance(clamp, (int, float)):
                return reason or CLAMP, asked
            if clamp is not None and clamp > 0:  # upstream clamps at no other
                asked[CLAMP_VALUE] = float(clamp)
                if asked.get(FP8_INPUT_STORE):
                    reason = reason or CLAMP_AND_FP8
        return reason, asked

    def __call__(
        self, tensors: tuple[torch.Tensor, ...], options: Sequence[Any], named: Mapping[str, Any]
    ) -> torch.Tensor:
        """Serve one call: its tensors, and the options that followed them by position and by name."""
        entry = self.entry
        if not OP.enabled:
            if not torch.compiler.is_compiling():
                entry.skipped(tensors[0])
            return self.upstream(*tensors, *options, **named)
        if torch.compiler.is_compiling():
            entry.traced()
            return self.upstream(*tensors, *options, **named)
        reason, asked = self.asks_for(options, named) if options or named else self.by_default
        if reason is None:
            reason = unserved(*tensors) or unserved_options(tensors[0], asked)
        if reason is None:
            output = run(OP.in_place, *tensors, **asked)
            entry.served(tensors[0])
            return output
        entry.fell_back(reason, tensors[0])
        return self.upstream(*tensors, *options, **named)


class LigerMegatronSwiGLU(nn.Module):
    """SwiGLU as a module: for a hand-built spec, or in the place of ``bias_swiglu_impl``.

    ``MLPSubmodules(activation_func=LigerMegatronSwiGLU)`` works: Megatron-Core builds it with its config,
    where that says ``use_te_activation_func=True`` (which excludes ``bias_activation_fusion=True``). Where it
    does not, Megatron-Core passes over the spec's activation in silence.

    Args:
        fallback_impl: called as ``bias_swiglu_impl`` is, for what the kernel does not serve; with a
            ``clamp_value`` by name where ``config`` clamps, which that of released versions does not take.
        in_place: backward writes the gradient over the input's memory where that is safe (the kernel's
            docstring says where), and autograd raises when that input is needed again;
            ``LIGER_MEGATRON_IN_PLACE=swiglu`` asks for it too.
        config: a ``TransformerConfig``, read once for the clamp (``activation_func_clamp_value``, after the
            bias) and for what this activation cannot be.

    Raises:
        ValueError: ``config`` describes another activation than SwiGLU, a shifted one, or a clamp that is not
            positive.
    """

    def __init__(
        self,
        fallback_impl: Callable[..., torch.Tensor] | None = None,
        in_place: bool = False,
        config: Any = None,
    ) -> None:
        super().__init__()
        self.fallback_impl = fallback_impl
        self.in_place = in_place
        for name, right in (
            ("gated_linear_unit", True),
            ("activation_func", F.silu),
            ("glu_linear_offset", 0.0),
        ):
            if (value := getattr(config, name, right)) != right:
                raise ValueError(f"LigerMegatronSwiGLU is silu(gate) * up, but config.{name} is {value!r}")
        self.clamp_value: float | None = getattr(config, "activation_func_clamp_value", None)
        if self.clamp_value is not None and not self.clamp_value > 0:
            raise ValueError(f"config.activation_func_clamp_value is {self.clamp_value!r}, not positive")

    def forward(
        self,
        input: torch.Tensor,
        bias: torch.Tensor | None = None,
        fp8_input_store: bool = False,
        cpu_offload_input: bool = False,
    ) -> torch.Tensor:
        """``silu(gate) * up`` of ``input + bias``, with gate in ``[0, n)`` and up in ``[n, 2n)``, clamped.

        Args:
            input: ``[tokens, 2n]`` or ``[s, b, 2n]``; bfloat16, float16 or float32.
            bias: ``[2n]`` in the input's dtype, or None.
            fp8_input_store, cpu_offload_input: as in ``bias_swiglu_impl``.

        Returns:
            ``[tokens, n]`` or ``[s, b, n]``, in the input's dtype.

        Raises:
            ValueError: the input's dimensions are other than 2 or 3, or the last one is odd or zero.
            RuntimeError: the kernel does not serve the call and there is no ``fallback_impl``.
            FallbackError: it does not, there is one, and ``LIGER_MEGATRON_STRICT=1``.
        """
        if input.dim() not in (2, 3):
            raise ValueError(f"input must be [tokens, 2n] or [s, b, 2n], not {list(input.shape)}")
        if input.size(-1) % 2 or not input.size(-1):
            raise ValueError(f"the last dimension must be 2n, gate and up, with n > 0, not {input.size(-1)}")
        asked: dict[str, Any] = {
            FP8_INPUT_STORE: bool(fp8_input_store),
            CPU_OFFLOAD_INPUT: bool(cpu_offload_input),
        }
        clamp = {} if self.clamp_value is None else {"clamp_value": self.clamp_value}
        compiling = torch.compiler.is_compiling()
        if not OP.enabled:
            reason: str | None = OFF
        elif compiling and self.fallback_impl is not None:
            reason = COMPILING
        else:
            reason = unserved(input, bias) or unserved_options(input, asked)
        if reason is None:
            serve: Callable[..., torch.Tensor] = _serve_outside_graphs if compiling else _serve
            return serve(self.in_place or OP.in_place, input, bias, **asked, **clamp)
        if self.fallback_impl is None:
            raise RuntimeError(
                f"LigerMegatronSwiGLU does not serve this call: {reason}. Give it a fallback_impl, such as "
                "megatron.core.fusions.fused_bias_swiglu.bias_swiglu_impl"
            )
        if compiling:
            if OP.enabled:
                _MODULE.traced()
        elif OP.enabled:
            _MODULE.fell_back(reason, input)
        else:
            _MODULE.skipped(input)
        return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input, **clamp)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Empty: there is nothing to save. Megatron-Core's MLP asks each of its submodules."""
        return {}
