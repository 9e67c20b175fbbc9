# SPDX-License-Identifier: Apache-2.0
"""Every launch of the norms' kernels compiles for every target, with no device: see `test_compile.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.4", reason="older releases give no report of the assembler")

# Backend, architecture, lanes of a warp; and the bytes of shared memory that one program can have there.
TARGETS = {
    "cuda:80:32": 166912,
    "cuda:90:32": 232448,
    "cuda:100:32": 232448,
    "cuda:120:32": 101376,
    "hip:gfx942:64": 65536,
}


@pytest.mark.parametrize("target", TARGETS)
def test_every_launch_compiles(target: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # A compilation found in the cache runs no assembler, and so reports nothing.
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DUMP_PTXAS_LOG": "1"}
    program = Path(__file__).with_name("compile_norms.py")
    result = subprocess.run(
        [sys.executable, str(program), target, str(TARGETS[target])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    launches = json.loads(result.stdout)
    assert len(launches) > 100
    assert {x["kernel"] for x in launches} == {
        "norm_forward_kernel",
        "norm_long_forward_kernel",
        "norm_row_sums_kernel",
        "norm_backward_kernel",
        "norm_reduce_kernel",
    }
    assert [x["name"] for x in launches if x["float64"]] == []
    assert [x["name"] for x in launches if x["spilled"]] == []
    assert [x["name"] for x in launches if x["shared"] > TARGETS[target]] == []
    # Where a row is a multiple of 16 bytes, all of x, dy, out and dx moves 16 bytes at a time.
    aligned = [x for x in launches if x["n"] % 16 == 0]
    assert [x["name"] for x in aligned if not x["wide_loads"]] == []
    assert [x["name"] for x in aligned if x["writes_rows"] and not x["wide_stores"]] == []
