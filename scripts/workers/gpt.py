# SPDX-License-Identifier: Apache-2.0
"""The small GPT that train runs: model, optimizer, data and checkpoint, by Megatron-Core's own interfaces.

Two layers with RMSNorm, SwiGLU, rotary positions, grouped-query attention and query/key norms, in two ways:
from upstream's local layer spec, so that every norm slot and every entry the overlay can take over is in use;
and from a spec and a loss made by hand of the overlay's public classes, which uses none of those entries.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import optimizer as sharding
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

SEED = 1234
# Since 0.15 an MLP's spec can name its activation, and its configuration has a switch for that.
SPEC_HAS_ACTIVATION = "activation_func" in {f.name for f in dataclasses.fields(MLPSubmodules)}


@dataclass(frozen=True)
class Sizes:
    """The model's and the step's sizes, and Adam's rate; ``micro_batches``: how many a rank has in a step."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocabulary: int
    sequence: int
    micro_batch: int
    micro_batches: int
    learning_rate: float


@dataclass(frozen=True)
class Variant:
    """What a run changes: the configuration, or, ``by_hand``, who makes the spec and the loss."""

    fused_cross_entropy: bool
    fused_activation: bool
    sequence_parallel: bool
    by_hand: bool = False


def build(sizes: Sizes, variant: Variant) -> DistributedDataParallel:
    """The model in bf16 for data parallelism with float32 gradients; the same weights at every call."""
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    torch.manual_seed(SEED)
    config = TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.ffn,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.groups,
        kv_channels=sizes.hidden // sizes.heads,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=variant.fused_activation and not variant.by_hand,
        # Only under this name does the MLP build the activation that its spec has; nothing of TE is in it.
        **({"use_te_activation_func": variant.by_hand} if SPEC_HAS_ACTIVATION else {}),
        bias_dropout_fusion=False,
        # These three need Apex, or kernels that only Apex builds.
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=variant.sequence_parallel,
        cross_entropy_loss_fusion=variant.fused_cross_entropy,
        cross_entropy_fusion_impl="native",
    )
    if variant.by_hand:
        spec = _spec_by_hand(sizes.layers)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=sizes.vocabulary,
        max_sequence_length=sizes.sequence,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    if torch.cuda.is_available():
        model = model.cuda()
    reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return DistributedDataParallel(config, reduction, Float16Module(config, model))


class MLPWithActivation(MLP):  # type: ignore[misc]
    """Megatron's MLP with an activation that takes the bias, too; for a release whose spec has none.

    There the gated MLP calls ``config.activation_func`` on the half that is the gate, so that no activation
    of both halves can be given to it.

    Args:
        config: a ``TransformerConfig``.
        submodules: the two linear layers.
        activation_func: built with ``config``; called with ``[s, b, 2n]`` and a bias ``[2n]`` or None.
        named: what else the release gives its MLP.
    """

    def __init__(
        self, config: TransformerConfig, submodules: MLPSubmodules, *, activation_func: Any, **named: Any
    ) -> None:
        super().__init__(config, submodules, **named)
        self.activation_func = activation_func(config=config)

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """Of ``[s, b, h]``, the second linear layer's output ``[s, b, h]`` and its bias ``[h]`` or None."""
        return self.linear_fc2(self.activation_func(*self.linear_fc1(hidden_states)))


def _spec_by_hand(layers: int) -> TransformerBlockSubmodules:
    """The same model with the overlay's classes as its norms and activation; only an overlaid tree has them.

    A whole block: with the spec of a layer alone, upstream chooses the final norm.
    """
    from megatron.core.liger import LigerMegatronRMSNorm, LigerMegatronSwiGLU

    linear_in, linear_out = tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear
    attention = SelfAttentionSubmodules(
        linear_qkv=linear_in,
        q_layernorm=LigerMegatronRMSNorm,
        k_layernorm=LigerMegatronRMSNorm,
        core_attention=DotProductAttention,
        linear_proj=linear_out,
    )
    mlp_parts, activation = {"linear_fc1": linear_in, "linear_fc2": linear_out}, LigerMegatronSwiGLU
    if SPEC_HAS_ACTIVATION:
        mlp = ModuleSpec(MLP, submodules=MLPSubmodules(activation_func=activation, **mlp_parts))
    else:
        mlp = ModuleSpec(MLPWithActivation, {"activation_func": activation}, MLPSubmodules(**mlp_parts))
    layer = TransformerLayerSubmodules(
        input_layernorm=LigerMegatronRMSNorm,
        self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=LigerMegatronRMSNorm,
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
        # Upstream's names of these two in checkpoints.
        sharded_state_dict_keys_map={
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        },
    )
    return TransformerBlockSubmodules(
        [ModuleSpec(TransformerLayer, submodules=layer)] * layers, layer_norm=LigerMegatronRMSNorm
    )


def loss(model: DistributedDataParallel, variant: Variant, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss of every token of a micro-batch, ``[micro_batch, sequence]`` float32."""
    if not variant.by_hand:
        of_model: torch.Tensor = model(**batch)
        return of_model
    from megatron.core.liger import LigerMegatronCrossEntropy

    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    # In bf16, as upstream's loss reads them: a wrapper would make a float32 copy of what leaves the model.
    logits = model.module.module(**inputs)
    group = parallel_state.get_tensor_model_parallel_group()
    labels = batch["labels"].transpose(0, 1)
    by_hand: torch.Tensor = LigerMegatronCrossEntropy()(logits.transpose(0, 1), labels, group)
    return by_hand.transpose(0, 1)


def batches(sizes: Sizes, step: int, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's micro-batches of a step: walks through one permutation of the vocabulary, a learnable rule.

    Yields:
        ``GPTModel``'s arguments: ``input_ids``, ``labels``, ``position_ids`` ``[micro_batch, sequence]``
        int64 and ``attention_mask`` ``[1, 1, sequence, sequence]`` bool, True where attention is masked.
    """
    follows = torch.randperm(sizes.vocabulary, generator=torch.Generator().manual_seed(SEED))
    positions = torch.arange(sizes.sequence).expand(sizes.micro_batch, -1).contiguous()
    mask = torch.ones(1, 1, sizes.sequence, sizes.sequence, dtype=torch.bool).triu(1)
    data_rank, data_size = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    for micro_batch in range(sizes.micro_batches):
        seed = (step * sizes.micro_batches + micro_batch) * data_size + data_rank
        generator = torch.Generator().manual_seed(SEED + 1 + seed)
        tokens = [torch.randint(sizes.vocabulary, (sizes.micro_batch,), generator=generator)]
        for _ in range(sizes.sequence):
            tokens.append(follows[tokens[-1]])
        walk = torch.stack(tokens, dim=1)
        yield {
            "input_ids": walk[:, :-1].contiguous().to(device),
            "labels": walk[:, 1:].contiguous().to(device),
            "position_ids": positions.to(device),
            "attention_mask": mask.to(device),
        }


class Optimizer(Protocol):
    """What the training loop and the checkpoint need of an optimizer."""

    def step(self) -> Any: ...

    def sharded_state_dict(
        self, model_state: Mapping[str, Any], is_loading: bool = False
    ) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def make_optimizer(model: DistributedDataParallel, learning_rate: float) -> Optimizer:
    """Megatron's mixed-precision Adam; on CPU, whose tensor types that one refuses, the same done plainly."""
    if not torch.cuda.is_available():
        return MainParameterAdam(list(model.parameters()), learning_rate)
    config = OptimizerConfig(
        optimizer="adam",
        lr=learning_rate,
        bf16=True,
        params_dtype=torch.bfloat16,
        clip_grad=0.0,
        weight_decay=0.0,
    )
    optimizer: Optimizer = get_megatron_optimizer(config, [model])
    return optimizer


def main_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The float32 gradient that Megatron accumulates beside a parameter."""
    gradient: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return gradient


class MainParameterAdam:
    """Adam on float32 copies of bf16 parameters, fed by Megatron's float32 ``main_grad``."""

    MOMENTS = ("exp_avg", "exp_avg_sq")

    def __init__(self, parameters: list[torch.nn.Parameter], learning_rate: float) -> None:
        self.parameters = parameters
        self.main = [parameter.detach().float().clone() for parameter in parameters]
        self.adam = torch.optim.AdamW(self.main, lr=learning_rate, weight_decay=0.0)

    def step(self) -> None:
        for parameter, main in zip(self.parameters, self.main):
            main.grad = main_gradient(parameter)
        self.adam.step()
        self._to_model()

    def _to_model(self) -> None:
        with torch.no_grad():
            for parameter, main in zip(self.parameters, self.main):
                parameter.copy_(main)

    def sharded_state_dict(self, model_state: Mapping[str, Any], is_loading: bool = False) -> dict[str, Any]:
        """Main parameters and moments, sharded as their parameters are."""
        shards = sharding.get_param_id_to_sharded_param_map(model_state, self.parameters)

        def shard(kind: str, index: int, tensor: torch.Tensor) -> Any:
            return sharding.make_sharded_optimizer_tensor(
                shards[index], tensor, prefix=f"optimizer.state.{kind}"
            )

        state: dict[str, Any] = {
            "step": 0,
            "main": [shard("main", index, main) for index, main in enumerate(self.main)],
        }
        for kind in self.MOMENTS:
            state[kind] = []
            for index, main in enumerate(self.main):
                moments = self.adam.state[main]
                tensor = torch.empty_like(main) if is_loading else moments[kind]
                state[kind].append(shard(kind, index, tensor))
        if not is_loading:
            state["step"] = int(self.adam.state[self.main[0]]["step"])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for index, main in enumerate(self.main):
                main.copy_(state["main"][index])
                self.adam.state[main] = {
                    "step": torch.tensor(float(state["step"])),
                    **{kind: state[kind][index].clone() for kind in self.MOMENTS},
                }
        self._to_model()


def save(model: DistributedDataParallel, optimizer: Optimizer, step: int, folder: Path) -> str:
    """Write a distributed checkpoint of model, optimizer and step into ``folder``.

    Returns:
        :func:`fingerprint` of this rank's shards.
    """
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    model_state = _model_state(model)
    state = {"model": model_state, "optimizer": optimizer.sharded_state_dict(model_state), "step": step}
    digest = fingerprint(state)
    dist_checkpointing.save(state, str(folder))
    return digest


def load(model: DistributedDataParallel, optimizer: Optimizer, folder: Path) -> tuple[int, str]:
    """Read what :func:`save` wrote.

    Returns:
        The step, and :func:`fingerprint` of what model and optimizer hold afterwards.
    """
    model_state = _model_state(model)
    wanted = {
        "model": model_state,
        "optimizer": optimizer.sharded_state_dict(model_state, is_loading=True),
        "step": 0,
    }
    state = dist_checkpointing.load(wanted, str(folder))
    model.module.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    model_state = _model_state(model)
    return state["step"], fingerprint(
        {"model": model_state, "optimizer": optimizer.sharded_state_dict(model_state)}
    )


def _model_state(model: DistributedDataParallel) -> dict[str, Any]:
    state: dict[str, Any] = model.module.module.sharded_state_dict()
    return state


def fingerprint(state: Any) -> str:
    """SHA-256 over the keys in ``state`` of whatever is sharded, and over the bytes of the tensors in it."""
    digest = hashlib.sha256()
    for key, data in sorted(_sharded(state), key=lambda item: item[0]):
        digest.update(key.encode())
        if isinstance(data, torch.Tensor):
            flat = data.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sharded(state: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(state, Mapping):
        yield from itertools.chain.from_iterable(map(_sharded, state.values()))
    elif isinstance(state, (list, tuple)):
        yield from itertools.chain.from_iterable(map(_sharded, state))
    elif isinstance(state, ShardedBase):
        yield state.key, state.data
