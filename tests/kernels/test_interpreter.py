# SPDX-License-Identifier: Apache-2.0
"""bfloat16 in Triton's interpreter, and the name under which the kernels may not be imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts import interpreter as rounding

ROOT = Path(__file__).resolve().parent.parent.parent


def truncate(values: Any, source: Any, target: Any, mode: Any) -> Any:
    """Wrong in one way only: widens exactly, but does not round."""
    if source.primitive_bitwidth == 16:
        return rounding.widened(values).reshape(values.shape)
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16).reshape(values.shape)


def flush(values: Any, source: Any, target: Any, mode: Any) -> Any:
    """Wrong in one way only: rounds to nearest even, but takes a subnormal bfloat16 for zero."""
    if source.primitive_bitwidth == 32:
        return rounding.nearest_even(values).reshape(values.shape)
    bits = rounding.widened(values)
    return np.where(bits & 0x7F800000, bits, bits & 0x80000000).astype(np.uint32).reshape(values.shape)


def right(values: Any, source: Any, target: Any, mode: Any) -> Any:
    if source.primitive_bitwidth == 16:
        return rounding.widened(values).reshape(values.shape)
    return rounding.nearest_even(values).reshape(values.shape)


def narrowed(values: np.ndarray) -> np.ndarray:
    """Float32 to bfloat16 bits, as the interpreter does it now."""
    import triton.language as tl
    from triton.runtime import interpreter

    handle = interpreter.TensorHandle(values, tl.float32)
    return interpreter.interpreter_builder.cast_impl(handle, tl.bfloat16).data.view(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    """Bfloat16 to float32 bits, as the interpreter does it now."""
    import triton.language as tl
    from triton.runtime import interpreter

    handle = interpreter.TensorHandle(bits, tl.bfloat16)
    return interpreter.interpreter_builder.cast_impl(handle, tl.float32).data.view(np.uint32)


def all_upper_halves() -> np.ndarray:
    """Every bfloat16 followed by lower halves around zero, the tie and the next value."""
    upper = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return (upper | lower).reshape(-1).view(np.float32)


def test_nearest_even_is_pytorchs_rounding() -> None:
    values = all_upper_halves()
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16)
    got = torch.from_numpy(rounding.nearest_even(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(
        got.nan_to_num(nan=0.0).view(torch.int16), expected.nan_to_num(nan=0.0).view(torch.int16)
    )


@pytest.mark.parametrize("wrong", [truncate, flush])
def test_a_wrong_interpreter_is_changed(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any]) -> None:
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_convert_float", wrong)
    assert not rounding.converts_right()
    assert rounding.round_bf16_to_nearest_even()
    assert rounding.converts_right()
    values = all_upper_halves()
    assert np.array_equal(narrowed(values), rounding.nearest_even(values))
    upper = np.arange(2**16, dtype=np.uint16)
    assert np.array_equal(widened(upper), upper.astype(np.uint32) << 16)


def test_a_right_interpreter_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_convert_float", right)
    assert not rounding.round_bf16_to_nearest_even()
    assert interpreter._convert_float is right


def test_an_unknown_interpreter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    builder = type(interpreter.interpreter_builder)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        return interpreter.TensorHandle(truncate(source.data, source.dtype, target, None), target.scalar)

    monkeypatch.setattr(builder, "cast_impl", cast_impl)
    with pytest.raises(RuntimeError, match="not known here"):
        rounding.round_bf16_to_nearest_even()


def test_kernels_are_no_top_level_package() -> None:
    """transformers looks for a package named kernels; this folder must not pass for it."""
    command = [sys.executable, "-c", "import kernels"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0
    assert "ImportError" in result.stderr
    assert "megatron.core.liger.kernels" in result.stderr
