# SPDX-License-Identifier: Apache-2.0
# The tail of megatron/core/transformer/torch_norm.py. Above it is upstream's file, unchanged; from here on
# its norm's class is taken over, and the rest of its names stay what they are.

import functools as _functools

from megatron.core.liger.norms import TakenOver as _TakenOver

# entry: WrappedTorchNorm
#   kind: reach
#   why: a norm that runs on one kernel each way and accepts what upstream refuses: sequence parallelism,
#     zero-centred weights, persist_layer_norm (which the training arguments ask for unless told not to) and
#     memory_efficient_layer_norm. L2Norm is the class above, where upstream names one that torch lacks.
#   upstream: none
#   retires when: upstream's own class accepts them and torch's norms are as fast
_upstream_WrappedTorchNorm = WrappedTorchNorm
_WrappedTorchNorm = _TakenOver(_upstream_WrappedTorchNorm)


class WrappedTorchNorm(_upstream_WrappedTorchNorm):
    __doc__ = _upstream_WrappedTorchNorm.__doc__

    @_functools.wraps(_upstream_WrappedTorchNorm.__new__)
    def __new__(cls, *arguments, **named):
        return _WrappedTorchNorm(cls, arguments, named)
