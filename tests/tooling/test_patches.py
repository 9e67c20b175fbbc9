# SPDX-License-Identifier: Apache-2.0
"""Files with diffs: what is no diff is told with its line, what is one is applied strictly and comes back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.errors import ExpectationError
from scripts.manifest import load
from scripts.overlay import ROOT, join_patched, load_overlay, sha256, split
from scripts.patches import (
    Hunk,
    MalformedError,
    change,
    comments,
    from_comments,
    parse,
    restore,
    split_lines,
)

BASE = b"one\ntwo\nthree\nfour\n"
HUNKS = (
    Hunk(0, (), 1, (b"zero\n",)),
    Hunk(2, (b"two\n", b"three\n"), 3, (b"2\n",)),
    Hunk(4, (), 5, (b"5\n",)),
)
AFTER = b"zero\none\n2\nfour\n5\n"
PATH = "megatron/core/models/caller.py"

TEXT = (
    b"# SPDX-License-Identifier: Apache-2.0\n# entry: call\n#   why: to count\n\n"
    + f"# fits: {sha256(BASE)} becomes: {sha256(AFTER)}\n".encode()
    + b"--- a/megatron/core/models/caller.py\n+++ b/megatron/core/models/caller.py\n"
    + b"@@ -0,0 +1 @@\n+zero\n@@ -2,2 +3 @@\n-two\n-three\n+2\n@@ -4,0 +5 @@\n+5\n"
)


def test_a_file_with_diffs_is_read_and_applied() -> None:
    patch = parse(TEXT)
    assert (patch.path, patch.header) == (PATH, b"# entry: call\n#   why: to count\n")
    assert [diff.hunks for diff in patch.diffs] == [HUNKS]
    assert patch.change(BASE) == (AFTER, HUNKS)
    assert patch.change(BASE + b"\n") is None  # another content
    assert restore(AFTER, HUNKS) == BASE


def test_one_diff_serves_contents_that_have_its_lines_elsewhere() -> None:
    base, after = b"# above\n# that\none\ntwo\n", b"# above\n# that\none\n2\n"
    lines = b"# fits: %b shift: +2 becomes: %b\n" % (sha256(base).encode(), sha256(after).encode())
    first = b"@@ -2 +2 @@\n-two\n+2\n"
    body = TEXT[: TEXT.index(b"@@")].replace(sha256(AFTER).encode(), sha256(b"one\n2\n").encode())
    body = body.replace(sha256(BASE).encode(), sha256(b"one\ntwo\n").encode())
    text = body.replace(b"--- a/", lines + b"--- a/") + first
    patch = parse(text)
    assert patch.change(b"one\ntwo\n") == (b"one\n2\n", (Hunk(2, (b"two\n",), 2, (b"2\n",)),))
    assert patch.change(base) == (after, (Hunk(4, (b"two\n",), 4, (b"2\n",)),))
    # A wrong number of lines is no reason to look elsewhere, and a wrong result none to go on.
    assert parse(text.replace(b"shift: +2", b"shift: +1")).change(base) is None
    assert parse(text.replace(b"shift: +2", b"shift: -9")).change(base) is None
    assert parse(text.replace(sha256(after).encode(), b"0" * 64)).change(base) is None


@pytest.mark.parametrize(
    "base",
    [
        b"",
        b"one\n",
        b"one\nTwo\nthree\nfour\n",
        b"one\ntwo\nthree\nfour",
        b"\n" + BASE,
        b"one\r\n" + BASE[4:],
    ],
)
def test_nothing_is_searched_for(base: bytes) -> None:
    if base.startswith(b"one\r\n"):  # the first line is none of theirs
        assert change(base, HUNKS) is not None
    else:
        assert change(base, HUNKS) is None


ROWS = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"\n", b"  c\n", b"\xff\n", b"@@ -1 +1 @@\n", b"-\n"]), max_size=5
)


@st.composite
def changed(draw: Any) -> tuple[bytes, tuple[Hunk, ...]]:
    """A content and hunks that fit it."""
    base: list[bytes] = []
    hunks: list[Hunk] = []
    shift = 0
    for _ in range(draw(st.integers(1, 4))):
        base += draw(ROWS)
        removed, added = tuple(draw(ROWS)), tuple(draw(ROWS))
        old = len(base) + bool(removed)
        if removed != added:
            hunks.append(Hunk(old, removed, len(base) + shift + bool(added), added))
            shift += len(added) - len(removed)
        base += [*removed, b"between\n"]
    base += draw(ROWS)
    last = draw(st.sampled_from([b"", b"last"]))
    return b"".join(base) + last, tuple(hunks)


@given(changed())
def test_what_is_applied_comes_back_and_is_found_in_the_comments(
    case: tuple[bytes, tuple[Hunk, ...]],
) -> None:
    base, hunks = case
    after = change(base, hunks)
    assert after is not None
    assert restore(after, hunks) == base
    if not hunks:
        return
    header = b"# entry: call\n#   why: to count\n"
    assert from_comments(comments(header, hunks)) == hunks
    data = join_patched(base, after, hunks, header, "some_op", 7)
    assert data.startswith(after)
    found = split(data)
    assert found is not None
    assert (found.base, found.op, found.version, found.hunks, found.intact) == (
        base,
        "some_op",
        7,
        hunks,
        True,
    )
    # The diff as written is read as it is.
    text = TEXT[: TEXT.index(b"@@")] + b"".join(hunk.dump() for hunk in hunks)
    assert parse(text).diffs[0].hunks == hunks


@pytest.mark.parametrize(
    ("change_by_hand", "base_intact", "tail_intact"),
    [
        (lambda d: d + b"# more\n", False, False),
        (lambda d: b"# more\n" + d, False, True),
        (lambda d: d.replace(b"four", b"fore", 1), False, True),
        (lambda d: d.replace(b"\n2\n", b"\n3\n", 1), False, True),
        (lambda d: d.replace(b"why: to count", b"why: to tell"), True, False),
        (lambda d: d.replace(b"# -two", b"# -2"), False, False),
        (lambda d: d.replace(b"# @@ -2,2", b"# @@ -2"), False, False),
        (lambda d: d.replace(b"\n", b"\r\n"), False, False),
    ],
)
def test_a_change_by_hand_of_a_patched_file_shows(
    change_by_hand: Any, base_intact: bool, tail_intact: bool
) -> None:
    data = join_patched(BASE, AFTER, HUNKS, parse(TEXT).header, "op", 1)
    found = split(change_by_hand(data))
    assert found is not None
    assert (found.base_intact, found.tail_intact) == (base_intact, tail_intact)


FITS = TEXT.splitlines(keepends=True)[4]


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        (b"# SPDX", b"# spdx", 1, "SPDX"),
        (b"#   why", b"#why", 3, "a comment"),
        (FITS, b"", 5, "# fits: HASH"),
        (FITS, FITS.replace(b"becomes", b"shift: 3 becomes"), 5, "# fits: HASH"),
        (FITS, FITS + FITS, 6, "each content in one diff"),
        (b"--- a/", b"--- ", 6, "--- a/PATH"),
        (b"+++ b/megatron", b"+++ b/other", 7, "+++ b/megatron/core/models/caller.py"),
        (b"@@ -0,0 +1 @@", b"@@ -0,0 +1 @@ class A:", 8, "@@ -LINE,COUNT"),
        (b"@@ -0,0 +1 @@", b"@@ -0,0 +2 @@", 8, "line 1 of the result"),
        (b"@@ -0,0 +1 @@\n+zero\n", b"", 8, "line 2 of the result"),
        (b"@@ -2,2 +3 @@", b"@@ -2,3 +3 @@", 13, "3 lines that begin with -"),
        (b"-three", b" three", 12, "2 lines that begin with - (no context)"),
        (b"+2\n", b"+2\n+3\n", 14, "# fits: HASH"),
        (b"+2\n", b"", 13, "1 lines that begin with +"),
        (b"-three\n+2\n", b"+2\n-three\n", 12, "2 lines that begin with -"),
        (b"-three\n", b"-three\r\n", 12, "without \\r"),
        (b"@@ -4,0 +5 @@\n+5\n", b"@@ -3,1 +4 @@\n-three\n+5\n", 14, "in order"),
        (b"@@ -4,0 +5 @@\n+5\n", b"@@ -4 +4 @@\n-four\n+four\n", 14, "changes something"),
        (b"@@ -4,0 +5 @@\n+5\n", b"@@ -4,0 +4,0 @@\n", 14, "changes something"),
        (b"@@ -0,0 +1 @@\n+zero\n", b"@@ -0 +0 @@\n-zero\n+0\n", 8, "line 0 of the result"),
        (b"@@ -4,0 +5 @@\n+5\n", b"@@ -4,0 +5 @@\n+5", 15, "end in \\n"),
        (b"+5\n", b"+5\n\\ No newline at end of file\n", 16, "# fits: HASH"),
        (TEXT[TEXT.index(b"# fits") :], b"", 4, "a diff"),
        (TEXT[TEXT.index(b"@@") :], b"", 8, "@@ -LINE,COUNT"),
        (TEXT, b"", 1, "SPDX"),
    ],
)
def test_a_malformed_one_is_told_with_its_line(old: bytes, new: bytes, line: int, expected: str) -> None:
    assert TEXT.count(old) == 1
    with pytest.raises(MalformedError) as caught:
        parse(TEXT.replace(old, new))
    assert (caught.value.line, expected in caught.value.expected) == (line, True), caught.value


def test_diffs_of_two_files_are_not_one_file() -> None:
    other = (
        TEXT[TEXT.index(b"# fits") :].replace(b"caller.py", b"other.py").replace(b"# fits: ", b"# fits: 0")
    )
    other = other.replace(sha256(BASE).encode(), sha256(BASE)[:63].encode())
    with pytest.raises(MalformedError, match=r"caller\.py and megatron/core/models/other\.py"):
        parse(TEXT + b"\n" + other)


@pytest.mark.parametrize(
    "hunks",
    [
        [Hunk(2, (b"two\n",), 2, ()), Hunk(1, (b"one\n",), 1, ())],  # the second above the first
        [Hunk(1, (b"one\n", b"two\n"), 1, ()), Hunk(2, (b"two\n",), 1, (b"2\n",))],  # one inside another
        [Hunk(5, (), 6, (b"5\n",))],  # beyond the end
        [Hunk(3, (b"two\n",), 3, ())],  # another line stands there
        [Hunk(4, (b"four\n", b"five\n"), 4, ())],  # half of it is beyond the end
    ],
)
def test_hunks_that_do_not_go_onto_a_text(hunks: list[Hunk]) -> None:
    assert change(BASE, hunks) is None


def test_nothing_is_put_behind_a_line_without_an_end() -> None:
    assert change(BASE[:-1], [Hunk(4, (), 5, (b"5\n",))]) is None
    assert change(b"", [Hunk(0, (), 1, (b"1\n",))]) == b"1\n"


def test_a_header_may_stand_right_above_its_diff() -> None:
    text = TEXT.replace(b"\n\n# fits", b"\n# fits")
    assert parse(text).header == parse(TEXT).header
    assert parse(text).change(BASE) == (AFTER, HUNKS)


def test_a_draft_of_several_hunks_is_where_all_of_them_stand() -> None:
    top = TEXT[: TEXT.index(b"@@")]
    body = b"@@ -1 +1 @@\n-one\n+1\n@@ -3 +3 @@\n-three\n+3\n"
    base = b"one\nelse\none\ntwo\nthree\n"
    draft = parse(top + body).draft(base)
    assert draft is not None
    assert " shift: +2 " in draft[1]


def test_a_draft_is_the_one_place_where_all_lines_stand() -> None:
    hunk = Hunk(2, (b"two\n", b"three\n"), 2, (b"2\n",))
    top = TEXT[: TEXT.index(b"@@")]
    patch = parse(top + hunk.dump())
    base, after = b"above\n" + BASE, b"above\none\n2\nfour\n"
    line = f"# fits: {sha256(base)} shift: +1 becomes: {sha256(after)}"
    assert patch.draft(base) == (patch.diffs[0], line)
    # Listed as it was drafted, it fits.
    listed = parse(top.replace(b"---", line.encode() + b"\n---") + hunk.dump())
    assert listed.change(base) == (after, (hunk.moved(1),))
    assert patch.draft(BASE + BASE) is None  # two places
    assert parse(top + b"@@ -1,0 +2 @@\n+new\n").draft(base) is None  # no line to find it by
    assert patch.draft(b"two\nThree\n") is None


def test_the_projects_own_diffs_fit_every_pinned_variant_once() -> None:
    manifest, overlay = load(), load_overlay()
    patched = {path: file for path, file in manifest.files.items() if file.action == "patch"}
    assert patched.keys() == overlay.diffs.keys()
    assert patched
    for path, file in patched.items():
        fits = [sha for diff in overlay.diffs[path].diffs for sha in diff.fits]
        assert sorted(fits) == sorted(v.sha256 for v in file.variants if v.has_entries)


def test_a_malformed_diff_or_a_missing_one_stops_every_command(tmp_path: Path) -> None:
    for folder in ("patches", "overlay", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "patches/megatron/core/models/backends.py.patch"
    whole = path.read_bytes()
    path.write_bytes(whole + b"more\n")
    with pytest.raises(ExpectationError) as caught:
        load_overlay(tmp_path)
    rows = whole.count(b"\n")
    assert caught.value.file == f"patches/megatron/core/models/backends.py.patch:{rows + 1}"
    path.write_bytes(b"\n".join(row for row in whole.split(b"\n") if b"7d0c24d2767f" not in row))
    with pytest.raises(ExpectationError, match=r"a diff for 7d0c24d2767f… \(0.17.0, 0.17.1\)"):
        load_overlay(tmp_path)
    path.unlink()
    with pytest.raises(ExpectationError, match="the diffs of a pinned file"):
        load_overlay(tmp_path)
    for stray in ("models/stray.py.patch", "fusions/fused_bias_swiglu.py.patch"):  # that one has a tail
        file = tmp_path / "patches/megatron/core" / stray
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(whole)
        with pytest.raises(ExpectationError, match=r"a pin in patches/files\.json"):
            load_overlay(tmp_path)
        file.unlink()


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"# -two", b"x -two"), (b"# @@ -2,2", b"# -2,2"), (b"# +5\n", b"# +5\n# more\n"), (b"# @@", b"#  @")],
)
def test_comments_that_are_no_hunks(old: bytes, new: bytes) -> None:
    text = comments(parse(TEXT).header, HUNKS)
    assert from_comments(text) == HUNKS
    assert from_comments(text.replace(old, new)) is None
    assert from_comments(b"") is None


def test_lines_keep_their_ends() -> None:
    assert split_lines(b"a\n\nb\rc\r\nd") == [b"a\n", b"\n", b"b\rc\r\n", b"d"]
    assert split_lines(b"") == []
