# SPDX-License-Identifier: Apache-2.0
"""The commands as a person types them, on the real release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import scripts
from scripts import __main__ as cli
from scripts import apply
from scripts.manifest import load
from scripts.overlay import PACKAGE, RECORD, load_overlay

ROOT = Path(scripts.__file__).resolve().parent.parent
SWIGLU = "megatron/core/fusions/fused_bias_swiglu.py"


def run(*arguments: str, python: tuple[str, ...] = ("-m", "scripts")) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *python, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build folder of the test's own; the downloaded wheel stays shared."""
    monkeypatch.setattr(apply, "BUILD", tmp_path / "build")
    return tmp_path / "build" / "megatron-core-0.16.1"


@pytest.mark.parametrize(
    "words", [["megatron==0.16.1"], ["--", "megatron-core==0.16.1"], ["--", "megatron_core==0.16.1"]]
)
def test_apply_into_build(build: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["apply", *words]) == 0
    said = capsys.readouterr().out
    for path in (
        SWIGLU,
        RECORD,
        f"{PACKAGE}/kernels/swiglu.py",
        "parity megatron==0.16.1",
        "rank 0",
        "--tree",
        "wheel",
    ):
        assert path in said
    record = json.loads((build / RECORD).read_bytes())
    assert record["release"] == "0.16.1"
    assert record["ops"] == list(load().ops)
    assert cli.main(["status", "--tree", str(build), "--expect", "overlaid"]) == 0
    compile((build / SWIGLU).read_bytes(), SWIGLU, "exec")


def test_a_warm_apply_is_quick_and_needs_no_torch(build: Path) -> None:
    cli.main(["apply", "megatron==0.16.1"])
    code = (
        "import sys; from pathlib import Path; from scripts import apply; apply.BUILD = Path(sys.argv[1])\n"
        "from scripts.__main__ import main; assert main(['apply', 'megatron==0.16.1']) == 0\n"
        "assert not {'torch', 'triton', 'numpy', 'megatron'} & set(sys.modules)"
    )
    start = time.perf_counter()
    done = run(str(build.parent), python=("-c", code))
    assert done.returncode == 0, done.stderr
    assert "as before" in done.stdout
    assert time.perf_counter() - start < 3


def test_apply_rebuilds_what_is_not_as_it_should_be(
    build: Path, take_snapshot: Callable[[Path], object]
) -> None:
    cli.main(["apply", "megatron==0.16.1"])
    expected = take_snapshot(build)
    killed = build.with_name(f".{build.name}-killed")
    killed.mkdir()
    for spoil in (
        lambda: (build / SWIGLU).write_bytes(b""),
        lambda: (build / "megatron/core/extra.py").write_bytes(b""),
        lambda: (build / RECORD).unlink(),
    ):
        spoil()
        cli.main(["apply", "megatron==0.16.1"])
        assert take_snapshot(build) == expected
    assert not killed.exists()


def test_a_dry_run_writes_nothing(
    build: Path, real_tree: Path, take_snapshot: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    before = take_snapshot(real_tree)
    assert cli.main(["apply", "--tree", str(real_tree), "--dry-run"]) == 0
    assert cli.main(["apply", "megatron==0.16.1", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("nothing was written") == 2
    assert take_snapshot(real_tree) == before
    assert not build.exists()


@pytest.mark.parametrize("form", ["site-packages", "checkout"])
def test_the_whole_round_on_the_real_files(
    form: str, real_tree: Path, take_snapshot: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    if form == "checkout":
        for path in (real_tree / "megatron_core-0.16.1.dist-info").iterdir():
            path.unlink()
        (real_tree / "megatron_core-0.16.1.dist-info").rmdir()
        (real_tree / "pretrain_gpt.py").write_text("import megatron.core\n")
    before = take_snapshot(real_tree)
    tree = ["--tree", str(real_tree)]
    assert cli.main(["status", *tree, "--expect", "pristine"]) == 0
    assert cli.main(["apply", *tree]) == 0
    assert "may mix" in capsys.readouterr().out
    assert cli.main(["status", *tree, "--expect", "overlaid", "--ops", ",".join(load().ops)]) == 0
    assert cli.main(["status", *tree, "--expect", "pristine"]) == 1
    assert cli.main(["apply", *tree]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert cli.main(["diff", *tree]) == 0
    assert cli.main(["revert", *tree]) == 0
    assert take_snapshot(real_tree) == before
    assert cli.main(["revert", *tree]) == 0
    assert "no overlay; nothing was written" in capsys.readouterr().out


def test_apply_into_build_and_in_place_agree(build: Path, real_tree: Path) -> None:
    cli.main(["apply", "megatron==0.16.1"])
    cli.main(["apply", "--tree", str(real_tree)])
    for path in (*load_overlay().added, SWIGLU):
        assert (build / path).read_bytes() == (real_tree / path).read_bytes()


REFUSALS = [
    (["apply", "megatron==0.16.2"], 3, "one of 0.16.1"),
    (["apply", "megatron==0.18.1"], 3, "wrong version"),
    (["apply", "megatron==0.19.1"], 3, "wrong version"),
    (["apply", "megatron==banana"], 2, "banana"),
    (["apply", "numpy==1.0"], 2, "numpy==1.0"),
    (["apply"], 2, "a release or a tree"),
    (["apply", "megatron==0.16.1", "--ops", "nonsense"], 2, "nonsense"),
    (["apply", "megatron==0.16.1", "--python", "3.9"], 4, "3.9"),
    (["apply", "--tree", "/nowhere/at/all"], 5, "no such folder"),
    (["apply", "--tree", ".", "--python", "3.11"], 2, "--python"),
    (["revert", "--tree", "tests"], 5, "megatron/core/__init__.py"),
    (["status", "--tree", "tests"], 5, "megatron/core/__init__.py"),
    (["diff", "--tree", "tests"], 5, "megatron/core/__init__.py"),
]


@pytest.mark.parametrize(("words", "code", "said"), REFUSALS, ids=lambda value: str(value))
def test_refusals(
    words: list[str], code: int, said: str, build: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == code
    error = capsys.readouterr().err
    assert [text.split(":")[0] for text in error.splitlines()] == ["file", "expected", "found", "remedy"]
    assert said in error
    assert not build.exists()


def test_a_tree_that_says_another_version(real_tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["apply", "megatron==0.16.1", "--tree", str(real_tree)]) == 0
    (real_tree / "megatron/core/package_info.py").write_bytes(b"MAJOR = 0\nMINOR = 17\nPATCH = 0\n")
    capsys.readouterr()
    assert cli.main(["apply", "--tree", str(real_tree)]) == 0
    said = capsys.readouterr().out
    assert "as in 0.16.1" in said
    assert "says 0.17.0" in said
    assert f"parity --tree {real_tree}" in said


def test_the_module_runs_and_leaves_the_root_off_the_path() -> None:
    done = run("apply", "--", "megatron==9.9")
    assert done.returncode == 3
    assert done.stderr.startswith("file:")
    probe = (
        "import os, runpy, sys\nfrom importlib.util import find_spec\n"
        "sys.argv = ['scripts', 'status', '--tree', 'tests']\n"
        "try: runpy.run_module('scripts', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: assert end.code == 5\n"
        f"root = {str(ROOT)!r}\n"
        "found = find_spec('kernels')\n"
        "assert found is None or not str(found.origin).startswith(root), found\n"
        "assert root not in [os.path.abspath(p) for p in sys.path]"
    )
    done = run(python=("-c", probe))
    assert done.returncode == 0, done.stderr


def test_usage() -> None:
    assert run().returncode == 2
    assert run("nonsense").returncode == 2
    assert run("apply", "--nonsense").returncode == 2
    shown = run("--help")
    assert shown.returncode == 0
    for command in cli.COMMANDS:
        assert command in shown.stdout


def test_tests_passes_arguments_on() -> None:
    done = run("tests", "--", "--collect-only", "-q", "tests/tooling/test_overlay.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_overlay.py::test_the_marker_says_what_it_must" in done.stdout


def test_a_closed_pipe_is_no_traceback(real_tree: Path) -> None:
    cli.main(["apply", "--tree", str(real_tree)])
    line = f"{sys.executable} -m scripts diff --tree {real_tree} | head -c 10"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
