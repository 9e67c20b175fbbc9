# SPDX-License-Identifier: Apache-2.0
"""One rank of a split vocabulary, as a process: `cross_entropy_rank.py RANK RANKS STORE CASES RESULTS`.

CASES is a saved list of `(logits, target, dloss, options)` over the whole vocabulary. RESULTS gets, for each,
this rank's loss, gradient and counts: launches, collectives as the op counts them, and all that torch was
asked for.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent.parent
COLLECTIVES = [
    *(
        "all_gather",
        "all_gather_into_tensor",
        "all_reduce",
        "broadcast",
        "reduce_scatter_tensor",
        "all_to_all",
    ),
    *("all_gather_object", "barrier", "reduce", "gather", "scatter", "send", "recv"),
]


def register(name: str, folder: Path) -> None:
    """Import the package in `folder` as `name`."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def counted(name: str, function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return wrapper


def join(rank: int, ranks: int, store: str) -> torch.device:
    """Import the kernels and join the other ranks; this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    register("liger_kernels", ROOT / "kernels")
    if not cuda:
        register("scripts", ROOT / "scripts")
        from scripts import interpreter

        interpreter.convert_as_compiled()
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        rank=rank,
        world_size=ranks,
        init_method=f"file://{store}",
        timeout=timedelta(seconds=120),
    )
    return device


def count_collectives() -> Counter[str]:
    """Counts from here on all that torch is asked for."""
    calls: Counter[str] = Counter()
    for name in COLLECTIVES:
        setattr(dist, name, counted(name, getattr(dist, name), calls))
    return calls


def main(rank: int, ranks: int, store: str, cases: str, results: str) -> None:
    device = join(rank, ranks, store)
    from liger_kernels.cross_entropy import vocab_parallel_cross_entropy
    from liger_kernels.launches import COLLECTIVES as COUNTED
    from liger_kernels.launches import LAUNCHES

    calls = count_collectives()
    found = []
    for logits, target, dloss, options in torch.load(cases):
        for counter in (calls, COUNTED, LAUNCHES):
            counter.clear()
        shard = logits.chunk(ranks, -1)[rank].to(device).requires_grad_()
        loss = vocab_parallel_cross_entropy(shard, target.to(device), group=dist.group.WORLD, **options)
        loss.backward(dloss.to(device))
        counts = {"calls": dict(calls), "collectives": dict(COUNTED), "launches": dict(LAUNCHES)}
        found.append((loss.detach().cpu(), shard.grad.cpu(), counts))
    torch.save(found, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
