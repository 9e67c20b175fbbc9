# SPDX-License-Identifier: Apache-2.0
"""Print all that differs from upstream in what the overlay touches, as one unified diff, and what of it is
not the overlay's.

``git apply -R`` or ``patch -p1 -R`` with it takes the overlay out, with what was changed by hand. Upstream's
bytes come from the file itself or, where its upstream part was changed, from a pinned wheel in build/cache/.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import zipfile
import zlib
from pathlib import Path

from scripts import arguments as types
from scripts import source
from scripts.errors import StateError, command
from scripts.manifest import Manifest, load
from scripts.overlay import RECORD, Overlay, load_overlay, sha256, split
from scripts.revert import recorded_lines
from scripts.tree import Tree
from scripts.verify import ABSENT, EDITED, OVERLAID, PRISTINE, FileState, State, inspect

_NO_NEWLINE = b"\\ No newline at end of file\n"


def main(argv: list[str]) -> int:
    """``diff --tree PATH``: the diff on stdout. Raises StateError where upstream's part cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m scripts diff", description=__doc__)
    parser.add_argument("--tree", type=types.path, required=True, metavar="PATH", help="an overlaid tree")
    arguments = parser.parse_args(argv)
    manifest = load()
    tree = Tree.locate(arguments.tree)
    text, lost = tree_diff(tree, manifest, load_overlay(manifest=manifest))
    sys.stdout.flush()
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
    if lost:
        wanted = next((v for path in lost for v in _releases(manifest, path, lost[path])), None)
        remedy = "compare with upstream's by hand"
        if wanted is not None:
            remedy = f"{command('apply', '--dry-run', f'megatron=={wanted}')} brings upstream's, then repeat"
        found = "changed by hand; what the diff does not show of it"
        raise StateError(", ".join(lost), "upstream's bytes above the marker", found, remedy)
    return 0


def tree_diff(
    tree: Tree, manifest: Manifest, overlay: Overlay, cache: Path | None = None
) -> tuple[bytes, dict[str, str]]:
    """The diff of a tree, and the files whose upstream part is nowhere to be had, with its hash."""
    state = inspect(tree.read, manifest, overlay)
    parts: list[bytes] = []
    lost: dict[str, str] = {}
    bases: dict[str, bytes] = {}
    for file in state.files:
        digest = _upstreams_hash(file, state)
        if file.data is None:
            if state.record is not None and file.path in state.record.files:
                parts.append(b"# %b: not there, though the overlay's record names it\n" % file.path.encode())
            continue
        if file.verdict in (PRISTINE, ABSENT) or (file.verdict not in (OVERLAID, EDITED) and digest is None):
            continue
        base = None
        if file.action != "add":
            base = _upstreams(file, digest, manifest, cache)
            if base is None:
                lost[file.path] = digest or ""
                continue
            bases[file.path] = base
        if file.verdict != OVERLAID:
            parts.append(_by_hand(file.path, _expected(file, base, overlay), file.data))
        parts.append(unified(file.path, base, file.data))
    if state.record is not None:
        parts.append(unified(RECORD, None, state.record.data))
    try:
        installed = recorded_lines(tree, state, bases)
    except StateError as error:
        lost.setdefault(error.file, "")
    else:
        if installed is not None and installed[1] != installed[2]:
            parts.append(unified(installed[0], installed[2], installed[1]))
    return b"".join(parts), lost


def _upstreams_hash(file: FileState, state: State) -> str | None:
    """The hash of the upstream file that the overlay went over, by the marker line or by the record."""
    parts = split(file.data or b"")
    if parts is not None:
        return parts.upstream
    before = state.record.files.get(file.path, {}).get("before") if state.record else None
    return before if isinstance(before, str) else None


def _upstreams(file: FileState, digest: str | None, manifest: Manifest, cache: Path | None) -> bytes | None:
    """Upstream's bytes of a file: recovered from it, else from a pinned wheel in the cache."""
    if file.base is not None and sha256(file.base) == digest:
        return file.base
    for version in _releases(manifest, file.path, digest):
        for pin in manifest.releases[version].wheels:
            try:
                with zipfile.ZipFile((cache or source.CACHE) / pin.filename) as wheel:
                    data = wheel.read(file.path)
            except (OSError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error):
                continue  # of another run's making, or damaged: as good as none
            if sha256(data) == digest:
                return data
    return None


def _releases(manifest: Manifest, path: str, digest: str | None) -> tuple[str, ...]:
    """The releases whose file of that path has that hash."""
    pin = manifest.files.get(path)
    variant = pin.variant(digest) if pin is not None and digest is not None else None
    return tuple(v for v in variant.releases if v in manifest.releases) if variant is not None else ()


def _expected(file: FileState, base: bytes | None, overlay: Overlay) -> bytes | None:
    """What the overlay writes there, where it is this one; None where it writes nothing, or is another."""
    if base is None:
        return overlay.added.get(file.path)
    if file.op is None or file.version not in (None, overlay.version):
        return None
    return overlay.over(file.path, base, file.op)


def _by_hand(path: str, expected: bytes | None, found: bytes) -> bytes:
    """Comments above the diff of a file, which ``git apply`` and ``patch`` pass over: what is not the
    overlay's.
    """
    if expected is None:
        said = [b"not by this overlay, or by another version of it as well"]
    else:
        said = [row.rstrip(b"\r\n") for row in _changes(expected, found)]
    rows = [b"# " + path.encode() + b": changed by hand, beside what the overlay writes:", *said]
    return b"\n# ".join(rows) + b"\n"


def _changes(old: bytes, new: bytes) -> list[bytes]:
    """The hunks between two texts, without lines around them."""
    return list(difflib.diff_bytes(difflib.unified_diff, _lines(old), _lines(new), n=0, lineterm=b"\n"))[2:]


def unified(path: str, before: bytes | None, after: bytes) -> bytes:
    """A diff in git's form, from ``before`` (None: no file) to ``after``; any bytes, any line ends."""
    name = path.encode()
    header = b"diff --git a/%b b/%b\n" % (name, name)
    if before is None:
        header += b"new file mode 100644\n"
        if not after:
            header += b"index 0000000..e69de29\n"  # patch takes an empty file for ours by this alone
    old, new = _lines(before or b""), _lines(after)
    body = list(difflib.diff_bytes(difflib.unified_diff, old, new, lineterm=b"\n"))[2:]
    if body:
        header += b"--- " + (b"/dev/null" if before is None else b"a/" + name) + b"\n+++ b/" + name + b"\n"
    return header + b"".join(row if row.endswith(b"\n") else row + b"\n" + _NO_NEWLINE for row in body)


def _lines(data: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", data)
