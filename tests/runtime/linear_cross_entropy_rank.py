# SPDX-License-Identifier: Apache-2.0
"""One rank that runs small GPT models forward and backward, with ``linear_cross_entropy`` and without it.

The plan has ``tp`` and ``runs``; what a run found goes to ``NAME-rankN.pt`` beside the report.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from scripts.workers import runtime, step


def _beside(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def build(models: Any, run: dict[str, Any], device: torch.device) -> Any:
    """The run's model, its weights the same ones on any number of ranks."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    dtype = getattr(torch, run["dtype"])
    if run["simple"]:
        model = step._model(device, dtype)
    else:
        choice = {**models.SWIGLU, "normalization": "RMSNorm", "add_bias_linear": False}
        choice |= {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.1} if run["mtp"] else {}
        choice |= {"sequence_parallel": run["sequence_parallel"]}
        config = TransformerConfig(**models.common(run, **choice))
        block = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        )
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
        model = GPTModel(
            config,
            block,
            vocab_size=models.VOCABULARY,
            max_sequence_length=models.SEQUENCE,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=run["tied"],
            mtp_block_spec=mtp,
        )
    models.fill(model, run["seed"], parallel_state.get_tensor_model_parallel_rank(), ranks)
    return model.to(device, dtype)


def work(models: Any, run: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Losses ``[b, s]``, gradients of whole parameters, and the overlay's counts."""
    from megatron.core import parallel_state, tensor_parallel

    overlay = runtime.overlay()
    assert overlay is not None
    if not run["as_set"]:
        overlay.dispatch.OPS["linear_cross_entropy"].enabled = run["on"]
    if run["tiles"]:
        importlib.import_module("megatron.core.liger.kernels.linear_cross_entropy").FEWEST_COLUMNS = 16
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = build(models, run, device)
    if run["mup"]:
        model.config.use_mup, model.config.mup_output_mult = True, 0.5
    heads = [model.output_layer, *([model.embedding.word_embeddings] if run["tied"] else [])]
    weight = heads[-1].weight
    if run["fused"]:  # what a data-parallel wrapper sets; the layer's constructor wants Apex for it
        weight.main_grad = torch.full_like(weight, 0.25, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
        model.output_layer.gradient_accumulation_fusion = run["on"]
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    source = models.tokens("source", run, 0, device)
    mask = models.loss_mask(device)
    arguments: dict[str, Any] = {
        "input_ids": source,
        "position_ids": torch.arange(models.SEQUENCE, device=device).expand(models.BATCH, -1).contiguous(),
        "attention_mask": models.causal(device),
        "labels": source.roll(-1, 1),
    }
    overlay.reset_counters()
    with models.InDouble() if run["dtype"] == "float64" else contextlib.nullcontext():
        try:
            losses = model(**arguments, **({"loss_mask": mask.float()} if run["mtp"] else {}))
        except overlay.RankError as error:
            return {"error": str(error)}
        # Not Tensor.backward: while that one runs, InDouble does not see upstream's backward functions.
        torch.autograd.backward([models.mean(losses, mask)])
    counters = overlay.counters()
    if run["fused"] and run["on"]:
        assert weight.grad_added_to_main_grad
        # The gradient that autograd has is the embedding's alone, or what nobody reads.
        weight.grad = (weight.main_grad - 0.25 + (weight.grad if run["tied"] else 0)).to(weight.dtype)
    if run["sequence_parallel"]:  # as finalize_model_grads does for the parameters that all ranks have
        for parameter in model.parameters():
            if getattr(parameter, "sequence_parallel", False):
                torch.distributed.all_reduce(
                    parameter.grad, group=parallel_state.get_tensor_model_parallel_group()
                )
    return {
        "losses": [losses.detach().cpu()],
        "gradients": {
            name: models.joined(p.grad, p, ranks)
            for name, p in model.named_parameters()
            if p.grad is not None
        },
        "counters": counters,
        "layout": (str(losses.dtype), losses.is_contiguous()),
    }


SWITCHES = ("simple", "mtp", "tied", "fused", "mup", "tiles", "sequence_parallel", "on", "as_set")
DEFAULTS = dict.fromkeys(SWITCHES, False)


def main(argv: list[str]) -> int:
    """Run the plan in ``argv[0]``."""
    plan = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    folder = Path(plan["folder"])
    os.environ.update(plan["environs"].get(os.environ["RANK"], {}))
    device = runtime.prepare(plan["device"])
    runtime.check_tree()
    if device.type == "cpu":
        runtime.use_cpu_for_cuda()
    runtime.init_group(folder, plan["device"])
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=plan["tp"])
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    models = _beside("models_worker")
    if plan.get("sizes") == "step":
        models.VOCABULARY, models.SEQUENCE, models.BATCH = step.VOCABULARY, step.SEQUENCE, step.BATCH
    for run in plan["runs"]:
        found = work(models, {**DEFAULTS, **run}, device)
        torch.save(found, folder / f"{run['name']}-rank{torch.distributed.get_rank()}.pt")
    runtime.write_report(folder, {})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0
