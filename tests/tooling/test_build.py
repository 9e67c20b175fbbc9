# SPDX-License-Identifier: Apache-2.0
"""The tree in build/: what any run wrote is replaced without a word, what somebody else wrote never is."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import apply, source
from scripts.apply import apply_tree, build_tree
from scripts.errors import OverlayError, StateError, TreeError
from scripts.manifest import load
from scripts.overlay import PACKAGE, RECORD, load_overlay
from scripts.revert import revert_tree

RELEASE = load().release("megatron==0.16.1")
SWIGLU = "megatron/core/fusions/fused_bias_swiglu.py"
OTHER = "megatron/core/optimizer/__init__.py"
Snapshot = Callable[[Path], object]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tree(RELEASE, None, tmp_path_factory.mktemp("built") / "tree", overlaid=True)


@pytest.fixture
def tree(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "tree", symlinks=True))


def again(tree: Path) -> None:
    """Build the tree once more; a file that only this build has makes the earlier one out of date."""
    build_tree(RELEASE, None, tree, overlaid=False)


def add(tree: Path, path: str, data: bytes = b"mine\n") -> str:
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_bytes(data)
    return path


def append(tree: Path, path: str) -> str:
    return add(tree, path, (tree / path).read_bytes() + b"# mine\n")


def link(tree: Path, path: str) -> str:
    (tree / path).symlink_to(tree.parent)
    return path


FOREIGN: dict[str, Callable[[Path], str]] = {
    "a file beside": lambda t: add(t, "notes.txt"),
    "a file inside": lambda t: add(t, f"{PACKAGE}/mine.py"),
    "a package": lambda t: add(t, "mine/__init__.py"),
    "a file among bytecode": lambda t: add(t, "megatron/core/__pycache__/notes.txt"),
    "a hidden file": lambda t: add(t, ".env"),
    "bytecode in another place": lambda t: add(t, "megatron/core/mine.pyc"),
    "a name like a killed run's": lambda t: add(t, "megatron/core/mine.liger-overlay.tmp"),
    "a table that lists itself": lambda t: add(t, "notes.csv", b"notes.csv,,\n"),
    "an edit of an upstream file": lambda t: append(t, OTHER),
    "an edit of an extended file": lambda t: append(t, SWIGLU),
    "an edit of an added file": lambda t: append(t, f"{PACKAGE}/dispatch.py"),
    "an edit of the record": lambda t: append(t, RECORD),
    "an edit of RECORD": lambda t: append(t, "megatron_core-0.16.1.dist-info/RECORD"),
    "an emptied file": lambda t: add(t, OTHER, b""),
    "a link to a file": lambda t: link(t, "link.py"),
    "a link to a folder": lambda t: link(t, "megatron/link"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_what_no_run_wrote_is_never_lost(tree: Path, case: str, take_snapshot: Snapshot) -> None:
    path = FOREIGN[case](tree)
    before = take_snapshot(tree)
    with pytest.raises(StateError) as caught:
        again(tree)
    assert caught.value.file == str(tree / path)
    assert str(tree) in caught.value.remedy
    assert caught.value.exit_code == 6
    assert take_snapshot(tree) == before
    assert [p.name for p in tree.parent.iterdir()] == [tree.name]


@pytest.mark.parametrize("form", ["file", "link"])
def test_what_stands_in_the_folders_place_stays(built: Path, tmp_path: Path, form: str) -> None:
    dest = tmp_path / "tree"
    dest.write_bytes(b"mine") if form == "file" else dest.symlink_to(built)
    with pytest.raises(StateError):
        again(dest)
    assert dest.read_bytes() == b"mine" if form == "file" else dest.is_symlink()


def test_bytecode_and_what_a_killed_run_left_are_nobodys(tree: Path) -> None:
    add(tree, "megatron/core/__pycache__/__init__.cpython-311.pyc")
    add(tree, f"{PACKAGE}/.overlay.json.liger-overlay.tmp")
    again(tree)
    assert not (tree / PACKAGE).exists()


def test_what_an_earlier_overlay_wrote_is_replaced(
    built: Path, tmp_path: Path, take_snapshot: Snapshot
) -> None:
    dest = tmp_path / "tree"
    ours = load_overlay()
    earlier = replace(
        ours,
        commit="another",
        added={**ours.added, f"{PACKAGE}/dispatch.py": b"# earlier\n", f"{PACKAGE}/gone.py": b"# gone\n"},
        tails=dict.fromkeys(ours.tails, b"# earlier tail\n"),
    )
    apply._build(source.fetch(RELEASE), load(), earlier, None, RELEASE, dest)
    assert (dest / PACKAGE / "gone.py").exists()
    build_tree(RELEASE, None, dest, overlaid=True)
    assert take_snapshot(dest) == take_snapshot(built)


def test_what_another_wheel_of_the_release_held_is_replaced(
    built: Path, tmp_path: Path, take_snapshot: Snapshot
) -> None:
    dest = tmp_path / "tree"
    running = source.choose(RELEASE)
    other = next(pin for pin in RELEASE.wheels if pin != running)
    wheel = source.fetch_file(RELEASE, other)
    apply._build(wheel, load(), load_overlay(), None, RELEASE, dest)
    assert take_snapshot(dest) != take_snapshot(built)
    build_tree(RELEASE, None, dest, overlaid=True)
    assert take_snapshot(dest) == take_snapshot(built)


@pytest.mark.parametrize("step", ["revert", "apply"])
def test_a_tree_that_was_changed_in_place_is_replaced(
    tree: Path, built: Path, step: str, take_snapshot: Snapshot
) -> None:
    revert_tree(tree)
    if step == "apply":
        apply_tree(tree)
    build_tree(RELEASE, None, tree, overlaid=True)
    assert take_snapshot(tree) == take_snapshot(built)


def test_a_deleted_file_comes_back(tree: Path, built: Path, take_snapshot: Snapshot) -> None:
    for path in (OTHER, RECORD, "megatron_core-0.16.1.dist-info/RECORD"):
        (tree / path).unlink()
        build_tree(RELEASE, None, tree, overlaid=True)
        assert take_snapshot(tree) == take_snapshot(built)


def modes(tree: Path) -> dict[str, int]:
    return {str(p.relative_to(tree)): stat.S_IMODE(p.stat().st_mode) for p in [tree, *tree.rglob("*")]}


def test_modes_do_not_follow_the_umask(built: Path, tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        dest = build_tree(RELEASE, None, tmp_path / "tree", overlaid=True)
        source.unpack(source.fetch(RELEASE), tmp_path / "unpacked")
    finally:
        os.umask(old)
    assert modes(dest) == modes(built)
    for root in (dest, tmp_path / "unpacked"):
        folders = {mode for path, mode in modes(root).items() if (root / path).is_dir()}
        assert folders == {0o755}


def test_modes_are_put_right(tree: Path, built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / OTHER).chmod(0o600)
    (tree / SWIGLU).chmod(0o444)
    (tree / "megatron").chmod(0o700)
    found = apply._build(source.fetch(RELEASE), load(), load_overlay(), None, RELEASE, tree)
    assert found.word == "as before, modes put right"
    assert modes(tree) == modes(built)
    found = apply._build(source.fetch(RELEASE), load(), load_overlay(), None, RELEASE, tree)
    assert found.word == "as before"


def test_a_folder_that_could_not_be_deleted_is_refused_first(tree: Path, take_snapshot: Snapshot) -> None:
    cache = tree / "megatron/core/__pycache__"
    add(tree, "megatron/core/__pycache__/__init__.cpython-311.pyc")
    cache.chmod(0o555)
    before = take_snapshot(tree)
    with pytest.raises(TreeError) as caught:
        again(tree)
    assert caught.value.file == str(cache)
    assert take_snapshot(tree) == before
    assert [p.name for p in tree.parent.iterdir()] == [tree.name]
    cache.chmod(0o755)


def test_a_build_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "build").write_bytes(b"")
    with pytest.raises(OverlayError) as caught:
        build_tree(RELEASE, None, tmp_path / "build" / "tree", overlaid=True)
    assert (caught.value.exit_code, caught.value.file) == (5, str(tmp_path / "build"))


def test_a_tree_that_is_right_is_used_from_a_folder_that_may_not_be_written(tree: Path) -> None:
    tree.parent.chmod(0o555)
    try:
        build_tree(RELEASE, None, tree, overlaid=True)
    finally:
        tree.parent.chmod(0o755)
