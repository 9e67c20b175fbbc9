# SPDX-License-Identifier: Apache-2.0
# The tail of megatron/core/tensor_parallel/cross_entropy.py. Above it is upstream's file, unchanged; from
# here on its entry function is taken over, and the rest of its names stay what they are.

import functools as _functools

from megatron.core.liger.cross_entropy import TakenOver as _TakenOver

# entry: vocab_parallel_cross_entropy
#   kind: speed
#   why: the logits are read once forward and once backward, and two float32 numbers a token are kept, where
#     upstream keeps a float32 softmax of the vocabulary's size; one collective where upstream has three, none
#     on one rank. It also leaves float32 logits as they are, gives a negative label neither loss nor
#     gradient, smooths labels over the whole vocabulary and from the log-sum-exp, so that all ranks have the
#     same finite loss, and serves logits that cannot be viewed as two dimensions.
#   upstream: none
#   retires when: upstream's own function keeps no buffer of the vocabulary's size
_upstream_vocab_parallel_cross_entropy = vocab_parallel_cross_entropy
_vocab_parallel_cross_entropy = _TakenOver(
    "vocab_parallel_cross_entropy", _upstream_vocab_parallel_cross_entropy, globals()
)


@_functools.wraps(_upstream_vocab_parallel_cross_entropy)
def vocab_parallel_cross_entropy(vocab_parallel_logits, target, *options, **named):
    return _vocab_parallel_cross_entropy(vocab_parallel_logits, target, options, named)
