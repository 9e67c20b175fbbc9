# SPDX-License-Identifier: Apache-2.0
"""The call sites of norms that diffs change, on every release that they name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.apply import build_tree
from scripts.manifest import load

from .conftest import KERNELS, Python

PROGRAM = Path(__file__).with_name("call_sites.py")
MANIFEST = load()
BLOCK = MANIFEST.files["megatron/core/transformer/transformer_block.py"]
BACKENDS = MANIFEST.files["megatron/core/models/backends.py"]

OURS = "megatron.core.liger.norms"
TE = "TENorm"
# By the layer's norms: what the final norm is. TransformerEngine has its norm inside a linear layer, too.
FINAL = {
    "upstream's local spec": f"{OURS}.RMSNorm",
    "local": f"{OURS}.RMSNorm",
    "one local": f"{OURS}.RMSNorm",
    "fused": f"{OURS}.RMSNorm",
    "by hand": f"{OURS}.LigerMegatronRMSNorm",
    "te": TE,
    "te in linear": TE,
    "te before experts": TE,
    "mixed": TE,
    "whole block": TE,
}

Look = Callable[..., dict[str, Any]]


@pytest.fixture
def look(python: Python, tmp_path: Path) -> Look:
    """What ``call_sites.py`` finds in a tree, where Apex's norms and TransformerEngine's can be had."""
    (tmp_path / "apex/normalization").mkdir(parents=True)
    for name in ("__init__.py", "normalization/__init__.py"):
        (tmp_path / "apex" / name).touch()
    kernels = tmp_path / "apex/normalization/fused_layer_norm.py"
    kernels.write_text("class FusedLayerNormAffineFunction: ...\n", encoding="utf-8")

    def run(tree: Path, **environ: str) -> dict[str, Any]:
        path = os.pathsep.join([str(tree), str(tmp_path)])
        environ = {**KERNELS, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, **environ}
        environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")  # 0.15 compiles a helper at its import
        done = python(str(PROGRAM), str(tmp_path), **environ)
        found: dict[str, Any] = json.loads(next(s for s in done.stdout.splitlines() if s.startswith("{")))
        return found

    return run


@pytest.mark.parametrize("version", MANIFEST.releases)
def test_the_norms_of_a_release(look: Look, tmp_path: Path, version: str) -> None:
    assert any(version in variant.releases for variant in BLOCK.variants)
    tree = build_tree(MANIFEST.releases[version], ["norms"], tmp_path / "tree", overlaid=True, nearest=True)
    found = look(tree)
    assert found["final"] == FINAL
    there = version not in BACKENDS.absent
    assert found["provided"] == (["FusedLayerNorm", "WrappedTorchNorm", "FusedLayerNorm"] if there else [])
    assert found["residual"] == ("ResidualNorm" if version >= "0.17" else None)


def test_upstreams_own(look: Look, pristine_tree: Path) -> None:
    """What the diffs are for: TransformerEngine's norm is the last, and one request changes the next."""
    found = look(pristine_tree)
    assert set(found["final"].values()) == {TE}
    assert found["provided"] == ["FusedLayerNorm", "WrappedTorchNorm", "WrappedTorchNorm"]


@pytest.mark.parametrize("switch", ["0", "-norms"])
def test_switched_off_the_final_norm_is_upstreams(look: Look, overlaid_tree: Path, switch: str) -> None:
    found = look(overlaid_tree, LIGER_MEGATRON=switch)
    assert set(found["final"].values()) == {TE}


def test_switched_off_a_norm_with_its_residual_is_upstreams(look: Look, tmp_path: Path) -> None:
    tree = build_tree(MANIFEST.releases["0.19.2"], ["norms"], tmp_path / "tree", overlaid=True, nearest=True)
    found = look(tree, LIGER_MEGATRON="-norms")
    assert found["residual"] == "WrappedTorchNorm"
