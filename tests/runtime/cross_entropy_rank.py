# SPDX-License-Identifier: Apache-2.0
"""One tensor-parallel rank as a process: ``cross_entropy_rank.py RANK RANKS FOLDER``.

``FOLDER/plan`` holds ``{"calls": [...], "timeout": seconds or None, "dies": rank or None}``; a call is
``(entry, logits, target, dloss, options)`` with the logits of the whole vocabulary. ``FOLDER/result{RANK}``
gets, for each, this rank's loss, gradient and counts, or its error. The rank that dies does so in its first
collective.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAMES = ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "barrier", "reduce")
NAMES = (*NAMES, "reduce_scatter_tensor", "all_gather_object", "all_to_all", "gather", "scatter", "send")


def counted(
    name: str, function: Callable[..., Any], calls: Counter[str], dies: bool = False
) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        if dies:
            os._exit(9)
        return function(*args, **kwargs)

    return wrapper


def round_to_nearest_even() -> None:
    """As in the tests' own process."""
    path = Path(__file__).resolve().parents[2] / "scripts" / "interpreter.py"
    spec = importlib.util.spec_from_file_location("interpreter", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.convert_as_compiled()


def main(rank: int, ranks: int, folder: Path) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        round_to_nearest_even()
    plan = torch.load(folder / "plan")
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        rank=rank,
        world_size=ranks,
        init_method=f"file://{folder / 'store'}",
        timeout=timedelta(seconds=60),
    )
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    group = parallel_state.get_tensor_model_parallel_group()
    liger = None
    if importlib.util.find_spec("megatron.core.liger") is not None:
        liger = importlib.import_module("megatron.core.liger")
        if plan["timeout"] is not None:
            importlib.import_module("megatron.core.liger.ranks").TIMEOUT = plan["timeout"]

    calls: Counter[str] = Counter()
    for name in NAMES:
        setattr(dist, name, counted(name, getattr(dist, name), calls, dies=plan["dies"] == rank))

    def call(entry: str, logits: torch.Tensor, target: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        if entry == "fused":
            loss = fused_vocab_parallel_cross_entropy(logits, target, group, **options)
        elif entry == "unfused":
            loss = tensor_parallel.vocab_parallel_cross_entropy(logits, target, **options)
        else:
            assert liger is not None
            given = {"tp_group": group} if entry == "module" else {}
            loss = liger.LigerMegatronCrossEntropy(**options)(logits, target, **given)
        found: torch.Tensor = loss
        return found

    results = []
    for entry, logits, target, dloss, options in plan["calls"]:
        calls.clear()
        if liger is not None:
            liger.reset_counters()
        shard = logits.chunk(ranks, -1)[rank].to(device).requires_grad_()
        result: dict[str, Any] = {"error": None}
        try:
            loss = call(entry, shard, target.to(device), options)
            loss.backward(dloss.to(device))
            result |= {"loss": loss.detach().cpu(), "gradient": shard.grad.cpu()}
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
        result["calls"] = dict(calls)
        if liger is not None:
            result["counters"] = liger.counters()["cross_entropy"]
        results.append(result)
    torch.save(results, folder / f"result{rank}")
    if all(result["error"] is None for result in results):
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
