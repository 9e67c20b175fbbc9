# SPDX-License-Identifier: Apache-2.0
"""One tensor-parallel rank that trains small models for one step: ``norms_rank.py RANK RANKS FOLDER``.

``FOLDER/plan`` holds ``{name: settings}``, the settings of :func:`run`. ``FOLDER/result{RANK}`` gets what
that returns, by name.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
TOKENS, VOCABULARY = 8, 32


def register(name: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def build(mla: bool, **choice: Any) -> Any:
    """A GPT of one layer and a multi-token-prediction head of one, unless ``choice`` says otherwise; with a
    norm in every place for one."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import transformer_config

    from scripts.workers import runtime

    torch.manual_seed(3)
    kind = transformer_config.MLATransformerConfig if mla else transformer_config.TransformerConfig
    lora = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
    usual: dict[str, Any] = {
        "num_layers": 1,
        "mtp_num_layers": 1,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 2,
        "kv_channels": 8,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        **({"multi_latent_attention": True, "rope_type": "rope", **lora} if mla else {}),
    }
    given = kind(**usual | choice)
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=given.num_moe_experts,
        qk_layernorm=True,
        normalization=given.normalization,
        multi_latent_attention=mla,
    )
    if mla:
        spec.submodules.self_attention.submodules.core_attention = runtime.attention_for_mla()
    mtp = None
    if given.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(given, spec, use_transformer_engine=False)
    model = GPTModel(
        given,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
    )
    return given, model


def run(*, mla: bool, device: torch.device, **choice: Any) -> dict[str, Any]:
    """One step: the class and the gradient of every norm, that of the word embeddings, the loss, the counts,
    and which norms give their residual too.

    Args:
        mla: multi-latent attention instead of the usual one.
        device: of the model.
        choice: for the config.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    liger = None
    if importlib.util.find_spec("megatron.core.liger") is not None:
        liger = importlib.import_module("megatron.core.liger")
        liger.reset_counters()
    given, model = build(mla, **choice)
    norms = {
        name: f"{type(module).__module__}.{type(module).__name__}"
        for name, module in model.named_modules()
        if "norm" in name.rpartition(".")[2] and list(module.parameters(recurse=False))
    }
    reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    parallel = DistributedDataParallel(given, reduction, model.to(device))
    tokens = (torch.arange(2 * TOKENS, device=device).view(2, TOKENS) * 7) % VOCABULARY
    positions = torch.arange(TOKENS, device=device).expand(2, TOKENS).contiguous()
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device=device).triu(1)
    loss = parallel(tokens, positions, mask, labels=tokens.roll(-1, 1)).sum()
    loss.backward()
    finalize_model_grads([parallel])
    gradients = {
        name: parameter.main_grad.detach().cpu().clone()
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[0] in norms
    }
    embeddings = model.embedding.word_embeddings.weight.main_grad.detach().cpu().clone()
    counts = liger.counters()["norms"] if liger else None
    tied = {name for name, module in model.named_modules() if getattr(module, "returns_residual", False)}
    return {
        "norms": norms,
        "loss": loss.item(),
        "gradients": gradients,
        "embeddings": embeddings,
        "counts": counts,
        "tied": tied,
    }


def main(rank: int, ranks: int, folder: Path) -> None:
    register("scripts", ROOT / "scripts")
    from scripts.workers import runtime

    cuda = torch.cuda.device_count() >= ranks
    device = runtime.prepare("cuda" if cuda else "cpu")
    if not cuda:
        runtime.use_cpu_for_cuda()
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=ranks,
    )
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    runtime.use_no_transformer_engine()
    plan = torch.load(folder / "plan")
    found = {
        name: run(device=device, tensor_model_parallel_size=ranks, **settings)
        for name, settings in plan.items()
    }
    torch.save(found, folder / f"result{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
