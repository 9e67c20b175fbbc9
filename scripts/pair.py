# SPDX-License-Identifier: Apache-2.0
"""A pristine and an overlaid tree of the same Megatron-Core, for the commands that compare the two."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.apply import apply_tree, build_tree, split_ops, stays
from scripts.arguments import path
from scripts.errors import StateError, UsageError
from scripts.manifest import Release, load
from scripts.overlay import RECORD, load_overlay
from scripts.revert import revert_tree
from scripts.status import judge
from scripts.tree import Tree
from scripts.verify import inspect


@dataclass(frozen=True)
class Pair:
    """Two trees that differ by the overlay only.

    Attributes:
        name: what was asked for, to print.
        pristine: the tree without the overlay.
        overlaid: the tree with it.
        folder: an empty folder for whatever the comparison writes; gone afterwards.
    """

    name: str
    pristine: Path
    overlaid: Path
    folder: Path

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that the overlaid tree's own record names."""
        record = json.loads((self.overlaid / RECORD).read_text(encoding="utf-8"))
        return tuple(record["ops"])

    @property
    def left(self) -> tuple[str, ...]:
        """What a reader should know: that the tree is a preview, and the call sites of those ops that are
        upstream's in the overlaid tree, too; a line each."""
        manifest = load()
        state = inspect(Tree(self.overlaid).read, manifest, load_overlay(manifest=manifest))
        left = [f"{file.path} {stays(file)}" for file in state.left if file.op in self.ops]
        of = json.loads((self.overlaid / RECORD).read_text(encoding="utf-8"))["files_as_in"]
        previews = [f"a preview, not a release: {name}" for name in of if name in manifest.previews]
        return (*(previews if len(of) == 1 else ()), *left)


def add_arguments(parser: argparse.ArgumentParser, more: str = "") -> None:
    """The arguments that say what to compare: a release or a tree, and the ops; ``more`` words of help."""
    parser.add_argument(
        "release", nargs="?", metavar="megatron==VERSION", help=f"the pinned release to compare{more}"
    )
    parser.add_argument(
        "--tree",
        type=path,
        metavar="PATH",
        help="or a tree, overlaid or pristine; copied, not changed",
    )
    parser.add_argument("--ops", metavar="OP,…", help="only these ops (default: all)")


@contextmanager
def open_pair(arguments: argparse.Namespace) -> Iterator[Pair]:
    """The two trees that the arguments of :func:`add_arguments` ask for, in a temporary folder.

    An overlaid ``--tree`` is compared as it is with its reverted copy, a pristine one with its overlaid copy.

    Raises:
        UsageError: not exactly one of release and ``--tree``, or ``--ops`` with an overlaid tree.
        StateError: the tree is half applied, or was changed by hand.
        OverlayError: whatever apply and revert refuse.
    """
    if (arguments.release is None) == (arguments.tree is None):
        found = "neither" if arguments.tree is None else "both"
        raise UsageError(
            "command line", "a release or --tree PATH", found, "write megatron==VERSION, or --tree PATH"
        )
    ops = split_ops(arguments.ops)
    if arguments.tree is None:
        with open_release(load().release(arguments.release), ops) as pair:
            yield pair
        return
    with tempfile.TemporaryDirectory(prefix="megatron-pair-") as temporary:
        folder = Path(temporary)
        pristine, overlaid = folder / "pristine", folder / "overlaid"
        source = Tree.locate(arguments.tree).root
        for dest in (pristine, overlaid):
            # Only the package: a checkout's history and a site-packages' neighbours stay where they are.
            shutil.copytree(
                source / "megatron", dest / "megatron", ignore=shutil.ignore_patterns("__pycache__")
            )
            _make_writable(dest)
        if (source / RECORD).exists():
            if ops is not None:
                remedy = "leave --ops away, or revert the tree first"
                raise UsageError("command line", "--ops with a pristine tree", "an overlaid one", remedy)
            _require_whole(Tree.locate(overlaid), arguments.tree)
        else:
            apply_tree(overlaid, ops)
        revert_tree(pristine)
        yield _pair(str(arguments.tree), folder)


@contextmanager
def open_release(release: Release, ops: Iterable[str] | None) -> Iterator[Pair]:
    """The two trees of a pinned release, in a temporary folder; on a Python that it has no wheel for, too.

    Raises:
        OverlayError: whatever apply refuses.
    """
    ops = None if ops is None else tuple(ops)
    with tempfile.TemporaryDirectory(prefix="megatron-pair-") as temporary:
        for name in ("pristine", "overlaid"):
            build_tree(release, ops, Path(temporary, name), overlaid=name == "overlaid", nearest=True)
        yield _pair(f"megatron-core {release.version}", Path(temporary))


def _require_whole(tree: Tree, given: Path) -> None:
    manifest = load()
    overlay = load_overlay(manifest=manifest)
    verdict = judge(tree, inspect(tree.read, manifest, overlay), manifest, overlay)
    if not verdict.startswith("overlaid"):
        remedy = f"python -m scripts apply --tree {given}, or revert"
        raise StateError(str(given), "a tree that is overlaid as its own record says", verdict, remedy)


def _pair(name: str, folder: Path) -> Pair:
    (folder / "work").mkdir()
    return Pair(name, folder / "pristine", folder / "overlaid", folder / "work")


def _make_writable(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for item in (Path(folder), *(Path(folder, file) for file in files)):
            item.chmod(item.stat().st_mode | 0o200)
