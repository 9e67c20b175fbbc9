# SPDX-License-Identifier: Apache-2.0
"""Many processes compile one kernel into one empty Triton cache: ``cold_start.py PROCESSES DELAY``.

Prints a line for each process: its exit code and the hash of what it got. In every second one each file that
is written or renamed and each new folder takes DELAY seconds longer: a slow shared file system. As in
`compile_gate.py` there is no device. The processes are forks of one that has imported everything and compiled
nothing, because importing torch 64 times would measure that.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import sys
import time
from typing import Any

import compile_cases
import compile_gate

TARGET = ("cuda", 90, 32)


def slow_down(seconds: float) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        opened = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if opened or event in ("os.rename", "os.mkdir"):
            time.sleep(seconds)

    sys.addaudithook(hook)


def one(call: Any, barrier: Any, delay: float, told: Any) -> None:
    from triton.backends.compiler import GPUTarget

    if delay:
        slow_down(delay)
    barrier.wait(300)
    built = compile_gate.build(call, GPUTarget(*TARGET))
    told.put(hashlib.sha256(built.asm["cubin"]).hexdigest())
    os._exit(0)  # taking torch down costs more than the compilation


def main(processes: int, delay: float) -> None:
    module = compile_gate.load("cross_entropy")
    calls = compile_gate.record(module, compile_cases.cross_entropy(module, 32, 232448))
    call = next(call for call in calls if call.kernel.fn.__name__ == "cross_entropy_combine_kernel")
    context = multiprocessing.get_context("fork")
    barrier, told = context.Barrier(processes), context.SimpleQueue()
    gc.freeze()
    children = [
        context.Process(target=one, args=(call, barrier, delay if i % 2 else 0.0, told))
        for i in range(processes)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(300)
    found = [told.get() for child in children if child.exitcode == 0]
    for child in children:
        print(child.exitcode, found.pop() if child.exitcode == 0 else "-")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
