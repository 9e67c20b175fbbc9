# SPDX-License-Identifier: Apache-2.0
"""The two lines of a job, on rank 0: one at the first call of an entry, one with the counts at exit.

They are the proof that a job runs this overlay. Neither may ever stop a job, so both give up on any error.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch

from . import dispatch, installed
from .version import OVERLAY_VERSION

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_pid = os.getpid()
_announced = False


def rank() -> int:
    """This process's rank: from torch.distributed, else from what the launcher set, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    for name in _RANK:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0


def distributed() -> bool:
    """Whether this process is one of a job's ranks, and not a helper that inherited a rank's environment."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and not _spawned()


def _spawned() -> bool:
    """Whether another Python process made this one by multiprocessing, and no rank of a job came of it."""
    import multiprocessing

    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return multiprocessing.parent_process() is not None and not initialized


def _head() -> str:
    return f"liger overlay {OVERLAY_VERSION} for Megatron-Core {installed.release()}"


def _print(line: str) -> None:
    print(line, flush=True)


def announce(entry: dispatch.Entry, reason: str | None, tensor: Any) -> None:
    """The line at the first call. ``reason``: why that call does not run on the kernel, or None."""
    global _announced
    try:
        if os.getpid() != _pid or _spawned() or rank() != 0:
            return
        device = tensor.device.type if isinstance(tensor, torch.Tensor) else "cpu"
        platform = dispatch.platform()
        ops = []
        files = installed.files()
        for op in dispatch.in_order():
            why = reason if op is entry.op else platform.unusable(device)
            state = installed.op_state(op.name, files) if files else installed.INSTALLED
            if op is not entry.op and state == installed.NOT_INSTALLED:
                ops.append(f"{op.name} {state}")
            elif not op.enabled:
                ops.append(f"{op.name} {dispatch.off(op.name)}")
            else:
                ops.append(f"{op.name} upstream ({why})" if why else f"{op.name} kernel")
        name = torch.cuda.get_device_name(tensor.device) if device == "cuda" else device
        if platform.interpreted:
            name += " (Triton's interpreter)"
        _announced = True
        _print(
            f"{_head()}: {', '.join(ops)} | torch {torch.__version__} triton {platform.triton or 'none'} "
            f"device {name} | {installed.CORE}"
        )
    except Exception:
        pass


def summary() -> str:
    """Counts since the start (or the last reset), in one line: for each op its entries, then its launches."""
    parts = []
    files = installed.files()
    for name, op in dispatch.counters().items():
        calls = []
        for entry, n in op["entries"].items():
            runs = [f"{n['kernel']} kernel"] if n["kernel"] else []
            runs += [f"{n['off']} {dispatch.OFF}"] if n["off"] else []
            runs += [f"{count} upstream ({reason})" for reason, count in n["upstream"].items()]
            if runs:
                calls.append(f"{entry} {' + '.join(runs)}")
        launched = [f"{kernel} {count}" for kernel, count in op["launches"].items()]
        state = installed.op_state(name, files) if files else installed.INSTALLED
        idle = not dispatch.OPS[name].enabled and dispatch.off(name) == dispatch.NOT_ENABLED
        unused = dispatch.NOT_ENABLED if idle else "never called"
        text = ", ".join(calls) or (unused if state == installed.INSTALLED else state)
        text += f", launches {', '.join(launched)}" if launched else ""
        text += f", collectives {op['collectives']}" if op["collectives"] else ""
        for what, count in _device_counts(name).items():
            text += f", {what} {'not read (the device is busy)' if count is None else count}"
        parts.append(f"{name}: {text}")
    return "; ".join(parts)


def _device_counts(op: str) -> dict[str, int | None]:
    """Counts on the device that are not zero; none where it can no longer be asked. Does not wait for it."""
    try:
        found = dispatch.OPS[op].device_counts(False)
    except Exception:
        return {}
    return {what: count for what, count in found.items() if count != 0}


def _at_exit() -> None:
    try:
        if os.getpid() != _pid:
            return
        called = not dispatch.job_pending
        if not (_announced or (not called and distributed() and rank() == 0)):
            return
        unused = "" if called else " installed, never used:"
        _print(f"{_head()} at exit:{unused} {summary()} | {installed.CORE}")
    except Exception:
        pass


def watch() -> None:
    """Print the counts when the process ends; say now which setting has no effect."""
    atexit.register(_at_exit)
    if (text := dispatch.without_effect()) is not None:
        dispatch.LOGGER.warning(text)


def silence() -> None:
    """Print no line in this process, which is no job: for the report."""
    atexit.unregister(_at_exit)
    dispatch.job_pending = False
