# SPDX-License-Identifier: Apache-2.0
"""Upstream's own unit tests of the touched code, from a checkout (``--upstream-tests PATH``), overlaid."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.apply import apply_tree

SUITES = {
    "tests/unit_tests/fusions/test_swiglu_fusion.py": 2,
    "tests/unit_tests/transformer/test_mlp.py": 2,
    "tests/unit_tests/transformer/moe/test_shared_experts.py": 3,
}
NEEDED = (
    "megatron",
    "tests/__init__.py",
    "tests/unit_tests",
    "tests/test_utils/python_scripts",
    "pyproject.toml",
)


@pytest.fixture(scope="module")
def overlaid_checkout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = request.config.getoption("--upstream-tests")
    if given is None or not torch.cuda.is_available():
        pytest.skip("upstream's own tests did not run: they take --upstream-tests CHECKOUT and a GPU")
    checkout = Path(given)
    copy = tmp_path_factory.mktemp("checkout")
    for name in NEEDED:
        source = checkout / name
        if source.is_dir():
            shutil.copytree(source, copy / name)
        else:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy / name)
    apply_tree(copy)
    return copy


@pytest.mark.parametrize("suite", SUITES)
def test_upstream_suite_passes_on_the_overlaid_tree(suite: str, overlaid_checkout: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in (str(overlaid_checkout), os.environ.get("PYTHONPATH")) if p),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-rA", suite],
        cwd=overlaid_checkout,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=480,
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= SUITES[suite], "fewer of upstream's tests ran than the release has"
    if suite.endswith("test_swiglu_fusion.py"):
        assert re.search(r"bias_swiglu_impl [1-9]\d* kernel", done.stdout), (
            "upstream's tests ran upstream's code"
        )
