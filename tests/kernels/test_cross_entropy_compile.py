# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy's kernels compile for every target, with no device: no float64, no spills, wide accesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.4", reason="older releases give no report of the assembler")

# Named as Triton names them: backend, architecture, lanes of a warp.
TARGETS = ["cuda:80:32", "cuda:90:32", "cuda:100:32", "cuda:120:32", "hip:gfx942:64"]


@pytest.mark.parametrize("target", TARGETS)
def test_every_launch_compiles(target: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # A compilation found in the cache runs no assembler, and so reports nothing.
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DUMP_PTXAS_LOG": "1"}
    program = Path(__file__).with_name("compile_cross_entropy.py")
    result = subprocess.run(
        [sys.executable, str(program), target], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout)
    assert {v["kernel"] for v in found} == {
        f"cross_entropy_{kernel}_kernel" for kernel in ("forward", "combine", "backward")
    }
    assert len(found) > 25
    for fault in ("float64", "float_atomics", "spilled"):
        assert [v["name"] for v in found if v[fault]] == [], fault
    tiled = [v for v in found if "UNROLL" in v["constants"]]
    aligned = [v for v in tiled if v["aligned"]]
    assert len(aligned) > 15
    assert [v["name"] for v in aligned if not v["wide_loads"]] == []
    assert [v["name"] for v in aligned if "backward" in v["kernel"] and not v["wide_stores"]] == []
    # In the loop and in the masked part one exponential to an element, and in the forward one more to rescale
    # a lane's sum, which comes once more when the lanes are put together.
    for v in tiled if target.startswith("cuda") else []:
        elements = v["constants"]["UNROLL"] * v["constants"]["VECTOR"]
        if elements == 1:
            continue
        most = 2 * (elements + 1) + 1 if "forward" in v["kernel"] else 2 * elements
        assert v["exponentials"] <= most, v["name"]
