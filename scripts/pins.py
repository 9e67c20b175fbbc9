# SPDX-License-Identifier: Apache-2.0
"""Draft the pins of releases: hashes of every wheel and the sdist, of the touched files and their entries,
and of the licence text.

pip brings the files from PyPI, all that the index lists for a release; the touched files must be the same in
all of them, and in the release's git tag when a clone is given, so that no hash rests on one server alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts import arguments as types
from scripts.errors import SourceError, UsageError
from scripts.manifest import (
    PREVIEW,
    SCHEMA,
    Manifest,
    PinnedFile,
    TouchedFile,
    load,
    normalize,
    order,
    parse_spec,
    preview_name,
)
from scripts.overlay import ROOT, git_environment, sha256
from scripts.source import digest, members, pip_environment, wheel_arguments

LICENSE = "LICENSE"
_SDIST = ["--no-binary=megatron-core"]


@dataclass(frozen=True)
class Published:
    """What was found of a release: its files, the touched files' bytes, why it was withdrawn (if it was).

    ``license`` is the text at the release's tag, None where no tag was looked at. ``finals`` are the final
    releases that the index has.
    """

    version: str
    wheels: tuple[PinnedFile, ...]
    sdist: PinnedFile | None
    files: Mapping[str, bytes]
    tag: str | None = None
    yanked: str | None = None
    absent: tuple[str, ...] = field(default=())
    license: bytes | None = None
    finals: tuple[str, ...] = field(default=())


def main(argv: list[str]) -> int:
    """``pin megatron==V … [--clone PATH] [--write]``; raises SourceError when a release's files disagree."""
    arguments = _parser().parse_args(argv)
    versions = list(dict.fromkeys(parse_spec(release) for release in arguments.releases))
    if bool(versions) == bool(arguments.preview) or (arguments.preview and not arguments.clone):
        remedy = "write megatron==VERSION, or --preview COMMIT --clone PATH"
        raise UsageError("command line", "releases, or a preview and a clone", "something else", remedy)
    untagged = {normalize(version) for version in arguments.untagged}
    manifest = load()
    releases, files, texts = _read("releases.json"), _read("files.json"), dict[str, bytes]()
    finals: tuple[str, ...] = ()
    for version in versions:
        with tempfile.TemporaryDirectory(prefix="pins-") as folder:
            clone = None if version in untagged else arguments.clone
            published = gather(version, manifest, Path(folder), clone)
        texts.update(draft(published, releases, files))
        finals = published.finals
        _say(published)
    if arguments.preview:
        name, commit, contents = gather_preview(arguments.clone, arguments.preview, manifest)
        draft_preview(name, commit, contents, releases, files)
        versions = [name]
    if arguments.write:
        for name, document in (("releases.json", releases), ("files.json", files)):
            (ROOT / "patches" / name).write_text(render(document), encoding="utf-8")
        for path, text in texts.items():
            (ROOT / path).write_bytes(text)
    else:
        keys = {key: set(versions) for key in ("releases", "previews", "yanked")}
        shown = {k: {v: n for v, n in releases[k].items() if v in wanted} for k, wanted in keys.items()}
        print(render({**shown, "licenses": releases["licenses"], "files": files["files"]}), end="")
    for version in _forgotten(finals, releases):
        print(f"note: {version} is published, and neither pinned nor withdrawn", file=sys.stderr)
    return 0


def _say(published: Published) -> None:
    brought = f"{len(published.wheels)} wheels, {'the sdist' if published.sdist else 'no sdist'}"
    compared = published.tag or "no git tag looked at"
    print(f"{published.version}: {brought}, {compared}", file=sys.stderr)
    for path in published.absent:
        print(f"note: {path} is not in {published.version}", file=sys.stderr)


def _forgotten(finals: tuple[str, ...], releases: Mapping[str, Any]) -> list[str]:
    known = {*releases["releases"], *releases["yanked"]}
    oldest = min(map(order, releases["releases"]), default=())
    return sorted((v for v in finals if v not in known and order(v) > oldest), key=order)


def gather(version: str, manifest: Manifest, folder: Path, clone: Path | None = None) -> Published:
    """Download all files of a release into ``folder`` and compare the touched files in them.

    Raises SourceError when there is no wheel, when a file that the index lists does not come, when two of
    the files have other bytes for a touched file, or when the git tag has; UsageError for a clone that lacks
    the tag.
    """
    names, finals, yanked = _listing(version, folder)
    if not any(name.endswith(".whl") for name in names):
        remedy = "check the version and pip's access to PyPI"
        raise SourceError(f"megatron-core {version}", "wheels on PyPI", "none", remedy)
    for name in names:
        if not (folder / name).is_file():
            _pip(version, folder, wheel_arguments(name) if name.endswith(".whl") else _SDIST)
        if not (folder / name).is_file():
            remedy = "check pip's access to PyPI"
            raise SourceError(name, "every file that the index lists", "pip did not bring it", remedy)
    wheels = [folder / name for name in names if name.endswith(".whl")]
    sdist = next((folder / name for name in names if not name.endswith(".whl")), None)
    files: dict[str, bytes] = {}
    for wheel in wheels:
        contents = {path: data for path, _, data in members(wheel) if path in manifest.files}
        _agree(wheel.name, files, contents, first=wheel is wheels[0])
    if sdist is not None:
        _agree(sdist.name, files, dict(_sdist_members(sdist, manifest.files)))
    tag = f"core_v{version}" if clone is not None else None
    license_text = None
    if clone is not None and tag is not None:
        license_text = _show(clone, tag, LICENSE)
        found = {path: _show(clone, tag, path) for path in _listed(clone, tag, manifest.files)}
        _agree(f"tag {tag}", files, found)
    return Published(
        version,
        tuple(PinnedFile(path.name, digest(path)) for path in wheels),
        PinnedFile(sdist.name, digest(sdist)) if sdist else None,
        files,
        tag,
        yanked,
        tuple(path for path in manifest.files if path not in files),
        license_text,
        finals,
    )


def draft(published: Published, releases: dict[str, Any], files: dict[str, Any]) -> dict[str, bytes]:
    """Add what was found to the two documents of ``patches/``; a withdrawn release is listed as such only.

    Returns the licence texts that are new, by path. Raises UsageError when the release has neither a tag nor
    a pinned release before it, whose text it would then have.
    """
    version = published.version
    if published.yanked is not None:
        releases["yanked"][version] = published.yanked
        return {}
    if any(order(name.split(PREVIEW)[0]) <= order(version) for name in releases["previews"]):
        _drop_previews(releases, files)
    license_source, new = _draft_license(published, releases)
    tag = f" and in git tag {published.tag}" if published.tag else ""
    releases["releases"][version] = {
        "source": f"PyPI, {len(published.wheels)} wheels{' and the sdist' if published.sdist else ''}, by pip"
        f" download; touched files the same in all of them{tag}; licence text: {license_source}",
        "wheels": [{"filename": w.filename, "sha256": w.sha256} for w in published.wheels],
        **(
            {"sdist": {"filename": published.sdist.filename, "sha256": published.sdist.sha256}}
            if published.sdist
            else {}
        ),
    }
    releases["releases"] = dict(sorted(releases["releases"].items(), key=lambda item: order(item[0])))
    for path, node in files["files"].items():
        _draft_file(published, path, node)
    return new


def gather_preview(clone: Path, commit: str, manifest: Manifest) -> tuple[str, str, dict[str, bytes]]:
    """The name of a preview, its whole commit, and the touched files in it.

    Raises UsageError for a clone that lacks the commit, or a commit that does not say its version.
    """
    full = _git(clone, commit, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}").decode()
    full, info = full.strip(), "megatron/core/package_info.py"
    text = blobs(clone, full, [info]).get(info, b"").decode(errors="replace")
    parts = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    version = ".".join(part[1] for part in parts if part)
    if version.count(".") != 2:
        remedy = "take a commit of Megatron-LM's main"
        raise UsageError(f"commit {full}", f"a version in {info}", version or "none", remedy)
    return preview_name(version, full), full, blobs(clone, full, manifest.files)


def draft_preview(
    name: str, commit: str, contents: Mapping[str, bytes], releases: dict[str, Any], files: dict[str, Any]
) -> None:
    """Put a preview in the place of any other.

    Raises UsageError for one of a version that is pinned, or older.
    """
    version, newest = name.split(PREVIEW)[0], max(releases["releases"], key=order)
    if order(version) <= order(newest):
        raise UsageError("--preview", f"a commit past {newest}", version, f"pin megatron=={version}")
    _drop_previews(releases, files)
    source = f"upstream's main, commit {commit}"
    releases["previews"][name] = {"commit": commit, "source": source}
    for path, node in files["files"].items():
        _draft_file(Published(name, (), None, contents, source), path, node)


def _drop_previews(releases: dict[str, Any], files: dict[str, Any]) -> None:
    for name in releases["previews"]:
        for node in files["files"].values():
            for variant in node["variants"]:
                variant["releases"] = [r for r in variant["releases"] if r != name]
            node["variants"] = [v for v in node["variants"] if v["releases"]]
            absent = [r for r in node.pop("absent", []) if r != name]
            node.update({"absent": absent} if absent else {})
    releases["previews"] = {}


def _draft_license(published: Published, releases: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    version, nodes = published.version, releases["licenses"]
    if published.license is not None:
        source = f"that of the tag ({LICENSE})"
        known = next((n for n in nodes if n["sha256"] == sha256(published.license)), None)
    else:
        earlier = [v for v in releases["releases"] if order(v) < order(version)]
        if not earlier:
            remedy = "give --clone, with a clone that has the release's tag"
            raise UsageError(f"megatron-core {version}", "a source of its licence text", "none", remedy)
        source = f"that of {max(earlier, key=order)}, the release before, for want of a tag"
        known = next(n for n in nodes if max(earlier, key=order) in n["releases"])
    new = {}
    if known is None and published.license is not None:
        path = f"LICENSES/Megatron-LM-{version}.txt"
        known = {
            "path": path,
            "sha256": sha256(published.license),
            "releases": [],
            "source": "",
        }
        nodes.append(known)
        new[path] = published.license
    assert known is not None
    for node in nodes:
        node["releases"] = [r for r in node["releases"] if r != version]
    known["releases"] = sorted([*known["releases"], version], key=order)
    if known["releases"][0] == version and published.tag is not None:
        known["source"] = f"{LICENSE} at git tag {published.tag}"
    releases["licenses"] = _in_order([n for n in nodes if n["releases"]])
    return source, new


def _draft_file(published: Published, path: str, node: dict[str, Any]) -> None:
    version, variants = published.version, node["variants"]
    for variant in variants:
        variant["releases"] = [r for r in variant["releases"] if r != version]
    absent = [r for r in node.pop("absent", []) if r != version]
    data = published.files.get(path)
    if data is None:
        absent.append(version)
    else:
        known = next((v for v in variants if v["sha256"] == sha256(data)), None)
        if known is None:
            known = {"sha256": sha256(data), "releases": [], "source": ""}
            variants.append(known)
        known["releases"] = sorted([*known["releases"], version], key=order)
        if known["releases"][0] == version:
            known["source"] = _source(published)
        prints = fingerprints(data, node["entries"])
        known["entries"] = {name: prints.get(name) for name in node["entries"]}
    node["variants"] = _in_order([v for v in variants if v["releases"]])
    if absent:
        node["absent"] = sorted(absent, key=order)


def _in_order(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(nodes, key=lambda node: order(node["releases"][0]))


def _source(published: Published) -> str:
    if not published.wheels and published.tag is not None:
        return published.tag
    names = [w.filename for w in published.wheels]
    wheel = next((n for n in names if "-cp311-" in n and "x86_64" in n), names[0])
    tag = f" and git tag {published.tag}, same bytes" if published.tag else ""
    return f"wheel {wheel}{tag}"


def render(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


def fingerprints(source: bytes, entries: list[str] | tuple[str, ...]) -> dict[str, str]:
    """A fingerprint for each of ``entries`` that the module defines: what ``fingerprint`` gives for it."""
    found = {}
    for name in entries:
        node = definition(ast.parse(source), name)
        if node is not None:
            found[name] = fingerprint(node)
    return found


def definition(module: ast.Module, name: str) -> ast.stmt | None:
    """The statement that binds a name of a module last, or ``Class.method``; if and try blocks count too."""
    name, _, inner = name.partition(".")
    last = _last(module.body, name)
    if inner:
        return _last(last.body, inner) if isinstance(last, ast.ClassDef) else None
    return last


def _last(body: list[ast.stmt], name: str) -> ast.stmt | None:
    last = None
    for node in _statements(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound = {node.name}
        elif isinstance(node, ast.Assign):
            bound = {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bound = {node.target.id}
        else:
            continue
        last = node if name in bound else last
    return last


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def fingerprint(node: ast.AST) -> str:
    """The sha256 of a definition: decorators, signature and body, not comments, docstrings and layout.

    The text that is hashed is made here: ``ast.dump`` changes from one Python to the next.
    """
    return sha256(_text(node).encode())


def _text(value: Any) -> str:
    if isinstance(value, ast.Constant):
        return f"Constant({value.value!r})"
    if isinstance(value, ast.AST):
        parts = []
        for name, item in ast.iter_fields(value):
            if name == "body" and isinstance(value, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                item = item[1:] if ast.get_docstring(value, clean=False) is not None else item
            # Fields that some Python versions lack are empty in the others.
            if item is not None and item != [] and name not in ("ctx", "kind", "type_comment"):
                parts.append(f"{name}={_text(item)}")
        return f"{type(value).__name__}({', '.join(sorted(parts))})"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


def _agree(name: str, files: dict[str, bytes], contents: Mapping[str, bytes], *, first: bool = False) -> None:
    if first:
        files.update(contents)
    for path, data in contents.items():
        if files.get(path) != data:
            found = f"{sha256(data)[:12]}… in {name}" if path in files else f"only in {name}"
            raise SourceError(
                path, "the same bytes in every file of the release", found, "pin nothing of it by hand"
            )
    for path in files.keys() - contents.keys():
        raise SourceError(
            path, "the same bytes in every file of the release", f"not in {name}", "look into it"
        )


def _listing(version: str, folder: Path) -> tuple[list[str], tuple[str, ...], str | None]:
    """The files that pip's index lists for a release, all final releases that it has, why it was withdrawn.

    pip names every link that it looks at when it is told to be verbose; what it brings meanwhile counts.
    """
    said = _pip(version, folder, ["-vvv", "--only-binary=:all:"])
    listed = re.findall(r"\S*/(megatron_core-([^-/\s]+?)(?:-[^/\s#]+\.whl|\.tar\.gz))", said)
    names = sorted({name for name, found in listed if found == version})
    finals = {found for _, found in listed if re.fullmatch(r"\d+(\.\d+)*", found)}
    marker = "Reason for being yanked:"
    if marker not in said and names and not (folder / names[0]).is_file() and names[0].endswith(".whl"):
        said = _pip(version, folder, wheel_arguments(names[0]))
    yanked = said.split(marker, 1)[1].strip().splitlines()[0].strip() if marker in said else None
    return names, tuple(sorted(finals, key=order)), yanked


def _pip(version: str, folder: Path, arguments: list[str]) -> str:
    """Run pip download; returns what it said. A missing file is no error here."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--ignore-requires-python"]
    command += ["--disable-pip-version-check", *arguments, "--dest", str(folder), f"megatron-core=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, env=pip_environment())
    text = done.stdout + done.stderr
    if (
        done.returncode != 0
        and "No matching distribution" not in text
        and "Could not find a version" not in text
    ):
        last = [line for line in done.stderr.splitlines() if line.strip()] or ["no word"]
        raise SourceError(f"megatron-core {version}", "pip to download it", last[-1], "see pip's own message")
    return text


def _sdist_members(path: Path, wanted: Mapping[str, TouchedFile]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path) as archive:
        for info in archive:
            inner = info.name.split("/", 1)[-1]
            file = archive.extractfile(info) if inner in wanted and info.isfile() else None
            if file is not None:
                yield inner, file.read()


def blobs(clone: Path, commit: str, paths: Iterable[str]) -> dict[str, bytes]:
    """The files of ``paths`` that a commit has. Raises UsageError for a clone that lacks the commit."""
    said = _git(clone, commit, "ls-tree", "--name-only", "--full-tree", commit, "--", *paths).decode()
    return {path: _git(clone, commit, "show", f"{commit}:{path}") for path in said.splitlines()}


def _git(clone: Path, commit: str, *words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(clone), *words], env=git_environment(), capture_output=True)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no word"]
        raise UsageError("--clone", f"a clone that has commit {commit}", said[-1], "fetch the commit")
    return done.stdout


def _listed(clone: Path, tag: str, wanted: Mapping[str, TouchedFile]) -> list[str]:
    command = ["git", "-C", str(clone), "ls-tree", "--name-only", "--full-tree", tag, "--", *wanted]
    done = subprocess.run(command, env=git_environment(), capture_output=True, check=True, text=True)
    return done.stdout.splitlines()


def _show(clone: Path, tag: str, path: str) -> bytes:
    command = ["git", "-C", str(clone), "show", f"{tag}:{path}"]
    done = subprocess.run(command, env=git_environment(), capture_output=True)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no word"]
        raise UsageError(
            "--clone",
            f"a clone that has {path} at tag {tag}",
            said[-1],
            f"fetch the tag, or, if there is none, --untagged {tag.removeprefix('core_v')}",
        )
    return done.stdout


def _read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / "patches" / name).read_text(encoding="utf-8"))
    assert document["schema"] == SCHEMA
    return document


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts pin", description=__doc__)
    parser.add_argument("releases", metavar="megatron==VERSION", nargs="*")
    parser.add_argument(
        "--preview", type=types.text, metavar="COMMIT", help="or a commit of main in the clone, by its files"
    )
    parser.add_argument(
        "--clone", type=types.path, metavar="PATH", help="a Megatron-LM clone that has the releases' tags"
    )
    parser.add_argument(
        "--untagged",
        action="append",
        default=[],
        metavar="VERSION",
        help="a release without a tag: it gets the licence text of the release before",
    )
    parser.add_argument(
        "--write", action="store_true", help="put the pins into patches/ and LICENSES/ (default: print them)"
    )
    return parser
