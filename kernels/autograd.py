# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""What the autograd functions of all kernels share: gradients without gradients, and memory used again."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
        # A copy that was saved in an input's place has no graph, so that the sources cannot be asked for.
        source = torch.zeros((), requires_grad=True)
        with torch.no_grad():
            results = backward(ctx, *incoming)
        return tuple(x if x is None else _Refused.apply(x, source) for x in results)

    return once


def may_overwrite(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the backward may write the gradient of `x` over `x`, where `others` are still to be read.

    Not if `x` is a leaf or a view of one, overlaps itself or shares memory with one of `others`. Not under
    hooks on saved tensors (offloading, recomputation) either: they bring back other tensors, and autograd
    does not check whether those were written to.
    """
    owner = x if x._base is None else x._base
    return not (x.is_leaf or owner.is_leaf or hooked() or overlaps(x) or shares_memory(x, *others))


def hooked() -> bool:
    """Whether hooks on saved tensors (offloading, recomputation) are at work; torch before 2.8 does not tell:
    there they may be."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(False) is not None


def shares_memory(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether one of `others` lies in the storage of `x`."""
    storage = x.untyped_storage().data_ptr()
    return any(other is not None and other.untyped_storage().data_ptr() == storage for other in others)


def plain(x: torch.Tensor) -> torch.Tensor:
    """`x` as memory holds it: without a pending sign, waited for where a collective is still writing it."""
    if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
        x = x.clone()
    return x.resolve_neg()


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
