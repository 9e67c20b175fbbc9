# SPDX-License-Identifier: Apache-2.0
# The tail of megatron/core/fusions/fused_weighted_squared_relu.py. Above it is upstream's file, unchanged;
# from here on its entry function is taken over, and the rest of its names stay what they are.

import functools as _functools

from megatron.core.liger.activations import SQUARED_RELU as _SQUARED_RELU
from megatron.core.liger.gated import TakenOver as _TakenOver

# entry: weighted_squared_relu_impl
#   kind: speed
#   why: one pass each way that applies each token's weight and gives its gradient, where upstream computes
#     the activation a second time for that gradient. It also serves what upstream raises at: three
#     dimensions that cannot be viewed as two, and three dimensions without a token.
#   upstream: none
#   retires when: upstream's own function reads and writes each buffer once each way
_upstream_weighted_squared_relu_impl = weighted_squared_relu_impl
_weighted_squared_relu_impl = _TakenOver(
    _SQUARED_RELU, "weighted_squared_relu_impl", _upstream_weighted_squared_relu_impl, tensors=2
)


@_functools.wraps(_upstream_weighted_squared_relu_impl)
def weighted_squared_relu_impl(input, weights, *options, **named):
    return _weighted_squared_relu_impl((input, weights), options, named)
