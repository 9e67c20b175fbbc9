# SPDX-License-Identifier: Apache-2.0
"""Print all that the overlay changed in a tree as one unified diff, against upstream's files recovered from
it.

``git apply -R`` or ``patch -p1 -R`` with it takes the overlay out.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys

from scripts import arguments as types
from scripts.errors import StateError
from scripts.manifest import Manifest, load
from scripts.overlay import RECORD, Overlay, load_overlay
from scripts.revert import recorded_lines
from scripts.tree import Tree
from scripts.verify import EDITED, OVERLAID, inspect

_NO_NEWLINE = b"\\ No newline at end of file\n"


def main(argv: list[str]) -> int:
    """``diff --tree PATH``: the diff on stdout. Raises StateError where upstream's part was edited."""
    parser = argparse.ArgumentParser(prog="python -m scripts diff", description=__doc__)
    parser.add_argument("--tree", type=types.path, required=True, metavar="PATH", help="an overlaid tree")
    arguments = parser.parse_args(argv)
    manifest = load()
    text, lost = tree_diff(Tree.locate(arguments.tree), manifest, load_overlay(manifest=manifest))
    sys.stdout.flush()
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
    if lost:
        expected = "upstream's bytes above the marker"
        raise StateError(lost[0], expected, "other bytes", "compare the file with upstream's by hand")
    return 0


def tree_diff(tree: Tree, manifest: Manifest, overlay: Overlay) -> tuple[bytes, list[str]]:
    """The diff of a tree, and the files whose upstream part cannot be recovered."""
    state = inspect(tree.read, manifest, overlay)
    parts, lost = [], []
    for file in state.files:
        if file.verdict not in (OVERLAID, EDITED) or file.data is None:
            continue
        if file.action != "add" and file.base is None:
            lost.append(file.path)
        else:
            parts.append(unified(file.path, file.base, file.data))
    if state.record is not None:
        parts.append(unified(RECORD, None, state.record.data))
    installed = recorded_lines(tree, state)
    if installed is not None and installed[1] != installed[2]:
        parts.append(unified(installed[0], installed[2], installed[1]))
    return b"".join(parts), lost


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
