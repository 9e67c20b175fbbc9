# SPDX-License-Identifier: Apache-2.0
"""One rank that runs small GPTs in the ways that save memory or watch the model, on the tree on the path.

The plan has ``runs``, each with the name of a way in :data:`WAYS`; what a run found goes to ``NAME-rank0.pt``
beside the report, an error that its backward raised included.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from scripts.workers import runtime
from scripts.workers.start import load

models: Any = load(str(Path(__file__).with_name("models_worker.py")))

BATCHES = 2  # a step's micro-batches; upstream cannot defer the gradients of one alone
Run = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a model is run.

    Attributes:
        model: ``gpt``, or ``experts`` with a second layer of grouped experts.
        config: what is set in the model's configuration.
        around: a context for each forward.
        watch: given the model and the run, hooks it; gives the term that a micro-batch adds to its loss.
        finish: given the model, what has to follow the last backward.
        deterministic: under PyTorch's deterministic algorithms.
    """

    model: str = "gpt"
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    watch: Callable[[Any, Run], Callable[[], Any]] | None = None
    finish: Callable[[Any], None] = lambda model: None
    deterministic: bool = False


def full(method: str) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": 1}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def teacher(logits: torch.Tensor, run: Run) -> torch.Tensor:
    drawn: torch.Tensor = models.draw("teacher", tuple(logits.shape), run["seed"])
    return drawn.to(logits)


def squares(logits: torch.Tensor, run: Run) -> torch.Tensor:
    """A term whose backward reads the logits."""
    return torch.nn.functional.mse_loss(logits, teacher(logits, run)) / 8


def divergence(logits: torch.Tensor, run: Run) -> torch.Tensor:
    """A term whose backward reads a softmax of its own and not the logits."""
    mine, wanted = (torch.log_softmax(x.float(), -1) for x in (logits, teacher(logits, run)))
    return torch.nn.functional.kl_div(mine, wanted, reduction="batchmean", log_target=True) / 8


def distil(
    term: Callable[[torch.Tensor, Run], torch.Tensor], *, at_once: bool = True
) -> Callable[[Any, Run], Callable[[], Any]]:
    """A hook on the output layer that keeps its logits, with a term of them at once or after the loss."""

    def watch(model: Any, run: Run) -> Callable[[], Any]:
        kept: list[torch.Tensor] = []

        def hook(module: Any, arguments: Any, output: Any) -> Any:
            logits, bias = output
            kept.append(term(logits, run) if at_once else logits)
            # Upstream's loss overwrites logits that it need not convert: let it have others.
            return (logits.clone(), bias) if run["dtype"] == "float64" else output

        model.output_layer.register_forward_hook(hook)
        return lambda: kept[-1] if at_once else term(kept[-1], run)

    return watch


def defer(model: Any, run: Run) -> Callable[[], Any]:
    """Leave the output layer's weight gradient until after the last backward.

    Of the output layer alone: upstream's other local layers ask for the buffers too, and have none. Nor does
    its configuration allow this without pipeline parallelism, which changes nothing about the layer.
    """
    layer = model.output_layer
    layer.config = copy.copy(layer.config)
    layer.config.defer_embedding_wgrad_compute, layer.config.wgrad_deferral_limit = True, 0
    layer.embedding_activation_buffer, layer.grad_output_buffer = [], []
    return lambda: 0


def finish_deferred(model: Any) -> None:
    from megatron.core import parallel_state, utils

    layer = model.output_layer
    assert len(layer.grad_output_buffer) == BATCHES
    # As the last pipeline stage does, which has no other weight than this one to choose from.
    utils.drain_embedding_wgrad_compute(
        layer.config,
        layer.embedding_activation_buffer,
        layer.grad_output_buffer,
        layer.weight,
        parallel_state.get_tensor_model_parallel_group(),
    )
    assert not layer.grad_output_buffer


WAYS = {
    "plain": Way(),
    "full, uniform": Way(config=full("uniform")),
    "full, block": Way(config=full("block")),
    "core_attn": Way(config=selective("core_attn")),
    "layernorm": Way(config=selective("layernorm")),
    "mlp": Way(config=selective("mlp")),
    # Upstream's own two kinds of offloading need TransformerEngine, whose hooks are of the same kind.
    "saved on the host": Way(around=torch.autograd.graph.save_on_cpu),
    "deterministic": Way(config={"deterministic_mode": True}, deterministic=True),
    "accumulated": Way(config={"gradient_accumulation_fusion": True}),
    "deferred": Way(config={"gradient_accumulation_fusion": True}, watch=defer, finish=finish_deferred),
    "distilled, squares": Way(watch=distil(squares)),
    "distilled, squares after": Way(watch=distil(squares, at_once=False)),
    "distilled, divergence": Way(watch=distil(divergence)),
    "experts": Way("experts"),
    "experts, full": Way("experts", full("uniform")),
    "experts, moe_act": Way("experts", selective("moe_act")),
    "experts, layernorm": Way("experts", selective("layernorm")),
    "experts, moe": Way("experts", selective("moe")),
    "experts, shared_experts": Way("experts", selective("shared_experts")),
}
GROUPED = {"moe_grouped_gemm": True, "moe_token_dispatcher_type": "allgather"}


class GroupedLinear(torch.nn.Module):
    """A linear layer of each expert, with plain products; in the place of TransformerEngine's."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        shapes = [torch.empty(outputs, inputs, dtype=config.params_dtype)] * experts
        self.weights = torch.nn.ParameterList(map(torch.empty_like, shapes))

    def forward(self, x: torch.Tensor, tokens_per_expert: list[int]) -> tuple[torch.Tensor, None]:
        parts = zip(x.split(tokens_per_expert), self.weights)
        return torch.cat([torch.nn.functional.linear(part, weight) for part, weight in parts]), None


def use_grouped_experts() -> None:
    """Upstream's grouped experts, which call SwiGLU themselves, in its local specs."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    layers = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    LocalSpecProvider.grouped_mlp_modules = lambda *_, **__: (TEGroupedMLP, layers)


def use_plain_accumulation() -> None:
    """What Apex's extension does, adding a product to a float32 gradient, with a plain product."""
    extension: Any = ModuleType("fused_weight_gradient_mlp_cuda")

    def add_product(inputs: torch.Tensor, doutput: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient.add_(doutput.t() @ inputs)

    extension.wgrad_gemm_accum_fp32 = extension.wgrad_gemm_accum_fp16 = add_product
    sys.modules[extension.__name__] = extension


def run_way(run: Run, device: torch.device) -> dict[str, Any]:
    """A step's forward and backward.

    Returns:
        ``losses``: of every cross-entropy call ``[b, s]``; ``gradients``: of every parameter, None after an
        ``error``, the text of what a backward raised; ``counters``: the overlay's, None without one.
    """
    from megatron.core.transformer.module import Float16Module

    way = WAYS[run["way"]]
    experts = {**models.EXPERTS, **GROUPED} if way.model == "experts" else {}
    config, model, loss = models.gpt(run, **experts, **way.config)
    found: dict[str, Any] = {"losses": [], "routes": [], "error": None, "gradients": None}
    models.fill(model, run["seed"], 0, 1)
    models.record(model, found)
    term = way.watch(model, run) if way.watch else lambda: 0
    model.to(device, getattr(torch, run["dtype"]))
    wrapped = models.Ddp(config, Float16Module(config, model) if config.bf16 else model, 1)
    overlay = runtime.overlay()
    if overlay is not None:
        overlay.reset_counters()
        for name in ("swiglu", "cross_entropy"):
            overlay.dispatch.OPS[name].in_place = run.get("in_place", False)
    torch.use_deterministic_algorithms(way.deterministic)
    try:
        for batch in range(BATCHES):
            with way.around():
                value = loss(wrapped.model, batch, device) + term()
            torch.autograd.backward([value / BATCHES])
        way.finish(model)
    except RuntimeError as error:
        found["error"] = str(error)
    else:
        found["gradients"] = wrapped.gradients()
    torch.use_deterministic_algorithms(False)
    found["counters"] = overlay.counters() if overlay is not None else None
    return found


def main(argv: list[str]) -> int:
    """Run the plan in ``argv[0]``."""
    plan = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    folder = Path(plan["folder"])
    device = runtime.prepare(plan["device"])
    use_plain_accumulation()  # before upstream asks for it
    runtime.check_tree()
    runtime.use_no_transformer_engine()
    if device.type == "cpu":
        runtime.use_cpu_for_cuda()
    use_grouped_experts()
    runtime.init_group(folder, plan["device"])
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for run in plan["runs"]:
        with models.InDouble() if run["dtype"] == "float64" else contextlib.nullcontext():
            found = run_way(run, device)
        torch.save(found, folder / f"{run['name']}-rank0.pt")
    runtime.write_report(folder, {"entries": runtime.all_origins()})
    torch.distributed.destroy_process_group()
    return 0
