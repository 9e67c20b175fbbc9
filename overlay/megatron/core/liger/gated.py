# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="misc"
"""SwiGLU and its kin: which calls the kernels serve, for the functions that are taken over.

One decision, :meth:`Form.unserved`, made from types, dtypes, shapes, devices and settings, never from values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .dispatch import NOT_PLAIN, WATCHED, Op, is_plain, later_option, platform, watched

FP8_INPUT_STORE = "fp8_input_store"
CPU_OFFLOAD_INPUT = "cpu_offload_input"
LINEAR_OFFSET = "linear_offset"
CLAMP_VALUE = "clamp_value"

FP8_DEVICE = "fp8_input_store on a GPU below compute capability 8.9"
FP8_CLAMPED = "fp8_input_store together with a clamp"
NO_NUMBER = "a linear_offset or clamp_value that is no number"
CLAMP_SIGN = "a clamp_value that is not positive"
OPTIONS = "options that upstream's function does not have"
DTYPE = "a dtype other than bfloat16, float16 and float32"
DIMENSIONS = "input with other than 2 or 3 dimensions"
ODD = "a last dimension that is not 2n with n > 0"
NO_COLUMNS = "a last dimension of 0"
BIAS_AND_WEIGHTS = "bias together with weights"
MIXED = "input and bias of different dtypes"
BIAS_SHAPE = "bias of a shape other than [2n]"
WEIGHTS_DTYPE = "weights of a dtype other than bfloat16, float16 and float32"
WEIGHTS_SHAPE = "weights of a shape other than [tokens, 1]"
DEVICES = "tensors on different devices"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def _converts_float8(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 9)


class Form:
    """One activation of the kernels, and what it serves.

    Args:
        op: the op that it belongs to.
        function: its name in the kernels' module.
        options: those of upstream's that it takes.
        gated: whether rows are 2n wide, a gate and its partner.
        bias_and_weights: whether upstream has both together.
        clamps_if_positive: whether upstream takes a clamp of another value for none.
    """

    def __init__(
        self,
        op: Op,
        function: str,
        options: tuple[str, ...] = (),
        *,
        gated: bool = True,
        bias_and_weights: bool = False,
        clamps_if_positive: bool = False,
    ) -> None:
        self.op = op
        self.function = function
        self.options = options
        self.gated = gated
        self.bias_and_weights = bias_and_weights
        self.clamps_if_positive = clamps_if_positive
        self._kernel: Callable[..., torch.Tensor] | None = None

    def unserved(
        self, input: torch.Tensor, bias: torch.Tensor | None, *weights: torch.Tensor | None
    ) -> str | None:
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
        if not width or (self.gated and width % 2):
            return ODD if self.gated else NO_COLUMNS
        if bias is not None:
            if weights and not self.bias_and_weights:
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

    def run(
        self,
        in_place: bool,
        input: torch.Tensor,
        bias: torch.Tensor | None,
        weights: torch.Tensor | None = None,
        **asked: Any,
    ) -> torch.Tensor:
        """The kernel's result, ``[..., n]``, for what :meth:`unserved` and :func:`unserved_options` allow."""
        if self._kernel is None:
            self._kernel = self.op.load(self.function)
        if not self.gated:
            return self._kernel(input, weights, in_place=in_place)
        return self._kernel(input, bias, weights, in_place=in_place, **asked)


def unserved_options(input: torch.Tensor, asked: Mapping[str, Any]) -> str | None:
    """Why options that are asked for are not served, or None, where the tensors are served."""
    if asked.get(FP8_INPUT_STORE):
        if CLAMP_VALUE in asked:
            # Upstream stores what the clamp gives, and knows from the input itself where it clamped.
            return FP8_CLAMPED
        if input.is_cuda and not _converts_float8(input.get_device()):
            return FP8_DEVICE
    return None


class TakenOver:
    """What stands in a taken-over function's place: decides, counts, and runs the kernel or ``upstream``.

    Args:
        form: what serves it.
        name: the function's name.
        upstream: the release's own function, whose signature says which options there are.
        tensors: how many of its leading parameters are tensors.
    """

    def __init__(self, form: Form, name: str, upstream: Callable[..., torch.Tensor], tensors: int) -> None:
        self.form = form
        self.entry = form.op.entry(name)
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
        asked: dict[str, Any] = {}
        reason = None
        for name in self.form.options:
            if name not in self.options:
                continue
            value = given.get(name, self.options[name].default)
            if name in (LINEAR_OFFSET, CLAMP_VALUE):
                if value is None and name == CLAMP_VALUE:
                    continue
                if not isinstance(value, (int, float)):
                    reason = NO_NUMBER
                elif name == CLAMP_VALUE and not value > 0:
                    if self.form.clamps_if_positive:
                        continue
                    reason = CLAMP_SIGN
                asked[name] = value
            elif value:
                asked[name] = True
        return reason or later_option(self.options, given, self.form.options), asked

    def __call__(
        self, tensors: tuple[torch.Tensor, ...], options: Sequence[Any], named: Mapping[str, Any]
    ) -> torch.Tensor:
        """Serve one call: its tensors, and the options that followed them by position and by name."""
        entry, form = self.entry, self.form
        if not form.op.enabled:
            if not torch.compiler.is_compiling():
                entry.skipped(tensors[0])
            return self.upstream(*tensors, *options, **named)
        if torch.compiler.is_compiling():
            entry.traced()
            return self.upstream(*tensors, *options, **named)
        reason, asked = self.asks_for(options, named) if options or named else self.by_default
        # Without a gate there is no bias either.
        served: tuple[Any, ...] = tensors if form.gated else (tensors[0], None, *tensors[1:])
        if reason is None:
            reason = form.unserved(*served) or unserved_options(tensors[0], asked)
        if reason is None:
            output = form.run(form.op.in_place, *served, **asked)
            entry.served(tensors[0])
            return output
        entry.fell_back(reason, tensors[0])
        return self.upstream(*tensors, *options, **named)
