# SPDX-License-Identifier: Apache-2.0
"""Check the patch set itself: pins, tails, diffs and ledger hold each other, and nothing is there twice or
unused.

One rule is one function of ``PatchSet`` that yields problems; ``RULES`` lists them.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts import arguments as types
from scripts import patches
from scripts.errors import OverlayError
from scripts.manifest import PREVIEW, Manifest, TouchedFile, load, order
from scripts.overlay import PACKAGE, ROOT, overlay_version, sha256
from scripts.pins import blobs, definition

LICENCE = b"# SPDX-License-Identifier: Apache-2.0\n"
FIELDS = ("kind", "why", "upstream", "retires when")
KINDS = ("speed", "fix", "reach")
FILES, RELEASES = "patches/files.json", "patches/releases.json"


@dataclass(frozen=True)
class Problem:
    """What is wrong, where (line 0: the whole file), and which rule says so."""

    file: str
    line: int
    message: str
    rule: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message} [{self.rule}]"


@dataclass(frozen=True)
class Entry:
    """The ledger's header of one entry in a tail or above diffs."""

    name: str
    line: int
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PatchSet:
    """The set as it is on disk: pins, the sources of ``overlay/`` and ``kernels/``, the files with diffs, the
    licence texts."""

    manifest: Manifest
    tails: dict[str, bytes]
    added: dict[str, bytes]
    texts: dict[str, bytes] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    diffs: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> PatchSet:
        tails: dict[str, bytes] = {}
        added: dict[str, bytes] = {}
        diffs: dict[str, bytes] = {}
        others: list[str] = []
        for path in _files(root, "patches"):
            if path.endswith(patches.SUFFIX):
                diffs[path] = (root / path).read_bytes()
            elif path not in (RELEASES, FILES):
                others.append(path)
        for path in (*_files(root, "overlay"), *_files(root, "kernels")):
            if not path.endswith(".py"):
                others.append(path)
            elif path.startswith((f"overlay/{PACKAGE}/", "kernels/")):
                added[path] = (root / path).read_bytes()
            else:
                tails[path] = (root / path).read_bytes()
        texts = {path: (root / path).read_bytes() for path in _files(root, "LICENSES")}
        return cls(load(root), tails, added, texts, tuple(others), diffs)

    @property
    def sources(self) -> dict[str, bytes]:
        return {**self.tails, **self.added}

    @property
    def headed(self) -> dict[str, bytes]:
        """What has ledger headers."""
        return {**self.tails, **self.diffs}


Rule = Callable[[PatchSet], Iterator[Problem]]


def main(argv: list[str]) -> int:
    """``lint [--clone PATH]``: one line for each problem; 1 when there is any."""
    parser = argparse.ArgumentParser(prog="python -m scripts lint", description=__doc__)
    parser.add_argument(
        "--clone", type=types.path, metavar="PATH", help="a Megatron-LM clone that has the previews' commits"
    )
    clone = parser.parse_args(argv).clone
    problems = check(ROOT)
    if clone is not None and not problems:
        problems = list(previews_are_of(load(ROOT), clone))
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems" if problems else f"the patch set is sound ({len(RULES)} rules)")
    return 1 if problems else 0


def check(root: Path) -> list[Problem]:
    """All problems of the patch set below ``root``."""
    try:
        patch_set = PatchSet.read(root)
        overlay_version(root)
    except OverlayError as error:
        return [Problem(error.file, 0, f"expected {error.expected}, found {error.found}", "schema")]
    broken = list(_run(parses, patch_set))
    return broken or [problem for rule in RULES for problem in _run(rule, patch_set)]


def _run(rule: Rule, patch_set: PatchSet) -> Iterator[Problem]:
    for problem in rule(patch_set):
        yield Problem(problem.file, problem.line, problem.message, rule.__name__)


def parses(s: PatchSet) -> Iterator[Problem]:
    """Every source is Python, and every file with diffs is in form."""
    for path, data in s.sources.items():
        try:
            ast.parse(data)
        except (SyntaxError, ValueError) as error:
            yield Problem(path, getattr(error, "lineno", 0) or 0, f"does not parse: {error}")
    for path, data in s.diffs.items():
        try:
            patches.parse(data)
        except patches.MalformedError as error:
            yield Problem(path, error.line, f"expected {error.expected}, found {error.found}")


def licensed(s: PatchSet) -> Iterator[Problem]:
    """Every source begins with the licence line."""
    for path, data in s.sources.items():
        if not data.startswith(LICENCE):
            yield Problem(path, 1, f"the first line is not {LICENCE.decode().strip()}")


def nothing_else(s: PatchSet) -> Iterator[Problem]:
    """Nothing lies there that no step reads."""
    for path in s.others:
        yield Problem(path, 0, "no step of the pipeline reads this file")


def releases_pinned(s: PatchSet) -> Iterator[Problem]:
    """A release has wheels and an sdist of its version, each once, and a source."""
    for version, release in s.manifest.releases.items():
        names = [file.filename for file in (*release.wheels, *([release.sdist] if release.sdist else []))]
        for name in sorted(set(names)):
            if names.count(name) > 1:
                yield Problem(RELEASES, 0, f"{name} is listed twice")
            if not re.match(rf"megatron_core-{re.escape(version)}(-cp3\d+-.*\.whl|\.tar\.gz)$", name):
                yield Problem(RELEASES, 0, f"{name} is no file of {version}")
        if not release.wheels or release.sdist is None or not release.source:
            yield Problem(RELEASES, 0, f"{version} lacks wheels, an sdist or a source")
        if version in s.manifest.yanked:
            yield Problem(RELEASES, 0, f"{version} is both pinned and yanked")


def variants_once(s: PatchSet) -> Iterator[Problem]:
    """A file lists a hash once, a release once, both in the releases' order, and says where each is from."""
    for path, file in s.manifest.files.items():
        hashes = [v.sha256 for v in file.variants]
        for twice in sorted({h for h in hashes if hashes.count(h) > 1}):
            yield Problem(FILES, 0, f"{path}: variant {twice[:12]} is listed twice")
        listed = [release for v in file.variants for release in v.releases] + [*file.absent]
        for version in sorted({r for r in listed if listed.count(r) > 1}, key=order):
            yield Problem(FILES, 0, f"{path}: {version} is listed twice")
        for group in (*(v.releases for v in file.variants), file.absent, [r[0] for r in _releases(file)]):
            if list(group) != sorted(group, key=order):
                yield Problem(FILES, 0, f"{path}: {', '.join(group)} are not in order")
        for variant in file.variants:
            if not variant.releases or not variant.source:
                yield Problem(FILES, 0, f"{path}: {variant.sha256[:12]} lacks releases or a source")


def _releases(file: TouchedFile) -> list[tuple[str, ...]]:
    return [v.releases for v in file.variants if v.releases]


def releases_complete(s: PatchSet) -> Iterator[Problem]:
    """Each file names every release, and no other, in a variant or among those that lack the file."""
    for path, file in s.manifest.files.items():
        listed = {release for v in file.variants for release in v.releases} | {*file.absent}
        for version in s.manifest.known:
            if version not in listed:
                yield Problem(FILES, 0, f"{path}: {version} has no variant, and is not said to lack the file")
        for version in sorted(listed - set(s.manifest.known), key=order):
            yield Problem(FILES, 0, f"{path}: {version} is not in {RELEASES}")


def previews_ahead(s: PatchSet) -> Iterator[Problem]:
    """A preview is of a version that is still to come, and says where its files are from."""
    for name, preview in s.manifest.previews.items():
        newest = s.manifest.newest()
        if s.manifest.releases and order(name.split(PREVIEW)[0]) <= order(newest):
            yield Problem(RELEASES, 0, f"{name} is a preview, and {newest} is pinned")
        if not preview.source:
            yield Problem(RELEASES, 0, f"{name} lacks a source")


def previews_are_of(manifest: Manifest, clone: Path) -> Iterator[Problem]:
    """Each preview's files are those of its commit in a clone. Raises UsageError when the clone lacks it."""
    for name, preview in manifest.previews.items():
        found = blobs(clone, preview.commit, manifest.files)
        for path, file in manifest.files.items():
            pinned = next((v.sha256 for v in file.variants if name in v.releases), None)
            theirs = sha256(found[path]) if path in found else None
            if theirs != pinned:
                words = [digest[:12] if digest else "no file" for digest in (pinned, theirs)]
                message = f"{path}: {name} is {words[0]} here, {words[1]} in the commit"
                yield Problem(FILES, 0, message, previews_are_of.__name__)


def licenses_pinned(s: PatchSet) -> Iterator[Problem]:
    """Each release has one licence text, which is there and is the pinned one; no text is unused."""
    listed = [release for text in s.manifest.licenses for release in text.releases]
    for version in s.manifest.releases:
        if listed.count(version) != 1:
            yield Problem(RELEASES, 0, f"{version} has {listed.count(version)} licence texts")
    for version in sorted(set(listed) - set(s.manifest.releases), key=order):
        yield Problem(RELEASES, 0, f"licence of {version}, which is not pinned")
    paths = [text.path for text in s.manifest.licenses]
    for text in s.manifest.licenses:
        if not text.releases or not text.source:
            yield Problem(RELEASES, 0, f"{text.path} lacks releases or a source")
        if paths.count(text.path) > 1 or text.path not in s.texts:
            yield Problem(RELEASES, 0, f"{text.path} is listed twice, or is not there")
        elif sha256(s.texts[text.path]) != text.sha256:
            yield Problem(text.path, 0, f"is not the pinned text ({text.sha256[:12]})")
    for path in sorted(s.texts.keys() - set(paths)):
        yield Problem(path, 0, f"no release in {RELEASES} is under it")


def pins_have_tails(s: PatchSet) -> Iterator[Problem]:
    """A pinned file has what its action says, a tail or diffs, and not the other; both have a pin."""
    for path, file in s.manifest.files.items():
        if file.action == "extend" and f"overlay/{path}" not in s.tails:
            yield Problem(FILES, 0, f"{path} has no tail in overlay/")
        if file.action == "patch" and f"patches/{path}{patches.SUFFIX}" not in s.diffs:
            yield Problem(FILES, 0, f"{path} has no diffs in patches/")
    for source in s.headed:
        file_or_none = _pin(s, source)
        if file_or_none is None:
            yield Problem(source, 0, "has no pin in patches/files.json")
        elif (file_or_none.action == "extend") != (source in s.tails):
            yield Problem(source, 0, f"the pinned action is {file_or_none.action}")


def _pin(s: PatchSet, source: str) -> TouchedFile | None:
    """The pin of a tail's or a diff's upstream file."""
    path = source.removeprefix("overlay/").removeprefix("patches/")
    return s.manifest.files.get(path.removesuffix(patches.SUFFIX))


def diffs_fit_pins(s: PatchSet) -> Iterator[Problem]:
    """Diffs name the file that they lie under and their op, and fit each of its variants that has an entry,
    and no other."""
    for path, data in s.diffs.items():
        patch, file = patches.parse(data), _pin(s, path)
        if path != f"patches/{patch.path}{patches.SUFFIX}":
            yield Problem(path, patch.diffs[0].line, f"the diff is of {patch.path}")
        pinned = [variant.sha256 for variant in file.variants if variant.has_entries] if file else []
        for diff in patch.diffs:
            for known in sorted(set(diff.fits) - set(pinned)):
                yield Problem(path, diff.line, f"fits {known[:12]}, which is not pinned")
        for known in pinned:
            if patch.fitting(known) is None:
                yield Problem(path, 0, f"no diff fits {known[:12]}")
        for entry in ledger(patch.header):
            op = entry.fields.get("op")
            if file is not None and op != file.op:
                yield Problem(path, entry.line + 1, f"{entry.name}: op is {op}, and {file.op} in the pins")


def optional_has_a_rest(s: PatchSet) -> Iterator[Problem]:
    """An op has a file that is not optional: else it would apply to any tree, and change nothing."""
    for op in s.manifest.ops:
        if all(file.optional for file in s.manifest.files_of(op)):
            yield Problem(FILES, 0, f"every file of {op} is optional")


def ledger_complete(s: PatchSet) -> Iterator[Problem]:
    """An entry's header has every field, and its kind is one of the known."""
    for path, data in s.headed.items():
        for entry in ledger(data):
            for name in FIELDS:
                if not entry.fields.get(name):
                    yield Problem(path, entry.line, f"{entry.name}: the header lacks “{name}:”")
            kind = entry.fields.get("kind", "")
            if kind and kind not in KINDS:
                yield Problem(path, entry.line, f"{entry.name}: kind is {kind}, not {', '.join(KINDS)}")


def ledger_matches_pins(s: PatchSet) -> Iterator[Problem]:
    """Headers and pinned entries are the same names, each once."""
    for path, data in s.headed.items():
        file = _pin(s, path)
        names = [entry.name for entry in ledger(data)]
        for entry in ledger(data):
            if names.count(entry.name) > 1:
                yield Problem(path, entry.line, f"{entry.name} has two headers")
            if file is not None and entry.name not in file.entries:
                yield Problem(path, entry.line, f"{entry.name} is not among the pinned entries")
        for name in file.entries if file else ():
            if name not in names:
                yield Problem(path, 0, f"{name} is pinned but has no header")


def ledger_matches_code(s: PatchSet) -> Iterator[Problem]:
    """A tail keeps an entry as ``_upstream_NAME`` and binds it anew; no public name is without header."""
    for path, data in s.tails.items():
        module = ast.parse(data)
        headed = {entry.name: entry.line for entry in ledger(data)}
        for name, line in headed.items():
            for wanted in (f"_upstream_{name}", name):
                if definition(module, wanted) is None:
                    yield Problem(path, line, f"{wanted} is not bound in the tail")
        for name, line in sorted(_bound(module).items()):
            if not name.startswith("_") and name not in headed:
                yield Problem(path, line, f"{name} is bound in the tail without a header")


def fingerprints_complete(s: PatchSet) -> Iterator[Problem]:
    """Every variant has a fingerprint, or null for none, of each pinned entry and of no other; one to extend
    has an entry."""
    for path, file in s.manifest.files.items():
        for variant in file.variants:
            where = f"{path}: {variant.sha256[:12]}"
            for name, value in variant.entries.items():
                if name not in file.entries:
                    yield Problem(FILES, 0, f"{where}: {name} is fingerprinted but no entry")
                if value is not None and not re.fullmatch(r"[0-9a-f]{64}", value):
                    yield Problem(FILES, 0, f"{where}: the fingerprint of {name} is no sha256")
            for name in file.entries:
                if name not in variant.entries:
                    yield Problem(FILES, 0, f"{where}: nothing is said of {name}")
            if file.action == "extend" and file.entries and not any(variant.entries.values()):
                yield Problem(FILES, 0, f"{where}: no entry to take over")
        for name in file.entries:
            if not any(variant.entries.get(name) for variant in file.variants):
                yield Problem(FILES, 0, f"{path}: {name} has no fingerprint in any variant")


def tails_apply(s: PatchSet) -> Iterator[Problem]:
    """A tail takes an entry over in each variant that has it: without a condition where all variants have it,
    where upstream defines it (``if "NAME" in globals():``) where some do not."""
    for path, data in s.tails.items():
        file = s.manifest.files.get(path.removeprefix("overlay/"))
        module = ast.parse(data)
        guarded = {name for node in module.body for name in _guarded(node)}
        for name in file.entries if file else ():
            everywhere = all(variant.entries.get(name) for variant in file.variants) if file else True
            if everywhere and name in guarded:
                yield Problem(path, 0, f"{name} is taken over on a condition, and every variant has it")
            elif not everywhere and name not in guarded:
                yield Problem(path, 0, f"{name} is taken over where a variant lacks it")


def _guarded(node: ast.stmt) -> list[str]:
    """The name that ``if "NAME" in globals():`` asks for."""
    match node:
        case ast.If(
            test=ast.Compare(
                left=ast.Constant(value=str(name)),
                ops=[ast.In()],
                comparators=[ast.Call(func=ast.Name(id="globals"))],
            )
        ) if definition(ast.Module(node.body, []), name) is not None:
            return [name]
    return []


def ops_agree(s: PatchSet) -> Iterator[Problem]:
    """The ops of the pins are those that the settings know."""
    path = f"overlay/{PACKAGE}/settings.py"
    node = definition(ast.parse(s.added.get(path, b"")), "OPS")
    value = (
        ast.literal_eval(node.value) if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value else ()
    )
    if set(value) != set(s.manifest.ops):
        line = node.lineno if node else 0
        yield Problem(path, line, f"OPS is {value}, the pins have {s.manifest.ops}")


def imports_sound(s: PatchSet) -> Iterator[Problem]:
    """No import that a tree cannot resolve, and none of ``megatron.core.transformer`` at import time.

    That package imports the fusions at its own import; a tail that imports it back finds it half made.
    """
    for path, data in s.sources.items():
        module = ast.parse(data)
        top = set(_top_level(module))
        for node in ast.walk(module):
            for name in _imported(node):
                if name.split(".")[0] in ("kernels", "liger_kernels", "scripts", "overlay"):
                    yield Problem(path, _line(node), f"imports {name}, which a tree does not have")
                elif node in top and name.startswith("megatron.core.transformer"):
                    yield Problem(path, _line(node), f"imports {name} at import time")
        if path in s.tails and any("__future__" in _imported(node) for node in ast.walk(module)):
            yield Problem(path, 0, "a tail is in the middle of a file: no __future__ import there")


RULES: tuple[Rule, ...] = (
    parses,
    licensed,
    nothing_else,
    releases_pinned,
    variants_once,
    releases_complete,
    previews_ahead,
    licenses_pinned,
    pins_have_tails,
    diffs_fit_pins,
    optional_has_a_rest,
    ledger_complete,
    ledger_matches_pins,
    ledger_matches_code,
    fingerprints_complete,
    tails_apply,
    ops_agree,
    imports_sound,
)


def ledger(tail: bytes) -> list[Entry]:
    """The headers in a source: ``# entry: NAME``, then deeper comments ``#   field: text`` that may go on."""
    found: list[Entry] = []
    current: Entry | None = None
    name = ""
    for number, text in enumerate(tail.decode().splitlines(), 1):
        head = re.fullmatch(r"\s*# entry:\s*(\S+)\s*", text)
        comment = re.fullmatch(r"\s*#(\s{2,}\S.*)", text)
        if head:
            current, name = Entry(head[1], number), ""
            found.append(current)
        elif current is None or comment is None:
            current = None
        elif start := re.fullmatch(r"\s{3}([a-z][a-z ]*):\s*(.*)", comment[1]):
            name = start[1]
            current.fields[name] = start[2].strip()
        elif name:
            current.fields[name] = f"{current.fields[name]} {comment[1].strip()}".strip()
    return found


def _files(root: Path, folder: str) -> list[str]:
    found = (p.relative_to(root) for p in (root / folder).rglob("*") if p.is_file())
    return sorted(p.as_posix() for p in found if "__pycache__" not in p.parts)


def _top_level(module: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: all but the bodies of functions."""
    waiting: list[ast.AST] = list(module.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(c for c in ast.iter_child_nodes(node) if not _type_checking(node))


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _bound(module: ast.Module) -> dict[str, int]:
    names: dict[str, int] = {}
    for node in _top_level(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = node.lineno
    return names


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module or ""]
    return []


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)
