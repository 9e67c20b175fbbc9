# SPDX-License-Identifier: Apache-2.0
"""The entries that the overlay can take over, and every name through which Megatron reaches them.

Parent and worker share this table, so it needs the standard library only. A name that a tree does not have
(an older release, say) is reported as absent, not as an error.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A public function or class that an op's tail may replace.

    Attributes:
        name: its name.
        op: the op that takes it over.
        module: the module that defines it.
        routes: modules that bound the name when they were imported and use it through that binding.
    """

    name: str
    op: str
    module: str
    routes: tuple[str, ...]


ENTRIES = (
    Entry(
        "bias_swiglu_impl",
        "swiglu",
        "megatron.core.fusions.fused_bias_swiglu",
        (
            "megatron.core.transformer.mlp",
            "megatron.core.transformer.moe.shared_experts",
            "megatron.core.transformer.moe.experts",
        ),
    ),
    Entry(
        "weighted_bias_swiglu_impl",
        "swiglu",
        "megatron.core.fusions.fused_bias_swiglu",
        ("megatron.core.transformer.mlp", "megatron.core.transformer.moe.experts"),
    ),
    Entry(
        "fused_vocab_parallel_cross_entropy",
        "cross_entropy",
        "megatron.core.fusions.fused_cross_entropy",
        ("megatron.core.models.common.language_module.language_module",),
    ),
    Entry(
        "vocab_parallel_cross_entropy",
        "cross_entropy",
        "megatron.core.tensor_parallel.cross_entropy",
        ("megatron.core.tensor_parallel",),
    ),
    Entry(
        "WrappedTorchNorm",
        "norms",
        "megatron.core.transformer.torch_norm",
        (
            "megatron.core.models.backends",
            "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs",
        ),
    ),
    Entry(
        "FusedLayerNorm",
        "norms",
        "megatron.core.fusions.fused_layer_norm",
        ("megatron.core.transformer.transformer_block", "megatron.core.models.bert.bert_lm_head"),
    ),
    Entry(
        "bias_geglu_impl",
        "activations",
        "megatron.core.fusions.fused_bias_geglu",
        (
            "megatron.core.transformer.mlp",
            "megatron.core.transformer.moe.shared_experts",
            "megatron.core.transformer.moe.experts",
        ),
    ),
    Entry(
        "weighted_bias_quick_geglu_impl",
        "activations",
        "megatron.core.fusions.fused_bias_geglu",
        ("megatron.core.transformer.mlp", "megatron.core.transformer.moe.experts"),
    ),
    Entry(
        "weighted_squared_relu_impl",
        "activations",
        "megatron.core.fusions.fused_weighted_squared_relu",
        ("megatron.core.transformer.moe.experts",),
    ),
)

# The op that is off unless asked for. It has call sites and no entries: a model's step is its comparison.
LINEAR = "linear_cross_entropy"

# The ops that the model of ``train`` does not run: the one that is off there as it is by default, and the
# activations of other models.
UNTRAINED = (LINEAR, "activations")

# The class of each op that a hand-built spec names, in megatron.core.liger.
PUBLIC_CLASSES = {
    "swiglu": "LigerMegatronSwiGLU",
    "cross_entropy": "LigerMegatronCrossEntropy",
    "norms": "LigerMegatronRMSNorm",
}

# The places of a GPT layer stack that hold a norm, by the attribute that holds it.
NORM_SLOTS = ("input_layernorm", "q_layernorm", "k_layernorm", "pre_mlp_layernorm", "final_layernorm")
