# SPDX-License-Identifier: Apache-2.0
"""The diffs of ``patches/``: for call sites that no tail below upstream's file can reach.

A patch file belongs to one upstream file. Its ledger header stands on top; below it are unified diffs without
context, each below the sha256 of every upstream content that it fits: ``# fits: HASH becomes: HASH``, or
``# fits: HASH shift: +3 becomes: HASH`` where the same lines stand 3 further down. Nothing is searched for: a
line that goes must stand at its number with these very bytes, and the result must have the hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SUFFIX = ".patch"
LICENCE = b"# SPDX-License-Identifier: Apache-2.0\n"

_FITS = re.compile(rb"# fits: ([0-9a-f]{64}) (?:shift: ([+-]\d+) )?becomes: ([0-9a-f]{64})\n")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@\n")
_COMMENT = b"# "


class MalformedError(Exception):
    """A patch file that is not in form: the line, what was expected there, and what was found."""

    def __init__(self, line: int, expected: str, found: str) -> None:
        super().__init__(line, expected, found)
        self.line, self.expected, self.found = line, expected, found


@dataclass(frozen=True)
class Hunk:
    """Lines that go from line ``old`` on and lines that come, from line ``new`` of the result on.

    Where none goes (or comes), the number is that of the line before, as in every unified diff.
    """

    old: int
    removed: tuple[bytes, ...]
    new: int
    added: tuple[bytes, ...]

    def reverse(self) -> Hunk:
        return Hunk(self.new, self.added, self.old, self.removed)

    def moved(self, lines: int) -> Hunk:
        return Hunk(self.old + lines, self.removed, self.new + lines, self.added)

    def dump(self) -> bytes:
        """The hunk as the diff has it."""
        sides = [
            b"%d" % number if len(rows) == 1 else b"%d,%d" % (number, len(rows))
            for number, rows in ((self.old, self.removed), (self.new, self.added))
        ]
        rows = [b"-" + row for row in self.removed] + [b"+" + row for row in self.added]
        return b"@@ -%b +%b @@\n%b" % (*sides, b"".join(rows))


@dataclass(frozen=True)
class Fit:
    """An upstream content that a diff fits: by how many lines the hunks move, and the result's sha256."""

    shift: int
    becomes: str


@dataclass(frozen=True)
class Diff:
    """One diff: the contents that it fits, by sha256, its hunks, and its first line."""

    fits: Mapping[str, Fit]
    hunks: tuple[Hunk, ...]
    line: int


@dataclass(frozen=True)
class Patch:
    """A patch file: the path in its diffs, the ledger's header, the diffs."""

    path: str
    header: bytes
    diffs: tuple[Diff, ...]

    def fitting(self, sha256: str) -> Diff | None:
        """The diff for an upstream content."""
        return next((diff for diff in self.diffs if sha256 in diff.fits), None)

    def change(self, base: bytes) -> tuple[bytes, tuple[Hunk, ...]] | None:
        """``base`` changed, and by what; None where no diff fits it, or the result is not what is pinned."""
        digest = hashlib.sha256(base).hexdigest()
        diff = self.fitting(digest)
        if diff is None:
            return None
        fit = diff.fits[digest]
        hunks = tuple(hunk.moved(fit.shift) for hunk in diff.hunks)
        after = change(base, hunks)
        if after is None or hashlib.sha256(after).hexdigest() != fit.becomes:
            return None
        return after, hunks

    def draft(self, base: bytes) -> tuple[Diff, str] | None:
        """The diff whose lines stand, moved all alike, at one place of a content, and the line that lists it.

        None where there is no such diff. It is a draft: somebody has to read what stands around that place.
        """
        rows = split_lines(base)
        for diff in reversed(self.diffs):
            anchor = next((hunk for hunk in diff.hunks if hunk.removed), None)
            if anchor is None:
                continue
            size = len(anchor.removed)
            places = [i for i in range(len(rows)) if tuple(rows[i : i + size]) == anchor.removed]
            moves = [i + 1 - anchor.old for i in places]
            results = [(move, change(base, [hunk.moved(move) for hunk in diff.hunks])) for move in moves]
            found = [(move, after) for move, after in results if after is not None]
            if len(found) == 1:
                move, after = found[0]
                names = [hashlib.sha256(data).hexdigest() for data in (base, after)]
                shift = f"shift: {move:+d} " if move else ""
                return diff, f"# fits: {names[0]} {shift}becomes: {names[1]}"
        return None


def split_lines(data: bytes) -> list[bytes]:
    """The lines, each with its newline; a last one may have none."""
    return re.findall(rb"[^\n]*\n|[^\n]+\Z", data)


def change(data: bytes, hunks: Iterable[Hunk]) -> bytes | None:
    """``data`` with the hunks applied; None where a line that goes does not stand at its number."""
    rows = split_lines(data)
    result: list[bytes] = []
    done = 0
    for hunk in hunks:
        begin = hunk.old - bool(hunk.removed)
        end = begin + len(hunk.removed)
        if begin < done or begin > len(rows) or tuple(rows[begin:end]) != hunk.removed:
            return None
        if begin and not rows[begin - 1].endswith(b"\n"):
            return None
        result += [*rows[done:begin], *hunk.added]
        done = end
    return b"".join([*result, *rows[done:]])


def restore(data: bytes, hunks: Iterable[Hunk]) -> bytes | None:
    """What ``change`` made ``data`` from; None where a line that came does not stand at its number."""
    return change(data, [hunk.reverse() for hunk in hunks])


def comments(header: bytes, hunks: Iterable[Hunk]) -> bytes:
    """The header and the hunks as Python comments, so that a changed file says how to change it back."""
    rows = b"".join(hunk.dump() for hunk in hunks).splitlines(keepends=True)
    return header + b"".join(_COMMENT + row for row in rows)


def from_comments(text: bytes) -> tuple[Hunk, ...] | None:
    """The hunks that ``comments`` wrote; None where they are not in form."""
    rows = text.splitlines(keepends=True)
    first = next((i for i, row in enumerate(rows) if _HUNK.fullmatch(row[len(_COMMENT) :])), None)
    if first is None or not all(row.startswith(_COMMENT) for row in rows):
        return None
    try:
        hunks, end = _hunks([row[len(_COMMENT) :] for row in rows], first)
    except MalformedError:
        return None
    return hunks if end == len(rows) else None


def parse(data: bytes) -> Patch:
    """A patch file, read. Raises MalformedError, with the line, for one that is not in form."""
    rows = data.splitlines(keepends=True)
    bad = next((i for i, row in enumerate(rows, 1) if not row.endswith(b"\n") or b"\r" in row), None)
    if bad is not None:
        raise MalformedError(bad, "lines that end in \\n, without \\r", _shown(rows[bad - 1]))
    if not data.startswith(LICENCE):
        raise MalformedError(1, LICENCE.decode().strip(), _shown(rows[0]) if rows else "nothing")
    at = next(
        (i for i, row in enumerate(rows) if not row.startswith(b"#") or _FITS.fullmatch(row)), len(rows)
    )
    for i, row in enumerate(rows[1:at], 2):
        if not row.startswith(_COMMENT):
            raise MalformedError(i, "a comment, “# …”", _shown(row))
    header = b"".join(rows[1:at])
    paths: set[str] = set()
    diffs: list[Diff] = []
    while at < len(rows):
        if rows[at] == b"\n":
            at += 1
            continue
        begin, fits = at, dict[str, Fit]()
        while at < len(rows) and (match := _FITS.fullmatch(rows[at])):
            name = match[1].decode()
            if any(name in known for known in (fits, *(diff.fits for diff in diffs))):
                raise MalformedError(at + 1, "each content in one diff", f"{name[:12]}… again")
            fits[name] = Fit(int(match[2] or 0), match[3].decode())
            at += 1
        if not fits:
            raise MalformedError(at + 1, "# fits: HASH [shift: ±N] becomes: HASH", _shown(rows[at]))
        paths.add(_path(rows, at))
        if len(paths) > 1:
            raise MalformedError(at + 1, "one upstream file", " and ".join(sorted(paths)))
        hunks, at = _hunks(rows, at + 2)
        diffs.append(Diff(fits, hunks, begin + 1))
    if not diffs:
        raise MalformedError(len(rows), "a diff", "the end of the file")
    return Patch(paths.pop(), header, tuple(diffs))


def _path(rows: Sequence[bytes], at: int) -> str:
    """The path that ``--- a/PATH`` and ``+++ b/PATH`` name."""
    names: list[bytes] = []
    for i, prefix in ((at, b"--- a/"), (at + 1, b"+++ b/")):
        row = rows[i] if i < len(rows) else b""
        if not row.startswith(prefix) or (names and row[len(prefix) :] != names[0]):
            expected = prefix + (names[0].rstrip() if names else b"PATH")
            raise MalformedError(i + 1, expected.decode(errors="replace"), _shown(row))
        names.append(row[len(prefix) :])
    return names[0].decode(errors="replace").strip()


def _hunks(rows: Sequence[bytes], at: int) -> tuple[tuple[Hunk, ...], int]:
    """The hunks from row ``at`` on, and the row after the last."""
    found: list[Hunk] = []
    shift = 0
    while at < len(rows) and (head := _HUNK.fullmatch(rows[at])):
        top = at + 1
        old, new = int(head[1]), int(head[3])
        counts = [1 if head[i] is None else int(head[i]) for i in (2, 4)]
        at += 1
        sides: list[tuple[bytes, ...]] = []
        for sign, count in zip((b"-", b"+"), counts):
            sides.append(tuple(row[1:] for row in rows[at : at + count] if row.startswith(sign)))
            if len(sides[-1]) != count:
                line = at + len(sides[-1])
                expected = f"{count} lines that begin with {sign.decode()} (no context)"
                raise MalformedError(
                    line + 1, expected, _shown(rows[line]) if line < len(rows) else "the end"
                )
            at += count
        hunk = Hunk(old, sides[0], new, sides[1])
        if sides[0] == sides[1]:
            raise MalformedError(top, "a hunk that changes something", _shown(head[0]))
        if found and old - bool(sides[0]) < found[-1].old - bool(found[-1].removed) + len(found[-1].removed):
            raise MalformedError(top, "hunks in order, none inside another", _shown(head[0]))
        expected_new = old - bool(sides[0]) + shift + bool(sides[1])
        if new != expected_new or (sides[0] and not old):
            raise MalformedError(top, f"line {expected_new} of the result", f"line {new}")
        shift += len(sides[1]) - len(sides[0])
        found.append(hunk)
    if not found:
        row = _shown(rows[at]) if at < len(rows) else "the end"
        raise MalformedError(at + 1, "@@ -LINE,COUNT +LINE,COUNT @@", row)
    return tuple(found), at


def _shown(row: bytes) -> str:
    return row.decode(errors="replace").rstrip("\n").replace("\r", "\\r") or "an empty line"
