# SPDX-License-Identifier: Apache-2.0
"""apply and revert on fake trees: every byte and mode comes back, and what is refused is left alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts import apply as cli_apply
from scripts import files
from scripts import tree as tree_module
from scripts.errors import OverlayError, StateError, TreeError, UsageError
from scripts.overlay import PACKAGE, RECORD, extend
from scripts.verify import OVERLAID, inspect, plan

ALPHA = "megatron/core/fusions/alpha.py"
BETA = "megatron/core/fusions/beta.py"
BETA2 = "megatron/core/tensor_parallel/beta.py"
GAMMA = "megatron/core/models/gamma.py"

CONTENT = st.builds(
    lambda lines, end, last: end.join(lines) + last,
    st.lists(st.sampled_from([b"x = 1", b"y  ", b"", b"\t", b"\xff\x00"]), max_size=4),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"", b"\n", b"\r\n", b"   ", b"\n\n"]),
)
MODES = st.sampled_from([0o644, 0o755, 0o600, 0o664, 0o640])


@settings(deadline=None, max_examples=60)
@given(bases=st.fixed_dictionaries(dict.fromkeys((ALPHA, BETA, BETA2, GAMMA), CONTENT)), mode=MODES)
def test_revert_gives_back_every_byte_and_mode(
    new_world: Callable[..., Any], bases: dict[str, bytes], mode: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = new_world(Path(folder), bases).write()
        world.path(ALPHA).chmod(mode)
        before = world.snapshot()
        world.apply()
        assert world.path(ALPHA).read_bytes().startswith(bases[ALPHA])
        assert world.path(GAMMA).read_bytes().startswith(b"import gamma\n")
        assert stat.S_IMODE(world.path(ALPHA).stat().st_mode) == mode
        world.revert()
        assert world.snapshot() == before


def test_what_apply_writes(world: Any) -> None:
    planned = world.apply()
    for path, tail in world.overlay.tails.items():
        op = world.manifest.files[path].op
        assert world.path(path).read_bytes() == extend(world.upstream[path], tail, op, 1)
    for path, data in world.overlay.added.items():
        assert world.path(path).read_bytes() == data
    record = json.loads(world.path(RECORD).read_bytes())
    assert record["overlay"] == 1
    assert record["release"] is None
    assert record["files_as_in"] == ["1.0"]
    assert record["ops"] == ["alpha", "beta"]
    patched = world.path(GAMMA).read_bytes()
    assert patched.startswith(b"import gamma\ndef gamma(x):\n    y = x\n# line 3 of version 1\n")
    assert b"\n# -    return y\n" in patched
    assert set(record["files"]) == {*world.overlay.tails, *world.overlay.added, GAMMA}
    assert record["files"][GAMMA]["action"] == "patch"
    assert planned.actions[0].path == RECORD
    assert world.path(RECORD).read_bytes().endswith(b"}\n")


def test_added_files_do_not_depend_on_the_umask(world: Any) -> None:
    old = os.umask(0o077)
    try:
        world.apply()
    finally:
        os.umask(old)
    assert stat.S_IMODE(world.path(f"{PACKAGE}/dispatch.py").stat().st_mode) == 0o644
    assert stat.S_IMODE(world.path(f"{PACKAGE}/kernels").stat().st_mode) == 0o755


def test_a_second_apply_writes_nothing(world: Any) -> None:
    world.apply()
    times = {p: p.stat().st_mtime_ns for p in world.root.rglob("*")}
    assert not world.apply().changes
    assert {p: p.stat().st_mtime_ns for p in world.root.rglob("*")} == times


@pytest.mark.parametrize("first", [(), ("alpha",), ("beta",)])
@pytest.mark.parametrize("second", [(), ("alpha",), ("beta",)])
def test_another_set_of_ops_gives_what_it_gives_on_a_pristine_tree(
    new_world: Callable[..., Any], tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    world, direct = new_world(tmp_path / "a").write(), new_world(tmp_path / "b").write()
    before = world.snapshot()
    world.apply(*first)
    world.apply(*second)
    direct.apply(*second)
    assert world.snapshot() == direct.snapshot()
    world.revert()
    assert world.snapshot() == before


def test_a_later_overlay_replaces_an_earlier_one(
    new_world: Callable[..., Any], tmp_path: Path, later: Callable[[Any], Any]
) -> None:
    world, direct = new_world(tmp_path / "a").write(), new_world(tmp_path / "b").write()
    before = world.snapshot()
    world.apply()
    later(world).apply()
    later(direct).apply()
    assert world.snapshot() == direct.snapshot()
    world.revert()  # the earlier overlay knows the later one's files by the record
    assert world.snapshot() == before


def test_revert_on_a_pristine_tree_does_nothing(world: Any) -> None:
    times = {p: p.stat().st_mtime_ns for p in world.root.rglob("*")}
    planned, left = world.revert()
    assert not planned.changes
    assert not left
    assert {p: p.stat().st_mtime_ns for p in world.root.rglob("*")} == times


def test_hard_links_keep_their_content(world: Any, tmp_path: Path) -> None:
    other = tmp_path / "other-name.py"
    os.link(world.path(ALPHA), other)
    world.apply()
    assert other.read_bytes() == world.upstream[ALPHA]
    assert world.path(ALPHA).read_bytes() != world.upstream[ALPHA]


def test_a_changed_file_never_keeps_its_whole_second(world: Any) -> None:
    far = 4_000_000_000
    os.utime(world.path(ALPHA), (far, far))
    seen = [int(world.path(path).stat().st_mtime) for path in (ALPHA, BETA)]
    for step in (world.apply, world.revert, world.apply):
        step()
        now = [int(world.path(path).stat().st_mtime) for path in (ALPHA, BETA)]
        assert all(a < b for a, b in zip(seen, now, strict=True))
        seen = now


def test_bytecode_of_touched_files_goes_and_other_bytecode_stays(world: Any) -> None:
    cache = world.path("megatron/core/fusions/__pycache__")
    cache.mkdir()
    gone = [cache / f"alpha.cpython-{v}.pyc" for v in ("310", "311.opt-1", "312")]
    stay = [cache / "alpha_two.cpython-311.pyc", cache / "other.cpython-311.pyc"]
    for path in (*gone, *stay):
        path.write_bytes(b"stale")
    world.apply()
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in stay)
    ours = world.path(f"{PACKAGE}/kernels/__pycache__/__init__.cpython-311.pyc")
    ours.parent.mkdir()
    ours.write_bytes(b"x")
    world.revert()
    assert not world.path(PACKAGE).exists()


def test_a_stranger_in_our_folder_stays(world: Any) -> None:
    world.apply()
    notes = world.path(f"{PACKAGE}/notes.txt")
    notes.write_text("mine")
    _, left = world.revert()
    assert left == [f"{PACKAGE}/notes.txt"]
    assert notes.read_text() == "mine"
    assert [p.name for p in world.path(PACKAGE).iterdir()] == ["notes.txt"]


def test_a_version_that_says_otherwise_is_accepted_by_its_files(world: Any) -> None:
    world.path("megatron/core/package_info.py").write_bytes(
        b'MAJOR = 9\nMINOR = 9\nPATCH = 0\nPRE_RELEASE = "rc0"\n'
    )
    assert world.apply().files_as_in == ("1.0",)
    assert world.tree.says() == "9.9.0rc0"


def test_an_empty_file_that_is_pinned_as_such(new_world: Callable[..., Any], tmp_path: Path) -> None:
    world = new_world(tmp_path / "tree", {ALPHA: b""}).write()
    world.apply()
    assert world.path(ALPHA).read_bytes().startswith(b"# >>> liger overlay")
    world.revert()
    assert world.path(ALPHA).read_bytes() == b""


def edit(path: str, change: Callable[[bytes], bytes]) -> Callable[[Any], None]:
    def do(world: Any) -> None:
        target = world.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(change(target.read_bytes() if target.exists() else b""))

    return do


def link_file(world: Any) -> None:
    world.path(ALPHA).rename(world.root / "elsewhere.py")
    world.path(ALPHA).symlink_to(world.root / "elsewhere.py")


def link_folder(world: Any) -> None:
    (world.root / "elsewhere").mkdir()
    world.path(PACKAGE).symlink_to(world.root / "elsewhere")


def read_only(*paths: str) -> Callable[[Any], None]:
    def do(world: Any) -> None:
        for path in paths or [p.relative_to(world.root) for p in world.root.rglob("*")]:
            target = world.root / path
            target.chmod(target.stat().st_mode & ~0o222)

    return do


REFUSED = {
    "one byte changed": (edit(ALPHA, lambda d: d.replace(b"x", b"z", 1)), TreeError, ALPHA, "parity"),
    "CRLF": (edit(BETA, lambda d: d.replace(b"\n", b"\r\n")), TreeError, BETA, "autocrlf"),
    "missing": (lambda w: w.path(ALPHA).unlink(), TreeError, ALPHA, "restore"),
    "emptied": (edit(ALPHA, lambda d: b""), TreeError, ALPHA, "parity"),
    "other file there": (
        edit(f"{PACKAGE}/dispatch.py", lambda d: b"mine"), StateError, f"{PACKAGE}/dispatch.py", "move",
    ),
    "other record": (edit(RECORD, lambda d: b"{}"), StateError, RECORD, "move"),
    "no record": (edit(RECORD, lambda d: b"not json"), StateError, RECORD, "move"),
    "our folder is a file": (edit(PACKAGE, lambda d: b"mine"), StateError, PACKAGE, "move"),
    "a folder in the way": (
        lambda w: w.path(f"{PACKAGE}/kernels/__init__.py").mkdir(parents=True),
        TreeError, f"{PACKAGE}/kernels/__init__.py", "move",
    ),
    "linked file": (link_file, TreeError, ALPHA, "link"),
    "linked folder": (link_folder, TreeError, PACKAGE, "link"),
    "read-only": (read_only(), TreeError, "megatron/core", "chmod"),
    "read-only file": (read_only(BETA), TreeError, BETA, "chmod"),
    "read-only folder": (read_only("megatron/core/fusions"), TreeError, "megatron/core/fusions", "chmod"),
    "no megatron": (
        lambda w: w.path("megatron/core/__init__.py").unlink(), TreeError, "tree", "give the folder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_nothing_written(world: Any, case: str) -> None:
    spoil, error, file, remedy = REFUSED[case]
    spoil(world)
    before = world.snapshot()
    times = {p: p.lstat().st_mtime_ns for p in world.root.rglob("*")}
    with pytest.raises(error) as caught:
        world.apply()
    assert isinstance(caught.value, OverlayError)
    assert file in caught.value.file
    assert remedy in caught.value.remedy
    assert caught.value.expected
    assert caught.value.found
    assert world.snapshot() == before
    assert {p: p.lstat().st_mtime_ns for p in world.root.rglob("*")} == times


EDITED = {
    "tail": (edit(ALPHA, lambda d: d + b"# mine\n"), ALPHA),
    "above the marker": (edit(ALPHA, lambda d: b"# mine\n" + d), ALPHA),
    "added file": (edit(f"{PACKAGE}/dispatch.py", lambda d: d + b"# mine\n"), f"{PACKAGE}/dispatch.py"),
    "line ends": (edit(BETA, lambda d: d.replace(b"\n", b"\r\n")), BETA),
}


@pytest.mark.parametrize("case", EDITED)
@pytest.mark.parametrize("step", ["apply", "revert", "other ops"])
def test_changes_by_hand_are_never_overwritten(world: Any, case: str, step: str) -> None:
    world.apply()
    spoil, file = EDITED[case]
    spoil(world)
    before = world.snapshot()
    with pytest.raises(StateError) as caught:
        world.revert() if step == "revert" else world.apply(*(["beta"] if step == "other ops" else []))
    assert caught.value.file == file
    assert world.snapshot() == before


def test_revert_refuses_a_read_only_tree(world: Any) -> None:
    world.apply()
    read_only()(world)
    before = world.snapshot()
    with pytest.raises(TreeError):
        world.revert()
    assert world.snapshot() == before
    for path in world.root.rglob("*"):
        path.chmod(path.stat().st_mode | 0o200)


def test_revert_asks_for_an_extended_file_that_is_gone(world: Any) -> None:
    world.apply()
    world.path(ALPHA).unlink()
    with pytest.raises(StateError, match=ALPHA):
        world.revert()
    world.path(ALPHA).write_bytes(world.upstream[ALPHA])  # as a checkout of the file does
    world.revert()
    assert not world.path(PACKAGE).exists()


def test_the_refusal_names_the_ops_that_still_apply(world: Any) -> None:
    edit(BETA2, lambda d: d + b"#")(world)
    with pytest.raises(TreeError) as caught:
        world.apply()
    assert "--ops alpha still applies" in caught.value.remedy
    assert not world.path(PACKAGE).exists()
    assert world.apply("alpha").ops == ("alpha",)
    with pytest.raises(TreeError) as caught:
        world.apply("beta")
    assert "--ops" not in caught.value.remedy


@pytest.mark.parametrize("ops", [("gamma",), ("alpha", "gamma"), ("",)])
def test_unknown_ops_are_named(world: Any, ops: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="alpha, beta"):
        world.apply(*ops)


def test_a_wheel_of_another_release_is_refused(world: Any) -> None:
    from scripts.manifest import Release

    with pytest.raises(TreeError, match=r"as in 1\.0"):
        plan(world.tree.read, world.manifest, world.overlay, None, Release("2.0", ()))


@pytest.mark.parametrize("path", ["../outside.py", "/etc/passwd", "megatron/../../outside.py", "outside.py"])
def test_a_record_never_leads_out_of_the_tree(world: Any, tmp_path: Path, path: str) -> None:
    victim = tmp_path / "outside.py"
    victim.write_bytes(b"")
    world.apply()
    record = json.loads(world.path(RECORD).read_bytes())
    entry = {"action": "add", "op": None, "before": None, "after": "e3b0c44298fc1c149afbf4c8996fb924"}
    record["files"][path] = entry
    world.path(RECORD).write_text(json.dumps(record))
    with pytest.raises(StateError, match=r"overlay\.json"):
        world.revert()
    assert victim.exists()


def _apply_at_once(world: Any, barrier: Any) -> None:
    barrier.wait(10)
    world.apply()


def test_two_applies_at_once(new_world: Callable[..., Any], tmp_path: Path) -> None:
    world, alone = new_world(tmp_path / "a").write(), new_world(tmp_path / "b").write()
    alone.apply()
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    workers = [context.Process(target=_apply_at_once, args=(world, barrier)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert world.snapshot() == alone.snapshot()


def _turn(world: Any, barrier: Any, step: str) -> None:
    barrier.wait(10)
    for _ in range(5):
        getattr(world, step)()


def test_applies_and_reverts_at_once(new_world: Callable[..., Any], tmp_path: Path) -> None:
    """One after the other: the tree is never between two of them."""
    world, alone = new_world(tmp_path / "a").write(), new_world(tmp_path / "b").write()
    ends = [alone.snapshot()]
    alone.apply()
    ends.append(alone.snapshot())
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    steps = ("apply", "revert") * 2
    workers = [context.Process(target=_turn, args=(world, barrier, step)) for step in steps]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert world.snapshot() in ends


def test_a_tree_of_hard_links_leaves_the_other_names_alone(installed: Any, tmp_path: Path) -> None:
    """As uv installs: each file is a link to its cache, which other environments share."""
    cache = {path: tmp_path / "cache" / str(i) for i, path in enumerate(sorted(installed.root.rglob("*.*")))}
    (tmp_path / "cache").mkdir()
    for path, name in cache.items():
        if path.is_file():
            os.link(path, name)
    before = {name: name.read_bytes() for name in cache.values() if name.exists()}
    modes = {name: name.stat().st_mode for name in before}
    for step in (installed.apply, lambda: installed.apply("beta"), installed.revert):
        step()
        assert {name: name.read_bytes() for name in before} == before
        assert {name: name.stat().st_mode for name in before} == modes


SHM = Path("/dev/shm")


@pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="needs /dev/shm")
def test_a_tree_on_another_file_system(new_world: Callable[..., Any], tmp_path: Path) -> None:
    """Nothing is renamed from one to the other, whatever the folder for temporary files."""
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        assert os.stat(folder).st_dev != os.stat(tempfile.gettempdir()).st_dev
        world = new_world(Path(folder) / "tree").write()
        before = world.snapshot()
        world.apply()
        assert world.path(RECORD).exists()
        world.revert()
        assert world.snapshot() == before


def test_a_tree_that_is_a_link_to_another_place(new_world: Callable[..., Any], tmp_path: Path) -> None:
    """The folder that is given may be a link, and the one above it; a file of the tree may not."""
    world = new_world(tmp_path / "real" / "tree").write()
    before = world.snapshot()
    (tmp_path / "link").symlink_to("real/tree")
    linked = world.at(tmp_path / "link")
    linked.apply()
    assert world.path(RECORD).exists()
    linked.revert()
    assert world.snapshot() == before


def test_a_tree_that_is_a_link_inside(world: Any) -> None:
    """The folder megatron of a checkout that leads elsewhere, say to another checkout."""
    (world.root / "megatron").rename(world.root / "elsewhere")
    (world.root / "megatron").symlink_to("elsewhere")
    before = world.snapshot()
    for step in (world.apply, world.revert):
        with pytest.raises(TreeError) as caught:
            step()
        assert caught.value.found == "a symbolic link"
        assert "the folder that the link leads into" in caught.value.remedy
    assert world.snapshot() == before


def test_the_refusal_says_how_to_keep_both(world: Any) -> None:
    world.apply()
    world.path(ALPHA).write_bytes(world.path(ALPHA).read_bytes() + b"# mine\n")
    with pytest.raises(StateError) as caught:
        world.revert()
    for word in ("save the change", "diff", "restore upstream's file", "apply"):
        assert word in caught.value.remedy


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have a file of another user")
def test_a_file_of_another_user_stays_theirs(world: Any) -> None:
    """Root works on somebody's tree."""
    os.chown(world.path(ALPHA), 65534, 65534)
    world.apply()
    found = world.path(ALPHA).stat()
    assert (found.st_uid, found.st_gid) == (65534, 65534)
    world.revert()
    found = world.path(ALPHA).stat()
    assert (found.st_uid, found.st_gid) == (65534, 65534)


def test_a_tree_that_stays_locked_is_refused(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "_PATIENCE_S", 0.0)
    before = world.snapshot()
    with world.tree.lock(), pytest.raises(StateError, match="another command at work"):
        world.apply()
    assert world.snapshot() == before


def test_a_file_that_is_a_link(world: Any, tmp_path: Path) -> None:
    """Out of a cache that other environments share, say: nothing may be written there."""
    shared = tmp_path / "cache.py"
    world.path(ALPHA).rename(shared)
    world.path(ALPHA).symlink_to(shared)
    before = shared.read_bytes()
    with pytest.raises(TreeError) as caught:
        world.apply()
    assert caught.value.found == "a symbolic link"
    assert "--link-mode copy" in caught.value.remedy
    assert "the folder that the link leads into" not in caught.value.remedy
    assert shared.read_bytes() == before


def test_a_package_info_that_is_a_link_decides_nothing(world: Any, tmp_path: Path) -> None:
    info = world.path("megatron/core/package_info.py")
    info.rename(tmp_path / "elsewhere.py")
    info.symlink_to(tmp_path / "elsewhere.py")
    assert world.tree.says() is None
    assert cli_apply.caveat(world.tree, ("1.0",)).endswith("does not make the tree a release")


def test_a_package_cache_is_no_remedy(tmp_path: Path) -> None:
    for folder in ("archive-v0/abc", "mine"):
        core = tmp_path / "cache" / folder / "megatron" / "core"
        core.mkdir(parents=True)
        (core / "__init__.py").write_bytes(b"")
    with pytest.raises(TreeError) as caught:
        tree_module.Tree.locate(tmp_path)
    assert caught.value.remedy == f"use --tree {tmp_path / 'cache' / 'mine'}"


@pytest.mark.parametrize("ops", [(), ("alpha",), ("beta",), ("alpha", "beta")])
def test_the_pins_say_of_which_op_a_file_is(world: Any, new_world: Any, ops: tuple[str, ...]) -> None:
    """Not the marker line, which somebody, or another version of the overlay, may have written otherwise."""
    world.apply(*ops)
    wanted = world.snapshot()
    world.revert()
    pristine = world.snapshot()
    world.apply()
    path = world.path(ALPHA)
    assert path.read_bytes().count(b"(op alpha)") == 1
    path.write_bytes(path.read_bytes().replace(b"(op alpha)", b"(op beta)"))
    (state,) = (f for f in inspect(world.tree.read, world.manifest, world.overlay).files if f.path == ALPHA)
    assert (state.op, state.verdict, state.current) == ("alpha", OVERLAID, False)
    world.apply(*ops)
    assert world.snapshot() == wanted
    path.write_bytes(path.read_bytes().replace(b"(op alpha)", b"(op beta)"))
    world.revert()
    assert world.snapshot() == pristine


def test_a_command_that_waits_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "_QUIET_S", 0.0)
    with files.locked(tmp_path), pytest.raises(StateError) as caught, files.locked(tmp_path, 0.2):
        pass
    assert caught.value.found == "another command at work there"
    assert capsys.readouterr().err == f"waiting for another command at work in {tmp_path}\n"
    with files.locked(tmp_path, 0.0) as alone:  # let go of by then
        assert alone
    assert capsys.readouterr().err == ""


def test_the_trees_near_a_wrong_folder_are_named(world: Any) -> None:
    for path in (world.root.parent, world.root / "megatron", world.root / "megatron" / "core"):
        with pytest.raises(TreeError) as caught:
            tree_module.Tree.locate(path)
        assert f"--tree {world.root}" in caught.value.remedy


def test_the_source_of_an_editable_install_is_named(world: Any, tmp_path: Path) -> None:
    info = tmp_path / "site" / "megatron_core-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "direct_url.json").write_text(
        json.dumps({"url": world.root.as_uri(), "dir_info": {"editable": True}})
    )
    with pytest.raises(TreeError) as caught:
        tree_module.Tree.locate(tmp_path / "site")
    assert f"--tree {world.root}" in caught.value.remedy
