# SPDX-License-Identifier: Apache-2.0
# The tail of megatron/core/fusions/fused_bias_swiglu.py. Above it is upstream's file, unchanged; from here on
# its entry functions are taken over, and the rest of its names stay what they are.

import functools as _functools

from megatron.core.liger.gated import TakenOver as _TakenOver
from megatron.core.liger.swiglu import SWIGLU as _SWIGLU

# entry: bias_swiglu_impl
#   kind: speed
#   why: one pass each way over the [tokens, 2n] buffer and a float32 sum for the bias gradient, where
#     upstream splits, recombines and reduces. It also serves what upstream raises at: three dimensions that
#     cannot be viewed as two, and three dimensions without a token.
#   upstream: none
#   retires when: upstream's own function reads and writes the one buffer once each way
_upstream_bias_swiglu_impl = bias_swiglu_impl
_bias_swiglu_impl = _TakenOver(_SWIGLU, "bias_swiglu_impl", _upstream_bias_swiglu_impl, tensors=2)


@_functools.wraps(_upstream_bias_swiglu_impl)
def bias_swiglu_impl(input, bias, *options, **named):
    return _bias_swiglu_impl((input, bias), options, named)


if "weighted_bias_swiglu_impl" in globals():
    # entry: weighted_bias_swiglu_impl
    #   kind: speed
    #   why: one pass each way that applies each token's weight and gives its gradient, where upstream
    #     computes the activation a second time for that gradient. It reaches as far as bias_swiglu_impl.
    #   upstream: none
    #   retires when: upstream's own function reads and writes the one buffer once each way
    _upstream_weighted_bias_swiglu_impl = weighted_bias_swiglu_impl
    _weighted_bias_swiglu_impl = _TakenOver(
        _SWIGLU, "weighted_bias_swiglu_impl", _upstream_weighted_bias_swiglu_impl, tensors=3
    )

    @_functools.wraps(_upstream_weighted_bias_swiglu_impl)
    def weighted_bias_swiglu_impl(input, bias, weights, *options, **named):
        return _weighted_bias_swiglu_impl((input, bias, weights), options, named)
