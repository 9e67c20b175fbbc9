# SPDX-License-Identifier: Apache-2.0
"""Take the overlay out of a tree, byte for byte, from any state that apply or revert can leave."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts import arguments as types
from scripts.apply import complete_later, is_patched_wheel, patched_wheel, unlike_record
from scripts.errors import StateError
from scripts.manifest import ACTIONS, Manifest, load
from scripts.overlay import PACKAGE, RECORD, Overlay, load_overlay, sha256
from scripts.record import orphan, without_overlay
from scripts.tree import Tree
from scripts.verify import EDITED, OVERLAID, Action, State, edited, inspect, known_bases


@dataclass(frozen=True)
class Reverted:
    """What revert does: restores and removals, RECORD's two contents, leftovers to sweep, files to leave."""

    actions: tuple[Action, ...]
    paths: tuple[str, ...]
    installed: tuple[str, bytes, bytes] | None
    leftovers: tuple[str, ...]

    @property
    def changes(self) -> bool:
        return bool(self.actions or self.leftovers or self.rewrites)

    @property
    def rewrites(self) -> bool:
        return self.installed is not None and self.installed[1] != self.installed[2]


def main(argv: list[str]) -> int:
    """``revert --tree PATH``; raises OverlayError when refused, before the first write."""
    parser = argparse.ArgumentParser(prog="python -m scripts revert", description=__doc__)
    parser.add_argument(
        "--tree", type=types.path, required=True, metavar="PATH", help="the tree to take it out of"
    )
    parser.add_argument("--dry-run", action="store_true", help="check and print, write nothing")
    arguments = parser.parse_args(argv)
    manifest = load()
    overlay = load_overlay(manifest=manifest)
    tree = Tree.locate(arguments.tree)
    if arguments.dry_run:
        planned = plan_revert(tree, manifest, overlay)
        if planned.changes:
            require_writable(tree, planned)
        left: list[str] = []
        print(f"{tree.root} would be reverted; nothing was written" if planned.changes else "nothing to do")
    else:
        planned, left = revert_tree(tree.root, manifest, overlay)
        if not planned.changes:
            print(f"{tree.root} has no overlay; nothing was written")
            return 0
        print(f"{tree.root} is reverted")
    for action in planned.actions:
        print(f"  {action.kind:7} {action.path}")
    if planned.installed is not None and planned.rewrites:
        print(f"  restore {planned.installed[0]}")
    for path in planned.leftovers:
        print(f"  remove  {path} (left by a run that was cut short)")
    for path in left:
        print(f"  left    {path} (not the overlay's)")
    return 0


def revert_tree(
    root: Path, manifest: Manifest | None = None, overlay: Overlay | None = None
) -> tuple[Reverted, list[str]]:
    """Revert a tree in place; returns what was done and which files in our folder are somebody else's.

    Raises StateError, before the first write, for files that were changed by hand after apply.
    """
    manifest = load() if manifest is None else manifest
    overlay = load_overlay(manifest=manifest) if overlay is None else overlay
    tree = Tree.locate(root)
    with tree.lock():
        planned = plan_revert(tree, manifest, overlay)
        if not planned.changes:
            return planned, []
        require_writable(tree, planned)
        with complete_later(tree):
            return planned, _carry_out(tree, planned)


def require_writable(tree: Tree, planned: Reverted) -> None:
    """Raise TreeError or StateError unless all that revert touches could be changed."""
    rewritten = [planned.installed[0]] if planned.installed is not None and planned.rewrites else []
    tree.require_writable(
        [*(a.path for a in planned.actions), *rewritten],
        bytecode=[path for path in planned.paths if path.startswith(f"{PACKAGE}/")],
        remnants=planned.leftovers,
    )


def plan_revert(tree: Tree, manifest: Manifest, overlay: Overlay) -> Reverted:
    """What revert would do to a tree; raises StateError for one with changes that it would lose."""
    state = inspect(tree.read, manifest, overlay)
    recorded = state.record.files if state.record else {}
    for file in state.files:
        if file.verdict == EDITED and (file.action != "add" or file.path in recorded):
            raise edited(file)
        if file.data is None and recorded.get(file.path, {}).get("action") in ACTIONS:
            raise StateError(file.path, "the overlaid file", "no file", "restore upstream's file, then retry")
    restores = [
        Action(f.path, "restore", f.op, f.data, f.base)
        for f in state.upstream
        if f.verdict == OVERLAID and f.base is not None
    ]
    removals = [Action(f.path, "remove", None, f.data, b"") for f in state.added if f.verdict == OVERLAID]
    if state.record is not None:
        removals.append(Action(RECORD, "remove", None, state.record.data, b""))
    installed = recorded_lines(tree, state)
    paths = (*(f.path for f in state.files), RECORD, *((installed[0],) if installed else ()))
    planned = Reverted((*restores, *removals), paths, installed, tuple(tree.leftovers(paths, PACKAGE)))
    if installed is not None and is_patched_wheel(installed[0]) and planned.changes:
        raise patched_wheel(installed[0])
    return planned


def recorded_lines(
    tree: Tree, state: State, bases: Mapping[str, bytes] | None = None
) -> tuple[str, bytes, bytes] | None:
    """RECORD of an installed tree: its path, its bytes, and those without the overlay's lines.

    ``bases`` are upstream's bytes of files that do not tell them. Raises StateError for a file that is no
    longer the one that its line is of.
    """
    path = tree.installed_record()
    if path is None:
        return None
    before = tree.read(path) or b""
    known = state.record.known() if state.record else {}
    for file in state.files:
        known.setdefault(file.path, [])
        if file.verdict == OVERLAID and file.data is not None:
            known[file.path].append(sha256(file.data))
    after = without_overlay(before, known, {**known_bases(state), **(bases or {})})
    left = orphan(after, known, {})
    if left is not None:
        raise unlike_record(left)
    return path, before, after


def _carry_out(tree: Tree, planned: Reverted) -> list[str]:
    last = [action for action in planned.actions if action.path == RECORD]
    for action in planned.actions:
        if action.kind == "restore":
            tree.write(action.path, action.after)
        elif action.path != RECORD:
            tree.remove(action.path)
    # RECORD before our record: what a cut leaves is then still known by its hash.
    if planned.installed is not None and planned.rewrites:
        tree.write(planned.installed[0], planned.installed[2])
    for action in last:
        tree.remove(action.path)
    for path in planned.paths:
        if path.startswith(f"{PACKAGE}/"):
            tree.drop_bytecode(path)
    return tree.sweep(planned.paths, PACKAGE)
