# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator,misc"
"""Rows of a strided tensor, addressed by kernels in place: by one row stride or by two.

Two reach a slice of heads, `[tokens, heads, head_dim]` in a wider buffer, and a batch that is transposed in
memory, `[s, b, h]` in `[b, s, h]`: the row stride differs between tokens and heads, but is the same for all
of either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Rows:
    """`tensor` read as `[rows, tensor.shape[-1]]`, a row's elements adjacent.

    Row `r` begins at element `r * stride`, or, if `inner` is given, at
    `r // inner * stride + r % inner * inner_stride`.
    """

    tensor: torch.Tensor
    stride: int
    inner: int | None = None
    inner_stride: int | None = None


def rows_of(x: torch.Tensor) -> Rows:
    """The rows of `x`; of a contiguous copy of it where two row strides do not reach them all."""
    n = x.shape[-1]
    if x.is_contiguous():
        return Rows(x, n)
    sizes, strides = x.shape, x.stride()
    if strides[-1] == 1 or n == 1:
        levels: list[tuple[int, int]] = []  # size and stride, from the innermost, as few as there can be
        for size, stride in zip(sizes[-2::-1], strides[-2::-1]):
            if size == 1:
                continue
            if levels and stride == levels[-1][0] * levels[-1][1]:
                levels[-1] = (levels[-1][0] * size, levels[-1][1])
            else:
                levels.append((size, stride))
        if not levels:
            return Rows(x, n)
        if len(levels) == 1:
            return Rows(x, levels[0][1])
        if len(levels) == 2:
            return Rows(x, levels[1][1], *levels[0])
    return Rows(x.contiguous(), n)


@triton.jit
def row_offsets(o_r, rows, stride, inner, inner_stride):
    """Offsets in elements of rows `o_r` (64 bits), with the fields of `Rows`.

    Divides in the width of `rows`: offsets of rows at or past `rows` are of no use.
    """
    if inner is None:
        o_x = o_r * stride
    else:
        o_row = o_r.to(rows.dtype)
        o_outer = o_row // inner
        o_inner = o_row - o_outer * inner
        o_x = o_outer.to(tl.int64) * stride + o_inner.to(tl.int64) * inner_stride
    return o_x
