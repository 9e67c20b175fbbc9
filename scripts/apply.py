# SPDX-License-Identifier: Apache-2.0
"""Lay the overlay over a release in build/, or over a tree in place."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from scripts import source
from scripts.errors import StateError, TreeError, UsageError
from scripts.manifest import Manifest, Release, load
from scripts.overlay import PACKAGE, RECORD, ROOT, Overlay, load_overlay, sha256
from scripts.record import Record, read_record, with_overlay, without_overlay
from scripts.tree import Tree
from scripts.verify import Action, Plan, plan

BUILD = ROOT / "build"


@dataclass(frozen=True)
class Installed:
    """RECORD of the wheel that a tree was installed from: its path, its bytes, and what they shall be."""

    path: str
    before: bytes
    after: bytes


def main(argv: list[str]) -> int:
    """``apply megatron==V`` into build/, or ``apply --tree PATH``; raises OverlayError when refused."""
    arguments = _parser().parse_args(argv)
    manifest = load()
    overlay = load_overlay(manifest=manifest)
    ops = split_ops(arguments.ops)
    release = manifest.release(arguments.release) if arguments.release else None
    if arguments.tree is not None:
        if arguments.python or arguments.platform:
            remedy = "leave --tree or the other two away"
            raise UsageError("command line", "--tree alone", "--tree with --python or --platform", remedy)
        return _in_place(arguments.tree, manifest, overlay, ops, release, arguments.dry_run)
    if release is None:
        remedy = f"write megatron=={manifest.newest()}, or --tree PATH"
        raise UsageError("command line", "a release or a tree", "neither", remedy)
    dest = BUILD / f"megatron-core-{release.version}"
    with complete_later(Tree(dest)):
        return _into_build(dest, manifest, overlay, ops, release, arguments)


def _into_build(
    dest: Path,
    manifest: Manifest,
    overlay: Overlay,
    ops: tuple[str, ...] | None,
    release: Release,
    arguments: argparse.Namespace,
) -> int:
    wheel = source.fetch(release, arguments.python, arguments.platform)
    shown = os.path.relpath(dest)
    if arguments.dry_run:
        contents = {path: data for path, _, data in source.members(wheel)}
        print(f"megatron-core {release.version} would be applied into {shown}; nothing was written")
        _print_actions(plan(contents.get, manifest, overlay, ops, release))
        return 0
    built = _build(wheel, manifest, overlay, ops, release, dest)
    print(f"megatron-core {release.version} is applied in {shown} ({built.word})")
    _print_actions(built.plan)
    print(_next("build", str(dest), f"megatron=={release.version}"))
    return 0


def split_ops(text: str | None) -> tuple[str, ...] | None:
    """``"a,b"`` → ``("a", "b")``; None (all ops) stays None."""
    return None if text is None else tuple(op for op in text.replace(" ", "").split(",") if op)


def apply_tree(
    root: Path,
    ops: Iterable[str] | None = None,
    manifest: Manifest | None = None,
    overlay: Overlay | None = None,
) -> Plan:
    """Overlay a tree in place, completing or changing what is there.

    Raises OverlayError before the first write.
    """
    manifest = load() if manifest is None else manifest
    overlay = load_overlay(manifest=manifest) if overlay is None else overlay
    tree = Tree.locate(root)
    with tree.lock():
        planned = plan(tree.read, manifest, overlay, ops)
        apply_plan(tree, planned)
    return planned


def apply_plan(root: Path | Tree, planned: Plan) -> bool:
    """Carry a plan out on the tree that it was made from; returns whether anything changed.

    Raises TreeError for a tree that may not be written and StateError for an installed patched wheel, both
    before the first write; OSError when the disk fails in between, after which apply and revert complete.
    """
    tree = root if isinstance(root, Tree) else Tree(root)
    installed = _installed(tree, planned, read_record(tree.read(RECORD)))
    work = [action for action in planned.actions if action.changes]
    paths = [action.path for action in planned.actions] + ([installed.path] if installed else [])
    if installed is not None and is_patched_wheel(installed.path):
        if any(action.kind != "record" for action in work):
            raise patched_wheel(installed.path)
        return False
    rewrite = [installed] if installed is not None and installed.before != installed.after else []
    if not work and not rewrite and not tree.leftovers(paths, PACKAGE):
        return False
    tree.require_writable([*(a.path for a in work), *(r.path for r in rewrite)])
    tree.sweep(paths, PACKAGE)
    first, rest = (work[:1], work[1:]) if work and work[0].kind == "record" else ([], work)
    for action in first:
        _carry_out(tree, action)
    # Named in RECORD before they exist, the added files are never left behind by an uninstall.
    for record in rewrite:
        tree.write(record.path, record.after)
    for action in rest:
        _carry_out(tree, action)
    tree.sweep(paths, PACKAGE)
    return True


def _carry_out(tree: Tree, action: Action) -> None:
    if action.kind == "remove":
        tree.remove(action.path)
    else:
        tree.write(action.path, action.after)


def _installed(tree: Tree, planned: Plan, record: Record | None) -> Installed | None:
    path = tree.installed_record()
    if path is None:
        return None
    before = tree.read(path) or b""
    return Installed(path, before, installed_after(before, planned, record))


def installed_after(before: bytes, planned: Plan, record: Record | None) -> bytes:
    """RECORD's bytes for the planned tree, whatever state ``before`` is in."""
    known = record.known() if record else {}
    bases = dict(planned.bases)
    for action in planned.actions:
        known.setdefault(action.path, []).append(sha256(action.after))
        if action.kind == "restore":
            bases[action.path] = action.after
            known[action.path].append(sha256(action.before or b""))
        elif action.kind == "extend" and action.before is not None:
            known[action.path].append(sha256(action.before))
    pristine = without_overlay(before, known, bases)
    after = planned.after()
    return with_overlay(pristine, after, {path: base for path, base in bases.items() if path in after})


def is_patched_wheel(path: str) -> bool:
    """Whether RECORD's path is that of a wheel which the overlay was in from the start."""
    return "+" in path and ".liger." in path.replace("+", ".")


def patched_wheel(path: str) -> StateError:
    """The refusal to change a tree that was installed from a patched wheel."""
    return StateError(
        path,
        "a tree of upstream's own wheel",
        "the patched wheel, which is overlaid as it is",
        "pip install --no-deps --force-reinstall upstream's wheel (or another patched one) instead",
    )


@dataclass(frozen=True)
class Built:
    plan: Plan
    word: str


def build_tree(release: Release, ops: Iterable[str] | None, dest: Path, *, overlaid: bool) -> Path:
    """A tree of a pinned release at ``dest``, overlaid with ``ops`` or pristine; built if it is not that."""
    manifest = load()
    overlay = load_overlay(manifest=manifest)
    _build(source.fetch(release), manifest, overlay, ops, release, dest, overlaid=overlaid)
    return dest


def _build(
    wheel: Path,
    manifest: Manifest,
    overlay: Overlay,
    ops: Iterable[str] | None,
    release: Release,
    dest: Path,
    *,
    overlaid: bool = True,
) -> Built:
    upstream = {path: (mode, data) for path, mode, data in source.members(wheel)}
    planned = plan({path: data for path, (_, data) in upstream.items()}.get, manifest, overlay, ops, release)
    expected = dict(upstream)
    if overlaid:
        expected.update({path: (0o644, data) for path, data in planned.after().items()})
        for path in planned.bases:
            expected[path] = (upstream[path][0], planned.after()[path])
        for path, (mode, data) in upstream.items():
            if path.endswith(".dist-info/RECORD"):
                expected[path] = (mode, installed_after(data, planned, None))
    dest.parent.mkdir(parents=True, exist_ok=True)
    with _locked(dest.parent):
        if dest.exists() and _holds(dest, expected):
            return Built(planned, "as before")
        word = "built anew: it was not what it should be" if dest.exists() else "new"
        # Of a run that was killed: the lock keeps live ones out.
        for stale in dest.parent.glob(f".{dest.name}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=dest.parent, prefix=f".{dest.name}-") as folder:
            fresh = Path(folder) / "tree"
            for path, (mode, data) in expected.items():
                target = fresh.joinpath(*path.split("/"))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
                target.chmod(mode)
            if dest.exists():
                os.replace(dest, Path(folder) / "old")
            os.replace(fresh, dest)
    return Built(planned, word)


def _holds(dest: Path, expected: Mapping[str, tuple[int, bytes]]) -> bool:
    """Whether a folder has exactly these files and bytes; caches of bytecode aside."""
    unseen = dict(expected)
    for folder, names, files in os.walk(dest):
        names[:] = [name for name in names if name != "__pycache__"]
        for name in files:
            file = Path(folder, name)
            wanted = unseen.pop(file.relative_to(dest).as_posix(), None)
            if wanted is None or file.is_symlink() or file.read_bytes() != wanted[1]:
                return False
    return not unseen


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    import fcntl

    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _in_place(
    path: Path,
    manifest: Manifest,
    overlay: Overlay,
    ops: tuple[str, ...] | None,
    release: Release | None,
    dry_run: bool,
) -> int:
    tree = Tree.locate(path)
    if dry_run:
        planned = plan(tree.read, manifest, overlay, ops)
        _require_release(planned, release)
        tree.require_writable(a.path for a in planned.actions if a.changes)
        installed = _installed(tree, planned, read_record(tree.read(RECORD)))
        print(f"{tree.root} would be overlaid; nothing was written" if planned.changes else "nothing to do")
        _describe(tree, planned)
        _print_actions(planned)
        if installed is not None and installed.before != installed.after:
            print(f"  update  {installed.path}")
        return 0
    with tree.lock():
        planned = plan(tree.read, manifest, overlay, ops)
        _require_release(planned, release)
        with complete_later(tree):
            changed = apply_plan(tree, planned)
    print(f"{tree.root} is overlaid" if changed else f"{tree.root} was overlaid already; nothing was written")
    _describe(tree, planned)
    _print_actions(planned)
    record = tree.installed_record()
    if record is not None:
        print(f"  {'update' if changed else 'same  '}  {record} (uninstalling leaves nothing behind)")
    if changed:
        print("warning: jobs that run from this tree right now may mix old and new modules; restart them")
    print(_next("installed" if record else "checkout", str(tree.root), f"--tree {tree.root}"))
    return 0


@contextmanager
def complete_later(tree: Tree) -> Iterator[None]:
    """Turn a failing disk into a refusal that says how to go on."""
    try:
        yield
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else tree.root
        remedy = "remove the cause, then run the command again (or revert): it completes"
        raise TreeError(where, "a file to be written", error.strerror or str(error), remedy) from error


def _require_release(planned: Plan, release: Release | None) -> None:
    if release is not None and release.version not in planned.files_as_in:
        found = f"files as in {', '.join(planned.files_as_in) or 'no single release'}"
        remedy = "leave the release away, or give the tree of that release"
        raise TreeError("the tree", f"files as in {release.version}", found, remedy)


def _describe(tree: Tree, planned: Plan) -> None:
    as_in = ", ".join(planned.files_as_in) or "several releases, no one of them has all"
    says = tree.says()
    claim = f" (its package_info.py says {says})" if says and says not in planned.files_as_in else ""
    print(f"  the touched files are as in {as_in}; that does not make the tree a release{claim}")


def _print_actions(planned: Plan) -> None:
    final = {action.path: action for action in planned.actions if action.kind != "record"}
    for action in final.values():
        word = action.kind if action.changes else "same"
        detail = ""
        if action.kind == "extend":
            size = len(action.after) - len(planned.bases[action.path])
            detail = f"  op {action.op}, {size} bytes below upstream's"
        print(f"  {word:7} {action.path}{detail}")
    print(f"  {'record':7} {RECORD}")


def _next(form: str, shown: str, parity: str) -> str:
    """What to do now, by where the overlay went: ``build``, a ``checkout`` or an ``installed`` package."""
    text = {
        "build": [
            "a checkout or an editable install: apply --tree PATH to it, since its own core comes first",
            "an installed megatron-core: python -m scripts wheel megatron==VERSION, then",
            "  pip install --no-deps --force-reinstall dist/WHEEL",
            f"scripts outside any checkout: PYTHONPATH={shown} runs this tree as it is",
        ],
        "checkout": [
            "a script in this checkout, or an editable install of it: run it as before",
            "elsewhere: an installed megatron-core needs the wheel, another checkout its own apply --tree",
        ],
        "installed": [
            "programs that import the installed megatron.core run the overlay from now on",
            "a checkout or an editable install that comes first on their path hides it: apply --tree to that",
        ],
    }[form]
    text += [
        'proof: the job prints a line "liger overlay …" on rank 0; without it, another core is in use',
        "  (python -m megatron.core.liger --script SCRIPT says which)",
        f"compare with upstream: python -m scripts parity {parity}",
    ]
    return "next\n" + "\n".join(f"  {line}" for line in text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nox -s apply --", description=__doc__)
    parser.add_argument("release", nargs="?", metavar="megatron==VERSION", help="a pinned release")
    parser.add_argument("--tree", type=Path, metavar="PATH", help="overlay this tree in place")
    parser.add_argument("--ops", metavar="A,B", help="only these ops (default: all)")
    parser.add_argument("--python", metavar="3.12", help="take the wheel for this Python")
    parser.add_argument("--platform", metavar="TAG", help="take the wheel for this platform tag or machine")
    parser.add_argument("--dry-run", action="store_true", help="check and print, write nothing")
    return parser
