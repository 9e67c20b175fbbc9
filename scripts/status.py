# SPDX-License-Identifier: Apache-2.0
"""Say of each touched file of a tree what it is, and whether the tree is what somebody expects."""

from __future__ import annotations

import argparse

from scripts import arguments as types
from scripts.apply import broken_record, caveat, is_patched_wheel, split_ops, stays, unlisted
from scripts.errors import ExpectationError, OverlayError, command
from scripts.manifest import Manifest, load, span
from scripts.overlay import PACKAGE, RECORD, Overlay, load_overlay, sha256
from scripts.places import Packed, imported
from scripts.revert import plan_revert
from scripts.tree import Tree
from scripts.verify import (
    ABSENT,
    EDITED,
    LEFT,
    MISSING,
    OVERLAID,
    PRISTINE,
    UNKNOWN,
    UNTOUCHED,
    FileState,
    State,
    inspect,
    plan,
    select_ops,
)

HALF = "half applied (apply or revert completes it)"


def main(argv: list[str]) -> int:
    """``status`` of a tree, a wheel or an environment; raises ExpectationError when ``--expect`` fails."""
    parser = argparse.ArgumentParser(prog="python -m scripts status", description=__doc__)
    places = parser.add_mutually_exclusive_group(required=True)
    places.add_argument("--tree", type=types.path, metavar="PATH", help="the tree to judge")
    places.add_argument("--wheel", type=types.path, metavar="FILE", help="or a wheel, which is not unpacked")
    places.add_argument(
        "--environment",
        type=types.path,
        metavar="PATH",
        help="or what this Python, or the one of this virtual environment, imports",
    )
    parser.add_argument(
        "--expect", choices=("overlaid", "pristine"), help="fail unless the whole tree is that"
    )
    parser.add_argument(
        "--ops",
        metavar="A,B",
        help="with --expect overlaid: exactly these ops (default: all)",
    )
    arguments = parser.parse_args(argv)
    manifest = load()
    overlay = load_overlay(manifest=manifest)
    ops = select_ops(overlay, split_ops(arguments.ops))
    tree, notes = _place(arguments, manifest)
    state = inspect(tree.read, manifest, overlay)
    verdict = judge(tree, state, manifest, overlay)
    print(f"{tree.root}: {verdict}")
    for text in lines(tree, state, overlay):
        print(f"  {text}")
    claim = _claim(tree, state, manifest)
    for text in [*([claim] if claim else []), *notes]:
        print(f"  {text}")
    if arguments.expect is not None:
        expect(tree, arguments.expect, ops, manifest, overlay)
    return 0


def _place(arguments: argparse.Namespace, manifest: Manifest) -> tuple[Tree, list[str]]:
    """What is to be judged, and what else there is to be said of it."""
    if arguments.wheel is not None:
        packed = Packed.open(arguments.wheel)
        return packed, [packed.origin(manifest)]
    if arguments.environment is not None:
        tree, hidden = imported(arguments.environment)
        return tree, [f"hidden by it: {root}" for root in hidden]
    return Tree.locate(arguments.tree), []


def judge(tree: Tree, state: State, manifest: Manifest, overlay: Overlay) -> str:
    """The tree in a few words: pristine, overlaid, half applied, changed by hand, or not supported."""
    files = state.files
    if any(f.verdict == EDITED for f in files) or tree.in_the_way(f.path for f in state.added):
        return "changed by hand (or files in the overlay's place)"
    touched = [f for f in files if f.verdict == OVERLAID]
    overlaid = bool(touched or state.record)
    ops = state.record.ops if state.record else state.ops
    wrong = [
        f.path for f in state.upstream if f.verdict in (UNKNOWN, MISSING) and (f.op in ops or not overlaid)
    ]
    if wrong:
        return f"not supported as it is ({', '.join(wrong)})" + (", and overlaid in part" if overlaid else "")
    if tree.leftovers([f.path for f in files] + [RECORD], PACKAGE):
        return HALF
    if not overlaid:
        return "pristine"
    if ops and set(ops) <= set(overlay.ops) and _differs(tree, ops, manifest, overlay) is None:
        what = f"overlaid, version {overlay.version}, ops {', '.join(ops)}"
        problem = _not_installed(tree, ops, manifest, overlay)
        return f"{what}; but {problem.file}: {problem.found}, not {problem.expected}" if problem else what
    if whole(state):
        return f"overlaid by another version or state of the overlay, ops {', '.join(ops)}"
    return HALF


def whole(state: State) -> bool:
    """Whether the tree is what its own record says, whichever overlay wrote it."""
    if state.record is None or state.record.previous:
        return False
    files = {f.path: f for f in state.files}
    return all(
        path in files and (data := files[path].data) is not None and sha256(data) == entry["after"]
        for path, entry in state.record.files.items()
    )


def lines(tree: Tree, state: State, overlay: Overlay) -> list[str]:
    """A line for each upstream file, each added file that is not as it should be, and each leftover."""
    found = [f"{file.path}: {_upstream(file)}" for file in state.upstream]
    added = [f for f in state.added if f.verdict == OVERLAID and f.current]
    found.append(f"{PACKAGE}/: {len(added)} of the {len(overlay.added)} files that this checkout adds")
    for file in state.added:
        if file.verdict == EDITED:
            found.append(f"{file.path}: changed by hand, or not the overlay's")
        elif file.verdict == OVERLAID and not file.current:
            found.append(f"{file.path}: overlaid, by another version or state of the overlay")
    if state.record is not None:
        document = state.record.document
        release = document.get("release") or "tree not a release"
        commit = document.get("commit") or "unknown"
        found.append(f"{RECORD}: version {document['overlay']}, {release}, commit {commit}")
    found += [
        f"{path}: left by a run that was cut short"
        for path in tree.leftovers([f.path for f in state.files] + [RECORD], PACKAGE)
    ]
    return found


def _claim(tree: Tree, state: State, manifest: Manifest) -> str | None:
    """What is to be said of a tree whose ``package_info.py`` claims a release that its files are not of."""
    known = [file.releases for file in state.upstream if file.verdict != LEFT]
    common = set(manifest.known).intersection(*known)
    says = tree.says()
    if state.upstream and len(common) == 1 and (preview := manifest.previews.get(*common)) is not None:
        return (
            f"a preview, not a release: upstream's commit {preview.commit}, as far as the touched files say"
        )
    if not state.upstream or not common or says is None or says in common:
        return None
    return caveat(tree, [release for release in manifest.known if release in common])


def _upstream(file: FileState) -> str:
    known = f"the file of {span(file.releases)}" if file.variant else "a file that is not pinned"
    if file.verdict == OVERLAID:
        whose = "this checkout's" if file.current else "of another version or state of the overlay"
        return f"overlaid, version {file.version}, {whose}, op {file.op}, over {known}"
    if file.verdict == PRISTINE:
        return f"pristine, {known}"
    if file.verdict == LEFT:
        return stays(file)
    if file.verdict == ABSENT and file.data is not None:
        return f"pristine, {known}, where nothing is to change"
    if file.verdict == ABSENT:
        return f"not there, as in {span(file.releases)}"
    if file.verdict == MISSING:
        return "missing"
    return "changed by hand after apply" if file.verdict == EDITED else "neither pinned nor overlaid"


def expect(tree: Tree, expected: str, ops: tuple[str, ...], manifest: Manifest, overlay: Overlay) -> None:
    """Raise ExpectationError unless the whole tree is ``overlaid`` with exactly ``ops``, or ``pristine``."""
    what = f"overlaid ({', '.join(ops)})" if expected == "overlaid" else expected
    try:
        blocked = tree.in_the_way(overlay.added)
        if blocked is not None:
            raise blocked
        if expected == "overlaid":
            # What the tree's release has not got is not to be named as missing.
            ops = plan(tree.read, manifest, overlay, ops).ops
            what = f"overlaid ({', '.join(ops)})"
        problem = (
            mismatch(tree, ops, manifest, overlay)
            if expected == "overlaid"
            else _not_pristine(tree, manifest, overlay)
        )
    except OverlayError as error:
        raise ExpectationError(
            error.file, f"{expected}: {error.expected}", error.found, error.remedy
        ) from error
    if problem is not None:
        record = tree.installed_record()
        if isinstance(tree, Packed):
            remedy = "make the wheel from this checkout (wheel megatron==VERSION), or take upstream's"
        elif record is not None and is_patched_wheel(record):
            remedy = "install the patched wheel made from this checkout, or upstream's for a pristine tree"
        elif expected == "overlaid":
            remedy = command("apply", "--tree", tree.root, "--ops", ",".join(ops))
        else:
            remedy = f"{command('revert', '--tree', tree.root)}, or restore upstream's files"
        raise ExpectationError(tree.root, what, problem, remedy)


def mismatch(tree: Tree, ops: tuple[str, ...], manifest: Manifest, overlay: Overlay) -> str | None:
    """What keeps a tree from being overlaid by this checkout with exactly ``ops``; None when it is.

    Raises what ``plan`` raises, and an OverlayError for a RECORD that does not list all files.
    """
    differs = _differs(tree, ops, manifest, overlay)
    if differs is not None:
        return differs
    problem = _not_installed(tree, ops, manifest, overlay)
    if problem is not None:
        raise problem
    return None


def _differs(tree: Tree, ops: tuple[str, ...], manifest: Manifest, overlay: Overlay) -> str | None:
    planned = plan(tree.read, manifest, overlay, ops)
    state = inspect(tree.read, manifest, overlay)
    if state.record is None and all(file.verdict in UNTOUCHED for file in state.files):
        return "pristine"
    for action in planned.actions:
        if action.changes and action.kind != "record":
            return f"{action.path} is not as this checkout writes it"
    if state.record is None or state.record.previous or set(state.record.ops) != set(planned.ops):
        return f"{RECORD} is missing, unfinished or of other ops"
    left = tree.leftovers([f.path for f in state.files] + [RECORD], PACKAGE)
    return f"{left[0]} was left by a run that was cut short" if left else None


def _not_installed(
    tree: Tree, ops: tuple[str, ...], manifest: Manifest, overlay: Overlay
) -> OverlayError | None:
    """What is wrong with RECORD of an installed tree whose files are all as they should be."""
    record = tree.installed_record()
    if record is None or is_patched_wheel(record):
        return None
    planned = plan(tree.read, manifest, overlay, ops)
    installed = tree.read(record) or b""
    missing = unlisted(installed, planned.bases)
    if missing is not None:
        return broken_record(record, missing)
    missing = unlisted(installed, planned.after())
    if missing is None:
        return None
    remedy = command("apply", "--tree", tree.root, "--ops", ",".join(ops))
    return ExpectationError(record, f"a line for {missing}", "no such line", remedy)


def _not_pristine(tree: Tree, manifest: Manifest, overlay: Overlay) -> str | None:
    state = inspect(tree.read, manifest, overlay)
    for file in state.files:
        if file.verdict not in UNTOUCHED:
            return f"{file.path} is {file.verdict}"
    planned = plan_revert(tree, manifest, overlay)
    if planned.changes:
        return "something of the overlay is left: " + ", ".join(
            [
                *planned.leftovers,
                *(a.path for a in planned.actions),
                *([planned.installed[0]] if planned.installed else []),
            ]
        )
    return None
