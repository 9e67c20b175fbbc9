# SPDX-License-Identifier: Apache-2.0
"""What is laid over a tree: added files and tails, and the form of an extended file.

An extended file is upstream's bytes, a marker line and our tail. The marker carries the length and the hash
of what is above it and the hash of what is below, so a tree tells by itself what belongs to whom, whichever
version of the overlay wrote it.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts import manifest as pins
from scripts.errors import ExpectationError

ROOT = pins.ROOT
PACKAGE = "megatron/core/liger"
RECORD = f"{PACKAGE}/overlay.json"

MARK = b"# >>> liger overlay for Megatron-Core,"
_MARKER = re.compile(
    rb"^" + MARK + rb" version (\d+) \(op ([a-z0-9_]+)\): [^\r\n]*"
    rb" base-sha256=([0-9a-f]{64}) base-bytes=(\d+) tail-sha256=([0-9a-f]{64})\r?\n",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Overlay:
    """Our side: ``added`` and ``tails`` by path in the tree, ``ops`` that have a tail, and our commit.

    The commit is in the record of a tree or a wheel, so the same files from two commits, or from a copy
    without its repository, give records (and wheels) that differ in that one line.
    """

    version: int
    ops: tuple[str, ...]
    added: Mapping[str, bytes]
    tails: Mapping[str, bytes]
    commit: str | None = None


@dataclass(frozen=True)
class Extended:
    """An extended file, taken apart. ``base`` is upstream's file when ``base_intact``."""

    base: bytes
    version: int
    op: str
    tail: bytes
    base_intact: bool
    tail_intact: bool

    @property
    def intact(self) -> bool:
        return self.base_intact and self.tail_intact


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def extend(base: bytes, tail: bytes, op: str, version: int | None = None) -> bytes:
    """``base`` with the tail of ``op`` below it; ``version`` defaults to this overlay's."""
    version = overlay_version() if version is None else version
    marker = (
        f"# >>> liger overlay for Megatron-Core, version {version} (op {op}): all below this line was"
        f" added to the upstream file, which ends above it. base-sha256={sha256(base)} base-bytes={len(base)}"
        f" tail-sha256={sha256(tail)}\n"
    )
    return base + _newline(base) + marker.encode() + tail


def _newline(base: bytes) -> bytes:
    return b"\n" if base and not base.endswith(b"\n") else b""


def split(data: bytes) -> Extended | None:
    """Take an extended file apart; None for a file without a marker line.

    Of several markers the one that fits what is above and below it counts, else the first that fits what is
    above. Where none does, the first one's parts are returned with ``base_intact`` False.
    """
    found = [_parts(data, match) for match in _MARKER.finditer(data)]
    return max(found, key=lambda parts: (parts.intact, parts.base_intact), default=None)


def _parts(data: bytes, marker: re.Match[bytes]) -> Extended:
    size, tail = int(marker[4]), data[marker.end() :]
    base = data[:size]
    whole = base + _newline(base) == data[: marker.start()]
    return Extended(
        base=base,
        version=int(marker[1]),
        op=marker[2].decode(),
        tail=tail,
        base_intact=whole and sha256(base) == marker[3].decode(),
        tail_intact=sha256(tail) == marker[5].decode(),
    )


def load_overlay(root: Path = ROOT, manifest: pins.Manifest | None = None) -> Overlay:
    """Read ``overlay/`` and ``kernels/``. Raises ExpectationError when a tail has no pin or the reverse."""
    manifest = pins.load(root) if manifest is None else manifest
    added: dict[str, bytes] = {}
    tails: dict[str, bytes] = {}
    for path, file in _sources(root / "overlay"):
        (added if path.startswith(f"{PACKAGE}/") else tails)[path] = file.read_bytes()
    for path, file in _sources(root / "kernels"):
        added[f"{PACKAGE}/kernels/{path}"] = file.read_bytes()
    expected = {f.path for f in manifest.files.values() if f.action == "extend"}
    for path in sorted(expected ^ set(tails)):
        if path in tails:
            raise ExpectationError(f"overlay/{path}", "a pin in patches/files.json", "none", "pin the file")
        raise ExpectationError(f"overlay/{path}", "the tail of a pinned file", "no file", "write or unpin it")
    return Overlay(overlay_version(root), manifest.ops, added, tails, _commit(root))


def overlay_version(root: Path = ROOT) -> int:
    """``OVERLAY_VERSION`` of ``overlay/megatron/core/liger/version.py``, read without importing it."""
    path = root / "overlay" / PACKAGE / "version.py"
    if path.exists():
        for node in ast.parse(path.read_bytes()).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and target.id == "OVERLAY_VERSION":
                value = getattr(node, "value", None)
                if isinstance(value, ast.Constant) and type(value.value) is int:
                    return value.value
    where = f"overlay/{PACKAGE}/version.py"
    raise ExpectationError(where, "OVERLAY_VERSION = <integer>", "no such line", "restore the file")


OVERLAY_VERSION: int = overlay_version()


def _sources(folder: Path) -> list[tuple[str, Path]]:
    files = [path for path in folder.rglob("*.py") if path.is_file()]
    return sorted((path.relative_to(folder).as_posix(), path) for path in files)


_FOLDERS = ("overlay", "kernels", "patches")


def _commit(root: Path) -> str | None:
    """HEAD of this checkout, with ``+dirty`` when what goes into or decides about a tree differs from it.

    None without git or without a repository here. Git is asked for HEAD's files alone, and those on disk are
    hashed here: its settings, its index, its environment and other files change nothing.
    """
    head = _git(root, "rev-parse", "--verify", "HEAD^{commit}")
    listed = head and _git(root, "ls-tree", "-r", "-z", "--full-tree", head, "--", *_FOLDERS)
    if not head or listed is None:
        return None
    committed = {}
    for row in filter(None, listed.split("\0")):
        kind, _, path = row.partition("\t")
        if _counts(path):
            committed[path] = kind.split()[2]
    algorithm = "sha1" if len(head) == 40 else "sha256"
    found = {}
    for folder in _FOLDERS:
        for file in (root / folder).rglob("*"):
            path = file.relative_to(root).as_posix()
            if _counts(path) and file.is_file():
                data = file.read_bytes()
                found[path] = hashlib.new(algorithm, b"blob %d\0" % len(data) + data).hexdigest()
    return head if found == committed else f"{head}+dirty"


def _counts(path: str) -> bool:
    """Whether a file of this project goes into a tree, or is a pin."""
    return path.endswith(".json" if path.startswith("patches/") else ".py")


def git_environment() -> dict[str, str]:
    """The environment without what points git at another repository, index or configuration."""
    return {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}


def _git(root: Path, *arguments: str) -> str | None:
    # Named outright, the repository is not looked for, and not refused for belonging to another user.
    command = ["git", f"--git-dir={root / '.git'}", *arguments]
    try:
        done = subprocess.run(command, cwd=root, env=git_environment(), capture_output=True)
    except OSError:
        return None
    return done.stdout.decode(errors="surrogateescape").strip() if done.returncode == 0 else None
