# SPDX-License-Identifier: Apache-2.0
"""Lay the overlay over a release in build/, or over a tree in place."""

from __future__ import annotations

import argparse
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

from scripts import arguments as types
from scripts import record as installs
from scripts import source
from scripts.errors import StateError, TreeError, UsageError, command, quoted
from scripts.files import held, locked, obstacle, require_folder, working
from scripts.manifest import ACTIONS, Manifest, Release, load, span
from scripts.overlay import PACKAGE, RECORD, ROOT, Overlay, load_overlay, sha256, split
from scripts.record import Record, read_record, with_overlay, without_overlay
from scripts.tree import TEMPORARY, Tree
from scripts.verify import Action, FileState, Plan, plan

BUILD = ROOT / "build"
NOT_THERE = "this release has nothing for it to change"


@dataclass(frozen=True)
class Installed:
    """RECORD of the wheel that a tree was installed from: its path, its bytes, and what they shall be."""

    path: str
    before: bytes
    after: bytes


def main(argv: list[str]) -> int:
    """``apply megatron==V`` or a wheel into build/, or ``apply --tree``; raises OverlayError when refused."""
    arguments = _parser().parse_args(argv)
    manifest = load()
    overlay = load_overlay(manifest=manifest)
    ops = split_ops(arguments.ops)
    if types.is_wheel(arguments.release):
        return _from_wheel(types.path(arguments.release), manifest, overlay, ops, arguments)
    release = manifest.release(arguments.release) if arguments.release else None
    if arguments.tree is not None:
        if arguments.python or arguments.platform:
            remedy = "leave --tree or the other two away"
            raise UsageError("command line", "--tree alone", "--tree with --python or --platform", remedy)
        return _in_place(arguments.tree, manifest, overlay, ops, release, arguments.dry_run)
    if release is None:
        remedy = f"{command('apply', f'megatron=={manifest.newest()}')}, or apply --tree PATH"
        raise UsageError("command line", "a release or a tree", "neither", remedy)
    wheel = source.fetch(release, arguments.python, arguments.platform)
    return _into_build(wheel, manifest, overlay, ops, release, arguments.dry_run)


def _from_wheel(
    given: Path,
    manifest: Manifest,
    overlay: Overlay,
    ops: tuple[str, ...] | None,
    arguments: argparse.Namespace,
) -> int:
    if arguments.tree is not None or arguments.python or arguments.platform:
        found = "a wheel with --tree, --python or --platform"
        raise UsageError("command line", "a wheel alone", found, "leave the wheel or the others away")
    release, pin = source.take(given, manifest)
    return _into_build(source.fetch_file(release, pin), manifest, overlay, ops, release, arguments.dry_run)


def _into_build(
    wheel: Path,
    manifest: Manifest,
    overlay: Overlay,
    ops: tuple[str, ...] | None,
    release: Release,
    dry_run: bool,
) -> int:
    dest = BUILD / f"megatron-core-{release.version}"
    shown = os.path.relpath(dest)
    if dry_run:
        planned, upstream, expected = _expected(wheel, manifest, overlay, ops, release, overlaid=True)
        if not _holds(dest, expected):
            _require_ours(dest, expected, upstream)
            _require_deletable(dest)
        print(f"megatron-core {release.version} would be applied into {shown}; nothing was written")
        _print_actions(planned)
        return 0
    built = _build(wheel, manifest, overlay, ops, release, dest)
    print(f"megatron-core {release.version} is applied in {shown} ({built.word})")
    _print_actions(built.plan)
    print(_next("build", str(dest), f"megatron=={release.version}"))
    return 0


def split_ops(text: str | None) -> tuple[str, ...] | None:
    """``"a,b"`` → ``("a", "b")``; None (the default ops) stays None."""
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


def apply_plan(tree: Tree, planned: Plan) -> bool:
    """Carry a plan out on the tree that it was made from; returns whether anything changed.

    Raises TreeError for a tree that may not be written and StateError for an installed patched wheel, both
    before the first write; OSError when the disk fails in between, after which apply and revert complete.
    """
    work = prepare(tree, planned)
    if not work.changes:
        return False
    paths, actions = work.paths, work.actions
    tree.sweep(paths, PACKAGE)
    first, rest = (actions[:1], actions[1:]) if actions and actions[0].kind == "record" else ([], actions)
    for action in first:
        _carry_out(tree, action)
    # Named in RECORD before they exist, the added files are never left behind by an uninstall.
    if work.installed is not None:
        tree.write(work.installed.path, work.installed.after)
    for action in rest:
        _carry_out(tree, action)
    tree.sweep(paths, PACKAGE)
    return True


@dataclass(frozen=True)
class Work:
    """What a plan comes to on a tree: the writes left to do, RECORD if it changes, leftovers to sweep."""

    actions: list[Action]
    installed: Installed | None
    paths: list[str]
    remnants: list[str]

    @property
    def changes(self) -> bool:
        return bool(self.actions or self.installed or self.remnants)


def prepare(tree: Tree, planned: Plan) -> Work:
    """Judge whether a plan can be carried out, without writing. Raises TreeError or StateError if not."""
    installed = _installed(tree, planned, read_record(tree.read(RECORD)))
    actions = [action for action in planned.actions if action.changes]
    paths = [action.path for action in planned.actions] + ([installed.path] if installed else [])
    if installed is not None and is_patched_wheel(installed.path):
        if any(action.kind != "record" for action in actions):
            raise patched_wheel(installed.path)
        return Work([], None, paths, [])
    if installed is not None:
        missing = unlisted(installed.before, planned.bases)
        if missing is not None:
            raise broken_record(installed.path, missing)
        if installed.before == installed.after:
            installed = None
    work = Work(actions, installed, paths, tree.leftovers(paths, PACKAGE))
    if work.changes:
        written = [*(a.path for a in actions), *([installed.path] if installed else [])]
        tree.require_writable(written, remnants=work.remnants)
        sizes = {action.path: len(action.after) for action in actions if action.kind != "remove"}
        tree.require_space(sizes if installed is None else {**sizes, installed.path: len(installed.after)})
    return work


def unlisted(installed: bytes, paths: Iterable[str]) -> str | None:
    """The first of ``paths`` for which RECORD has no line."""
    listed = installs.rows(installed)
    return next((path for path in paths if path not in listed), None)


def broken_record(path: str, missing: str) -> TreeError:
    """The refusal of a RECORD that does not list upstream's own files."""
    version = path.split("/")[0].removeprefix("megatron_core-").removesuffix(".dist-info")
    remedy = f"pip install --no-deps --force-reinstall {quoted(f'megatron-core=={version}')}, then retry"
    return TreeError(path, f"RECORD as pip wrote it, with a line for {missing}", "no such line", remedy)


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
    after = installed_after(before, planned, record)
    left = installs.orphan(after, record.known() if record else {}, planned.after())
    if left is not None:
        raise unlike_record(left)
    return Installed(path, before, after)


def unlike_record(path: str) -> StateError:
    """The refusal of a file that somebody replaced after its line in RECORD was written for the overlay."""
    expected = "upstream's file or the extended one, since RECORD of the installed package names that"
    return StateError(path, expected, "neither", "restore upstream's file, then retry")


def installed_after(before: bytes, planned: Plan, record: Record | None) -> bytes:
    """RECORD's bytes for the planned tree, whatever state ``before`` is in."""
    known = record.known() if record else {}
    # A run that was cut short may have listed a file of another op as extended, and not have got to it.
    bases = {**planned.others, **planned.bases}
    for action in planned.actions:
        known.setdefault(action.path, []).append(sha256(action.after))
        if action.kind == "restore":
            known[action.path].append(sha256(action.before or b""))
        elif action.kind in ACTIONS and action.before is not None:
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


def build_tree(
    release: Release, ops: Iterable[str] | None, dest: Path, *, overlaid: bool, nearest: bool = False
) -> Path:
    """A tree of a pinned release at ``dest``, overlaid with ``ops`` or pristine; built if it is not that.

    ``nearest``: from another Python's wheel where the release has none for this one.
    """
    manifest = load()
    overlay = load_overlay(manifest=manifest)
    wheel = source.fetch_file(release, source.choose(release, nearest=nearest))
    _build(wheel, manifest, overlay, ops, release, dest, overlaid=overlaid)
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
    planned, upstream, expected = _expected(wheel, manifest, overlay, ops, release, overlaid=overlaid)
    with working(dest):
        if not dest.parent.is_dir():
            require_folder(dest.parent)
            dest.parent.mkdir(parents=True, exist_ok=True)
        with locked(dest.parent) as alone:
            prefix = f".{dest.name}.liger-overlay-"
            # Of a run that was killed: the lock keeps live ones out.
            for stale in dest.parent.glob(f"{prefix}????????") if alone else ():
                rmtree(stale, ignore_errors=True)
            if _holds(dest, expected):
                return Built(
                    planned, "as before, modes put right" if _set_modes(dest, expected) else "as before"
                )
            _require_ours(dest, expected, upstream)
            _require_deletable(dest)
            word = "built anew: it was not what it should be" if dest.exists() else "new"
            with tempfile.TemporaryDirectory(dir=dest.parent, prefix=prefix) as folder:
                fresh = Path(folder) / "tree"
                source.write_files(fresh, ((path, mode, data) for path, (mode, data) in expected.items()))
                if dest.exists():
                    os.replace(dest, Path(folder) / "old")
                os.replace(fresh, dest)
    return Built(planned, word)


Files = Mapping[str, tuple[int, bytes]]


def _expected(
    wheel: Path,
    manifest: Manifest,
    overlay: Overlay,
    ops: Iterable[str] | None,
    release: Release,
    *,
    overlaid: bool,
) -> tuple[Plan, Files, Files]:
    """The plan for a wheel, the files of the wheel, and those of the tree that is built from it."""
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
    return planned, upstream, expected


def _holds(dest: Path, expected: Files) -> bool:
    """Whether a folder has exactly these files and bytes; caches of bytecode aside."""
    unseen = dict(expected)
    for path in _files(dest):
        file = dest / path
        wanted = unseen.pop(path, None)
        if wanted is None or not stat.S_ISREG(file.lstat().st_mode) or file.read_bytes() != wanted[1]:
            return False
    return not unseen


def _files(dest: Path) -> list[str]:
    """All that is no folder below ``dest``, in order; without bytecode and what a killed run left."""
    found = []
    for folder, names, files in os.walk(dest, onerror=_raise):
        links = [name for name in names if Path(folder, name).is_symlink()]
        for name in (*files, *links):
            bytecode = os.path.basename(folder) == "__pycache__" and re.search(r"\.pyc(\.\d+)?$", name)
            if not bytecode and not (name.startswith(".") and name.endswith(TEMPORARY)):
                found.append(Path(folder, name).relative_to(dest).as_posix())
    return sorted(found)


def _raise(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def _require_ours(dest: Path, expected: Files, upstream: Files) -> None:
    """Raise StateError if ``dest`` holds anything that no run wrote: building it anew would lose that.

    What an earlier overlay or another wheel of the release wrote is known by the hashes of its RECORD.
    """
    if not os.path.lexists(dest):
        return
    delete = f"move it away, or delete the folder (rm -r {quoted(dest)}), then retry"
    if dest.is_symlink() or not dest.is_dir():
        found = "a symbolic link" if dest.is_symlink() else "a file"
        raise StateError(dest, "a folder that apply built, or nothing", found, "move it away, then retry")
    tree = Tree(dest)
    installed = tree.installed_record()
    listing = (tree.read(installed) if installed else None) or b""
    rows = installs.rows(listing)
    for path in _files(dest):
        file = dest / path
        data = file.read_bytes() if stat.S_ISREG(file.lstat().st_mode) else None
        ours = data is not None and (
            data in (files[path][1] for files in (expected, upstream) if path in files)
            or rows.get(path) == installs.digest(data)
            or (path == installed and installs.complete(data, path))
        )
        if not ours:
            found = "a file that no run wrote, or that was changed since"
            raise StateError(file, "only files as apply wrote them, since it builds this anew", found, delete)


def _require_deletable(dest: Path) -> None:
    """Raise TreeError unless a folder, bytecode and all, can be replaced by another."""
    require_folder(dest.parent)
    require_folder(dest)
    for folder, _, files in os.walk(dest, onerror=_raise):
        problem = obstacle(Path(folder), dest)
        if problem is not None:
            raise TreeError(folder, "a folder that may be deleted, to build it anew", *problem)
        for name in files:
            if held(Path(folder, name)):
                remedy = f"chattr -i -a {quoted(Path(folder, name))} as root, then retry"
                raise TreeError(Path(folder, name), "a file that may be deleted", "immutable", remedy)


def _set_modes(dest: Path, expected: Files) -> bool:
    """Give files the wheel's modes and folders 0755; whether any had another."""
    wanted = {path: mode for path, (mode, _) in expected.items()}
    for path in expected:
        wanted.update({parent.as_posix(): 0o755 for parent in Path(path).parents})
    changed = False
    for path, mode in wanted.items():
        found = (dest / path).stat().st_mode
        if found & 0o777 != mode:
            (dest / path).chmod(found & 0o7000 | mode)
            changed = True
    return changed


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
        work = prepare(tree, planned)
        print(f"{tree.root} would be overlaid; nothing was written" if work.changes else "nothing to do")
        _describe(tree, planned)
        _print_actions(planned)
        if work.installed is not None:
            print(f"  update  {work.installed.path}")
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
    print(_next("installed" if record else "checkout", str(tree.root), "--tree", str(tree.root)))
    return 0


@contextmanager
def complete_later(tree: Tree) -> Iterator[None]:
    """Turn a failing disk into a refusal that says how to go on."""
    with working(tree.root, "run the command again (or revert): it completes"):
        yield


def _require_release(planned: Plan, release: Release | None) -> None:
    if release is not None and release.version not in planned.files_as_in:
        found = f"files as in {span(planned.files_as_in) or 'no single release'}"
        remedy = "leave the release away, or give the tree of that release"
        raise TreeError("the tree", f"files as in {release.version}", found, remedy)


def _describe(tree: Tree, planned: Plan) -> None:
    print(f"  {caveat(tree, planned.files_as_in)}")


def caveat(tree: Tree, files_as_in: Iterable[str]) -> str:
    """What the touched files say about a tree's release, and what its ``package_info.py`` says against it."""
    releases = tuple(files_as_in)
    as_in = span(releases) or "several releases, no one of them has all"
    says = tree.says()
    claim = f" (its package_info.py says {says})" if says and says not in releases else ""
    return f"the touched files are as in {as_in}; that does not make the tree a release{claim}"


def _print_actions(planned: Plan) -> None:
    final = {action.path: action for action in planned.actions if action.kind != "record"}
    for action in final.values():
        word = action.kind if action.changes else "same"
        detail = ""
        if action.kind == "extend":
            size = len(action.after) - len(planned.bases[action.path])
            detail = f"  op {action.op}, {size} bytes below upstream's"
        elif action.kind == "patch":
            detail = f"  op {action.op}, {changed_lines(action.after)}"
        print(f"  {word:7} {action.path}{detail}")
    for file in planned.left:
        print(f"  {'left':7} {file.path}  {stays(file)}")
    for op in planned.missing:
        print(f"  {'none':7} {op}: {NOT_THERE}")
    print(f"  {'record':7} {RECORD}")


def changed_lines(patched: bytes) -> str:
    """Where a patched file has other lines than upstream's."""
    parts = split(patched)
    hunks = parts.hunks if parts else ()
    return f"changed from upstream's line {', '.join(str(hunk.old) for hunk in hunks)}"


def stays(file: FileState) -> str:
    """Why a file of an op is left as it is, for a line that names it."""
    found = "is not there" if file.data is None else "is no pinned variant"
    return f"{found}: this call site stays upstream's (op {file.op})"


def _next(form: str, shown: str, *parity: str) -> str:
    """What to do now, by where the overlay went: ``build``, a ``checkout`` or an ``installed`` package."""
    text = {
        "build": [
            "a checkout or an editable install: python -m scripts apply --tree PATH to it, since its own core"
            " comes first",
            f"an installed megatron-core: {command('wheel', *parity)}, then",
            "  pip install --no-deps --force-reinstall dist/WHEEL",
            f"scripts outside any checkout: PYTHONPATH={quoted(shown)} runs this tree as it is",
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
        f"compare with upstream: {command('parity', *parity)}",
    ]
    return "next\n" + "\n".join(f"  {line}" for line in text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts apply", description=__doc__)
    parser.add_argument(
        "release", nargs="?", metavar="megatron==VERSION", help="a pinned release, or the path of its wheel"
    )
    parser.add_argument("--tree", type=types.path, metavar="PATH", help="overlay this tree in place")
    parser.add_argument("--ops", metavar="A,B", help="only these ops (default: all)")
    parser.add_argument("--python", type=types.text, metavar="3.12", help="take the wheel for this Python")
    parser.add_argument(
        "--platform", type=types.text, metavar="TAG", help="take the wheel for this platform tag or machine"
    )
    parser.add_argument("--dry-run", action="store_true", help="check and print, write nothing")
    return parser
