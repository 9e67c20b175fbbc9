# SPDX-License-Identifier: Apache-2.0
"""Every kernel variant compiles for every target, with no device: no float64, no spills, wide accesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.4", reason="older releases give no report of the assembler")

# Named as Triton names them: backend, architecture, lanes of a warp. A100; H100 and H200; B200; RTX 50;
# MI300.
TARGETS = ["cuda:80:32", "cuda:90:32", "cuda:100:32", "cuda:120:32", "hip:gfx942:64"]


@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles(target: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # A compilation found in the cache runs no assembler, and so reports nothing.
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DUMP_PTXAS_LOG": "1"}
    program = Path(__file__).with_name("compile_variants.py")
    result = subprocess.run(
        [sys.executable, str(program), target], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    variants = json.loads(result.stdout)
    assert len(variants) > 40
    assert [v["name"] for v in variants if v["float64"]] == []
    assert [v["name"] for v in variants if v["spilled"]] == []
    # Where n is a multiple of 16, all of y, dout and dy moves 16 bytes at a time.
    aligned = [v for v in variants if v["aligned"]]
    assert [v["name"] for v in aligned if not v["wide_loads"]] == []
    assert [
        v["name"]
        for v in aligned
        if v["pointers"].get("out") or v["pointers"].get("dy")
        if not v["wide_stores"]
    ] == []
