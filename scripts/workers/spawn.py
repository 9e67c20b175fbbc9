# SPDX-License-Identifier: Apache-2.0
"""Run worker processes on a tree and collect their reports. Standard library only, no torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.errors import ExpectationError

ROOT = Path(__file__).resolve().parents[2]
START = Path(__file__).with_name("start.py")
TIMEOUT = 600.0
# Left in a rank's log by libraries that say nothing about the failure.
_TAIL_LINES = 30


def detect_device(wanted: str = "auto") -> tuple[str, int]:
    """Ask the torch that the workers use for GPUs.

    Args:
        wanted: ``"auto"``, or ``"cuda"`` to insist on a GPU.

    Returns:
        ``("cuda", count)`` or ``("cpu", 0)``.

    Raises:
        ExpectationError: the environment has no torch, or no GPU where one is wanted.
    """
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ExpectationError(
            file=sys.executable,
            expected="a Python that imports torch",
            found=(done.stderr.strip().splitlines() or ["an error without text"])[-1],
            remedy="run in an environment with torch, triton, numpy and einops (nox makes one)",
        )
    count = int(done.stdout.split()[-1])
    if wanted == "cuda" and not count:
        raise ExpectationError(
            file=sys.executable, expected="a GPU", found="none that torch sees", remedy="leave --device away"
        )
    return ("cuda", count) if count else ("cpu", 0)


def environment(tree: Path | None, device: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A worker's environment: ``tree`` first on the path, the root not on it, no overlay settings."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("LIGER_MEGATRON")}
    inherited = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    # The workers run in another folder, so no entry may stay relative.
    kept = [str(Path(entry).resolve()) for entry in inherited if Path(entry).resolve() != ROOT]
    env["PYTHONPATH"] = os.pathsep.join([str(tree), *kept] if tree else kept)
    env["NO_VCS_VERSION"] = "1"
    if device == "cpu":
        # 0.15 compiles a helper for CUDA at its import, and would ask a device for its kind.
        env.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
        env.update(
            TRITON_INTERPRET="1", TORCHDYNAMO_DISABLE="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"
        )
    else:
        env.pop("TRITON_INTERPRET", None)
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    env.update(extra or {})
    return env


def run_world(
    worker: str,
    plan: Mapping[str, Any],
    *,
    tree: Path | None,
    folder: Path,
    ranks: int = 1,
    device: str = "cpu",
    timeout: float = TIMEOUT,
    extra: Mapping[str, str] | None = None,
    watch: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Run ``ranks`` processes of ``worker`` on ``tree`` and return each rank's report, in rank order.

    Args:
        worker: module of this package, or path of a program, whose ``main`` takes the path of the plan.
        plan: what the worker is told, as JSON; ``folder`` is added to it.
        tree: the folder that holds ``megatron/core``; None for a worker that imports no Megatron.
        folder: an empty folder for plan, logs and reports.
        ranks: the size of the process group.
        device: ``"cpu"`` or ``"cuda"``.
        timeout: seconds for the whole world.
        extra: more environment variables.
        watch: called now and then while the ranks run.

    Raises:
        ExpectationError: a rank ended with an error (the others are ended at once) or the time ran out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan_file = folder / "plan.json"
    plan_file.write_text(json.dumps({**plan, "folder": str(folder), "device": device}), encoding="utf-8")
    base = environment(tree, device, extra)
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            env = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            with log.open("wb") as stream:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(START), worker, str(plan_file)],
                        env=env,
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        failed = _wait(processes, time.monotonic() + timeout, watch)
    finally:
        _end(processes)
    if failed is not None:
        rank, why = failed
        raise ExpectationError(
            file=str(tree or worker),
            expected=f"{worker} ends without an error on each of {ranks} ranks within {timeout:.0f} s",
            found=f"rank {rank} {why}:\n{_tail(logs[rank])}",
            remedy="read the rank's error above",
        )
    reports = [folder / f"rank{rank}.json" for rank in range(ranks)]
    return [json.loads(report.read_text(encoding="utf-8")) for report in reports]


def log_lines(folder: Path, prefix: str) -> list[str]:
    """The lines of rank 0's log in ``folder`` that begin with ``prefix``."""
    text = (folder / "rank0.log").read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.startswith(prefix)]


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], deadline: float, watch: Callable[[], None] | None
) -> tuple[int, str] | None:
    """Wait for all; the first rank that failed and why, or None."""
    while True:
        if watch is not None:
            watch()
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank, f"ended with {'signal' if code < 0 else 'code'} {abs(code)}"
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline:
            return codes.index(None), "was still running when the time was up"
        time.sleep(0.05)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:]) or "(it wrote nothing)"
