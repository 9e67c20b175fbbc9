# SPDX-License-Identifier: Apache-2.0
"""What apply and revert leave alone, and what they do all the same: guards that no other test would miss."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import tree as trees
from scripts.apply import caveat
from scripts.errors import StateError, TreeError
from scripts.overlay import PACKAGE, RECORD
from scripts.tree import TEMPORARY, Tree

from .test_obstacles import refused

ALPHA = "megatron/core/fusions/alpha.py"
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


def test_a_file_system_that_does_not_say_what_it_has(world: Any, disk: Callable[..., None]) -> None:
    disk(0, size=0)
    world.apply()


def test_a_label_of_somebody_elses_is_no_patched_wheel(installed: Any) -> None:
    folder = installed.path(RECORD_FILE).parent
    folder.rename(folder.with_name("megatron_core-1.0+cluster.7.dist-info"))
    before = installed.snapshot()
    assert installed.apply().changes
    installed.revert()
    assert installed.snapshot() == before
