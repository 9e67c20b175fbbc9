# SPDX-License-Identifier: Apache-2.0
"""What status says and expects, and that diff's output takes the overlay out."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts import status
from scripts.diff import main, tree_diff, unified
from scripts.errors import ExpectationError, StateError
from scripts.overlay import PACKAGE, RECORD
from scripts.record import dump
from scripts.status import HALF, expect, judge, lines
from scripts.verify import inspect

ALPHA = "megatron/core/fusions/alpha.py"
BETA = "megatron/core/fusions/beta.py"
GAMMA = "megatron/core/models/gamma.py"


def verdict(world: Any) -> str:
    state = inspect(world.tree.read, world.manifest, world.overlay)
    return judge(world.tree, state, world.manifest, world.overlay)


def said(world: Any) -> dict[str, str]:
    state = inspect(world.tree.read, world.manifest, world.overlay)
    return dict(text.split(": ", 1) for text in lines(world.tree, state, world.overlay))


def expecting(world: Any, what: str, *ops: str) -> None:
    expect(world.tree, what, ops or world.overlay.ops, world.manifest, world.overlay)


def test_each_file_is_named(world: Any) -> None:
    assert verdict(world) == "pristine"
    assert said(world)[ALPHA] == "pristine, the file of 1.0"
    world.apply("alpha")
    assert verdict(world) == "overlaid, version 1, ops alpha"
    assert said(world)[ALPHA] == "overlaid, version 1, this checkout's, op alpha, over the file of 1.0"
    assert said(world)[BETA] == "pristine, the file of 1.0"
    world.path(ALPHA).write_bytes(world.path(ALPHA).read_bytes() + b"#")
    world.path(BETA).write_bytes(b"#")
    assert verdict(world).startswith("changed by hand")
    assert said(world)[ALPHA] == "changed by hand after apply"
    assert said(world)[BETA] == "neither pinned nor overlaid"


def test_a_broken_marker_line_counts_as_changed_by_hand(world: Any) -> None:
    world.apply()
    world.path(ALPHA).write_bytes(world.path(ALPHA).read_bytes().replace(b"base-bytes", b"base-\n#bytes"))
    assert said(world)[ALPHA] == "changed by hand after apply"


def test_an_unpinned_file(world: Any) -> None:
    world.path(ALPHA).write_bytes(b"# a fork's\n")
    assert verdict(world) == f"not supported as it is ({ALPHA})"


@pytest.mark.parametrize("found", [b"# a fork's\n", None])
def test_a_touched_file_that_was_replaced_after_apply(world: Any, found: bytes | None) -> None:
    """As a pull does: named, where apply and revert refuse."""
    world.apply()
    world.path(ALPHA).unlink()
    if found is not None:
        world.path(ALPHA).write_bytes(found)
    assert verdict(world) == f"not supported as it is ({ALPHA}), and overlaid in part"
    world.path(ALPHA).write_bytes(world.upstream[ALPHA])
    assert verdict(world) == HALF


def test_another_version(world: Any, later: Callable[[Any], Any]) -> None:
    world.apply()
    assert "another version" in verdict(later(world))
    assert "another version" in said(later(world))[ALPHA]
    later(world).apply()
    assert "another version" in verdict(world)
    with pytest.raises(ExpectationError):
        expecting(world, "overlaid")


def test_half_applied(world: Any) -> None:
    world.apply()
    world.path(f"{PACKAGE}/dispatch.py").unlink()
    assert verdict(world) == HALF


def test_without_a_finished_record_a_tree_is_half_applied(world: Any) -> None:
    """Also where another version wrote it, whose bytes this checkout does not know."""
    world.apply()
    record = world.path(RECORD).read_bytes()
    document = json.loads(record)
    world.path(RECORD).write_bytes(dump({**document, "previous": {ALPHA: ["0" * 64]}}))
    assert verdict(world) == HALF
    world.path(RECORD).unlink()
    assert verdict(world) == HALF
    world.path(RECORD).write_bytes(dump({**document, "overlay": 7, "ops": ["alpha"]}))
    assert verdict(world) == "overlaid by another version or state of the overlay, ops alpha"


def test_a_file_of_an_op_that_is_not_applied_may_be_anything(world: Any) -> None:
    world.apply("alpha")
    world.path(BETA).write_bytes(b"# a fork's\n")
    assert verdict(world) == "overlaid, version 1, ops alpha"
    expecting(world, "overlaid", "alpha")


def test_the_commit_of_the_record_makes_no_difference(world: Any) -> None:
    """The same files from another commit, or from a copy without its repository, are the same overlay."""
    world.apply()
    document = json.loads(world.path(RECORD).read_bytes())
    world.path(RECORD).write_bytes(dump({**document, "commit": "1" * 40}))
    expecting(world, "overlaid")
    world.path(RECORD).write_bytes(dump({**document, "ops": ["alpha"]}))
    with pytest.raises(ExpectationError, match="missing, unfinished or of other ops"):
        expecting(world, "overlaid")


def test_an_installed_record_without_upstreams_own_line(installed: Any) -> None:
    installed.apply()
    record = installed.path("megatron_core-1.0.dist-info/RECORD")
    rows = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(row for row in rows if not row.startswith(ALPHA.encode())))
    assert f"; but {record.relative_to(installed.root)}: no such line, not " in verdict(installed)
    with pytest.raises(ExpectationError) as caught:
        expecting(installed, "overlaid")
    assert f"a line for {ALPHA}" in caught.value.expected
    assert "--force-reinstall megatron-core==1.0" in caught.value.remedy


def test_what_a_tree_claims_is_repeated_where_its_files_say_otherwise(world: Any) -> None:
    def claim(manifest: Any = None) -> str | None:
        known = manifest or world.manifest
        return status._claim(world.tree, inspect(world.tree.read, known, world.overlay), known)

    info = world.path("megatron/core/package_info.py")
    info.write_bytes(b"MAJOR = 1\nMINOR = 0\n")
    assert claim() is None  # it claims nothing
    info.write_bytes(b"MAJOR = 1\nMINOR = 9\nPATCH = 0\n")
    said = claim()
    assert said is not None
    assert "as in 1.0; " in said
    assert "says 1.9.0" in said
    assert claim(replace(world.manifest, files={})) is None  # no file says anything
    other = replace(world.manifest.files[ALPHA], variants=())
    files = {**world.manifest.files, ALPHA: other}
    assert claim(replace(world.manifest, files=files)) is None  # they are of no release in common
    variant = replace(world.manifest.files[ALPHA].variants[0], releases=("1.9.0",))
    release = {"1.9.0": world.manifest.releases["1.0"]}
    files = {ALPHA: replace(other, variants=(variant,))}
    assert claim(replace(world.manifest, releases=release, files=files)) is None  # it is right


def test_a_record_without_any_op(world: Any) -> None:
    """As another version may write one: nothing is planned for no op."""
    world.apply("alpha")
    document = json.loads(world.path(RECORD).read_bytes())
    world.path(RECORD).write_bytes(dump({**document, "ops": []}))
    assert verdict(world) == "overlaid by another version or state of the overlay, ops "


@pytest.mark.parametrize("overlaid", [True, False])
def test_what_is_left_is_not_pristine(world: Any, overlaid: bool) -> None:
    """A killed run's file alone, too, and the record alone; an added file that is somebody's is named."""
    if overlaid:
        world.apply("alpha")
        world.path(ALPHA).write_bytes(world.upstream[ALPHA])
        for path in world.overlay.added:
            world.path(path).unlink()
        left = RECORD
    else:
        left = world.tree.temporary(ALPHA).relative_to(world.root).as_posix()
        world.path(left).write_bytes(b"")
    if overlaid:
        with pytest.raises(ExpectationError) as caught:
            expecting(world, "overlaid", "alpha")
        assert caught.value.found != "pristine"
    with pytest.raises(ExpectationError) as caught:
        expecting(world, "pristine")
    assert caught.value.found.startswith("something of the overlay is left: ")
    assert left in caught.value.found
    world.path(left).unlink()
    if overlaid:
        world.revert()
    expecting(world, "pristine")
    mine = world.path(f"{PACKAGE}/dispatch.py")
    mine.parent.mkdir()
    mine.write_bytes(b"mine\n")
    assert said(world)[f"{PACKAGE}/dispatch.py"] == "changed by hand, or not the overlay's"
    with pytest.raises(ExpectationError, match=r"dispatch\.py is edited"):
        expecting(world, "pristine")


def test_a_missing_file_is_said_to_be(world: Any) -> None:
    world.path(ALPHA).unlink()
    assert said(world)[ALPHA] == "missing"
    assert verdict(world) == f"not supported as it is ({ALPHA})"


def test_expectations(world: Any) -> None:
    expecting(world, "pristine")
    with pytest.raises(ExpectationError) as caught:
        expecting(world, "overlaid")
    assert caught.value.found == "pristine"
    world.apply("alpha")
    expecting(world, "overlaid", "alpha")
    for what, ops in (
        ("pristine", ()),
        ("overlaid", ()),
        ("overlaid", ("beta",)),
        ("overlaid", ("alpha", "beta")),
    ):
        with pytest.raises(ExpectationError) as caught:
            expecting(world, what, *ops)
        assert caught.value.exit_code == 1
    world.apply()
    expecting(world, "overlaid")
    with pytest.raises(ExpectationError):
        expecting(world, "overlaid", "alpha")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda w: w.path(ALPHA).write_bytes(w.upstream[ALPHA]),
        lambda w: w.path(ALPHA).write_bytes(b"#"),
        lambda w: w.path(ALPHA).unlink(),
        lambda w: w.path(f"{PACKAGE}/__init__.py").write_bytes(b"#"),
        lambda w: w.path(f"{PACKAGE}/__init__.py").unlink(),
        lambda w: w.path(RECORD).unlink(),
        lambda w: w.path(RECORD).write_bytes(
            w.path(RECORD).read_bytes().replace(b'  "beta"\n', b'  "gamma"\n')
        ),
        lambda w: w.tree.temporary(ALPHA).write_bytes(b""),
    ],
)
def test_expect_overlaid_fails_for_any_flaw(world: Any, spoil: Callable[[Any], object]) -> None:
    world.apply()
    spoil(world)
    for what in ("overlaid", "pristine"):
        with pytest.raises(ExpectationError):
            expecting(world, what)


def test_expect_overlaid_reads_the_installed_record(installed: Any) -> None:
    record = installed.path("megatron_core-1.0.dist-info/RECORD")
    before = record.read_bytes()
    installed.apply()
    expecting(installed, "overlaid")
    record.write_bytes(before)
    with pytest.raises(ExpectationError, match="no such line"):
        expecting(installed, "overlaid")


@pytest.mark.parametrize(
    "command", [["git", "apply", "-R"], ["patch", "-p1", "-R", "-s", "--no-backup-if-mismatch"]]
)
@pytest.mark.parametrize("form", ["world", "installed"])
def test_the_diff_takes_the_overlay_out(
    form: str, command: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} on this machine")
    world = request.getfixturevalue(form)
    before = world.snapshot()
    world.apply()
    diff, lost = tree_diff(world.tree, world.manifest, world.overlay)
    assert not lost
    if command[0] == "patch":
        command = [*command, "--binary"]
    done = subprocess.run(command, cwd=world.root, input=diff, capture_output=True)
    assert done.returncode == 0, done.stderr
    files = {path: item for path, item in world.snapshot().items() if item[1] is not None}
    assert files == {path: item for path, item in before.items() if item[1] is not None}


@pytest.mark.parametrize("form", ["world", "installed"])
def test_the_diff_of_a_pristine_tree_is_empty(form: str, request: pytest.FixtureRequest) -> None:
    world = request.getfixturevalue(form)
    assert tree_diff(world.tree, world.manifest, world.overlay) == (b"", {})


def test_the_diff_of_a_file_that_is_upstreams_again(world: Any, tmp_path: Path) -> None:
    """Its record still names it, and nobody changed it by hand."""
    world.apply()
    world.path(ALPHA).write_bytes(world.upstream[ALPHA])
    diff, lost = tree_diff(world.tree, world.manifest, world.overlay, tmp_path)
    assert not lost
    assert b"a/" + BETA.encode() in diff
    assert b"a/" + ALPHA.encode() not in diff
    assert b"by hand" not in diff


def test_the_diff_of_what_the_overlay_never_touched(world: Any, tmp_path: Path) -> None:
    """An upstream file that is not pinned is a fork's matter, and nothing of it is lost."""
    world.path(ALPHA).write_bytes(b"# a fork's\n")
    assert tree_diff(world.tree, world.manifest, world.overlay, tmp_path) == (b"", {})
    world.apply("beta")
    diff, lost = tree_diff(world.tree, world.manifest, world.overlay, tmp_path)
    assert not lost
    assert b"a fork's" not in diff


def test_the_diff_without_the_record(world: Any, tmp_path: Path) -> None:
    """The marker says what was there."""
    world.apply()
    world.path(RECORD).unlink()
    world.path(ALPHA).write_bytes(above(world.path(ALPHA).read_bytes()))
    assert list(tree_diff(world.tree, world.manifest, world.overlay, tmp_path)[1]) == [ALPHA]
    bring_wheel(world, tmp_path)
    diff, lost = tree_diff(world.tree, world.manifest, world.overlay, tmp_path)
    assert not lost
    assert b"# +above = 1" in diff


def bring_wheel(world: Any, cache: Path, files: dict[str, bytes] | None = None) -> Path:
    """Upstream's files as a wheel where downloads lie."""
    cache.mkdir(exist_ok=True)
    (pin,) = world.manifest.releases["1.0"].wheels
    with zipfile.ZipFile(cache / pin.filename, "w") as wheel:
        for path, data in (world.upstream if files is None else files).items():
            wheel.writestr(path, data)
    return cache / pin.filename


def above(data: bytes) -> bytes:
    return b"above = 1\n" + data


def below(data: bytes) -> bytes:
    return data + b"mine = 1\n"


def unmarked(data: bytes) -> bytes:
    return data.replace(b"base-sha256", b"base-\n#sha256").replace(b"patched-bytes", b"patched-\n#bytes")


@pytest.mark.parametrize("form", ["world", "installed"])
@pytest.mark.parametrize("path", [ALPHA, GAMMA])
@pytest.mark.parametrize(
    ("edit", "shown"),
    [(above, b"# +above = 1\n"), (below, b"# +mine = 1\n"), (unmarked, b"\n# -# >>> liger overlay")],
)
def test_the_diff_of_a_file_changed_by_hand(
    form: str,
    path: str,
    edit: Callable[[bytes], bytes],
    shown: bytes,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """It shows both, says what is not the overlay's, and leads back to upstream's files."""
    world = request.getfixturevalue(form)
    before = world.snapshot()
    world.apply()
    other = tree_diff(world.tree, world.manifest, world.overlay, tmp_path / "cache")[0]
    assert b"by hand" not in other
    world.path(path).write_bytes(edit(world.path(path).read_bytes()))
    bring_wheel(world, tmp_path / "cache")
    diff, lost = tree_diff(world.tree, world.manifest, world.overlay, tmp_path / "cache")
    assert not lost
    assert diff.count(b"changed by hand") == 1
    assert b"# %b: changed by hand" % path.encode() in diff
    assert shown in diff
    for tool in (["git", "apply", "--check", "-R"], ["patch", "-p1", "-R", "-s", "--binary"]):
        if shutil.which(tool[0]) is None:
            pytest.skip(f"no {tool[0]} on this machine")
        done = subprocess.run(tool, cwd=world.root, input=diff, capture_output=True)
        assert done.returncode == 0, done.stderr
    assert {p: d for p, d in world.snapshot().items() if d[1] is not None} == {
        p: d for p, d in before.items() if d[1] is not None
    }


@pytest.mark.parametrize("form", ["world", "installed"])
@pytest.mark.parametrize("spoil", ["none", "damaged", "other bytes", "another file"])
def test_the_diff_says_what_is_lost(
    form: str,
    spoil: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsysbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without upstream's bytes the rest is shown; the refusal names each such file and how to get them."""
    world = request.getfixturevalue(form)
    world.apply()
    for path in (BETA, GAMMA):
        world.path(path).write_bytes(above(world.path(path).read_bytes()))
    if spoil != "none":
        wheel = bring_wheel(world, tmp_path, {(BETA if spoil == "other bytes" else ALPHA): b"# other\n"})
        if spoil == "damaged":
            wheel.write_bytes(b"PK")
    monkeypatch.setattr("scripts.source.CACHE", tmp_path)
    monkeypatch.setattr("scripts.diff.load", lambda: world.manifest)
    monkeypatch.setattr("scripts.diff.load_overlay", lambda manifest: world.overlay)
    with pytest.raises(StateError) as caught:
        main(["--tree", str(world.root)])
    diff = capsysbinary.readouterr().out
    assert b"diff --git a/%b" % ALPHA.encode() in diff
    assert b"above = 1" not in diff
    assert caught.value.file.startswith(f"{BETA}, {GAMMA}")
    assert "apply --dry-run megatron==1.0" in caught.value.remedy
    assert "changed by hand" in caught.value.found


def test_the_diff_of_a_replaced_file_and_of_what_is_gone(world: Any, tmp_path: Path) -> None:
    """As a pull or a formatter leaves them: no marker, and the record says what was there."""
    world.apply()
    world.path(ALPHA).write_bytes(b"# a fork's\n")
    world.path(BETA).unlink()
    world.path(f"{PACKAGE}/dispatch.py").write_bytes(b"mine = 1\n")
    diff, lost = tree_diff(world.tree, world.manifest, world.overlay, tmp_path)
    assert list(lost) == [ALPHA]
    bring_wheel(world, tmp_path)
    diff, lost = tree_diff(world.tree, world.manifest, world.overlay, tmp_path)
    assert not lost
    assert b"# +# a fork's\n" in diff
    assert b"# %b: not there" % BETA.encode() in diff
    assert b"# -VERSION = 1\n# +mine = 1\n" in diff


def test_the_diff_of_another_version_changed_by_hand(
    world: Any, later: Callable[[Any], Any], tmp_path: Path
) -> None:
    """What another version wrote is not known by the line, and is not passed off as somebody's."""
    world.apply()
    world.path(ALPHA).write_bytes(below(world.path(ALPHA).read_bytes()))
    newer = later(world)
    diff, lost = tree_diff(newer.tree, newer.manifest, newer.overlay, tmp_path)
    assert not lost
    assert b"another version" in diff
    assert b"\n# +mine" not in diff
    assert b"\n+mine = 1\n" in diff


BYTES = st.lists(st.sampled_from([b"a", b"b\n", b"\n", b"c\r\n", b"\xff", b"@@ -1 +1 @@\n"]), max_size=6).map(
    b"".join
)


@settings(deadline=None, max_examples=25)
@given(before=st.none() | BYTES, after=BYTES)
def test_git_reads_any_diff_back(
    tmp_path_factory: pytest.TempPathFactory, before: bytes | None, after: bytes
) -> None:
    if before == after:
        return
    folder = tmp_path_factory.mktemp("diff")
    file = folder / "f.py"
    file.write_bytes(after)
    command = ["git", "apply", "-R", "--unidiff-zero", "--whitespace=nowarn"]
    done = subprocess.run(command, cwd=folder, input=unified("f.py", before, after), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (file.read_bytes() if file.exists() else None) == before
