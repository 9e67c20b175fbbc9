# SPDX-License-Identifier: Apache-2.0
"""bfloat16 and float8 in Triton's interpreter, and the name under which the kernels may not be imported."""

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


def float8(values: Any, source: Any) -> Any:
    """Right both ways."""
    if source.primitive_bitwidth == 8:
        return rounding.float8_values()[values].view(np.uint32)
    return rounding.float8_nearest_even(values)


def truncate(values: Any, source: Any, target: Any, mode: Any) -> Any:
    """Wrong in one way only: widens exactly, but does not round."""
    if 8 in (source.primitive_bitwidth, target.primitive_bitwidth):
        return float8(values, source)
    if source.primitive_bitwidth == 16:
        return rounding.widened(values).reshape(values.shape)
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16).reshape(values.shape)


def flush(values: Any, source: Any, target: Any, mode: Any) -> Any:
    """Wrong in one way only: rounds to nearest even, but takes a subnormal bfloat16 for zero."""
    if 8 in (source.primitive_bitwidth, target.primitive_bitwidth):
        return float8(values, source)
    if source.primitive_bitwidth == 32:
        return rounding.nearest_even(values).reshape(values.shape)
    bits = rounding.widened(values)
    return np.where(bits & 0x7F800000, bits, bits & 0x80000000).astype(np.uint32).reshape(values.shape)


def overflow(values: Any, source: Any, target: Any, mode: Any) -> Any:
    """Wrong in one way only: what is too large for a float8 becomes NaN."""
    result = right(values, source, target, mode)
    if target.primitive_bitwidth == 8:
        result = np.where(np.abs(values) > 464, result | 0x7F, result).astype(np.uint8)
    return result


def float8_nan(values: Any, source: Any, target: Any, mode: Any) -> Any:
    """Wrong in one way only: reads the NaN of float8 as 480."""
    result = right(values, source, target, mode)
    if source.primitive_bitwidth == 8:
        result = np.where(values & 0x7F == 0x7F, np.float32(480).view(np.uint32), result).astype(np.uint32)
    return result


def right(values: Any, source: Any, target: Any, mode: Any) -> Any:
    if 8 in (source.primitive_bitwidth, target.primitive_bitwidth):
        return float8(values, source)
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


def through_float8(values: np.ndarray) -> np.ndarray:
    """Float32 to float8 and back, as the interpreter does it now."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter.interpreter_builder.create_fp_to_fp
    handle = interpreter.TensorHandle(values, tl.float32)
    narrow = convert(handle, tl.float8e4nv, interpreter._ir.ROUNDING_MODE.RTNE)
    return convert(narrow, tl.float32, None).data.view(np.float32)


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


def test_float8_is_pytorchs_rounding() -> None:
    """Of torch 2.13, which gives the largest number for what is larger; older ones give NaN there."""
    assert np.array_equal(
        rounding.float8_values(),
        torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy(),
        equal_nan=True,
    )
    values = all_upper_halves()
    values = values[np.abs(values) <= 464]
    expected = torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(rounding.float8_nearest_even(values), expected)
    largest = np.array([465, 480, -1e30, np.inf, -np.inf], dtype=np.float32)
    assert rounding.float8_nearest_even(largest).tolist() == [0x7E, 0x7E, 0xFE, 0x7E, 0xFE]
    assert rounding.float8_nearest_even(np.array([np.nan], dtype=np.float32))[0] & 0x7F == 0x7F


@pytest.mark.parametrize("wrong", [truncate, flush, overflow, float8_nan])
def test_a_wrong_interpreter_is_changed(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any]) -> None:
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_convert_float", wrong)
    assert not rounding.converts_right()
    assert rounding.convert_as_compiled()
    assert rounding.converts_right()
    values = all_upper_halves()
    assert np.array_equal(narrowed(values), rounding.nearest_even(values))
    upper = np.arange(2**16, dtype=np.uint16)
    assert np.array_equal(widened(upper), upper.astype(np.uint32) << 16)
    assert np.array_equal(
        through_float8(values), rounding.float8_values()[rounding.float8_nearest_even(values)], equal_nan=True
    )


def test_a_right_interpreter_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_convert_float", right)
    assert not rounding.convert_as_compiled()
    assert interpreter._convert_float is right


def test_an_unknown_interpreter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    builder = type(interpreter.interpreter_builder)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        return interpreter.TensorHandle(truncate(source.data, source.dtype, target, None), target.scalar)

    monkeypatch.setattr(builder, "cast_impl", cast_impl)
    with pytest.raises(RuntimeError, match="not known here"):
        rounding.convert_as_compiled()


def test_kernels_are_no_top_level_package() -> None:
    """transformers looks for a package named kernels; this folder must not pass for it."""
    command = [sys.executable, "-c", "import kernels"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0
    assert "ImportError" in result.stderr
    assert "megatron.core.liger.kernels" in result.stderr
