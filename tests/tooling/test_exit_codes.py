# SPDX-License-Identifier: Apache-2.0
"""What failed is what is told: through nox, through the run of every change, and past later successes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from scripts import train
from scripts.manifest import ROOT

CI = ROOT / ".ci" / "run"


@pytest.fixture
def noxfile() -> ModuleType:
    pytest.importorskip("nox")
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("words", "code"), [(["--tree", "/nowhere"], 5), (["--wheel", "/nowhere"], 4), ([], 2)]
)
@pytest.mark.parametrize("runner", ["_pipeline", "_with_torch"])
def test_a_session_ends_with_its_commands_code(
    noxfile: ModuleType,
    runner: str,
    words: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(noxfile, "ENVIRONMENT", sys.executable)
    session = SimpleNamespace(name="status", posargs=words, invoked_from=str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        getattr(noxfile, runner)(session)
    assert caught.value.code == code


@pytest.mark.parametrize("fails", ["lint", "tests", None])
def test_the_run_of_every_change_ends_at_the_first_failure(tmp_path: Path, fails: str | None) -> None:
    """With a Python and a nox that only write down how they are called."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(CI, tmp_path / ".ci")
    folder = tmp_path / ".venv-ci" / "bin"
    folder.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for stub in (tmp_path / "bin" / "python3", folder / "python", folder / "nox"):
        stub.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$2" != "{fails}" ]\n')
        stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=environment, capture_output=True)
    assert (done.returncode == 0) == (fails is None)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ("-s tests -- -n 2" in calls) == (fails != "lint")


def test_one_failed_check_among_others_is_a_failure() -> None:
    result = train.Result()
    for name, passed in (("first", True), ("second", False), ("third", True)):
        result.check(name, passed, "")
    assert not result.passed
