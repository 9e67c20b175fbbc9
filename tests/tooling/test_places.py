# SPDX-License-Identifier: Apache-2.0
"""status of a wheel file and of an environment, and wheels that are given by their path."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from scripts import __main__ as cli
from scripts import apply, source, wheel
from scripts.errors import SourceError
from scripts.manifest import Manifest, PinnedFile, Release, load
from scripts.overlay import PACKAGE, RECORD, load_overlay
from scripts.record import line
from scripts.wheelpack import read_licenses, read_wheel, repack

SWIGLU = "megatron/core/fusions/fused_bias_swiglu.py"


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """What a command prints, its refusal included."""
    assert cli.main([str(argument) for argument in arguments]) == code
    out, err = capsys.readouterr()
    return out + err


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched wheel, made from upstream's by its path."""
    upstream = source.fetch(load().release("megatron==0.16.1"))
    out = tmp_path_factory.mktemp("dist")
    assert wheel.main([str(upstream), "--out", str(out)]) == 0
    (found,) = out.glob("*.whl")
    return found


def changed(made: Path, folder: Path, path: str, data: bytes) -> Path:
    """The patched wheel with another file in it, and RECORD right."""
    old = read_wheel(made.read_bytes(), made.name)
    licenses = read_licenses(wheel.pinned_license(load(), "0.16.1"))
    new, archive = repack(old, {path: data}, licenses, 1)
    (folder / new.filename).write_bytes(archive)
    return folder / new.filename


def test_a_pristine_wheel(real_wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "status", "--wheel", real_wheel, "--expect", "pristine")
    assert text.startswith(f"{real_wheel}: pristine\n")
    assert "upstream's wheel of 0.16.1, as pinned" in text
    assert "make the wheel" in said(capsys, "status", "--wheel", real_wheel, "--expect", "overlaid", code=1)


def test_a_patched_wheel(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "status", "--wheel", made, "--expect", "overlaid")
    ops = ", ".join(load_overlay().ops)
    assert text.startswith(f"{made}: overlaid, version 1, ops {ops}\n")
    assert f"{SWIGLU}: overlaid, version 1, this checkout's, op swiglu" in text
    assert "as pinned" not in text
    for expected in (["pristine"], ["overlaid", "--ops", "swiglu"]):
        said(capsys, "status", "--wheel", made, "--expect", *expected, code=1)


def test_a_wheel_of_some_ops(real_wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "wheel", real_wheel, "--ops", "norms", "--out", tmp_path)
    (some,) = tmp_path.glob("*.whl")
    assert ": overlaid, version 1, ops norms\n" in said(capsys, "status", "--wheel", some)
    said(capsys, "status", "--wheel", some, "--expect", "overlaid", "--ops", "norms")
    said(capsys, "status", "--wheel", some, "--expect", "overlaid", code=1)


@pytest.mark.parametrize(
    ("path", "data", "verdict"),
    [
        (SWIGLU, b"x = 1\n", f"not supported as it is ({SWIGLU}), and overlaid in part"),
        (f"{PACKAGE}/dispatch.py", b"x = 1\n", "changed by hand (or files in the overlay's place)"),
    ],
)
def test_a_wheel_that_somebody_changed(
    made: Path, tmp_path: Path, path: str, data: bytes, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = changed(made, tmp_path, path, data)
    assert said(capsys, "status", "--wheel", other).startswith(f"{other}: {verdict}\n")
    for expected in ("overlaid", "pristine"):
        said(capsys, "status", "--wheel", other, "--expect", expected, code=1)


def test_a_file_that_is_no_wheel_of_megatron_core(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / made.name
    damaged.write_bytes(made.read_bytes().replace(b"bias_swiglu_impl", b"bias_swiglu_imp1"))
    said(capsys, "status", "--wheel", damaged, code=4)
    damaged.write_bytes(b"PK no zip")
    said(capsys, "status", "--wheel", damaged, code=4)
    said(capsys, "status", "--wheel", tmp_path, code=4)
    said(capsys, "status", "--wheel", tmp_path / "none-1-py3-none-any.whl", code=4)


def test_a_wheel_of_another_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "other/__init__.py": b"",
        "other-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: other\nVersion: 1\n",
    }
    rows = [line(path, data) for path, data in files.items()]
    files["other-1.dist-info/RECORD"] = b"\n".join([*rows, b"other-1.dist-info/RECORD,,\n"])
    other = tmp_path / "other-1-py3-none-any.whl"
    with zipfile.ZipFile(other, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    assert "give megatron-core's" in said(capsys, "status", "--wheel", other, code=5)


@pytest.mark.parametrize(
    "words", [[], ["--tree", ".", "--wheel", "x.whl"], ["--wheel", "x", "--environment", "y"]]
)
def test_one_place_is_judged(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["status", *words])
    assert caught.value.code == 2


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, made: Path) -> Path:
    """A virtual environment with the patched wheel in it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, str(packages), str(made)], check=True, capture_output=True)
    return folder


@pytest.fixture(autouse=True)
def no_path_of_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.mark.parametrize("form", ["", "bin/python"])
def test_an_environment(environment: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    (packages,) = environment.glob("lib/python*/site-packages")
    text = said(capsys, "status", "--environment", environment / form, "--expect", "overlaid")
    assert text.startswith(f"{packages}: overlaid, version 1, ops ")
    assert "hidden" not in text
    said(capsys, "status", "--environment", environment / form, "--expect", "pristine", code=1)


@pytest.mark.parametrize("way", ["path", "pth", "editable"])
def test_a_tree_that_comes_first(
    environment: Path,
    pristine_tree: Path,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The wheel is installed, and the job would not run it."""
    copy = Path(shutil.copytree(environment, tmp_path / "copy", symlinks=True))
    (packages,) = copy.glob("lib/python*/site-packages")
    if way == "path":
        monkeypatch.setenv("PYTHONPATH", str(pristine_tree))
    elif way == "pth":
        (packages / "first.pth").write_text(f"import sys; sys.path.insert(0, {str(pristine_tree)!r})\n")
    else:
        finder = (
            "import sys, importlib.util\n"
            "class Finder:\n"
            "    @staticmethod\n"
            "    def find_spec(name, path=None, target=None):\n"
            "        if name == 'megatron.core':\n"
            f"            root = {str(pristine_tree)!r} + '/megatron/core/'\n"
            "            return importlib.util.spec_from_file_location(\n"
            "                name, root + '__init__.py', submodule_search_locations=[root])\n"
            "sys.meta_path.insert(0, Finder)\n"
        )
        (packages / "editable_finder.py").write_text(finder)
        (packages / "editable.pth").write_text("import editable_finder\n")
    text = said(capsys, "status", "--environment", copy)
    assert text.startswith(f"{pristine_tree}: pristine\n")
    assert f"hidden by it: {packages}" in text
    said(capsys, "status", "--environment", copy, "--expect", "overlaid", code=1)


def test_an_environment_without_megatron_core_or_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    assert "finds none" in said(capsys, "status", "--environment", tmp_path / "bare", code=5)
    said(capsys, "status", "--environment", tmp_path / "nothing", code=5)
    said(capsys, "status", "--environment", tmp_path, code=5)
    (tmp_path / "python").write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    (tmp_path / "python").chmod(0o755)
    assert "broken" in said(capsys, "status", "--environment", tmp_path / "python", code=5)
    for program in ("/bin/true", "/bin/echo"):
        assert "a program that is no Python" in said(capsys, "status", "--environment", program, code=5)


def test_an_environment_that_prints(
    environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(environment, tmp_path / "copy", symlinks=True))
    (packages,) = copy.glob("lib/python*/site-packages")
    (packages / "sitecustomize.py").write_text(
        "import atexit; print('hello'); atexit.register(print, 'bye')\n"
    )
    text = said(capsys, "status", "--environment", copy, "--expect", "overlaid")
    assert text.startswith(f"{packages}: overlaid, version 1, ops ")


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("command", [("apply",), ("wheel",), ("status", "--wheel")])
def test_what_is_no_plain_file_is_not_waited_for(
    command: tuple[str, ...], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "given.whl"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    assert "a device, a pipe or a socket" in said(capsys, *command, path, code=4)


@pytest.mark.parametrize("command", ["apply", "wheel"])
def test_a_wheel_by_its_path_that_is_not_pinned_is_refused_unopened(
    command: str,
    real_wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / real_wheel.name
    other.write_bytes(real_wheel.read_bytes()[:-1] + b"?")
    monkeypatch.setattr(apply, "BUILD", tmp_path / "build")
    monkeypatch.setattr("zipfile.ZipFile", lambda *_: pytest.fail("it was opened"))
    out = ["--out", tmp_path / "dist"] if command == "wheel" else []
    text = said(capsys, command, other, *out, code=4)
    assert "a wheel whose sha256 is pinned" in text
    assert source.digest(other) in text
    assert "No such file" in said(capsys, command, tmp_path / "none.whl", *out, code=4)
    assert not (tmp_path / "dist").exists()
    assert not (tmp_path / "build").exists()


def test_a_pinned_wheel_under_any_name_and_without_pip(
    real_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copyfile(real_wheel, tmp_path / "downloaded.whl"))
    cache = tmp_path / "cache"
    monkeypatch.setattr(source, "CACHE", cache)
    monkeypatch.setattr(source.fetch_file, "__defaults__", (cache,))
    monkeypatch.setattr(source, "download", lambda *_: pytest.fail("pip was called"))
    monkeypatch.setattr(apply, "BUILD", tmp_path / "build")
    said(capsys, "apply", other)
    build = tmp_path / "build" / "megatron-core-0.16.1"
    assert (build / RECORD).exists()
    assert [path.name for path in cache.iterdir()] == [real_wheel.name]
    assert os.stat(cache / real_wheel.name).st_nlink == 1
    said(capsys, "status", "--tree", build, "--expect", "overlaid")


@pytest.mark.parametrize(
    "words",
    [
        ["apply", "x.whl", "--python", "3.12"],
        ["apply", "x.whl", "--tree", "."],
        ["apply", "x.whl", "--platform", "aarch64"],
        ["wheel", "x.whl", "--python", "3.12"],
        ["wheel", "x.whl", "--platform", "aarch64"],
        ["wheel", "x.whl", "--all-platforms"],
        ["wheel", "x.whl", "--tree", "."],
    ],
)
def test_a_wheel_is_given_alone(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "a wheel alone" in said(capsys, *words, code=2)


def test_a_wheel_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "a.whl"
    given.write_bytes(b"pinned")
    release = Release("1.0", (PinnedFile("megatron_core-1.0.whl", source.digest(given)),))
    copy = shutil.copyfile

    def late(old: Path, new: Path) -> Path:
        old.write_bytes(b"another")
        return Path(copy(old, new))

    monkeypatch.setattr(shutil, "copyfile", late)
    with pytest.raises(SourceError, match="changed while"):
        source.take(given, Manifest({"1.0": release}, {}, {}), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
