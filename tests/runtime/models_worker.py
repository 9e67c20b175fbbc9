# SPDX-License-Identifier: Apache-2.0
"""One rank that runs models wider than a plain GPT, forward and backward, on the tree that is on the path.

The plan has ``tp`` and ``runs``; what a run found goes to ``NAME-rankN.pt`` beside the report.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DeviceMesh
from torch.overrides import TorchFunctionMode

from scripts.workers import runtime

HIDDEN, HEADS, FFN, VOCABULARY, BATCH, SEQUENCE = 32, 4, 48, 64, 2, 8
RATE = 0.1  # of the one step of SGD
Run = dict[str, Any]
# The loss of a batch, given the model that computes it, the batch's number and the device.
Loss = Callable[[Any, int, torch.device], torch.Tensor]


class InDouble(TorchFunctionMode):
    """float64 wherever upstream asks for float32, so that its own code gives the truth."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()})


# --- Weights and data, the same ones on any tree, in any dtype and on any number of ranks ---


def draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Normal float32 numbers that depend on nothing but the arguments."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode())))


def is_shared_out(parameter: torch.nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def fill(model: torch.nn.Module, seed: int, rank: int, ranks: int) -> None:
    """Weights that bfloat16 holds exactly, drawn whole by their names; ``rank`` keeps its part of them."""
    for name, parameter in model.named_parameters():
        shape, part = list(parameter.shape), parameter.detach()
        if is_shared_out(parameter):
            shape[parameter.partition_dim] *= ranks
        whole = draw(name, tuple(shape), seed)
        if parameter.dim() == 1:
            whole = whole / 4 + ("norm" in name and name.endswith("weight"))
        else:
            whole = whole / shape[-1] ** 0.5
        if is_shared_out(parameter):
            pieces = whole.chunk(ranks * parameter.partition_stride, parameter.partition_dim)
            whole = torch.cat(pieces[rank::ranks], parameter.partition_dim)
        part.copy_(whole.bfloat16())


def joined(part: torch.Tensor, parameter: torch.nn.Parameter, ranks: int) -> torch.Tensor:
    """The whole of what the tensor-parallel ranks have of a parameter's gradient."""
    from megatron.core import parallel_state

    part = part.detach().contiguous()
    if ranks == 1 or not is_shared_out(parameter):
        return part.cpu().clone()
    parts = [torch.empty_like(part) for _ in range(ranks)]
    torch.distributed.all_gather(parts, part, group=parallel_state.get_tensor_model_parallel_group())
    pieces = [each.chunk(parameter.partition_stride, parameter.partition_dim) for each in parts]
    return torch.cat([piece for level in zip(*pieces) for piece in level], parameter.partition_dim).cpu()


def tokens(name: str, run: Run, batch: int, device: torch.device) -> torch.Tensor:
    drawn = draw(f"{name} {batch}", (BATCH, SEQUENCE), run["seed"])
    return (drawn * 1000).long().remainder(VOCABULARY).to(device)


def causal(device: torch.device) -> torch.Tensor:
    return torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)


def loss_mask(device: torch.device) -> torch.Tensor:
    """Which tokens' losses count, ``[b, s]``."""
    return torch.arange(BATCH * SEQUENCE, device=device).view(BATCH, SEQUENCE) % 3 > 0


def mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (losses * mask).sum() / mask.sum()


# --- Models ---


def common(run: Run, **choice: Any) -> dict[str, Any]:
    """The arguments of a config: two layers without what needs Apex, as the run asks for."""
    from megatron.core import parallel_state

    dtype = getattr(torch, run["dtype"])
    return {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_attention_heads": HEADS,
        "kv_channels": HIDDEN // HEADS,
        "transformer_impl": "local",
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "sequence_parallel": parallel_state.get_tensor_model_parallel_world_size() > 1,
        "cross_entropy_loss_fusion": run.get("fused_cross_entropy", False),
        "cross_entropy_fusion_impl": "native",
        **choice,
    }


SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}


def t5(run: Run) -> tuple[Any, Any, Loss]:
    """LayerNorm, SwiGLU with bias, cross attention, output weights that are the embedding's."""
    from megatron.core.models.T5 import T5Model, t5_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config = TransformerConfig(**common(run, **SWIGLU))
    specs = (t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec())
    # As upstream's own block specs, whose last norm is TransformerEngine's or, without it, none.
    blocks = [TransformerBlockSubmodules([spec] * 2, layer_norm=t5_spec.LNImpl) for spec in specs]
    model = T5Model(
        config,
        config,
        *blocks,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=True,
    )

    def loss(model: Any, batch: int, device: torch.device) -> torch.Tensor:
        source, target = (tokens(name, run, batch, device) for name in ("source", "target"))
        padding = torch.zeros(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device)
        padding[1, ..., -2:] = True
        losses = model(source, target, padding, causal(device), padding, lm_labels=target.roll(-1, 1))
        return mean(losses, loss_mask(device))

    return config, model, loss


def bert(run: Run) -> tuple[Any, Any, Loss]:
    """LayerNorm, biases, GELU, the head for masked tokens and the one for the order of the sentences."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(**common(run))
    model = BertModel(config, 2, bert_layer_local_spec, VOCABULARY, SEQUENCE)

    def loss(model: Any, batch: int, device: torch.device) -> torch.Tensor:
        mask = loss_mask(device)
        labels = tokens("labels", run, batch, device).masked_fill(~mask, -1)  # as upstream's data has them
        present = torch.ones(BATCH, SEQUENCE, dtype=torch.int64, device=device)
        present[1, -2:] = 0
        sentence = (torch.arange(SEQUENCE, device=device) > 3).long().expand(BATCH, -1)
        losses, order = model(tokens("source", run, batch, device), present, sentence, lm_labels=labels)
        swapped = torch.arange(BATCH, device=device) % 2
        return mean(losses, mask) + torch.nn.functional.cross_entropy(order.float(), swapped)

    return config, model, loss


def gpt(run: Run, **choice: Any) -> tuple[Any, Any, Loss]:
    """RMSNorm, SwiGLU, rotary positions, query and key norms, and what ``choice`` adds to its config."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    mla = "multi_latent_attention" in choice
    config = (MLATransformerConfig if mla else TransformerConfig)(
        **common(run, **SWIGLU, normalization="RMSNorm", add_bias_linear=False, qk_layernorm=True, **choice)
    )
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm"
    )
    if mla:
        for spec in block.layer_specs:
            spec.submodules.self_attention.submodules.core_attention = runtime.attention_for_mla()
    model = GPTModel(
        config,
        block,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=gpt_layer_specs.get_gpt_mtp_block_spec(config, block, use_transformer_engine=False),
    )

    def loss(model: Any, batch: int, device: torch.device) -> torch.Tensor:
        source, mask = tokens("source", run, batch, device), loss_mask(device)
        positions = torch.arange(SEQUENCE, device=device).expand(BATCH, -1).contiguous()
        labels = source.roll(-1, 1)
        losses = model(source, positions, causal(device), labels=labels, loss_mask=mask.float())
        return mean(losses, mask)

    return config, model, loss


LATENT = {
    "multi_latent_attention": True,
    "rope_type": "rope",
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": HIDDEN // HEADS,
}
EXPERTS = {
    "moe_layer_freq": [0, 1],
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
OVERLAPPED = {"moe_token_dispatcher_type": "alltoall", "moe_shared_expert_overlap": True}
MODELS: dict[str, Callable[[Run], tuple[Any, Any, Loss]]] = {
    "t5": t5,
    "bert": bert,
    "gpt": gpt,
    "mla": lambda run: gpt(run, **LATENT),
    "mtp": lambda run: gpt(run, mtp_num_layers=2),
    "moe": lambda run: gpt(run, **EXPERTS, moe_token_dispatcher_type="allgather"),
    "moe overlapped": lambda run: gpt(run, **EXPERTS, **OVERLAPPED),
}


# --- Runs ---


def run_model(run: Run, device: torch.device) -> dict[str, Any]:
    """Forward and backward of one model, a step of SGD where the run asks for it, and the loss after it.

    Returns:
        ``losses``: of every cross-entropy call ``[b, s]``; ``gradients`` and, after a step, ``stepped``: of
        every whole parameter; ``norms``: the class in each norm's place; ``routes``: which token went to
        which expert; ``counters``: the overlay's, None without one.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.module import Float16Module

    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    config, model, loss = MODELS[run["model"]](run)
    fill(model, run["seed"], rank, ranks)
    found: dict[str, Any] = {"losses": [], "routes": [], "norms": norms(model)}
    record(model, found)
    model.to(device, getattr(torch, run["dtype"]))
    module = Float16Module(config, model) if config.bf16 else model
    wrapped = WRAPS[run.get("wrap", "ddp")](config, module, ranks)
    overlay = runtime.overlay()
    if overlay is not None:
        overlay.reset_counters()
        for name in ("swiglu", "cross_entropy"):
            overlay.dispatch.OPS[name].in_place = run.get("in_place", False)
    batches = wrapped.batches(run.get("batches", 1))
    for batch in batches:
        # Not Tensor.backward: while that one runs, InDouble does not see upstream's backward functions.
        torch.autograd.backward([loss(wrapped.model, batch, device) / len(batches)])
    found["counters"] = overlay.counters() if overlay is not None else None
    found["gradients"] = wrapped.gradients()
    if run.get("step"):
        found["stepped"] = wrapped.step()
        with torch.no_grad():
            loss(wrapped.model, batches[0], device)
    return found


def norms(model: torch.nn.Module) -> dict[str, str]:
    return {
        name: f"{type(module).__module__}.{type(module).__name__}"
        for name, module in model.named_modules()
        if "norm" in name.rpartition(".")[2] and list(module.parameters(recurse=False))
    }


def record(model: Any, found: dict[str, Any]) -> None:
    """Keep every loss of a label that is one, and every route, as upstream computes them."""
    compute = model.compute_language_model_loss

    def keep(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        losses: torch.Tensor = compute(labels, logits)
        found["losses"].append(losses.detach().masked_fill(labels < 0, 0).cpu())
        return losses

    model.compute_language_model_loss = keep
    for module in model.modules():
        if type(module).__name__ == "TopKRouter":
            module.register_forward_hook(lambda _, args, result: found["routes"].append(result[1].cpu()))


class Ddp:
    """Upstream's own data parallelism on a group of one rank, beside the tensor-parallel ones."""

    def __init__(self, config: Any, module: Any, ranks: int) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        self.ranks = ranks
        reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=config.bf16)
        self.model = DistributedDataParallel(config, reduction, module)
        self.parameters = {plain(name): parameter for name, parameter in self.model.named_parameters()}

    def batches(self, number: int) -> list[int]:
        return list(range(number))

    def gradients(self) -> dict[str, torch.Tensor]:
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.model])
        return {name: joined(p.main_grad, p, self.ranks) for name, p in self.parameters.items()}

    def step(self) -> dict[str, torch.Tensor]:
        for parameter in self.parameters.values():
            parameter.detach().sub_(parameter.main_grad, alpha=RATE)
        return {name: joined(p, p, self.ranks) for name, p in self.parameters.items()}


class Fsdp2:
    """PyTorch's fully sharded data parallelism, as upstream wraps it; each rank has a batch of its own."""

    def __init__(self, config: Any, module: Any, ranks: int) -> None:
        self.model = self.shard(config, module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def shard(self, config: Any, module: Any) -> Any:
        from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel

        return TorchFullyShardedDataParallel(config, DistributedDataParallelConfig(), module)

    def batches(self, number: int) -> list[int]:
        return [torch.distributed.get_rank()]

    def gradients(self) -> dict[str, torch.Tensor]:
        return {plain(name): gathered(p.grad, p.shape) for name, p in self.model.named_parameters()}

    def step(self) -> dict[str, torch.Tensor]:
        self.optimizer.step()
        return {plain(name): gathered(p, p.shape) for name, p in self.model.named_parameters()}


class MegatronFsdp(Fsdp2):
    """Upstream's own fully sharded data parallelism: parameters, gradients and the optimizer's state."""

    def shard(self, config: Any, module: Any) -> Any:
        from megatron.core.distributed import DistributedDataParallelConfig, FullyShardedDataParallel

        reduction = DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.bf16,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy="optim_grads_params",
            gradient_reduce_div_fusion=False,  # done by a reduction that gloo lacks
        )
        device = next(module.parameters()).device
        with numbered_device(device):
            return FullyShardedDataParallel(config, reduction, module, device=device)

    def gradients(self) -> dict[str, torch.Tensor]:
        self.model.finish_grad_sync()
        return super().gradients()

    def step(self) -> dict[str, torch.Tensor]:
        stepped = super().step()
        self.model.module.install_optimized_model_weights()
        return stepped


WRAPS: dict[str, Any] = {"ddp": Ddp, "fsdp2": Fsdp2, "megatron-fsdp": MegatronFsdp}


def plain(name: str) -> str:
    """A parameter's name in the model itself."""
    return name.replace("module.", "")


def gathered(part: Any, shape: torch.Size) -> torch.Tensor:
    """The whole of what the data-parallel ranks have in rows, in their order; None is no row."""
    local = part.to_local() if hasattr(part, "to_local") else part
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, None if local is None else local.detach().cpu().flatten())
    return torch.cat([rows for rows in parts if rows is not None]).view(shape)


# --- What upstream needs to run like this ---


@contextlib.contextmanager
def numbered_device(device: torch.device) -> Iterator[None]:
    """Megatron-FSDP makes the name of a CUDA device of the current one's number, wherever it runs."""
    current = torch.cuda.current_device
    if device.type == "cpu":
        torch.cuda.current_device = lambda: 0
    yield
    torch.cuda.current_device = current


def use_cpu_meshes() -> None:
    """Both FSDPs ask for meshes of CUDA devices: give them meshes of CPUs."""
    from megatron.core.distributed import torch_fully_sharded_data_parallel
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    class Mesh:
        @staticmethod
        def from_group(group: Any, device_type: str, **named: Any) -> DeviceMesh:
            return DeviceMesh.from_group(group, "cpu", **named)

    torch_fully_sharded_data_parallel.DeviceMesh = mcore_fsdp_adapter.DeviceMesh = Mesh


def let_upstream_norms_be_sequence_parallel() -> None:
    """Upstream's local norms refuse sequence parallelism: give it torch's, marked as upstream expects it."""
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs

    class Norm:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
            norm = getattr(torch.nn, config.normalization)(hidden_size, eps)
            for parameter in norm.parameters():
                parameter.sequence_parallel = True
            return norm

    backends.WrappedTorchNorm = gpt_layer_specs.LNImpl = Norm


def main(argv: list[str]) -> int:
    """Run the plan in ``argv[0]``."""
    plan = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    folder = Path(plan["folder"])
    device = runtime.prepare(plan["device"])
    runtime.check_tree()
    runtime.use_no_transformer_engine()
    if device.type == "cpu":
        runtime.use_cpu_for_cuda()
        use_cpu_meshes()
    if plan["tp"] > 1 and runtime.overlay() is None:
        let_upstream_norms_be_sequence_parallel()
    runtime.init_group(folder, plan["device"])
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=plan["tp"])
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for run in plan["runs"]:
        with InDouble() if run["dtype"] == "float64" else contextlib.nullcontext():
            found = run_model(run, device)
        torch.save(found, folder / f"{run['name']}-rank{torch.distributed.get_rank()}.pt")
    runtime.write_report(folder, {"entries": runtime.all_origins()})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0
