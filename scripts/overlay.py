# SPDX-License-Identifier: Apache-2.0
"""What is laid over a tree: added files, tails and diffs, and the form of a file that was changed.

An extended file is upstream's bytes, a marker line and our tail. The marker carries the length and the hash
of what is above it and the hash of what is below, so a tree tells by itself what belongs to whom, whichever
version of the overlay wrote it. A patched file has changed lines above the marker and the diff, as comments,
below it: taken back, it gives upstream's bytes, whose hash the marker has.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts import manifest as pins
from scripts import patches
from scripts.errors import ExpectationError

ROOT = pins.ROOT
PACKAGE = "megatron/core/liger"
RECORD = f"{PACKAGE}/overlay.json"

MARK = b"# >>> liger overlay for Megatron-Core,"
_MARKER = re.compile(
    rb"^" + MARK + rb" version (\d+) \(op ([a-z0-9_]+)\): [^\r\n]*"
    rb" base-sha256=([0-9a-f]{64}) (base|patched)-bytes=(\d+) tail-sha256=([0-9a-f]{64})\r?\n",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Overlay:
    """Our side: ``added``, ``tails`` and ``diffs`` by path in the tree, ``ops`` that change a file, and our
    commit.

    The commit is in the record of a tree or a wheel, so the same files from two commits, or from a copy
    without its repository, give records (and wheels) that differ in that one line.
    """

    version: int
    ops: tuple[str, ...]
    added: Mapping[str, bytes]
    tails: Mapping[str, bytes]
    commit: str | None = None
    diffs: Mapping[str, patches.Patch] = field(default_factory=dict)

    def changes(self, path: str) -> bool:
        """Whether this overlay changes the upstream file at ``path``."""
        return path in self.tails or path in self.diffs

    def over(self, path: str, base: bytes, op: str) -> bytes | None:
        """What this overlay makes of ``base`` at ``path``; None where it has nothing that fits it."""
        if path in self.tails:
            return extend(base, self.tails[path], op, self.version)
        patch = self.diffs.get(path)
        changed = None if patch is None else patch.change(base)
        if patch is None or changed is None:
            return None
        return join_patched(base, *changed, patch.header, op, self.version)


@dataclass(frozen=True)
class Extended:
    """An extended or a patched file, taken apart. ``base`` is upstream's file when ``base_intact``.

    ``hunks`` are those of a patched file, ``upstream`` is the hash of upstream's file by the marker.
    """

    base: bytes
    version: int
    op: str
    tail: bytes
    base_intact: bool
    tail_intact: bool
    hunks: tuple[patches.Hunk, ...] = ()
    upstream: str = ""

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


def join_patched(
    base: bytes, after: bytes, hunks: tuple[patches.Hunk, ...], header: bytes, op: str, version: int
) -> bytes:
    """The patched file: ``after``, which the hunks made of ``base``, the marker, and what was changed."""
    tail = patches.comments(header, hunks)
    marker = (
        f"# >>> liger overlay for Megatron-Core, version {version} (op {op}): lines above were changed from"
        f" upstream's as the comments below say. base-sha256={sha256(base)} patched-bytes={len(after)}"
        f" tail-sha256={sha256(tail)}\n"
    )
    return after + _newline(after) + marker.encode() + tail


def _newline(base: bytes) -> bytes:
    return b"\n" if base and not base.endswith(b"\n") else b""


def split(data: bytes) -> Extended | None:
    """Take an extended or patched file apart; None for a file without a marker line.

    Of several markers the one that fits what is above and below it counts, else the first that fits what is
    above. Where none does, the first one's parts are returned with ``base_intact`` False.
    """
    found = [_parts(data, match) for match in _MARKER.finditer(data)]
    return max(found, key=lambda parts: (parts.intact, parts.base_intact), default=None)


def _parts(data: bytes, marker: re.Match[bytes]) -> Extended:
    size, tail = int(marker[5]), data[marker.end() :]
    base = data[:size]
    whole = base + _newline(base) == data[: marker.start()]
    hunks: tuple[patches.Hunk, ...] = ()
    if marker[4] == b"patched":
        hunks = patches.from_comments(tail) or ()
        restored = patches.restore(base, hunks)
        base = base if restored is None else restored
    return Extended(
        base=base,
        version=int(marker[1]),
        op=marker[2].decode(),
        tail=tail,
        base_intact=whole and sha256(base) == marker[3].decode(),
        tail_intact=sha256(tail) == marker[6].decode(),
        hunks=hunks,
        upstream=marker[3].decode(),
    )


def load_overlay(root: Path = ROOT, manifest: pins.Manifest | None = None) -> Overlay:
    """Read ``overlay/``, ``kernels/`` and the diffs of ``patches/``.

    Raises ExpectationError when a tail or a diff has no pin or the reverse, and for a malformed diff.
    """
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
    diffs = _load_patches(root, manifest)
    return Overlay(overlay_version(root), manifest.ops, added, tails, _commit(root), diffs)


def _load_patches(root: Path, manifest: pins.Manifest) -> dict[str, patches.Patch]:
    found: dict[str, patches.Patch] = {}
    for path, file in _sources(root / "patches", patches.SUFFIX):
        target = path.removesuffix(patches.SUFFIX)
        where = f"patches/{path}"
        if target not in manifest.files or manifest.files[target].action != "patch":
            raise ExpectationError(where, "a pin in patches/files.json", "none", "pin the file")
        try:
            found[target] = patches.parse(file.read_bytes())
        except patches.MalformedError as error:
            place = f"{where}:{error.line}"
            raise ExpectationError(place, error.expected, error.found, "correct the diff") from error
    for path, pin in manifest.files.items():
        where = f"patches/{path}{patches.SUFFIX}"
        if pin.action == "patch" and path not in found:
            raise ExpectationError(where, "the diffs of a pinned file", "no file", "write or unpin it")
        for variant in pin.variants if pin.action == "patch" else ():
            if variant.has_entries and found[path].fitting(variant.sha256) is None:
                expected = f"a diff for {variant.sha256[:12]}… ({pins.span(variant.releases)})"
                raise ExpectationError(where, expected, "none", "write it")
    return found


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


def _sources(folder: Path, suffix: str = ".py") -> list[tuple[str, Path]]:
    files = [path for path in folder.rglob(f"*{suffix}") if path.is_file()]
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
    return path.endswith((".json", patches.SUFFIX) if path.startswith("patches/") else ".py")


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
