# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="untyped-decorator,misc"
"""RMSNorm and LayerNorm: one forward and one backward, in which LayerNorm is RMSNorm of rows less their mean.

A row is read from memory once in each direction. In the backward a fixed number of programs shares the rows:
program `p` of `P` takes row blocks `p`, `p + P`, …, with the weight and the sums for its gradient in
registers, and writes these sums once, to its own row of a small float32 buffer that one further kernel adds
up: no atomics, and the order of addition is always the same. A row too long for registers is read twice, in
blocks of columns: for its sums first.

A norm at the head of a residual branch has the other branch's gradient added to its input's, before that is
rounded: one pass over memory less than adding the two afterwards.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .autograd import once_differentiable, plain
from .launches import LAUNCHES, Launch, device_guard, multiprocessors, next_power_of_2
from .rows import Rows, row_offsets, rows_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = False
) -> torch.Tensor:
    """The same in plain PyTorch, in the dtypes given: `x` `[..., H]`, `weight` `[H]`."""
    return F.rms_norm(x, weight.shape, weight + 1 if zero_centered else weight, eps)


def layer_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
) -> torch.Tensor:
    """The same in plain PyTorch, in the dtype given: `x` `[..., H]`, `weight` and `bias` `[H]`."""
    return F.layer_norm(x, weight.shape, weight + 1 if zero_centered else weight, bias, eps)


# --- Launch choices ---


@dataclass(frozen=True)
class NormLaunch(Launch):
    """A backward's launch, whose programs share the rows: `programs` of them to a multiprocessor.

    `reload`: the weight is read again for each row block instead of held in registers.
    """

    programs: int = 1
    reload: bool = False


# Rows of a multiple of so many elements are read and written 16 bytes at a time: what Triton knows of a size.
WIDE = 16
# Of other narrow rows, whose elements have an address each, a thread holds no more.
SINGLE_ACCESSES = 8
WARP_SIZE = 64 if torch.version.hip else 32
MAX_THREADS = 1024  # of one program, on every device

# Elements of a forward's tile and rows of one: narrow rows share it.
MIN_TILE = 2048
MAX_TILE_ROWS = 32

# The longest row in bytes that a program holds in registers without spills. The backward of LayerNorm, with
# the mean and a second parameter gradient, holds half of that, and one that adds the gradient of a residual
# to x's and sums the weight's no row of RELOAD_COLUMNS. Where rows are no multiple of WIDE, each
# element takes an address: both hold a quarter, with more threads.
MAX_FORWARD_ROW_BYTES = 65536
MAX_BACKWARD_ROW_BYTES = 32768

# From this width on registers are short, and the weight is read again for each row block.
RELOAD_COLUMNS = 16384

# Backward of rows up to so many columns, several to a tile: rows, warps of 32 lanes, programs to a
# multiprocessor, stages. Of 24 to 128 tried on an H200 with bf16 RMSNorm, these and those of the next table
# are within 3 % of the best at widths 64, 128, 192, 1024, 2048 … 16384. At 512 a fourth stage was best, and
# spills in float32 on sm_100.
_BACKWARD_OF_ROWS = (
    (64, 32, 4, 3, 3),
    (128, 32, 8, 2, 3),
    (256, 32, 16, 1, 3),
    (512, 4, 4, 3, 3),
    (1024, 4, 4, 2, 3),
)

# Backward of wider rows, up to so many bytes: warps, programs, stages.
_BACKWARD_OF_A_ROW = (
    (4096, 4, 2, 4),
    (8192, 4, 2, 3),
    (16384, 8, 1, 3),
    (MAX_BACKWARD_ROW_BYTES, 16, 1, 1),
)

# Longer rows: the forward and the row sums of a whole row, and the backward of a block of columns.
LONG_ROW = Launch(rows=1, block=4096, warps=8)
LONG_ROW_BACKWARD = NormLaunch(rows=1, block=4096, warps=16, stages=3, programs=2)

# The sums of the partials: many of few columns, or few of many.
REDUCE = Launch(rows=64, block=16, warps=4)
REDUCE_LONG_ROW = Launch(rows=16, block=256, warps=8)


def _block(n: int) -> int:
    """Columns of a tile that holds whole rows of `n` columns."""
    return max(next_power_of_2(n), 16)


@functools.cache
def choose_forward(n: int, element_size: int, warp_size: int = WARP_SIZE) -> Launch:
    """The launch of the forward for rows of `n` columns."""
    block = _block(n)
    rows = max(1, min(MIN_TILE // block, MAX_TILE_ROWS))
    crowded = 4 if n % WIDE else 1
    if block * element_size > MAX_FORWARD_ROW_BYTES // crowded:
        return replace(LONG_ROW, warps=LONG_ROW.warps * 32 // warp_size)
    threads = min(max(rows * block * crowded // 32, 128), MAX_THREADS)
    return Launch(rows, block, threads // warp_size)


@functools.cache
def choose_backward(
    n: int,
    element_size: int,
    layer_norm: bool,
    sums: int,
    shared_memory: int,
    residual: bool = False,
    warp_size: int = WARP_SIZE,
) -> NormLaunch:
    """The launch of the backward for rows of `n` columns.

    `sums`: how many parameter gradients there are to add up. `shared_memory`: the bytes that one program can
    have; they bound the stages. `residual`: another branch's gradient is added.
    """
    block = _block(n)
    size = n * element_size
    crowded = (2 if layer_norm and sums else 1) * (4 if n % WIDE else 1)
    full = residual and sums and block >= RELOAD_COLUMNS
    if full or block * element_size > MAX_BACKWARD_ROW_BYTES // crowded:
        launch = LONG_ROW_BACKWARD
    else:
        choices = [choice[1:] for choice in _BACKWARD_OF_ROWS if n <= choice[0]]
        choices += [(1, *choice[1:]) for choice in _BACKWARD_OF_A_ROW if size <= choice[0]]
        rows, warps, programs, stages = choices[0]
        launch = NormLaunch(rows, block, warps, stages, programs, reload=block >= RELOAD_COLUMNS)
    threads, stages = launch.warps * 32, 1
    if n % WIDE and launch.rows > 1:
        threads = min(2 * threads, MAX_THREADS // 2)  # with all of them each has few registers
        launch = replace(launch, rows=min(launch.rows, max(1, SINGLE_ACCESSES * threads // block)))
    elif n % WIDE:
        threads = min(2 * threads, MAX_THREADS)
    else:
        # A stage holds x, dy and the gradient to be added; some is for the sums across warps.
        stage = (3 if residual else 2) * launch.rows * launch.block * element_size
        stages = min(launch.stages, max(1, (shared_memory - 4096) // stage))
    return replace(launch, stages=stages, warps=threads // warp_size)


@functools.cache
def _shared_memory(index: int) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def shared_memory(x: torch.Tensor) -> int:
    """Bytes of shared memory that one program can have on the device of `x`."""
    return _shared_memory(x.get_device()) if x.is_cuda else 65536


# --- Kernels ---
# Bare names are pointers, p_ addresses, b_ loaded blocks, o_ offsets, m_ masks, i_ program indices. Rows are
# counted in 64 bits before a stride multiplies them. `rows` changes with every batch and must not specialise;
# n and the strides belong to the model, and Triton derives the 16-byte accesses from them. `mean` makes it
# LayerNorm.


@triton.jit
def _load_weight(weight, o_n, m_n, ZERO_CENTERED: tl.constexpr):
    b_weight = tl.load(weight + o_n, mask=m_n, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        b_weight += 1.0
    return b_weight


@triton.jit
def _scale(b_normed, weight, bias, o_n, m_n, ZERO_CENTERED: tl.constexpr):
    b_out = b_normed * _load_weight(weight, o_n, m_n, ZERO_CENTERED)
    if bias is not None:
        b_out += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    return b_out


@triton.jit(do_not_specialize=["rows"])
def norm_forward_kernel(
    x,
    weight,
    bias,
    out,
    mean,
    rstd,
    stride_x,
    inner_x,
    inner_stride_x,
    rows,
    n,
    eps,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program holds whole rows."""
    o_n = tl.arange(0, BLOCK)[None, :]
    m_n = o_n < n
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    m_r = o_r < rows
    m = m_r & m_n
    p_x = x + row_offsets(o_r, rows, stride_x, inner_x, inner_stride_x) + o_n
    b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    if mean is not None:
        b_mean = tl.sum(b_x, axis=1)[:, None] / n
        b_x = tl.where(m, b_x - b_mean, 0.0)
        # What rounding has left of the mean counts when the values lie far from 0 and close together.
        b_rest = tl.sum(b_x, axis=1)[:, None] / n
        b_x = tl.where(m, b_x - b_rest, 0.0)
        tl.store(mean + o_r, b_mean + b_rest, mask=m_r)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1)[:, None] / n + eps)
    tl.store(rstd + o_r, b_rstd, mask=m_r)
    b_out = _scale(b_x * b_rstd, weight, bias, o_n, m_n, ZERO_CENTERED)
    tl.store(out + o_r * n + o_n, b_out.to(out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["rows"])
def norm_long_forward_kernel(
    x,
    weight,
    bias,
    out,
    mean,
    rstd,
    stride_x,
    inner_x,
    inner_stride_x,
    rows,
    n,
    eps,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program reads a row twice, in blocks of columns."""
    o_r = tl.program_id(0).to(tl.int64)
    p_x = x + row_offsets(o_r, rows, stride_x, inner_x, inner_stride_x)
    if mean is not None:
        # About a value near the mean, which loses no digits of values far from 0 and close together.
        o_n = tl.arange(0, BLOCK)
        b_x = tl.load(p_x + o_n, mask=o_n < n, other=0.0).to(tl.float32)
        b_near = tl.sum(b_x, axis=0) / tl.minimum(n, BLOCK)
        b_mean = 0.0
        b_squares = 0.0
        for i_first in range(0, n, BLOCK):
            o_n = i_first + tl.arange(0, BLOCK)
            m_n = o_n < n
            b_x = tl.load(p_x + o_n, mask=m_n, other=0.0).to(tl.float32)
            # Of each block the mean and the squares about it, merged with those of the blocks before.
            b_x = tl.where(m_n, b_x - b_near, 0.0)
            b_count = tl.minimum(n - i_first, BLOCK).to(tl.float32)
            b_block_mean = tl.sum(b_x, axis=0) / b_count
            b_x = tl.where(m_n, b_x - b_block_mean, 0.0)
            b_step = b_block_mean - b_mean
            b_share = b_count / (i_first + b_count)
            b_mean += b_step * b_share
            b_squares += tl.sum(b_x * b_x, axis=0) + b_step * b_step * (i_first * b_share)
        tl.store(mean + o_r, b_near + b_mean)
    else:
        b_sums = tl.zeros([BLOCK], dtype=tl.float32)
        for i_first in range(0, n, BLOCK):
            o_n = i_first + tl.arange(0, BLOCK)
            b_x = tl.load(p_x + o_n, mask=o_n < n, other=0.0).to(tl.float32)
            b_sums += b_x * b_x
        b_squares = tl.sum(b_sums, axis=0)
    b_rstd = tl.rsqrt(b_squares / n + eps)
    tl.store(rstd + o_r, b_rstd)
    for i_first in range(0, n, BLOCK):
        o_n = i_first + tl.arange(0, BLOCK)
        m_n = o_n < n
        b_x = tl.load(p_x + o_n, mask=m_n, other=0.0).to(tl.float32)
        if mean is not None:
            b_x = (b_x - b_near) - b_mean
        b_out = _scale(b_x * b_rstd, weight, bias, o_n, m_n, ZERO_CENTERED)
        tl.store(out + o_r * n + o_n, b_out.to(out.dtype.element_ty), mask=m_n)


@triton.jit(do_not_specialize=["rows"])
def norm_row_sums_kernel(
    x,
    weight,
    dy,
    mean,
    rstd,
    projection,
    average,
    stride_x,
    inner_x,
    inner_stride_x,
    stride_dy,
    inner_dy,
    inner_stride_dy,
    rows,
    n,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each row, what its gradient needs beforehand: the means of weight · dy · x̂ and of weight · dy."""
    o_r = tl.program_id(0).to(tl.int64)
    p_x = x + row_offsets(o_r, rows, stride_x, inner_x, inner_stride_x)
    p_dy = dy + row_offsets(o_r, rows, stride_dy, inner_dy, inner_stride_dy)
    b_rstd = tl.load(rstd + o_r)
    if mean is not None:
        b_mean = tl.load(mean + o_r)
    b_projection = tl.zeros([BLOCK], dtype=tl.float32)
    b_average = tl.zeros([BLOCK], dtype=tl.float32)
    for i_first in range(0, n, BLOCK):
        o_n = i_first + tl.arange(0, BLOCK)
        m_n = o_n < n
        b_x = tl.load(p_x + o_n, mask=m_n, other=0.0).to(tl.float32)
        if mean is not None:
            b_x = tl.where(m_n, b_x - b_mean, 0.0)
        b_dy = tl.load(p_dy + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_dy *= _load_weight(weight, o_n, m_n, ZERO_CENTERED)
        b_projection += b_dy * (b_x * b_rstd)
        b_average += b_dy
    tl.store(projection + o_r, tl.sum(b_projection, axis=0) / n)
    if mean is not None:
        tl.store(average + o_r, tl.sum(b_average, axis=0) / n)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    x,
    weight,
    dy,
    mean,
    rstd,
    projection,
    average,
    dresidual,
    dx,
    dweight_partials,
    dbias_partials,
    stride_x,
    inner_x,
    inner_stride_x,
    stride_dy,
    inner_dy,
    inner_stride_dy,
    stride_dresidual,
    inner_dresidual,
    inner_stride_dresidual,
    rows,
    n,
    column_blocks,
    ZERO_CENTERED: tl.constexpr,
    RELOAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (split, column block) takes every `splits`-th row block and fills row `split` of the partials.

    With one column block it finds the row sums itself; `projection` and `average` are those of longer rows.
    `dresidual` is added to `dx`.
    """
    i_split = tl.program_id(0) // column_blocks
    splits = tl.num_programs(0) // column_blocks
    o_n = (tl.program_id(0) % column_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    m_n = o_n < n
    if dx is not None and not RELOAD:
        b_weight = _load_weight(weight, o_n, m_n, ZERO_CENTERED)
    if dweight_partials is not None:
        b_dweight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    if dbias_partials is not None:
        b_dbias = tl.zeros([ROWS, BLOCK], dtype=tl.float32)

    for i_row_block in tl.range(i_split, tl.cdiv(rows, ROWS), splits, num_stages=STAGES):
        o_r = tl.cast(i_row_block, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        m_r = o_r < rows
        m = m_r & m_n
        p_x = x + row_offsets(o_r, rows, stride_x, inner_x, inner_stride_x) + o_n
        p_dy = dy + row_offsets(o_r, rows, stride_dy, inner_dy, inner_stride_dy) + o_n
        b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
        b_dy = tl.load(p_dy, mask=m, other=0.0).to(tl.float32)
        if dresidual is not None:
            o_dresidual = row_offsets(o_r, rows, stride_dresidual, inner_dresidual, inner_stride_dresidual)
            b_dresidual = tl.load(dresidual + o_dresidual + o_n, mask=m, other=0.0)
        b_rstd = tl.load(rstd + o_r, mask=m_r, other=0.0)
        if mean is not None:
            b_x = tl.where(m, b_x - tl.load(mean + o_r, mask=m_r, other=0.0), 0.0)
        b_x *= b_rstd
        if dweight_partials is not None:
            b_dweight += b_dy * b_x
        if dbias_partials is not None:
            b_dbias += b_dy
        if dx is not None:
            if RELOAD:
                b_dy *= _load_weight(weight, o_n, m_n, ZERO_CENTERED)
            else:
                b_dy *= b_weight
            if projection is not None:
                b_projection = tl.load(projection + o_r, mask=m_r, other=0.0)
            else:
                b_projection = tl.sum(b_dy * b_x, axis=1)[:, None] / n
            b_dx = b_dy - b_x * b_projection
            if mean is not None:
                if average is not None:
                    b_dx -= tl.load(average + o_r, mask=m_r, other=0.0)
                else:
                    b_dx -= tl.sum(b_dy, axis=1)[:, None] / n
            b_dx *= b_rstd
            if dresidual is not None:
                b_dx += b_dresidual.to(tl.float32)
            tl.store(dx + o_r * n + o_n, b_dx.to(dx.dtype.element_ty), mask=m)

    o_partials = i_split.to(tl.int64) * n + o_n
    if dweight_partials is not None:
        tl.store(dweight_partials + o_partials, tl.sum(b_dweight, axis=0)[None, :], mask=m_n)
    if dbias_partials is not None:
        tl.store(dbias_partials + o_partials, tl.sum(b_dbias, axis=0)[None, :], mask=m_n)


@triton.jit(do_not_specialize=["splits"])
def norm_reduce_kernel(
    dweight_partials, dbias_partials, dweight, dbias, splits, n, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds up the partials of one parameter, or, on a grid of two rows, of both."""
    if dweight is not None:
        partials = dweight_partials
        total = dweight
        if dbias is not None:  # noqa: SIM102 (decided when it is compiled, the next when it runs)
            if tl.program_id(1) == 1:
                partials = dbias_partials
                total = dbias
    else:
        partials = dbias_partials
        total = dbias
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    m_n = o_n < n
    b_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for i_row in range(0, splits, ROWS):
        o_r = i_row + tl.arange(0, ROWS)[:, None]
        b_sum += tl.load(partials + o_r.to(tl.int64) * n + o_n, mask=(o_r < splits) & m_n, other=0.0)
    tl.store(total + o_n, tl.sum(b_sum, axis=0)[None, :].to(total.dtype.element_ty), mask=m_n)


# --- Launchers: at least one row ---


def _forward(
    x: Rows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
    zero_centered: bool,
) -> None:
    """Writes `out`, `rstd`, and `mean` where it is given, which makes it LayerNorm."""
    n = x.tensor.shape[-1]
    rows = rstd.numel()
    launch = choose_forward(n, x.tensor.element_size())
    programs = launch.row_blocks(rows)
    arguments = (
        x.tensor,
        weight,
        bias,
        out,
        mean,
        rstd,
        x.stride,
        x.inner,
        x.inner_stride,
        rows,
        n,
        eps,
        zero_centered,
    )
    with device_guard(x.tensor):
        if launch.column_blocks(n) == 1:
            norm_forward_kernel[(programs,)](
                *arguments, ROWS=launch.rows, BLOCK=launch.block, num_warps=launch.warps
            )
        else:
            norm_long_forward_kernel[(programs,)](*arguments, BLOCK=launch.block, num_warps=launch.warps)
    LAUNCHES["norm_forward"] += 1


def _row_sums(
    x: Rows,
    weight: torch.Tensor,
    dy: Rows,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of each row the mean of `weight · dy · x̂`, and for LayerNorm that of `weight · dy`."""
    n = x.tensor.shape[-1]
    projection = torch.empty(rstd.shape, dtype=torch.float32, device=rstd.device)
    average = None if mean is None else torch.empty(rstd.shape, dtype=torch.float32, device=rstd.device)
    with device_guard(x.tensor):
        norm_row_sums_kernel[(rstd.numel(),)](
            x.tensor,
            weight,
            dy.tensor,
            mean,
            rstd,
            projection,
            average,
            x.stride,
            x.inner,
            x.inner_stride,
            dy.stride,
            dy.inner,
            dy.inner_stride,
            rstd.numel(),
            n,
            zero_centered,
            BLOCK=LONG_ROW.block,
            num_warps=LONG_ROW.warps,
        )
    LAUNCHES["norm_row_sums"] += 1
    return projection, average


def _backward(
    x: Rows,
    weight: torch.Tensor,
    dy: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    zero_centered: bool,
    dresidual: torch.Tensor | None,
    dx: torch.Tensor | None,
    dweight: torch.Tensor | None,
    dbias: torch.Tensor | None,
) -> None:
    """Writes `dx`, to which `dresidual` is added, `dweight` and `dbias`, each where it is given."""
    n = x.tensor.shape[-1]
    rows = rstd.numel()
    dy_rows = rows_of(plain(dy))
    added = None if dresidual is None or dx is None else rows_of(plain(dresidual))
    sums = (dweight is not None) + (dbias is not None)
    launch = choose_backward(
        n, x.tensor.element_size(), mean is not None, sums, shared_memory(x.tensor), added is not None
    )
    column_blocks = launch.column_blocks(n)
    projection = average = None
    if column_blocks > 1 and dx is not None:
        projection, average = _row_sums(x, weight, dy_rows, mean, rstd, zero_centered)
    programs = launch.programs * multiprocessors(x.tensor)
    splits = max(1, min(launch.row_blocks(rows), programs // column_blocks))
    dweight_partials, dbias_partials = (
        None if total is None else torch.empty((splits, n), dtype=torch.float32, device=total.device)
        for total in (dweight, dbias)
    )
    with device_guard(x.tensor):
        norm_backward_kernel[(splits * column_blocks,)](
            x.tensor,
            weight,
            dy_rows.tensor,
            mean,
            rstd,
            projection,
            average,
            None if added is None else added.tensor,
            dx,
            dweight_partials,
            dbias_partials,
            x.stride,
            x.inner,
            x.inner_stride,
            dy_rows.stride,
            dy_rows.inner,
            dy_rows.inner_stride,
            None if added is None else added.stride,
            None if added is None else added.inner,
            None if added is None else added.inner_stride,
            rows,
            n,
            column_blocks,
            zero_centered,
            RELOAD=launch.reload,
            ROWS=launch.rows,
            BLOCK=launch.block,
            # Of a pipeline for two sums alone the assembler spills some registers to fit in more programs.
            STAGES=1 if dx is None and sums == 2 else launch.stages,
            num_warps=launch.warps,
        )
        if sums:
            reduce = REDUCE_LONG_ROW if column_blocks > 1 else REDUCE
            norm_reduce_kernel[(reduce.column_blocks(n), sums)](
                dweight_partials,
                dbias_partials,
                dweight,
                dbias,
                splits,
                n,
                ROWS=reduce.rows,
                BLOCK=reduce.block,
                num_warps=reduce.warps,
            )
            LAUNCHES["norm_reduce"] += 1
    LAUNCHES["norm_backward"] += 1


# --- Autograd ---


class NormFunction(torch.autograd.Function):
    """`apply(x, weight, bias, eps, zero_centered, layer_norm, dtype, residual)`: arguments already checked.

    Gives the output, and with `residual` a view of `x` too, whose gradient is added to that of `x`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        zero_centered: bool,
        layer_norm: bool,
        dtype: torch.dtype,
        residual: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ctx.zero_centered = zero_centered
        ctx.set_materialize_grads(False)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        results = (out, x) if residual else out
        if x.numel() == 0:
            ctx.save_for_backward(x, weight, None, None)
            return results
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        rows = rows_of(x)
        rstd = torch.empty(x.shape[:-1].numel(), dtype=torch.float32, device=x.device)
        mean = torch.empty(rstd.shape, dtype=torch.float32, device=x.device) if layer_norm else None
        _forward(rows, weight, bias, out, mean, rstd, eps, zero_centered)
        ctx.save_for_backward(rows.tensor, weight, mean, rstd)
        return results

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: torch.Tensor | None, dresidual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if dy is None:
            return (dresidual if needs_x else None, *[None] * 7)
        x, weight, mean, rstd = ctx.saved_tensors
        allocate = torch.zeros if x.numel() == 0 else torch.empty
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else None
        dweight = allocate(weight.shape, dtype=weight.dtype, device=x.device) if needs_weight else None
        dbias = allocate(weight.shape, dtype=weight.dtype, device=x.device) if needs_bias else None
        if x.numel():
            # Read anew: hooks on saved tensors may have brought them back with other strides.
            mean, rstd = None if mean is None else mean.contiguous(), rstd.contiguous()
            gradients = (dresidual, dx, dweight, dbias)
            _backward(rows_of(x), weight.contiguous(), dy, mean, rstd, ctx.zero_centered, *gradients)
        return dx, dweight, dbias, *[None] * 5


@functools.cache
def rms_norm_dtype(x: torch.dtype, weight: torch.dtype) -> torch.dtype:
    """The dtype that this torch's own RMSNorm gives: that of `x`, or, in older ones, of both promoted."""
    if x == weight:
        return x
    with warnings.catch_warnings():  # of mixed dtypes, which PyTorch has no fused kernel for
        warnings.simplefilter("ignore")
        one = torch.ones(1, dtype=x, device="cpu"), torch.ones(1, dtype=weight, device="cpu")
        with torch.no_grad():
            return F.rms_norm(one[0], (1,), one[1], 1e-5).dtype


def _check(name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: x is {x.dtype}; it must be bfloat16, float16 or float32")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; it must have columns")
    for what, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if parameter.dtype not in DTYPES:
            raise TypeError(f"{name}: {what} is {parameter.dtype}; it must be bfloat16, float16 or float32")
        if parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name}: {what} has shape {tuple(parameter.shape)}; "
                f"x {tuple(x.shape)} needs ({x.shape[-1]},)"
            )
        if parameter.device != x.device:
            raise ValueError(f"{name}: {what} is on {parameter.device} and x on {x.device}")


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    residual: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = False, residual: Literal[True]
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = False, residual: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`x / sqrt(mean(x²) + eps) · weight`, over the last dimension.

    All arithmetic is in float32 and each result is rounded once, when it is stored. The gradient of the
    weight is summed in float32, always in the same order.

    Args:
        x: `[..., H]`, bfloat16, float16 or float32, any strides. Rows that no two strides reach are copied
            once.
        weight: `[H]`, of these dtypes too, not necessarily that of `x`. Its gradient has its dtype.
        eps: added to the mean of the squares.
        zero_centered: the factor is `1 + weight`.
        residual: give `x` too, for the branch past the norm; the gradient that comes back on it is added to
            that of `x` in float32, before the one rounding.

    Returns:
        `[..., H]` in the dtype that `torch.nn.functional.rms_norm` gives (with torch 2.7 and later that of
        `x`): a contiguous tensor that owns its storage. With `residual` a pair of it and `x`, which is a view
        where `x` requires a gradient; autograd refuses to change that in place.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes or devices do not fit.
    """
    _check("rms_norm", x, weight, None)
    dtype = rms_norm_dtype(x.dtype, weight.dtype)
    x, weight = plain(x), plain(weight)
    tied = residual and x.requires_grad
    results = NormFunction.apply(x, weight, None, eps, zero_centered, False, dtype, tied)
    return (results, x) if residual and not tied else results


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
) -> torch.Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) · weight + bias`, over the last dimension.

    As :func:`rms_norm`; the variance is that about the mean, not a difference of two large numbers.

    Args:
        x: `[..., H]`, bfloat16, float16 or float32, any strides. Rows that no two strides reach are copied
            once.
        weight: `[H]` in the dtype of `x`.
        bias: `[H]` in the dtype of `x`, or None.
        eps: added to the variance.
        zero_centered: the factor is `1 + weight`.

    Returns:
        `[..., H]` in the dtype of `x`: a contiguous tensor that owns its storage.

    Raises:
        TypeError: a dtype is not supported, or the three differ in it (as PyTorch's own refuses on a GPU).
        ValueError: shapes or devices do not fit.
    """
    _check("layer_norm", x, weight, bias)
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        found = f"weight {weight.dtype}" + ("" if bias is None else f", bias {bias.dtype}")
        raise TypeError(f"layer_norm: x is {x.dtype}, {found}; they must be the same")
    x, weight, bias = plain(x), plain(weight), None if bias is None else plain(bias)
    result: torch.Tensor = NormFunction.apply(x, weight, bias, eps, zero_centered, True, x.dtype, False)
    return result
