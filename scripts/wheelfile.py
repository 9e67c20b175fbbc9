# SPDX-License-Identifier: Apache-2.0
"""A wheel as a zip file: members carried over byte for byte, and new ones stored.

``zipfile`` reads (and checks every CRC), but it has no public way to carry a compressed member over, and
what it compresses depends on the zlib at hand. So the few headers that change are written here, and no byte
of the result depends on the machine: not on its zlib, time zone, umask, folder or Python.
"""

from __future__ import annotations

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from scripts.errors import SourceError

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_EXTRA = struct.Struct("<2H")
_LOCAL_MAGIC, _CENTRAL_MAGIC, _END_MAGIC = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_DESCRIPTOR_MAGIC = b"PK\x07\x08"

_ENCRYPTED, _DESCRIPTOR, _PATCHED, _STRONG, _UTF8, _MASKED = 1 << 0, 1 << 3, 1 << 5, 1 << 6, 1 << 11, 1 << 13
_EXTRA_ZIP64, _EXTRA_UNICODE_PATH = 0x0001, 0x7075
_STORED_VERSION = 20
_DATE_1980_01_01 = 1 << 5 | 1  # the earliest time that a zip file can hold
_MODE = stat.S_IFREG | 0o644
_UNIX = 3


@dataclass(frozen=True)
class Member:
    """One entry of an archive: its name, and the bytes of its two headers and its data as they stand.

    ``local`` and ``central`` are the headers' fixed parts, ``data`` the compressed bytes with the data
    descriptor that may follow them.
    """

    name: str
    raw_name: bytes
    local: bytes
    local_extra: bytes
    data: bytes
    central: bytes
    central_extra: bytes
    comment: bytes

    @property
    def is_folder(self) -> bool:
        return self.name.endswith("/")

    @property
    def mode(self) -> int:
        """The permission bits that an unpacker would set; 0 where the archive carries none."""
        attributes: int = _CENTRAL.unpack(self.central)[15]
        return stat.S_IMODE(attributes >> 16)


@dataclass(frozen=True)
class Archive:
    """All members of a zip file in its own order."""

    label: str
    members: tuple[Member, ...]
    comment: bytes
    _zip: zipfile.ZipFile = field(repr=False, compare=False)

    def read(self, member: Member) -> bytes:
        """The content of a member, its CRC checked.

        Raises SourceError when its bytes do not unpack to what its header says.
        """
        try:
            return self._zip.read(member.name)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise refusal(f"{self.label}:{member.name}", "a member that unpacks", str(error)) from error


def read_archive(data: bytes, label: str) -> Archive:
    """Parse the zip file ``data``; ``label`` is what errors call it.

    Raises SourceError for what cannot be carried over unchanged or is not safe to unpack: a damaged archive,
    zip64, encryption, a compression other than deflate, a name that is given twice or leads out of the
    folder, headers that contradict each other.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise refusal(label, "a zip file", str(error)) from error
    end = len(data) - _END.size - len(archive.comment)
    if end < 0 or data[end : end + 4] != _END_MAGIC:
        raise refusal(label, "a zip file that ends with its end record", "other bytes after it")
    _, disk, first_disk, here, entries, size, start, comment = _END.unpack_from(data, end)
    if 0xFFFF in (here, entries) or 0xFFFFFFFF in (size, start):
        raise refusal(label, "a plain zip file", "a zip64 archive")
    if disk or first_disk or here != entries or start + size != end or comment != len(archive.comment):
        raise refusal(label, "one zip file from first byte to last", "a split archive, or bytes around it")

    members = tuple(_members(data, start, archive.infolist(), label))
    seen: set[str] = set()
    for member in members:
        if member.name.rstrip("/") in seen:
            raise refusal(f"{label}:{member.name}", "each name once", "the name is given twice")
        seen.add(member.name.rstrip("/"))
    if len(members) != entries:
        raise refusal(label, f"{entries} members", str(len(members)))
    return Archive(label, members, archive.comment, archive)


def _members(data: bytes, start: int, infos: list[zipfile.ZipInfo], label: str) -> Iterator[Member]:
    """Walk the central directory; ``infos`` are the same entries as zipfile decodes them."""
    limit = start
    position = start
    spans: list[tuple[int, int, str]] = []
    for info in infos:
        where = f"{label}:{info.orig_filename}"
        central = data[position : position + _CENTRAL.size]
        fields = _CENTRAL.unpack(central)
        flags, method = fields[3], fields[4]
        crc, packed, unpacked, n_name, n_extra, n_comment = fields[7:13]
        offset = fields[16]
        cursor = position + _CENTRAL.size
        raw_name = data[cursor : cursor + n_name]
        extra = data[cursor + n_name : cursor + n_name + n_extra]
        position = cursor + n_name + n_extra + n_comment
        comment = data[position - n_comment : position]

        _check_name(info, raw_name, flags, where)
        if flags & (_ENCRYPTED | _PATCHED | _STRONG | _MASKED):
            raise refusal(where, "a plain member", "an encrypted or patched one")
        if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise refusal(where, "a stored or deflated member", f"compression method {method}")
        if 0xFFFFFFFF in (packed, unpacked, offset):
            raise refusal(where, "a plain zip member", "a zip64 one")
        _check_extra(extra, where)

        local = data[offset : offset + _LOCAL.size]
        if len(local) != _LOCAL.size or local[:4] != _LOCAL_MAGIC:
            raise refusal(where, "a local header at the offset that the directory names", "none")
        local_fields = _LOCAL.unpack(local)
        body = offset + _LOCAL.size + local_fields[9] + local_fields[10]
        local_name = data[offset + _LOCAL.size : offset + _LOCAL.size + local_fields[9]]
        local_extra = data[body - local_fields[10] : body]
        _check_extra(local_extra, where)
        sizes_known = local_fields[6:9] == (crc, packed, unpacked)
        if local_name != raw_name or local_fields[2:4] != (flags, method):
            raise refusal(where, "the same name, flags and method in both headers", "two different ones")
        if not sizes_known and not (flags & _DESCRIPTOR and local_fields[6:9] == (0, 0, 0)):
            raise refusal(where, "the same CRC and sizes in both headers", "two different ones")
        end = body + packed
        if flags & _DESCRIPTOR:
            end += _descriptor_size(data[end : end + 16], struct.pack("<3L", crc, packed, unpacked), where)
        spans.append((offset, end, where))
        yield Member(info.filename, raw_name, local, local_extra, data[body:end], central, extra, comment)

    spans.sort()
    for (_, end, where), following in zip(spans, [offset for offset, _, _ in spans[1:]] + [limit]):
        if end > following:
            raise refusal(where, "members that do not overlap", "one that runs into the next")


def _check_name(info: zipfile.ZipInfo, raw_name: bytes, flags: int, where: str) -> None:
    name = info.filename
    parts = name.removesuffix("/").split("/")
    odd = (
        name != info.orig_filename
        or name.encode(_encoding(flags)) != raw_name
        or any(ord(char) < 32 or char in "\\:\x7f" for char in name)
        or any(part in ("", ".", "..") for part in parts)
    )
    if odd:
        raise refusal(where, "a relative name inside the folder", repr(info.orig_filename))


def _encoding(flags: int) -> str:
    return "utf-8" if flags & _UTF8 else "cp437"


def _check_extra(extra: bytes, where: str) -> None:
    position = 0
    while position + _EXTRA.size <= len(extra):
        kind, size = _EXTRA.unpack_from(extra, position)
        if kind == _EXTRA_ZIP64:
            raise refusal(where, "a plain zip member", "a zip64 one")
        if kind == _EXTRA_UNICODE_PATH:
            raise refusal(where, "one name", "a second name in an extra field")
        position += _EXTRA.size + size


def _descriptor_size(found: bytes, values: bytes, where: str) -> int:
    if found == _DESCRIPTOR_MAGIC + values:
        return 16
    if found[:12] == values:
        return 12
    raise refusal(where, "a data descriptor with the directory's CRC and sizes", "none after the data")


class ArchiveWriter:
    """Builds a zip file in memory from members of another one and from new, stored members."""

    def __init__(self, comment: bytes = b"") -> None:
        self._comment = comment
        self._body = bytearray()
        self._directory = bytearray()
        self._names: set[str] = set()

    def copy(self, member: Member, name: str | None = None) -> None:
        """Append ``member`` with every byte of its headers and data; only ``name``, where given, differs.

        Raises ValueError for a name that the archive has already, or that its encoding cannot express.
        """
        name = member.name if name is None else name
        local, central = list(_LOCAL.unpack(member.local)), list(_CENTRAL.unpack(member.central))
        raw_name = name.encode(_encoding(central[3]))
        local[9] = central[10] = len(raw_name)
        central[16] = len(self._body)
        self._append(
            name,
            _LOCAL.pack(*local) + raw_name + member.local_extra + member.data,
            _CENTRAL.pack(*central) + raw_name + member.central_extra + member.comment,
        )

    def store(self, name: str, data: bytes) -> None:
        """Append a file, not compressed, with mode 0644 and a fixed time. Raises ValueError as ``copy``."""
        raw_name = name.encode("ascii")
        common = (
            0,
            zipfile.ZIP_STORED,
            0,
            _DATE_1980_01_01,
            zlib.crc32(data),
            len(data),
            len(data),
            len(raw_name),
            0,
        )
        made_by = _UNIX << 8 | _STORED_VERSION
        central = (_CENTRAL_MAGIC, made_by, _STORED_VERSION, *common, 0, 0, 0, _MODE << 16, len(self._body))
        self._append(
            name,
            _LOCAL.pack(_LOCAL_MAGIC, _STORED_VERSION, *common) + raw_name + data,
            _CENTRAL.pack(*central) + raw_name,
        )

    def _append(self, name: str, entry: bytes, directory_entry: bytes) -> None:
        if name in self._names:
            raise ValueError(f"{name} is in the archive already")
        self._names.add(name)
        self._body += entry
        self._directory += directory_entry

    def finish(self) -> bytes:
        """The whole zip file. Raises ValueError when it would need zip64."""
        count, start = len(self._names), len(self._body)
        if count >= 0xFFFF or start + len(self._directory) >= 0xFFFFFFFF:
            raise ValueError("the archive needs zip64")
        end = (_END_MAGIC, 0, 0, count, count, len(self._directory), start, len(self._comment))
        return bytes(self._body + self._directory) + _END.pack(*end) + self._comment


def refusal(file: str, expected: str, found: str) -> SourceError:
    """The error for a wheel, or a part of one, that is not what it should be."""
    return SourceError(file, expected, found, "fetch the wheel again, or build it again, and repeat")
