# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""What the autograd functions of all kernels share: gradients without gradients, and memory used again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Gradients = tuple[torch.Tensor | None, ...]


class _Refused(torch.autograd.Function):
    """Hands a gradient on as it is, and raises where it is differentiated in its turn."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Gradients:
        raise RuntimeError(
            "trying to differentiate twice a function that was marked with @once_differentiable"
        )


def once_differentiable(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """For a `backward` that launches kernels: its results raise when they are differentiated.

    `torch.autograd.function.once_differentiable` leaves them without a graph where the incoming gradient is a
    constant, so that a penalty on gradients would silently lose its term.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *incoming: torch.Tensor) -> Gradients:
        if not torch.is_grad_enabled():
            return backward(ctx, *incoming)
        sources = [x for x in (*incoming, *ctx.saved_tensors) if x is not None and x.requires_grad]
        with torch.no_grad():
            results = backward(ctx, *incoming)
        return tuple(x if x is None or not sources else _Refused.apply(x, *sources) for x in results)

    return once


@dataclass(frozen=True)
class Reuse:
    """Memory of a saved tensor that its gradient may take: where it is, and its version when it was saved."""

    address: int
    strides: tuple[int, ...]
    version: int

    def allows(self, saved: torch.Tensor) -> bool:
        """Whether `saved`, as the backward gets it back, still is that memory.

        Hooks on saved tensors can bring back another tensor, which may be somebody's: it is left alone.

        Raises:
            RuntimeError: it is, and was written to since, which autograd does not check under such hooks.
        """
        if (saved.data_ptr(), saved.stride()) != (self.address, self.strides):
            return False
        if saved._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace"
                f" operation: it is at version {saved._version}; expected version {self.version} instead"
            )
        return True


def reuse(x: torch.Tensor) -> Reuse | None:
    """Leave to overwrite `x` in the backward; None for a leaf, a view of one, and what overlaps itself."""
    owner = x if x._base is None else x._base
    if x.is_leaf or owner.is_leaf or overlaps(x):
        return None
    return Reuse(x.data_ptr(), x.stride(), x._version)


def overlaps(x: torch.Tensor) -> bool:
    """Whether two indices of `x` may share an element."""
    if x.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride()) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
