# SPDX-License-Identifier: Apache-2.0
"""What the kernels' tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from liger_kernels import launches


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh memory holds NaN, so that an element that nobody writes shows. Values are the same each time."""
    torch.manual_seed(0)

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
            fresh = allocate(*args, **kwargs)
            if fresh.is_floating_point():
                fresh.detach().fill_(float("nan"))
            return fresh

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", poisoned(torch.empty))
        patch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        yield


@pytest.fixture
def launched() -> Counter[str]:
    """The count of launches, from zero."""
    launches.LAUNCHES.clear()
    return launches.LAUNCHES


@pytest.fixture
def capture() -> Callable[[Callable[[], Any], Sequence[torch.Tensor]], Callable[[Sequence[Any]], Any]]:
    """Captures a step in a CUDA graph, with the tensors that it reads.

    Gives a function of new values for those, which replays it and returns its result, in the same memory each
    time.
    """

    def captured(step: Callable[[], Any], reads: Sequence[torch.Tensor]) -> Callable[[Sequence[Any]], Any]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()

        def replay(values: Sequence[torch.Tensor]) -> Any:
            with torch.no_grad():
                for static, value in zip(reads, values, strict=True):
                    static.copy_(value)
            graph.replay()
            return result

        return replay

    return captured


@pytest.fixture
def compiled_variants() -> Callable[[ModuleType], int]:
    """Counts what Triton has compiled of a module's kernels."""

    def count(module: ModuleType) -> int:
        total = 0
        for name in vars(module):
            if name.endswith("_kernel"):
                kernel = getattr(module, name)
                caches = kernel.device_caches if hasattr(kernel, "device_caches") else {0: (kernel.cache[0],)}
                total += sum(len(cache[0]) for cache in caches.values())
        return total

    return count


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, Any], list[Any]]:
    """Runs a program of this folder as so many ranks on saved cases: on GPUs, else in the interpreter.

    Its arguments are `RANK RANKS STORE CASES RESULTS`. Returns what each rank saved.
    """

    def run(name: str, ranks: int, cases: Any) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        torch.save(cases, folder / "cases")
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        if torch.cuda.device_count() < ranks:
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        program = Path(__file__).with_name(name)
        processes = [
            subprocess.Popen(
                [sys.executable, str(program), str(rank), str(ranks)]
                + [str(folder / file) for file in ("store", "cases", f"results{rank}")],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            errors = [process.communicate(timeout=300)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, error in zip(processes, errors):
            assert process.returncode == 0, error[-3000:]
        return [torch.load(folder / f"results{rank}") for rank in range(ranks)]

    return run
