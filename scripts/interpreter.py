# SPDX-License-Identifier: Apache-2.0
"""bfloat16 and float8_e4m3fn in Triton's interpreter, which runs the kernels where there is no accelerator.

A compiled kernel rounds float32 to nearest, ties to even, and widens exactly. The interpreter (seen in Triton
3.2, 3.6 and 3.9) cuts the low bits off for bfloat16, so that results are up to a unit in the last place too
small, and reads subnormal bfloat16 as zero. For float8_e4m3fn it rounds ties up, loses the carry, makes what
is too large something else than the largest number, as the hardware does, and reads NaN as 480.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

# A bfloat16 is a float32's upper half. Ties to even on either side, a carry into the exponent, one into
# infinity, just above and below a tie, negative, subnormal.
_PROBE = (
    (0x3F808000, 0x3F80),
    (0x3F818000, 0x3F82),
    (0x3FFFFFFF, 0x4000),
    (0x7F7FFFFF, 0x7F80),
    (0x3F808001, 0x3F81),
    (0x3F807FFF, 0x3F80),
    (0xBF818000, 0xBF82),
    (0x00008001, 0x0001),
    (0x00410000, 0x0041),
)
# Ties to even on either side, a carry into the exponent, the largest, just past it, far past it, infinite,
# negative, subnormal, half of the smallest subnormal and just above.
_FLOAT8_PROBE = (
    (1.0625, 0x38),
    (1.1875, 0x3A),
    (1.9375, 0x40),
    (448.0, 0x7E),
    (480.0, 0x7E),
    (1e30, 0x7E),
    (float("-inf"), 0xFE),
    (-1.1875, 0xBA),
    (2.0**-9, 0x01),
    (2.0**-10, 0x00),
    (1.5 * 2.0**-10, 0x01),
)


def nearest_even(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The bfloat16 bits of float32 `values`, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x0040
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, quiet_nan, rounded).astype(np.uint16)


def widened(values: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """The float32 bits of bfloat16 `values`; exact."""
    return np.left_shift(np.ascontiguousarray(values).view(np.uint16), 16, dtype=np.uint32)


@functools.cache
def float8_values() -> npt.NDArray[np.float32]:
    """The value of each of the 256 float8_e4m3fn."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    values = np.where(exponent == 0, mantissa, 8 + mantissa) * 2.0 ** (np.maximum(exponent, 1) - 10)
    values[bits & 0x7F == 0x7F] = np.nan
    signed: npt.NDArray[np.float32] = np.where(bits & 0x80, -values, values).astype(np.float32)
    return signed


def float8_nearest_even(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The float8_e4m3fn bits of float32 `values`, to nearest, ties to even; +-448 for what is larger."""
    sign = np.signbit(values).astype(np.uint8) << 7
    steps = float8_values()[:0x7F]  # ascending, as their bits are; the middles of two are float32 too
    magnitude = np.fmin(np.abs(values), steps[-1])
    above = np.searchsorted(steps, magnitude)
    below = np.maximum(above - 1, 0)
    middle = (steps[below] + steps[above]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    unsigned = np.where(np.isnan(values), 0x7F, np.where(up, above, below)).astype(np.uint8)
    bits: npt.NDArray[np.uint8] = unsigned | sign
    return bits


def converts_right() -> bool:
    """Whether the interpreter converts between float32 and the narrow types as a compiled kernel does."""
    return _bf16_right() and _float8_right()


def _float8_right() -> bool:
    import triton.language as tl
    from triton.runtime import interpreter

    convert, nearest = interpreter.interpreter_builder.create_fp_to_fp, interpreter._ir.ROUNDING_MODE.RTNE
    values = np.array([value for value, _ in _FLOAT8_PROBE] + [float("nan")], dtype=np.float32)
    narrow = convert(interpreter.TensorHandle(values, tl.float32), tl.float8e4nv, nearest).data
    if [*narrow[:-1]] != [bits for _, bits in _FLOAT8_PROBE] or narrow[-1] & 0x7F != 0x7F:
        return False
    all_bits = np.arange(256, dtype=np.uint8)
    wide = convert(interpreter.TensorHandle(all_bits, tl.float8e4nv), tl.float32, None).data
    return bool(np.array_equal(wide.view(np.float32), float8_values(), equal_nan=True))


def _bf16_right() -> bool:
    import triton.language as tl
    from triton.runtime import interpreter

    cast = interpreter.interpreter_builder.cast_impl
    nans = [0x7F800001, 0xFFC00000]
    values = np.array([bits for bits, _ in _PROBE] + nans, dtype=np.uint32).view(np.float32)
    narrow = cast(interpreter.TensorHandle(values, tl.float32), tl.bfloat16).data.view(np.uint16)
    right = np.array([bits for _, bits in _PROBE], dtype=np.uint16)
    if narrow[: len(right)].tolist() != right.tolist() or np.any((narrow[len(right) :] & 0x7FFF) <= 0x7F80):
        return False
    wide = cast(interpreter.TensorHandle(right, tl.bfloat16), tl.float32).data.view(np.uint32)
    return bool(np.array_equal(wide, widened(right)))


def convert_as_compiled() -> bool:
    """Make the interpreter convert right. True if that took a change, False if it did so already.

    Raises:
        RuntimeError: this Triton's interpreter is wrong and built differently from those known.
    """
    if converts_right():
        return False

    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(values: npt.NDArray[Any], source: Any, target: Any, rounding: Any) -> npt.NDArray[Any]:
        towards_zero = rounding is not None and rounding != interpreter._ir.ROUNDING_MODE.RTNE
        if source == tl.float32 and target == tl.bfloat16 and not towards_zero:
            return nearest_even(values).reshape(values.shape)
        if source == tl.bfloat16 and target == tl.float32:
            return widened(values).reshape(values.shape)
        if source == tl.float32 and target == tl.float8e4nv and not towards_zero:
            return float8_nearest_even(values)
        if source == tl.float8e4nv and target == tl.float32:
            return float8_values()[values.view(np.uint8)].view(np.uint32)
        result: npt.NDArray[Any] = original(values, source, target, rounding)
        return result

    interpreter._convert_float = convert
    if not converts_right():
        interpreter._convert_float = original
        raise RuntimeError(
            "Triton's interpreter converts bfloat16 or float8 wrongly, and in a way that is not known here"
        )
    return True
