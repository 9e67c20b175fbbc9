# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-calls
"""The output layer and the cross-entropy of its logits, without the logits.

A vocabulary that is split between ranks already has a loss that is put together from shards, and to the loss
a tile of a rank's own part is just one more shard. So the logits are made a tile at a time, all tokens by
some columns, in one buffer that every tile uses in its turn: the forward leaves a tile's statistics, and the
backward makes the tile anew, writes its gradient over it and takes both products of that. The tile that the
forward made last is still in the buffer when the backward starts there.

The products are the vendor's library's, with PyTorch's settings of it, as an output layer's are (where it
splits a sum, `allow_bf16_reduced_precision_reduction` lets it add the parts in bfloat16). The gradient of the
weight is whole in each tile; that of the hidden state is a sum over tiles, and is kept in float32 until it is
complete.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed

from .autograd import Gradients, hooked, once_differentiable, plain
from .cross_entropy import (
    DTYPES,
    Options,
    check_range,
    check_smoothing,
    check_target,
    cross_entropy_reference,
    launch_backward,
    launch_combine,
    launch_forward,
    make_options,
)
from .launches import COLLECTIVES

NAME = "linear_cross_entropy"


def linear_cross_entropy_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    partition: tuple[int, int] | None = None,
    logit_scale: float = 1.0,
) -> torch.Tensor:
    """The same in plain PyTorch, in the dtype given: `hidden` `[..., H]`, `weight` `[V, H]` (all of it).

    `partition` is that of `cross_entropy_reference`.
    """
    return cross_entropy_reference(
        hidden @ weight.t() * logit_scale,
        target,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        partition=partition,
    )


# --- Tiles ---

#: MiB that one call may take beside its inputs and their gradients.
BUDGET_MB = 512

# A tile's product with the weight adds to a float32 sum that is read and written for it, at two operations a
# column for 8 bytes: with fewer columns than this that is memory's time and not the multipliers'.
FEWEST_COLUMNS = 2048


@dataclass(frozen=True)
class Tiling:
    """A rank's part of the vocabulary in `count` tiles of `columns`, the last one of `last`.

    `width` is the distance between two tokens in the buffer; a multiple of 16, so that whatever the
    vocabulary is, a row starts where 16 bytes can be read at once.
    """

    columns: int
    count: int
    last: int
    width: int

    def tiles(self) -> Iterator[tuple[int, int]]:
        """The first column of each tile and its number of columns."""
        for index in range(self.count):
            yield index * self.columns, self.last if index == self.count - 1 else self.columns


def _split(vocabulary: int, count: int) -> Tiling:
    """About `count` tiles of equal size, none of them much smaller than the others."""
    for alignment in (256, 128, 64, 16):
        columns = -(-vocabulary // (count * alignment)) * alignment
        tiles = -(-vocabulary // columns)
        last = vocabulary - (tiles - 1) * columns
        if tiles == count and (tiles == 1 or 2 * last >= columns):
            break
    return Tiling(min(columns, vocabulary), tiles, last, columns)


@functools.lru_cache(maxsize=256)  # token counts may be another in each call
def choose_tiling(
    rows: int,
    hidden_size: int,
    vocabulary: int,
    element_size: int,
    budget: int,
    ranks: int = 1,
    sequence_parallel: bool = False,
) -> Tiling:
    """The fewest tiles with which `rows` tokens stay within `budget` bytes, down to FEWEST_COLUMNS each."""
    fewest = 1
    for count in range(1, max(1, vocabulary // FEWEST_COLUMNS) + 1):
        tiling = _split(vocabulary, count)
        numbers = 5 * tiling.count * (1 if ranks == 1 else ranks + 1) + 3  # of a token, in float32
        taken = rows * (tiling.width * element_size + numbers * 4)
        if tiling.count > 1 and element_size < 4:
            taken += rows * hidden_size * 4
        if sequence_parallel:  # the gathered hidden state, and its gradient before it is scattered
            taken += rows * hidden_size * element_size * 2
        if taken <= budget:
            return tiling
        fewest = count
    return _split(vocabulary, fewest)


# --- Products ---

# Where a sum cannot be had from the library, the product to add is made in blocks of so many elements.
BLOCK_ELEMENTS = 2**23


@functools.cache
def _sums_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the library adds a product of `dtype` to float32 memory there: asked, not known by version."""
    overload = getattr(torch.ops.aten.addmm, "dtype_out", None)
    if overload is None or device.type != "cuda":
        return False
    factor = torch.zeros((16, 16), dtype=dtype, device=device)
    total = torch.zeros((16, 16), dtype=torch.float32, device=device)
    try:
        overload(total, factor, factor, torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b`, in float32 where there is such a product."""
    if not a.is_cuda:
        return a.float() @ b.float()
    overload = getattr(torch.ops.aten.mm, "dtype", None)
    product: torch.Tensor = a @ b if overload is None else overload(a, b, torch.float32)
    return product


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, first: bool = False) -> None:
    """Adds `a @ b` to `total` `[m, n]`, which is in float32 or the dtype of `a`; `first`: writes it."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif _sums_in_place(a.device, a.dtype):
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, beta=0 if first else 1, out=total)
    else:
        step = max(1, BLOCK_ELEMENTS // total.shape[1])
        for rows, block in zip(total.split(step), a.split(step)):
            product = _product(block, b)
            rows.copy_(product) if first else rows.add_(product)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """`out = scale · hidden @ weight.T`, rounded once."""
    if scale == 1.0:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(out, hidden, weight.t(), beta=0, alpha=scale, out=out)


# --- Between ranks ---


def _gather(hidden: torch.Tensor, options: Options) -> torch.Tensor:
    """All ranks' parts of the sequence, `[s, ...]`."""
    whole = torch.empty(
        (hidden.shape[0] * options.ranks, *hidden.shape[1:]), dtype=hidden.dtype, device=hidden.device
    )
    torch.distributed.all_gather_into_tensor(whole, hidden.contiguous(), group=options.group)
    COLLECTIVES[NAME] += 1
    return whole


def _reduce(
    dhidden: torch.Tensor, like: torch.Tensor, sequence_parallel: bool, options: Options
) -> tuple[torch.Tensor, Any]:
    """Starts the sum over ranks of `dhidden`: where it will be, of the shape of `like`, and what to wait for.

    In the dtype of the hidden state: what a column-parallel layer exchanges, at half the bytes of float32.
    """
    COLLECTIVES[NAME] += 1
    if not sequence_parallel:
        work = torch.distributed.all_reduce(dhidden, group=options.group, async_op=True)
        return dhidden.view(like.shape), work
    part = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    work = torch.distributed.reduce_scatter_tensor(
        part.view(-1, part.shape[-1]), dhidden, group=options.group, async_op=True
    )
    return part, work


# --- Autograd ---


@dataclass(frozen=True, eq=False)
class _Plan:
    """What the two directions need beside their tensors."""

    options: Options
    tiling: Tiling
    scale: float
    sequence_parallel: bool
    keep: bool
    main_grad: torch.Tensor | None
    parameter: torch.Tensor  # the weight as the caller has it, for the marks that it carries

    def shard(self, first: int) -> Options:
        """The options for a tile that starts at the rank's column `first`."""
        return replace(self.options, vocab_start=self.options.vocab_start + first)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _fused_gradient(plan: _Plan, like: torch.Tensor) -> torch.Tensor | None:
    """What goes to autograd in place of a gradient that is in `main_grad` already.

    Nobody reads it: a hook of a data-parallel wrapper waits for some gradient, then sees the weight's mark.
    """
    weight, main_grad = plan.parameter, plan.main_grad
    if main_grad is None or not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    allocate = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return allocate(main_grad.shape, dtype=like.dtype, device=like.device)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """`apply(hidden, weight, target, plan)`: the arguments of `linear_cross_entropy`, already checked."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, plan: _Plan
    ) -> torch.Tensor:
        ctx.plan, ctx.kept = plan, None
        loss = torch.empty(target.shape, dtype=torch.float32, device=hidden.device)
        # A copy: a caller may reuse the labels' memory before the backward.
        labels = target.flatten().clone()
        if target.numel() == 0:
            ctx.save_for_backward(hidden, weight, labels, None)
            return loss
        options, tiling, rows = plan.options, plan.tiling, target.numel()
        x = _tokens(_gather(hidden, options) if plan.sequence_parallel else hidden)
        statistics = torch.empty((rows, 2), dtype=torch.float32, device=x.device)
        buffer = torch.empty((rows, tiling.width), dtype=x.dtype, device=x.device)
        strides = (0, tiling.width)
        alone = tiling.count == 1 and options.group is None
        shards = statistics.unsqueeze(0)
        if not alone:
            shards = torch.empty((tiling.count, rows, options.width), dtype=torch.float32, device=x.device)
        for shard, (first, columns) in zip(shards, tiling.tiles()):
            logits = buffer[:, :columns]
            _logits(x, weight[first : first + columns], plan.scale, logits)
            launch_forward(
                logits,
                strides,
                labels,
                shard,
                loss.view(-1) if alone else None,
                plan.shard(first),
                counts_labels=first == 0,
            )
        if not alone:
            launch_combine(
                shards, labels, statistics, loss.view(-1), tiling.columns, options, last_columns=tiling.last
            )
        # Under hooks on saved tensors memory is to be given back, or this forward will be repeated.
        if plan.keep and not hooked():
            ctx.kept = buffer
        ctx.save_for_backward(hidden, weight, labels, statistics)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> Gradients:
        hidden, weight, target, statistics = ctx.saved_tensors
        plan: _Plan = ctx.plan
        options, tiling, rows = plan.options, plan.tiling, target.numel()
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        dhidden = dweight = total = work = None
        if wants_weight and plan.main_grad is None:
            dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        if rows == 0:
            if dweight is not None:
                dweight.zero_()
            elif wants_weight:
                dweight = _fused_gradient(plan, hidden)
            dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
            return dhidden if wants_hidden else None, dweight, None, None

        x = _tokens(_gather(hidden, options) if plan.sequence_parallel else hidden)
        labels, statistics = target.contiguous(), statistics.contiguous()
        dloss = plain(dloss).reshape(-1)
        if plan.scale != 1.0:
            dloss = dloss * plan.scale
        # Taken, as the gradient is written over it: a second backward makes all tiles anew.
        kept, ctx.kept = ctx.kept, None
        buffer = kept
        if buffer is None:
            buffer = torch.empty((rows, tiling.width), dtype=x.dtype, device=x.device)
        if wants_hidden:
            alone = tiling.count == 1
            total = torch.empty(
                (rows, x.shape[1]), dtype=x.dtype if alone else torch.float32, device=x.device
            )
        strides = (0, tiling.width)
        for first, columns in reversed(list(tiling.tiles())):
            newest, oldest = first + columns == weight.shape[0], first == 0
            part, logits = weight[first : first + columns], buffer[:, :columns]
            if kept is None or not newest:
                _logits(x, part, plan.scale, logits)
            launch_backward(logits, strides, labels, statistics, dloss, logits, strides, plan.shard(first))
            if total is not None:
                add_product(total, logits, part, first=newest)
                if oldest:
                    dhidden = total.to(x.dtype)
                    if options.group is None:
                        dhidden = dhidden.view(hidden.shape)
                    else:  # while the last product of the weight is made
                        dhidden, work = _reduce(dhidden, hidden, plan.sequence_parallel, options)
            if dweight is not None:
                torch.mm(logits.t(), x, out=dweight[first : first + columns])
            elif wants_weight and plan.main_grad is not None:
                add_product(plan.main_grad[first : first + columns], logits.t(), x)
        if wants_weight and dweight is None:
            dweight = _fused_gradient(plan, hidden)
        if work is not None:
            work.wait()
        return dhidden, dweight, None, None


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    main_grad: torch.Tensor | None,
    logit_scale: float,
    budget_mb: float,
) -> None:
    if hidden.dtype not in DTYPES or weight.dtype != hidden.dtype:
        raise TypeError(
            f"{NAME}: hidden is {hidden.dtype} and weight {weight.dtype}; both must be bfloat16, float16 or "
            f"float32"
        )
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1] or not weight.numel():
        raise ValueError(
            f"{NAME}: hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; they must be "
            f"[..., H] and [V, H]"
        )
    if weight.device != hidden.device:
        raise ValueError(f"{NAME}: weight is on {weight.device} and hidden on {hidden.device}")
    if main_grad is not None:
        if main_grad.dtype not in (torch.float32, weight.dtype):
            raise TypeError(
                f"{NAME}: main_grad is {main_grad.dtype}; it must be float32 or the weight's {weight.dtype}"
            )
        if main_grad.shape != weight.shape or main_grad.device != weight.device:
            raise ValueError(
                f"{NAME}: main_grad has shape {tuple(main_grad.shape)} on {main_grad.device}; the weight has "
                f"{tuple(weight.shape)} on {weight.device}"
            )
    if logit_scale == 0.0 or not abs(logit_scale) < float("inf"):
        raise ValueError(f"{NAME}: logit_scale is {logit_scale}; it must be finite and not zero")
    if not 0 < budget_mb < 2**43:  # its bytes fit an int64
        raise ValueError(f"{NAME}: budget_mb is {budget_mb}; it must be above 0 and below 2**43")


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    label_smoothing: float = 0.0,
    label_smoothing_scope: Literal["global", "partition"] = "global",
    ignore_index: int = -100,
    check_labels: bool = False,
    logit_scale: float = 1.0,
    main_grad: torch.Tensor | None = None,
    budget_mb: float = BUDGET_MB,
    keep: bool = True,
) -> torch.Tensor:
    """Each token's cross-entropy of the logits `logit_scale · hidden @ weight.T`, which nobody keeps.

    The loss is that of `vocab_parallel_cross_entropy` on these logits in the dtype of `hidden`, to which they
    are rounded once, with the same labels left out and counted. Its gradients are those of the output layer;
    the one of `hidden` is summed in float32 over the vocabulary and rounded once. Nothing waits for the
    device, and the same call gives the same bits.

    Args:
        hidden: `[..., H]`, bfloat16, float16 or float32, any strides. With `sequence_parallel`, this rank's
            part of the first dimension.
        weight: `[V_local, H]`, the dtype of `hidden`, any strides.
        target: `[...]`, int64, any strides, the same on all ranks.
        group: the ranks that share the vocabulary, in equal parts; None or one rank: it is whole. More take
            one all-gather in the forward, and in the backward one all-reduce of the gradient of `hidden`.
        sequence_parallel: gather `hidden` over `group` in both directions, and scatter its gradient.
        label_smoothing: as in `vocab_parallel_cross_entropy`.
        label_smoothing_scope: as in `vocab_parallel_cross_entropy`.
        ignore_index: as in `vocab_parallel_cross_entropy`.
        check_labels: as in `vocab_parallel_cross_entropy`.
        logit_scale: a factor for the logits; takes no pass of its own.
        main_grad: `[V_local, H]`, float32 or the weight's dtype, any strides: the gradient of the weight is
            added there. Autograd gets None for it, or, where the weight has the attribute
            `grad_added_to_main_grad`, which is set to True, memory of its shape: zeros if the weight's
            `zero_out_wgrad` is true, else whatever is in it.
        budget_mb: MiB that the call may take at its peak beside its tensors and their gradients: a buffer of
            logits, a float32 sum for the gradient of `hidden` where one tile is not enough, statistics. A
            tile has 2048 columns or more, whatever the budget. Where all logits fit, they are made once.
        keep: leave the buffer as it is between forward and backward, which spares the last tile's product.
            Never where no gradient can be asked for, or under hooks on saved tensors.

    Returns:
        `[...]` float32, bitwise equal on all ranks (but for the scope `partition`).

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes, devices or options do not fit.
        IndexError: `check_labels`, and a label is beyond the vocabulary; names the first, its position and V.
        RuntimeError: `check_labels` while a CUDA graph is captured.
    """
    _check(hidden, weight, main_grad, logit_scale, budget_mb)
    ranks = 1 if group is None else group.size()
    expected = tuple(hidden.shape[:-1])
    sequence_parallel = sequence_parallel and ranks > 1
    if sequence_parallel:
        if not expected:
            raise ValueError(f"{NAME}: sequence_parallel needs hidden of two dimensions or more")
        expected = (expected[0] * ranks, *expected[1:])
    check_target(NAME, "hidden", hidden, target, expected)
    check_smoothing(NAME, label_smoothing, label_smoothing_scope)
    options = make_options(
        NAME,
        weight.shape[0],
        group=group,
        label_smoothing=label_smoothing,
        label_smoothing_scope=label_smoothing_scope,
        ignore_index=ignore_index,
    )
    if check_labels:
        check_range(NAME, target, options)
    tiling = choose_tiling(
        target.numel(),
        hidden.shape[-1],
        weight.shape[0],
        hidden.element_size(),
        int(budget_mb * 2**20),
        ranks,
        sequence_parallel,
    )
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    plan = _Plan(
        options=options,
        tiling=tiling,
        scale=logit_scale,
        sequence_parallel=sequence_parallel,
        keep=keep and wanted,
        main_grad=main_grad,
        parameter=weight,
    )
    loss: torch.Tensor = LinearCrossEntropyFunction.apply(plain(hidden), plain(weight), target, plan)
    return loss
