# SPDX-License-Identifier: Apache-2.0
"""Refusals that nothing else reaches: each names the file, what was expected and found, and a way on."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import apply, pair, revert
from scripts.errors import ExpectationError, OverlayError, SourceError, StateError, TreeError, UsageError
from scripts.files import require_folder
from scripts.manifest import Manifest, Release, load
from scripts.overlay import PACKAGE, RECORD
from scripts.record import dump, line
from scripts.wheelfile import ArchiveWriter
from scripts.wheelmeta import edit_record

from .test_obstacles import ALPHA, RECORD_FILE, as_nobody, bytecode, open_folder, refused

__all__ = ["open_folder"]

BETA = "megatron/core/fusions/beta.py"


@pytest.fixture
def here(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake tree, where commands take its pins and its overlay; there is a release 2.0 of other files."""
    releases = {**world.manifest.releases, "2.0": Release("2.0", ())}
    world = replace(world, manifest=replace(world.manifest, releases=releases))
    for module in (apply, revert):
        monkeypatch.setattr(module, "load", lambda: world.manifest)
        monkeypatch.setattr(module, "load_overlay", lambda manifest: world.overlay)
    return world


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize("overlaid", [False, True])
def test_a_tree_of_another_release_than_the_one_named(here: Any, more: list[str], overlaid: bool) -> None:
    if overlaid:
        here.apply("alpha")
    tree = ["--tree", str(here.root), *more]
    error = refused(here, lambda: apply.main(["megatron==2.0", *tree]), TreeError)
    assert (error.expected, error.found) == ("files as in 2.0", "files as in 1.0")
    assert "leave the release away" in error.remedy
    assert apply.main(["megatron==1.0", *tree]) == 0


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_revert_and_its_dry_run_refuse_the_same(here: Any, more: list[str]) -> None:
    here.apply()
    here.path(ALPHA).chmod(0o444)
    error = refused(here, lambda: revert.main(["--tree", str(here.root), *more]), TreeError)
    assert error.file == ALPHA
    assert "read-only" in error.found


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_where_nothing_is_to_be_taken_out_nothing_need_be_writable(
    here: Any, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody's bytecode where ours would be is not revert's."""
    cache = bytecode(here, f"{PACKAGE}/dispatch.py").parent
    cache.chmod(0o555)
    before = here.snapshot()
    assert revert.main(["--tree", str(here.root), *more]) == 0
    assert "nothing" in capsys.readouterr().out
    assert here.snapshot() == before
    cache.chmod(0o755)


def fake_wheel(world: Any, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in world.upstream.items():
            wheel.writestr(name, data)
        rows = [line(name, data) + b"\n" for name, data in world.upstream.items()]
        wheel.writestr(RECORD_FILE, b"".join([*rows, RECORD_FILE.encode() + b",,\n"]))
    return path


def test_what_cannot_be_looked_into_is_not_built_over(
    new_world: Callable[..., Any], open_folder: Path
) -> None:
    """A folder that this user may not read can hold anything, so it is no folder without files."""
    world = new_world(open_folder / "unused")
    wheel = fake_wheel(world, open_folder / "x.whl")
    dest = open_folder / "home" / "tree"
    release = world.manifest.release("megatron==1.0")

    def build() -> None:
        apply._build(wheel, world.manifest, world.overlay, None, release, dest)

    build()
    (dest / "mine").mkdir()
    (dest / "mine" / "notes.txt").write_bytes(b"mine")
    if os.geteuid() == 0:
        for item in (dest.parent, *dest.parent.rglob("*")):
            shutil.chown(item, 65534, 65534)
    (dest / "mine").chmod(0o000)
    error = as_nobody(build)
    (dest / "mine").chmod(0o755)
    assert isinstance(error, TreeError)
    assert "ermission denied" in error.found
    assert (dest / "mine" / "notes.txt").read_bytes() == b"mine"
    assert not list(dest.parent.glob(".tree*"))


@pytest.mark.parametrize("step", ["build", "dry run"])
def test_what_could_not_be_deleted_is_not_built_over(
    step: str, new_world: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An immutable file in the old tree, for which no mode tells that it cannot be deleted."""
    world = new_world(tmp_path / "unused")
    wheel = fake_wheel(world, tmp_path / "x.whl")
    release = world.manifest.release("megatron==1.0")
    monkeypatch.setattr(apply, "BUILD", tmp_path / "build")
    words = (wheel, world.manifest, world.overlay)
    apply._into_build(*words, ("alpha",), release, False)
    tree = replace(world, root=tmp_path / "build" / "megatron-core-1.0")
    monkeypatch.setattr(apply, "held", lambda item: item == tree.path(BETA))
    error = refused(tree, lambda: apply._into_build(*words, None, release, step == "dry run"), TreeError)
    assert (error.file, error.found) == (str(tree.path(BETA)), "immutable")
    assert error.remedy == f"chattr -i -a {tree.path(BETA)} as root, then retry"
    assert not list(tree.root.parent.glob(".megatron*"))


def test_a_link_to_the_same_bytes_is_no_file_as_apply_wrote_it(
    new_world: Callable[..., Any], tmp_path: Path
) -> None:
    """What it leads to is somebody's, and can change without a word."""
    world = new_world(tmp_path / "unused")
    wheel = fake_wheel(world, tmp_path / "x.whl")
    dest = tmp_path / "tree"
    words = (wheel, world.manifest, world.overlay, None, world.manifest.release("megatron==1.0"), dest)
    apply._build(*words)
    tree = replace(world, root=dest)
    tree.path(ALPHA).replace(tmp_path / "mine.py")
    tree.path(ALPHA).symlink_to(tmp_path / "mine.py")
    assert refused(tree, lambda: apply._build(*words), StateError).file == str(tree.path(ALPHA))
    tree.path(ALPHA).unlink()
    assert apply._build(*words).word == "built anew: it was not what it should be"


@pytest.mark.parametrize("kind", ["file", "link to a file", "broken link"])
@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_folders_place_that_is_taken(tmp_path: Path, kind: str, below: str) -> None:
    place = tmp_path / "out"
    if kind == "file":
        place.write_bytes(b"mine")
    else:
        (tmp_path / "mine").write_bytes(b"mine")
        place.symlink_to("mine" if kind == "link to a file" else "nowhere")
    with pytest.raises(TreeError) as caught:
        require_folder(place / below)
    assert caught.value.file == str(place)
    assert caught.value.found == ("a broken symbolic link" if kind == "broken link" else "a file")
    assert str(place) in caught.value.remedy


def entry(**changes: Any) -> dict[str, Any]:
    return {"action": "extend", "op": "alpha", "before": "0" * 64, "after": "1" * 64, **changes}


RECORDS: dict[str, dict[str, Any]] = {
    "a version that is text": {"overlay": "1"},
    "an op that is none": {"ops": ["alpha", 2]},
    "ops that are none": {"ops": None},
    "a release that is none": {"release": 1},
    "a commit that is none": {"commit": ["abc"]},
    "an action that nobody knows": {"files": {ALPHA: entry(action="delete")}},
    "a hash that is a number": {"files": {ALPHA: entry(after=1)}},
    "a hash in capitals": {"files": {ALPHA: entry(after="A" * 64)}},
    "a hash and a line end": {"files": {ALPHA: entry(after="1" * 64 + "\n")}},
    "no hash": {"files": {ALPHA: {"action": "add"}}},
    "earlier hashes that are one text": {"previous": {ALPHA: "1" * 64}},
    "earlier hashes that are no text": {"previous": {ALPHA: ""}},
    "earlier hashes with values": {"previous": {ALPHA: {"1" * 64: 1}}},
    "earlier hashes that are none": {"previous": {ALPHA: ["1" * 64, "2"]}},
    "itself": {"files": {RECORD: entry()}},
    "itself, earlier": {"previous": {RECORD: ["1" * 64]}},
    "a path of another package": {"files": {"other/core/a.py": entry()}},
    "a path beside": {"files": {"megatron": entry()}},
    "a path out": {"files": {"megatron/../../a.py": entry()}},
    "a path from the root": {"files": {"/megatron/core/a.py": entry()}},
    "a path with backslashes": {"files": {"megatron/core\\a.py": entry()}},
    "a path with a control character": {"files": {"megatron/core/a\0.py": entry()}},
    "a name that is too long": {"previous": {f"megatron/{'a' * 300}.py": ["1" * 64]}},
    "a path that is too long": {"previous": {"megatron" + "/aaaaaaaaa" * 150: ["1" * 64]}},
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_that_the_overlay_did_not_write(world: Any, case: str) -> None:
    """One fault in a record that is right otherwise is enough: nothing in it is acted on."""
    world.apply("alpha")
    right, wrong = json.loads(world.path(RECORD).read_bytes()), RECORDS[case]
    files = {**right["files"], **wrong.get("files", {})}
    world.path(RECORD).write_bytes(dump({**right, **wrong, "files": files}))
    for step in (world.apply, world.revert):
        error = refused(world, step, StateError)
        assert (error.file, error.expected) == (RECORD, "a record that the overlay wrote")
        assert "move it away" in error.remedy


PINS: dict[str, tuple[str, str | None, str]] = {
    "gone": ("files.json", None, "no file"),
    "cut short": ("releases.json", "{", "Expecting"),
    "no text": ("files.json", "\udcff", "utf-8"),
    "a key twice": ("releases.json", '{"schema": 1, "a": 1, "a": 2}', "a twice"),
}


@pytest.mark.parametrize("case", PINS)
def test_pins_that_cannot_be_read(tmp_path: Path, case: str) -> None:
    name, text, found = PINS[case]
    shutil.copytree(Path(load.__code__.co_filename).parent.parent / "patches", tmp_path / "patches")
    target = tmp_path / "patches" / name
    target.unlink()
    if text is not None:
        target.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ExpectationError) as caught:
        load(tmp_path)
    assert caught.value.file == f"patches/{name}"
    assert found in caught.value.found
    assert caught.value.remedy in ("correct the file", "restore it from version control", "keep one of them")


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        (
            "files.json",
            lambda d: next(iter(d["files"].values())).update(absent=[1]),
            "a list of what matches",
        ),
        ("files.json", lambda d: next(iter(d["files"].values())).update(absent=["one"]), "a list of what"),
        (
            "files.json",
            lambda d: next(iter(d["files"].values()))["variants"][0].update(entries={"a": 1}),
            "an object of strings and nulls",
        ),
        ("releases.json", lambda d: d["yanked"].update({"0.18.1": 1}), "an object of strings"),
        ("releases.json", lambda d: d["releases"].update(main=d["releases"]["0.16.1"]), "a version such as"),
    ],
)
def test_pins_of_the_wrong_type(
    tmp_path: Path, name: str, change: Callable[[Any], object], expected: str
) -> None:
    shutil.copytree(Path(load.__code__.co_filename).parent.parent / "patches", tmp_path / "patches")
    document = json.loads((tmp_path / "patches" / name).read_bytes())
    change(document)
    (tmp_path / "patches" / name).write_text(json.dumps(document))
    with pytest.raises(ExpectationError) as caught:
        load(tmp_path)
    assert f"patches/{name}" in caught.value.file
    assert expected in caught.value.expected


def test_a_licence_that_is_not_pinned() -> None:
    with pytest.raises(ExpectationError) as caught:
        Manifest({}, {}, {}).license("9.9")
    assert "9.9" in caught.value.expected
    assert caught.value.remedy == "pin the release anew"


@pytest.mark.parametrize("line", [b"\xff,,\n", b"x" * 200_000 + b",,\n"])
def test_a_wheels_record_that_is_no_table(line: bytes) -> None:
    with pytest.raises(SourceError) as caught:
        edit_record(
            b"d/RECORD,,\n" + line, "w:RECORD", path="d/RECORD", rename=lambda p: p, changed={}, added={}
        )
    assert (caught.value.file, caught.value.expected) == ("w:RECORD", "path,hash,size in UTF-8")


def test_an_archive_that_would_need_zip64() -> None:
    writer = ArchiveWriter()
    for number in range(0xFFFF - 1):
        writer.store(str(number), b"")
    writer.finish()
    writer.store("one more", b"")
    with pytest.raises(ValueError, match="zip64"):
        writer.finish()


def opened(*arguments: str) -> OverlayError:
    parser = argparse.ArgumentParser()
    pair.add_arguments(parser)
    with pytest.raises(OverlayError) as caught, pair.open_pair(parser.parse_args(arguments)):
        pass
    return caught.value


@pytest.mark.parametrize(
    ("arguments", "found"), [((), "neither"), (("megatron==0.16.1", "--tree", "."), "both")]
)
def test_a_comparison_of_one_thing(arguments: tuple[str, ...], found: str) -> None:
    error = opened(*arguments)
    assert isinstance(error, UsageError)
    assert error.found == found
    assert "--tree PATH" in error.remedy


def test_a_comparison_of_an_overlaid_tree(overlaid_tree: Path, tmp_path: Path) -> None:
    """It is compared as it is: whole, and with the ops that it has; it itself is never changed."""
    tree = tmp_path / "tree"
    shutil.copytree(overlaid_tree / "megatron", tree / "megatron")
    error = opened("--tree", str(tree), "--ops", "swiglu")
    assert isinstance(error, UsageError)
    assert "revert the tree first" in error.remedy
    (tree / PACKAGE / "report.py").unlink()
    error = opened("--tree", str(tree))
    assert isinstance(error, StateError)
    assert error.file == str(tree)
    assert "half applied" in error.found
    assert f"apply --tree {tree}" in error.remedy
    assert not (tree / PACKAGE / "report.py").exists()
    assert json.loads((tree / RECORD).read_bytes())["ops"]


@pytest.mark.parametrize("option", [["--python", "3.12"], ["--platform", "aarch64"]])
@pytest.mark.parametrize("wheel", [True, False])
def test_what_is_given_already_is_not_chosen(here: Any, option: list[str], wheel: bool) -> None:
    given = ["x.whl"] if wheel else ["--tree", str(here.root)]
    error = refused(here, lambda: apply.main([*given, *option]), UsageError)
    assert error.found.startswith("a wheel with" if wheel else "--tree with")
    assert "leave" in error.remedy


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_revert_says_what_it_does(here: Any, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each file, RECORD of an installed tree, what a killed run left, and what stays since it is not ours."""
    folder = here.path(RECORD_FILE)
    folder.parent.mkdir()
    rows = [line(path, data) + b"\n" for path, data in here.upstream.items()]
    folder.write_bytes(b"".join([*rows, RECORD_FILE.encode() + b",,\n"]))
    here.apply("alpha")
    mine = [here.path(f"{PACKAGE}/{name}.py") for name in ("his", "mine")]
    left = [here.tree.temporary(path) for path in (ALPHA, BETA)]
    for item in (*mine, *left):
        item.write_bytes(b"mine\n")
    before = here.snapshot()
    tree = ["--tree", str(here.root)]
    assert revert.main([*tree, *more]) == 0
    said = capsys.readouterr().out.splitlines()
    first = f"{here.root} would be reverted; nothing was written" if more else f"{here.root} is reverted"
    added = [*(f"  remove  {path}" for path in sorted(here.overlay.added)), f"  remove  {RECORD}"]
    names = [item.relative_to(here.root).as_posix() for item in left]
    assert said == [
        first,
        f"  restore {ALPHA}",
        *added,
        f"  restore {RECORD_FILE}",
        *(f"  remove  {name} (left by a run that was cut short)" for name in names),
        *([] if more else [f"  left    {PACKAGE}/{name}.py (not the overlay's)" for name in ("his", "mine")]),
    ]
    assert (here.snapshot() == before) == bool(more)
    assert [item.read_bytes() for item in mine] == [b"mine\n"] * 2
    if not more:
        assert revert.main(tree) == 0
        assert capsys.readouterr().out == f"{here.root} has no overlay; nothing was written\n"
