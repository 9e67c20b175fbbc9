# SPDX-License-Identifier: Apache-2.0
"""The two texts of a wheel that name its version and its files: METADATA and RECORD.

Both are edited line by line: what is not meant to change keeps every byte, its order and its line ends.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from scripts.wheelfile import refusal

PRIVATE = b"Private :: Do Not Upload"  # package indexes refuse an upload that carries it
_FIRST_WITH_LICENSE_FILES = (2, 4)


@dataclass(frozen=True)
class _Field:
    name: bytes
    value: bytes
    start: int
    end: int  # the index of the line after its last one


def metadata_version(data: bytes, label: str) -> str:
    """The ``Version`` that a METADATA file states. Raises SourceError unless it does so once."""
    fields, _ = _fields(io.BytesIO(data).readlines(), label)
    return _single(fields, b"Version", label).value.decode(errors="replace")


def edit_metadata(
    data: bytes, label: str, *, version: str, notice: str, license_files: Iterable[str]
) -> bytes:
    """METADATA of a modified package: another ``Version``, not for upload, ``notice`` before the description.

    ``license_files`` (relative to ``dist-info/licenses/``) are declared where the file's Metadata-Version
    knows ``License-File``, 2.4 and later. Every other byte stays. Raises SourceError for a file whose headers
    do not parse, or that keeps its description in a header.
    """
    lines = io.BytesIO(data).readlines()
    fields, n_headers = _fields(lines, label)
    newline = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    if any(field.name.lower() == b"description" for field in fields):
        raise refusal(label, "the description in the body", "a Description header")

    at_version = _single(fields, b"Version", label).start
    inserted: dict[int, list[bytes]] = {}

    def insert(name: bytes, values: list[bytes]) -> None:
        present = [field for field in fields if field.name.lower() == name.lower()]
        new = [value for value in values if value not in {field.value for field in present}]
        place = present[-1].end if present else n_headers
        inserted.setdefault(place, []).extend(name + b": " + value + newline for value in new)

    insert(b"Classifier", [PRIVATE])
    known = _single(fields, b"Metadata-Version", label).value.decode(errors="replace")
    if not re.fullmatch(r"[0-9]+\.[0-9]+", known):
        raise refusal(label, "Metadata-Version: NUMBER.NUMBER", known)
    if tuple(map(int, known.split("."))) >= _FIRST_WITH_LICENSE_FILES:
        insert(b"License-File", [name.encode() for name in license_files])

    result: list[bytes] = []
    for index, line in enumerate(lines[:n_headers]):
        result += inserted.get(index, [])
        result.append(b"Version: " + version.encode() + newline if index == at_version else line)
    if result and not result[-1].endswith(b"\n"):
        result.append(newline)
    result += inserted.get(n_headers, [])
    result.append(newline)
    result += [line.encode() + newline for line in notice.splitlines()]
    body = lines[n_headers + 1 :]
    return b"".join(result + ([newline, *body] if body else []))


def _fields(lines: list[bytes], label: str) -> tuple[list[_Field], int]:
    """The header fields, and the number of header lines (a blank line follows them unless the file ends)."""
    fields: list[_Field] = []
    for index, line in enumerate(lines):
        text = line.rstrip(b"\r\n")
        if not text:
            return fields, index
        if text[:1] in (b" ", b"\t"):
            if not fields:
                raise refusal(label, "header fields", "a continuation line first")
            last = fields[-1]
            fields[-1] = _Field(last.name, last.value, last.start, index + 1)
            continue
        name, colon, value = text.partition(b":")
        if not colon or not name or name.strip() != name:
            raise refusal(label, "NAME: VALUE", text.decode(errors="replace"))
        fields.append(_Field(name, value.strip(), index, index + 1))
    return fields, len(lines)


def _single(fields: list[_Field], name: bytes, label: str) -> _Field:
    found = [field for field in fields if field.name.lower() == name.lower()]
    if len(found) != 1 or not found[0].value or found[0].end != found[0].start + 1:
        raise refusal(label, f"one {name.decode()} of one line", f"{len(found)}")
    return found[0]


def record_line(path: str, content: bytes, ending: str = "\n") -> str:
    """One line of RECORD: path, sha256 (unpadded urlsafe base64) and size."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return _line([path, f"sha256={digest}", str(len(content))], ending)


def _line(row: list[str], ending: str) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator=ending).writerow(row)
    return text.getvalue()


def _rows(data: bytes, label: str) -> list[tuple[str, str, list[str]]]:
    """Each line of a RECORD: as it stands, its ending, and its three columns (none for a blank line)."""
    rows = []
    for raw in io.BytesIO(data):
        try:
            line = raw.decode()
            text = line.rstrip("\r\n")
            row = next(csv.reader([text]), [])
        except (UnicodeDecodeError, csv.Error) as error:
            raise refusal(label, "path,hash,size in UTF-8", str(error)) from error
        if row and len(row) != 3:
            raise refusal(label, "path,hash,size", text)
        rows.append((line, line[len(text) :], row))
    return rows


def edit_record(
    data: bytes,
    label: str,
    *,
    path: str,
    rename: Callable[[str], str],
    changed: Mapping[str, bytes],
    added: Mapping[str, bytes],
    dropped: Iterable[str] = (),
) -> bytes:
    """RECORD for a repacked wheel.

    ``path`` is RECORD's own path and ``dropped``, ``changed`` are paths as ``data`` has them; ``rename`` says
    what each is called now. Lines of ``added`` (paths as they are now) go right before RECORD's own line, in
    their order. Every other line keeps its bytes. Raises SourceError for a RECORD that does not parse, lists
    a path twice, misses a changed one or itself, or has an added one already.
    """
    rows = _rows(data, label)
    paths = [row[0] for _, _, row in rows if row]
    wanted = {path, *changed}
    for name in sorted(wanted):
        if paths.count(name) != 1:
            raise refusal(label, f"one line for {name}", str(paths.count(name)))
    if len(set(paths)) != len(paths):
        raise refusal(label, "one line per file", "a file listed twice")
    for name in added.keys() & {rename(old) for old in paths}:
        raise refusal(label, f"no line for {name}, which is new", "one")

    default = next((ending for _, ending, _ in rows if ending), "\n")
    skipped = set(dropped)
    result: list[str] = []
    for line, ending, row in rows:
        if not row:
            result.append(line)
        elif row[0] in changed:
            result.append(record_line(rename(row[0]), changed[row[0]], ending))
        elif row[0] not in skipped:
            if row[0] == path:
                result += [record_line(name, content, ending or default) for name, content in added.items()]
            renamed = rename(row[0])
            result.append(line if renamed == row[0] else _line([renamed, *row[1:]], ending))
    return "".join(result).encode()


def check_record(data: bytes, label: str, *, files: Mapping[str, bytes], unhashed: Container[str]) -> None:
    """Hold RECORD and a wheel's ``files`` against each other; lines of ``unhashed`` files are not judged.

    Raises SourceError naming the first file with another hash or size, a file without a line, or a line
    without a file.
    """
    unseen = set(files)
    for _, _, row in _rows(data, label):
        if not row or row[0] in unhashed:
            continue
        name, digest, size = row
        if name not in unseen:
            raise refusal(label, "one line for each file of the wheel", f"a line for {name}")
        unseen.remove(name)
        algorithm, _, value = digest.partition("=")
        if algorithm not in ("sha256", "sha384", "sha512"):
            raise refusal(f"{label}:{name}", "a sha256, sha384 or sha512", digest or "no hash")
        actual = base64.urlsafe_b64encode(hashlib.new(algorithm, files[name]).digest()).rstrip(b"=").decode()
        if actual != value.rstrip("=") or size not in ("", str(len(files[name]))):
            raise refusal(
                f"{label}:{name}",
                f"{digest}, {size} bytes",
                f"{algorithm}={actual}, {len(files[name])} bytes",
            )
    if unseen:
        raise refusal(label, f"a line for {min(unseen)}", "none")
