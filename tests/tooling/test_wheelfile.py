# SPDX-License-Identifier: Apache-2.0
"""The raw zip layer: what is copied keeps every byte, what is stored is fixed, what is unsafe is refused."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.errors import SourceError
from scripts.wheelfile import ArchiveWriter, read_archive

CONTENT = b"import torch\n" * 40


class _Pipe(io.RawIOBase):
    """A stream without seek: zipfile then writes data descriptors."""

    def __init__(self) -> None:
        self.data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        self.data += bytes(data)  # type: ignore[call-overload]
        return len(bytes(data))  # type: ignore[call-overload]


def _streamed() -> bytes:
    pipe = _Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/one.py", CONTENT)
        archive.writestr("a/two.py", CONTENT[::-1])
    return pipe.data


def _without_descriptor_signature() -> bytes:
    pipe = _Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.py", CONTENT)
    assert pipe.data.count(b"PK\x07\x08") == 1
    end = len(pipe.data) - 22
    (start,) = struct.unpack_from("<L", pipe.data, end + 16)
    shorter = pipe.data[:end].replace(b"PK\x07\x08", b"")
    return shorter + pipe.data[end : end + 16] + struct.pack("<L", start - 4) + pipe.data[end + 20 :]


def _odd() -> bytes:
    """Folders, modes, extra fields, comments, another system, a UTF-8 name, an empty file, three times."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for index, (name, mode, method) in enumerate(
            [
                ("pkg/", 0o40750, 0),
                ("pkg/run.sh", 0o100755, 8),
                ("pkg/käse.py", 0o100600, 8),
                ("pkg/empty", 0, 0),
            ]
        ):
            info = zipfile.ZipInfo(name, (2000 + index, 12, 31, 23, 59, 58))
            info.external_attr, info.compress_type = mode << 16, method
            info.extra = struct.pack("<2H4s", 0xCAFE, 4, b"abcd") if index else b""
            info.comment = b"remark" * index
            info.create_system = index
            archive.writestr(info, CONTENT if index in (1, 2) else b"")
        archive.comment = b"of the archive"
    return buffer.getvalue()


def _copied(data: bytes) -> bytes:
    archive = read_archive(data, "x.whl")
    writer = ArchiveWriter(archive.comment)
    for member in archive.members:
        writer.copy(member)
    return writer.finish()


@pytest.mark.parametrize("make", [_streamed, _without_descriptor_signature, _odd])
def test_a_copy_of_every_member_is_the_same_file(make: Callable[[], bytes]) -> None:
    assert _copied(make()) == make()


@given(
    st.dictionaries(
        st.text("abcé_.-", min_size=1, max_size=8).filter(lambda n: n.strip(".")), st.binary(max_size=200)
    ),
    st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
    st.binary(max_size=20).filter(lambda c: b"PK" not in c),
)
def test_copies_of_any_archive_are_the_same_file(
    files: dict[str, bytes], method: int, comment: bytes
) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.comment = comment
    assert _copied(buffer.getvalue()) == buffer.getvalue()


def test_a_renamed_copy_keeps_all_but_the_name() -> None:
    source = read_archive(_streamed(), "x.whl")
    writer = ArchiveWriter()
    writer.copy(source.members[0], "a-longer-name+1/one.py")
    writer.copy(source.members[1])
    result = read_archive(writer.finish(), "y.whl")
    old, new = source.members[0], result.members[0]
    assert (new.name, new.data, new.local_extra) == ("a-longer-name+1/one.py", old.data, old.local_extra)
    assert (new.local[:26], new.local[28:]) == (old.local[:26], old.local[28:])
    assert (new.central[:28], new.central[30:42]) == (old.central[:28], old.central[30:42])
    assert result.read(new) == CONTENT
    assert result.members[1].data == source.members[1].data


def test_a_stored_member_is_plain_and_fixed() -> None:
    writer = ArchiveWriter()
    writer.store("pkg/new.py", CONTENT)
    (info,) = zipfile.ZipFile(io.BytesIO(writer.finish())).infolist()
    assert info.date_time == (1980, 1, 1, 0, 0, 0)
    assert (info.compress_type, info.create_system, info.external_attr >> 16) == (0, 3, 0o100644)
    assert (info.flag_bits, info.extra, info.file_size, info.internal_attr) == (0, b"", len(CONTENT), 0)


def test_a_name_is_written_once() -> None:
    writer = ArchiveWriter()
    writer.store("a", b"")
    with pytest.raises(ValueError, match="already"):
        writer.store("a", b"")


def _named(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            info = zipfile.ZipInfo("placeholder")
            info.filename = name
            archive.writestr(info, b"x")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "name",
    ["../a", "a/../../b", "/etc/a", "a//b", "./a", "a/.", "a\\b", "C:/a", "a\nb", "a\x7fb", ".."],
)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(SourceError) as caught:
        read_archive(_named("fine", name), "x.whl")
    assert caught.value.file.startswith("x.whl:")
    assert "relative name" in caught.value.expected


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("names", [("a", "b", "a"), ("a/", "a")])
def test_a_name_given_twice_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(SourceError, match="twice"):
        read_archive(_named(*names), "x.whl")


def _zip64() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, archive.open("a", "w", force_zip64=True) as file:
        file.write(CONTENT)
    return buffer.getvalue()


def _zip64_end() -> bytes:
    data = _named("a")
    return data[:-14] + b"\xff\xff\xff\xff" + data[-10:]


def _compressed(method: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("a", CONTENT)
    return buffer.getvalue()


def _with_flag(flag: int) -> bytes:
    data = bytearray(_named("a"))
    central = data.index(b"PK\x01\x02")
    for position in (6, central + 8):
        struct.pack_into("<H", data, position, flag)
    return bytes(data)


def _second_name() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo("a")
        info.extra = struct.pack("<2HBL", 0x7075, 6, 1, 0) + b"b"
        archive.writestr(info, CONTENT)
    return buffer.getvalue()


def _two_names() -> bytes:
    return _named("aa").replace(b"aa", b"bb", 1)


def _other_crc() -> bytes:
    data = bytearray(_named("a"))
    data[14] ^= 1
    return bytes(data)


def _overlap() -> bytes:
    data = bytearray(_named("a", "b"))
    first = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", first + 1)
    name_at = 30
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    data[second + 46] = data[name_at]
    data[second + 46] = ord("a")
    return bytes(data)


def _cut_header() -> bytes:
    """A member that is said to begin in the last bytes of the file."""
    made = bytearray(_named("a"))
    made[-2:] = b"\x04\x00"
    start = made.index(b"PK\x01\x02") + 42
    made[start : start + 4] = struct.pack("<L", len(made))
    return bytes(made) + b"PK\x03\x04"


def _two_sizes() -> bytes:
    """A streamed member whose local header has sizes all the same, and other ones."""
    made = bytearray(_streamed())
    made[18:22] = b"\x01\x00\x00\x00"
    return bytes(made)


def _end(position: int, data: bytes, *names: str) -> bytes:
    """An archive with other bytes in its end record."""
    made = bytearray(_named(*names or ("a",)))
    start = len(made) - 22 + position
    made[start : start + len(data)] = data
    return bytes(made)


def _central(position: int, data: bytes) -> bytes:
    """An archive with other bytes in the only member's central header."""
    made = bytearray(_named("a"))
    start = made.index(b"PK\x01\x02") + position
    made[start : start + len(data)] = data
    return bytes(made)


def _local(position: int, data: bytes) -> bytes:
    """An archive with other bytes in the first member's local header."""
    made = bytearray(_named("a"))
    made[position : position + len(data)] = data
    return bytes(made)


TWO_HEADERS = "flags and method in both headers"


@pytest.mark.parametrize(
    ("make", "expected", "found"),
    [
        (_zip64, "a plain zip member", "a zip64 one"),
        (_zip64_end, "a plain zip file", "a zip64 archive"),
        (lambda: _central(20, b"\xff" * 4), "a plain zip member", "a zip64 one"),
        (lambda: _central(24, b"\xff" * 4), "a plain zip member", "a zip64 one"),
        (lambda: _compressed(zipfile.ZIP_BZIP2), "a stored or deflated member", "method 12"),
        (lambda: _compressed(zipfile.ZIP_LZMA), "a stored or deflated member", "method 14"),
        (lambda: _with_flag(0x1), "a plain member", "encrypted"),
        (lambda: _with_flag(0x20), "a plain member", "encrypted"),
        (lambda: _with_flag(0x40), "a plain member", "encrypted"),
        (lambda: _with_flag(0x2000), "a plain member", "encrypted"),
        (lambda: _with_flag(0x8), "a data descriptor", "none after the data"),
        (_second_name, "one name", "a second name"),
        (_two_names, TWO_HEADERS, "two different"),
        (lambda: _local(6, b"\x02\x00"), TWO_HEADERS, "two different"),
        (lambda: _local(8, b"\x08\x00"), TWO_HEADERS, "two different"),
        (_other_crc, "CRC and sizes in both headers", "two different"),
        (lambda: _local(14, bytes(12)), "CRC and sizes in both headers", "two different"),
        (lambda: _local(0, b"PK\x05"), "a local header at the offset", "none"),
        (lambda: _central(42, b"\x50"), "a local header at the offset", "none"),
        (_cut_header, "a local header at the offset", "none"),
        (_two_sizes, "CRC and sizes in both headers", "two different"),
        (_overlap, "members that do not overlap", "runs into the next"),
        (lambda: _end(20, b"\x05"), "one zip file from first byte to last", "a split archive"),
        (lambda: _end(4, b"\x01"), "one zip file from first byte to last", "a split archive"),
        (lambda: _end(6, b"\x01"), "one zip file from first byte to last", "a split archive"),
        (lambda: _end(8, b"\x01\x00\x02"), "one zip file from first byte to last", "a split archive"),
        (lambda: _end(8, b"\x02\x00\x02"), "2 members", "1"),
        (lambda: b"before" + _named("a"), "one zip file from first byte to last", "bytes around"),
        (lambda: _named("a") + b"after", "ends with its end record", "other bytes after it"),
        (lambda: _named("a")[:-30], "a zip file", "not a zip"),
        (lambda: b"", "a zip file", "not a zip"),
        (lambda: b"<html>not found</html>", "a zip file", "not a zip"),
    ],
)
def test_an_archive_that_cannot_be_carried_over_is_refused(
    make: Callable[[], bytes], expected: str, found: str
) -> None:
    with pytest.raises(SourceError) as caught:
        read_archive(make(), "x.whl")
    assert expected in caught.value.expected
    assert found in caught.value.found
    assert caught.value.file.startswith("x.whl")
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_member_whose_bytes_changed_is_refused_when_it_is_read(method: int) -> None:
    data = bytearray(_compressed(method))
    data[34] ^= 0x10
    archive = read_archive(bytes(data), "x.whl")
    with pytest.raises(SourceError) as caught:
        archive.read(archive.members[0])
    assert (caught.value.file, caught.value.expected) == ("x.whl:a", "a member that unpacks")


class _Large(bytearray):
    def __len__(self) -> int:
        return 0xFFFFFFFF


def test_an_archive_beyond_four_gigabytes_is_not_written() -> None:
    writer = ArchiveWriter()
    writer._body = _Large()
    with pytest.raises(ValueError, match="zip64"):
        writer.finish()


@given(st.data())
def test_a_damaged_archive_is_refused_or_reads_the_same(data: st.DataObject) -> None:
    """Whatever bits change: a SourceError, or an archive whose copy is exact."""
    damaged = bytearray(_odd())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        archive = read_archive(bytes(damaged), "x.whl")
        content = [archive.read(member) for member in archive.members if not member.is_folder]
    except SourceError:
        return
    again = read_archive(_copied(bytes(damaged)), "y.whl")
    assert [again.read(member) for member in again.members if not member.is_folder] == content
