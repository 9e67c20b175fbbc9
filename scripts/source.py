# SPDX-License-Identifier: Apache-2.0
"""Get a pinned release: upstream's wheel, brought by pip and held against its pin before it is opened."""

from __future__ import annotations

import hashlib
import os
import platform as machines
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from scripts.errors import SourceError, UsageError, quoted
from scripts.files import locked, move_away, require_folder, working
from scripts.manifest import Manifest, PinnedFile, Release
from scripts.overlay import ROOT

CACHE = ROOT / "build" / "cache"
_WHEEL = re.compile(r"[^-]+-[^-]+-cp(?P<major>\d)(?P<minor>\d+)-(?P<abi>[^-]+)-(?P<platforms>[^-]+)\.whl")
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def choose(
    release: Release, python: str | None = None, platform: str | None = None, *, nearest: bool = False
) -> PinnedFile:
    """The wheel of a release for a Python (``3.12``) and a platform tag or machine; None: the running ones.

    Where upstream has none for that Python, ``nearest`` takes the one for the newest: its sources are the
    same, only its compiled helper cannot be imported. Raises UsageError for a malformed ``python``,
    SourceError when upstream has no such wheel.
    """
    version = python or f"{sys.version_info[0]}.{sys.version_info[1]}"
    if not re.fullmatch(r"3\.\d+", version):
        raise UsageError("--python", "a version such as 3.12", version, "write --python 3.12")
    machine = machines.machine().lower()
    wanted = platform or _MACHINES.get(machine, machine)
    offers = []
    others: dict[int, PinnedFile] = {}
    for wheel in release.wheels:
        match = _WHEEL.fullmatch(wheel.filename)
        if match is None:
            continue
        tags = match["platforms"].split(".")
        if any(t == wanted or (t.startswith("manylinux") and t.endswith(f"_{wanted}")) for t in tags):
            if f"{match['major']}.{match['minor']}" == version:
                return wheel
            others[int(match["minor"])] = wheel
        offers.append(f"{match['major']}.{match['minor']} {tags[-1]}")
    if nearest and others:
        return others[max(others)]
    raise SourceError(
        f"megatron-core {release.version}",
        f"a wheel for Python {version} on {wanted}",
        f"wheels for {', '.join(offers)}",
        "choose one of them with --python and --platform",
    )


def fetch(
    release: Release, python: str | None = None, platform: str | None = None, cache: Path = CACHE
) -> Path:
    """The pinned wheel for a Python and a platform (see ``choose``), as ``fetch_file`` has it."""
    return fetch_file(release, choose(release, python, platform), cache)


def fetch_file(release: Release, wheel: PinnedFile, cache: Path = CACHE) -> Path:
    """The path of a pinned wheel in ``cache``, downloaded with pip unless a file with its hash is there.

    Raises SourceError when pip fails or brings other bytes than the pinned ones, TreeError when the cache
    cannot be written.
    """
    target = cache / wheel.filename
    with working(cache):
        if target.is_file() and digest(target) == wheel.sha256:
            return target
        require_folder(cache)
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache) as alone:
            if target.is_file() and digest(target) == wheel.sha256:
                return target  # another run has brought it in the meantime
            _sweep(cache, alone)
            if target.is_dir():
                raise SourceError(target, "a wheel, or nothing", "a folder", move_away(target))
            with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
                found = download(release.version, wheel.filename, Path(folder))
                if digest(found) != wheel.sha256:
                    remedy = "do not use this file; see where pip has it from (pip config list)"
                    raise SourceError(
                        wheel.filename, f"sha256 {wheel.sha256}", f"sha256 {digest(found)}", remedy
                    )
                os.replace(found, target)
    return target


def take(wheel: Path, manifest: Manifest, cache: Path | None = None) -> tuple[Release, PinnedFile]:
    """Put a wheel that somebody has into ``cache``, where ``fetch_file`` finds it; its release and its pin.

    Its bytes decide, not its name. Raises SourceError, before the file is opened as a wheel, for one that is
    not pinned or cannot be read, TreeError when the cache cannot be written.
    """
    cache = CACHE if cache is None else cache
    require_plain(wheel)
    try:
        found = digest(wheel)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SourceError(wheel, "a wheel of upstream's", reason, "give the path of a file") from None
    known = ((r, pin) for r in manifest.releases.values() for pin in r.wheels if pin.sha256 == found)
    release, pin = next(known, (None, None))
    if release is None or pin is None:
        remedy = "give upstream's own file of a pinned release, or megatron==VERSION to have it downloaded"
        raise SourceError(wheel, "a wheel whose sha256 is pinned", f"sha256 {found}", remedy)
    with working(cache):
        require_folder(cache)
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache) as alone:
            _sweep(cache, alone)
            with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
                copy = Path(shutil.copyfile(wheel, Path(folder, pin.filename)))
                if digest(copy) != pin.sha256:
                    remedy = "repeat, and leave the file alone meanwhile"
                    found = "bytes that changed while it was read"
                    raise SourceError(wheel, f"sha256 {pin.sha256}", found, remedy)
                os.replace(copy, cache / pin.filename)
    return release, pin


def require_plain(path: Path) -> None:
    """Raise SourceError for what never ends or never begins: a device, a pipe."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise SourceError(path, "a plain file", "a device, a pipe or a socket", "give the path of a file")


def _sweep(cache: Path, alone: bool) -> None:
    """Take away what killed runs left: the lock keeps live ones out."""
    for stale in cache.glob("download-????????") if alone else ():
        shutil.rmtree(stale, ignore_errors=True)


def download(version: str, filename: str, folder: Path) -> Path:
    """Let pip bring one wheel of megatron-core into ``folder``. Raises SourceError with pip's last line."""
    arguments = ["--no-deps", "--ignore-requires-python", *wheel_arguments(filename)]
    return pip_download(f"megatron-core=={version}", folder, arguments, filename)


def wheel_arguments(filename: str) -> list[str]:
    """The arguments with which ``pip download`` takes the wheel of that name, whatever Python runs it.

    Raises SourceError for a name that no CPython wheel has.
    """
    match = _WHEEL.fullmatch(filename)
    if match is None:
        raise SourceError(filename, "the file name of a CPython wheel", filename, "correct the pin")
    arguments = ["--only-binary=:all:", "--implementation", "cp", "--abi", match["abi"]]
    arguments += ["--python-version", f"{match['major']}.{match['minor']}"]
    for tag in match["platforms"].split("."):
        arguments += ["--platform", tag]
    return arguments


def pip_download(requirement: str, folder: Path, arguments: list[str], filename: str) -> Path:
    """Run ``pip download``, again where the network was at fault.

    Raises SourceError, which says where pip looked, unless ``filename`` is in ``folder`` afterwards.
    """
    pip = [sys.executable, "-m", "pip", "download", "--progress-bar", "off", "--disable-pip-version-check"]
    pip += [*arguments, "--dest", str(folder), requirement]
    target = folder / filename
    for attempt in range(1, len(_PAUSES_S) + 2):
        done = subprocess.run(
            pip,
            capture_output=True,
            text=True,
            errors="replace",
            env=pip_environment(),
        )
        if done.returncode == 0 and target.is_file():
            return target
        said = [text for text in done.stderr.splitlines() if text.strip() and "WARNING" not in text]
        brought = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        found = said[-1].strip() if said else brought
        if attempt > len(_PAUSES_S) or not _TRANSIENT.search(done.stderr):
            break
        pause = _PAUSES_S[attempt - 1]
        print(f"{filename}: {found}; trying again in {pause} s", file=sys.stderr, flush=True)
        time.sleep(pause)
    found += f"; looked in {_looked(done.stdout)}" + (f", {attempt} times" if attempt > 1 else "")
    remedy = pip_remedy(done.stderr, folder) or (
        f"check pip's access to PyPI, or put {filename} into a folder and set PIP_FIND_LINKS to it"
    )
    raise SourceError(filename, "pip to download it", found, remedy)


# Between the attempts, on top of pip's own: a registry or a proxy that restarts.
_PAUSES_S = (5, 20)
_TRANSIENT = re.compile(
    r"connection (broken|aborted|reset|refused|error)|connectionerror|timed? ?out|temporary failure|"
    r"incompleteread|remote end closed|HTTP error (429|5\d\d)|too many 5\d\d|Max retries exceeded",
    re.IGNORECASE,
)


def _looked(said: str) -> str:
    """Where pip says that it looked, passwords starred; it names PyPI, its default, only beside others."""
    places = [text.partition(": ")[2] for text in said.splitlines() if text.startswith("Looking in ")]
    if not any(text.startswith("Looking in indexes") for text in said.splitlines()):
        places.append("PyPI, if pip's no-index is not set")
    return ", ".join(places)


def pip_remedy(said: str, folder: Path) -> str | None:
    """What to do about pip's words, where they tell; ``folder`` is where it wrote to."""
    text = said.lower()
    if "no module named pip" in text:
        return "run with a Python that has pip (python -m ensurepip)"
    if "no space left" in text or "disk quota" in text:
        return (
            f"free some space in {quoted(folder.parent)} and in {quoted(tempfile.gettempdir())}, then retry"
        )
    settings = {
        "could not find an activated virtualenv": "require-virtualenv",
        "externally-managed-environment": "break-system-packages",
        "require-hashes": "require-hashes",
        "constraint": "constraint",
    }
    for words, setting in settings.items():
        if words in text:
            name = f"PIP_{setting.replace('-', '_').upper()}"
            return f"unset {name}, or {setting} in pip's configuration (pip config list), then retry"
    return None


# A wheel that is asked for by name and held against its hash gains nothing from these, and a container's or
# a site's defaults make pip refuse it. A value wins over pip's configuration files; a missing one does not.
_PIP_SETTINGS = {
    "PIP_CONSTRAINT": os.devnull,
    "PIP_REQUIRE_HASHES": "0",
    "PIP_REQUIRE_VIRTUALENV": "0",
    "PIP_PRE": "0",
}


def pip_environment() -> dict[str, str]:
    """The environment with those of pip's settings off that would keep it from what it is asked for."""
    dropped = (
        "PIP_NO_BINARY",
        "PIP_ONLY_BINARY",
        "PIP_PLATFORM",
        "PIP_ABI",
        "PIP_REQUIREMENT",
        "PIP_EDITABLE",
    )
    return {**{k: v for k, v in os.environ.items() if k not in dropped}, **_PIP_SETTINGS}


def digest(path: Path) -> str:
    """The sha256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def members(wheel: Path) -> Iterator[tuple[str, int, bytes]]:
    """Path, permission bits and content of each file in a wheel. Raises SourceError for one not fit to
    unpack.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                parts = info.filename.split("/")
                if info.filename.startswith("/") or ".." in parts or "\\" in info.filename:
                    raise SourceError(
                        wheel.name, "paths inside the wheel", info.filename, "do not use this file"
                    )
                if not info.is_dir():
                    executable = (info.external_attr >> 16) & 0o111
                    yield info.filename, 0o755 if executable else 0o644, archive.read(info)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise SourceError(wheel.name, "a wheel", str(error), "delete the file, then retry") from None


def unpack(wheel: Path, dest: Path) -> None:
    """Unpack a wheel into ``dest`` (made if missing): files 0644 or 0755, folders 0755, at any umask."""
    write_files(dest, members(wheel))


def write_files(dest: Path, files: Iterable[tuple[str, int, bytes]]) -> None:
    """Write files (path, permission bits, content) below ``dest``; folders that are new get 0755."""
    _make_folder(dest)
    for path, mode, data in files:
        target = dest.joinpath(*path.split("/"))
        _make_folder(target.parent)
        target.write_bytes(data)
        target.chmod(mode)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir()
        # The bits above permissions (a group's folder hands them down) stay.
        folder.chmod(folder.stat().st_mode & 0o7000 | 0o755)
