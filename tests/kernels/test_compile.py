# SPDX-License-Identifier: Apache-2.0
"""Every kernel launch compiles for every target, with no device: no float64, atomics or spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", minversion="3.4", reason="older releases give no report of the assembler")

# Named as Triton names them: backend, architecture, lanes of a warp; and the bytes of shared memory that one
# program can have there.
TARGETS = {
    "cuda:80:32": 166912,
    "cuda:90:32": 232448,
    "cuda:100:32": 232448,
    "cuda:120:32": 101376,
    "hip:gfx942:64": 65536,
}
# The kernels that must be among the launches, and how many different ones there are at least.
OPS = {
    "gated": ("gated", ("forward", "backward", "bias_backward", "bias_reduce"), 200),
    "cross_entropy": ("cross_entropy", ("forward", "combine", "backward"), 25),
    "linear_cross_entropy": ("cross_entropy", ("forward", "combine", "backward"), 25),
    "norms": ("norm", ("forward", "long_forward", "row_sums", "backward", "reduce"), 100),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_launch_compiles(target: str, op: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # A compilation found in the cache runs no assembler, and so reports nothing.
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DUMP_PTXAS_LOG": "1"}
    program = Path(__file__).with_name("compile_gate.py")
    command = [sys.executable, str(program), op, target, str(TARGETS[target])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    launches = json.loads(result.stdout)
    prefix, kernels, least = OPS[op]
    assert {x["kernel"] for x in launches} == {f"{prefix}_{kernel}_kernel" for kernel in kernels}
    assert len(launches) >= least
    for fault in ("float64", "float_atomics", "spilled"):
        assert [x["name"] for x in launches if x[fault]] == [], fault
    assert [x["name"] for x in launches if x["shared"] > TARGETS[target]] == []
    # Where a row is a multiple of 16 elements, what reads and writes rows moves 16 bytes at a time.
    aligned = [x for x in launches if x["reads_rows"] and x["columns"] % 16 == 0]
    assert len(aligned) > least / 2
    assert [x["name"] for x in aligned if not x["wide_loads"]] == []
    assert [x["name"] for x in aligned if x["writes_rows"] and not x["wide_stores"]] == []
    if prefix == "cross_entropy" and target.startswith("cuda"):
        few_exponentials([x for x in launches if "UNROLL" in x["constants"]])


def few_exponentials(launches: list[dict[str, Any]]) -> None:
    """In the loop and in the masked part one to an element, and in the forward one more to rescale a lane's
    sum, which comes once more when the lanes are put together."""
    assert launches
    for x in launches:
        elements = x["constants"]["UNROLL"] * x["constants"]["VECTOR"]
        if elements > 1:
            most = 2 * (elements + 1) + 1 if "forward" in x["kernel"] else 2 * elements
            assert x["exponentials"] <= most, x["name"]
