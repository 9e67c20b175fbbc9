# SPDX-License-Identifier: Apache-2.0
"""Tiny fake trees with pins and an overlay of their own, and the real release's wheel."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from scripts import source
from scripts.apply import apply_tree
from scripts.manifest import Manifest, PinnedFile, Release, TouchedFile, Variant, load
from scripts.overlay import PACKAGE, Overlay, sha256
from scripts.patches import Diff, Fit, Hunk, Patch, change
from scripts.record import line
from scripts.revert import Reverted, revert_tree
from scripts.tree import Tree
from scripts.verify import Plan

ALPHA = "megatron/core/fusions/alpha.py"
BETA = "megatron/core/fusions/beta.py"
BETA2 = "megatron/core/tensor_parallel/beta.py"
GAMMA = "megatron/core/models/gamma.py"
RECORD_FILE = "megatron_core-1.0.dist-info/RECORD"

Snapshot = dict[str, tuple[int, bytes | None]]


@dataclass(frozen=True)
class World:
    """A fake release 1.0 whose op alpha has one file and whose op beta has two and a patched, optional one,
    and an overlay for it."""

    root: Path
    upstream: Mapping[str, bytes]
    manifest: Manifest
    overlay: Overlay
    extra: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def tree(self) -> Tree:
        return Tree.locate(self.root)

    def path(self, path: str) -> Path:
        return self.root / path

    def write(self) -> World:
        for path, data in {**self.upstream, **self.extra}.items():
            self.path(path).parent.mkdir(parents=True, exist_ok=True)
            self.path(path).write_bytes(data)
        return self

    def apply(self, *ops: str) -> Plan:
        return apply_tree(self.root, ops or None, self.manifest, self.overlay)

    def revert(self) -> tuple[Reverted, list[str]]:
        return revert_tree(self.root, self.manifest, self.overlay)

    def snapshot(self) -> Snapshot:
        return snapshot(self.root)

    def at(self, root: Path) -> World:
        return replace(self, root=root)


def snapshot(root: Path) -> Snapshot:
    """Mode and bytes of every file and folder; bytecode caches aside."""
    found: Snapshot = {}
    for path in root.rglob("*"):
        if "__pycache__" not in path.parts:
            data = path.read_bytes() if path.is_file() else None
            found[path.relative_to(root).as_posix()] = (stat.S_IMODE(path.lstat().st_mode), data)
    return found


def make_patch(base: bytes, version: int = 1) -> Patch:
    """The patch of GAMMA: other text for its last whole line (if it has one), and a line at its beginning."""
    rows = base.splitlines(keepends=True) if b"\r" not in base else []
    number = max((i for i, row in enumerate(rows, 1) if row.endswith(b"\n")), default=0)
    new = b"# line %d of version %d\n" % (number, version)
    hunks = (Hunk(0, (), 1, (b"import gamma\n",)),)
    if number:
        hunks += (Hunk(number, (rows[number - 1],), number + 1, (new, new)),)
    after = change(base, hunks)
    assert after is not None
    header = b"# entry: gamma\n#   why: version %d\n" % version
    return Patch(GAMMA, header, (Diff({sha256(base): Fit(0, sha256(after))}, hunks, 1),))


def make_world(root: Path, bases: Mapping[str, bytes] | None = None, *, version: int = 1) -> World:
    """A world that is not written yet; ``bases`` replaces upstream's bytes of some files."""
    upstream = {
        "megatron/core/__init__.py": b"",
        "megatron/core/package_info.py": b'MAJOR = 1\nMINOR = 0\nPATCH = 0\nPRE_RELEASE = ""\n',
        "megatron/core/fusions/other.py": b"x = 1\n",
        ALPHA: b"def alpha(x):\n    return x\n",
        BETA: b"def beta(x):\n    return -x\n",
        BETA2: b"def beta2(x):\n    return 2 * x\n",
        GAMMA: b"def gamma(x):\n    y = x\n    return y\n",
        **(bases or {}),
    }
    ops = {ALPHA: "alpha", BETA: "beta", BETA2: "beta"}
    files = {
        path: TouchedFile(path, "extend", op, (), (Variant(sha256(upstream[path]), ("1.0",), "made here"),))
        for path, op in ops.items()
    }
    variant = Variant(sha256(upstream[GAMMA]), ("1.0",), "made here")
    files[GAMMA] = TouchedFile(GAMMA, "patch", "beta", (), (variant,), optional=True)
    release = Release(
        "1.0", (PinnedFile("megatron_core-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", "0" * 64),)
    )
    overlay = Overlay(
        version=version,
        ops=("alpha", "beta"),
        added={
            f"{PACKAGE}/__init__.py": b"",
            f"{PACKAGE}/dispatch.py": b"VERSION = %d\n" % version,
            f"{PACKAGE}/kernels/__init__.py": b"# kernels\n",
        },
        tails={path: b"# tail %d of %b\n" % (version, path.encode()) for path in ops},
        commit=None,
        diffs={GAMMA: make_patch(upstream[GAMMA], version)},
    )
    return World(root, upstream, Manifest({"1.0": release}, {"1.1": "wrong version"}, files), overlay)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests kill processes, not machines: what is written need not reach the disk."""
    monkeypatch.setattr("os.fsync", lambda fd: None)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path / "tree").write()


@pytest.fixture(scope="session")
def new_world() -> Callable[..., World]:
    return make_world


def installed_world(root: Path) -> World:
    """A world in a site-packages folder: with RECORD as pip writes it, and another package beside it."""
    world = make_world(root)
    other = {"other/__init__.py": b"y = 2\n"}
    rows = [line(path, data) + b"\r\n" for path, data in {**world.upstream, **other}.items()]
    rows.append(b"megatron/core/fusions/__pycache__/alpha.cpython-311.pyc,,\r\n")
    rows.append(RECORD_FILE.encode() + b",,\r\n")
    return replace(world, extra={**other, RECORD_FILE: b"".join(sorted(rows))}).write()


@pytest.fixture
def installed(tmp_path: Path) -> World:
    return installed_world(tmp_path / "site-packages")


def next_version(world: World) -> World:
    """The same tree seen by a later overlay: other bytes, one file gone, one new, and no op beta."""
    later = make_world(world.root, version=2)
    added = {path: data for path, data in later.overlay.added.items() if "kernels" not in path}
    added[f"{PACKAGE}/fresh.py"] = b"new = True\n"
    files = {ALPHA: later.manifest.files[ALPHA]}
    tails = {ALPHA: later.overlay.tails[ALPHA]}
    return replace(
        world,
        manifest=replace(later.manifest, files=files),
        overlay=replace(later.overlay, ops=("alpha",), added=added, tails=tails, diffs={}),
    )


@pytest.fixture
def later() -> Callable[[World], World]:
    return next_version


@pytest.fixture(scope="session")
def real_wheel() -> Path:
    """Upstream's wheel of 0.16.1 for the running Python, as pinned."""
    return source.fetch(load().release("megatron==0.16.1"))


@pytest.fixture
def real_tree(real_wheel: Path, tmp_path: Path) -> Path:
    """The wheel unpacked, with dist-info: what a site-packages folder holds."""
    source.unpack(real_wheel, tmp_path / "unpacked")
    return tmp_path / "unpacked"


@pytest.fixture
def take_snapshot() -> Callable[[Path], Snapshot]:
    return snapshot
