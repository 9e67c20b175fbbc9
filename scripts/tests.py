# SPDX-License-Identifier: Apache-2.0
"""Run the test suite with the running Python; without a GPU, kernels run in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from scripts.errors import UsageError
from scripts.overlay import ROOT


def main(argv: list[str]) -> int:
    """``tests [ARGUMENT …]``: pytest's exit code. Raises UsageError where pytest or torch is missing."""
    for module in ("pytest", "torch"):
        if importlib.util.find_spec(module) is None:
            remedy = "nox -s tests makes the environment; or install the group `test` of pyproject.toml"
            raise UsageError(sys.executable, f"a Python that has {module}", "none", remedy)
    import torch

    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", *argv]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode
