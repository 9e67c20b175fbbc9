# SPDX-License-Identifier: Apache-2.0
"""Upstream's own unit tests of what the overlay touches, from a checkout (``--upstream-tests PATH``).

Each suite runs on a pristine and on an overlaid copy, one process to a GPU, two at most: what passes on the
first has to pass on the second. Some of upstream's tests fail on its own tree here, for want of GPUs or of
packages; a suite of which none passes is skipped, with its error. Not listed, as nearly all of them need four
or eight GPUs: tensor_parallel/test_cross_entropy.py and the models of dist_checkpointing.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from scripts.apply import apply_tree

#: The suites, and the entries that each must have run on a kernel.
SUITES = {
    "fusions/test_swiglu_fusion.py": ("bias_swiglu_impl",),
    "transformer/test_mlp.py": (),
    "transformer/moe/test_shared_experts.py": (),
    "transformer/test_multi_token_prediction.py": (),
    "models/test_gpt_model.py": (),
    "models/test_bert_model.py": (),
    "models/test_t5_model.py": (),
    "models/test_heterogeneous_gpt_model.py": (),
    "dist_checkpointing/models/test_mlp_glu.py": (),
}
NEEDED = (
    "megatron",
    "tests/__init__.py",
    "tests/unit_tests",
    "tests/test_utils/python_scripts",
    "pyproject.toml",
)
SECONDS = 300


@pytest.fixture(scope="module")
def copies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pristine and an overlaid copy of the checkout."""
    given = request.config.getoption("--upstream-tests")
    if given is None or not torch.cuda.is_available():
        pytest.skip("upstream's own tests did not run: they take --upstream-tests CHECKOUT and a GPU")
    found = {}
    for kind in ("pristine", "overlaid"):
        copy = found[kind] = tmp_path_factory.mktemp(kind)
        for name in NEEDED:
            source = Path(given) / name
            if source.is_dir():
                shutil.copytree(source, copy / name)
            else:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy / name)
    apply_tree(found["overlaid"])
    return found


def run_suite(suite: str, copy: Path, folder: Path) -> tuple[set[str], str]:
    """The tests that passed on all ranks, and what rank 0 printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = min(2, torch.cuda.device_count())
    folder.mkdir()
    processes = []
    for rank in range(ranks):
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in (str(copy), os.environ.get("PYTHONPATH")) if p),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-s"]
        command += ["-o", "addopts=", f"--junitxml={folder / f'rank{rank}.xml'}", f"tests/unit_tests/{suite}"]
        with (folder / f"rank{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(command, cwd=copy, env=env, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        for process in processes:
            process.wait(SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return (
        set.intersection(*(passed(folder / f"rank{rank}.xml") for rank in range(ranks))),
        (folder / "rank0.log").read_text(errors="replace"),
    )


def passed(report: Path) -> set[str]:
    """The tests that passed, by JUnit's report; none where the process died before it wrote one."""
    if not report.is_file():
        return set()
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}" for case in cases if not list(case)}


@pytest.mark.parametrize("suite", SUITES)
def test_what_passes_on_upstream_passes_here(suite: str, copies: dict[str, Path], tmp_path: Path) -> None:
    before, output = run_suite(suite, copies["pristine"], tmp_path / "pristine")
    if not before:
        errors = [line for line in output.splitlines() if line.startswith(("E ", "FAILED", "ERROR"))]
        pytest.skip(f"none of {suite} passes on upstream's own tree here: {(errors or [output])[0]}")
    after, output = run_suite(suite, copies["overlaid"], tmp_path / "overlaid")
    print(f"{suite}: {len(before)} pass on the pristine tree, {len(after)} on the overlaid one")
    print(*(line for line in output.splitlines() if "liger overlay" in line), sep="\n")
    assert not before - after, output[-6000:]
    for entry in SUITES[suite]:
        assert re.search(rf"{entry} [1-9]\d* kernel", output), f"{entry} ran upstream's code"
