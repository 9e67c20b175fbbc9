# SPDX-License-Identifier: Apache-2.0
"""The lines of a job: on rank 0, at the first call and at exit, once each."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import DEVICE, KERNELS, Python

CALLS = f"""
import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl
print("imported", flush=True)
device = {DEVICE}
x = torch.ones(2, 8, device=device, requires_grad=True)
for _ in range(3):
    bias_swiglu_impl(x, None).sum().backward()
bias_swiglu_impl(x, x[0].bfloat16())
weighted_bias_swiglu_impl(x, None, x[:, :1])
print("called", flush=True)
"""
HEAD = r"liger overlay 1 for Megatron-Core 0\.16\.1"


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("liger overlay")]


def test_both_lines(python: Python, overlaid_tree: object) -> None:
    done = python(code=CALLS, **KERNELS)
    printed = done.stdout.splitlines()
    assert [line.split()[0] for line in printed] == ["imported", "liger", "called", "liger"]
    core = re.escape(f"{overlaid_tree}/megatron/core")
    where = r"cpu \(Triton's interpreter\)" if KERNELS else r"[^|]+"
    assert re.fullmatch(
        rf"{HEAD}: (?:\w+ kernel, )*swiglu kernel(?:, \w+ kernel)*, linear_cross_entropy not enabled \| "
        rf"torch \S+ triton \S+ device {where} \| {core}",
        printed[1],
    )
    assert re.fullmatch(
        rf"{HEAD} at exit: (?:\w+: never called; )*"
        rf"swiglu: bias_swiglu_impl 3 kernel \+ 1 upstream "
        rf"\(input and bias of different dtypes\), "
        rf"weighted_bias_swiglu_impl 1 kernel, launches swiglu_backward 3, swiglu_forward 4"
        rf"(?:; \w+: never called)*; linear_cross_entropy: not enabled \| {core}",
        printed[3],
    )


def test_an_op_that_was_not_applied(python: Python, overlaid_tree: Path, tmp_path: Path) -> None:
    """Its switch and its kernel are there, and nothing of Megatron's reaches them."""
    tree = tmp_path / "tree"
    shutil.copytree(overlaid_tree, tree)
    path = tree / "megatron/core/fusions/fused_cross_entropy.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: text.index("# >>> liger overlay")], encoding="utf-8")
    first, *_ = lines(python(code=CALLS, tree=tree, TRITON_INTERPRET="1").stdout)
    assert "swiglu kernel" in first
    assert "cross_entropy not installed" in first


RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def test_rank_of_the_launcher(liger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    job = importlib.import_module("megatron.core.liger.job")
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    assert job.rank() == 0
    for number, name in reversed(list(enumerate(RANKS, start=5))):  # an earlier name counts more
        monkeypatch.setenv(name, str(number))
        assert job.rank() == number
    monkeypatch.setenv("RANK", "none")
    assert job.rank() == 6


def test_silent_on_another_rank(python: Python) -> None:
    assert lines(python(code=CALLS, **KERNELS, RANK="1").stdout) == []


def test_rank_of_torch_distributed(python: Python) -> None:
    """It counts more than the environment."""
    code = """
import torch
torch.distributed.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
"""
    code = "from torch.testing._internal.distributed.fake_pg import FakeStore" + code + CALLS
    assert lines(python(code=code, **KERNELS, RANK="0", WORLD_SIZE="4").stdout) == []
    code = code.replace("rank=3", "rank=0")
    assert len(lines(python(code=code, **KERNELS, RANK="3", WORLD_SIZE="4").stdout)) == 2


def test_counts_of_a_device_that_cannot_be_asked(liger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not read is said, a zero is not, and an error of the device stops no line."""
    job = importlib.import_module("megatron.core.liger.job")
    op = sys.modules["megatron.core.liger.dispatch"].OPS["cross_entropy"]
    counts: dict[str, int | None] = {"wrong labels": 3, "others": 0, "late": None}
    waits: list[bool] = []

    def read(wait: bool) -> dict[str, int | None]:
        waits.append(wait)
        if not counts:
            raise RuntimeError("device-side assert triggered")
        return counts

    monkeypatch.setattr(op, "device_counts", read)
    assert "wrong labels 3, late not read (the device is busy)" in job.summary()
    assert "others" not in job.summary()
    counts.clear()
    assert "cross_entropy: never called" in job.summary()
    assert not any(waits)


@pytest.mark.parametrize(
    ("environ", "spawned", "distributed"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, False, True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, True, False),
        ({"RANK": "0"}, False, False),
        ({"WORLD_SIZE": "2"}, False, False),
    ],
)
def test_whether_this_is_a_rank(
    liger: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    spawned: bool,
    distributed: bool,
) -> None:
    job = importlib.import_module("megatron.core.liger.job")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object() if spawned else None)
    assert job.distributed() is distributed
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    assert job.distributed()
    assert not job._spawned()


def test_a_torch_without_distributed(liger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no word on whether a job's ranks are connected; the launcher has."""
    job = importlib.import_module("megatron.core.liger.job")
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    for name in ("is_initialized", "get_rank"):
        monkeypatch.delattr(f"torch.distributed.{name}")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert job.rank() == 3
    assert job.distributed()
    assert not job._spawned()


def test_a_connected_rank_is_its_groups(liger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    job = importlib.import_module("megatron.core.liger.job")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    assert job.rank() == 1


@pytest.fixture
def printed(liger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of this process, as if it were a job's rank 0 that has called nothing yet."""
    job = importlib.import_module("megatron.core.liger.job")
    dispatch = importlib.import_module("megatron.core.liger.dispatch")
    found: list[str] = []
    monkeypatch.setattr(job, "_print", found.append)
    monkeypatch.setattr(job, "_announced", False)
    monkeypatch.setattr(job, "_spawned", lambda: False)
    monkeypatch.setattr(job, "rank", lambda: 0)
    monkeypatch.setattr(job, "distributed", lambda: True)
    monkeypatch.setattr(dispatch, "job_pending", True)
    return found


ELSEWHERE: dict[str, tuple[str, object]] = {
    "a fork": ("_pid", -1),
    "a helper": ("_spawned", lambda: True),
    "another rank": ("rank", lambda: 1),
}


@pytest.mark.parametrize("where", [None, *ELSEWHERE])
def test_who_prints_the_first_line(
    printed: list[str], monkeypatch: pytest.MonkeyPatch, where: str | None
) -> None:
    job = sys.modules["megatron.core.liger.job"]
    entry = sys.modules["megatron.core.liger.dispatch"].OPS["swiglu"].entry("bias_swiglu_impl")
    if where is not None:
        monkeypatch.setattr(job, *ELSEWHERE[where])
    job.announce(entry, "because", None)
    assert len(printed) == (where is None)
    assert job._announced == (where is None)
    if where is None:
        assert "swiglu upstream (because)" in printed[0]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "installed, never used: swiglu"),
        ({"_pid": -1}, None),
        ({"distributed": lambda: False}, None),
        ({"rank": lambda: 1}, None),
        ({"called": True}, None),  # then the first line is missing for a reason, and so is this one
        ({"called": True, "_announced": True}, "at exit: swiglu"),
        ({"called": True, "_announced": True, "rank": lambda: 1}, "at exit: swiglu"),
        ({"called": True, "_announced": True, "_pid": -1}, None),
    ],
)
def test_who_prints_the_last_line(
    printed: list[str], monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], line: str | None
) -> None:
    job = sys.modules["megatron.core.liger.job"]
    monkeypatch.setattr(sys.modules["megatron.core.liger.dispatch"], "job_pending", "called" not in changes)
    for name, value in changes.items():
        if name != "called":
            monkeypatch.setattr(job, name, value)
    job._at_exit()
    assert len(printed) == (line is not None)
    assert (line or "") in "".join(printed)


def test_ops_that_are_off_or_not_there_are_told_apart(
    printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, dispatch = (sys.modules[f"megatron.core.liger.{name}"] for name in ("job", "dispatch"))
    states = {"swiglu": "not installed", "norms": "not installed"}
    monkeypatch.setattr(job.installed, "files", lambda: {"a.py": {}})
    monkeypatch.setattr(job.installed, "op_state", lambda op, files: states.get(op, "installed"))
    monkeypatch.setattr(dispatch.OPS["cross_entropy"], "enabled", False)
    job.announce(dispatch.OPS["swiglu"].entry("bias_swiglu_impl"), None, None)
    first = printed[0].partition(": ")[2]
    assert first.startswith("swiglu kernel, cross_entropy off by LIGER_MEGATRON, norms not installed, ")
    assert "linear_cross_entropy not enabled | torch" in first
    monkeypatch.setattr(job.installed, "files", dict)  # no record: nobody can tell
    job.announce(dispatch.OPS["swiglu"].entry("bias_swiglu_impl"), None, None)
    assert "not installed" not in printed[1]


IMPORT_ONLY = "import megatron.core.fusions.fused_bias_swiglu"


def test_installed_never_used(python: Python) -> None:
    """Said of a distributed job's rank 0, and of nothing else."""
    done = python(code=IMPORT_ONLY, RANK="0", WORLD_SIZE="2")
    (line,) = lines(done.stdout)
    assert re.match(
        rf"{HEAD} at exit: installed, never used: (?:\w+: never called; )+"
        r"linear_cross_entropy: not enabled \| ",
        line,
    )
    assert "swiglu: never called" in line
    assert lines(python(code=IMPORT_ONLY, SLURM_PROCID="0").stdout) == []  # an interactive shell of a job
    assert lines(python(code=IMPORT_ONLY, RANK="1", WORLD_SIZE="2").stdout) == []


def test_not_in_children(python: Python) -> None:
    """A fork, as data loaders make, and a spawned helper that inherits rank 0's environment."""
    fork = """
import os, sys, torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
child = os.fork()
if not child:
    bias_swiglu_impl(torch.ones(2, 8), None)
    sys.exit(0)  # runs what is registered for the end of a process
assert os.waitpid(child, 0)[1] == 0
"""
    (line,) = lines(python(code=fork, RANK="0", WORLD_SIZE="2").stdout)
    assert "never used" in line
    spawn = """
import importlib, multiprocessing
import megatron.core.fusions.fused_bias_swiglu
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(
        target=importlib.import_module, args=("megatron.core.fusions.fused_bias_swiglu",)
    )
    child.start()
    child.join()
    assert child.exitcode == 0
"""
    assert len(lines(python(code=spawn, RANK="0", WORLD_SIZE="2").stdout)) == 1


def test_never_stops_a_job(python: Python) -> None:
    """A standard output that is closed, and then a line that cannot be put together."""
    code = """
import sys
import megatron.core.liger.installed as installed
sys.stdout.close()
import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
assert bias_swiglu_impl(torch.ones(2, 8), None).shape == (2, 4)
def fail():
    raise RuntimeError("broken")
installed.release = fail
"""
    done = python(code=code)
    assert "Traceback" not in done.stderr
    assert "broken" not in done.stderr
