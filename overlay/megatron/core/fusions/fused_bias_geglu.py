# SPDX-License-Identifier: Apache-2.0
# The tail of megatron/core/fusions/fused_bias_geglu.py. Above it is upstream's file, unchanged; from here on
# its entry functions are taken over, and the rest of its names stay what they are: quick_gelu above all,
# which configurations are compared with.

import functools as _functools

from megatron.core.liger.activations import GEGLU as _GEGLU
from megatron.core.liger.activations import QUICK_GEGLU as _QUICK_GEGLU
from megatron.core.liger.gated import TakenOver as _TakenOver

# entry: bias_geglu_impl
#   kind: speed
#   why: one pass each way over the [tokens, 2n] buffer and a float32 sum for the bias gradient, where
#     upstream splits, recombines and reduces. It also serves what upstream raises at: three dimensions that
#     cannot be viewed as two, and three dimensions without a token.
#   upstream: none
#   retires when: upstream's own function reads and writes the one buffer once each way
_upstream_bias_geglu_impl = bias_geglu_impl
_bias_geglu_impl = _TakenOver(_GEGLU, "bias_geglu_impl", _upstream_bias_geglu_impl, tensors=2)


@_functools.wraps(_upstream_bias_geglu_impl)
def bias_geglu_impl(input, bias, *options, **named):
    return _bias_geglu_impl((input, bias), options, named)


if "weighted_bias_quick_geglu_impl" in globals():
    # entry: weighted_bias_quick_geglu_impl
    #   kind: speed
    #   why: one pass each way that clamps, adds the offset, applies each token's weight and gives its
    #     gradient; upstream writes the clamped input to memory first and computes the activation a second
    #     time for that gradient. It reaches as far as bias_geglu_impl.
    #   upstream: none
    #   retires when: upstream's own function reads and writes the one buffer once each way
    _upstream_weighted_bias_quick_geglu_impl = weighted_bias_quick_geglu_impl
    _weighted_bias_quick_geglu_impl = _TakenOver(
        _QUICK_GEGLU,
        "weighted_bias_quick_geglu_impl",
        _upstream_weighted_bias_quick_geglu_impl,
        tensors=3,
    )

    @_functools.wraps(_upstream_weighted_bias_quick_geglu_impl)
    def weighted_bias_quick_geglu_impl(input, bias, weights, *options, **named):
        return _weighted_bias_quick_geglu_impl((input, bias, weights), options, named)
