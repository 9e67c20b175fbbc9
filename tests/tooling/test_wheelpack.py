# SPDX-License-Identifier: Apache-2.0
"""Repacking, on small wheels with every oddity that a wheel may have."""

from __future__ import annotations

import io
import struct
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.errors import SourceError
from scripts.wheelfile import Member, read_archive
from scripts.wheelmeta import record_line
from scripts.wheelpack import labelled, read_licenses, read_wheel, repack

NAME = "megatron_core-0.16.1-1-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"
NEW_NAME = NAME.replace("0.16.1", "0.16.1+liger.1")
STEM, NEW = "megatron_core-0.16.1", "megatron_core-0.16.1+liger.1"
METADATA = b"""Metadata-Version: 2.4
Name: megatron-core
Version: 0.16.1
Classifier: Topic :: Utilities
Requires-Python: >=3.10
Requires-Dist: torch>=2.6.0

# Megatron
"""
FILES = {
    "megatron/core/__init__.py": b"core = 1\n" * 30,
    "megatron/core/fusions/swiglu.py": b"def swiglu(): ...",
    "megatron/core/helpers.so": bytes(range(256)) * 4,
    "megatron/core/naïve.py": b"",
    f"{STEM}.data/scripts/run": b"#!python\n",
    f"{STEM}.dist-info/METADATA": METADATA,
    f"{STEM}.dist-info/WHEEL": b"Wheel-Version: 1.0\n",
    f"{STEM}.dist-info/licenses/AUTHORS": b"people",
}
CHANGES = {
    "megatron/core/liger/overlay.json": b"{}\n",
    "megatron/core/liger/kernels/swiglu.py": b"import triton\n",
    "megatron/core/fusions/swiglu.py": b"def swiglu(): ...\n# tail\n",
}
LICENSES = {"LICENSE": b"ours", "LICENSES/Megatron-LM.txt": b"theirs", "NOTICE": b"notice"}


def _record(files: dict[str, bytes], stem: str = STEM) -> bytes:
    unhashed = [f"{stem}.dist-info/RECORD", *(name for name in files if "RECORD." in name)]
    lines = [record_line(name, data) for name, data in files.items() if name not in unhashed]
    return "".join([*lines, *(f"{name},,\n" for name in unhashed)]).encode()


class _Pipe(io.BytesIO):
    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        raise io.UnsupportedOperation


def _wheel(
    files: dict[str, bytes] | None = None,
    *,
    streamed: bool = False,
    record_first: bool = False,
    record: bytes | None = None,
    stem: str = STEM,
) -> bytes:
    """Folders, an executable, extra fields, comments, and with ``streamed`` data descriptors."""
    files = dict(FILES if files is None else files)
    own = {f"{stem}.dist-info/RECORD": _record(files, stem) if record is None else record}
    buffer = _Pipe() if streamed else io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for folder in ("megatron/", "megatron/core/", f"{stem}.dist-info/"):
            archive.writestr(zipfile.ZipInfo(folder, (2026, 3, 20, 21, 21, 50)), b"")
        for name, data in (own | files if record_first else files | own).items():
            info = zipfile.ZipInfo(name, (2026, 3, 20, 21, 21, 50))
            info.external_attr = (0o100755 if name.endswith((".so", "/run")) else 0o100664) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            info.extra = struct.pack("<2H4s", 0xCAFE, 4, b"abcd")
            archive.writestr(info, data)
        archive.comment = b"kept"
    return buffer.getvalue()


def _unpacked(data: bytes) -> dict[str, bytes]:
    """Read by zipfile alone, folders aside."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return {i.filename: archive.read(i) for i in archive.infolist() if not i.is_dir()}


def _repacked(data: bytes, changes: dict[str, bytes] | None = None) -> bytes:
    wheel, result = repack(read_wheel(data, NAME), CHANGES if changes is None else changes, LICENSES, 1)
    assert wheel.filename == NEW_NAME
    return result


def _old_name(name: str) -> str:
    return name.replace(NEW, STEM, 1) if name.startswith(NEW) else name


def _essence(member: Member, name: str) -> tuple[object, ...]:
    """Everything but the name, its length and the offset."""
    local, central = member.local, member.central
    return (
        name,
        local[:26] + local[28:],
        central[:28] + central[30:42],
        member.local_extra,
        member.central_extra,
        member.comment,
        member.data,
    )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("record_first", [False, True])
def test_repacking(streamed: bool, record_first: bool) -> None:
    source = _wheel(streamed=streamed, record_first=record_first)
    result = _repacked(source)
    before, after = read_archive(source, "before"), read_archive(result, "after")
    touched = {
        "megatron/core/fusions/swiglu.py",
        f"{STEM}.dist-info/METADATA",
        f"{STEM}.dist-info/RECORD",
    }

    kept = [_essence(m, m.name) for m in before.members if m.name not in touched]
    old = {m.name for m in before.members}
    assert [
        _essence(m, _old_name(m.name))
        for m in after.members
        if _old_name(m.name) in old and _old_name(m.name) not in touched
    ] == kept
    assert after.comment == b"kept"

    names = [member.name for member in after.members]
    in_order = [_old_name(n) for n in names if _old_name(n) in old and not n.endswith("/RECORD")]
    assert in_order == [m.name for m in before.members if not m.name.endswith("/RECORD")]
    assert names[-1] == f"{NEW}.dist-info/RECORD"
    assert not any(name.startswith(f"{STEM}.") for name in names)
    assert [n for n in names if "/liger/" in n] == [n for n in CHANGES if "/liger/" in n]
    if not record_first:
        assert names.index("megatron/core/liger/overlay.json") < names.index(f"{NEW}.dist-info/METADATA")

    files = _unpacked(result)
    expected = {n: d for n, d in {**FILES, **CHANGES}.items() if not n.startswith(STEM)}
    assert {n: d for n, d in files.items() if not n.startswith(NEW)} == expected
    assert files[f"{NEW}.data/scripts/run"] == b"#!python\n"
    assert files[f"{NEW}.dist-info/licenses/AUTHORS"] == b"people"
    for name, text in LICENSES.items():
        assert files[f"{NEW}.dist-info/licenses/{name}"] == text
    metadata = files[f"{NEW}.dist-info/METADATA"].decode()
    head, _, body = metadata.partition("\n\n")
    assert head.splitlines() == [
        "Metadata-Version: 2.4",
        "Name: megatron-core",
        "Version: 0.16.1+liger.1",
        "Classifier: Topic :: Utilities",
        "Classifier: Private :: Do Not Upload",
        "Requires-Python: >=3.10",
        "Requires-Dist: torch>=2.6.0",
        "License-File: LICENSE",
        "License-File: LICENSES/Megatron-LM.txt",
        "License-File: NOTICE",
    ]
    assert body.startswith("**Modified.**")
    assert "`megatron/core/fusions/swiglu.py`" in body
    assert "report faults" in body
    assert body.endswith("\n\n# Megatron\n")

    for info in zipfile.ZipFile(io.BytesIO(result)).infolist():
        if _old_name(info.filename) in touched | set(CHANGES) or info.filename.endswith(tuple(LICENSES)):
            assert (info.date_time, info.compress_type) == ((1980, 1, 1, 0, 0, 0), zipfile.ZIP_STORED)
            assert info.external_attr >> 16 == 0o100644


def test_record_lists_every_file_right() -> None:
    files = _unpacked(_repacked(_wheel()))
    record = files.pop(f"{NEW}.dist-info/RECORD").decode()
    expected = {record_line(name, data) for name, data in files.items()} | {f"{NEW}.dist-info/RECORD,,\n"}
    assert set(record.splitlines(keepends=True)) == expected
    assert len(record.splitlines()) == len(expected)


def test_a_change_that_is_none_leaves_the_member_alone() -> None:
    same = {"megatron/core/fusions/swiglu.py": FILES["megatron/core/fusions/swiglu.py"]}
    before, after = read_archive(_wheel(), ""), read_archive(_repacked(_wheel(), same), "")
    name = "megatron/core/fusions/swiglu.py"
    one, two = ([_essence(m, name) for m in a.members if m.name == name] for a in (before, after))
    assert one == two


@pytest.mark.parametrize("suffix", ["jws", "p7s"])
@pytest.mark.parametrize("listed", [True, False])
def test_a_signature_is_left_out(suffix: str, listed: bool) -> None:
    name = f"{STEM}.dist-info/RECORD.{suffix}"
    files = {**FILES, name: b"{}"}
    source = _wheel(files, record=None if listed else _record(FILES))
    assert read_wheel(source, NAME).signatures == (name,)
    after = _unpacked(_repacked(source))
    assert not any("RECORD." in n for n in after)
    assert b"RECORD." not in after[f"{NEW}.dist-info/RECORD"]


def test_a_licence_that_is_there_is_not_overwritten() -> None:
    theirs = f"{STEM}.dist-info/licenses/LICENSE"
    same = f"{STEM}.dist-info/licenses/NOTICE"
    after = _unpacked(_repacked(_wheel({**FILES, theirs: b"upstream's", same: LICENSES["NOTICE"]})))
    assert after[f"{NEW}.dist-info/licenses/LICENSE"] == b"upstream's"
    assert after[f"{NEW}.dist-info/licenses/overlay/LICENSE"] == b"ours"
    assert f"{NEW}.dist-info/licenses/overlay/NOTICE" not in after
    assert b"License-File: overlay/LICENSE\n" in after[f"{NEW}.dist-info/METADATA"]


@given(
    files=st.dictionaries(
        st.sampled_from([f"megatron/core/{c}.py" for c in "abcdef"]), st.binary(max_size=60), max_size=6
    ),
    changes=st.dictionaries(
        st.sampled_from([f"megatron/core/{c}.py" for c in "abxyz"]), st.binary(max_size=60), max_size=5
    ),
    streamed=st.booleans(),
)
def test_any_wheel_and_any_changes(
    files: dict[str, bytes], changes: dict[str, bytes], streamed: bool
) -> None:
    source = _wheel({**files, f"{STEM}.dist-info/METADATA": METADATA}, streamed=streamed)
    after = _unpacked(_repacked(source, changes))
    assert {n: d for n, d in after.items() if not n.startswith(NEW)} == {**files, **changes}
    assert _repacked(source, changes) == _repacked(source, dict(changes))


def _changed(name: str, old: bytes, new: bytes) -> bytes:
    files = dict(FILES)
    files[name] = files[name].replace(old, new)
    return _wheel(files)


@pytest.mark.parametrize(
    ("data", "name", "about"),
    [
        (_wheel(record=_record({**FILES, "megatron/core/helpers.so": b"other"})), NAME, "helpers.so"),
        (_wheel(record=_record({**FILES, "gone.py": b""})), NAME, "RECORD"),
        (_wheel({**FILES, "more.py": b""}, record=_record(FILES)), NAME, "RECORD"),
        (_wheel(record=b""), NAME, "RECORD"),
        (_changed(f"{STEM}.dist-info/METADATA", b"0.16.1", b"0.16.2"), NAME, "METADATA"),
        (_wheel(), NAME.replace("0.16.1", "0.16.2"), ""),
        (_wheel(), "megatron_core.zip", "megatron_core.zip"),
        (_wheel({**FILES, "other-1.dist-info/METADATA": METADATA}), NAME, ""),
        (_wheel({n: d for n, d in FILES.items() if not n.endswith("METADATA")}), NAME, "METADATA"),
        (_wheel({**FILES, "../outside": b""}), NAME, "outside"),
        (_wheel()[:-1], NAME, ""),
    ],
)
def test_a_wheel_that_does_not_agree_with_itself_is_refused(data: bytes, name: str, about: str) -> None:
    with pytest.raises(SourceError) as caught:
        read_wheel(data, name)
    assert about in caught.value.file
    assert caught.value.exit_code == 4


def test_labels() -> None:
    assert labelled("0.16.1", 3) == "0.16.1+liger.3"
    assert labelled("0.18.0rc0+3fec9a1", 1) == "0.18.0rc0+3fec9a1.liger.1"


def test_the_projects_own_licence_texts() -> None:
    texts = read_licenses(b"upstream's")
    assert list(texts) == ["LICENSE", "LICENSES/Megatron-LM.txt", "NOTICE"]
    assert b"Apache License" in texts["LICENSE"]
    assert texts["LICENSES/Megatron-LM.txt"] == b"upstream's"
    assert b"not affiliated" in texts["NOTICE"]
