# SPDX-License-Identifier: Apache-2.0
"""One rank of a split output layer, as a process; called as `cross_entropy_rank.py` is.

CASES is a saved list of `(hidden, weight, target, dloss, tiles, options)` over the whole vocabulary and
sequence. RESULTS gets, for each, this rank's loss, gradients of hidden state and weight, and counts.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from cross_entropy_rank import count_collectives, join


def main(rank: int, ranks: int, store: str, cases: str, results: str) -> None:
    device = join(rank, ranks, store)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    from liger_kernels import linear_cross_entropy as module
    from liger_kernels.launches import COLLECTIVES as COUNTED
    from liger_kernels.launches import LAUNCHES

    calls = count_collectives()
    found = []
    for hidden, weight, target, dloss, tiles, options in torch.load(cases):
        for counter in (calls, COUNTED, LAUNCHES):
            counter.clear()
        tiling = module._split(weight.shape[0] // ranks, tiles)
        module.choose_tiling = lambda *_, tiling=tiling: tiling
        if options.get("sequence_parallel"):
            hidden = hidden.chunk(ranks)[rank]
        hidden, shard = (
            hidden.to(device).requires_grad_(),
            weight.chunk(ranks)[rank].to(device).requires_grad_(),
        )
        if options.pop("main_grad", False):
            options["main_grad"] = torch.zeros(shard.shape, device=device)
        loss = module.linear_cross_entropy(
            hidden, shard, target.to(device), group=dist.group.WORLD, **options
        )
        loss.backward(dloss.to(device))
        counts = {"calls": dict(calls), "collectives": dict(COUNTED), "launches": dict(LAUNCHES)}
        dweight = options.get("main_grad", shard.grad)
        found.append((loss.detach().cpu(), hidden.grad.cpu(), dweight.cpu(), counts))
    torch.save(found, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
