# SPDX-License-Identifier: Apache-2.0
"""The form of an extended file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.overlay import extend, load_overlay, overlay_version, sha256, split

LINES = st.lists(st.sampled_from([b"x = 1", b"  y  ", b"", b"\t", b"# caf\xc3\xa9", b"\xff\x00"]), max_size=4)
BASES = st.builds(
    lambda lines, end, last: end.join(lines) + last,
    LINES,
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.sampled_from([b"", b"\n", b"\r\n", b"\r", b"   ", b"\n\n\n"]),
)


@given(base=BASES | st.binary(max_size=40), tail=st.binary(max_size=40), version=st.integers(0, 99))
def test_split_gives_back_what_extend_joined(base: bytes, tail: bytes, version: int) -> None:
    found = split(extend(base, tail, "some_op", version))
    assert found is not None
    assert (found.base, found.tail, found.version, found.op, found.intact) == (
        base,
        tail,
        version,
        "some_op",
        True,
    )


@given(base=BASES, tail=st.binary(max_size=20))
def test_the_marker_stands_on_a_line_of_its_own(base: bytes, tail: bytes) -> None:
    data = extend(base, tail, "op")
    assert data.startswith(base)
    assert data.endswith(tail)
    marker = data[len(base) : len(data) - len(tail)]
    assert marker.lstrip(b"\n").startswith(b"# >>> liger overlay for Megatron-Core, version ")
    assert marker.startswith(b"\n") == (base != b"" and not base.endswith(b"\n"))
    assert marker.endswith(b"\n")


@given(base=BASES)
def test_an_upstream_file_that_quotes_a_marker_is_still_told_apart(base: bytes) -> None:
    upstream = extend(base, b"not ours\n", "op", 7)
    found = split(extend(upstream + b"x = 1\n", b"tail\n", "op", 1))
    assert found is not None
    assert found.intact
    assert found.base == upstream + b"x = 1\n"


@given(base=st.binary(max_size=60))
def test_a_file_without_a_marker_is_not_extended(base: bytes) -> None:
    assert split(base) is None


@pytest.mark.parametrize(
    ("change", "base_intact", "tail_intact"),
    [
        (lambda d: d + b"#", True, False),
        (lambda d: d.replace(b"tail\n", b"tale\n"), True, False),
        (lambda d: b"#" + d, False, True),
        (lambda d: d.replace(b"x = 1", b"x = 2"), False, True),
        (lambda d: d.replace(b"\n", b"\r\n"), False, False),
        (lambda d: d.replace(b"# >>>", b"\n# >>>"), False, True),
        (lambda d: d.replace(b"base-bytes=6", b"base-bytes=5"), False, True),
        (lambda d: d.replace(b"base-bytes=6", b"base-bytes=999"), False, True),
    ],
)
def test_changes_by_hand_show(change: object, base_intact: bool, tail_intact: bool) -> None:
    assert callable(change)
    found = split(change(extend(b"x = 1\n", b"tail\n", "op", 1)))
    assert found is not None
    assert (found.base_intact, found.tail_intact) == (base_intact, tail_intact)


def test_the_marker_says_what_it_must() -> None:
    base, tail = b"x = 1", b"tail\n"
    assert extend(base, tail, "swiglu", 3) == (
        b"x = 1\n# >>> liger overlay for Megatron-Core, version 3 (op swiglu): all below this line was"
        b" added to the upstream file, which ends above it. base-sha256=%b"
        b" base-bytes=5 tail-sha256=%b\ntail\n" % (sha256(base).encode(), sha256(tail).encode())
    )


def test_the_projects_own_overlay_loads() -> None:
    overlay = load_overlay()
    assert overlay.version == overlay_version() >= 1
    assert overlay.ops
    assert "megatron/core/liger/__init__.py" in overlay.added
    assert "megatron/core/liger/kernels/swiglu.py" in overlay.added
    assert "megatron/core/fusions/fused_bias_swiglu.py" in overlay.tails
    assert not set(overlay.added) & set(overlay.tails)
