# SPDX-License-Identifier: Apache-2.0
"""What may not be read or written is refused before the first byte, and nothing ends in a traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import __main__ as cli
from scripts import files, source
from scripts.errors import ExpectationError, OverlayError, StateError, TreeError
from scripts.overlay import PACKAGE, RECORD
from scripts.status import expect, judge
from scripts.tree import TEMPORARY, Tree
from scripts.verify import inspect

ALPHA = "megatron/core/fusions/alpha.py"
RECORD_FILE = "megatron_core-1.0.dist-info/RECORD"
NOBODY = 65534


def bytecode(world: Any, path: str) -> Path:
    source = world.path(path)
    cache = source.parent / "__pycache__" / f"{source.stem}.cpython-311.pyc"
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_bytes(b"stale")
    return Path(cache)


def refused(world: Any, step: Callable[[], object], error: type[OverlayError]) -> OverlayError:
    """The refusal of a step that has written nothing."""
    before = world.snapshot()
    times = {p: p.lstat().st_mtime_ns for p in world.root.rglob("*")}
    with pytest.raises(error) as caught:
        step()
    assert world.snapshot() == before
    assert {p: p.lstat().st_mtime_ns for p in world.root.rglob("*")} == times
    return caught.value


@pytest.mark.parametrize("path", [ALPHA, "megatron/core/tensor_parallel/beta.py"])
@pytest.mark.parametrize("step", ["apply", "revert"])
def test_bytecode_that_cannot_be_dropped(world: Any, path: str, step: str) -> None:
    if step == "revert":
        world.apply()
    cache = bytecode(world, path).parent
    cache.chmod(0o555)
    assert refused(world, getattr(world, step), TreeError).file == str(cache.relative_to(world.root))
    cache.chmod(0o755)
    getattr(world, step)()
    assert not cache.exists()


@pytest.mark.parametrize("path", [f"{PACKAGE}/__init__.py", f"{PACKAGE}/kernels/__init__.py"])
def test_bytecode_of_added_files_that_cannot_be_dropped(world: Any, path: str) -> None:
    world.apply()
    cache = bytecode(world, path).parent
    cache.chmod(0o555)
    refused(world, world.revert, TreeError)
    world.path(path).write_bytes(world.path(path).read_bytes())
    cache.chmod(0o755)
    world.revert()
    assert not world.path(PACKAGE).exists()


def test_bytecode_of_an_added_file_that_is_gone_already(world: Any) -> None:
    world.apply()
    cache = bytecode(world, f"{PACKAGE}/kernels/__init__.py").parent
    world.path(f"{PACKAGE}/kernels/__init__.py").unlink()
    cache.chmod(0o555)
    refused(world, world.revert, TreeError)
    cache.chmod(0o755)
    world.revert()
    assert not world.path(PACKAGE).exists()


def test_bytecode_of_other_files_may_be_as_it_likes(world: Any) -> None:
    cache = bytecode(world, "megatron/core/fusions/other.py").parent
    cache.chmod(0o555)
    world.apply()
    cache.chmod(0o755)


@pytest.fixture
def immutable() -> Iterator[Callable[[Path], None]]:
    """Make a file or folder immutable until the test ends."""
    done: list[Path] = []

    def make(path: Path) -> None:
        if (
            shutil.which("chattr") is None
            or subprocess.run(["chattr", "+i", path], capture_output=True).returncode
        ):
            pytest.skip("needs chattr, a file system that has attributes, and root")
        done.append(path)

    yield make
    for path in done:
        subprocess.run(["chattr", "-i", path], check=True)


@pytest.mark.parametrize("what", ["bytecode", "cache", "file", "folder", "leftover"])
def test_what_is_immutable(world: Any, immutable: Callable[[Path], None], what: str) -> None:
    pyc = bytecode(world, ALPHA)
    leftover = world.tree.temporary(ALPHA)
    if what == "leftover":
        leftover.write_bytes(b"")
    places = {
        "bytecode": pyc,
        "cache": pyc.parent,
        "file": world.path(ALPHA),
        "folder": world.path(ALPHA).parent,
    }
    immutable(places.get(what, leftover))
    error = refused(world, world.apply, TreeError)
    assert "immutable" in error.found
    assert "chattr -i" in error.remedy
    assert "chmod" not in error.remedy


def test_a_read_only_mount_is_not_told_to_chmod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: type("Flags", (), {"f_flag": real.f_flag | os.ST_RDONLY}))
    found = files.obstacle(tmp_path, tmp_path)
    assert found is not None
    assert "mounted read-only" in found[0]
    assert "chmod" not in found[1]


@pytest.mark.parametrize(
    ("user", "found", "remedy"),
    [
        (os.geteuid(), "no permission to write (mode 0644)", "chmod -R u+rwX "),
        (
            os.geteuid() + 1,
            f"no permission to write (user {os.geteuid()} owns it)",
            "run as the user who owns",
        ),
    ],
)
def test_whose_the_file_is_decides_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, found: str, remedy: str
) -> None:
    item = tmp_path / "a file"
    item.write_bytes(b"")
    item.chmod(0o644)
    assert files.obstacle(item, tmp_path) is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    problem = files.obstacle(item, tmp_path)
    assert problem is not None
    assert problem[0] == found
    assert problem[1].startswith(remedy)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def as_nobody(step: Callable[[], object]) -> OverlayError | None:
    """Run a step as a user who owns nothing; the refusal that it ends in."""
    with tempfile.TemporaryFile() as told:
        child = os.fork()
        if child == 0:
            code = 99
            try:
                if os.geteuid() == 0:
                    os.setresuid(NOBODY, NOBODY, NOBODY)
                step()
                code = 0
            except OverlayError as error:
                words = (error.file, error.expected, error.found, error.remedy)
                told.write(json.dumps([type(error).__name__, *words]).encode())
                told.flush()
                code = 1
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 1)
        told.seek(0)
        if code == 0:
            return None
        name, *words = json.loads(told.read())
    kinds: dict[str, type[OverlayError]] = {"TreeError": TreeError, "StateError": StateError}
    return kinds[name](*words)


def test_a_folder_that_another_user_keeps_closed(new_world: Callable[..., Any], open_folder: Path) -> None:
    world = new_world(open_folder / "closed" / "tree").write()
    (open_folder / "closed").chmod(0o000)
    error = as_nobody(lambda: Tree.locate(world.root))
    (open_folder / "closed").chmod(0o755)
    assert isinstance(error, TreeError)
    assert error.found == os.strerror(errno.EACCES)


def test_a_tree_that_cannot_be_listed(new_world: Callable[..., Any], open_folder: Path) -> None:
    world = new_world(open_folder / "tree").write()
    world.path("megatron/core").chmod(0o311)
    error = as_nobody(world.apply)
    world.path("megatron/core").chmod(0o755)
    assert isinstance(error, TreeError)
    assert (error.file, error.expected) == ("megatron/core", "a folder that can be read")


def test_a_file_that_cannot_be_read(new_world: Callable[..., Any], open_folder: Path) -> None:
    world = new_world(open_folder / "tree").write()
    world.path(ALPHA).chmod(0o200 if os.geteuid() else 0o600)
    error = as_nobody(lambda: world.tree.read(ALPHA))
    assert isinstance(error, TreeError)
    assert error.file == ALPHA


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have a tree of another user")
def test_another_users_tree_is_not_told_to_chmod(new_world: Callable[..., Any], open_folder: Path) -> None:
    world = new_world(open_folder / "tree").write()
    error = as_nobody(world.apply)
    assert isinstance(error, TreeError)
    assert "run as the user who owns it" in error.remedy
    assert "chmod" not in error.remedy


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have files of another user")
@pytest.mark.parametrize("what", ["a file", "its bytecode"])
@pytest.mark.parametrize(("step", "way"), [("apply", "its owner"), ("revert", "no sticky folder")])
def test_another_users_file_in_a_sticky_folder(
    new_world: Callable[..., Any], open_folder: Path, what: str, step: str, way: str
) -> None:
    """It may be written, and neither replaced nor deleted: told before the first write, not in the middle."""
    world = new_world(open_folder / "tree").write()
    if step == "revert":
        world.apply()
    theirs = bytecode(world, ALPHA) if what == "its bytecode" else world.path(ALPHA)
    for item in (world.root, *world.root.rglob("*")):
        shutil.chown(item, NOBODY, NOBODY)
        item.chmod(0o777 if item.is_dir() else 0o666)
    shutil.chown(theirs, 0, 0)
    shutil.chown(theirs.parent, 0, 0)
    theirs.parent.chmod(0o1777)
    before = world.snapshot()
    error = as_nobody(getattr(world, step))
    assert world.snapshot() == before
    assert isinstance(error, TreeError)
    assert error.file == theirs.relative_to(world.root).as_posix()
    assert error.found == "another user's, in a sticky folder"
    assert "run as its owner" in error.remedy
    if way == "its owner":
        shutil.chown(theirs, NOBODY, NOBODY)
    else:
        theirs.parent.chmod(0o777)
    assert as_nobody(getattr(world, step)) is None


@pytest.mark.parametrize("name", ["x" * 300, "circle"])
def test_a_tree_that_can_be_no_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(TreeError):
        Tree.locate(tmp_path / name)


def test_a_folder_with_the_name_of_a_leftover(world: Any) -> None:
    world.path(f"megatron/core/fusions/.foo{TEMPORARY}").mkdir()
    world.apply()
    world.revert()
    world.tree.temporary(ALPHA).mkdir()
    error = refused(world, world.apply, StateError)
    assert error.file == f"megatron/core/fusions/.alpha.py{TEMPORARY}"


HASH = "0" * 64
GARBAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a control character": lambda files: files.update({f"{PACKAGE}/a\0.py": entry()}),
    "a lone surrogate": lambda files: files.update({f"{PACKAGE}/\ud800.py": entry()}),
    "a long name": lambda files: files.update({f"{PACKAGE}/{'x' * 300}.py": entry()}),
    "a long name in bytes": lambda files: files.update({f"{PACKAGE}/{'é' * 150}.py": entry()}),
    "a long path": lambda files: files.update({f"{PACKAGE}/{'x/' * 2000}a.py": entry()}),
    "no hash": lambda files: files[ALPHA].update(after="zz"),
    "a short hash": lambda files: files[ALPHA].update(after="0" * 63),
}


def entry() -> dict[str, Any]:
    return {"action": "add", "op": None, "before": None, "after": HASH}


@pytest.mark.parametrize("case", GARBAGE)
@pytest.mark.parametrize("step", ["apply", "revert"])
def test_garbage_in_the_record(installed: Any, case: str, step: str) -> None:
    installed.apply()
    document = json.loads(installed.path(RECORD).read_bytes())
    GARBAGE[case](document["files"])
    installed.path(RECORD).write_text(json.dumps(document))
    assert refused(installed, getattr(installed, step), StateError).file == RECORD


def test_a_record_that_is_nested_without_end(world: Any) -> None:
    world.path(PACKAGE).mkdir()
    world.path(RECORD).write_bytes(b"[" * 200_000)
    assert refused(world, world.apply, StateError).file == RECORD


@pytest.mark.parametrize("path", [PACKAGE, f"{PACKAGE}/kernels"])
def test_a_file_in_a_folders_place_is_not_pristine(world: Any, path: str) -> None:
    world.path(path).parent.mkdir(exist_ok=True)
    world.path(path).write_bytes(b"mine")
    assert refused(world, world.apply, StateError).file == path
    for expected in ("pristine", "overlaid"):
        with pytest.raises(ExpectationError) as caught:
            expect(world.tree, expected, world.overlay.ops, world.manifest, world.overlay)
        assert caught.value.file == path
    state = inspect(world.tree.read, world.manifest, world.overlay)
    assert "place" in judge(world.tree, state, world.manifest, world.overlay)


@pytest.mark.parametrize("content", [b"", b"garbage\n", b"\xff\xfe", b"other.py,,\n"])
def test_an_installed_record_that_does_not_list_upstreams_files(installed: Any, content: bytes) -> None:
    installed.path(RECORD_FILE).write_bytes(content)
    error = refused(installed, installed.apply, TreeError)
    assert error.file == RECORD_FILE
    assert "force-reinstall" in error.remedy


def test_an_installed_record_that_was_emptied_after_apply(installed: Any) -> None:
    installed.apply()
    installed.path(RECORD_FILE).write_bytes(b"")
    with pytest.raises(ExpectationError) as caught:
        expect(installed.tree, "overlaid", installed.overlay.ops, installed.manifest, installed.overlay)
    assert "force-reinstall" in caught.value.remedy
    state = inspect(installed.tree.read, installed.manifest, installed.overlay)
    said = judge(installed.tree, state, installed.manifest, installed.overlay)
    assert said.startswith("overlaid, version 1")
    assert RECORD_FILE in said


def test_expecting_an_overlay_on_a_pristine_tree_says_so(world: Any) -> None:
    with pytest.raises(ExpectationError) as caught:
        expect(world.tree, "overlaid", world.overlay.ops, world.manifest, world.overlay)
    assert caught.value.found == "pristine"
    assert caught.value.remedy == f"python -m scripts apply --tree {world.root} --ops alpha,beta"


def test_remedies_quote_paths(new_world: Callable[..., Any], tmp_path: Path) -> None:
    world = new_world(tmp_path / "my tree; echo").write()
    with pytest.raises(ExpectationError) as caught:
        expect(world.tree, "overlaid", world.overlay.ops, world.manifest, world.overlay)
    assert f"'{world.root}'" in caught.value.remedy
    with pytest.raises(TreeError) as located:
        Tree.locate(world.root / "megatron")
    assert f"'{world.root}'" in located.value.remedy


OUT: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_bytes(b""),
    "below a file": lambda path: path.parent.joinpath("out").write_bytes(b""),
    "read-only": lambda path: path.mkdir(mode=0o555),
    "a broken link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("case", OUT)
@pytest.mark.parametrize("use", ["--out", "cache"])
def test_a_folder_that_cannot_be_written_into(
    case: str, use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    OUT[case](tmp_path / "out")
    place = tmp_path / "out" / "deeper" if case == "below a file" else tmp_path / "out"
    monkeypatch.setattr(source, "download", lambda *a: pytest.fail("pip was called"))
    monkeypatch.setattr(source.fetch_file, "__defaults__", (place if use == "cache" else source.CACHE,))
    out = place if use == "--out" else tmp_path / "dist"
    assert cli.main(["wheel", "megatron==0.16.1", "--out", str(out)]) == 5
    error = capsys.readouterr().err
    assert [text.split(":")[0] for text in error.splitlines()] == ["file", "expected", "found", "remedy"]
    assert not (tmp_path / "dist").exists()


def test_a_full_disk_under_out(
    real_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert cli.main(["wheel", "megatron==0.16.1", "--out", str(tmp_path / "dist")]) == 5
    assert "free some space" in capsys.readouterr().err
    assert list((tmp_path / "dist").iterdir()) == []


def test_what_a_killed_wheel_run_left_is_swept_away(real_wheel: Path, tmp_path: Path) -> None:
    (tmp_path / ".megatron_core-0.16.1+liger.1-cp311-cp311-any.whl.4242.tmp").write_bytes(b"half")
    (tmp_path / ".mine.tmp").write_bytes(b"mine")
    assert cli.main(["wheel", "megatron==0.16.1", "--out", str(tmp_path)]) == 0
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".tmp", ".whl"]
    assert (tmp_path / ".mine.tmp").exists()


def test_any_other_error_of_the_system_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/dev/disk")

    monkeypatch.setattr("scripts.lint.check", fail)
    assert cli.main(["lint"]) == 5
    error = capsys.readouterr().err
    assert [text.split(":")[0] for text in error.splitlines()] == ["file", "expected", "found", "remedy"]
    assert "/dev/disk" in error
