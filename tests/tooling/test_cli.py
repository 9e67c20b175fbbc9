# SPDX-License-Identifier: Apache-2.0
"""The commands as a person types them, on the real release."""

from __future__ import annotations

import ast
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
from scripts import apply, arguments
from scripts.manifest import load
from scripts.overlay import PACKAGE, RECORD, load_overlay
from scripts.verify import select_ops

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
        f"{PACKAGE}/kernels/gated.py",
        "parity megatron==0.16.1",
        "rank 0",
        "--tree",
        "wheel",
    ):
        assert path in said
    record = json.loads((build / RECORD).read_bytes())
    assert record["release"] == "0.16.1"
    assert record["ops"] == list(select_ops(load_overlay(), None))
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
    killed = build.with_name(f".{build.name}.liger-overlay-12345678")
    killed.mkdir()
    (build / RECORD).unlink()
    assert cli.main(["apply", "megatron==0.16.1"]) == 0
    assert take_snapshot(build) == expected
    assert not killed.exists()
    killed.mkdir()  # by a run that was killed once the tree was whole
    assert cli.main(["apply", "megatron==0.16.1"]) == 0
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


def test_a_dry_run_refuses_what_the_run_would(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["apply", "megatron==0.16.1"]) == 0
    (build / "notes.txt").write_bytes(b"mine")
    for words in (["--dry-run"], []):
        capsys.readouterr()
        assert cli.main(["apply", "megatron==0.16.1", *words]) == 6
        assert "notes.txt" in capsys.readouterr().err
    assert (build / "notes.txt").read_bytes() == b"mine"


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
    assert cli.main(["status", *tree, "--expect", "overlaid"]) == 0
    assert cli.main(["status", *tree, "--expect", "overlaid", "--ops", ",".join(load().ops)]) == 0
    assert cli.main(["status", *tree, "--expect", "pristine"]) == 1
    one = ["--ops", "swiglu"]
    assert cli.main(["status", *tree, "--expect", "overlaid", *one]) == 1
    assert cli.main(["apply", *tree, *one]) == 0
    assert cli.main(["status", *tree, "--expect", "overlaid"]) == 1
    assert cli.main(["status", *tree, "--expect", "overlaid", *one]) == 0
    assert cli.main(["apply", *tree]) == 0
    capsys.readouterr()
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
    (["apply", "megatron==0.16.2"], 3, ", 0.16.1, "),
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
    (real_tree / "megatron/core/package_info.py").write_bytes(b"MAJOR = 0\nMINOR = 20\nPATCH = 0\n")
    capsys.readouterr()
    assert cli.main(["apply", "--tree", str(real_tree)]) == 0
    said = capsys.readouterr().out
    assert "as in 0.16.0, 0.16.1;" in said
    assert "says 0.20.0" in said
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
    assert run("status", "--help").stdout.startswith("usage: python -m scripts status")


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


@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
@pytest.mark.parametrize(("expected", "code"), [("overlaid", 0), ("pristine", 1)])
def test_a_reader_that_leaves_does_not_change_the_result(
    real_tree: Path, unbuffered: list[str], expected: str, code: int
) -> None:
    """A pipe whose other end is closed from the start stands for any reader that leaves."""
    words = ["status", "--tree", str(real_tree), "--expect", expected]
    for command in (["apply", "--tree", str(real_tree)], words):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            [sys.executable, *unbuffered, "-m", "scripts", *command],
            cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        os.close(write)
        assert "Broken pipe" not in done.stderr
        assert "Traceback" not in done.stderr
        assert done.returncode == (0 if command[0] == "apply" else code)
    assert cli.main(["status", "--tree", str(real_tree), "--expect", "overlaid"]) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_output_that_is_full_is_told(real_tree: Path) -> None:
    command = [sys.executable, "-m", "scripts", "status", "--tree", str(real_tree)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 5
    assert done.stderr.startswith("file:     standard output")
    assert "Traceback" not in done.stderr


def test_any_path_is_printed_in_any_encoding(real_tree: Path) -> None:
    tree = os.fsencode(real_tree.parent / "Bäume") + b"\xff"
    os.rename(os.fsencode(real_tree), tree)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    for words, code in ((["apply"], 0), (["status", "--expect", "pristine"], 1)):
        command = [os.fsencode(sys.executable), "-m", "scripts", *words, "--tree", tree]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
        assert done.returncode == code, done.stderr
        assert b"Traceback" not in done.stderr
        assert b"B\\xe4ume" in done.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams(real_tree: Path, closed: str) -> None:
    line = f"{sys.executable} -m scripts status --tree {real_tree} --expect overlaid {closed}"
    assert subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True).returncode == 1


@pytest.mark.parametrize("words", [
    ["apply", "--tree", ""], ["revert", "--tree="], ["status", "--tree", " "], ["diff", "--tree", ""],
    ["apply", "megatron==0.16.1", "--python", ""], ["apply", "megatron==0.16.1", "--platform="],
    ["wheel", "--tree", ""], ["wheel", "megatron==0.16.1", "--python", ""],
    ["wheel", "megatron==0.16.1", "--platform", ""], ["wheel", "megatron==0.16.1", "--out", ""],
    ["apply", "--tree", "~nobody-of-that-name/x"],
])  # fmt: skip
def test_an_empty_value_is_never_a_default(
    words: list[str], build: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scripts.source.fetch_file", lambda *a: pytest.fail("went on"))
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert [text.split(":")[0] for text in error.splitlines()] == ["file", "expected", "found", "remedy"]


def test_a_folder_called_as_the_home_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert arguments.path("~/x") == tmp_path / "x"
    assert [str(arguments.path(given)) for given in ("./~", "./~/x", "x/~")] == ["~", "~/x", "x/~"]


@pytest.mark.parametrize("form", [["--tree", "~/unpacked"], ["--tree=~/unpacked"]])
def test_a_home_is_expanded(real_tree: Path, form: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(real_tree.parent))
    assert cli.main(["status", *form, "--expect", "pristine"]) == 0


def test_status_repeats_what_the_tree_claims(real_tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["status", "--tree", str(real_tree)]
    assert cli.main(words) == 0
    assert "package_info.py" not in capsys.readouterr().out
    (real_tree / "megatron/core/package_info.py").write_bytes(b"MAJOR = 0\nMINOR = 17\nPATCH = 0\n")
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "as in 0.16.0, 0.16.1;" in said
    assert "says 0.17.0" in said


@pytest.mark.parametrize("safe", [{}, {"PYTHONSAFEPATH": "1"}])
def test_the_folder_runs_from_anywhere(real_tree: Path, safe: dict[str, str]) -> None:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **safe}
    command = [sys.executable, str(ROOT / "scripts"), "status", "--tree", real_tree.name]
    done = subprocess.run(command, cwd=real_tree.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{real_tree}: pristine" in done.stdout
    probe = (
        "import runpy, sys, scripts.lint\nfrom pathlib import Path\n"
        "def seen(argv): print([str(Path(p or '.').resolve()) for p in sys.path]); return 0\n"
        f"scripts.lint.main = seen; sys.argv = [{str(ROOT / 'scripts')!r}, 'lint']\n"
        f"runpy.run_path({str(ROOT / 'scripts')!r}, run_name='__main__')"
    )
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=real_tree.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert repr(str(ROOT)) not in done.stdout
    assert repr(str(ROOT / "scripts")) not in done.stdout


@pytest.mark.parametrize("version", ["3.8", "3.9"])
@pytest.mark.parametrize("form", [["-m", "scripts"], ["scripts"]])
def test_a_python_that_is_too_old_says_so(version: str, form: list[str]) -> None:
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [*map(str, home.glob(f"{version}.*/bin/python")), f"python{version}"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    for python in found:
        try:
            done = subprocess.run(
                [python, *form, "status", "--tree", "."], cwd=ROOT, env=environment,
                capture_output=True, text=True,
            )  # fmt: skip
        except FileNotFoundError:
            continue
        if "command not found" in done.stderr:
            continue
        assert done.returncode == 2
        assert done.stderr.startswith("needs Python 3.10 or newer")
        assert done.stderr.count("\n") == 1
        return
    pytest.skip(f"no Python {version} here")


def test_a_python_that_is_too_old_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    assert cli.main(["status"]) == 2
    assert capsys.readouterr().err == "needs Python 3.10 or newer; this is 3.9.18\n"
    source = (ROOT / "scripts" / "__main__.py").read_text()
    ast.parse(source, feature_version=(3, 8))


def test_the_wheel_needs_no_packaging(real_wheel: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['packaging'] = None\n"
        "from scripts.__main__ import main\n"
        f"sys.exit(main(['wheel', 'megatron==0.16.1', '--out', {str(tmp_path)!r}]))"
    )
    done = run(python=("-c", code))
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.iterdir())) == 1
