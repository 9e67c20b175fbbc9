# SPDX-License-Identifier: Apache-2.0
# The tail of megatron/core/fusions/fused_bias_swiglu.py. Everything above it is upstream's file, unchanged; from here
# on its two entry functions are taken over and the rest of its names are left as they are.

import functools as _functools

from megatron.core.liger.swiglu import TakenOver as _TakenOver

# entry: bias_swiglu_impl
#   kind: speed
#   why: one kernel each way over the [tokens, 2n] buffer, the bias gradient reduced in float32; upstream's compiled
#     chain splits, recombines and reduces in passes of their own. Also right where upstream raises: a three-dimensional
#     input that cannot be viewed as two-dimensional, or one without tokens.
#   upstream: none
#   retires when: upstream's own function reads and writes the one buffer once each way
_upstream_bias_swiglu_impl = bias_swiglu_impl
_bias_swiglu_impl = _TakenOver("bias_swiglu_impl", _upstream_bias_swiglu_impl, tensors=2)


@_functools.wraps(_upstream_bias_swiglu_impl)
def bias_swiglu_impl(input, bias, *options, **named):
    return _bias_swiglu_impl((input, bias), options, named)


if "weighted_bias_swiglu_impl" in globals():
    # entry: weighted_bias_swiglu_impl
    #   kind: speed
    #   why: one kernel each way with a weight for each token, whose gradient comes from the same pass; upstream
    #     computes the activation a second time for it.
    #   upstream: none
    #   retires when: upstream's own function reads and writes the one buffer once each way
    _upstream_weighted_bias_swiglu_impl = weighted_bias_swiglu_impl
    _weighted_bias_swiglu_impl = _TakenOver(
        "weighted_bias_swiglu_impl", _upstream_weighted_bias_swiglu_impl, tensors=3
    )

    @_functools.wraps(_upstream_weighted_bias_swiglu_impl)
    def weighted_bias_swiglu_impl(input, bias, weights, *options, **named):
        return _weighted_bias_swiglu_impl((input, bias, weights), options, named)
