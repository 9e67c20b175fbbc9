# SPDX-License-Identifier: Apache-2.0
"""One rank of a training world: a few short runs of the small GPT on the tree that is on the path."""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.workers import runtime
from scripts.workers.entries import NORM_SLOTS


def main(argv: list[str]) -> int:
    """Run the plan in ``argv[0]`` and leave this rank's report beside it."""
    plan = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    folder = Path(plan["folder"])
    device = runtime.prepare(plan["device"])
    runtime.check_tree()
    if device.type == "cpu":
        runtime.use_cpu_for_cuda()
    runtime.init_group(folder, plan["device"])
    from megatron.core import parallel_state

    if importlib.util.find_spec("psutil") is None:
        # Without it upstream's checkpoint writer dies in a child process and the job waits for ever.
        raise RuntimeError("Megatron's distributed checkpoints need psutil: install it")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=plan["tp"])
    adapted = runtime.give_checkpoints_a_format()
    runs = {run["name"]: _run(plan, run, device) for run in plan["runs"]}
    report = {
        "runs": runs,
        "entries": runtime.all_origins(),
        "overlaid": runtime.overlay() is not None,
        "versions": runtime.versions(),
        "adapted": [adapted] if adapted else [],
    }
    runtime.write_report(folder, report)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


def _run(plan: Mapping[str, Any], run: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """One run: build, load and save where asked, train; report losses, counters, norms and gradients."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    from scripts.workers import gpt

    gc.collect()  # the last run's model and optimizer are in cycles, and are not this one's memory
    sizes = gpt.Sizes(**plan["sizes"])
    variant = gpt.Variant(
        run["fused_cross_entropy"], run["fused_activation"], plan["sequence_parallel"], run["by_hand"]
    )
    model = gpt.build(sizes, variant)
    optimizer = gpt.make_optimizer(model, sizes.learning_rate)
    report: dict[str, Any] = {"losses": [], "counters": [], "norms": _classes(model, NORM_SLOTS)}
    report["mlp"] = _classes(model, ("mlp",))["mlp"]
    first = 0
    if run.get("load"):
        first, report["loaded"] = gpt.load(model, optimizer, Path(run["load"]))
    report["first_step"] = first
    report |= {"seconds": [], "peak_bytes": []}
    overlay = runtime.overlay()
    for step in range(first, plan["iterations"]):
        if overlay is not None:
            overlay.reset_counters()
        begun = _begin(device)
        model.zero_grad_buffer()
        losses = []
        for batch in gpt.batches(sizes, step, device):
            loss = gpt.loss(model, variant, batch).float().mean()
            torch.autograd.backward(loss / sizes.micro_batches)
            losses.append(loss.detach())
        finalize_model_grads([model])
        if step == 0 and run.get("gradients"):
            _gradients(model, Path(run["gradients"]), report, compare=run["compare"])
        optimizer.step()
        mean = torch.stack(losses).mean()
        torch.distributed.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        report["losses"].append(mean.item() / parallel_state.get_data_parallel_world_size())
        seconds, peak = _end(device, begun)
        report["seconds"].append(seconds)
        report["peak_bytes"].append(peak)
        if overlay is not None:
            report["counters"].append(overlay.counters())
        if run.get("save") and step + 1 == run["save_after"]:
            report["saved"] = gpt.save(model, optimizer, step + 1, Path(run["save"]))
    return report


def _begin(device: torch.device) -> float:
    """The time at which a step begins, nothing being left of the last one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    return time.perf_counter()


def _end(device: torch.device, begun: float) -> tuple[float, int | None]:
    """Seconds of a step, and the most bytes allocated in it; None where nobody counts them."""
    if device.type != "cuda":
        return time.perf_counter() - begun, None
    torch.cuda.synchronize(device)
    return time.perf_counter() - begun, torch.cuda.max_memory_allocated(device)


def _classes(model: torch.nn.Module, slots: Sequence[str]) -> dict[str, list[str]]:
    """The classes in each slot, over all layers."""
    found: dict[str, set[str]] = {slot: set() for slot in slots}
    for name, module in model.named_modules():
        slot = name.rpartition(".")[2]
        if slot in found:
            found[slot].add(f"{type(module).__module__}.{type(module).__qualname__}")
    return {slot: sorted(classes) for slot, classes in found.items()}


def _gradients(model: torch.nn.Module, prefix: Path, report: dict[str, Any], *, compare: bool) -> None:
    """Store this rank's gradients under ``prefix``, or report how far they are from the stored ones.

    The distance of a parameter is the largest absolute difference over the largest absolute gradient stored
    for it.
    """
    from scripts.workers import gpt

    file = prefix.with_name(f"{prefix.name}-rank{torch.distributed.get_rank()}.pt")
    gradients = {
        name.replace("module.", ""): gpt.main_gradient(parameter).detach().float().cpu().clone()
        for name, parameter in model.named_parameters()
    }
    norms = {name: g for name, g in gradients.items() if name.split(".")[-2] in NORM_SLOTS}
    report["norm_gradients"] = _digest(norms)
    if not compare:
        torch.save(gradients, file)
        return
    stored: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    if stored.keys() != gradients.keys():
        raise RuntimeError(f"parameters differ: {sorted(stored.keys() ^ gradients.keys())}")
    report["gradients"] = {
        name: ((gradient - stored[name]).abs().max() / stored[name].abs().max()).item()
        for name, gradient in gradients.items()
    }


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
