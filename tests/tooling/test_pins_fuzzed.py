# SPDX-License-Identifier: Apache-2.0
"""Pins that somebody has damaged: what is read back is sound, or refused with the file and the place."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.errors import ExpectationError
from scripts.manifest import ACTIONS, ROOT, Manifest, parse

RELEASES, FILES = (
    json.loads((ROOT / "patches" / name).read_text(encoding="utf-8"))
    for name in ("releases.json", "files.json")
)
HASH = re.compile(r"[0-9a-f]{64}")
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.text(max_size=3),
    st.just("0" * 63),
    st.just("A" * 64),
    st.just("../outside.py"),
    st.just([]),
    st.just([1]),
    st.just({}),
    st.just({"sha256": None}),
)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


PLACES = {name: list(places(doc)) for name, doc in (("releases", RELEASES), ("files", FILES))}


@dataclass(frozen=True)
class Damage:
    """What is done to one of the two documents, at ``place``; no place: to the whole of it."""

    name: str
    place: tuple[Any, ...]
    how: str
    key: str
    value: Any
    at: int

    def done(self) -> tuple[Any, Any]:
        """Both documents, with a value replaced, removed, renamed, added or changed in one letter."""
        documents = {"releases": copy.deepcopy(RELEASES), "files": copy.deepcopy(FILES)}
        if not self.place:
            documents[self.name] = self.value
            return documents["releases"], documents["files"]
        *way, last = self.place
        parent = documents[self.name]
        for key in way:
            parent = parent[key]
        old = parent[last]
        if self.how == "remove":
            del parent[last]
        elif self.how == "rename" and isinstance(parent, dict):
            parent[self.key] = parent.pop(last)
        elif self.how == "add" and isinstance(parent, dict):
            parent[self.key] = self.value
        elif self.how == "change" and isinstance(old, str) and old:
            at = self.at % len(old)
            parent[last] = old[:at] + self.key[:1] + old[at + 1 :]
        else:
            parent[last] = self.value
        return documents["releases"], documents["files"]


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    name = draw(st.sampled_from(sorted(PLACES)))
    place = draw(st.sampled_from([(), *PLACES[name]]))
    how = draw(st.sampled_from(["replace", "remove", "rename", "add", "change"]))
    return Damage(name, place, how, draw(st.text(max_size=4)), draw(VALUES), draw(st.integers(0, 80)))


def check(manifest: Manifest) -> None:
    """All that the pipeline takes for granted of pins."""
    for version, release in manifest.releases.items():
        assert version == release.version
        assert isinstance(release.source, str)
        for pin in (*release.wheels, *([release.sdist] if release.sdist else [])):
            assert HASH.fullmatch(pin.sha256)
            assert isinstance(pin.filename, str)
            assert "/" not in pin.filename
            assert pin.filename.startswith(f"megatron_core-{version}")
    assert all(isinstance(reason, str) for reason in manifest.yanked.values())
    for path, file in manifest.files.items():
        assert path == file.path
        assert path.startswith("megatron/")
        assert not {"", ".", ".."} & set(path.split("/"))
        assert file.action in ACTIONS
        assert re.fullmatch("[a-z0-9_]+", file.op)  # as the marker line has it
        assert all(part.isidentifier() for name in file.entries for part in name.split("."))
        assert all(isinstance(version, str) for version in file.absent)
        assert isinstance(file.optional, bool)
        for variant in file.variants:
            assert HASH.fullmatch(variant.sha256)
            assert all(isinstance(version, str) for version in variant.releases)
            assert all(print_ is None or isinstance(print_, str) for print_ in variant.entries.values())
    for text in manifest.licenses:
        assert HASH.fullmatch(text.sha256)
        assert text.path.startswith("LICENSES/")
        assert "/" not in text.path.removeprefix("LICENSES/")


def test_the_pins_as_they_are() -> None:
    check(parse(RELEASES, FILES))


@settings(deadline=None, max_examples=500)
@given(damage=damages())
def test_damaged_pins_never_get_past_the_schema(damage: Damage) -> None:
    documents = damage.done()
    try:
        manifest = parse(*documents)
    except ExpectationError as error:
        refusal = error
    else:
        check(manifest)
        return
    assert refusal.file.startswith(("patches/releases.json", "patches/files.json"))
    assert refusal.remedy
