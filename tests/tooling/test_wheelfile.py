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


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (_zip64, "zip64"),
        (_zip64_end, ""),
        (lambda: _compressed(zipfile.ZIP_BZIP2), "method 12"),
        (lambda: _compressed(zipfile.ZIP_LZMA), "method 14"),
        (lambda: _with_flag(0x1), "encrypted"),
        (lambda: _with_flag(0x2000), "encrypted"),
        (lambda: _with_flag(0x8), ""),
        (_second_name, ""),
        (_two_names, "two different"),
        (_other_crc, "two different"),
        (_overlap, ""),
        (lambda: b"before" + _named("a"), "bytes around"),
        (lambda: _named("a") + b"after", ""),
        (lambda: _named("a")[:-30], ""),
        (lambda: b"", ""),
        (lambda: b"<html>not found</html>", ""),
    ],
)
def test_an_archive_that_cannot_be_carried_over_is_refused(make: Callable[[], bytes], found: str) -> None:
    with pytest.raises(SourceError) as caught:
        read_archive(make(), "x.whl")
    assert found in caught.value.found
    assert caught.value.file.startswith("x.whl")
    assert caught.value.exit_code == 4


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
