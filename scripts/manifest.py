# SPDX-License-Identifier: Apache-2.0
"""The pins: which releases are supported, and which variants of each touched file are known."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.errors import ExpectationError, ReleaseError, UsageError

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1
ACTIONS = ("extend", "patch")


@dataclass(frozen=True)
class PinnedFile:
    """A file of a release on PyPI and its sha256."""

    filename: str
    sha256: str


@dataclass(frozen=True)
class License:
    """A text of upstream's licence: a file below ``LICENSES/``, and the releases that are under it."""

    path: str
    sha256: str
    releases: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Release:
    """A supported release: its wheels, its sdist, and where their hashes came from."""

    version: str
    wheels: tuple[PinnedFile, ...]
    sdist: PinnedFile | None = None
    source: str = ""


@dataclass(frozen=True)
class Preview:
    """A commit of upstream's main, before a release: its files are pinned, and it has no wheel.

    ``version`` is the number that the commit gives itself, ``.preview+`` and the commit's first 8 digits.
    Files are listed under it as under a release, and no release can have that name.
    """

    version: str
    commit: str
    source: str


@dataclass(frozen=True)
class Variant:
    """One known content of a touched file: the releases that have it, and a fingerprint per entry.

    An entry that this content does not define has None. One without any entry is known, and left as it is.
    """

    sha256: str
    releases: tuple[str, ...]
    source: str
    entries: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def has_entries(self) -> bool:
        return not self.entries or any(self.entries.values())


@dataclass(frozen=True)
class TouchedFile:
    """An upstream file that the overlay changes; ``entries`` are the names taken over or changed in it.

    ``absent`` are the releases that have no such file. An ``optional`` one stays upstream's in a tree where
    it is none of the variants, and its op goes on without it; any other is refused there. Where a variant of
    any other has no entry, the release has not got the op.
    """

    path: str
    action: str
    op: str
    entries: tuple[str, ...]
    variants: tuple[Variant, ...]
    absent: tuple[str, ...] = ()
    optional: bool = False

    def variant(self, sha256: str) -> Variant | None:
        return next((v for v in self.variants if v.sha256 == sha256), None)


@dataclass(frozen=True)
class Manifest:
    """All pins. ``files`` is ordered: the ops come in the order of their first file."""

    releases: Mapping[str, Release]
    yanked: Mapping[str, str]
    files: Mapping[str, TouchedFile]
    licenses: tuple[License, ...] = ()
    previews: Mapping[str, Preview] = field(default_factory=dict)

    @property
    def known(self) -> tuple[str, ...]:
        """The names that files are listed under: releases, then previews."""
        return (*self.releases, *self.previews)

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f.op for f in self.files.values()))

    def files_of(self, op: str) -> tuple[TouchedFile, ...]:
        return tuple(f for f in self.files.values() if f.op == op)

    def release(self, spec: str) -> Release:
        """The release that ``megatron==0.16.1`` names (``megatron-core==…`` is the same).

        Raises UsageError for another form, ReleaseError for a release that is not pinned or is yanked.
        """
        version = parse_spec(spec, self.newest())
        supported = ", ".join(self.releases)
        remedy = f"use megatron=={self.newest()}, or --tree with a tree whose files are known"
        if version in self.yanked:
            reason = f"{version}, which upstream has withdrawn ({self.yanked[version]})"
            raise ReleaseError("patches/releases.json", f"one of {supported}", reason, remedy)
        if version in self.previews:
            commit = self.previews[version].commit
            raise ReleaseError(
                "patches/releases.json",
                f"one of {supported}",
                f"{version}, a preview, which has no wheel",
                f"give --tree with a checkout of upstream's commit {commit}",
            )
        if version not in self.releases:
            raise ReleaseError("patches/releases.json", f"one of {supported}", version, remedy)
        return self.releases[version]

    def license(self, version: str) -> License:
        """Upstream's licence text of a release. Raises ExpectationError when none is pinned."""
        found = next((text for text in self.licenses if version in text.releases), None)
        if found is None:
            where = "patches/releases.json (licenses)"
            raise ExpectationError(where, f"the licence text of {version}", "none", "pin the release anew")
        return found

    def newest(self) -> str:
        return list(self.releases)[-1] if self.releases else "VERSION"


def parse_spec(spec: str, example: str = "0.16.1") -> str:
    """``megatron==0.16.1`` → ``"0.16.1"``; raises UsageError for another form."""
    match = re.fullmatch(r"megatron(?:[-_.]core)?\s*==\s*(\S+)", spec.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError("command line", "megatron==VERSION", spec, f"write megatron=={example}")
    return normalize(match[1])


_VERSION = r"\d+(\.\d+)*(\.?[a-z]+\d*)?(\+[a-z0-9.]+)?"
PREVIEW = ".preview+"


def normalize(version: str) -> str:
    """A version without ``v`` before it or capitals; raises UsageError for what is no version."""
    found = version.lower().removeprefix("v")
    if not re.fullmatch(_VERSION, found):
        raise UsageError("command line", "a version such as 0.16.1", version, "write megatron==0.16.1")
    return found


def load(root: Path = ROOT) -> Manifest:
    """Read ``patches/releases.json`` and ``patches/files.json``.

    Raises ExpectationError, with the file and the place in it, when they do not follow the schema.
    """
    return parse(_json(root / "patches" / "releases.json"), _json(root / "patches" / "files.json"))


def parse(releases: Any, files: Any) -> Manifest:
    """The manifest that two parsed JSON documents describe; raises ExpectationError on a wrong shape."""
    r = _Checked("patches/releases.json", releases)
    f = _Checked("patches/files.json", files)
    for document in (r, f):
        if document.get("schema", int) != SCHEMA:
            document.fail("schema", str(SCHEMA), repr(document.value.get("schema")))
    r.only("schema", "releases", "previews", "yanked", "licenses")
    f.only("schema", "files")
    pinned = {version: _release(version, node) for version, node in r.nodes("releases")}
    return Manifest(
        releases=dict(sorted(pinned.items(), key=lambda item: order(item[0]))),
        yanked=r.get_texts("yanked"),
        files={path: _touched(path, node) for path, node in f.nodes("files")},
        licenses=tuple(_license(node) for node in r.list_nodes("licenses")),
        previews={name: _preview(name, node) for name, node in r.nodes("previews")},
    )


def preview_name(version: str, commit: str) -> str:
    """The name of a preview: ``0.20.0.preview+d98e8a64``."""
    return f"{version}{PREVIEW}{commit[:8]}"


def _preview(name: str, node: _Checked) -> Preview:
    node.only("commit", "source")
    commit = node.text("commit", "[0-9a-f]{40}")
    version = name.split(PREVIEW)[0]
    if not re.fullmatch(r"\d+(\.\d+)*", version, re.ASCII) or name != preview_name(version, commit):
        node.fail("", f"a version, then {PREVIEW}{commit[:8]}", repr(name))
    return Preview(name, commit, node.get("source", str))


def _release(version: str, node: _Checked) -> Release:
    if not re.fullmatch(_VERSION, version, re.ASCII) or PREVIEW in version:
        node.fail("", "a version such as 0.16.1", repr(version))
    wheels = tuple(_pinned(version, child) for child in node.list_nodes("wheels"))
    sdist = _pinned(version, node.node("sdist")) if "sdist" in node.value else None
    node.only("wheels", "sdist", "source")
    return Release(version, wheels, sdist, node.get("source", str))


def _license(node: _Checked) -> License:
    node.only("path", "sha256", "releases", "source")
    path = node.text("path", r"LICENSES/[A-Za-z0-9][\w.+-]*")
    return License(path, node.sha256("sha256"), node.get_list("releases", _VERSION), node.get("source", str))


def _pinned(version: str, node: _Checked) -> PinnedFile:
    node.only("filename", "sha256")
    filename = node.text("filename", rf"megatron_core-{re.escape(version)}(-[\w.]+)*\.(whl|tar\.gz)")
    return PinnedFile(filename, node.sha256("sha256"))


def _touched(path: str, node: _Checked) -> TouchedFile:
    node.only("action", "op", "entries", "variants", "absent", "optional")
    if node.get("action", str) not in ACTIONS:
        node.fail("action", " or ".join(ACTIONS), repr(node.value["action"]))
    if not safe(path):
        node.fail("", "a posix path below megatron/", repr(path))
    return TouchedFile(
        path=path,
        action=node.get("action", str),
        op=node.text("op", "[a-z0-9_]+"),
        entries=node.get_list("entries", r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"),
        variants=tuple(_variant(child) for child in node.list_nodes("variants")),
        absent=node.get_list("absent", _VERSION) if "absent" in node.value else (),
        optional=node.get("optional", bool) if "optional" in node.value else False,
    )


def _variant(node: _Checked) -> Variant:
    node.only("sha256", "releases", "source", "entries")
    return Variant(
        node.sha256("sha256"),
        node.get_list("releases", _VERSION),
        node.get("source", str),
        node.get_texts_or_none("entries"),
    )


def safe(path: str) -> bool:
    """Whether a path from a JSON file stays below ``megatron/`` in a tree, and can be a path at all."""
    parts = path.split("/")
    below = (
        len(parts) > 1 and parts[0] == "megatron" and not {"", ".", ".."} & set(parts) and "\\" not in path
    )
    # isprintable: no control characters and no lone surrogates; a file system takes 255 bytes a name.
    return below and path.isprintable() and len(path) < 1024 and all(len(p.encode()) <= 255 for p in parts)


def span(releases: Sequence[str]) -> str:
    """Releases for a reader: up to three by name, of more the first, the last and how many."""
    if len(releases) <= 3:
        return ", ".join(releases)
    return f"{releases[0]} … {releases[-1]} ({len(releases)} releases)"


def order(version: str) -> tuple[tuple[int, int | str], ...]:
    """What versions are sorted by."""
    return tuple((0, int(p)) if p.isdigit() else (1, p) for p in re.split(r"[.+-]", version))


def _json(path: Path) -> Any:
    where = f"patches/{path.name}"
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=lambda p: _unique(where, p))
    except FileNotFoundError:
        raise ExpectationError(where, "the pins", "no file", "restore it from version control") from None
    except ValueError as error:
        raise ExpectationError(where, "JSON", str(error), "correct the file") from None


def _unique(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ExpectationError(where, "each key once", f"{', '.join(twice)} twice", "keep one of them")
    return found


class _Checked:
    """A JSON object that names file and place when something in it has the wrong shape."""

    def __init__(self, where: str, value: Any, place: str = "") -> None:
        self.where, self.place = where, place
        self.value: dict[str, Any] = {}
        if not isinstance(value, dict):
            self.fail("", "an object", type(value).__name__)
        self.value = value

    def fail(self, key: str, expected: str, found: str) -> None:
        place = " → ".join(part for part in (self.place, key) if part)
        where = f"{self.where} ({place})" if place else self.where
        raise ExpectationError(where, expected, found, "correct the pin")

    def get(self, key: str, kind: type[Any]) -> Any:
        found = self.value.get(key)
        if type(found) is not kind:  # true is no integer here
            self.fail(key, kind.__name__, repr(found))
        return found

    def sha256(self, key: str) -> str:
        found: str = self.get(key, str)
        if not re.fullmatch(r"[0-9a-f]{64}", found):
            self.fail(key, "64 lower-case hexadecimal digits", found)
        return found

    def text(self, key: str, pattern: str) -> str:
        found: str = self.get(key, str)
        if not re.fullmatch(pattern, found, re.ASCII):
            self.fail(key, f"what matches {pattern}", repr(found))
        return found

    def get_list(self, key: str, pattern: str) -> tuple[str, ...]:
        found = self.get(key, list)
        if not all(isinstance(item, str) and re.fullmatch(pattern, item, re.ASCII) for item in found):
            self.fail(key, f"a list of what matches {pattern}", repr(found))
        return tuple(found)

    def get_texts(self, key: str) -> dict[str, str]:
        found: dict[str, str] = self.get(key, dict)
        if not all(isinstance(item, str) for item in found.values()):
            self.fail(key, "an object of strings", repr(found))
        return found

    def get_texts_or_none(self, key: str) -> dict[str, str | None]:
        found: dict[str, str | None] = self.get(key, dict)
        if not all(item is None or isinstance(item, str) for item in found.values()):
            self.fail(key, "an object of strings and nulls", repr(found))
        return found

    def node(self, key: str) -> _Checked:
        return _Checked(self.where, self.get(key, dict), f"{self.place} → {key}".lstrip(" →"))

    def nodes(self, key: str) -> list[tuple[str, _Checked]]:
        return [(name, _Checked(self.where, item, name)) for name, item in self.get(key, dict).items()]

    def list_nodes(self, key: str) -> list[_Checked]:
        items = enumerate(self.get(key, list))
        return [_Checked(self.where, item, f"{self.place} → {key}[{i}]") for i, item in items]

    def only(self, *keys: str) -> None:
        for key in self.value:
            if key not in keys:
                self.fail(key, f"one of {', '.join(keys)}", "an unknown key")
