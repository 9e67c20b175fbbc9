# SPDX-License-Identifier: Apache-2.0
"""One rank of a small training job in upstream's own loop, with ``linear_cross_entropy`` and without it.

Upstream's data-parallel wrapper, schedule of pipeline stages and end of a step, with the plain gradient
descent of this file. The plan has ``pp``, ``cp`` and ``runs``; what a run found goes to ``NAME-rankN.pt``.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from scripts.workers import runtime

STEPS, MICRO_BATCHES, RATE = 3, 4, 0.5
SEQUENCE, BATCH, VOCABULARY = 8, 2, 64


def build(run: dict[str, Any]) -> tuple[Any, Any]:
    """The config, and this rank's stage in upstream's wrapper; the same weights at every call."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    tensor_parallel.model_parallel_cuda_manual_seed(1)
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
        **(recompute if run["recompute"] else {}),
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    if config.context_parallel_size > 1:  # only TransformerEngine's attention crosses parts of a sequence
        spec.submodules.self_attention = IdentityOp
        spec.submodules.self_attn_bda = IdentityFuncOp
    torch.manual_seed(1)
    stage = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=run["tied"],
    )
    if torch.cuda.is_available():
        stage = stage.cuda()
    # Without buckets of their own, all gradients would be reduced at the end, overlapped or not.
    wrapper = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=run["overlap"], bucket_size=1000
    )
    model = DistributedDataParallel(config, wrapper, stage)
    if run["fused"] and stage.post_process:  # the layer's constructor wants Apex for it
        stage.output_layer.gradient_accumulation_fusion = run["on"]
    return config, model


def batch(step: int, micro_batch: int, device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's part of a micro-batch: of every sequence, each so-manieth token."""
    from megatron.core import parallel_state

    data = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(1 + (step * MICRO_BATCHES + micro_batch) * 64 + data)
    source = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator).to(device)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)
    positions = torch.arange(SEQUENCE, device=device).expand(BATCH, -1).contiguous()
    parts = parallel_state.get_context_parallel_world_size()
    part = slice(parallel_state.get_context_parallel_rank(), None, parts)
    return {
        "input_ids": source[:, part],
        "position_ids": positions[:, part],
        "attention_mask": mask,
        "labels": source.roll(-1, 1)[:, part],
    }


def forward_step(batches: Any, model: Any) -> tuple[Any, Any]:
    """As upstream's scripts have it, for a loss per token: its sum, and over how many tokens."""

    def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        kept = torch.arange(losses.numel(), device=losses.device).view(losses.shape) % 3 > 0
        total = (losses * kept).sum()
        return total, kept.sum().int(), {"loss": total.detach()}

    return model(**next(batches)), functools.partial(loss_function)


def work(run: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Losses of the last stage, this rank's parameters after the last step, and the overlay's counts."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    overlay = runtime.overlay()
    assert overlay is not None
    overlay.dispatch.OPS["linear_cross_entropy"].enabled = run["on"]
    config, model = build(run)
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync if run["overlap"] else None
    overlay.reset_counters()
    losses = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch(step, i, device) for i in range(MICRO_BATCHES)]),
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        losses += [one["loss"].cpu() for one in found]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.main_grad
    return {
        "losses": torch.stack(losses) if losses else torch.zeros(0),
        "parameters": {name: p.detach().cpu() for name, p in model.named_parameters()},
        "counters": overlay.counters(),
    }


def main(argv: list[str]) -> int:
    """Run the plan in ``argv[0]``."""
    plan = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    folder = Path(plan["folder"])
    device = runtime.prepare(plan["device"])
    runtime.check_tree()
    if device.type == "cpu":
        runtime.use_cpu_for_cuda()
        zeros = torch.zeros  # upstream's schedules name their device in full
        torch.zeros = lambda *size, **named: zeros(*size, **{**named, "device": device})  # type: ignore[assignment]
    runtime.init_group(folder, plan["device"])
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=plan["pp"], context_parallel_size=plan["cp"]
    )
    for run in plan["runs"]:
        found = work({**dict.fromkeys(("tied", "fused", "overlap", "recompute"), False), **run}, device)
        torch.save(found, folder / f"{run['name']}-rank{torch.distributed.get_rank()}.pt")
    runtime.write_report(folder, {})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0
