# SPDX-License-Identifier: Apache-2.0
"""A kill before any file operation of apply, revert and wheel: status tells, and the command completes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import source, wheel
from scripts.overlay import PACKAGE, RECORD
from scripts.status import HALF, judge
from scripts.verify import inspect

_WRITES = {
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.chmod",
    "os.chown",
    "os.utime",
    "os.truncate",
}


def run_and_kill(step: Callable[[], object], at: int) -> bool:
    """Run ``step`` in a child that kills itself before file operation ``at``; whether it was killed."""
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            writes = event in _WRITES or (
                event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            )
            if writes:
                seen += 1
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(hook)
            step()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def verdict(world: Any) -> str:
    state = inspect(world.tree.read, world.manifest, world.overlay)
    return judge(world.tree, state, world.manifest, world.overlay)


def every_cut(start: Any, step: str, tmp_path: Path, check: Callable[[Any, int], None]) -> int:
    """Cut ``step`` on copies of ``start`` at each operation, check each; how many operations there are."""
    at = 0
    while True:
        at += 1
        cut = start.at(tmp_path / f"cut-{at}")
        shutil.copytree(start.root, cut.root)
        killed = run_and_kill(cut.apply if step == "apply" else cut.revert, at)
        if not killed:
            return at - 1
        check(cut, at)
        shutil.rmtree(cut.root)


def fork(world: Any, name: str) -> Any:
    copy = world.at(world.root.with_name(f"{world.root.name}-{name}"))
    shutil.copytree(world.root, copy.root)
    return copy


@pytest.mark.parametrize("form", ["world", "installed"])
@pytest.mark.parametrize("step", ["apply", "revert"])
def test_apply_and_revert_complete_from_every_cut(
    form: str, step: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    world = request.getfixturevalue(form)
    pristine = world.snapshot()
    done = fork(world, "done")
    done.apply()
    overlaid = done.snapshot()
    start = world if step == "apply" else done
    verdicts = set()

    def check(cut: Any, at: int) -> None:
        now = cut.snapshot()
        said = verdict(cut)
        verdicts.add(said)
        if now == pristine:
            assert said == "pristine"
        elif now == overlaid:
            assert said.startswith("overlaid, version 1")
        else:
            assert said == HALF, (at, said)
        applied, reverted = fork(cut, "applied"), fork(cut, "reverted")
        applied.apply()
        assert applied.snapshot() == overlaid, at
        reverted.revert()
        assert reverted.snapshot() == pristine, at
        applied.revert()
        assert applied.snapshot() == pristine, at
        shutil.rmtree(applied.root)
        shutil.rmtree(reverted.root)

    assert every_cut(start, step, tmp_path, check) > 20
    assert HALF in verdicts


def test_a_change_of_version_completes_from_every_cut_with_either_version(
    installed: Any, tmp_path: Path, later: Callable[[Any], Any]
) -> None:
    old = installed
    pristine = old.snapshot()
    fresh = later(fork(old, "fresh"))
    fresh.apply()
    overlaid = fresh.snapshot()
    old.apply()
    first = old.snapshot()

    def check(cut: Any, at: int) -> None:
        for use, step, expected in (
            (cut, "apply", overlaid),
            (cut, "revert", pristine),
            (old, "apply", first),
            (old, "revert", pristine),
        ):
            copy = use.at(cut.root.with_name("copy"))
            shutil.copytree(cut.root, copy.root)
            getattr(copy, step)()
            assert copy.snapshot() == expected, (at, step, use is old)
            shutil.rmtree(copy.root)

    assert every_cut(later(old), "apply", tmp_path, check) > 20


def test_half_a_temporary_file_is_swept_away(world: Any) -> None:
    pristine = world.snapshot()
    junk = world.tree.temporary("megatron/core/fusions/alpha.py")
    junk.write_bytes(b"def alp")
    assert verdict(world) == HALF
    world.apply()
    assert not junk.exists()
    junk.write_bytes(b"def alp")
    world.tree.temporary(RECORD).write_bytes(b"{")
    world.revert()
    assert world.snapshot() == pristine


def test_an_empty_folder_of_ours_is_swept_away(world: Any) -> None:
    pristine = world.snapshot()
    world.path(f"{PACKAGE}/kernels").mkdir(parents=True)
    assert verdict(world) == HALF
    world.revert()
    assert world.snapshot() == pristine


def test_a_failing_disk_is_a_refusal_that_says_how_to_go_on(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scripts.apply import complete_later
    from scripts.errors import TreeError

    pristine = world.snapshot()
    replace = os.replace
    calls = 0

    def full(a: Path, b: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError(28, "No space left on device", str(a))
        replace(a, b)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(TreeError, match="No space left") as caught, complete_later(world.tree):
        world.apply()
    assert "free some space" in caught.value.remedy
    assert "it completes" in caught.value.remedy
    monkeypatch.undo()
    assert verdict(world) == HALF
    world.revert()
    assert world.snapshot() == pristine


def test_wheel_and_its_download_complete_from_every_cut(
    real_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel is whole or not there, and what a cut leaves is gone after the next run."""
    out, cache = tmp_path / "dist", tmp_path / "cache"
    monkeypatch.setattr(source, "CACHE", cache)
    monkeypatch.setattr(source.fetch_file, "__defaults__", (cache,))

    def make() -> None:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            assert wheel.main([str(real_wheel), "--out", str(out), "--ops", "norms"]) == 0

    make()
    (right,) = (path.read_bytes() for path in out.iterdir())
    at = 0
    while True:
        at += 1
        shutil.rmtree(out)
        shutil.rmtree(cache)
        if not run_and_kill(make, at):
            break
        for path in out.glob("*.whl") if out.exists() else ():
            assert path.read_bytes() == right
        make()
        assert [path.read_bytes() for path in out.iterdir()] == [right]
        assert [path.name for path in cache.iterdir()] == [real_wheel.name]
    assert at > 5
