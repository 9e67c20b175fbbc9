# SPDX-License-Identifier: Apache-2.0
# The tail of megatron/core/fusions/fused_layer_norm.py. Above it is upstream's file, unchanged; from here on
# its norm's class is taken over, and the rest of its names stay what they are.

import functools as _functools

from megatron.core.liger.norms import TakenOver as _TakenOver

# entry: FusedLayerNorm
#   kind: reach
#   why: RMSNorm, too, and without Apex: many of upstream's layer specs name this class for every norm once
#     Apex can be imported. It runs on one kernel each way, for any hidden size, and adds the 1 of
#     zero-centred weights in float32, where upstream rounds the sum to the weights' dtype.
#   upstream: none
#   retires when: upstream's own class builds RMSNorm and needs no Apex
_upstream_FusedLayerNorm = FusedLayerNorm
_FusedLayerNorm = _TakenOver(_upstream_FusedLayerNorm)


class FusedLayerNorm(_upstream_FusedLayerNorm):
    __doc__ = _upstream_FusedLayerNorm.__doc__

    @_functools.wraps(_upstream_FusedLayerNorm.__init__, assigned=())
    def __new__(cls, *arguments, **named):
        return _FusedLayerNorm(cls, arguments, named)
