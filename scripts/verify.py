# SPDX-License-Identifier: Apache-2.0
"""Judge a tree against the pins, and plan what apply writes into it. Nothing here writes.

Each file is judged by its bytes alone, and planning starts from upstream's bytes recovered from it. That is
why apply completes a half-applied tree, one with another set of ops, or one of another overlay version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scripts.errors import ExpectationError, OverlayError, StateError, TreeError, UsageError
from scripts.manifest import ACTIONS, Manifest, Release, TouchedFile, Variant, span
from scripts.overlay import MARK, PACKAGE, RECORD, Overlay, sha256, split
from scripts.record import Record, dump, read_record

Read = Callable[[str], "bytes | None"]

PRISTINE, OVERLAID, EDITED, UNKNOWN, MISSING = "pristine", "overlaid", "edited", "unknown", "missing"
ABSENT, LEFT = "absent", "left"
UNTOUCHED = (PRISTINE, ABSENT, LEFT)


@dataclass(frozen=True)
class FileState:
    """One file of a tree.

    ``verdict`` is pristine (upstream's file, or nothing where the overlay adds one), overlaid, edited
    (changed by hand after apply, or content that is not ours at an added path), unknown (an upstream file
    that is not pinned), missing, absent (the releases that the tree's other files are of have no such
    file, or this content of it has no entry), or left (an optional file that is unknown or missing: it stays
    as it is). ``base`` holds upstream's bytes, where they can be told. ``current`` says whether an overlaid
    file is what this checkout writes.
    """

    path: str
    action: str
    op: str | None
    verdict: str
    data: bytes | None
    base: bytes | None = None
    variant: Variant | None = None
    version: int | None = None
    current: bool = False
    without: tuple[str, ...] = ()

    @property
    def releases(self) -> tuple[str, ...]:
        """The releases that this is the file of, or that have no such file as this tree has none."""
        return self.variant.releases if self.variant else self.without


@dataclass(frozen=True)
class State:
    """What a tree holds: its record, if any, and each file that the overlay or the record names."""

    record: Record | None
    files: tuple[FileState, ...]

    @property
    def upstream(self) -> tuple[FileState, ...]:
        return tuple(f for f in self.files if f.action != "add")

    @property
    def added(self) -> tuple[FileState, ...]:
        return tuple(f for f in self.files if f.action == "add")

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f.op for f in self.upstream if f.op and f.verdict == OVERLAID))

    @property
    def left(self) -> tuple[FileState, ...]:
        return tuple(f for f in self.upstream if f.verdict == LEFT)


@dataclass(frozen=True)
class Action:
    """One write. ``kind``: record, add, extend, patch, restore (an op no longer asked for, or a content that
    nothing fits) or remove (a stale file).

    ``before`` is what is there now (None: nothing), ``after`` what will be (empty for remove).
    """

    path: str
    kind: str
    op: str | None
    before: bytes | None
    after: bytes

    @property
    def changes(self) -> bool:
        return self.before is not None if self.kind == "remove" else self.before != self.after


@dataclass(frozen=True)
class Plan:
    """What apply writes, in order, the record first.

    A tree that was overlaid otherwise before gets a record that also names the old hashes first, and the
    final one last, so that every state in between is recognised. ``bases`` are upstream's bytes of the files
    that are changed, ``others`` those of the files that shall be upstream's; ``left`` are the files of the
    ops that stay upstream's, ``missing`` the ops that were asked for and that the tree's release has not got.
    """

    actions: tuple[Action, ...]
    ops: tuple[str, ...]
    release: Release | None
    files_as_in: tuple[str, ...]
    bases: Mapping[str, bytes] = field(default_factory=dict)
    others: Mapping[str, bytes] = field(default_factory=dict)
    left: tuple[FileState, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        return any(action.changes for action in self.actions)

    def after(self) -> dict[str, bytes]:
        """The bytes of every file that the finished tree has from us."""
        return {a.path: a.after for a in self.actions if a.kind in ("record", "add", *ACTIONS)}


def inspect(read: Read, manifest: Manifest, overlay: Overlay) -> State:
    """Judge every file that the pins, the overlay or the tree's record name."""
    record = read_record(read(RECORD))
    known = record.known() if record else {}
    files = [_upstream(read, file, overlay) for file in manifest.files.values()]
    # Files that another overlay changed and that this one leaves alone.
    files += [
        _upstream(read, TouchedFile(path, "extend", "", (), ()), overlay)
        for path in sorted(known)
        if path not in manifest.files and not path.startswith(f"{PACKAGE}/")
    ]
    files = _absences(files, manifest)
    adds = {path for path in known if path.startswith(f"{PACKAGE}/")} | set(overlay.added)
    files += [_added(path, read(path), known, overlay) for path in sorted(adds)]
    return State(record, tuple(files))


def _absences(files: list[FileState], manifest: Manifest) -> list[FileState]:
    """A missing file is absent where all files that are there are of a release without it, else left where
    it is optional."""
    of = [set(file.releases) for file in files if file.verdict not in (MISSING, LEFT)]
    common = set.intersection(*of) if of else set()

    def judged(file: FileState) -> FileState:
        pin = manifest.files.get(file.path)
        if file.verdict != MISSING or pin is None:
            return file
        if common.intersection(pin.absent):
            return replace(file, verdict=ABSENT, without=pin.absent)
        return replace(file, verdict=LEFT) if pin.optional else file

    return [judged(file) for file in files]


def _upstream(read: Read, file: TouchedFile, overlay: Overlay) -> FileState:
    data = read(file.path)
    if data is None:
        return FileState(file.path, file.action, file.op, MISSING, None)
    found = split(data)
    base = data if found is None else found.base
    # The pins say of which op a file is; the marker, which no hash covers, may be another overlay's.
    op = file.op or (found.op if found else "")
    if found is not None and not found.intact:
        base_or_none = found.base if found.base_intact else None
        return FileState(file.path, file.action, op, EDITED, data, base_or_none, version=found.version)
    variant = file.variant(sha256(base))
    if found is None:
        # A formatter has broken the marker line, say, or a merge has lost what stands from it on.
        damaged = variant is None and (MARK in data or _refers(data) or _unmarked(data, file.path, overlay))
        unknown = LEFT if file.optional else UNKNOWN
        verdict = EDITED if damaged else unknown
        if variant is not None:
            verdict = PRISTINE if variant.has_entries else ABSENT
        return FileState(file.path, file.action, file.op, verdict, data, base, variant)
    current = data == overlay.over(file.path, base, op)
    return FileState(file.path, file.action, op, OVERLAID, data, base, variant, found.version, current)


def _refers(data: bytes) -> bool:
    return PACKAGE.replace("/", ".").encode() in data


def _unmarked(data: bytes, path: str, overlay: Overlay) -> bool:
    """Whether ``data`` is what a diff makes of a known content, without the block that says so."""
    patch = overlay.diffs.get(path)
    results = {fit.becomes for diff in patch.diffs for fit in diff.fits.values()} if patch else set()
    return bool({sha256(data), sha256(data + b"\n"), sha256(data[:-1])} & results)


def _added(path: str, data: bytes | None, known: Mapping[str, list[str]], overlay: Overlay) -> FileState:
    ours = overlay.added.get(path)
    if data is None:
        return FileState(path, "add", None, PRISTINE, None)
    if data == ours:
        return FileState(path, "add", None, OVERLAID, data, version=overlay.version, current=True)
    if sha256(data) in known.get(path, ()):
        return FileState(path, "add", None, OVERLAID, data)
    return FileState(path, "add", None, EDITED, data)


def select_ops(overlay: Overlay, ops: Iterable[str] | None) -> tuple[str, ...]:
    """The ops to apply, in the overlay's order; None means all.

    Raises UsageError for an unknown op, and for none.
    """
    if ops is None:
        return overlay.ops
    wanted = set(ops)
    unknown = sorted(wanted - set(overlay.ops))
    if unknown or not wanted:
        remedy = f"use --ops {','.join(overlay.ops)} or fewer of them"
        raise UsageError("--ops", f"some of {', '.join(overlay.ops)}", ", ".join(unknown) or "none", remedy)
    return tuple(op for op in overlay.ops if op in wanted)


def plan(
    read: Read,
    manifest: Manifest,
    overlay: Overlay,
    ops: Iterable[str] | None = None,
    release: Release | None = None,
) -> Plan:
    """Plan apply for the tree (or wheel) behind ``read``, which gives a file's bytes, or None for no file.

    With ``release`` every touched file must be that release's. Raises TreeError for a file that is missing or
    not pinned, StateError for one that was changed by hand or is in the way, UsageError for an unknown op.
    """
    ops = select_ops(overlay, ops)
    state = inspect(read, manifest, overlay)
    _refuse_edited(state)
    _refuse_unknown(state, manifest, ops, release)
    asked, ops = ops, _present(state, manifest, ops)
    bases: dict[str, bytes] = {}
    writes: list[Action] = []
    restores: list[Action] = []
    as_in: list[set[str]] = []
    for file in state.upstream:
        if file.op in ops and file.verdict == ABSENT:
            as_in.append(set(file.releases))
        elif file.op in ops and overlay.changes(file.path) and file.base is not None and file.variant:
            bases[file.path] = file.base
            as_in.append(set(file.releases))
            after = _over(overlay, file.path, file.base, file.op)
            writes.append(Action(file.path, file.action, file.op, file.data, after))
        elif file.verdict == OVERLAID and file.base is not None:
            restores.append(Action(file.path, "restore", file.op, file.data, file.base))
    adds = [
        Action(f.path, "add", None, f.data, overlay.added[f.path])
        for f in state.added
        if f.path in overlay.added
    ]
    stale = [
        Action(f.path, "remove", None, f.data, b"")
        for f in state.added
        if f.path not in overlay.added and f.verdict == OVERLAID
    ]
    common = set.intersection(*as_in) if as_in else set()
    files_as_in = tuple(version for version in manifest.known if version in common)
    document = _document(overlay, release, files_as_in, ops, adds + writes, bases)
    work = (*adds, *restores, *writes, *stale)
    # What another overlay changed in a content that this one does not know is taken back, and then left.
    unpinned = [
        f for f in state.upstream if f.path in manifest.files and f.verdict == OVERLAID and not f.variant
    ]
    left = tuple(file for file in (*state.left, *unpinned) if file.op in ops)
    others = {path: base for path, base in known_bases(state).items() if path not in bases}
    missing = tuple(op for op in asked if op not in ops)
    actions = _with_record(state.record, document, work)
    return Plan(actions, ops, release, files_as_in, bases, others, left, missing)


def known_bases(state: State) -> dict[str, bytes]:
    """Upstream's bytes of each file of which they are known: by a pin, or by the record of the tree."""
    files = state.record.files if state.record else {}
    return {
        file.path: file.base
        for file in state.upstream
        if file.base is not None
        and (
            file.variant is not None
            or file.verdict == OVERLAID
            or sha256(file.base) == files.get(file.path, {}).get("before")
        )
    }


def _over(overlay: Overlay, path: str, base: bytes, op: str) -> bytes:
    after = overlay.over(path, base, op)
    if after is None:
        found = f"none for sha256 {sha256(base)[:12]}…"
        remedy = "correct the diff in patches/, or its “becomes”"
        raise ExpectationError(path, "a diff that gives the pinned result", found, remedy)
    return after


def _with_record(
    old: Record | None, document: dict[str, Any], work: tuple[Action, ...]
) -> tuple[Action, ...]:
    final = dump(document)
    known = old.known() if old else {}
    fresh = {path: entry["after"] for path, entry in document["files"].items()}
    previous = {
        path: lost for path, hashes in known.items() if (lost := [h for h in hashes if h != fresh.get(path)])
    }
    before = old.data if old else None
    if not previous or not any(action.changes for action in work):
        return (Action(RECORD, "record", None, before, final), *work)
    between = dump({**document, "previous": previous})
    return (
        Action(RECORD, "record", None, before, between),
        *work,
        Action(RECORD, "record", None, between, final),
    )


def _document(
    overlay: Overlay,
    release: Release | None,
    files_as_in: tuple[str, ...],
    ops: tuple[str, ...],
    actions: list[Action],
    bases: Mapping[str, bytes],
) -> dict[str, Any]:
    return {
        "overlay": overlay.version,
        "commit": overlay.commit,
        "release": release.version if release else None,
        "files_as_in": list(files_as_in),
        "ops": list(ops),
        "files": {
            a.path: {
                "action": a.kind,
                "op": a.op,
                "before": sha256(bases[a.path]) if a.path in bases else None,
                "after": sha256(a.after),
            }
            for a in actions
        },
    }


def _refuse_edited(state: State) -> None:
    for file in state.files:
        if file.verdict == EDITED:
            raise edited(file)


def edited(file: FileState) -> StateError:
    """The refusal of a file that holds somebody's own lines."""
    if file.action == "add":
        found = "other content, which the overlay did not write"
        remedy = "move the file elsewhere to keep it, or delete it, then retry"
        return StateError(file.path, "no file, or one that the overlay wrote", found, remedy)
    if file.data is not None and b"\r\n" in file.data.rsplit(MARK, 1)[-1]:
        remedy = "restore the file with core.autocrlf off, then retry"
        return StateError(file.path, "an overlaid file as written", "its line ends were made CRLF", remedy)
    found = "lines that were changed by hand after the overlay was applied"
    remedy = "save the change (diff shows it), restore upstream's file, apply, and keep the change elsewhere"
    return StateError(file.path, "the lines, the marker and what is below it as written", found, remedy)


def _present(state: State, manifest: Manifest, ops: tuple[str, ...]) -> tuple[str, ...]:
    """The ops that a tree has: any file of them, and no known content without an entry in one that is not
    optional.

    Raises TreeError when it has none of them.
    """
    found = {file.op for file in state.upstream if file.verdict not in (ABSENT, LEFT)}
    gone = {
        file.op
        for file in state.upstream
        if file.verdict == ABSENT and file.data is not None and not manifest.files[file.path].optional
    }
    left = tuple(op for op in ops if op in found - gone)
    if left or not ops:
        return left
    path = next(file.path for file in state.upstream if file.op in ops)
    raise TreeError(path, f"a file of {', '.join(ops)}", "a release without any", "ask for other ops")


def _refuse_unknown(state: State, manifest: Manifest, ops: tuple[str, ...], release: Release | None) -> None:
    def bad(file: FileState) -> bool:
        if release is not None:
            return release.version not in file.releases
        return file.variant is None and file.verdict != ABSENT and not manifest.files[file.path].optional

    wrong = [f for f in state.upstream if f.path in manifest.files and f.op in ops and bad(f)]
    if not wrong:
        return
    left = [op for op in ops if op not in {f.op for f in wrong}]
    raise unknown(wrong[0], manifest.files[wrong[0].path], release, left)


def unknown(file: FileState, pin: TouchedFile, release: Release | None, left: list[str]) -> OverlayError:
    """The refusal of an upstream file that is not pinned; ``left`` are the ops that still apply."""
    variants = [v for v in pin.variants if release is None or release.version in v.releases]
    expected = (
        "; ".join(f"{v.sha256[:12]}… ({span(v.releases)})" for v in variants)
        or f"a pinned file{f' of {release.version}' if release else ''}"
    )
    still = f"; --ops {','.join(left)} still applies" if left else ""
    if file.data is None:
        return TreeError(file.path, expected, "no file", f"restore the file{still}")
    base = file.base if file.base is not None else file.data
    found = f"sha256 {sha256(base)[:12]}…, {len(base)} bytes"
    if b"\r\n" in base and pin.variant(sha256(base.replace(b"\r\n", b"\n"))):
        remedy = "check the tree out with core.autocrlf off (git config core.autocrlf false)"
        return TreeError(file.path, expected, f"{found}: the same but for CRLF line ends", remedy + still)
    if file.variant is not None:
        found += f" (as in {span(file.releases)})"
    remedy = "restore upstream's file, or pin this variant after a parity run"
    return TreeError(file.path, expected, found, remedy + still)
