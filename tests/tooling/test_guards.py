# SPDX-License-Identifier: Apache-2.0
"""What apply and revert leave alone, and what they do all the same: guards that no other test would miss."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import apply, revert
from scripts import tree as trees
from scripts.apply import caveat
from scripts.errors import StateError, TreeError, UsageError
from scripts.overlay import MARK, PACKAGE, RECORD
from scripts.record import dump
from scripts.tree import TEMPORARY, Tree
from scripts.verify import select_ops

from .test_obstacles import refused
from .test_refusals import fake_wheel

ALPHA = "megatron/core/fusions/alpha.py"
BETA = "megatron/core/fusions/beta.py"
RECORD_FILE = "megatron_core-1.0.dist-info/RECORD"


@pytest.mark.parametrize("step", ["apply", "revert"])
def test_nothing_is_swept_through_a_link(world: Any, tmp_path: Path, step: str) -> None:
    """A link to a folder in ours leads out of the tree; what lies there is not a killed run's."""
    outside = tmp_path / "outside" / f".mine.py{TEMPORARY}"
    outside.parent.mkdir()
    outside.write_bytes(b"mine")
    world.apply("alpha")
    world.path(f"{PACKAGE}/link").symlink_to(outside.parent)
    getattr(world, step)()
    assert outside.read_bytes() == b"mine"
    assert world.path(f"{PACKAGE}/link").is_symlink()


def test_a_leftover_that_is_a_link(world: Any, tmp_path: Path) -> None:
    """The link goes, and the folder that it leads to stays as it is."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine").write_bytes(b"mine")
    other = world.path(f"megatron/core/fusions/.other.py{TEMPORARY}")
    other.symlink_to(tmp_path / "outside")
    world.apply()
    assert not other.is_symlink()
    assert (tmp_path / "outside" / "mine").read_bytes() == b"mine"


def test_what_is_written_reaches_the_disk(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    world.apply()
    assert len(synced) >= len(world.overlay.added) + len(world.overlay.tails)


def test_a_half_of_a_version_is_no_claim(world: Any) -> None:
    info = world.path("megatron/core/package_info.py")
    info.write_bytes(b"MAJOR = 1\nMINOR = 9\nPATCH = 0\n")
    assert "package_info.py says 1.9.0" in caveat(world.tree, ["1.0"])
    info.write_bytes(b"MAJOR = 1\nMINOR = 9\n")
    assert "package_info.py" not in caveat(world.tree, ["1.0"])


def test_a_tree_is_looked_for_only_so_far(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TreeError, match="--tree"):
        Tree.locate(world.root.parent)
    for number in range(9):
        (world.root.parent / f"a{number}").mkdir()
    monkeypatch.setattr(trees, "_LOOK_AT", 5)
    with pytest.raises(TreeError) as caught:
        Tree.locate(world.root.parent)
    assert caught.value.remedy == "give the folder that holds megatron/"


def test_a_patched_wheels_name_alone_is_nothing_to_revert(installed: Any) -> None:
    folder = installed.path(RECORD_FILE).parent
    folder.rename(folder.with_name("megatron_core-1.0+liger.1.dist-info"))
    before = installed.snapshot()
    planned, left = installed.revert()
    assert not planned.changes
    assert left == []
    assert installed.snapshot() == before


def test_a_patched_wheel_is_left_as_it_is_where_only_the_commit_differs(installed: Any) -> None:
    """And refused where a file does: its own uninstall is the way back."""
    installed.apply()
    folder = installed.path(RECORD_FILE).parent
    folder.rename(folder.with_name("megatron_core-1.0+liger.1.dist-info"))
    document = json.loads(installed.path(RECORD).read_bytes())
    installed.path(RECORD).write_bytes(dump({**document, "commit": "1" * 40}))
    before = installed.snapshot()
    installed.apply()
    assert installed.snapshot() == before
    installed.path(ALPHA).write_bytes(installed.upstream[ALPHA])
    error = refused(installed, installed.apply, StateError)
    assert error.found == "the patched wheel, which is overlaid as it is"
    refused(installed, installed.revert, StateError)


def test_lines_in_an_installed_record_are_all_that_is_left(installed: Any) -> None:
    """Where somebody took the files out by hand, an uninstall would still look for them."""
    before = installed.snapshot()
    installed.apply()
    stale = installed.path(RECORD_FILE).read_bytes()
    installed.revert()
    ours = b"".join(row for row in stale.splitlines(keepends=True) if row.startswith(PACKAGE.encode()))
    installed.path(RECORD_FILE).write_bytes(ours + installed.path(RECORD_FILE).read_bytes())
    installed.revert()
    assert installed.snapshot() == before


def test_a_line_of_record_for_somebodys_file_in_our_folder_stays(installed: Any) -> None:
    """Another package's, or upstream's own of a later day: no line is ours by its folder alone."""
    record = installed.path(RECORD_FILE)
    mine = f"{PACKAGE}/mine.py,sha256=x,1\r\n".encode()
    record.write_bytes(record.read_bytes() + mine)
    before = installed.snapshot()
    installed.apply()
    assert mine in record.read_bytes()
    installed.revert()
    assert installed.snapshot() == before


def test_an_installed_record_that_is_right_already_may_be_read_only(installed: Any) -> None:
    before = installed.snapshot()
    record = installed.path(RECORD_FILE)
    pristine = record.read_bytes()
    installed.apply()
    record.write_bytes(pristine)
    record.chmod(0o444)
    installed.revert()
    record.chmod(0o644)
    assert installed.snapshot() == before


@pytest.mark.parametrize("keep_record", [True, False])
def test_an_edit_is_not_lost_with_the_record(world: Any, keep_record: bool) -> None:
    world.apply()
    if not keep_record:
        world.path(RECORD).unlink()
    world.path(ALPHA).write_bytes(world.path(ALPHA).read_bytes() + b"mine = 1\n")
    for step in (world.apply, world.revert):
        error = refused(world, step, StateError)
        assert error.file == ALPHA
        assert "changed by hand" in error.found


def test_somebodys_file_at_a_path_of_ours_is_left_by_revert(world: Any) -> None:
    """No record names it: it is theirs, and revert goes on around it."""
    before = world.snapshot()
    world.apply()
    for path in (RECORD, *world.overlay.added):
        world.path(path).unlink()
    mine = world.path(f"{PACKAGE}/dispatch.py")
    mine.write_bytes(b"mine\n")
    _, left = world.revert()
    assert left == [f"{PACKAGE}/dispatch.py"]
    assert mine.read_bytes() == b"mine\n"
    mine.unlink()
    mine.parent.rmdir()
    assert world.snapshot() == before


@pytest.mark.parametrize("step", ["apply", "revert"])
def test_no_bytecode_is_dropped_through_a_link(world: Any, tmp_path: Path, step: str) -> None:
    if step == "revert":
        world.apply()
    outside = tmp_path / "outside" / "alpha.cpython-311.pyc"
    outside.parent.mkdir()
    outside.write_bytes(b"mine")
    cache = world.path(ALPHA).parent / "__pycache__"
    cache.symlink_to(outside.parent)
    getattr(world, step)()
    assert outside.read_bytes() == b"mine"
    assert cache.is_symlink()


def test_bytecode_alone_is_dropped(world: Any) -> None:
    """Of that source, by its whole name."""
    cache = world.path(ALPHA).parent / "__pycache__"
    cache.mkdir()
    names = ("alpha.cpython-311.pyc", "alpha.cpython-311.opt-1.pyc", "alpha.txt", "alphabet.cpython-311.pyc")
    for name in names:
        (cache / name).write_bytes(b"")
    other = world.path(PACKAGE) / "__pycache__" / "overlay.cpython-311.pyc"  # of no overlay.json
    other.parent.mkdir(parents=True)
    other.write_bytes(b"mine")
    world.apply()
    assert other.read_bytes() == b"mine"
    assert sorted(p.name for p in cache.iterdir()) == sorted(names[2:])


def test_a_leftover_is_reason_enough_to_apply(world: Any) -> None:
    world.apply()
    done = world.snapshot()
    left = [world.tree.temporary(path) for path in (ALPHA, f"{PACKAGE}/dispatch.py")]
    for item in left:
        item.write_bytes(b"half")
    assert not world.apply().changes
    assert world.snapshot() == done


def test_a_line_of_record_is_reason_enough_to_apply(installed: Any) -> None:
    record = installed.path(RECORD_FILE)
    pristine = record.read_bytes()
    installed.apply()
    done = installed.snapshot()
    record.write_bytes(pristine)
    assert not installed.apply().changes
    assert installed.snapshot() == done


def test_one_added_file_that_is_gone_comes_back(installed: Any) -> None:
    installed.apply()
    done = installed.snapshot()
    installed.path(f"{PACKAGE}/dispatch.py").unlink()
    installed.apply()
    assert installed.snapshot() == done


def test_revert_of_a_record_that_is_right_already_says_nothing_of_it(
    installed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = installed.snapshot()
    pristine = installed.path(RECORD_FILE).read_bytes()
    installed.apply()
    installed.path(RECORD_FILE).write_bytes(pristine)
    monkeypatch.setattr(revert, "load", lambda: installed.manifest)
    monkeypatch.setattr(revert, "load_overlay", lambda manifest: installed.overlay)
    assert revert.main(["--tree", str(installed.root)]) == 0
    said = capsys.readouterr().out
    assert f"  restore {ALPHA}\n" in said
    assert RECORD_FILE not in said
    assert installed.snapshot() == before


def another(world: Any, path: str, op: str) -> Any:
    """The same tree seen by an overlay whose op ``op`` has one more file, ``path``."""
    files = {**world.manifest.files, path: replace(world.manifest.files[path], op=op)}
    return replace(world, manifest=replace(world.manifest, files=files))


def test_a_file_that_another_overlay_gave_to_an_op_of_ours(world: Any, later: Callable[[Any], Any]) -> None:
    """It is no file of the op here: not pinned, so not judged, and taken back."""
    pristine = world.path(BETA).read_bytes()
    another(world, BETA, "alpha").apply("alpha")
    assert world.path(BETA).read_bytes() != pristine
    newer = later(world)
    newer.apply()
    assert world.path(BETA).read_bytes() == pristine
    newer.revert()
    assert not world.path(PACKAGE).exists()


def test_a_file_of_another_overlay_that_is_gone(world: Any, later: Callable[[Any], Any]) -> None:
    world.apply()
    world.path(BETA).unlink()
    error = refused(world, later(world).revert, StateError)
    assert (error.file, error.found) == (BETA, "no file")
    assert "restore upstream's file" in error.remedy


def test_without_the_record_an_unpinned_file_and_its_line_are_upstreams_again(installed: Any) -> None:
    """The marker alone tells what was there."""
    before = installed.snapshot()
    installed.apply()
    installed.path(RECORD).unlink()
    files = {**installed.manifest.files, ALPHA: replace(installed.manifest.files[ALPHA], variants=())}
    replace(installed, manifest=replace(installed.manifest, files=files)).revert()
    assert installed.snapshot() == before


def test_an_upstream_file_that_speaks_of_the_overlay_is_pristine(
    new_world: Callable[..., Any], tmp_path: Path
) -> None:
    """What is pinned is upstream's, whatever stands in it."""
    for text in (MARK + b" quoted\n", b"import megatron.core.liger\n"):
        world = new_world(tmp_path / str(len(text)), bases={ALPHA: text}).write()
        before = world.snapshot()
        world.apply()
        world.revert()
        assert world.snapshot() == before


def test_other_lines_with_other_ends_are_not_said_to_be_upstreams(world: Any) -> None:
    world.path(ALPHA).write_bytes(world.upstream[ALPHA].replace(b"\n", b"\r\n"))
    error = refused(world, world.apply, TreeError)
    assert "the same but for CRLF" in error.found
    assert "core.autocrlf" in error.remedy
    world.path(ALPHA).write_bytes(b"mine = 1\r\n")
    error = refused(world, world.apply, TreeError)
    assert "CRLF" not in error.found
    assert "pin this variant" in error.remedy


@pytest.mark.parametrize(
    ("edit", "found", "remedy"),
    [
        (lambda d: d.replace(b"\n", b"\r\n"), "its line ends were made CRLF", "core.autocrlf off"),
        (lambda d: b"mine = 1\r\n" + d, "lines that were changed by hand", "save the change"),
        (lambda d: d + b"mine = 1\n", "lines that were changed by hand", "save the change"),
    ],
)
def test_line_ends_are_told_from_lines(
    world: Any, edit: Callable[[bytes], bytes], found: str, remedy: str
) -> None:
    world.apply()
    world.path(ALPHA).write_bytes(edit(world.path(ALPHA).read_bytes()))
    for step in (world.apply, world.revert):
        error = refused(world, step, StateError)
        assert error.file == ALPHA
        assert found in error.found
        assert remedy in error.remedy


def test_no_op_at_all_is_misuse(world: Any) -> None:
    for ops, found in (((), "none"), (("alpha", "gamma"), "gamma")):
        with pytest.raises(UsageError) as caught:
            select_ops(world.overlay, ops)
        assert (caught.value.file, caught.value.found) == ("--ops", found)
        assert "--ops alpha,beta" in caught.value.remedy


def test_files_of_no_single_release_are_said_to_be(world: Any) -> None:
    assert "as in several releases, no one of them has all; " in caveat(world.tree, [])


def test_a_dry_run_where_nothing_is_to_do_says_so(
    world: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(apply, "load", lambda: world.manifest)
    monkeypatch.setattr(apply, "load_overlay", lambda manifest: world.overlay)
    for first in (f"{world.root} would be overlaid; nothing was written", "nothing to do"):
        assert apply.main(["--tree", str(world.root), "--dry-run"]) == 0
        assert capsys.readouterr().out.splitlines()[0] == first
        world.apply()


@pytest.mark.parametrize("locks", [True, False])
def test_what_may_be_another_builds_is_left_where_there_are_no_locks(
    new_world: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    world = new_world(tmp_path / "unused")
    wheel = fake_wheel(world, tmp_path / "x.whl")
    dest = tmp_path / "build" / "tree"
    others = [dest.parent / f".tree.liger-overlay-{name}" for name in ("a1b2c3d4", "e5f6g7h8")]
    for other in others:
        other.mkdir(parents=True)

    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    apply._build(wheel, world.manifest, world.overlay, None, world.manifest.release("megatron==1.0"), dest)
    assert dest.is_dir()
    assert [other.exists() for other in others] == [not locks] * 2


@pytest.mark.parametrize("kind", ["folder", "socket"])
def test_what_is_no_file_is_not_read(world: Any, kind: str) -> None:
    world.path(ALPHA).unlink()
    if kind == "folder":
        world.path(ALPHA).mkdir()
    else:
        os.mknod(world.path(ALPHA), 0o600 | stat.S_IFSOCK)
    for step in (world.apply, world.revert):
        with pytest.raises(TreeError) as caught:
            step()
        assert (caught.value.file, caught.value.expected) == (ALPHA, "a plain file")
        assert caught.value.found == "something else"
        assert caught.value.remedy.startswith(f"move it away (mv {world.path(ALPHA)}")
    assert not world.path(PACKAGE).exists()


@pytest.mark.parametrize("ends", [True, False])
def test_another_run_is_waited_for_but_not_for_ever(
    world: Any, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    fd = os.open(world.path("megatron/core"), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    monkeypatch.setattr(trees, "_PATIENCE_S", 60.0 if ends else 0.1)
    other = threading.Timer(0.2, os.close, (fd,))
    if ends:
        other.start()
        world.apply()
        assert world.path(RECORD).exists()
        return
    error = refused(world, world.apply, StateError)
    assert (error.file, error.found) == (str(world.path("megatron/core")), "another command at work there")
    os.close(fd)


@pytest.mark.parametrize("step", ["apply", "revert"])
def test_a_file_system_without_locks_is_worked_on(
    world: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = world.snapshot()
    if step == "revert":
        world.apply()

    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    getattr(world, step)()
    assert (world.snapshot() == before) == (step == "revert")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the file system say that it has so much room."""
    real = os.statvfs

    def set_free(blocks: int, *, size: int = 1 << 20) -> None:
        fields = {"f_bavail": blocks, "f_bfree": blocks, "f_frsize": 512, "f_blocks": size}
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=real(path).f_flag, **fields))

    return set_free


@pytest.mark.parametrize("form", ["world", "installed"])
def test_a_disk_without_room_is_told_before_the_first_write(
    form: str, request: pytest.FixtureRequest, disk: Callable[..., None]
) -> None:
    world = request.getfixturevalue(form)
    disk(0)
    error = refused(world, world.apply, TreeError)
    assert error.file == str(world.root)
    assert (error.found, error.remedy) == ("0 bytes", "free some space there, or use a copy elsewhere")
    needed = int(error.expected.split()[0])
    assert needed % 512 == 0
    disk(needed // 512 - 1)
    refused(world, world.apply, TreeError)
    disk(needed // 512)
    world.apply()
    disk(0)
    assert not world.apply().changes
    world.revert()  # gives room back, and never asks for it


def test_the_room_that_apply_asks_for_is_what_it_takes(world: Any, disk: Callable[..., None]) -> None:
    def taken() -> int:
        files = [p for p in world.root.rglob("*") if p.is_file()]
        return sum(-(-p.stat().st_size // 512) * 512 for p in files)

    disk(0)
    needed = int(refused(world, world.apply, TreeError).expected.split()[0])
    before = taken()
    disk(1 << 20)
    world.apply()
    assert 0 <= needed - (taken() - before) <= 4096  # the largest file, for a moment twice


@pytest.mark.parametrize(("user", "fits"), [(0, True), (1000, False)])
def test_what_is_kept_for_root_is_roots(
    world: Any, monkeypatch: pytest.MonkeyPatch, user: int, fits: bool
) -> None:
    fields = {"f_bavail": 0, "f_bfree": 1 << 20, "f_frsize": 512, "f_blocks": 1 << 20}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**fields))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if fits:
        world.tree.require_space({ALPHA: 1})
        return
    with pytest.raises(TreeError, match="0 bytes"):
        world.tree.require_space({ALPHA: 1})


def test_a_file_system_that_does_not_say_what_it_has(world: Any, disk: Callable[..., None]) -> None:
    disk(0, size=0)
    world.apply()


@pytest.mark.parametrize("version", ["1.0+cluster.7", "1.0+ligers.1", "1.0.liger.1"])
def test_a_label_of_somebody_elses_is_no_patched_wheel(installed: Any, version: str) -> None:
    folder = installed.path(RECORD_FILE).parent
    folder.rename(folder.with_name(f"megatron_core-{version}.dist-info"))
    before = installed.snapshot()
    assert installed.apply().changes
    installed.revert()
    assert installed.snapshot() == before
