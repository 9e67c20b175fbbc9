# SPDX-License-Identifier: Apache-2.0
"""The calls of each op whose launches `compile_gate.py` compiles: its forms, where launches differ.

Each function takes the op's module, the lanes of a warp and the bytes of shared memory of a program, and
yields labels and calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed

Cases = Iterator[tuple[str, Callable[[], None]]]

MULTIPROCESSORS = 132
# Whether the target converts float8_e4m3fn; set before the cases are asked for.
FLOAT8 = False
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def leaf(*shape: int, dtype: torch.dtype, trained: bool = True) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype).requires_grad_(trained)


def gated(module: Any, warp_size: int, shared_memory: int) -> Cases:
    module.choose_launch = partial(module.choose_launch, warp_size=warp_size)
    module.multiprocessors = lambda x: MULTIPROCESSORS

    def step(
        n: int, dtype: torch.dtype, other: str, wanted: str, kind: str = "swiglu", **options: Any
    ) -> None:
        width = n if kind == "squared_relu" else 2 * n
        y = leaf(6, width, dtype=dtype, trained=wanted != "other")
        trained = wanted != "y"
        operands = {
            "bias": leaf(width, dtype=dtype, trained=trained),
            "weights": leaf(6, 1, dtype=torch.float32, trained=trained),
        }
        given = {name: x for name, x in operands.items() if name in other}
        getattr(module, kind)(y, **given, **options).backward(torch.ones(6, n, dtype=dtype))

    # Odd and narrow; many rows to a program; one block of columns; several, narrower ones; one that is odd;
    # several blocks.
    for n in (7, 128, 2048, 2880, 4095, 4096, 32768):
        for name, dtype in DTYPES.items():
            if name != "bf16" and n != 32768:
                continue
            for other in ("nothing", "bias", "weights"):
                for wanted in ("all",) if other == "nothing" else ("all", "y", "other"):
                    label = f"{other}, n={n}, {name}, gradients of {wanted}"
                    yield label, partial(step, n, dtype, other, wanted)
    kept: dict[str, dict[str, Any]] = {"clamped": {"clamp_value": 7.0}}
    if FLOAT8:
        kept |= {
            "fp8": {"fp8_input_store": True},
            "fp8, clamped": {"fp8_input_store": True, "clamp_value": 7.0},
        }
    for what, options in kept.items():
        for n in (7, 128, 4096):
            for name, dtype in DTYPES.items():
                if name == "fp16" and n != 4096:
                    continue
                for other in ("nothing", "bias", "weights"):
                    yield f"{what}, {other}, n={n}, {name}", partial(step, n, dtype, other, "all", **options)
    # The other activations, with all that their entries can be given.
    offset: dict[str, Any] = {"linear_offset": 1.0}
    forms: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
        ("geglu", ("nothing", "bias"), {}),
        ("quick_geglu", ("weights", "bias and weights"), {}),
        ("quick_geglu", ("weights", "bias and weights"), offset),
        ("quick_geglu", ("weights", "bias and weights"), {**offset, "clamp_value": 7.0}),
        ("squared_relu", ("weights",), {}),
    ]
    if FLOAT8:
        forms.append(("quick_geglu", ("weights", "bias and weights"), {**offset, "fp8_input_store": True}))
    for kind, others, options in forms:
        for n in (7, 128, 2048, 2880, 4096):
            for name, dtype in DTYPES.items():
                if name != "bf16" and n != 4096:
                    continue
                for other in others:
                    for wanted in ("all",) if other == "nothing" or name == "fp16" else ("all", "y", "other"):
                        label = f"{kind} {options}, {other}, n={n}, {name}, gradients of {wanted}"
                        yield label, partial(step, n, dtype, other, wanted, kind, **options)


class Group:
    """Of two ranks, seen from the second."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def cross_entropy(module: Any, warp_size: int, shared_memory: int) -> Cases:
    module.choose_tile = partial(module.choose_tile, warp_size=warp_size)
    torch.distributed.all_gather_into_tensor = lambda *args, **kwargs: None

    def step(columns: int, dtype: torch.dtype, **options: Any) -> None:
        target = torch.zeros(6, 2, dtype=torch.int64)
        loss = module.vocab_parallel_cross_entropy(leaf(6, 2, columns, dtype=dtype), target, **options)
        loss.backward(torch.ones(2, 6).t())

    # Many rows to a program, whole and with lanes that hold nothing; odd, no wide access; one tile to a row;
    # a pipeline of tiles, with and without a masked part.
    for columns in (1, 5, 128, 1025, 4096, 20480, 151936):
        for name, dtype in DTYPES.items():
            # float16 differs from bfloat16 in the conversion only
            if name != "bf16" and columns != 151936:
                continue
            for smoothing in (0.0,) if columns in (1, 20480) or name == "fp16" else (0.0, 0.1):
                label = f"columns={columns}, {name}, smoothing={smoothing}"
                yield label, partial(step, columns, dtype, label_smoothing=smoothing)
    for smoothing, scope in ((0.0, "global"), (0.1, "global"), (0.1, "partition")):
        options = {"group": Group(), "label_smoothing": smoothing, "label_smoothing_scope": scope}
        label = f"two ranks, columns=18992, bf16, smoothing={smoothing}"
        yield label, partial(step, 18992, torch.bfloat16, **options)


def linear_cross_entropy(module: Any, warp_size: int, shared_memory: int) -> Cases:
    """Of a vocabulary in tiles: the first, which counts labels, one in the middle, the last."""
    loss = sys.modules[module.launch_forward.__module__]  # where the kernels are
    loss.choose_tile = partial(loss.choose_tile, warp_size=warp_size)

    def step(vocabulary: int, count: int, dtype: torch.dtype, **options: Any) -> None:
        module.choose_tiling = lambda rows, hidden_size, vocabulary, *_: module._split(vocabulary, count)
        hidden, weight = leaf(6, 2, 16, dtype=dtype), leaf(vocabulary, 16, dtype=dtype)
        target = torch.zeros(6, 2, dtype=torch.int64)
        module.linear_cross_entropy(hidden, weight, target, **options).sum().backward()

    # Odd in one tile; three tiles, of which the last is of the same size, is odd, or is narrow and odd.
    for vocabulary, count in ((50257, 1), (12288, 3), (50257, 3), (41, 3)):
        for name, dtype in DTYPES.items():
            if name != "bf16" and vocabulary != 50257:
                continue
            for smoothing in (0.0,) if name == "fp16" else (0.0, 0.1):
                label = f"vocabulary={vocabulary}, {count} tiles, {name}, smoothing={smoothing}"
                yield label, partial(step, vocabulary, count, dtype, label_smoothing=smoothing)


def norms(module: Any, warp_size: int, shared_memory: int) -> Cases:
    module.multiprocessors = lambda x: MULTIPROCESSORS
    module.shared_memory = lambda x: shared_memory
    for choice in ("choose_forward", "choose_backward"):
        setattr(module, choice, partial(getattr(module, choice), warp_size=warp_size))

    def step(
        n: int,
        dtype: torch.dtype,
        layer_norm: bool,
        wanted: str,
        heads: bool = False,
        weight: torch.dtype | None = None,
        zero_centered: bool = False,
        residual: bool = False,
    ) -> None:
        x, dy = torch.ones(6, n, dtype=dtype), torch.ones(6, n, dtype=dtype)
        if heads:
            x = torch.ones(6, 16, 3 * n, dtype=dtype)[:, :8, n : 2 * n]
            dy = torch.ones(8, 6, n, dtype=dtype).transpose(0, 1)
        x.requires_grad_(wanted != "parameters")
        parameters = [leaf(n, dtype=weight or dtype, trained=wanted != "x") for _ in range(1 + layer_norm)]
        function = module.layer_norm if layer_norm else module.rms_norm
        options = {"zero_centered": zero_centered} | ({"residual": True} if residual else {})
        out = function(x, *parameters, 1e-5, **options)
        torch.autograd.backward(out, (dy, dy) if residual else dy)

    # Narrow and odd; many rows to a program; odd; one row to a program, in each launch of the backward; in
    # blocks of columns in both directions.
    for n in (7, 128, 192, 512, 1024, 4095, 4096, 7168, 8192, 16384, 65536):
        for name, dtype in DTYPES.items():
            # float16 differs from bfloat16 in the conversion only, float32 in the launches too.
            if (name == "fp16" and n != 128) or (name == "fp32" and n == 4095):
                continue
            for layer_norm in (False, True):
                for wanted in ("all", "x", "parameters"):
                    label = f"{'layer' if layer_norm else 'rms'}_norm, n={n}, {name}, gradients of {wanted}"
                    yield label, partial(step, n, dtype, layer_norm, wanted)
            for wanted in ("all", "x"):
                label = f"rms_norm and residual, n={n}, {name}, gradients of {wanted}"
                yield label, partial(step, n, dtype, False, wanted, residual=True)
    # Rows that are a multiple of 16 bytes and not of 16 elements have no wide access, as odd ones.
    for n, name in ((200, "bf16"), (8184, "bf16"), (8188, "fp32"), (32760, "bf16")):
        for kind in ("rms", "layer", "residual"):
            options = {"residual": kind == "residual"}
            yield f"{kind}, n={n}, {name}", partial(step, n, DTYPES[name], kind == "layer", "all", **options)
    yield "slice of heads", partial(step, 128, torch.bfloat16, False, "all", heads=True)
    yield "mixed dtypes", partial(step, 4096, torch.float32, False, "all", weight=torch.bfloat16)
    yield "mixed dtypes", partial(step, 4096, torch.bfloat16, False, "all", weight=torch.float32)
    yield "zero-centred", partial(step, 4096, torch.bfloat16, False, "all", zero_centered=True)
    yield "all of it", partial(step, 128, torch.bfloat16, False, "all", True, torch.float32, True, True)
