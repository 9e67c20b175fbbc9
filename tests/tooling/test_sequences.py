# SPDX-License-Identifier: Apache-2.0
"""Any sequence of applies, reverts, kills and edits: status names the state, and one command mends it.

Two overlay versions and every set of ops take turns on one tree. What somebody wrote into it by hand is never
lost, and once that is moved away the tree is as good as any other.
"""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.errors import OverlayError
from scripts.overlay import PACKAGE, RECORD
from scripts.status import HALF, expect

from .conftest import ALPHA, BETA, BETA2, Snapshot, installed_world, make_world, next_version
from .test_kill import run_and_kill, verdict

MINE = b"# mine\n"
DISPATCH = f"{PACKAGE}/dispatch.py"
OPS = ((), ("alpha",), ("beta",))

# A step is its kind and what it is done with: an apply or a revert of an overlay version, perhaps cut short
# before one of its file operations, or something that a person does to a file.
VERSIONS = st.sampled_from((1, 2))
CUTS = st.none() | st.integers(1, 45)
STEPS = st.one_of(
    st.tuples(st.just("apply"), VERSIONS, st.sampled_from(OPS), CUTS),
    st.tuples(st.just("revert"), VERSIONS, CUTS),
    st.tuples(st.just("append"), st.sampled_from((ALPHA, BETA2, DISPATCH))),
    st.tuples(st.just("prepend"), st.sampled_from((ALPHA, BETA))),
    st.tuples(st.just("create"), st.sampled_from((DISPATCH, f"{PACKAGE}/kernels/__init__.py"))),
    st.tuples(st.just("restore"), st.sampled_from((ALPHA, BETA, BETA2))),
    st.tuples(st.just("delete"), st.sampled_from((DISPATCH, f"{PACKAGE}/fresh.py"))),
    st.tuples(st.just("bytecode"), st.sampled_from((ALPHA, DISPATCH))),
)


class Life:
    """A tree, the two overlays that work on it, and what is expected of it."""

    def __init__(self, folder: Path, make: Callable[[Path], Any]) -> None:
        self.world = make(folder / "tree")
        self.folder = folder
        self.pristine = self.world.snapshot()
        self.overlaid: dict[tuple[int, tuple[str, ...]], Snapshot] = {}
        for version in (1, 2):
            for ops in OPS:
                if version == 1 or ops != ("beta",):  # the later one has no op beta
                    copy = self.of(version, self.world.at(folder / "fresh"))
                    shutil.copytree(self.world.root, copy.root)
                    copy.apply(*ops)
                    self.overlaid[version, ops] = copy.snapshot()
                    shutil.rmtree(copy.root)

    @staticmethod
    def of(version: int, world: Any) -> Any:
        return world if version == 1 else next_version(world)

    def take(self, step: tuple[Any, ...]) -> None:
        """One step; a command that refuses has to leave everything as it was."""
        kind, *rest = step
        if kind in ("apply", "revert"):
            version, *ops, cut = rest
            world = self.of(version, self.world)
            if kind == "apply" and (version, ops[0]) not in self.overlaid:
                return
            command = (lambda: world.apply(*ops[0])) if kind == "apply" else world.revert
            self.run(command, cut)
            return
        target = self.world.path(rest[0])
        if kind in ("append", "prepend") and target.exists():
            data = target.read_bytes()
            target.write_bytes(data + MINE if kind == "append" else MINE + data)
        elif kind == "create" and target.parent.exists():
            target.write_bytes(MINE)
        elif kind == "restore":
            target.write_bytes(self.world.upstream[rest[0]])
        elif kind == "delete":
            target.unlink(missing_ok=True)
        elif kind == "bytecode" and target.exists():
            cache = target.parent / "__pycache__" / f"{target.stem}.cpython-311.pyc"
            cache.parent.mkdir(exist_ok=True)
            cache.write_bytes(b"stale")

    def run(self, command: Callable[[], object], cut: int | None) -> None:
        before, mine = self.world.snapshot(), self.mine()
        refused: list[OverlayError] = []

        def step() -> None:
            try:
                command()
            except OverlayError as error:
                refused.append(error)

        if cut is not None:
            run_and_kill(step, cut)
        else:
            step()
        if refused:
            assert self.world.snapshot() == before
        assert self.mine() == mine

    def mine(self) -> dict[str, bytes]:
        """What holds somebody's own lines."""
        files = self.world.snapshot().items()
        return {path: data for path, (_, data) in files if data is not None and MINE in data}

    def check(self) -> None:
        now, mine, said = self.world.snapshot(), self.mine(), verdict(self.world)
        foreign = {*mine} if self.left_alone(mine) else set()
        now = {path: self.pristine[path] if path in foreign else item for path, item in now.items()}
        if mine and not foreign:
            assert said.startswith(("changed by hand", "not supported as it is")), said
        elif now == self.pristine:
            assert said == "pristine"
        elif now in (full := [self.overlaid[1, ops] for ops in OPS]):
            ops = OPS[full.index(now)] or ("alpha", "beta")
            assert said == f"overlaid, version 1, ops {', '.join(ops)}"
        elif now in self.overlaid.values():
            assert said == "overlaid by another version or state of the overlay, ops alpha"
        else:
            assert said == HALF
        for what, good in (("overlaid", self.overlaid[1, ()]), ("pristine", self.pristine)):
            assert self.expected(what) == (now == good and not mine), (what, said)
        self.mended(mine)

    def left_alone(self, mine: dict[str, bytes]) -> bool:
        """Whether somebody's own lines are all in files of ops that the tree is not overlaid with."""
        record = self.world.path(RECORD)
        ops = json.loads(record.read_bytes())["ops"] if record.exists() else ()
        files = {"alpha": {ALPHA}, "beta": {BETA, BETA2}}
        others = set().union(*(paths for op, paths in files.items() if op not in ops))
        return bool(ops) and set(mine) <= others

    def expected(self, what: str) -> bool:
        """Whether ``status --expect`` holds."""
        world = self.world
        try:
            expect(world.tree, what, world.overlay.ops, world.manifest, world.overlay)
        except OverlayError:
            return False
        return True

    def mended(self, mine: dict[str, bytes]) -> None:
        """One command leads to either end, once somebody's own lines are moved away."""
        for command, good in (("apply", self.overlaid[1, ()]), ("revert", self.pristine)):
            copy = self.world.at(self.folder / "copy")
            shutil.copytree(self.world.root, copy.root)
            for path in mine:
                copy.path(path).unlink()
                if path in copy.upstream:
                    copy.path(path).write_bytes(copy.upstream[path])
            getattr(copy, command)()
            assert copy.snapshot() == good, command
            caches = [p.parent.parent / f"{p.name.split('.')[0]}.py" for p in copy.root.rglob("*.pyc")]
            assert all(source.exists() for source in caches)
            shutil.rmtree(copy.root)


@pytest.mark.parametrize("form", ["checkout", "installed"])
def test_any_sequence_ends_in_a_state_that_is_named_and_mended(form: str) -> None:
    make = installed_world if form == "installed" else lambda root: make_world(root).write()

    @settings(deadline=None, max_examples=60)
    @given(steps=st.lists(STEPS, min_size=1, max_size=7))
    def sequence(steps: list[tuple[Any, ...]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            life = Life(Path(folder), make)
            for step in steps:
                life.take(step)
            life.check()

    sequence()


# The owner keeps a write bit: without any, a file or folder is refused.
FILE_MODES = st.integers(0, 0o777).map(lambda mode: mode | 0o600)
FOLDER_MODES = st.integers(0, 0o777).map(lambda mode: mode | 0o700)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), content=st.dictionaries(st.sampled_from((ALPHA, BETA, BETA2)), st.binary(max_size=40)))
def test_apply_and_revert_are_the_identity_on_every_byte_and_mode(
    data: st.DataObject, content: dict[str, bytes]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder) / "tree", content).write()
        world.path("megatron/core/empty").mkdir()
        (world.root / "link").symlink_to("megatron/core")
        for item in sorted(world.root.rglob("*")):
            if not item.is_symlink():
                item.chmod(data.draw(FOLDER_MODES if item.is_dir() else FILE_MODES))
        before = everything(world.root)
        world.apply(*data.draw(st.sampled_from(OPS)))
        assert world.path(RECORD).exists()
        world.revert()
        assert everything(world.root) == before


def everything(root: Path) -> dict[str, tuple[int, str, bytes | None]]:
    """Type, mode, owner and bytes of all there is, where links lead included."""
    found = {}
    for path in root.rglob("*"):
        info = path.lstat()
        kind = f"{stat.S_IFMT(info.st_mode):o} {info.st_uid}:{info.st_gid}"
        plain = path.is_file() and not path.is_symlink()
        data = path.read_bytes() if plain else str(path.readlink()).encode() if path.is_symlink() else None
        found[path.relative_to(root).as_posix()] = (stat.S_IMODE(info.st_mode), kind, data)
    return found
