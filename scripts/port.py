# SPDX-License-Identifier: Apache-2.0
"""Triage of an unknown release or tree: what moved under the overlay, and what has to be looked at.

Each touched file is compared with that of a pinned release: the same bytes, other bytes around entries that
are the same, an entry that changed, moved or went. Of the code around it: signatures, public names, and every
place that calls an entry or names it.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts import arguments as types
from scripts import lint, patches, pins
from scripts.diff import unified
from scripts.errors import UsageError
from scripts.manifest import Manifest, TouchedFile, load, parse_spec, span
from scripts.overlay import PACKAGE, ROOT, sha256, split
from scripts.source import choose, fetch_file, members
from scripts.tree import Tree

CORE = "megatron/core/"
SAME, AROUND, CHANGED, GONE = "same", "changed around its entries", "changed in an entry", "gone"
Sources = Mapping[str, bytes]


@dataclass
class Entry:
    """What became of an entry: ``notes`` on what callers see of it, the lines of it that changed, and the
    places that name it and are new or gone."""

    name: str
    changed: bool
    notes: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    callers: list[str] = field(default_factory=list)
    retires_when: str = ""


@dataclass
class File:
    """What became of a touched file. ``pinned``: the releases that have these very bytes; ``diff``: of a
    patched file that is not pinned, whether a diff would fit it."""

    path: str
    verdict: str
    sha256: str | None
    pinned: Sequence[str] = ()
    entries: list[Entry] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    diff: list[str] = field(default_factory=list)


@dataclass
class Report:
    """The triage: of each touched file, and of the names that the overlay's own code takes from Megatron."""

    old: str
    new: str
    files: list[File]
    missing: list[str]

    @property
    def settled(self) -> bool:
        """Whether pins and the comparison are all that is left to do."""
        return not self.missing and all(
            f.verdict in (SAME, AROUND) and not f.diff and not any(e.callers or e.notes for e in f.entries)
            for f in self.files
        )


def main(argv: list[str]) -> int:
    """``port megatron==V`` or ``port --tree PATH``; 1 where something has to be looked at.

    Raises UsageError for arguments that do not fit, SourceError for a release that pip does not bring,
    TreeError for a folder without Megatron-Core.
    """
    arguments = _parser().parse_args(argv)
    if (arguments.release is None) == (arguments.tree is None):
        found = "both" if arguments.release else "neither"
        raise UsageError("command line", "a release or --tree", found, "give one of them")
    manifest = load()
    base = manifest.release(f"megatron=={arguments.base or manifest.newest()}")
    old = _python((path, data) for path, _, data in members(fetch_file(base, choose(base, nearest=True))))
    if arguments.tree is not None:
        tree = Tree.locate(arguments.tree)
        name, new = str(tree.root), read_tree(tree.root)
    else:
        version = parse_spec(arguments.release)
        name = f"megatron-core {version}"
        with tempfile.TemporaryDirectory(prefix="port-") as folder:
            published = pins.gather(version, manifest, Path(folder))
            wheel = Path(folder) / published.wheels[-1].filename
            new = _python((path, data) for path, _, data in members(wheel))
    report = triage(f"megatron-core {base.version}", old, name, new, manifest)
    print("\n".join(lines(report, arguments.release)))
    if arguments.diff:
        for file in report.files:
            if file.verdict != SAME and file.path in new:
                print(unified(file.path, old.get(file.path), new[file.path]).decode(errors="replace"), end="")
    return 0 if report.settled else 1


def _python(files: Iterator[tuple[str, bytes]]) -> dict[str, bytes]:
    return {path: data for path, data in files if path.endswith(".py") and path.startswith(CORE)}


def read_tree(root: Path) -> dict[str, bytes]:
    """A tree's Python sources below ``megatron/core``, without an overlay if it has one."""
    found = {}
    for path in sorted((root / CORE).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(f"{PACKAGE}/"):
            data = path.read_bytes()
            extended = split(data)
            found[name] = data if extended is None else extended.base
    return found


def triage(old_name: str, old: Sources, new_name: str, new: Sources, manifest: Manifest) -> Report:
    """Compare the sources of two trees, by path, as far as the overlay is concerned."""
    patch_set = lint.PatchSet.read(ROOT)
    ledger = {
        entry.name: entry.fields.get("retires when", "")
        for data in patch_set.headed.values()
        for entry in lint.ledger(data)
    }
    references = {
        name: [_references(sources, name) for sources in (old, new)]
        for file in manifest.files.values()
        for name in file.entries
    }
    files = [_file(file, old, new, references, ledger) for file in manifest.files.values()]
    for file in files:
        source = f"patches/{file.path}{patches.SUFFIX}"
        if source in patch_set.diffs and file.path in new and not file.pinned:
            file.diff = _draft(source, patches.parse(patch_set.diffs[source]), new[file.path])
    return Report(old_name, new_name, files, missing_names(new))


def _draft(source: str, patch: patches.Patch, data: bytes) -> list[str]:
    draft = patch.draft(data)
    if draft is None:
        return [f"no diff of {source} fits, wherever its lines are looked for: write one"]
    diff, line = draft
    return [f"the diff at {source}:{diff.line} would fit; read the place, then list it there:", f"  {line}"]


def _file(
    file: TouchedFile,
    old: Sources,
    new: Sources,
    references: Mapping[str, list[Counter[str]]],
    ledger: Mapping[str, str],
) -> File:
    before, after = old.get(file.path, b""), new.get(file.path)
    entries = []
    for name in file.entries:
        nodes = [pins.definition(ast.parse(data), name) for data in (before, after or b"")]
        changed = _print(nodes[0]) != _print(nodes[1])
        entry = Entry(name, changed, retires_when=ledger.get(name, "") if changed else "")
        if nodes[1] is None and nodes[0] is not None:
            places = [path for path, data in new.items() if path != file.path and _defines(data, name)]
            entry.notes.append(f"no longer defined here{'; now in ' + ', '.join(places) if places else ''}")
        elif nodes[0] is not None:
            entry.notes += _differences(interface(nodes[0]), interface(nodes[1]))
            entry.body += _changed_lines(nodes[0], nodes[1])
        was, now = references[name]
        entry.callers += [f"- {text}" for text in sorted((was - now).elements())]
        entry.callers += [f"+ {text}" for text in sorted((now - was).elements())]
        entries.append(entry)
    if after is None:
        return File(file.path, GONE if file.path in old else SAME, None, entries=entries)
    digest = sha256(after)
    variant = file.variant(digest)
    verdict = SAME if after == before else CHANGED if any(e.changed for e in entries) else AROUND
    names = [
        f"{sign} {name}"
        for sign, found in (("-", _public(before) - _public(after)), ("+", _public(after) - _public(before)))
        for name in sorted(found)
    ]
    return File(file.path, verdict, digest, variant.releases if variant else (), entries, names)


def _print(node: ast.AST | None) -> str | None:
    return None if node is None else pins.fingerprint(node)


def interface(node: ast.stmt | None) -> dict[str, str]:
    """What a caller sees of a definition: signatures of the function or of the class's methods, and the
    class's other names."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {node.name: f"({ast.unparse(node.args)})"}
    if not isinstance(node, ast.ClassDef):
        return {} if node is None else {"value": ast.unparse(node)}
    found = {"bases": ", ".join(map(ast.unparse, node.bases))}
    for part in node.body:
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[f"{node.name}.{part.name}"] = f"({ast.unparse(part.args)})"
        for target in part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]:
            if isinstance(target, ast.Name):
                found[f"{node.name}.{target.id}"] = ast.unparse(part)
    return found


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    notes = [f"{name} is new: {after[name]}" for name in after if name not in before]
    notes += [f"{name} is gone; it was {before[name]}" for name in before if name not in after]
    both = [name for name in before if name in after and before[name] != after[name]]
    return notes + [f"{name}: {before[name]} became {after[name]}" for name in both]


def _changed_lines(before: ast.stmt, after: ast.stmt | None) -> list[str]:
    """The statements that went (-) and came (+), comments, docstrings and layout aside."""
    for node in (before, after):
        for part in ast.walk(node) if node is not None else ():
            if isinstance(part, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(part) is not None:
                part.body = part.body[1:] or [ast.Pass()]
    old, new = ("" if node is None else ast.unparse(node) for node in (before, after))
    found = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0))[2:]
    return [line for line in found if not line.startswith("@@")]


def _public(data: bytes) -> set[str]:
    """The names that a module defines, imports aside."""
    names = {
        name
        for node in ast.walk(ast.parse(data))
        for name in (
            [node.name]
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            else [t.id for t in node.targets if isinstance(t, ast.Name)]
            if isinstance(node, ast.Assign)
            else []
        )
    }
    module = ast.parse(data)
    return {n for n in names if not n.startswith("_") and pins.definition(module, n) is not None}


def _defines(data: bytes, name: str) -> bool:
    return name.encode() in data and pins.definition(ast.parse(data), name) is not None


def _references(sources: Sources, name: str) -> Counter[str]:
    """Every place that names ``name``, as ``path: code``, without line numbers: calls in full."""
    found: Counter[str] = Counter()
    for path, data in sources.items():
        if name.encode() not in data:
            continue
        module = ast.parse(data)
        parents = {child: node for node in ast.walk(module) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(module):
            named = (isinstance(node, ast.Name) and node.id == name) or (
                isinstance(node, ast.Attribute) and node.attr == name
            )
            imported = isinstance(node, ast.ImportFrom) and any(a.name == name for a in node.names)
            if imported and isinstance(node, ast.ImportFrom):
                found[f"{path}: from {'.' * node.level}{node.module or ''} import {name}"] += 1
            elif named:
                parent = parents[node]
                call = isinstance(parent, ast.Call) and parent.func is node
                shown = parent if call or isinstance(parent, (ast.Assign, ast.Return, ast.keyword)) else node
                found[f"{path}: {ast.unparse(shown)}"] += 1
    return found


def missing_names(new: Sources) -> list[str]:
    """What the overlay's own code takes from Megatron-Core and does not find there."""
    missing = []
    for path in sorted((ROOT / "overlay").rglob("*.py")):
        module = ast.parse(path.read_bytes())
        taken: dict[str, str] = {}  # a module of Megatron by the name that it has here
        wanted: set[tuple[str, str]] = set()
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    if _file_of(new, whole):
                        taken[alias.asname or alias.name] = whole
                    elif not (node.module or "").startswith(PACKAGE.replace("/", ".")):
                        wanted.add((str(node.module), alias.name))
        for node in ast.walk(module):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in taken
            ):
                wanted.add((taken[node.value.id], node.attr))
        for holder, name in sorted(wanted):
            file = _file_of(new, holder)
            if file is None or not _binds(new[file], name):
                missing.append(f"{path.relative_to(ROOT).as_posix()} takes {name} from {holder}")
    return missing


def _file_of(sources: Sources, module: str) -> str | None:
    stem = module.replace(".", "/")
    return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in sources), None)


def _binds(data: bytes, name: str) -> bool:
    module = ast.parse(data)
    imported = (
        alias.asname or alias.name
        for node in ast.walk(module)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    )
    return pins.definition(module, name) is not None or name in set(imported)


def lines(report: Report, release: str | None) -> list[str]:
    """The report for a reader, and what is left to do."""
    text = [f"{report.new}, compared with {report.old}", ""]
    for file in report.files:
        known = f"pinned for {span(file.pinned)}" if file.pinned else "not pinned"
        text.append(
            f"{file.path}: {file.verdict}" + (f" ({file.sha256[:12]}…, {known})" if file.sha256 else "")
        )
        text += [f"  public name {note}" for note in file.names]
        text += [f"  {note}" for note in file.diff]
        for entry in file.entries:
            state = "changed" if entry.changed else "as it was"
            if entry.changed or entry.notes or entry.callers:
                text.append(f"  {entry.name}: {state}")
            text += [f"    {note}" for note in entry.notes]
            text += [f"    {line}" for line in entry.body]
            if entry.retires_when:
                text.append(f"    retires when: {entry.retires_when}. Has it come?")
            text += [f"    caller {note}" for note in entry.callers]
    text += [f"missing: {note}" for note in report.missing]
    text += ["", "nothing of the overlay's code is concerned" if report.settled else "look at the above"]
    unknown = [file for file in report.files if file.sha256 and not file.pinned]
    text.append("still unproven, in this order:")
    if release is not None:
        text.append(f"  pins: python -m scripts pin {release} --clone CLONE --write, then lint")
    elif unknown:
        text.append(
            "  pins: of main, python -m scripts pin --preview COMMIT --clone CLONE --write, then lint"
        )
    where = f"--tree {report.new}" if release is None else release
    for name, of in (
        ("parity", "every call against the pristine tree and float64"),
        ("train", "a step, gradients and checkpoints"),
        ("tests", "with a variant that is new, on a GPU too"),
    ):
        text.append(f"  {name}: python -m scripts {name}{'' if name == 'tests' else f' {where}'} ({of})")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts port", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("release", metavar="megatron==VERSION", nargs="?", help="a release, pinned or not")
    parser.add_argument("--tree", type=types.path, metavar="PATH", help="or a tree: a checkout, say")
    parser.add_argument(
        "--base", metavar="VERSION", help="the pinned release to compare with (default: the newest)"
    )
    parser.add_argument("--diff", action="store_true", help="upstream's own diff of the files that changed")
    return parser
