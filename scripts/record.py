# SPDX-License-Identifier: Apache-2.0
"""What a tree says about itself: ``overlay.json``, which we write, and the RECORD of an installed wheel.

RECORD is rewritten so that uninstalling leaves nothing behind. The lines of added files go to its beginning
and a changed file's line gets the new hash and size, so taking both back gives the bytes that were there,
whatever the line ends, the order or the last line.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scripts.errors import StateError
from scripts.manifest import ACTIONS, safe
from scripts.overlay import PACKAGE, RECORD


@dataclass(frozen=True)
class Record:
    """``overlay.json`` of a tree: the parsed document and its bytes."""

    document: Mapping[str, Any]
    data: bytes

    @property
    def files(self) -> Mapping[str, Mapping[str, Any]]:
        files: Mapping[str, Mapping[str, Any]] = self.document["files"]
        return files

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(self.document["ops"])

    @property
    def previous(self) -> Mapping[str, list[str]]:
        """Hashes that an unfinished apply has yet to replace."""
        previous: Mapping[str, list[str]] = self.document.get("previous", {})
        return previous

    def known(self) -> dict[str, list[str]]:
        """For each path the hashes of what the overlay has written there."""
        found = {path: [str(entry["after"])] for path, entry in self.files.items()}
        for path, hashes in self.previous.items():
            found.setdefault(path, []).extend(h for h in hashes if h not in found[path])
        return found


def read_record(data: bytes | None) -> Record | None:
    """Parse ``overlay.json``. Raises StateError when there is a file that is no record of ours."""
    if data is None:
        return None
    try:
        document = json.loads(data)
        record = Record(document, data)
        right = (
            isinstance(document["overlay"], int)
            and all(isinstance(op, str) for op in record.ops)
            and all(isinstance(document.get(key, ""), (str, type(None))) for key in ("release", "commit"))
            and all(_is_hash(e["after"]) and e["action"] in _ACTIONS for e in record.files.values())
            and all(isinstance(hashes, list) for hashes in record.previous.values())
            and all(_is_hash(h) for hashes in record.previous.values() for h in hashes)
            # A record must never lead a command out of the tree, or to itself.
            and all(safe(path) and path != RECORD for path in (*record.files, *record.previous))
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        right = False
    if not right:
        remedy = "restore the file, or move it away to have the tree judged without it"
        raise StateError(RECORD, "a record that the overlay wrote", "something else", remedy)
    return record


_ACTIONS = ("add", *ACTIONS)


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def dump(document: Mapping[str, Any]) -> bytes:
    """The bytes of ``overlay.json`` for a document."""
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def line(path: str, data: bytes) -> bytes:
    """RECORD's line for a file, without a line end, as wheels and installers write it."""
    return f"{path},{_digest(hashlib.sha256(data).digest())},{len(data)}".encode()


def _digest(raw: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def without_overlay(
    installed: bytes, known: Mapping[str, Iterable[str]], bases: Mapping[str, bytes]
) -> bytes:
    """RECORD as it was before apply.

    ``known`` maps paths to the hashes that the overlay has written there, ``bases`` gives upstream's bytes of
    changed files. Lines of our own files go; a changed file's line is put back only when it has one of our
    hashes.
    """
    kept = []
    for row in installed.splitlines(keepends=True):
        path, digest = _fields(row)
        if path == RECORD or (path in known and path.startswith(f"{PACKAGE}/")):
            continue
        if path in bases and digest in {_digest(bytes.fromhex(h)) for h in known.get(path, ())}:
            row = line(path, bases[path]) + row[len(row.rstrip(b"\r\n")) :]
        kept.append(row)
    return b"".join(kept)


def with_overlay(pristine: bytes, after: Mapping[str, bytes], bases: Mapping[str, bytes]) -> bytes:
    """RECORD for a tree that holds ``after``; ``pristine`` comes from ``without_overlay``."""
    rows = pristine.splitlines(keepends=True)
    end = b"\r\n" if rows and rows[0].endswith(b"\r\n") else b"\n"
    lines = {line(path, base): line(path, after[path]) for path, base in bases.items()}
    for i, row in enumerate(rows):
        text = row.rstrip(b"\r\n")
        if text in lines:
            rows[i] = lines[text] + row[len(text) :]
    ours = [line(path, after[path]) + end for path in sorted(after) if path not in bases]
    return b"".join([*ours, *rows])


def orphan(installed: bytes, known: Mapping[str, Iterable[str]], after: Mapping[str, bytes]) -> str | None:
    """An upstream file for which RECORD would keep a hash that the overlay wrote, where ``after`` has other
    bytes or none: nobody could tell later whose line that is.
    """
    for path, found in rows(installed).items():
        ours = {_digest(bytes.fromhex(h)) for h in known.get(path, ())}
        if found in ours and not path.startswith(f"{PACKAGE}/") and found != digest(after.get(path, b"")):
            return path
    return None


def rows(installed: bytes) -> dict[str, str]:
    """Path and hash (as it stands) of each line of RECORD that is one."""
    found = dict(map(_fields, installed.splitlines()))
    found.pop("", None)
    return found


def digest(data: bytes) -> str:
    """The hash of a file as RECORD gives it."""
    return _digest(hashlib.sha256(data).digest())


def complete(installed: bytes, path: str) -> bool:
    """Whether RECORD, at ``path``, reads as installers write it: lines of three columns, one its own."""
    read = [_fields(row)[0] for row in installed.splitlines()]
    return all(read) and path in read


def _fields(row: bytes) -> tuple[str, str]:
    try:
        fields = next(csv.reader([row.decode()]), [])
    except (UnicodeDecodeError, csv.Error):
        fields = []
    return (fields[0], fields[1]) if len(fields) == 3 else ("", "")
