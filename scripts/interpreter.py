# SPDX-License-Identifier: Apache-2.0
"""bfloat16 in Triton's interpreter, which runs the kernels where there is no accelerator.

A compiled kernel rounds float32 to bfloat16 to nearest, ties to even, and widens bfloat16 exactly. The
interpreter (seen in Triton 3.2, 3.6 and 3.9) cuts the low bits off, so that results are up to a unit in the
last place too small, and reads subnormal bfloat16 as zero.
"""

from __future__ import annotations

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


def converts_right() -> bool:
    """Whether the interpreter converts between float32 and bfloat16 as a compiled kernel does."""
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


def round_bf16_to_nearest_even() -> bool:
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
        result: npt.NDArray[Any] = original(values, source, target, rounding)
        return result

    interpreter._convert_float = convert
    if not converts_right():
        interpreter._convert_float = original
        raise RuntimeError(
            "Triton's interpreter converts bfloat16 wrongly, and in a way that is not known here"
        )
    return True
