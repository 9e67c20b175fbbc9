# SPDX-License-Identifier: Apache-2.0
"""Rounding in Triton's interpreter, which runs the kernels where there is no accelerator.

A compiled kernel rounds float32 to bfloat16 to nearest, ties to even. The interpreter cuts the low bits off
(seen in Triton 3.2 to 3.9), so results would be wrong by up to a unit in the last place, always towards zero.
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
)


def nearest_even(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The bfloat16 bits of float32 `values`, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x0040
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, quiet_nan, rounded).astype(np.uint16)


def rounds_to_nearest() -> bool:
    """Whether the interpreter rounds float32 to bfloat16 as a compiled kernel does."""
    import triton.language as tl
    from triton.runtime import interpreter

    values = np.array([bits for bits, _ in _PROBE] + [0x7F800001, 0xFFC00000], dtype=np.uint32).view(
        np.float32
    )
    handle = interpreter.TensorHandle(values, tl.float32)
    got = interpreter.interpreter_builder.cast_impl(handle, tl.bfloat16).data.view(np.uint16)
    right = [bits for _, bits in _PROBE]
    return got[: len(right)].tolist() == right and bool(np.all((got[len(right) :] & 0x7FFF) > 0x7F80))


def round_bf16_to_nearest_even() -> bool:
    """Make the interpreter round to nearest even. True if that took a change, False if it did so already.

    Raises:
        RuntimeError: this Triton's interpreter is wrong and built differently from those known.
    """
    if rounds_to_nearest():
        return False

    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(values: npt.NDArray[Any], source: Any, target: Any, rounding: Any) -> npt.NDArray[Any]:
        towards_zero = rounding is not None and rounding != interpreter._ir.ROUNDING_MODE.RTNE
        if source == tl.float32 and target == tl.bfloat16 and not towards_zero:
            return nearest_even(values).reshape(values.shape)
        result: npt.NDArray[Any] = original(values, source, target, rounding)
        return result

    interpreter._convert_float = convert
    if not rounds_to_nearest():
        interpreter._convert_float = original
        raise RuntimeError(
            "Triton's interpreter does not round to bfloat16 as compiled kernels do, and cannot be changed"
        )
    return True
