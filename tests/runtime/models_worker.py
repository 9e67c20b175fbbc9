# SPDX-License-Identifier: Apache-2.0
"""One rank that runs models wider than a GPT forward and backward on the tree that is on the path.

The plan names ``runs``; what each found goes to ``RUN-rankN.pt`` beside the report.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from scripts.workers import runtime

HIDDEN, HEADS, FFN, VOCABULARY, BATCH, SEQUENCE = 32, 4, 48, 64, 2, 8


class InDouble(TorchFunctionMode):
    """float64 wherever upstream asks for float32, so that its own code gives the truth."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(widen, args), **{name: widen(value) for name, value in (kwargs or {}).items()})


def draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Float32 numbers of mean 0 and deviation 1, the same ones for a name and seed wherever they are drawn."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode())))


def shard(whole: torch.Tensor, parameter: torch.nn.Parameter, rank: int, ranks: int) -> torch.Tensor:
    """The part of ``whole`` that ``rank`` holds of a parameter."""
    if ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim, stride = parameter.partition_dim, parameter.partition_stride
    return torch.cat(whole.chunk(ranks * stride, dim)[rank::ranks], dim)


def whole_shape(parameter: torch.nn.Parameter, ranks: int) -> tuple[int, ...]:
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= ranks
    return tuple(shape)


def fill(model: torch.nn.Module, seed: int, rank: int, ranks: int) -> None:
    """Weights from their names, which bfloat16 holds exactly, so that a run in any dtype has the same."""
    for name, parameter in model.named_parameters():
        whole = draw(name, whole_shape(parameter, ranks), seed)
        if parameter.dim() == 1:
            whole = whole * 0.2 + ("norm" in name and name.endswith("weight"))
        else:
            whole = whole / whole.size(-1) ** 0.5
        with torch.no_grad():
            parameter.copy_(shard(whole.bfloat16(), parameter, rank, ranks))


def common(run: dict[str, Any], **choice: Any) -> dict[str, Any]:
    """Arguments of a config: two layers without what needs Apex, as the run asks for."""
    from megatron.core import parallel_state

    dtype = getattr(torch, run["dtype"])
    return {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_attention_heads": HEADS,
        "kv_channels": HIDDEN // HEADS,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "bias_dropout_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "sequence_parallel": run.get("sequence_parallel", False),
        "cross_entropy_loss_fusion": run.get("fused_cross_entropy", False),
        "cross_entropy_fusion_impl": "native",
        "bias_activation_fusion": run.get("fused_activation", True),
        **choice,
    }


SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
RMS = {**SWIGLU, "normalization": "RMSNorm", "add_bias_linear": False, "qk_layernorm": True}
LORA = {
    "multi_latent_attention": True,
    "rope_type": "rope",
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": HIDDEN // HEADS,
}
EXPERTS = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_layer_freq": [0, 1],
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
}


def tokens(name: str, seed: int, device: torch.device) -> torch.Tensor:
    return (draw(name, (BATCH, SEQUENCE), seed) * 1000).long().remainder(VOCABULARY).to(device)


def causal(device: torch.device) -> torch.Tensor:
    return torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)


def weighed(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (losses * weights).sum() / weights.sum()


def loss_mask(device: torch.device) -> torch.Tensor:
    """Weights of 0 and 1 for the loss of each token, ``[b, s]``."""
    return (torch.arange(BATCH * SEQUENCE, device=device).view(BATCH, SEQUENCE) % 3 > 0).double()


def t5(run: dict[str, Any]) -> tuple[Any, Any, Callable[[Any, torch.device], torch.Tensor]]:
    """LayerNorm, SwiGLU with bias, cross attention, output weights shared with the embedding.

    Upstream's own block specs name TransformerEngine's norm for the last one, and have none without it.
    """
    from megatron.core.models.T5 import T5Model, t5_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config = TransformerConfig(**common(run, **SWIGLU))
    specs = (t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec())
    blocks = [TransformerBlockSubmodules([spec] * 2, layer_norm=t5_spec.LNImpl) for spec in specs]
    model = T5Model(
        config,
        config,
        *blocks,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=True,
    )

    def loss(model: Any, device: torch.device) -> torch.Tensor:
        pad = torch.zeros(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device)
        pad[1, ..., -2:] = True
        source, target = tokens("source", run["seed"], device), tokens("target", run["seed"], device)
        found = model(source, target, pad, causal(device), pad, lm_labels=target.roll(-1, 1))
        return weighed(found, loss_mask(device))

    return config, model, loss


def bert(run: dict[str, Any]) -> tuple[Any, Any, Callable[[Any, torch.device], torch.Tensor]]:
    """LayerNorm, biases, GELU, the head for masked tokens and the one for the sentences' order."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(**common(run))
    model = BertModel(config, 2, bert_layer_local_spec, VOCABULARY, SEQUENCE)

    def loss(model: Any, device: torch.device) -> torch.Tensor:
        present = torch.ones(BATCH, SEQUENCE, dtype=torch.int64, device=device)
        present[1, -2:] = 0
        segment = (torch.arange(SEQUENCE, device=device) > 3).long().expand(BATCH, -1)
        weights = loss_mask(device)
        labels = tokens("labels", run["seed"], device).masked_fill(weights == 0, -1)  # as upstream's data has it
        found, order = model(tokens("source", run["seed"], device), present, segment, lm_labels=labels)
        first = torch.arange(BATCH, device=device) % 2
        return weighed(found, weights) + torch.nn.functional.cross_entropy(order.double(), first)

    return config, model, loss


def gpt(
    run: dict[str, Any], **choice: Any
) -> tuple[Any, Any, Callable[[Any, torch.device], torch.Tensor]]:
    """RMSNorm, SwiGLU, rotary positions, query and key norms; ``choice`` adds what the model is about."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    mla = "multi_latent_attention" in choice
    config = (MLATransformerConfig if mla else TransformerConfig)(**common(run, **RMS, **choice))
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm"
    )
    if mla:
        for spec in block.layer_specs:
            spec.submodules.self_attention.submodules.core_attention = runtime.attention_for_mla()
    mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    model = GPTModel(
        config,
        block,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=mtp,
    )

    def loss(model: Any, device: torch.device) -> torch.Tensor:
        source, weights = tokens("source", run["seed"], device), loss_mask(device)
        positions = torch.arange(SEQUENCE, device=device).expand(BATCH, -1).contiguous()
        found = model(
            source, positions, causal(device), labels=source.roll(-1, 1), loss_mask=weights.to(torch.float32)
        )
        return weighed(found, weights)

    return config, model, loss


MODELS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gpt": gpt,
    "t5": t5,
    "bert": bert,
    "mla": lambda run: gpt(run, **LORA),
    "mtp": lambda run: gpt(run, mtp_num_layers=2),
    "moe": lambda run: gpt(run, **EXPERTS),
    "moe overlapped": lambda run: gpt(
        run, **{**EXPERTS, "moe_token_dispatcher_type": "alltoall"}, moe_shared_expert_overlap=True
    ),
}


def run_model(run: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Forward and backward of one model.

    Returns:
        The loss of every cross-entropy call ``[b, s]``, each parameter's whole gradient, the class in every
        norm's place, the tokens of every expert, the overlay's counts.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    dtype = getattr(torch, run["dtype"])
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    config, model, loss = MODELS[run["model"]](run)
    fill(model, run["seed"], rank, ranks)
    found: dict[str, Any] = {"losses": [], "experts": [], "norms": norms(model)}
    record(model, found)
    model.to(device, dtype)
    reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=dtype is torch.bfloat16)
    module = Float16Module(config, model) if config.bf16 else model
    parallel = DistributedDataParallel(config, reduction, module)
    overlay = runtime.overlay()
    if overlay is not None:
        overlay.reset_counters()
    # Not Tensor.backward, in which the mode above would not see upstream's own backward functions.
    torch.autograd.backward([loss(parallel, device)])
    finalize_model_grads([parallel])
    found["gradients"] = {
        name: joined(parameter.main_grad, parameter, ranks).cpu()
        for name, parameter in model.named_parameters()
    }
    found["counters"] = overlay.counters() if overlay is not None else None
    return found


def run_sharded(run: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Forward, backward and one step of SGD of a model whose parameters the data-parallel ranks share out.

    Returns:
        As :func:`run_model`, and each whole parameter after the step.
    """
    from megatron.core.distributed import (
        DistributedDataParallelConfig,
        FullyShardedDataParallel,
        TorchFullyShardedDataParallel,
    )
    from megatron.core.transformer.module import Float16Module

    dtype = getattr(torch, run["dtype"])
    config, model, loss = MODELS[run["model"]](run)
    fill(model, run["seed"], 0, 1)
    found: dict[str, Any] = {"losses": [], "experts": [], "norms": norms(model)}
    record(model, found)
    model.to(device, dtype)
    module = Float16Module(config, model) if config.bf16 else model
    fp32 = dtype is torch.bfloat16
    if run["wrap"] == "fsdp2":
        sharded = TorchFullyShardedDataParallel(config, DistributedDataParallelConfig(), module)
    else:
        reduction = DistributedDataParallelConfig(
            grad_reduce_in_fp32=fp32, use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
        )
        sharded = FullyShardedDataParallel(config, reduction, module, device=device)
    overlay = runtime.overlay()
    if overlay is not None:
        overlay.reset_counters()
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    torch.autograd.backward([loss(sharded, device)])
    if run["wrap"] != "fsdp2":
        sharded.finish_grad_sync()
    found["counters"] = overlay.counters() if overlay is not None else None
    found["gradients"] = {n.replace("module.", ""): gathered(p.grad, p) for n, p in sharded.named_parameters()}
    optimizer.step()
    found["stepped"] = {n.replace("module.", ""): gathered(p, p) for n, p in sharded.named_parameters()}
    return found


def gathered(part: Any, parameter: Any) -> torch.Tensor:
    """The whole of what the ranks have in parts, in rank order."""
    local = part.to_local() if hasattr(part, "to_local") else part
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, None if local is None else local.detach().cpu())
    return torch.cat([piece.flatten() for piece in parts if piece is not None]).view(parameter.shape)


def joined(part: torch.Tensor, parameter: torch.nn.Parameter, ranks: int) -> torch.Tensor:
    """What all ranks hold of a parameter or its gradient: the reverse of :func:`shard`."""
    from megatron.core import parallel_state

    if ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return part.detach().clone()
    parts = [torch.empty_like(part) for _ in range(ranks)]
    torch.distributed.all_gather(
        parts, part.contiguous(), group=parallel_state.get_tensor_model_parallel_group()
    )
    pieces = [piece.chunk(parameter.partition_stride, parameter.partition_dim) for piece in parts]
    return torch.cat([piece for together in zip(*pieces) for piece in together], parameter.partition_dim)


def norms(model: torch.nn.Module) -> dict[str, str]:
    return {
        name: f"{type(module).__module__}.{type(module).__name__}"
        for name, module in model.named_modules()
        if "norm" in name.rpartition(".")[2] and list(module.parameters(recurse=False))
    }


def record(model: Any, found: dict[str, Any]) -> None:
    """Keep every loss, and how many tokens each expert had, as upstream computes them."""
    compute = model.compute_language_model_loss

    def keep(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        result = compute(labels, logits)
        found["losses"].append(result.detach().masked_fill(labels < 0, 0).cpu())
        return result

    model.compute_language_model_loss = keep
    for module in model.modules():
        if type(module).__name__ == "TopKRouter":
            module.register_forward_hook(lambda _, args, result: found["experts"].append(result[1].cpu()))


def use_cpu_meshes() -> None:
    """Give both FSDPs, which ask for meshes of CUDA devices, meshes of CPUs."""
    from megatron.core.distributed import torch_fully_sharded_data_parallel
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from torch.distributed import DeviceMesh

    class Mesh(DeviceMesh):
        @staticmethod
        def from_group(group: Any, device_type: str, *args: Any, **named: Any) -> DeviceMesh:
            return DeviceMesh.from_group(group, "cpu", *args, **named)

    torch_fully_sharded_data_parallel.DeviceMesh = Mesh
    mcore_fsdp_adapter.DeviceMesh = Mesh


def main(argv: list[str]) -> int:
    plan = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    folder = Path(plan["folder"])
    device = runtime.prepare(plan["device"])
    runtime.check_tree()
    if device.type == "cpu":
        runtime.use_cpu_for_cuda()
    runtime.init_group(folder, plan["device"])
    from megatron.core import parallel_state, tensor_parallel

    runtime.use_no_transformer_engine()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=plan["tp"])
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    if device.type == "cpu":
        use_cpu_meshes()
    for run in plan["runs"]:
        with InDouble() if run["dtype"] == "float64" else contextlib.nullcontext():
            torch.save((run_sharded if 'wrap' in run else run_model)(run, device), folder / f"{run['name']}-rank{torch.distributed.get_rank()}.pt")
    runtime.write_report(folder, {"entries": runtime.all_origins(), "versions": runtime.versions()})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0
