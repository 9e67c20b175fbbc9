# SPDX-License-Identifier: Apache-2.0
"""Draft the pins of a release: hashes of every wheel and the sdist, of the touched files, and of their
entries.

pip brings the files from PyPI; the touched files must be the same in all of them, and in the release's git
tag when a clone is given, so that no hash rests on one server alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts import arguments as types
from scripts.errors import SourceError, UsageError
from scripts.manifest import SCHEMA, Manifest, PinnedFile, TouchedFile, load, parse_spec
from scripts.overlay import ROOT, git_environment, sha256
from scripts.source import digest, members, pip_environment

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
_GLIBCS = (17, 24, 27, 28, 31, 34, 35, 39)


@dataclass(frozen=True)
class Published:
    """What was found of a release: its files, the touched files' bytes, why it was withdrawn (if it was)."""

    version: str
    wheels: tuple[PinnedFile, ...]
    sdist: PinnedFile | None
    files: Mapping[str, bytes]
    tag: str | None = None
    yanked: str | None = None
    absent: tuple[str, ...] = field(default=())


def main(argv: list[str]) -> int:
    """``pin megatron==V [--clone PATH] [--write]``; raises SourceError when a release's files disagree."""
    parser = argparse.ArgumentParser(prog="nox -s pin --", description=__doc__)
    parser.add_argument("release", metavar="megatron==VERSION")
    parser.add_argument(
        "--clone", type=types.path, metavar="PATH", help="a Megatron-LM clone that has the release's tag"
    )
    parser.add_argument(
        "--write", action="store_true", help="put the pins into patches/ (default: print them)"
    )
    arguments = parser.parse_args(argv)
    version = parse_spec(arguments.release)
    manifest = load()
    with tempfile.TemporaryDirectory(prefix="pins-") as folder:
        published = gather(version, manifest, Path(folder), arguments.clone)
    releases = _read("releases.json")
    files = _read("files.json")
    draft(published, releases, files)
    if arguments.write:
        for name, document in (("releases.json", releases), ("files.json", files)):
            (ROOT / "patches" / name).write_text(render(document), encoding="utf-8")
    else:
        node = releases["releases"].get(version)
        print(
            render({"releases": {version: node}} if node else {"yanked": {version: published.yanked}}), end=""
        )
        print(render({"files": files["files"]}), end="")
    for path in published.absent:
        print(f"note: {path} is not in {version}", file=sys.stderr)
    return 0


def gather(version: str, manifest: Manifest, folder: Path, clone: Path | None = None) -> Published:
    """Download all files of a release into ``folder`` and compare the touched files in them.

    Raises SourceError when there is no wheel, when two of the files have other bytes for a touched file, or
    when the git tag has.
    """
    wheels, yanked = _wheels(version, folder)
    if not wheels:
        remedy = "check the version and pip's access to PyPI"
        raise SourceError(f"megatron-core {version}", "wheels on PyPI", "none", remedy)
    sdist = _sdist(version, folder)
    files: dict[str, bytes] = {}
    for wheel in wheels:
        contents = {path: data for path, _, data in members(wheel) if path in manifest.files}
        _agree(wheel.name, files, contents)
    if sdist is not None:
        _agree(sdist.name, files, dict(_sdist_members(sdist, manifest.files)))
    tag = f"core_v{version}" if clone is not None else None
    if clone is not None and tag is not None:
        _agree(f"tag {tag}", files, {path: _show(clone, tag, path) for path in files})
    return Published(
        version,
        tuple(PinnedFile(path.name, digest(path)) for path in wheels),
        PinnedFile(sdist.name, digest(sdist)) if sdist else None,
        files,
        tag,
        yanked,
        tuple(path for path in manifest.files if path not in files),
    )


def draft(published: Published, releases: dict[str, Any], files: dict[str, Any]) -> None:
    """Add what was found to the two documents of ``patches/``; a withdrawn release is listed as such only."""
    version = published.version
    if published.yanked is not None:
        releases.setdefault("yanked", {})[version] = published.yanked
        return
    source = (
        f"PyPI, {len(published.wheels)} wheels{' and the sdist' if published.sdist else ''}, by pip download"
    )
    releases["releases"][version] = {
        "source": f"{source}; touched files compared with git tag {published.tag}"
        if published.tag
        else source,
        "wheels": [{"filename": w.filename, "sha256": w.sha256} for w in published.wheels],
        **(
            {"sdist": {"filename": published.sdist.filename, "sha256": published.sdist.sha256}}
            if published.sdist
            else {}
        ),
    }
    for path, data in published.files.items():
        variants = files["files"][path]["variants"]
        prints = fingerprints(data, files["files"][path]["entries"])
        known = next((v for v in variants if v["sha256"] == sha256(data)), None)
        if known is None:
            known = {"sha256": sha256(data), "releases": [], "source": _source(published), "entries": {}}
            variants.append(known)
        for variant in variants:
            variant["releases"] = [r for r in variant["releases"] if r != version]
        known["releases"].append(version)
        known["entries"] = prints
        if known["releases"] == [version]:
            known["source"] = _source(published)
    for node in files["files"].values():
        node["variants"] = [v for v in node["variants"] if v["releases"]]


def _source(published: Published) -> str:
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
    """The statement that binds a public name of a module last; looked for in if and try blocks too."""
    last = None
    for node in _statements(module.body):
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


def _agree(name: str, files: dict[str, bytes], contents: Mapping[str, bytes]) -> None:
    first = not files
    for path, data in contents.items():
        if first:
            files[path] = data
        elif files.get(path) != data:
            found = f"{sha256(data)[:12]}… in {name}" if path in files else f"only in {name}"
            raise SourceError(
                path, "the same bytes in every file of the release", found, "pin nothing of it by hand"
            )
    for path in files.keys() - contents.keys():
        raise SourceError(
            path, "the same bytes in every file of the release", f"not in {name}", "look into it"
        )


def _wheels(version: str, folder: Path) -> tuple[list[Path], str | None]:
    yanked = None
    for python in PYTHONS:
        for machine in MACHINES:
            arguments = ["--only-binary=:all:", "--ignore-requires-python", "--implementation", "cp"]
            arguments += ["--python-version", python, "--abi", f"cp{python.replace('.', '')}"]
            for glibc in _GLIBCS:
                arguments += ["--platform", f"manylinux_2_{glibc}_{machine}"]
            said = _pip(version, folder, arguments)
            yanked = yanked or said
    return sorted(folder.glob("*.whl")), yanked


def _sdist(version: str, folder: Path) -> Path | None:
    _pip(version, folder, ["--no-binary=megatron-core", "--ignore-requires-python"])
    return next(iter(sorted(folder.glob("*.tar.gz"))), None)


def _pip(version: str, folder: Path, arguments: list[str]) -> str | None:
    """Run pip download; returns why the release was withdrawn, if pip says so. A missing file is no error
    here.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        *arguments,
    ]
    command += ["--dest", str(folder), f"megatron-core=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, env=pip_environment())
    text = done.stdout + done.stderr
    if (
        done.returncode != 0
        and "No matching distribution" not in text
        and "Could not find a version" not in text
    ):
        last = [line for line in done.stderr.splitlines() if line.strip()] or ["no word"]
        raise SourceError(f"megatron-core {version}", "pip to download it", last[-1], "see pip's own message")
    marker = "Reason for being yanked:"
    if marker in text:
        return text.split(marker, 1)[1].strip().splitlines()[0].strip()
    return None


def _sdist_members(path: Path, wanted: Mapping[str, TouchedFile]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path) as archive:
        for info in archive:
            inner = info.name.split("/", 1)[-1]
            file = archive.extractfile(info) if inner in wanted and info.isfile() else None
            if file is not None:
                yield inner, file.read()


def _show(clone: Path, tag: str, path: str) -> bytes:
    command = ["git", "-C", str(clone), "show", f"{tag}:{path}"]
    done = subprocess.run(command, env=git_environment(), capture_output=True)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no word"]
        raise UsageError(
            "--clone", f"a clone that has {path} at tag {tag}", said[-1], "fetch the tag, or leave it away"
        )
    return done.stdout


def _read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / "patches" / name).read_text(encoding="utf-8"))
    assert document["schema"] == SCHEMA
    return document
