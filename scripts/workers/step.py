# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of a two-layer GPT, built alike in every release by Megatron-Core's own interfaces.

Local layers with RMSNorm in every slot, SwiGLU, grouped queries; the loss once through each cross-entropy,
and once more with ``linear_cross_entropy`` where a tree is to have it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from scripts.workers import runtime
from scripts.workers.entries import LINEAR, NORM_SLOTS

NAME = "GPTModel fp32: a step of two layers"
LAYERS = 2
VOCABULARY, SEQUENCE, BATCH = 96, 12, 2
SEED = 1234
LOSSES = ("fused", "unfused")
OURS = "megatron.core.liger.norms.RMSNorm"
FINAL_NORM = "megatron/core/transformer/transformer_block.py"  # whose diff asks the layers what it shall be
BACKENDS = "megatron/core/models/backends.py"  # whose diff lets layers' norms give their residuals
# The norms that stand at the head of a residual branch.
RESIDUAL_SLOTS = ("input_layernorm", "pre_mlp_layernorm")
FUSED_RESIDUAL = "fused_residual_rmsnorm"


def expected_calls(ops: list[str], norms: int) -> dict[str, dict[str, int]]:
    """How often each entry of an overlaid tree runs on the kernel in :func:`run`, with ``norms`` of ours."""
    once_each = {"fused_vocab_parallel_cross_entropy": 1, "vocab_parallel_cross_entropy": 1}
    passes = len(_losses(LINEAR in ops))
    calls = {
        "swiglu": {"bias_swiglu_impl": LAYERS * passes},
        "cross_entropy": once_each,
        "norms": {"WrappedTorchNorm or FusedLayerNorm": norms * passes},
        "activations": {},  # of other models: a layer of each is among the calls
        LINEAR: {"GPTModel": 1},
    }
    return {op: calls[op] for op in ops}


def _losses(linear: bool) -> tuple[str, ...]:
    return (*LOSSES, LINEAR) if linear else LOSSES


def run(device: torch.device, dtype: torch.dtype, linear: bool = False) -> dict[str, Any]:
    """One step in ``dtype``; ``linear``: once more as with ``linear_cross_entropy``, which a pristine tree
    computes by its unfused loss.

    Returns:
        ``tensors``: the loss of each token by each cross-entropy, and every parameter's gradient of all but
        the fused one (whose goes through bfloat16 upstream); ``norms``: the class of each norm; ``tied``:
        which of them give their residual too; ``asked``: whether this release's config could ask for that;
        of an overlaid tree ``counters``, and ``patched``: the files that diffs changed.
    """
    overlay = runtime.overlay()
    model: Any = _model(device, dtype)
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator).to(device)
    batch = {
        "input_ids": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": torch.arange(SEQUENCE, device=device).expand(BATCH, -1).contiguous(),
        "attention_mask": torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1),
    }
    if overlay is not None:
        overlay.reset_counters()
    tensors = {}
    for loss_name in _losses(linear):
        model.zero_grad(set_to_none=True)
        model.config.cross_entropy_loss_fusion = loss_name == "fused"
        with _linear_on(overlay if loss_name == LINEAR else None):
            loss = model(**batch)
        tensors[f"{loss_name} loss"] = loss.detach().cpu()
        loss.mean().backward()
        for name, parameter in model.named_parameters() if loss_name != "fused" else ():
            if parameter.grad is not None:
                tensors[f"d {name}, {loss_name}"] = parameter.grad.detach().cpu()
    return {
        "tensors": tensors,
        "norms": {
            name: f"{type(module).__module__}.{type(module).__name__}"
            for name, module in model.named_modules()
            if name.rpartition(".")[2] in NORM_SLOTS
        },
        "tied": sorted(
            name for name, module in model.named_modules() if getattr(module, "returns_residual", False)
        ),
        "asked": getattr(model.config, FUSED_RESIDUAL, False),
        "counters": overlay.counters() if overlay is not None else None,
        "patched": runtime.patched_files() if overlay is not None else [],
    }


@contextlib.contextmanager
def _linear_on(overlay: Any) -> Iterator[None]:
    """With the op that is off by default switched on."""
    if overlay is None:
        yield
        return
    op = overlay.dispatch.OPS[LINEAR]
    op.enabled = True
    yield
    op.enabled = False


def _model(device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(SEED)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        ffn_hidden_size=40,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=False,
        # These three need Apex, or kernels that only Apex builds.
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        # Upstream's local norms, of releases that have it, do not heed it.
        **({FUSED_RESIDUAL: True} if hasattr(TransformerConfig, FUSED_RESIDUAL) else {}),
    )
    model: torch.nn.Module = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    # The same weights in every dtype, and not those that make each norm's input one of unit size.
    generator = torch.Generator().manual_seed(SEED + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.dim() == 1))
    return model.to(device)
