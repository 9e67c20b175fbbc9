# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="untyped-decorator,misc"
"""Cross-entropy over a vocabulary that may be split between ranks.

The softmax is never stored. The forward reads the logits once and leaves two float32 numbers a token, the
maximum and the sum of exponentials relative to it; the backward reads the logits once more, recomputes the
softmax from the two and writes the gradient. Where the vocabulary is split, each rank's share of these
numbers goes through one all-gather and is combined in rank order, so that every rank has the same loss, bit
for bit.

An exponential costs more than a load here, and a running maximum would take a second one for each element. A
tile is therefore `[UNROLL, ROWS, LANES, VECTOR]`: a lane holds UNROLL times VECTOR values of its row, takes
their maximum in registers, and rescales its sum once for all of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed
import triton
import triton.language as tl

from .autograd import may_overwrite, once_differentiable, plain, shares_memory
from .launches import COLLECTIVES, LAUNCHES, Launch, device_guard, next_power_of_2

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCOPES = ("global", "partition")


def cross_entropy_reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    partition: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The same in plain PyTorch, in the dtype given: `logits` `[..., V]` (all of them), `target` `[...]`.

    `partition` (first column, one past the last) is the part of the vocabulary that label smoothing spreads
    over.
    """
    live = (target >= 0) & (target != ignore_index)
    columns = logits.shape[-1]
    present = live & (target < columns)
    logits = torch.where(live.unsqueeze(-1), logits, 0)
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    log_sum = shifted.exp().sum(-1).log()
    at_target = shifted.gather(-1, torch.where(present, target, 0).unsqueeze(-1)).squeeze(-1)
    loss = log_sum - torch.where(present, at_target, 0)
    if label_smoothing > 0:
        first, last = partition or (0, columns)
        spread = last - first
        smoothing = label_smoothing * spread / (spread - 1)
        mean_log_probability = (shifted[..., first:last] - log_sum.unsqueeze(-1)).mean(-1)
        loss = (1 - smoothing) * loss - smoothing * mean_log_probability
    return torch.where(live, loss, 0)


# --- Launch choices ---

VECTOR_BYTES = 16  # the widest access of one thread
WARP_SIZE = 64 if torch.version.hip else 32


@dataclass(frozen=True)
class Tile:
    """A program's tile: `rows` rows, of each `lanes` threads with `unroll` times `vector` adjacent values.

    Each element belongs to exactly one thread. In place needs that: a second thread that held the same
    element could read it after the first has overwritten it.
    """

    rows: int
    lanes: int
    unroll: int
    vector: int
    warps: int
    stages: int

    @property
    def block(self) -> int:
        """Columns of a tile."""
        return self.unroll * self.lanes * self.vector

    def constants(self) -> dict[str, int]:
        """The tile as the kernels' constants."""
        return {
            "ROWS": self.rows,
            "LANES": self.lanes,
            "UNROLL": self.unroll,
            "VECTOR": self.vector,
            "STAGES": self.stages,
        }


# One shape for both kernels and all vocabularies. At 8192 bf16 tokens on an H200 the forward ran at 94 % of
# the bandwidth of a copy for 32000 entries and 103 % for 128256, the backward at 94 %, and none of 18 others
# was 1 % faster there. That was before the forward's sums were compensated: 92 % and 105 % since. Rows of
# 4096 entries and fewer stayed below 83 % in any.
THREADS = 128
THREAD_BYTES = 32  # a thread's part of a tile
STAGES = 4

COMBINE = Launch(rows=128, block=1, warps=4)


@functools.cache
def choose_tile(columns: int, element_size: int, aligned: bool = True, warp_size: int = WARP_SIZE) -> Tile:
    """The tile for rows of `columns` logits.

    Rows that are not `aligned` to 16 bytes are read value by value, so neighbours go to different lanes.
    """
    vector = VECTOR_BYTES // element_size if aligned else 1
    vectors = next_power_of_2(-(-columns // vector))
    lanes = min(vectors, THREADS)
    unroll = min(vectors // lanes, THREAD_BYTES // (vector * element_size))
    return Tile(THREADS // lanes, lanes, unroll, vector, THREADS // warp_size, STAGES)


# --- Kernels ---
# Bare names are pointers, p_ addresses, b_ loaded blocks, o_ offsets, m_ masks. Offsets are in 64 bits before
# a stride multiplies them. A row is a token; `inner` is the last dimension of the labels, and all before it
# share a stride. What changes with the batch must not specialise; columns and the logits' strides belong to
# the model, and Triton derives the 16-byte accesses from them.

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
INFINITY: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def _row_offset(o_r, inner, stride_outer, stride_inner):
    o_outer = o_r // inner
    o_inner = o_r - o_outer * inner
    return o_outer.to(tl.int64) * stride_outer + o_inner.to(tl.int64) * stride_inner


@triton.jit
def _columns(ROWS: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr, VECTOR: tl.constexpr):
    """Column offsets in a tile, `[UNROLL, 1, LANES, VECTOR]`."""
    o_u = tl.arange(0, UNROLL)[:, None, None, None]
    o_l = tl.arange(0, LANES)[None, None, :, None]
    o_v = tl.arange(0, VECTOR)[None, None, None, :]
    return (o_u * LANES + o_l) * VECTOR + o_v


@triton.jit
def _exponential(b):
    """e^b. Folding the maximum into the factor would save an operation and be inexact at the maximum."""
    return tl.exp2(b * LOG2_E)


@triton.jit
def _finite(b_max):
    """What to subtract for a maximum of b_max: nothing while all values are -inf, as -inf - -inf is NaN."""
    return tl.where(b_max == -INFINITY, 0.0, b_max)


@triton.jit
def _accumulate(b_x, m, count, b_max, b_sum, b_lost, b_shifted, SMOOTHED: tl.constexpr):
    """Takes a tile into each lane's maximum and, relative to it, sums of exponentials and (SMOOTHED) values.

    `count` is the number of values that each lane has had before. A lane may hold most of a row's sum and
    have hundreds of tiles to add: `b_lost` is what rounding has added too much (Kahan, 1965).
    """
    b_new = tl.maximum(b_max, tl.max(tl.max(b_x, axis=3), axis=0))
    b_reference = _finite(b_new)
    b_relative = b_x - b_reference[None, :, :, None]
    b_factor = _exponential(b_max - b_reference)
    b_before = b_sum * b_factor
    b_add = tl.sum(tl.sum(_exponential(b_relative), axis=3), axis=0) - b_lost * b_factor
    b_sum = b_before + b_add
    b_lost = (b_sum - b_before) - b_add
    if SMOOTHED:
        # All terms have one sign, so nothing cancels, however far the logits are from zero.
        b_shifted += count * (_finite(b_max) - b_reference)
        b_shifted += tl.sum(tl.sum(tl.where(m, b_relative, 0.0), axis=3), axis=0)
    return b_new, b_sum, b_lost, b_shifted


@triton.jit
def _loss(b_sum, b_target, b_shifted, smoothing, spread):
    """The loss from the sum of exponentials, target's logit and sum of logits, relative to the maximum."""
    b_log_sum = tl.log(b_sum)
    b_loss = b_log_sum - b_target
    if smoothing is not None:
        b_loss = (1.0 - smoothing) * b_loss - (spread * b_shifted - smoothing * b_log_sum)
    return b_loss


UNSPECIALISED = (
    "rows",
    "inner",
    "stride_target_outer",
    "stride_target_inner",
    "stride_dloss_outer",
    "stride_dloss_inner",
    "vocab_start",
    "vocab_size",
    "ignore_index",
    "shards",
    "tiles",
    "last_columns",
    "rank",
)


@triton.jit(do_not_specialize=UNSPECIALISED)
def cross_entropy_forward_kernel(
    logits,
    target,
    statistics,
    loss,
    out_of_range,
    stride_logits_outer,
    stride_logits_inner,
    stride_target_outer,
    stride_target_inner,
    rows,
    inner,
    columns,
    vocab_start,
    vocab_size,
    ignore_index,
    smoothing,
    spread,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`loss` and `statistics` `[rows, 2]`; without `loss`, a shard's: `[rows, 4]`, or 5 if it is smoothed."""
    SMOOTHED: tl.constexpr = smoothing is not None
    WIDTH: tl.constexpr = 2 if loss is not None else 5 if SMOOTHED else 4
    BLOCK: tl.constexpr = UNROLL * LANES * VECTOR
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < rows
    o_target = _row_offset(o_r, inner, stride_target_outer, stride_target_inner)
    b_target = tl.load(target + o_target, mask=m_r, other=-1)
    m_live = m_r & (b_target >= 0) & (b_target != ignore_index)
    p_row = logits + _row_offset(o_r, inner, stride_logits_outer, stride_logits_inner)

    o_n = _columns(ROWS, LANES, UNROLL, VECTOR)
    p_x = p_row[None, :, None, None] + o_n
    m_read = m_live[None, :, None, None]
    b_max = tl.full([ROWS, LANES], -INFINITY, dtype=tl.float32)
    b_sum = tl.zeros([ROWS, LANES], dtype=tl.float32)
    b_lost = tl.zeros([ROWS, LANES], dtype=tl.float32)
    b_shifted = tl.zeros([ROWS, LANES], dtype=tl.float32)
    # A row without a label is not read; what comes of the zeros in its place is dropped at the end.
    o_last = columns // BLOCK * BLOCK
    o_stop = tl.where(tl.max(m_live.to(tl.int32), axis=0) > 0, o_last, 0)
    for o in tl.range(0, o_stop, BLOCK, num_stages=STAGES):
        b_x = tl.load(p_x + o, mask=m_read, other=0.0).to(tl.float32)
        b_max, b_sum, b_lost, b_shifted = _accumulate(
            b_x, m_read, o // LANES, b_max, b_sum, b_lost, b_shifted, SMOOTHED
        )
    for o in range(o_last, columns, BLOCK):
        m = m_read & (o_n < columns - o)
        b_x = tl.load(p_x + o, mask=m, other=-INFINITY).to(tl.float32)
        b_max, b_sum, b_lost, b_shifted = _accumulate(
            b_x, m, o // LANES, b_max, b_sum, b_lost, b_shifted, SMOOTHED
        )

    b_row_max = tl.max(b_max, axis=1)
    b_reference = _finite(b_row_max)
    b_row_sum = tl.sum(b_sum * _exponential(b_max - b_reference[:, None]), axis=1)
    b_row_shifted = tl.zeros([ROWS], dtype=tl.float32)
    if SMOOTHED:
        m_tail = o_n < columns - o_last
        b_count = o_last // LANES + tl.sum(tl.sum(m_tail.to(tl.int32), axis=3), axis=0)
        b_shifted += b_count * (_finite(b_max) - b_reference[:, None])
        b_row_shifted = tl.sum(b_shifted, axis=1)

    b_local = b_target - vocab_start
    m_here = m_live & (b_local >= 0) & (b_local < columns)
    b_at_target = tl.load(p_row + tl.where(m_here, b_local, 0), mask=m_here, other=0.0).to(tl.float32)
    if out_of_range is not None:
        m_beyond = m_live & (b_target >= vocab_size)
        b_one = tl.full([ROWS], 1, dtype=tl.int64)
        tl.atomic_add(out_of_range + tl.zeros([ROWS], dtype=tl.int32), b_one, mask=m_beyond, sem="relaxed")

    if loss is not None:
        # Nothing but -inf in a row is NaN, as is 0/0; the sum alone would say log 0.
        b_row_sum = tl.where(b_row_max == -INFINITY, float("nan"), b_row_sum)
        b_relative = tl.where(m_here, b_at_target - b_row_max, 0.0)
        b_loss = _loss(b_row_sum, b_relative, b_row_shifted, smoothing, spread)
        tl.store(loss + o_r, tl.where(m_live, b_loss, 0.0), mask=m_r)
    p_statistics = statistics + o_r.to(tl.int64) * WIDTH
    tl.store(p_statistics, b_row_max, mask=m_r)
    tl.store(p_statistics + 1, b_row_sum, mask=m_r)
    if loss is None:
        tl.store(p_statistics + 2, b_at_target, mask=m_r)
        tl.store(p_statistics + 3, m_here.to(tl.float32), mask=m_r)
        if SMOOTHED:
            tl.store(p_statistics + 4, b_row_shifted, mask=m_r)


@triton.jit(do_not_specialize=UNSPECIALISED)
def cross_entropy_combine_kernel(
    gathered,
    target,
    statistics,
    loss,
    stride_target_outer,
    stride_target_inner,
    rows,
    inner,
    columns,
    last_columns,
    shards,
    tiles,
    rank,
    ignore_index,
    smoothing,
    spread,
    ROWS: tl.constexpr,
):
    """`gathered` `[shards, rows, 4 or 5]` to `loss` and `statistics` `[rows, 2]`, in the order of the shards.

    Each rank has `tiles` shards of `columns` entries, but for its last one of `last_columns`. Label smoothing
    spreads over the shards of `rank`, or, where that is None, over all.
    """
    SMOOTHED: tl.constexpr = smoothing is not None
    WIDTH: tl.constexpr = 5 if SMOOTHED else 4
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < rows
    o_target = _row_offset(o_r, inner, stride_target_outer, stride_target_inner)
    b_target = tl.load(target + o_target, mask=m_r, other=-1)
    m_live = m_r & (b_target >= 0) & (b_target != ignore_index)
    o_gathered = o_r.to(tl.int64) * WIDTH
    stride_shard = rows.to(tl.int64) * WIDTH

    b_max = tl.full([ROWS], -INFINITY, dtype=tl.float32)
    for i_shard in range(shards):
        p_shard = gathered + i_shard * stride_shard + o_gathered
        b_max = tl.maximum(b_max, tl.load(p_shard, mask=m_r, other=0.0))
    b_sum = tl.zeros([ROWS], dtype=tl.float32)
    b_relative = tl.zeros([ROWS], dtype=tl.float32)
    b_shifted = tl.zeros([ROWS], dtype=tl.float32)
    for i_shard in range(shards):
        p_shard = gathered + i_shard * stride_shard + o_gathered
        b_shard_max = tl.load(p_shard, mask=m_r, other=0.0)
        b_sum += tl.load(p_shard + 1, mask=m_r, other=0.0) * _exponential(b_shard_max - b_max)
        b_at_target = tl.load(p_shard + 2, mask=m_r, other=0.0)
        m_here = tl.load(p_shard + 3, mask=m_r, other=0.0) > 0.0
        b_relative += tl.where(m_here, b_at_target - b_max, 0.0)
        if SMOOTHED:
            size = tl.where(i_shard % tiles == tiles - 1, last_columns, columns)
            b_shard_shifted = tl.load(p_shard + 4, mask=m_r, other=0.0)
            b_shard_shifted += size * (_finite(b_shard_max) - b_max)
            if rank is None:
                b_shifted += b_shard_shifted
            else:
                b_shifted += tl.where(i_shard // tiles == rank, b_shard_shifted, 0.0)

    b_loss = _loss(b_sum, b_relative, b_shifted, smoothing, spread)
    tl.store(loss + o_r, tl.where(m_live, b_loss, 0.0), mask=m_r)
    p_statistics = statistics + o_r.to(tl.int64) * 2
    tl.store(p_statistics, b_max, mask=m_r)
    tl.store(p_statistics + 1, b_sum, mask=m_r)


@triton.jit
def _gradient(b_x, o, b_reference, b_scale, b_uniform, b_local, b_at_target, SMOOTHED: tl.constexpr):
    b_dx = _exponential(b_x - b_reference[None, :, None, None]) * b_scale[None, :, None, None]
    if SMOOTHED:
        b_dx -= b_uniform[None, :, None, None]
    return tl.where(o == b_local[None, :, None, None], b_dx - b_at_target[None, :, None, None], b_dx)


@triton.jit(do_not_specialize=UNSPECIALISED)
def cross_entropy_backward_kernel(
    logits,
    target,
    statistics,
    dloss,
    dlogits,
    stride_logits_outer,
    stride_logits_inner,
    stride_target_outer,
    stride_target_inner,
    stride_dloss_outer,
    stride_dloss_inner,
    stride_dlogits_outer,
    stride_dlogits_inner,
    rows,
    inner,
    columns,
    vocab_start,
    ignore_index,
    smoothing,
    spread,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    SMOOTHED: tl.constexpr = smoothing is not None
    BLOCK: tl.constexpr = UNROLL * LANES * VECTOR
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < rows
    o_target = _row_offset(o_r, inner, stride_target_outer, stride_target_inner)
    b_target = tl.load(target + o_target, mask=m_r, other=-1)
    o_dloss = _row_offset(o_r, inner, stride_dloss_outer, stride_dloss_inner)
    b_dloss = tl.load(dloss + o_dloss, mask=m_r, other=0.0).to(tl.float32)
    p_statistics = statistics + o_r.to(tl.int64) * 2
    b_max = tl.load(p_statistics, mask=m_r, other=0.0)
    b_sum = tl.load(p_statistics + 1, mask=m_r, other=1.0)

    # A row whose gradient is zero is written, not read; but NaN times zero stays NaN.
    m_live = m_r & (b_target >= 0) & (b_target != ignore_index)
    m_live = m_live & ((b_dloss != 0.0) | (b_sum != b_sum))
    b_reference = tl.where(m_live, b_max, 0.0)
    b_dloss = tl.where(m_live, b_dloss, 0.0)
    b_scale = tl.math.div_rn(b_dloss, tl.where(m_live, b_sum, 1.0))
    b_uniform = b_dloss
    b_at_target = b_dloss
    if SMOOTHED:
        b_uniform = b_dloss * spread
        b_at_target = b_dloss * (1.0 - smoothing)
    b_local = b_target - vocab_start
    b_local = tl.where(m_live & (b_local >= 0) & (b_local < columns), b_local, -1).to(tl.int32)

    o_n = _columns(ROWS, LANES, UNROLL, VECTOR)
    p_x = (
        logits + _row_offset(o_r, inner, stride_logits_outer, stride_logits_inner)[None, :, None, None] + o_n
    )
    p_dx = (
        dlogits
        + _row_offset(o_r, inner, stride_dlogits_outer, stride_dlogits_inner)[None, :, None, None]
        + o_n
    )
    m_read = m_live[None, :, None, None]
    m_write = m_r[None, :, None, None]
    o_last = columns // BLOCK * BLOCK
    for o in tl.range(0, o_last, BLOCK, num_stages=STAGES):
        b_x = tl.load(p_x + o, mask=m_read, other=0.0, eviction_policy="evict_first").to(tl.float32)
        b_dx = _gradient(b_x, o_n + o, b_reference, b_scale, b_uniform, b_local, b_at_target, SMOOTHED)
        tl.store(p_dx + o, b_dx.to(dlogits.dtype.element_ty), mask=m_write, eviction_policy="evict_first")
    for o in range(o_last, columns, BLOCK):
        m = o_n < columns - o
        b_x = tl.load(p_x + o, mask=m & m_read, other=0.0, eviction_policy="evict_first").to(tl.float32)
        b_dx = _gradient(b_x, o_n + o, b_reference, b_scale, b_uniform, b_local, b_at_target, SMOOTHED)
        tl.store(p_dx + o, b_dx.to(dlogits.dtype.element_ty), mask=m & m_write, eviction_policy="evict_first")


# --- Launchers: at least one token ---


def _token_strides(x: torch.Tensor, dimensions: int) -> tuple[int, int] | None:
    """Strides of `x` along its first `dimensions`: all but the last of them as one, and the last.

    None where those have no common stride.
    """
    sizes, strides = x.shape[:dimensions], x.stride()[:dimensions]
    if not sizes:
        return 0, 0
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
    return step or 0, 0 if sizes[-1] == 1 else strides[-1]


def _as_tokens(x: torch.Tensor, dimensions: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """`x` itself, or one contiguous copy where two strides cannot reach its tokens, and the strides."""
    strides = None
    if x.dim() == dimensions or x.shape[-1] == 1 or x.stride(-1) == 1:
        strides = _token_strides(x, dimensions)
    if strides is None:
        x = x.contiguous()
        strides = _token_strides(x, dimensions)
        assert strides is not None
    return x, strides


def _aligned(x: torch.Tensor, strides: tuple[int, int]) -> bool:
    """Whether Triton makes 16-byte accesses to the tokens of `x`: the same test as its specialisation."""
    return x.data_ptr() % VECTOR_BYTES == 0 and all(stride % 16 == 0 for stride in strides)


def _inner(target: torch.Tensor) -> int:
    return target.shape[-1] if target.dim() else 1


_OUT_OF_RANGE: dict[torch.device, torch.Tensor] = {}


def _out_of_range(device: torch.device) -> torch.Tensor:
    """The device's count of labels beyond the vocabulary. Stays there: reading it waits for the device."""
    count = _OUT_OF_RANGE.get(device)
    if count is None:
        count = torch.zeros(1, dtype=torch.int64, device=device)
        if type(count) is torch.Tensor:  # under a mode that gives others it would outlive the mode
            _OUT_OF_RANGE[device] = count
    return count


@dataclass(frozen=True)
class Options:
    """What a loss needs beside its tensors, the same in forward and backward."""

    group: torch.distributed.ProcessGroup | None  # None: the vocabulary is whole
    rank: int
    ranks: int
    vocab_start: int
    vocab_size: int
    ignore_index: int
    # Of a token's probability, the part that is spread over the vocabulary, and what each entry has of it.
    smoothing: float | None
    spread: float | None
    partition: bool
    in_place: bool
    name: str  # by which launches and collectives are counted

    @property
    def width(self) -> int:
        """Numbers of a token in the statistics of a shard."""
        return 4 if self.smoothing is None else 5


def launch_forward(
    logits: torch.Tensor,
    strides: tuple[int, int],
    target: torch.Tensor,
    statistics: torch.Tensor,
    loss: torch.Tensor | None,
    options: Options,
    counts_labels: bool = True,
) -> None:
    """Writes `loss` and `statistics` `[tokens, 2]`; without `loss`, a shard's `[tokens, options.width]`."""
    rows, columns = target.numel(), logits.shape[-1]
    target, strides_target = _as_tokens(target, target.dim())
    tile = choose_tile(columns, logits.element_size(), _aligned(logits, strides))
    with device_guard(logits):
        cross_entropy_forward_kernel[(-(-rows // tile.rows),)](
            logits,
            target,
            statistics,
            loss,
            _out_of_range(logits.device) if counts_labels else None,
            *strides,
            *strides_target,
            rows,
            _inner(target),
            columns,
            options.vocab_start,
            options.vocab_size,
            options.ignore_index,
            options.smoothing,
            options.spread,
            **tile.constants(),
            num_warps=tile.warps,
        )
    LAUNCHES[f"{options.name}_forward"] += 1


def launch_combine(
    shard: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    loss: torch.Tensor,
    columns: int,
    options: Options,
    last_columns: int | None = None,
) -> None:
    """Writes `loss` and `statistics` `[tokens, 2]` from each rank's `shard` `[tiles, tokens, options.width]`.

    A tile is of `columns` entries, the last of `last_columns`.
    """
    rows, tiles = target.numel(), shard.shape[0]
    target, strides_target = _as_tokens(target, target.dim())
    gathered = shard
    with device_guard(shard):
        if options.group is not None:
            gathered = torch.empty(
                (options.ranks * tiles * rows, options.width), dtype=torch.float32, device=shard.device
            )
            torch.distributed.all_gather_into_tensor(gathered, shard.flatten(0, 1), group=options.group)
            COLLECTIVES[options.name] += 1
        cross_entropy_combine_kernel[(COMBINE.row_blocks(rows),)](
            gathered,
            target,
            statistics,
            loss,
            *strides_target,
            rows,
            _inner(target),
            columns,
            columns if last_columns is None else last_columns,
            options.ranks * tiles,
            tiles,
            options.rank if options.partition else None,
            options.ignore_index,
            options.smoothing,
            options.spread,
            ROWS=COMBINE.rows,
            num_warps=COMBINE.warps,
        )
    LAUNCHES[f"{options.name}_combine"] += 1


def _forward(
    logits: torch.Tensor, strides: tuple[int, int], target: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and each token's maximum and sum of exponentials over the whole vocabulary."""
    rows, columns = target.numel(), logits.shape[-1]
    loss = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    statistics = torch.empty((rows, 2), dtype=torch.float32, device=logits.device)
    if options.group is None:
        launch_forward(logits, strides, target, statistics, loss, options)
    else:
        shard = torch.empty((1, rows, options.width), dtype=torch.float32, device=logits.device)
        launch_forward(logits, strides, target, shard, None, options)
        launch_combine(shard, target, statistics, loss, columns, options)
    return loss, statistics


def launch_backward(
    logits: torch.Tensor,
    strides: tuple[int, int],
    target: torch.Tensor,
    statistics: torch.Tensor,
    dloss: torch.Tensor,
    dlogits: torch.Tensor,
    strides_dlogits: tuple[int, int],
    options: Options,
) -> None:
    """Writes `dlogits`, which may be `logits`."""
    rows, columns = target.numel(), logits.shape[-1]
    target, strides_target = _as_tokens(target, target.dim())
    dloss, strides_dloss = _as_tokens(dloss, target.dim())
    aligned = _aligned(logits, strides) and _aligned(dlogits, strides_dlogits)
    tile = choose_tile(columns, logits.element_size(), aligned)
    with device_guard(logits):
        cross_entropy_backward_kernel[(-(-rows // tile.rows),)](
            logits,
            target,
            statistics,
            dloss,
            dlogits,
            *strides,
            *strides_target,
            *strides_dloss,
            *strides_dlogits,
            rows,
            _inner(target),
            columns,
            options.vocab_start,
            options.ignore_index,
            options.smoothing,
            options.spread,
            **tile.constants(),
            num_warps=tile.warps,
        )
    LAUNCHES[f"{options.name}_backward"] += 1


# --- Autograd ---


class CrossEntropyFunction(torch.autograd.Function):
    """`apply(logits, target, options)`: the arguments of `vocab_parallel_cross_entropy`, already checked."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, options: Options) -> torch.Tensor:
        ctx.options = options
        ctx.in_place = False
        given = target
        # A copy: a caller may reuse the labels' memory before the backward.
        target = target.clone(memory_format=torch.contiguous_format)
        if logits.numel() == 0:
            ctx.save_for_backward(logits, target, None)
            return torch.empty(target.shape, dtype=torch.float32, device=logits.device)
        tokens, strides = _as_tokens(logits, target.dim())
        if options.in_place and tokens is logits:
            ctx.in_place = may_overwrite(logits, given)
        loss, statistics = _forward(tokens, strides, target, options)
        ctx.save_for_backward(tokens, target, statistics)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        logits, target, statistics = ctx.saved_tensors
        if logits.numel() == 0:
            return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device), None, None
        dloss = plain(dloss)
        in_place = ctx.in_place and not shares_memory(logits, dloss)
        # Read anew: hooks on saved tensors may have brought them back with other strides.
        logits, strides = _as_tokens(logits, target.dim())
        if in_place:
            dlogits, strides_dlogits = logits.detach(), strides
        else:
            dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
            _, strides_dlogits = _as_tokens(dlogits, target.dim())
        statistics = statistics.contiguous()
        launch_backward(logits, strides, target, statistics, dloss, dlogits, strides_dlogits, ctx.options)
        if in_place:
            # Kernels write past autograd's back: from here on it refuses whatever else has saved the logits.
            torch.autograd.graph.increment_version(logits)
        return dlogits, None, None


def _check(logits: torch.Tensor, target: torch.Tensor, label_smoothing: float, scope: str) -> None:
    if logits.dtype not in DTYPES:
        raise TypeError(
            f"cross_entropy: logits are {logits.dtype}; they must be bfloat16, float16 or float32"
        )
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"cross_entropy: logits have shape {tuple(logits.shape)}; the last dimension is a vocabulary"
        )
    check_target("cross_entropy", "logits", logits, target, tuple(logits.shape[:-1]))
    check_smoothing("cross_entropy", label_smoothing, scope)


def check_target(
    op: str, name: str, x: torch.Tensor, target: torch.Tensor, expected: tuple[int, ...]
) -> None:
    """Raises TypeError or ValueError where labels are not int64 `expected`, or not on the device of `x`."""
    if target.dtype != torch.int64:
        raise TypeError(f"{op}: labels are {target.dtype}; they must be int64")
    if target.shape != expected:
        raise ValueError(
            f"{op}: labels have shape {tuple(target.shape)}; {name} {tuple(x.shape)} need {expected}"
        )
    if target.device != x.device:
        raise ValueError(f"{op}: labels are on {target.device} and {name} on {x.device}")


def check_smoothing(op: str, label_smoothing: float, scope: str) -> None:
    """Raises ValueError where label smoothing or its scope is none."""
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"{op}: label_smoothing is {label_smoothing}; it must be in [0, 1)")
    if scope not in SCOPES:
        raise ValueError(f"{op}: label_smoothing_scope is {scope!r}; it must be one of {', '.join(SCOPES)}")


def check_range(op: str, target: torch.Tensor, options: Options) -> None:
    """Raises IndexError where a label is beyond the vocabulary, and RuntimeError under a graph's capture."""
    vocab_size, ignore_index = options.vocab_size, options.ignore_index
    if target.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{op}: labels cannot be checked while a graph is captured: it waits for the device"
        )
    found = ((target >= vocab_size) & (target != ignore_index)).nonzero()
    if len(found):
        position = tuple(found[0].tolist())
        raise IndexError(
            f"{op}: label {int(target[position])} at position {position} is outside the "
            f"vocabulary of {vocab_size} entries ({len(found)} such labels)"
        )


def make_options(
    name: str,
    columns: int,
    *,
    group: torch.distributed.ProcessGroup | None,
    label_smoothing: float,
    label_smoothing_scope: str,
    ignore_index: int,
    in_place: bool = False,
    vocab_start: int | None = None,
) -> Options:
    """The options for a rank's part of `columns` entries. Raises ValueError: label smoothing of one entry."""
    ranks = 1 if group is None else group.size()
    rank = 0 if group is None or ranks == 1 else group.rank()
    if vocab_start is None:
        vocab_start = rank * columns
    smoothing = spread = None
    partition = label_smoothing_scope == "partition" and ranks > 1
    if label_smoothing > 0:
        others = (columns if partition else columns * ranks) - 1
        if others == 0:
            raise ValueError(f"{name}: label smoothing needs a vocabulary of two entries or more")
        spread = label_smoothing / others
        smoothing = spread * (others + 1)
    return Options(
        group=group if ranks > 1 else None,
        rank=rank,
        ranks=ranks,
        vocab_start=vocab_start,
        vocab_size=columns * ranks if ranks > 1 else vocab_start + columns,
        ignore_index=ignore_index,
        smoothing=smoothing,
        spread=spread,
        partition=partition and smoothing is not None,
        in_place=in_place,
        name=name,
    )


def out_of_range_labels(wait: bool = True) -> int | None:
    """How many labels beyond the vocabulary this process has met.

    Reading it waits for the devices. None: `wait` is False, and one is still at work.
    """
    streams = [torch.cuda.current_stream(device) for device in _OUT_OF_RANGE if device.type == "cuda"]
    if not wait and not all(stream.query() for stream in streams):
        return None
    return sum(int(count.item()) for count in _OUT_OF_RANGE.values())


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    label_smoothing: float = 0.0,
    label_smoothing_scope: Literal["global", "partition"] = "global",
    ignore_index: int = -100,
    check_labels: bool = False,
    in_place: bool = False,
    vocab_start: int | None = None,
) -> torch.Tensor:
    """Each token's `log Σ exp(logits) - logits[target]`, the vocabulary being whole or split between ranks.

    All arithmetic is in float32. A negative label, or `ignore_index`, has loss 0 and gradient 0, whatever its
    logits are. A label beyond the vocabulary has the loss `log Σ exp(logits - max)` and the softmax as its
    gradient, so that a broken tokenizer stays visible; `out_of_range_labels` counts them.

    Args:
        logits: `[..., V_local]`, bfloat16, float16 or float32, any strides; not written to in the forward.
            Read where they are if the vocabulary is contiguous and two strides reach all tokens, else copied.
        target: `[...]`, int64, any strides, the same on all ranks.
        group: the ranks that share the vocabulary; None or one rank: it is whole. More take one all-gather.
        label_smoothing: in [0, 1): the probability that goes to the labels other than the target, in equal
            parts.
        label_smoothing_scope: which labels those are. `global`: the whole vocabulary's. `partition`: those of
            the rank's own part, by which each rank has another loss.
        ignore_index: a label to leave out, beside all negative ones.
        check_labels: wait for the device and refuse labels beyond the vocabulary.
        in_place: let the backward write the gradient over the logits. Autograd is told: a second backward, or
            another operation that saved the logits and whose backward comes later, raises its usual error.
            Whoever else holds the logits then sees their gradient. A new buffer is taken all the same where
            the logits are a leaf or a view of one (as far as autograd knows), overlap themselves, share
            memory with another operand or had to be copied, and under hooks on saved tensors.
        vocab_start: this rank's first label; by default the ranks have equal parts in rank order.

    Returns:
        `[...]` float32, bitwise equal on all ranks (but for the scope `partition`). The gradient of the
        logits has their dtype.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes, devices or options do not fit.
        IndexError: `check_labels`, and a label is beyond the vocabulary; names the first, its position and V.
        RuntimeError: `check_labels` while a CUDA graph is captured.
    """
    _check(logits, target, label_smoothing, label_smoothing_scope)
    options = make_options(
        "cross_entropy",
        logits.shape[-1],
        group=group,
        label_smoothing=label_smoothing,
        label_smoothing_scope=label_smoothing_scope,
        ignore_index=ignore_index,
        in_place=in_place,
        vocab_start=vocab_start,
    )
    if check_labels:
        check_range("cross_entropy", target, options)
    loss: torch.Tensor = CrossEntropyFunction.apply(plain(logits), target, options)
    return loss
