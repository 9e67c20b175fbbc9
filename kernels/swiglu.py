# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""SwiGLU over one buffer: `silu(gate) · up`, the gate in columns [0, n) and up in [n, 2n) of the same row.

The kernels address both halves through one pointer: nothing is chunked, copied or concatenated. The forward
moves 3n elements a row, the backward 5n, and less is not possible. The bias gradient takes no atomics: a
program walks a fixed set of rows with its sums in registers and writes them once, to its own row of a small
float32 buffer. The forward can write a float8 copy of its input on the way, for the backward to read instead.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .autograd import may_overwrite, once_differentiable, plain, shares_memory
from .launches import LAUNCHES, Launch, as_rows, device_guard, multiprocessors, next_power_of_2

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def swiglu_reference(
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    clamp_value: float | None = None,
) -> torch.Tensor:
    """The same in plain PyTorch, in the dtypes given. `y` `[..., 2n]`, `bias` `[2n]`, `weights` `[..., 1]`"""
    if bias is not None:
        y = y + bias
    gate, up = y.chunk(2, dim=-1)
    if clamp_value is not None:
        gate, up = gate.clamp(max=clamp_value), up.clamp(-clamp_value, clamp_value)
    out = F.silu(gate) * up
    return out if weights is None else (out * weights).to(y.dtype)


# --- Launch choices ---

VECTOR_BYTES = 16  # the widest access of one thread
WARP_SIZE = 64 if torch.version.hip else 32

# Columns of one operand in a block, in bytes, and the bytes of a tile: narrow rows share a program. A tile
# gives each thread one 16-byte access to each operand, and each element exactly one thread, which in place
# needs: a second thread that held the same element could read it after the first has overwritten it.
# Measured on one H200 (torch 2.11, Triton 3.6, bf16, 8192 rows, cold L2) over blocks of 1024 to 16384 columns
# and 2 to 32 warps, at n = 1536, 4096, 14336 and 32768: 2048 columns with 8 warps are the best or within
# 1.1 % of it (but the backward at 1536: 36.6 us where 16 warps took 33.1 by events, and 30.2 by the
# profiler); with two accesses a thread the forward takes 6 % longer at 1536 and 14336.
BLOCK_BYTES = 4096

# With the bias gradient, n = 4096: tiles of 1024 columns, 4 warps, 3 stages and 4 programs a multiprocessor
# take 90 us, tiles of two such rows and 8 warps 109.
BIAS_BACKWARD_BLOCK_BYTES = 2048
BIAS_BACKWARD_STAGES = 3
BIAS_PROGRAMS_PER_MULTIPROCESSOR = 4
BIAS_REDUCE = Launch(rows=32, block=64, warps=4)


@functools.cache
def choose_launch(kernel: str, n: int, element_size: int, warp_size: int = WARP_SIZE) -> Launch:
    """The launch of `kernel` (forward, backward or bias_backward) for rows of `n` gate columns."""
    tile_bytes, stages = (
        (BIAS_BACKWARD_BLOCK_BYTES, BIAS_BACKWARD_STAGES) if kernel == "bias_backward" else (BLOCK_BYTES, 1)
    )
    block = min(max(next_power_of_2(n), 16), tile_bytes // element_size)
    rows = tile_bytes // (block * element_size)
    return Launch(rows, block, tile_bytes // (VECTOR_BYTES * warp_size), stages)


# --- Kernels --- Bare names are pointers, p_ addresses, b_ loaded blocks, o_ offsets, m_ masks, i_ program
# indices. Rows are counted in 64 bits before a stride multiplies them. `rows` changes with every batch and
# must not specialise; n, the strides and the block counts belong to the model, and Triton derives the 16-byte
# accesses from them.


@triton.jit
def _load_halves(p_x, n, m):
    b_gate = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(p_x + n, mask=m, other=0.0).to(tl.float32)
    return b_gate, b_up


@triton.jit
def _store_halves(p_x, n, m, b_gate, b_up):
    tl.store(p_x, b_gate.to(p_x.dtype.element_ty), mask=m)
    tl.store(p_x + n, b_up.to(p_x.dtype.element_ty), mask=m)


@triton.jit
def _clamped(b_gate, b_up, clamp):
    """Comparisons, where a minimum would drop a NaN."""
    if clamp is not None:
        b_gate = tl.where(b_gate > clamp, clamp, b_gate)
        b_up = tl.where(b_up > clamp, clamp, tl.where(b_up < -clamp, -clamp, b_up))
    return b_gate, b_up


@triton.jit
def _activate(b_gate, b_up, clamp):
    b_gate, b_up = _clamped(b_gate, b_up, clamp)
    return b_gate * tl.sigmoid(b_gate) * b_up


@triton.jit
def _gradients(b_gate, b_up, b_dout, clamp):
    """The gradients of gate and up; a value that is clamped has none."""
    b_inner_gate, b_inner_up = _clamped(b_gate, b_up, clamp)
    b_sigmoid = tl.sigmoid(b_inner_gate)
    b_silu = b_inner_gate * b_sigmoid
    b_dgate = b_dout * b_inner_up * (b_sigmoid * (1.0 + b_inner_gate * (1.0 - b_sigmoid)))
    b_dup = b_dout * b_silu
    if clamp is not None:
        b_dgate = tl.where(b_gate > clamp, 0.0, b_dgate)
        b_dup = tl.where((b_up > clamp) | (b_up < -clamp), 0.0, b_dup)
    return b_dgate, b_dup


@triton.jit(do_not_specialize=["rows"])
def swiglu_forward_kernel(
    y,
    bias,
    weights,
    out,
    stored,
    stride_y,
    stride_weights,
    clamp,
    rows,
    n,
    column_blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_program = tl.program_id(0)
    o_r = (i_program // column_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    o_n = (i_program % column_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    m_r = o_r < rows
    m_n = o_n < n
    m = m_r & m_n

    b_gate, b_up = _load_halves(y + o_r * stride_y + o_n, n, m)
    b_stored_gate, b_stored_up = b_gate, b_up
    if bias is not None:
        b_bias_gate, b_bias_up = _load_halves(bias + o_n, n, m_n)
        b_gate += b_bias_gate
        b_up += b_bias_up
    b_out = _activate(b_gate, b_up, clamp)
    if weights is not None:
        b_out *= tl.load(weights + o_r * stride_weights, mask=m_r, other=0.0).to(tl.float32)
    tl.store(out + o_r * n + o_n, b_out.to(out.dtype.element_ty), mask=m)
    if stored is not None:  # last: earlier, narrow tiles spill on sm_120
        _store_halves(stored + o_r * (2 * n) + o_n, n, m, b_stored_gate, b_stored_up)


@triton.jit(do_not_specialize=["rows"])
def swiglu_backward_kernel(
    y,
    bias,
    weights,
    dout,
    dy,
    dweights,
    stride_y,
    stride_weights,
    stride_dout,
    stride_dy,
    clamp,
    rows,
    n,
    column_blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of columns a program, or, where a row's weight needs its gradient, all of them in turn."""
    i_program = tl.program_id(0)
    WHOLE_ROW: tl.constexpr = dweights is not None
    if WHOLE_ROW:
        i_row_block = i_program
        i_first = 0
        blocks = column_blocks
    else:
        i_row_block = i_program // column_blocks
        i_first = i_program % column_blocks
        blocks = 1

    o_r = i_row_block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    m_r = o_r < rows
    if weights is not None:
        b_weights = tl.load(weights + o_r * stride_weights, mask=m_r, other=0.0).to(tl.float32)
    if WHOLE_ROW:
        b_dweights = tl.zeros([ROWS, BLOCK], dtype=tl.float32)

    for i_block in range(blocks):
        o_n = (i_first + i_block) * BLOCK + tl.arange(0, BLOCK)[None, :]
        m_n = o_n < n
        m = m_r & m_n
        b_gate, b_up = _load_halves(y + o_r * stride_y + o_n, n, m)
        if bias is not None:
            b_bias_gate, b_bias_up = _load_halves(bias + o_n, n, m_n)
            b_gate += b_bias_gate
            b_up += b_bias_up
        b_dout = tl.load(dout + o_r * stride_dout + o_n, mask=m, other=0.0).to(tl.float32)
        if WHOLE_ROW:
            b_dweights += b_dout * _activate(b_gate, b_up, clamp)
        if dy is not None:
            if weights is not None:
                b_dout *= b_weights
            b_dgate, b_dup = _gradients(b_gate, b_up, b_dout, clamp)
            _store_halves(dy + o_r * stride_dy + o_n, n, m, b_dgate, b_dup)

    if WHOLE_ROW:
        b_sum = tl.sum(b_dweights, axis=1)[:, None]
        tl.store(dweights + o_r, b_sum.to(dweights.dtype.element_ty), mask=m_r)


@triton.jit(do_not_specialize=["rows", "splits"])
def swiglu_bias_backward_kernel(
    y,
    bias,
    dout,
    dy,
    partials,
    stride_y,
    stride_dout,
    stride_dy,
    clamp,
    rows,
    n,
    column_blocks,
    splits,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (split, column block) takes every `splits`-th row block and fills row `split` of `partials`."""
    i_program = tl.program_id(0)
    i_split = i_program // column_blocks
    o_n = (i_program % column_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    m_n = o_n < n
    b_bias_gate, b_bias_up = _load_halves(bias + o_n, n, m_n)
    b_sum_gate = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    b_sum_up = tl.zeros([ROWS, BLOCK], dtype=tl.float32)

    for i_row_block in tl.range(i_split, tl.cdiv(rows, ROWS), splits, num_stages=STAGES):
        o_r = (i_row_block * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        m = (o_r < rows) & m_n
        b_gate, b_up = _load_halves(y + o_r * stride_y + o_n, n, m)
        b_gate += b_bias_gate
        b_up += b_bias_up
        b_dout = tl.load(dout + o_r * stride_dout + o_n, mask=m, other=0.0).to(tl.float32)
        b_dgate, b_dup = _gradients(b_gate, b_up, b_dout, clamp)
        # A row past the end holds the bias alone, and an infinite bias times a gradient of 0 is NaN.
        b_sum_gate += tl.where(m, b_dgate, 0.0)
        b_sum_up += tl.where(m, b_dup, 0.0)
        if dy is not None:
            _store_halves(dy + o_r * stride_dy + o_n, n, m, b_dgate, b_dup)

    p_partials = partials + i_split.to(tl.int64) * (2 * n) + o_n
    tl.store(p_partials, tl.sum(b_sum_gate, axis=0)[None, :], mask=m_n)
    tl.store(p_partials + n, tl.sum(b_sum_up, axis=0)[None, :], mask=m_n)


@triton.jit(do_not_specialize=["splits"])
def swiglu_bias_reduce_kernel(partials, dbias, splits, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    m_n = o_n < columns
    b_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for i_row in range(0, splits, ROWS):
        o_r = i_row + tl.arange(0, ROWS)[:, None]
        b_sum += tl.load(partials + o_r.to(tl.int64) * columns + o_n, mask=(o_r < splits) & m_n, other=0.0)
    b_dbias = tl.sum(b_sum, axis=0)[None, :]
    tl.store(dbias + o_n, b_dbias.to(dbias.dtype.element_ty), mask=m_n)


# --- Launchers: at least one row and one column ---


def _forward(
    y: torch.Tensor,
    stride_y: int,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    clamp: float | None,
    stored: torch.Tensor | None,
) -> torch.Tensor:
    """Writes the copy of `y` where one is given."""
    n = y.shape[-1] // 2
    rows = y.numel() // (2 * n)
    out = torch.empty((*y.shape[:-1], n), dtype=y.dtype, device=y.device)
    stride_weights = 0
    if weights is not None:
        weights, stride_weights = as_rows(weights)
    launch = choose_launch("forward", n, y.element_size())
    column_blocks = launch.column_blocks(n)
    with device_guard(y):
        swiglu_forward_kernel[(launch.row_blocks(rows) * column_blocks,)](
            y,
            bias,
            weights,
            out,
            stored,
            stride_y,
            stride_weights,
            clamp,
            rows,
            n,
            column_blocks,
            ROWS=launch.rows,
            BLOCK=launch.block,
            num_warps=launch.warps,
        )
    LAUNCHES["swiglu_forward"] += 1
    return out


def _backward(
    y: torch.Tensor,
    stride_y: int,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    clamp: float | None,
    dout: torch.Tensor,
    dy: torch.Tensor | None,
    stride_dy: int,
    dweights: torch.Tensor | None,
) -> None:
    """Writes `dy` and `dweights`, each where it is given."""
    n = y.shape[-1] // 2
    rows = y.numel() // (2 * n)
    dout, stride_dout = as_rows(dout)
    stride_weights = 0
    if weights is not None:
        weights, stride_weights = as_rows(weights)
    launch = choose_launch("backward", n, dout.element_size())
    column_blocks = launch.column_blocks(n)
    programs = launch.row_blocks(rows) * (column_blocks if dweights is None else 1)
    with device_guard(y):
        swiglu_backward_kernel[(programs,)](
            y,
            bias,
            weights,
            dout,
            dy,
            dweights,
            stride_y,
            stride_weights,
            stride_dout,
            stride_dy,
            clamp,
            rows,
            n,
            column_blocks,
            ROWS=launch.rows,
            BLOCK=launch.block,
            num_warps=launch.warps,
        )
    LAUNCHES["swiglu_backward"] += 1


def _bias_backward(
    y: torch.Tensor,
    stride_y: int,
    bias: torch.Tensor,
    clamp: float | None,
    dout: torch.Tensor,
    dy: torch.Tensor | None,
    stride_dy: int,
    dbias: torch.Tensor,
) -> None:
    """Writes `dbias`, and `dy` where it is given."""
    n = y.shape[-1] // 2
    rows = y.numel() // (2 * n)
    dout, stride_dout = as_rows(dout)
    launch = choose_launch("bias_backward", n, dout.element_size())
    column_blocks = launch.column_blocks(n)
    programs = BIAS_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(y)
    splits = max(1, min(launch.row_blocks(rows), programs // column_blocks))
    partials = torch.empty((splits, 2 * n), dtype=torch.float32, device=y.device)
    with device_guard(y):
        swiglu_bias_backward_kernel[(splits * column_blocks,)](
            y,
            bias,
            dout,
            dy,
            partials,
            stride_y,
            stride_dout,
            stride_dy,
            clamp,
            rows,
            n,
            column_blocks,
            splits,
            ROWS=launch.rows,
            BLOCK=launch.block,
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
        swiglu_bias_reduce_kernel[(BIAS_REDUCE.column_blocks(2 * n),)](
            partials,
            dbias,
            splits,
            2 * n,
            ROWS=BIAS_REDUCE.rows,
            BLOCK=BIAS_REDUCE.block,
            num_warps=BIAS_REDUCE.warps,
        )
    LAUNCHES["swiglu_backward"] += 1
    LAUNCHES["swiglu_bias_reduce"] += 1


# --- Autograd ---


class Options(NamedTuple):
    """Those of `swiglu`, of the same names."""

    in_place: bool = False
    fp8_input_store: bool = False
    cpu_offload_input: bool = False
    clamp_value: float | None = None


class SwiGLUFunction(torch.autograd.Function):
    """`apply(y, bias, weights, options)`; its arguments are those of `swiglu`, already checked."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        bias: torch.Tensor | None,
        weights: torch.Tensor | None,
        options: Options,
    ) -> torch.Tensor:
        y_rows, stride_y = as_rows(y)
        ctx.dtype, ctx.clamp = y.dtype, options.clamp_value
        kept = not options.fp8_input_store and not options.cpu_offload_input and y_rows is y
        ctx.in_place = options.in_place and kept and may_overwrite(y, bias, weights)
        saved, stored = y_rows, None
        if options.fp8_input_store:
            saved = stored = torch.empty(y.shape, dtype=torch.float8_e4m3fn, device=y.device)
        if options.cpu_offload_input:
            if saved is y:
                saved = y.detach()  # the mark is for this use of the input, not for others
            for x in (saved, bias):
                if x is not None:
                    x.activation_offloading = True  # type: ignore[attr-defined]
        ctx.save_for_backward(saved, bias, weights)
        if y.numel() == 0:
            return torch.empty((*y.shape[:-1], y.shape[-1] // 2), dtype=y.dtype, device=y.device)
        if bias is not None:
            bias = bias.contiguous()
        return _forward(y_rows, stride_y, bias, weights, ctx.clamp, stored)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, bias, weights = ctx.saved_tensors
        needs_y, needs_bias, needs_weights, _ = ctx.needs_input_grad
        dy = dbias = dweights = None
        if y.numel() == 0:
            dy = torch.empty(y.shape, dtype=ctx.dtype, device=y.device) if needs_y else None
            dbias = torch.zeros(bias.shape, dtype=bias.dtype, device=y.device) if needs_bias else None
            dweights = (
                torch.zeros(weights.shape, dtype=weights.dtype, device=y.device) if needs_weights else None
            )
            return dy, dbias, dweights, None

        dout = plain(dout)
        in_place = ctx.in_place and needs_y and not shares_memory(y, dout)
        # Read anew: hooks on saved tensors may have brought them back with other strides.
        y, stride_y = as_rows(y)
        stride_dy = stride_y
        if in_place:
            dy = y.detach()
        elif needs_y:
            dy, stride_dy = torch.empty(y.shape, dtype=ctx.dtype, device=y.device), y.shape[-1]
        if bias is not None:
            bias = bias.contiguous()
        if needs_bias:
            dbias = torch.empty(bias.shape, dtype=bias.dtype, device=y.device)
            _bias_backward(y, stride_y, bias, ctx.clamp, dout, dy, stride_dy, dbias)
        else:
            if needs_weights:
                dweights = torch.empty(weights.shape, dtype=weights.dtype, device=y.device)
            _backward(y, stride_y, bias, weights, ctx.clamp, dout, dy, stride_dy, dweights)
        if in_place:
            # Kernels write past autograd's back: from here on it refuses whatever else has saved y.
            torch.autograd.graph.increment_version(y)
        return dy, dbias, dweights, None


def _check(y: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor | None) -> None:
    if y.dtype not in DTYPES:
        raise TypeError(f"swiglu: y is {y.dtype}; it must be bfloat16, float16 or float32")
    if y.dim() == 0 or y.shape[-1] % 2:
        raise ValueError(
            f"swiglu: y has shape {tuple(y.shape)}; its last dimension must hold gate and up, so be even"
        )
    if bias is not None:
        if weights is not None:
            raise NotImplementedError("swiglu: bias together with weights is not supported")
        if bias.dtype != y.dtype:
            raise TypeError(f"swiglu: bias is {bias.dtype} and y {y.dtype}; they must be the same")
        if bias.dim() != 1 or bias.shape[0] != y.shape[-1]:
            raise ValueError(
                f"swiglu: bias has shape {tuple(bias.shape)}; y {tuple(y.shape)} needs ({y.shape[-1]},)"
            )
        if bias.device != y.device:
            raise ValueError(f"swiglu: bias is on {bias.device} and y on {y.device}")
    if weights is not None:
        if weights.dtype not in DTYPES:
            raise TypeError(f"swiglu: weights are {weights.dtype}; they must be bfloat16, float16 or float32")
        rows = y.shape[:-1].numel()
        if weights.shape != (rows, 1) and weights.shape != (*y.shape[:-1], 1):
            raise ValueError(
                f"swiglu: weights have shape {tuple(weights.shape)}; y {tuple(y.shape)} needs ({rows}, 1)"
            )
        if weights.device != y.device:
            raise ValueError(f"swiglu: weights are on {weights.device} and y on {y.device}")


def swiglu(
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    *,
    in_place: bool = False,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
    clamp_value: float | None = None,
) -> torch.Tensor:
    """`silu(gate) · up`, where the last dimension of `y` holds the gate, then up.

    All arithmetic is in float32 and each result is rounded once, when it is stored.

    Args:
        y: `[..., 2n]`, bfloat16, float16 or float32, any strides. Rows of no common stride are copied once.
        bias: `[2n]` in the dtype of `y`, added to each row first. Its gradient is summed in float32, in an
            order that never changes, and has the dtype of the bias.
        weights: `[rows, 1]` (or `[..., 1]`), a factor for each row, bfloat16, float16 or float32, any
            strides. The gradient has the dtype of the weights.
        in_place: let the backward write the gradient of `y` over `y`. Autograd is told: a second backward or
            another operation that saved `y` and whose backward comes later, raises its usual error. Whoever
            else holds `y` then sees its gradient, and must not write to it. A new buffer is taken all the
            same where `y` is a leaf or a view of one (as far as autograd knows), overlaps itself, shares
            memory with another operand or had to be copied, under hooks on saved tensors, and with either of
            the next two options.
        fp8_input_store: keep `y` for the backward as float8_e4m3fn, without a scale, rounded to nearest even;
            what is beyond ±448, infinities too, becomes ±448. `y` itself is not kept. A CUDA device must have
            compute capability 8.9 or more.
        cpu_offload_input: set `activation_offloading = True` on what is kept of `y` (another tensor
            of its memory, so that the mark is for this use alone) and on `bias`, for hooks on saved tensors.
        clamp_value: a positive number c: `min(gate, c)` and `min(max(up, -c), c)` in their places, after the
            bias. Values beyond have no gradient; NaN stays.

    Returns:
        `[..., n]` in the dtype of `y`: a contiguous tensor that owns its storage.

    Raises:
        TypeError: a dtype is not supported, or bias and `y` differ in it.
        ValueError: shapes or devices do not fit, or `clamp_value` is not positive.
        NotImplementedError: both bias and weights are given.
    """
    _check(y, bias, weights)
    y = plain(y)
    bias = None if bias is None else plain(bias)
    weights = None if weights is None else plain(weights)
    if clamp_value is not None:
        clamp_value = float(clamp_value)
        if not clamp_value > 0:
            raise ValueError(f"swiglu: clamp_value is {clamp_value}; it must be positive")
    if fp8_input_store:
        # A copy for a backward that never comes is no use.
        fp8_input_store = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (y, bias, weights)
        )
    options = Options(in_place, fp8_input_store, cpu_offload_input, clamp_value)
    result: torch.Tensor = SwiGLUFunction.apply(y, bias, weights, options)
    return result
