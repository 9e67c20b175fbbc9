# SPDX-License-Identifier: Apache-2.0
"""Make the patched wheel: upstream's own, repacked with the overlay.

A pinned wheel is repacked from any machine: members that the overlay leaves alone keep their headers and
their compressed bytes, changed and new ones are stored, so the result has the same bytes wherever it is made.
``--tree`` first builds upstream's wheel from a copy of a checkout with the overlay taken out, and repacks it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scripts import arguments as types
from scripts import source
from scripts.apply import NOT_THERE, split_ops, stays
from scripts.errors import ExpectationError, SourceError, StateError, TreeError, UsageError, command, quoted
from scripts.files import locked, require_folder, working
from scripts.manifest import Manifest, PinnedFile, Release, load, span
from scripts.overlay import PACKAGE, ROOT, Overlay, load_overlay, sha256
from scripts.tree import Tree
from scripts.verify import OVERLAID, Plan, inspect, plan
from scripts.wheelpack import Wheel, read_licenses, read_wheel, repack

DIST = ROOT / "dist"

_EPOCH = 315532800  # 1980-01-01, the earliest time that a zip file can hold
# What running or building leaves in a checkout.
_LEFTOVERS = ("__pycache__", "*.pyc", "*.so", "*.pyd", "*.egg-info")


def main(argv: list[str]) -> int:
    """``wheel megatron==V``, or a wheel, or ``--tree PATH``, into dist/; raises OverlayError when refused."""
    arguments = _parser().parse_args(argv)
    choice = arguments.python or arguments.platform
    if arguments.all_platforms and choice:
        remedy = "leave --all-platforms or the other two away"
        raise UsageError("command line", "one choice", "--all-platforms with --python or --platform", remedy)
    if arguments.tree is not None and (arguments.all_platforms or choice):
        remedy = "leave them away: a checkout is built for the Python and the machine that run this"
        raise UsageError("command line", "--tree alone", "--tree with a Python or a platform", remedy)
    manifest = load()
    overlay = load_overlay(manifest=manifest)
    given = types.path(arguments.release) if types.is_wheel(arguments.release) else None
    if given is not None and (arguments.tree is not None or arguments.all_platforms or choice):
        remedy = "leave the wheel or the others away"
        found = "a wheel with --tree, --python, --platform or --all-platforms"
        raise UsageError("command line", "a wheel alone", found, remedy)
    release = manifest.release(arguments.release) if arguments.release and given is None else None
    if arguments.tree is None and release is None and given is None:
        remedy = f"{command('wheel', f'megatron=={manifest.newest()}')}, or wheel --tree PATH"
        raise UsageError("command line", "a release or a tree", "neither", remedy)

    require_folder(arguments.out)
    ops = split_ops(arguments.ops)
    made: list[Patched] = []
    if arguments.tree is not None:
        tree = Tree.locate(arguments.tree)
        built = build_from_tree(tree, manifest, overlay, ops, release)
        made.append(patch(built, manifest, overlay, ops, None, tree.read("LICENSE")))
    elif given is not None:
        release, pin = source.take(given, manifest)
        wheel = _read_pinned(source.fetch_file(release, pin), release.wheels)
        made.append(patch(wheel, manifest, overlay, ops, release))
    elif release is not None:
        for wheel in fetch(release, arguments.python, arguments.platform, every=arguments.all_platforms):
            made.append(patch(wheel, manifest, overlay, ops, release))
    for patched in made:
        _report(patched, _write(arguments.out, patched.wheel.filename, patched.data))
    for version in sorted({patched.wheel.version for patched in made}):
        print(_accepted(version))
    return 0


@dataclass(frozen=True)
class Patched:
    """A patched wheel: parsed, as bytes, the plan that it carries out, and upstream's wheel."""

    wheel: Wheel
    data: bytes
    plan: Plan
    upstream: Wheel


def fetch(release: Release, python: str | None, platform: str | None, *, every: bool) -> list[Wheel]:
    """The pinned wheel for a Python and a platform, or all of the release, each held against its hash.

    Raises SourceError, before a wheel is opened, when it is not the pinned one.
    """
    pins = release.wheels if every else (source.choose(release, python, platform),)
    return [_read_pinned(source.fetch_file(release, pin), release.wheels) for pin in pins]


def _read_pinned(path: Path, pins: Iterable[PinnedFile]) -> Wheel:
    data = path.read_bytes()
    expected = {pin.filename: pin.sha256 for pin in pins}[path.name]
    if sha256(data) != expected:
        remedy = f"rm {quoted(path)}, then repeat"
        raise SourceError(path.name, f"sha256 {expected}", f"sha256 {sha256(data)}", remedy)
    return read_wheel(data, path.name)


def patch(
    upstream: Wheel,
    manifest: Manifest,
    overlay: Overlay,
    ops: Iterable[str] | None,
    release: Release | None,
    license: bytes | None = None,
) -> Patched:
    """Lay the overlay over a wheel. Raises what ``plan`` and ``repack`` raise.

    ``license`` is upstream's text; None: the pinned one of the release, or of the newest that it is like.
    """
    planned = plan(upstream.files.get, manifest, overlay, ops, release)
    if license is None:
        version = (
            release.version
            if release
            else ([manifest.newest(), *(v for v in planned.files_as_in if v in manifest.releases)])[-1]
        )
        license = pinned_license(manifest, version)
    wheel, data = repack(upstream, planned.after(), read_licenses(license), overlay.version)
    return Patched(wheel, data, planned, upstream)


def pinned_license(manifest: Manifest, version: str, root: Path = ROOT) -> bytes:
    """Upstream's licence text of a release. Raises ExpectationError for a text that is not the pinned one."""
    pin = manifest.license(version)
    path = root / pin.path
    found = path.read_bytes() if path.is_file() else None
    if found is None or sha256(found) != pin.sha256:
        expected = f"sha256 {pin.sha256}"
        actual = "no file" if found is None else f"sha256 {sha256(found)}"
        raise ExpectationError(pin.path, expected, actual, "restore it from version control")
    return found


def build_from_tree(
    tree: Tree,
    manifest: Manifest,
    overlay: Overlay,
    ops: Iterable[str] | None,
    release: Release | None = None,
) -> Wheel:
    """Upstream's wheel of a checkout, built by pip from a copy from which the overlay was taken out.

    Raises TreeError or StateError for a tree that apply refuses or that is no source tree, SourceError when
    the build fails. The tree itself is only read.
    """
    if not any((tree.root / name).is_file() for name in ("pyproject.toml", "setup.py")):
        remedy = "give a Megatron-LM checkout, or make the wheel of a release (megatron==VERSION)"
        raise TreeError(tree.root, "pyproject.toml or setup.py beside megatron/", "neither", remedy)
    with tempfile.TemporaryDirectory(prefix="liger-overlay-") as folder:
        copy = Path(folder, "source")
        with tree.lock():  # an apply or revert in the midst of the copy would make a wheel of two states
            plan(tree.read, manifest, overlay, ops, release)
            state = inspect(tree.read, manifest, overlay)
            bases = {f.path: f.base for f in state.upstream if f.verdict == OVERLAID and f.base is not None}
            _copy_sources(tree.root, copy)
        for path, base in bases.items():
            (copy / path).write_bytes(base)
        for file in inspect(Tree(copy).read, manifest, overlay).upstream:
            if file.verdict == OVERLAID:  # where the file system has no locks
                remedy = "let whatever changes the tree finish, then repeat"
                raise StateError(file.path, "the file as it was", "another version of it", remedy)
        return _build(copy, Path(folder, "built"), tree.root)


def _copy_sources(root: Path, dest: Path) -> None:
    """Copy what a build reads, the files at the top and ``megatron/``; a checkout may hold much else."""

    def ignore(folder: str, names: list[str]) -> set[str]:
        ours = {PACKAGE.rsplit("/", 1)[1]} if Path(folder) == (root / PACKAGE).parent else set()
        here = Path(folder).resolve()
        # Links back to a folder around them, which a copy would follow for ever.
        loops = {n for n in names if (here / n).is_symlink() and here.is_relative_to((here / n).resolve())}
        return shutil.ignore_patterns(*_LEFTOVERS)(folder, names) | ours | loops

    dest.mkdir()
    for item in root.iterdir():
        if item.is_file():
            shutil.copyfile(item, dest / item.name)
    shutil.copytree(root / "megatron", dest / "megatron", ignore=ignore)
    for item in dest.rglob("*"):  # a build copies modes into the wheel, and a checkout has them from a umask
        item.chmod(0o755 if item.is_dir() or item.stat().st_mode & 0o100 else 0o644)


def _build(copy: Path, out: Path, shown: Path) -> Wheel:
    python = os.path.dirname(sys.executable)
    environment = {
        **os.environ,
        "NO_VCS_VERSION": "1",  # else upstream puts the hash of any git tree around it into the version
        "SOURCE_DATE_EPOCH": str(_EPOCH),
        "PATH": os.pathsep.join([python, os.environ.get("PATH", os.defpath)]),  # setup.py calls python3
    }
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "--no-input"]
    pip += ["--disable-pip-version-check", "--wheel-dir", str(out), str(copy)]
    done = subprocess.run(
        pip,
        env=environment,
        umask=0o022,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    found = sorted(out.glob("*.whl"))
    if done.returncode or len(found) != 1:
        sys.stdout.flush()
        print(done.stdout, file=sys.stderr)
        check = shlex.join(["pip", "wheel", "--no-deps", str(shown)])
        remedy = source.pip_remedy(done.stdout, copy) or f"see that {check} works, then repeat"
        found_text = f"exit code {done.returncode} and {len(found)} wheels; pip's words are above"
        raise SourceError(shown, "one wheel, built by pip", found_text, remedy)
    wheel = read_wheel(found[0].read_bytes(), found[0].name)
    pure = b"root-is-purelib: true" in wheel.files[f"{wheel.dist_info}/WHEEL"].lower()
    if not pure and not any(name.endswith((".so", ".pyd")) for name in wheel.files):
        # Upstream declares its extension optional: without a compiler the build succeeds without it.
        remedy = "install a C++ compiler (g++) and Python's headers, then repeat"
        raise SourceError(shown, "a wheel with its compiled extension", "a wheel without one", remedy)
    return wheel


def _write(folder: Path, name: str, data: bytes) -> Path:
    """Put a file into ``folder`` by a rename, so that it is there whole or not at all."""
    target = folder / name
    with working(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder) as alone:
            # Of runs that were killed: the lock keeps live ones out.
            for stale in folder.glob(".megatron_core-*.whl.*.tmp") if alone else ():
                stale.unlink()
            temporary = folder / f".{name}.{os.getpid()}.tmp"
            try:
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
    return target


def _report(patched: Patched, path: Path) -> None:
    shown = os.path.relpath(path)
    planned = patched.plan
    kinds = [action.kind for action in planned.actions]
    what = f"files as in {span(planned.files_as_in)}; that does not make it the release"
    if planned.release is not None:
        what = f"release {planned.release.version}"
    print(shown)
    print(f"  {len(patched.data)} bytes, sha256 {sha256(patched.data)}")
    print(f"  from {patched.upstream.filename}, {what}")
    added = kinds.count("add") + 1
    changed = f"{kinds.count('extend')} extended, {kinds.count('patch')} patched"
    print(f"  ops {', '.join(planned.ops)}: {changed}, {added} added with the record")
    for file in planned.left:
        print(f"  left: {file.path} {stays(file)}")
    for op in planned.missing:
        print(f"  none: {op}, {NOT_THERE}")
    for name in patched.upstream.signatures:
        print(f"  left out: {name}, which signs upstream's RECORD")
    print(f"  pip install --no-deps --force-reinstall {shlex.quote(shown)}")


def _accepted(version: str) -> str:
    public = version.partition("+")[0]
    return (
        f"{version} is accepted where =={public}, ~={public} or <={public} is asked for;"
        f" not for ==={public}, !={public} or >{public}.\n"
        f"megatron.core.__version__ stays what upstream's sources say."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts wheel", description=__doc__)
    parser.add_argument(
        "release", nargs="?", metavar="megatron==VERSION", help="a pinned release, or the path of its wheel"
    )
    parser.add_argument(
        "--tree", type=types.path, metavar="PATH", help="build from this checkout (needs a compiler)"
    )
    parser.add_argument("--ops", metavar="A,B", help="only these ops (default: all)")
    parser.add_argument(
        "--python", type=types.text, metavar="3.12", help="the wheel for this Python (default: this one)"
    )
    parser.add_argument(
        "--platform", type=types.text, metavar="TAG", help="the wheel for this platform tag or machine"
    )
    parser.add_argument("--all-platforms", action="store_true", help="every wheel that the release has")
    parser.add_argument(
        "--out", type=types.path, default=DIST, metavar="PATH", help="where to (default: dist/)"
    )
    return parser
