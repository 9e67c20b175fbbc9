# SPDX-License-Identifier: Apache-2.0
"""The norm classes that the patched call sites give, beside stand-ins for TransformerEngine and Apex.

``call_sites.py FOLDER`` prints, as JSON, the class of a block's final norm by the layer's norms, the classes
that upstream's provider of local specs gives one after the other (none where there is no provider), and the
class that it gives for an RMSNorm with its residual (none where it cannot be asked for that).
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from norms_rank import ROOT, register


class TENorm(torch.nn.Module):
    """TransformerEngine's norm as far as a block asks for it."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def final_norms() -> dict[str, str]:
    """The class of the final norm, by what the layer has."""
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import TransformerConfig, transformer_block
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    transformer_block.LayerNormImpl = TENorm
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        normalization="RMSNorm",
        qk_layernorm=True,
        persist_layer_norm=False,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    local = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    pairs: dict[str, Any] = {
        "local": (WrappedTorchNorm, WrappedTorchNorm),
        "te": (TENorm, TENorm),
        "te in linear": (IdentityOp, IdentityOp),
        "te before experts": (IdentityOp, TENorm),
        "mixed": (WrappedTorchNorm, TENorm),
        "one local": (WrappedTorchNorm, IdentityOp),
    }
    if importlib.util.find_spec("megatron.core.liger") is not None:
        norms = importlib.import_module("megatron.core.liger.norms")
        if norms.OP.enabled:  # else upstream's own FusedLayerNorm refuses RMSNorm
            pairs["fused"] = (FusedLayerNorm, FusedLayerNorm)
        pairs["by hand"] = (norms.LigerMegatronRMSNorm, norms.LigerMegatronRMSNorm)
    found = {"upstream's local spec": _final(config, local)}
    for name, (first, second) in pairs.items():
        spec = copy.deepcopy(local)
        spec.submodules.input_layernorm, spec.submodules.pre_mlp_layernorm = first, second
        found[name] = _final(config, spec)
    whole = transformer_block.TransformerBlockSubmodules(layer_specs=[local, local], layer_norm=TENorm)
    found["whole block"] = _final(config, whole)
    return found


def _final(config: Any, spec: Any) -> str:
    from megatron.core.transformer.transformer_block import TransformerBlock

    norm = TransformerBlock(config, spec).final_layernorm
    return f"{type(norm).__module__}.{type(norm).__qualname__}".removeprefix("__main__.")


def provided() -> list[str]:
    """The classes that the provider gives for any norm, for an RMSNorm, and for any norm again."""
    try:
        from megatron.core.models.backends import LocalSpecProvider
    except ImportError:
        return []
    provider = LocalSpecProvider()
    return [provider.layer_norm(rms_norm=rms).__name__ for rms in (False, True, False)]


def with_residual() -> str | None:
    """The class that the provider gives for an RMSNorm at the head of a residual branch."""
    try:
        from megatron.core.models.backends import LocalSpecProvider
    except ImportError:
        return None
    if "has_residual" not in inspect.signature(LocalSpecProvider.layer_norm).parameters:
        return None
    name: str = LocalSpecProvider().layer_norm(rms_norm=True, has_residual=True).__name__
    return name


def main(folder: Path) -> None:
    register("scripts", ROOT / "scripts")
    from scripts.workers import runtime

    runtime.prepare("cpu")
    runtime.use_cpu_for_cuda()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1
    )
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    runtime.use_no_transformer_engine()
    result = {"provided": provided(), "residual": with_residual(), "final": final_norms()}
    torch.distributed.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
