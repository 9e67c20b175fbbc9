# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="misc"
"""SwiGLU: its switch, what serves it, and :class:`LigerMegatronSwiGLU`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .dispatch import COMPILING, OFF, Op
from .gated import CLAMP_VALUE, CPU_OFFLOAD_INPUT, FP8_INPUT_STORE, Form, unserved_options

OP = Op("swiglu", kernel="gated.swiglu", launches=("swiglu_",))
# From 0.20 on upstream clamps, with a positive number.
SWIGLU = Form(OP, "swiglu", (FP8_INPUT_STORE, CPU_OFFLOAD_INPUT, CLAMP_VALUE), clamps_if_positive=True)
_MODULE = OP.entry("LigerMegatronSwiGLU")


def _serve(in_place: bool, input: torch.Tensor, bias: torch.Tensor | None, **asked: Any) -> torch.Tensor:
    output = SWIGLU.run(in_place, input, bias, **asked)
    _MODULE.served(input)
    return output


_compiler: Any = torch.compiler
_serve_outside_graphs = _compiler.disable(_serve)


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
            reason = SWIGLU.unserved(input, bias) or unserved_options(input, asked)
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
