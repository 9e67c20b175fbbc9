# SPDX-License-Identifier: Apache-2.0
"""What the launchers of all kernels share: launch counts, launch shapes, rows and devices of tensors."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton

#: Kernel launches of this process by name; read by the report and by tests.
LAUNCHES: Counter[str] = Counter()

#: Collectives that this process has taken part in, by name of the op.
COLLECTIVES: Counter[str] = Counter()


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: a program's tile of `rows` × `block` columns, warps, pipeline stages."""

    rows: int
    block: int
    warps: int
    stages: int = 1

    def column_blocks(self, n: int) -> int:
        """The number of column blocks in a row of `n` columns."""
        return -(-n // self.block)

    def row_blocks(self, rows: int) -> int:
        """The number of row blocks in `rows` rows."""
        return -(-rows // self.rows)


def row_stride(x: torch.Tensor) -> int | None:
    """Elements from one row of `x`, read as `[rows, x.shape[-1]]`, to the next.

    None where no single stride reaches all rows or a row's elements are not adjacent.
    """
    if x.is_contiguous():
        return x.shape[-1]
    sizes, strides = x.shape, x.stride()
    if strides[-1] != 1 and sizes[-1] != 1:
        return None
    step: int | None = None
    reach = 0
    for size, stride in zip(sizes[-2::-1], strides[-2::-1]):
        if size == 1:
            continue
        if step is None:
            step = stride
        elif stride != reach:
            return None
        reach = stride * size
    return sizes[-1] if step is None else step


def as_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`x` itself, or one contiguous copy where its rows have no common stride, and the row stride."""
    stride = row_stride(x)
    return (x.contiguous(), x.shape[-1]) if stride is None else (x, stride)


def device_guard(x: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the device of `x` current: Triton launches on the current one, whatever its arguments are on."""
    return torch.cuda.device(x.get_device()) if x.is_cuda else nullcontext()


@functools.cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def multiprocessors(x: torch.Tensor) -> int:
    """Multiprocessors of the device of `x`; 1 in the interpreter."""
    return _multiprocessors(x.get_device()) if x.is_cuda else 1


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`; 1 for 0."""
    return int(triton.next_power_of_2(max(n, 1)))
