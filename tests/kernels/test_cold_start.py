# SPDX-License-Identifier: Apache-2.0
"""A job starts on an empty Triton cache that all of its processes share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.4", reason="older releases compile for a target in another way")

PROCESSES = 64
DELAY_S = 0.05


def test_all_processes_of_a_node_start_on_one_empty_cache(tmp_path: Path) -> None:
    """Half of them as on a slow folder: they read what the others are writing."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    program = Path(__file__).with_name("cold_start.py")
    command = [sys.executable, str(program), str(PROCESSES), str(DELAY_S)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == PROCESSES
    assert [line for line in lines if not line.startswith("0 ")] == [], done.stderr[-3000:]
    assert len(set(lines)) == 1  # the same machine code in all of them
    left = [path.name for path in tmp_path.rglob("*") if "tmp" in path.name]
    assert left == []
    assert list(tmp_path.rglob("*.cubin"))
