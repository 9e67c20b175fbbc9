# SPDX-License-Identifier: Apache-2.0
"""METADATA and RECORD: what is meant to change does, and every other byte stays."""

from __future__ import annotations

import base64
import csv
import email
import email.message
import hashlib
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.errors import SourceError
from scripts.wheelmeta import check_record, edit_metadata, edit_record, metadata_version

HEADERS = [
    "Metadata-Version: 2.4",
    "Name: megatron-core",
    "Version: 0.16.1",
    "License: first line",
    "        ",
    "        Version: 9.9.9",
    "Classifier: Topic :: Utilities",
    "Classifier: Topic :: Scientific/Engineering",
    "Requires-Python: >=3.10",
    "License-File: AUTHORS",
    'Requires-Dist: torch>=2.6.0; extra == "x"',
]
FILES = ["LICENSE", "LICENSES/Megatron-LM.txt"]


def _metadata(headers: list[str], body: str | None, newline: str) -> bytes:
    lines = [*headers, "", *body.split("\n")] if body is not None else headers
    return newline.join(lines).encode() + (newline.encode() if body is None else b"")


def _edit(data: bytes, notice: str = "first\nsecond") -> bytes:
    return edit_metadata(data, "METADATA", version="0.16.1+liger.1", notice=notice, license_files=FILES)


def _parse(data: bytes) -> email.message.Message:
    """By the standard library's parser."""
    return email.message_from_bytes(data)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_metadata_changes_in_four_places(newline: str) -> None:
    body = "\nMegatron\nVersion: 7\n\nÜber\ttabs  \n"
    result = _edit(_metadata(HEADERS, body, newline)).decode()
    expected = [
        *HEADERS[:2],
        "Version: 0.16.1+liger.1",
        *HEADERS[3:8],
        "Classifier: Private :: Do Not Upload",
        *HEADERS[8:10],
        "License-File: LICENSE",
        "License-File: LICENSES/Megatron-LM.txt",
        HEADERS[10],
        "",
        "first",
        "second",
        "",
        *body.split("\n"),
    ]
    assert result.split(newline) == expected
    assert metadata_version(result.encode(), "METADATA") == "0.16.1+liger.1"


@pytest.mark.parametrize("body", [None, ""])
def test_metadata_without_a_description_gets_one(body: str | None) -> None:
    parsed = _parse(_edit(_metadata(HEADERS, body, "\n")))
    assert parsed["Version"] == "0.16.1+liger.1"
    assert str(parsed.get_payload()).split() == ["first", "second"]


def test_a_last_header_without_a_line_end_gets_one() -> None:
    result = _edit("\n".join(HEADERS).encode()).decode()
    assert result.split("\n")[-5:] == [HEADERS[-1], "", "first", "second", ""]


def test_license_files_are_declared_from_metadata_2_4_on() -> None:
    for version, expected in [("2.1", ["AUTHORS"]), ("2.3", ["AUTHORS"]), ("2.10", ["AUTHORS", *FILES])]:
        headers = [f"Metadata-Version: {version}", *HEADERS[1:]]
        assert _parse(_edit(_metadata(headers, "x", "\n"))).get_all("License-File") == expected


def test_a_header_that_is_there_is_not_repeated() -> None:
    headers = [*HEADERS, "Classifier: Private :: Do Not Upload", "License-File: LICENSE"]
    result = _edit(_metadata(headers, "x", "\n"))
    assert result.count(b"Private :: Do Not Upload") == 1
    assert result.count(b"License-File: LICENSE\n") == 1
    assert result.count(b"License-File: LICENSES/Megatron-LM.txt\n") == 1


@pytest.mark.parametrize(
    "headers",
    [
        HEADERS[:2],
        [*HEADERS, "version: 1"],
        ["Metadata-Version: 2.4", "Version: 1", " 2"],
        [*HEADERS, "Description: in a header"],
        [" continued", *HEADERS],
        [*HEADERS, "no colon"],
        [*HEADERS, ": no name"],
        [*HEADERS, "Blank : after the name"],
        ["Metadata-Version: 2.4", "Version:"],
        ["Metadata-Version: two", "Version: 1"],
        [],
    ],
)
def test_metadata_that_does_not_parse_is_refused(headers: list[str]) -> None:
    with pytest.raises(SourceError) as caught:
        _edit(_metadata(headers, "x", "\n"))
    assert caught.value.file == "METADATA"


_value = st.text("aé: ;\t[>=1", max_size=12).map(lambda text: f"v{text}v")


@given(
    headers=st.lists(
        st.tuples(st.sampled_from(["Summary", "Requires-Dist", "Classifier", "Keywords"]), _value)
    ),
    at=st.integers(0, 20),
    body=st.binary(max_size=80),
    notice=st.lists(_value, min_size=1, max_size=3).map("\n".join),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_any_metadata_gives_its_bytes_back(
    headers: list[tuple[str, str]], at: int, body: bytes, notice: str, newline: str
) -> None:
    """What was inserted, taken out again, leaves the original."""
    lines = [f"{name}: {value}" for name, value in headers]
    lines[at:at] = ["Metadata-Version: 2.4", "Version: 0.16.1"]
    end = newline.encode()
    data = "".join(line + newline for line in [*lines, ""]).encode() + body
    edited = edit_metadata(data, "METADATA", version="2+l", notice=notice, license_files=["L"])
    head, _, tail = edited.partition(end + end)
    inserted = notice.encode().replace(b"\n", end) + end
    assert tail.startswith(inserted)
    assert tail[len(inserted) :] == (end + body if body else b"")
    kept = head.replace(b"Version: 2+l", b"Version: 0.16.1", 1).split(end)
    kept.remove(b"License-File: L")
    if ("Classifier", "Private :: Do Not Upload") not in headers:
        kept.remove(b"Classifier: Private :: Do Not Upload")
    assert kept == "".join(line + newline for line in lines).encode().split(end)[:-1]


def _row(path: str, content: bytes, newline: str = "\n") -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    text = io.StringIO()
    csv.writer(text, lineterminator=newline).writerow([path, f"sha256={digest}", len(content)])
    return text.getvalue()


def _rename(name: str) -> str:
    return name.replace("d-1.dist-info/", "d-1+l.dist-info/")


_path = st.lists(st.text('ab,"é ', min_size=1, max_size=4), min_size=1, max_size=3).map("/".join)


@given(
    files=st.dictionaries(_path, st.binary(max_size=30), max_size=8),
    fresh=st.dictionaries(_path.map(lambda p: f"new/{p}"), st.binary(max_size=30), max_size=3),
    picked=st.sets(st.integers(0, 7)),
    newline=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    at=st.integers(0, 8),
)
def test_any_record_is_right_after_the_edit(
    files: dict[str, bytes],
    fresh: dict[str, bytes],
    picked: set[int],
    newline: str,
    last: bool,
    at: int,
) -> None:
    """Whatever the order, the quoting and the line ends: untouched lines stay, and the result holds."""
    files = {f"pkg/{path}": data for path, data in files.items()} | {"d-1.dist-info/WHEEL": b"w"}
    rows = [_row(path, data, newline) for path, data in files.items()]
    own = "d-1.dist-info/RECORD,," + newline
    rows.insert(at, own)
    text = "".join(rows)
    text = text if last else text.removesuffix(newline)
    changed = {path: data + b"!" for i, (path, data) in enumerate(files.items()) if i in picked}
    result = edit_record(
        text.encode(), "R", path="d-1.dist-info/RECORD", rename=_rename, changed=changed, added=fresh
    )
    after = {_rename(path): data for path, data in {**files, **changed, **fresh}.items()}
    check_record(result, "R", files=after, unhashed={"d-1+l.dist-info/RECORD"})
    lines = result.decode().split(newline)
    untouched = [
        row.removesuffix(newline) for row, path in zip(rows, files) if row != own and "dist-info" not in row
    ]
    untouched = [row for row in untouched if not any(row == _row(p, files[p], "") for p in changed)]
    assert [line for line in lines if line in untouched] == untouched
    assert list(csv.reader(io.StringIO(result.decode(), newline="")))
    assert result.endswith(newline.encode()) == last


def _edit_record(text: str, changed: dict[str, bytes] | None = None, **more: object) -> bytes:
    arguments: dict[str, object] = {"path": "R", "rename": lambda name: name, "added": {}, **more}
    return edit_record(text.encode(), "R", changed=changed or {}, **arguments)  # type: ignore[arg-type]


def test_a_blank_line_of_record_stays() -> None:
    assert _edit_record("a,sha256=x,1\n\nR,,\n") == b"a,sha256=x,1\n\nR,,\n"


def test_blank_lines_and_padding_are_no_reason_to_refuse() -> None:
    padded = _row("a", b"a").replace(",1\n", "=,1\n")
    for text in (padded, _row("a", b"a") + "\n", _row("a", b"a").replace(",1\n", ",\n")):
        check_record((text + "R,,\n").encode(), "R", files={"a": b"a"}, unhashed={"R"})


def test_the_lines_of_record_end_as_the_first_does_that_has_an_end() -> None:
    """Also where its own line, before which new ones go, is the last and has none."""
    result = _edit_record("a,sha256=x,1\r\nR,,", added={"b": b""})
    assert result == b"a,sha256=x,1\r\n" + _row("b", b"", "\r\n").encode() + b"R,,"


def test_a_signature_leaves_record() -> None:
    assert _edit_record("a,sha256=x,1\nR.jws,,\nR,,\n", dropped=["R.jws"]) == b"a,sha256=x,1\nR,,\n"


@pytest.mark.parametrize(
    ("text", "changed", "added"),
    [
        ("a,sha256=x,1\n", {}, {}),
        ("R,,\n", {"a": b""}, {}),
        ("a,,1\na,,1\nR,,\n", {}, {}),
        ("a,,1\nR,,\n", {}, {"a": b""}),
        ("a,1\nR,,\n", {}, {}),
        ('"a,,1\nR,,\n', {}, {}),
        ("R,,\nR,,\n", {}, {}),
    ],
)
def test_a_record_that_is_not_right_is_refused(
    text: str, changed: dict[str, bytes], added: dict[str, bytes]
) -> None:
    with pytest.raises(SourceError):
        _edit_record(text, changed, added=added)


@pytest.mark.parametrize(
    "text",
    [
        "R,,\n",
        _row("a", b"other") + "R,,\n",
        _row("a", b"b") + "R,,\n",  # of the same size
        _row("a", b"a").replace(",1\n", ",2\n") + "R,,\n",
        _row("a", b"a") * 2 + "R,,\n",
        _row("a", b"a") + _row("b", b"b") + "R,,\n",
        "a,,\nR,,\n",
        "a,md5=kAFQmDzST7DWlj99KOF_cg,1\nR,,\n",
    ],
)
def test_a_record_that_does_not_hold_is_refused(text: str) -> None:
    with pytest.raises(SourceError) as caught:
        check_record(text.encode(), "R", files={"a": b"a"}, unhashed={"R"})
    assert caught.value.file.startswith("R")
