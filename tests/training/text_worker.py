# SPDX-License-Identifier: Apache-2.0
"""One rank that trains the small GPT of ``train`` on a text, byte by byte, on the tree that is on the path.

The plan has ``text`` (a file), ``steps`` and ``runs``; the report has what :func:`learn` gives of each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from scripts.workers import runtime

LAYERS, HIDDEN, FFN, HEADS, SEQUENCE, RATE = 2, 32, 64, 2, 32, 1e-3
VOCABULARY = 256  # bytes
BATCH = 8 if torch.cuda.is_available() else 1  # the interpreter's time grows with it
Run = dict[str, Any]


def batch(text: torch.Tensor, step: int, device: torch.device) -> dict[str, torch.Tensor]:
    """``GPTModel``'s arguments: passages from places that depend on the step alone."""
    places = torch.randint(len(text) - SEQUENCE, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    passages = text[places + torch.arange(SEQUENCE + 1)]
    return {
        "input_ids": passages[:, :-1].contiguous().to(device),
        "labels": passages[:, 1:].contiguous().to(device),
        "position_ids": torch.arange(SEQUENCE, device=device).expand(BATCH, -1).contiguous(),
        "attention_mask": torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1),
    }


def learn(run: Run, text: torch.Tensor, steps: int, device: torch.device) -> dict[str, Any]:
    """Train from the same weights at every call, but for what the run asks to be ``nudged``.

    Returns:
        ``losses``: the mean loss of each step; ``counters``: the overlay's, None without one.
    """
    from scripts.workers import gpt

    sizes = gpt.Sizes(LAYERS, HIDDEN, FFN, HEADS, HEADS, VOCABULARY, SEQUENCE, BATCH, 1, RATE)
    variant = gpt.Variant(run["fused_cross_entropy"], run["fused_activation"], sequence_parallel=False)
    model = gpt.build(sizes, variant)
    nudge(model.module.module.output_layer.weight, run.get("nudged", 0))
    optimizer = gpt.make_optimizer(model, RATE)
    overlay = runtime.overlay()
    if overlay is not None:
        overlay.reset_counters()
    losses = []
    for step in range(steps):
        model.zero_grad_buffer()
        loss = gpt.loss(model, variant, batch(text, step, device)).mean()
        loss.backward()
        model.finish_grad_sync()
        if run.get("norms_stay"):
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    gpt.main_gradient(parameter).zero_()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "counters": overlay.counters() if overlay is not None else None}


def nudge(weight: torch.Tensor, numbers: int) -> None:
    """Change the first numbers of a weight by their last bits."""
    first = weight.detach().flatten()[:numbers]
    first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))


def main(argv: list[str]) -> int:
    """Run the plan in ``argv[0]``."""
    plan = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    folder = Path(plan["folder"])
    device = runtime.prepare(plan["device"])
    runtime.check_tree()
    runtime.use_no_transformer_engine()
    if device.type == "cpu":
        runtime.use_cpu_for_cuda()
    runtime.init_group(folder, plan["device"])
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    text = torch.frombuffer(bytearray(Path(plan["text"]).read_bytes()), dtype=torch.uint8).long()
    found = {run["name"]: learn(run, text, plan["steps"], device) for run in plan["runs"]}
    runtime.write_report(folder, {"runs": found})
    torch.distributed.destroy_process_group()
    return 0
