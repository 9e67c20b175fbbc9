# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""SwiGLU and its kin over one buffer: `act(gate) · up`, the gate in columns [0, n) of a row, up in [n, 2n).

The kernels address both halves through one pointer: nothing is chunked, copied or concatenated. The forward
moves 3n elements a row, the backward 5n, and less is not possible. The bias gradient takes no atomics: a
program walks a fixed set of rows with its sums in registers and writes them once, to its own row of a small
float32 buffer. The forward can write a float8 copy of its input on the way, for the backward to read instead.

Of SwiGLU, GeGLU and quick-GeGLU the activation is `gate · sigmoid(z)`, each with its own z: GELU by tanh is
one too, as `(1 + tanh(u)) / 2 = sigmoid(2u)`, which loses nothing where tanh is near -1. Squared ReLU has no
up; its rows are n wide.
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


# --- The same in plain PyTorch, in the dtypes given. `y` `[..., 2n]`, `bias` `[2n]`, `weights` `[..., 1]` ---


def swiglu_reference(
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    clamp_value: float | None = None,
) -> torch.Tensor:
    if bias is not None:
        y = y + bias
    gate, up = y.chunk(2, dim=-1)
    if clamp_value is not None:
        gate, up = gate.clamp(max=clamp_value), up.clamp(-clamp_value, clamp_value)
    out = F.silu(gate) * up
    return out if weights is None else (out * weights).to(y.dtype)


def geglu_reference(
    y: torch.Tensor, bias: torch.Tensor | None = None, weights: torch.Tensor | None = None
) -> torch.Tensor:
    gate, up = (y if bias is None else y + bias).chunk(2, dim=-1)
    out = F.gelu(gate, approximate="tanh") * up
    return out if weights is None else (out * weights).to(y.dtype)


def quick_geglu_reference(
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    linear_offset: float = 0.0,
    clamp_value: float | None = None,
) -> torch.Tensor:
    """The clamp comes before the bias."""
    if clamp_value is not None:
        gate, up = y.chunk(2, dim=-1)
        y = torch.cat((gate.clamp(max=clamp_value), up.clamp(-clamp_value, clamp_value)), dim=-1)
    gate, up = (y if bias is None else y + bias).chunk(2, dim=-1)
    out = gate * torch.sigmoid(1.702 * gate) * (up + linear_offset)
    return out if weights is None else (out * weights).to(y.dtype)


def squared_relu_reference(y: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """`y` is `[..., n]` here."""
    out = F.relu(y).square()
    return out if weights is None else (out * weights).to(y.dtype)


# --- Launch choices ---

VECTOR_BYTES = 16  # the widest access of one thread
WARP_SIZE = 64 if torch.version.hip else 32

# Columns of one operand in a block, in bytes, and the bytes of a tile: narrow rows share a program. A tile
# gives each thread one 16-byte access to each half, or two to a long row that has no halves (narrow ones
# would spill on sm_120), and each element exactly one thread, which in place needs: a second thread that held
# the same element could read it after the first has overwritten it.
# Measured on one H200 (torch 2.11, Triton 3.6, bf16, 8192 rows, cold L2) over blocks of 1024 to 16384 columns
# and 2 to 32 warps, at n = 1536, 4096, 14336 and 32768: 2048 columns with 8 warps are the best or within
# 1.1 % of it (but the backward at 1536: 36.6 us where 16 warps took 33.1 by events, and 30.2 by the
# profiler); with two accesses a thread the forward takes 6 % longer at 1536 and 14336. Half of that with half
# the warps where it leaves fewer lanes idle: quick-GeGLU of 16384 rows at 2880 takes 76 and 119 us for 90 and
# 137, SwiGLU's forward at 2816 37.6 for 39.0. Squared ReLU takes 46 and 67 us with two accesses, 51 and 73
# with one (16384 rows, n = 2688).
BLOCK_BYTES = 4096

# With the bias gradient, n = 4096: tiles of 1024 columns, 4 warps, 3 stages and 4 programs a multiprocessor
# take 90 us, tiles of two such rows and 8 warps 109.
BIAS_BACKWARD_BLOCK_BYTES = 2048
BIAS_BACKWARD_STAGES = 3
BIAS_PROGRAMS_PER_MULTIPROCESSOR = 4
BIAS_REDUCE = Launch(rows=32, block=64, warps=4)


@functools.cache
def choose_launch(
    kernel: str, n: int, element_size: int, parts: int = 2, warp_size: int = WARP_SIZE
) -> Launch:
    """The launch of `kernel` (forward, backward or bias_backward) for rows of `n` columns in each part."""
    if kernel == "bias_backward":
        tile_bytes, accesses = BIAS_BACKWARD_BLOCK_BYTES, 1
        # Where n is no multiple of 16 Triton makes single accesses, whose addresses fill the registers.
        stages = BIAS_BACKWARD_STAGES - 1 if n % 16 else BIAS_BACKWARD_STAGES
    else:
        accesses = 2 if parts == 1 and n * element_size >= BLOCK_BYTES else 1
        tile_bytes, stages = BLOCK_BYTES * accesses, 1
    block = min(max(next_power_of_2(n), 16), tile_bytes // element_size)
    half = block // 2
    if kernel != "bias_backward" and -(-n // half) * half < -(-n // block) * block:
        tile_bytes, block = tile_bytes // 2, half
    rows = tile_bytes // (block * element_size)
    return Launch(rows, block, tile_bytes // (VECTOR_BYTES * accesses * warp_size), stages)


# --- Kernels --- Bare names are pointers, p_ addresses, b_ loaded blocks, o_ offsets, m_ masks, i_ program
# indices. Rows are counted in 64 bits before a stride multiplies them. `rows` changes with every batch and
# must not specialise; n, the strides and the block counts belong to the model, and Triton derives the 16-byte
# accesses from them. `clamp_y` bounds what is loaded, `clamp` what the bias was added to.

TANH_TWICE: tl.constexpr = tl.constexpr(1.59576912)
TANH_CUBIC: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def _load_halves(p_x, n, m, GATED: tl.constexpr = True):
    b_gate = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    b_up = b_gate
    if GATED:
        b_up = tl.load(p_x + n, mask=m, other=0.0).to(tl.float32)
    return b_gate, b_up


@triton.jit
def _store_halves(p_x, n, m, b_gate, b_up, GATED: tl.constexpr = True):
    tl.store(p_x, b_gate.to(p_x.dtype.element_ty), mask=m)
    if GATED:
        tl.store(p_x + n, b_up.to(p_x.dtype.element_ty), mask=m)


@triton.jit
def _clamped(b_gate, b_up, clamp):
    """Comparisons, where a minimum would drop a NaN."""
    if clamp is not None:
        b_gate = tl.where(b_gate > clamp, clamp, b_gate)
        b_up = tl.where(b_up > clamp, clamp, tl.where(b_up < -clamp, -clamp, b_up))
    return b_gate, b_up


@triton.jit
def _within(b_dgate, b_dup, b_y_gate, b_y_up, clamp_y):
    """The gradients of what was loaded. As with torch.clamp, what is beyond the bound has none, nor has NaN.

    Fewer comparisons that live across the activation: with those of `_clamped`, narrow tiles spill on gfx942.
    """
    if clamp_y is not None:
        b_dgate = tl.where(b_y_gate <= clamp_y, b_dgate, 0.0)
        b_dup = tl.where(tl.abs(b_y_up) <= clamp_y, b_dup, 0.0)
    return b_dgate, b_dup


@triton.jit
def _argument(b_gate, KIND: tl.constexpr):
    """z of `gate · sigmoid(z)`."""
    if KIND == "geglu":
        b_gate = TANH_TWICE * b_gate * (1.0 + TANH_CUBIC * b_gate * b_gate)
    elif KIND == "quick_geglu":
        b_gate = 1.702 * b_gate
    return b_gate


@triton.jit
def _activate(b_gate, b_up, offset, clamp, KIND: tl.constexpr):
    b_gate, b_up = _clamped(b_gate, b_up, clamp)
    if offset is not None:
        b_up += offset
    if KIND == "squared_relu":
        b_gate = tl.where(b_gate < 0.0, 0.0, b_gate)  # NaN stays
        b_out = b_gate * b_gate
    else:
        b_out = b_gate * tl.sigmoid(_argument(b_gate, KIND)) * b_up
    return b_out


@triton.jit
def _gradients(b_gate, b_up, b_dout, offset, clamp, KIND: tl.constexpr):
    """The gradients of gate and up; a value that is clamped has none."""
    b_inner_gate, b_inner_up = _clamped(b_gate, b_up, clamp)
    if offset is not None:
        b_inner_up += offset
    if KIND == "squared_relu":
        b_dgate = b_dout * 2.0 * tl.where(b_inner_gate < 0.0, 0.0, b_inner_gate)
        b_dup = b_dgate  # of nothing
    else:
        b_argument = _argument(b_inner_gate, KIND)
        b_sigmoid = tl.sigmoid(b_argument)
        b_act = b_inner_gate * b_sigmoid
        if KIND == "geglu":
            # In this order the square may be of any finite size: what it is multiplied by is 0 by then.
            b_slope = TANH_TWICE * (1.0 + 3.0 * TANH_CUBIC * b_inner_gate * b_inner_gate)
            b_slope = b_sigmoid + b_act * (1.0 - b_sigmoid) * b_slope
            b_dgate = b_dout * b_inner_up * b_slope
        else:
            b_dgate = b_dout * b_inner_up * (b_sigmoid * (1.0 + b_argument * (1.0 - b_sigmoid)))
        b_dup = b_dout * b_act
    if clamp is not None:
        b_dgate = tl.where(b_gate > clamp, 0.0, b_dgate)
        b_dup = tl.where((b_up > clamp) | (b_up < -clamp), 0.0, b_dup)
    return b_dgate, b_dup


@triton.jit(do_not_specialize=["rows"])
def gated_forward_kernel(
    y,
    bias,
    weights,
    out,
    stored,
    stride_y,
    stride_weights,
    offset,
    clamp_y,
    clamp,
    rows,
    n,
    column_blocks,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    GATED: tl.constexpr = KIND != "squared_relu"
    i_program = tl.program_id(0)
    o_r = (i_program // column_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    o_n = (i_program % column_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    m_r = o_r < rows
    m_n = o_n < n
    m = m_r & m_n

    b_gate, b_up = _load_halves(y + o_r * stride_y + o_n, n, m, GATED)
    b_stored_gate, b_stored_up = b_gate, b_up
    b_gate, b_up = _clamped(b_gate, b_up, clamp_y)
    if bias is not None:
        b_bias_gate, b_bias_up = _load_halves(bias + o_n, n, m_n)
        b_gate += b_bias_gate
        b_up += b_bias_up
    b_out = _activate(b_gate, b_up, offset, clamp, KIND)
    if weights is not None:
        b_out *= tl.load(weights + o_r * stride_weights, mask=m_r, other=0.0).to(tl.float32)
    tl.store(out + o_r * n + o_n, b_out.to(out.dtype.element_ty), mask=m)
    if stored is not None:  # last: earlier, narrow tiles spill on sm_120
        _store_halves(stored + o_r * (2 * n) + o_n, n, m, b_stored_gate, b_stored_up)


@triton.jit(do_not_specialize=["rows"])
def gated_backward_kernel(
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
    offset,
    clamp_y,
    clamp,
    rows,
    n,
    column_blocks,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of columns a program, or, where a row's weight needs its gradient, all of them in turn."""
    GATED: tl.constexpr = KIND != "squared_relu"
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
        b_y_gate, b_y_up = _load_halves(y + o_r * stride_y + o_n, n, m, GATED)
        b_gate, b_up = _clamped(b_y_gate, b_y_up, clamp_y)
        if bias is not None:
            b_bias_gate, b_bias_up = _load_halves(bias + o_n, n, m_n)
            b_gate += b_bias_gate
            b_up += b_bias_up
        b_dout = tl.load(dout + o_r * stride_dout + o_n, mask=m, other=0.0).to(tl.float32)
        if WHOLE_ROW:
            b_dweights += b_dout * _activate(b_gate, b_up, offset, clamp, KIND)
        if dy is not None:
            if weights is not None:
                b_dout *= b_weights
            b_dgate, b_dup = _gradients(b_gate, b_up, b_dout, offset, clamp, KIND)
            b_dgate, b_dup = _within(b_dgate, b_dup, b_y_gate, b_y_up, clamp_y)
            _store_halves(dy + o_r * stride_dy + o_n, n, m, b_dgate, b_dup, GATED)

    if WHOLE_ROW:
        b_sum = tl.sum(b_dweights, axis=1)[:, None]
        tl.store(dweights + o_r, b_sum.to(dweights.dtype.element_ty), mask=m_r)


@triton.jit(do_not_specialize=["rows", "splits"])
def gated_bias_backward_kernel(
    y,
    bias,
    weights,
    dout,
    dy,
    partials,
    stride_y,
    stride_weights,
    stride_dout,
    stride_dy,
    offset,
    clamp_y,
    clamp,
    rows,
    n,
    column_blocks,
    splits,
    KIND: tl.constexpr,
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
        b_y_gate, b_y_up = _load_halves(y + o_r * stride_y + o_n, n, m)
        b_gate, b_up = _clamped(b_y_gate, b_y_up, clamp_y)
        b_gate += b_bias_gate
        b_up += b_bias_up
        b_dout = tl.load(dout + o_r * stride_dout + o_n, mask=m, other=0.0).to(tl.float32)
        if weights is not None:
            # A bound on the row, where one more mask spills on gfx942.
            b_dout *= tl.load(weights + tl.minimum(o_r, rows - 1) * stride_weights).to(tl.float32)
        b_dgate, b_dup = _gradients(b_gate, b_up, b_dout, offset, clamp, KIND)
        # A row past the end holds the bias alone, and an infinite bias times a gradient of 0 is NaN.
        b_sum_gate += tl.where(m, b_dgate, 0.0)
        b_sum_up += tl.where(m, b_dup, 0.0)
        if dy is not None:
            b_dgate, b_dup = _within(b_dgate, b_dup, b_y_gate, b_y_up, clamp_y)
            _store_halves(dy + o_r * stride_dy + o_n, n, m, b_dgate, b_dup)

    p_partials = partials + i_split.to(tl.int64) * (2 * n) + o_n
    tl.store(p_partials, tl.sum(b_sum_gate, axis=0)[None, :], mask=m_n)
    tl.store(p_partials + n, tl.sum(b_sum_up, axis=0)[None, :], mask=m_n)


@triton.jit(do_not_specialize=["splits"])
def gated_bias_reduce_kernel(partials, dbias, splits, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    m_n = o_n < columns
    b_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for i_row in range(0, splits, ROWS):
        o_r = i_row + tl.arange(0, ROWS)[:, None]
        b_sum += tl.load(partials + o_r.to(tl.int64) * columns + o_n, mask=(o_r < splits) & m_n, other=0.0)
    b_dbias = tl.sum(b_sum, axis=0)[None, :]
    tl.store(dbias + o_n, b_dbias.to(dbias.dtype.element_ty), mask=m_n)


# --- Launchers: at least one row and one column ---


class Options(NamedTuple):
    """What is computed, and what is kept for the backward: as in the public functions, of the same names."""

    kind: str = "swiglu"
    in_place: bool = False
    fp8_input_store: bool = False
    cpu_offload_input: bool = False
    linear_offset: float | None = None
    clamp_y: float | None = None
    clamp_value: float | None = None

    @property
    def parts(self) -> int:
        """How many times as wide as a row of the result one of `y` is."""
        return 1 if self.kind == "squared_relu" else 2

    def size(self, y: torch.Tensor) -> tuple[int, int]:
        """Rows, and columns of the result."""
        n = y.shape[-1] // self.parts
        return y.numel() // y.shape[-1], n

    def numbers(self) -> tuple[float | None, float | None, float | None]:
        """As the kernels take them."""
        return self.linear_offset, self.clamp_y, self.clamp_value


def _weights(weights: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    return (None, 0) if weights is None else as_rows(weights)


def _forward(
    y: torch.Tensor,
    stride_y: int,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    options: Options,
    stored: torch.Tensor | None,
) -> torch.Tensor:
    """Writes the copy of `y` where one is given."""
    rows, n = options.size(y)
    out = torch.empty((*y.shape[:-1], n), dtype=y.dtype, device=y.device)
    weights, stride_weights = _weights(weights)
    launch = choose_launch("forward", n, y.element_size(), options.parts)
    column_blocks = launch.column_blocks(n)
    with device_guard(y):
        gated_forward_kernel[(launch.row_blocks(rows) * column_blocks,)](
            y,
            bias,
            weights,
            out,
            stored,
            stride_y,
            stride_weights,
            *options.numbers(),
            rows,
            n,
            column_blocks,
            KIND=options.kind,
            ROWS=launch.rows,
            BLOCK=launch.block,
            num_warps=launch.warps,
        )
    LAUNCHES[f"{options.kind}_forward"] += 1
    return out


def _backward(
    y: torch.Tensor,
    stride_y: int,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    options: Options,
    dout: torch.Tensor,
    dy: torch.Tensor | None,
    stride_dy: int,
    dweights: torch.Tensor | None,
) -> None:
    """Writes `dy` and `dweights`, each where it is given."""
    rows, n = options.size(y)
    dout, stride_dout = as_rows(dout)
    weights, stride_weights = _weights(weights)
    launch = choose_launch("backward", n, dout.element_size(), options.parts)
    column_blocks = launch.column_blocks(n)
    programs = launch.row_blocks(rows) * (column_blocks if dweights is None else 1)
    with device_guard(y):
        gated_backward_kernel[(programs,)](
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
            *options.numbers(),
            rows,
            n,
            column_blocks,
            KIND=options.kind,
            ROWS=launch.rows,
            BLOCK=launch.block,
            num_warps=launch.warps,
        )
    LAUNCHES[f"{options.kind}_backward"] += 1


def _bias_backward(
    y: torch.Tensor,
    stride_y: int,
    bias: torch.Tensor,
    weights: torch.Tensor | None,
    options: Options,
    dout: torch.Tensor,
    dy: torch.Tensor | None,
    stride_dy: int,
    dbias: torch.Tensor,
) -> None:
    """Writes `dbias`, and `dy` where it is given."""
    rows, n = options.size(y)
    dout, stride_dout = as_rows(dout)
    weights, stride_weights = _weights(weights)
    launch = choose_launch("bias_backward", n, dout.element_size())
    column_blocks = launch.column_blocks(n)
    programs = BIAS_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(y)
    splits = max(1, min(launch.row_blocks(rows), programs // column_blocks))
    partials = torch.empty((splits, 2 * n), dtype=torch.float32, device=y.device)
    with device_guard(y):
        gated_bias_backward_kernel[(splits * column_blocks,)](
            y,
            bias,
            weights,
            dout,
            dy,
            partials,
            stride_y,
            stride_weights,
            stride_dout,
            stride_dy,
            *options.numbers(),
            rows,
            n,
            column_blocks,
            splits,
            KIND=options.kind,
            ROWS=launch.rows,
            BLOCK=launch.block,
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
        gated_bias_reduce_kernel[(BIAS_REDUCE.column_blocks(2 * n),)](
            partials,
            dbias,
            splits,
            2 * n,
            ROWS=BIAS_REDUCE.rows,
            BLOCK=BIAS_REDUCE.block,
            num_warps=BIAS_REDUCE.warps,
        )
    LAUNCHES[f"{options.kind}_backward"] += 1
    LAUNCHES[f"{options.kind}_bias_reduce"] += 1


# --- Autograd ---


class GatedFunction(torch.autograd.Function):
    """`apply(y, bias, weights, options)`; its arguments are those of a public function, already checked."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        bias: torch.Tensor | None,
        weights: torch.Tensor | None,
        options: Options,
    ) -> torch.Tensor:
        y_rows, stride_y = as_rows(y)
        ctx.dtype, ctx.options = y.dtype, options
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
            return torch.empty((*y.shape[:-1], y.shape[-1] // options.parts), dtype=y.dtype, device=y.device)
        if bias is not None:
            bias = bias.contiguous()
        return _forward(y_rows, stride_y, bias, weights, options, stored)

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
        if needs_weights:
            dweights = torch.empty(weights.shape, dtype=weights.dtype, device=y.device)
        if needs_bias:
            dbias = torch.empty(bias.shape, dtype=bias.dtype, device=y.device)
            if needs_weights:  # sums over columns beside those over rows; first, for y is still whole
                _backward(y, stride_y, bias, weights, ctx.options, dout, None, stride_dy, dweights)
            _bias_backward(y, stride_y, bias, weights, ctx.options, dout, dy, stride_dy, dbias)
        else:
            _backward(y, stride_y, bias, weights, ctx.options, dout, dy, stride_dy, dweights)
        if in_place:
            # Kernels write past autograd's back: from here on it refuses whatever else has saved y.
            torch.autograd.graph.increment_version(y)
        return dy, dbias, dweights, None


def _check(kind: str, y: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor | None) -> None:
    if y.dtype not in DTYPES:
        raise TypeError(f"{kind}: y is {y.dtype}; it must be bfloat16, float16 or float32")
    if y.dim() == 0 or (y.shape[-1] % 2 and kind != "squared_relu"):
        raise ValueError(
            f"{kind}: y has shape {tuple(y.shape)}; its last dimension must hold gate and up, so be even"
            if kind != "squared_relu"
            else f"{kind}: y has shape (); it needs a dimension"
        )
    if bias is not None:
        if bias.dtype != y.dtype:
            raise TypeError(f"{kind}: bias is {bias.dtype} and y {y.dtype}; they must be the same")
        if bias.dim() != 1 or bias.shape[0] != y.shape[-1]:
            raise ValueError(
                f"{kind}: bias has shape {tuple(bias.shape)}; y {tuple(y.shape)} needs ({y.shape[-1]},)"
            )
        if bias.device != y.device:
            raise ValueError(f"{kind}: bias is on {bias.device} and y on {y.device}")
    if weights is not None:
        if weights.dtype not in DTYPES:
            raise TypeError(f"{kind}: weights are {weights.dtype}; they must be bfloat16, float16 or float32")
        rows = y.shape[:-1].numel()
        if weights.shape != (rows, 1) and weights.shape != (*y.shape[:-1], 1):
            raise ValueError(
                f"{kind}: weights have shape {tuple(weights.shape)}; y {tuple(y.shape)} needs ({rows}, 1)"
            )
        if weights.device != y.device:
            raise ValueError(f"{kind}: weights are on {weights.device} and y on {y.device}")


def _bound(kind: str, clamp_value: float | None) -> float | None:
    if clamp_value is None:
        return None
    clamp_value = float(clamp_value)
    if not clamp_value > 0:
        raise ValueError(f"{kind}: clamp_value is {clamp_value}; it must be positive")
    return clamp_value


def _gated(
    y: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor | None, options: Options
) -> torch.Tensor:
    _check(options.kind, y, bias, weights)
    y = plain(y)
    bias = None if bias is None else plain(bias)
    weights = None if weights is None else plain(weights)
    if options.fp8_input_store:
        # A copy for a backward that never comes is no use.
        needed = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (y, bias, weights)
        )
        options = options._replace(fp8_input_store=needed)
    result: torch.Tensor = GatedFunction.apply(y, bias, weights, options)
    return result


# --- Public functions: all arithmetic is in float32 and each result is rounded once, when it is stored ---


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
    if bias is not None and weights is not None:
        raise NotImplementedError("swiglu: bias together with weights is not supported")
    bound = _bound("swiglu", clamp_value)
    options = Options("swiglu", in_place, fp8_input_store, cpu_offload_input, clamp_value=bound)
    return _gated(y, bias, weights, options)


def geglu(
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    *,
    in_place: bool = False,
) -> torch.Tensor:
    """`gelu(gate) · up` with GELU's approximation by tanh.

    Args, results and errors are those of `swiglu`, but bias and weights can be given together.
    """
    return _gated(y, bias, weights, Options("geglu", in_place))


def quick_geglu(
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    *,
    in_place: bool = False,
    fp8_input_store: bool = False,
    linear_offset: float = 0.0,
    clamp_value: float | None = None,
) -> torch.Tensor:
    """`gate · sigmoid(1.702 gate) · (up + linear_offset)`.

    Args, results and errors are those of `swiglu`, but bias and weights can be given together, and
    `clamp_value` bounds `y` before the bias is added: the bias has gradients everywhere. NaN in `y` stays in
    the result, and has no gradient.
    """
    bound = _bound("quick_geglu", clamp_value)
    offset = float(linear_offset) or None
    options = Options("quick_geglu", in_place, fp8_input_store, linear_offset=offset, clamp_y=bound)
    return _gated(y, bias, weights, options)


def squared_relu(
    y: torch.Tensor, weights: torch.Tensor | None = None, *, in_place: bool = False
) -> torch.Tensor:
    """`max(y, 0)²`, where NaN stays.

    Args:
        y: `[..., n]`, else as in `swiglu`.
        weights, in_place: as in `swiglu`.

    Returns:
        `[..., n]` in the dtype of `y`: a contiguous tensor that owns its storage.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes or devices do not fit.
    """
    return _gated(y, None, weights, Options("squared_relu", in_place))
