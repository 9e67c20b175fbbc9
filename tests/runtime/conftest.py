# SPDX-License-Identifier: Apache-2.0
"""The overlaid Megatron-Core: in this process, and in fresh ones with an environment of their own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from scripts.apply import build_tree
from scripts.manifest import load

Python = Callable[..., subprocess.CompletedProcess[str]]

#: What a fresh process needs for its kernels to run: nothing on a GPU, else the interpreter.
KERNELS = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
#: The device of its tensors, in code that has imported torch.
DEVICE = "'cuda' if torch.cuda.is_available() else 'cpu'"


@pytest.fixture(scope="session")
def python(overlaid_tree: Path) -> Python:
    """Run code in a fresh interpreter that finds the overlaid tree (or ``tree``), with the given environment.

    Upstream's functions run uncompiled there, which saves the time.
    """

    def run(
        *arguments: str,
        code: str | None = None,
        tree: Path | None = None,
        cwd: Path | None = None,
        expect: int = 0,
        **environ: str,
    ) -> subprocess.CompletedProcess[str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("LIGER_", "TRITON_INTERPRET", "PYTHON", "SLURM_", "OMPI_"))
            and name not in ("RANK", "WORLD_SIZE")
        }
        kept |= {"PYTHONPATH": str(tree or overlaid_tree), "TORCHDYNAMO_DISABLE": "1"} | environ
        command = [sys.executable, "-W", "ignore", *(("-c", code) if code else ()), *arguments]
        done = subprocess.run(command, env=kept, cwd=cwd, capture_output=True, text=True, timeout=120)
        assert done.returncode == expect, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def fused(overlaid_tree: Path) -> ModuleType:
    """The overlaid ``megatron.core.fusions.fused_bias_swiglu``, imported into this process."""
    path = str(overlaid_tree)
    if path not in sys.path:
        sys.path.insert(0, path)
    module = importlib.import_module("megatron.core.fusions.fused_bias_swiglu")
    assert Path(str(module.__file__)).is_relative_to(overlaid_tree)
    return module


@pytest.fixture
def liger(fused: ModuleType) -> Iterator[ModuleType]:
    """``megatron.core.liger`` in this process, its counters at zero."""
    module = importlib.import_module("megatron.core.liger")
    module.reset_counters()
    yield module
    module.reset_counters()


@pytest.fixture
def strict(liger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ``LIGER_MEGATRON_STRICT=1`` had been set at import."""
    settings = importlib.import_module("megatron.core.liger.settings")
    dispatch = importlib.import_module("megatron.core.liger.dispatch")
    monkeypatch.setattr(dispatch, "SETTINGS", settings.read({"LIGER_MEGATRON_STRICT": "1"}))


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(7)


@pytest.fixture(scope="session")
def release_tree(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a tree of the release with the named ops only."""

    def make(*ops: str) -> Path:
        dest = tmp_path_factory.mktemp("some_ops") / "tree"
        return build_tree(load().release("megatron==0.16.1"), ops, dest, overlaid=True)

    return make
