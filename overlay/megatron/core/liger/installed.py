# SPDX-License-Identifier: Apache-2.0
"""What the overlay put into a ``megatron/core`` folder, read from its record and from the files' hashes."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from .settings import SettingsError

CORE = Path(__file__).resolve().parent.parent
"""The ``megatron/core`` folder that this module belongs to."""

RECORD = "liger/overlay.json"

INSTALLED = "installed"
NOT_INSTALLED = "not installed"
CHANGED = "changed since it was applied"


def record(core: Path = CORE) -> dict[str, Any] | None:
    """The record beside the overlay's package in ``core``, or None when there is none that can be read."""
    try:
        data = json.loads((core / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and isinstance(data.get("files"), dict) else None


@cache
def release() -> str:
    """The Megatron-Core release under this overlay, as its record has it."""
    data = record() or {}
    if data.get("release"):
        return str(data["release"])
    as_in = [str(version) for version in data.get("files_as_in") or []]
    return f"(files as in {span(as_in)})" if as_in else "of unknown release (no record)"


def span(releases: list[str]) -> str:
    """Releases for a reader: up to three by name, of more the first, the last and how many."""
    if len(releases) <= 3:
        return ", ".join(releases)
    return f"{releases[0]} … {releases[-1]}, {len(releases)} releases"


def require(named: dict[str, list[str]]) -> None:
    """Refuse settings that name an op which this tree does not have: they would switch on nothing.

    Raises:
        SettingsError: with the variable, and the ops that there are.
    """
    data = record()
    if data is None or not isinstance(there := data.get("ops"), list):
        return
    for variable, ops in named.items():
        absent = [op for op in ops if op not in there]
        if absent:
            raise SettingsError(
                f"{variable} names {', '.join(absent)}, which is not installed here; the ops of this tree "
                f"are {', '.join(map(str, there))} (apply and wheel take --ops)"
            )


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def files(core: Path = CORE) -> dict[str, dict[str, Any]]:
    """Each file of the record, against the disk.

    Returns:
        ``{path: {"action", "op", "state", "expected", "found"}}``; ``state`` is one of :data:`INSTALLED`,
        :data:`NOT_INSTALLED` (upstream's file, or none where one was added) and :data:`CHANGED`.
    """
    found: dict[str, dict[str, Any]] = {}
    for path, entry in ((record(core) or {}).get("files") or {}).items():
        digest = _sha256(core.parent.parent / path)
        if digest == entry["after"]:
            state = INSTALLED
        elif digest == entry["before"]:  # None for an added file, which then is missing
            state = NOT_INSTALLED
        else:
            state = CHANGED
        found[path] = {
            "action": entry["action"],
            "op": entry["op"],
            "state": state,
            "expected": entry["after"],
            "found": digest,
        }
    return found


def op_state(op: str, table: dict[str, dict[str, Any]]) -> str:
    """The state of one op's files in what :func:`files` gives."""
    states = {entry["state"] for entry in table.values() if entry["op"] == op}
    if not states or NOT_INSTALLED in states:
        return NOT_INSTALLED
    return CHANGED if CHANGED in states else INSTALLED
