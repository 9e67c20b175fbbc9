# SPDX-License-Identifier: Apache-2.0
"""Get a pinned release: upstream's wheel, brought by pip and held against its pin before it is opened."""

from __future__ import annotations

import hashlib
import os
import platform as machines
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from scripts.errors import SourceError, UsageError
from scripts.manifest import PinnedFile, Release
from scripts.overlay import ROOT

CACHE = ROOT / "build" / "cache"
_WHEEL = re.compile(r"[^-]+-[^-]+-cp(?P<major>\d)(?P<minor>\d+)-(?P<abi>[^-]+)-(?P<platforms>[^-]+)\.whl")
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def choose(release: Release, python: str | None = None, platform: str | None = None) -> PinnedFile:
    """The wheel of a release for a Python (``3.12``) and a platform tag or machine; None: the running ones.

    Raises UsageError for a malformed ``python``, SourceError when upstream has no such wheel.
    """
    version = python or f"{sys.version_info[0]}.{sys.version_info[1]}"
    if not re.fullmatch(r"3\.\d+", version):
        raise UsageError("--python", "a version such as 3.12", version, "write --python 3.12")
    machine = machines.machine().lower()
    wanted = platform or _MACHINES.get(machine, machine)
    offers = []
    for wheel in release.wheels:
        match = _WHEEL.fullmatch(wheel.filename)
        if match is None:
            continue
        tags = match["platforms"].split(".")
        if f"{match['major']}.{match['minor']}" == version and any(
            t == wanted or (t.startswith("manylinux") and t.endswith(f"_{wanted}")) for t in tags
        ):
            return wheel
        offers.append(f"{match['major']}.{match['minor']} {tags[-1]}")
    raise SourceError(
        f"megatron-core {release.version}",
        f"a wheel for Python {version} on {wanted}",
        f"wheels for {', '.join(offers)}",
        "choose one of them with --python and --platform",
    )


def fetch(
    release: Release, python: str | None = None, platform: str | None = None, cache: Path = CACHE
) -> Path:
    """The path of the pinned wheel in ``cache``, downloaded with pip unless a file with its hash is there.

    Raises SourceError when pip fails or brings other bytes than the pinned ones.
    """
    wheel = choose(release, python, platform)
    target = cache / wheel.filename
    if target.is_file() and digest(target) == wheel.sha256:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
        found = download(release.version, wheel.filename, Path(folder))
        if digest(found) != wheel.sha256:
            raise SourceError(
                wheel.filename,
                f"sha256 {wheel.sha256}",
                f"sha256 {digest(found)}",
                "do not use this file; find out which index or folder pip has it from (pip config list)",
            )
        os.replace(found, target)
    return target


def download(version: str, filename: str, folder: Path) -> Path:
    """Let pip bring one wheel of megatron-core into ``folder``. Raises SourceError with pip's last line."""
    match = _WHEEL.fullmatch(filename)
    if match is None:
        raise SourceError(filename, "the file name of a CPython wheel", filename, "correct the pin")
    arguments = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--implementation", "cp"]
    arguments += ["--python-version", f"{match['major']}.{match['minor']}", "--abi", match["abi"]]
    for tag in match["platforms"].split("."):
        arguments += ["--platform", tag]
    return pip_download(f"megatron-core=={version}", folder, arguments, filename)


def pip_download(requirement: str, folder: Path, arguments: list[str], filename: str) -> Path:
    """Run ``pip download``; raises SourceError unless ``filename`` is in ``folder`` afterwards."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += [*arguments, "--dest", str(folder), requirement]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=pip_environment()
    )
    target = folder / filename
    if done.returncode == 0 and target.is_file():
        return target
    said = [text for text in done.stderr.splitlines() if text.strip() and "WARNING" not in text]
    brought = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
    if "No module named pip" in done.stderr:
        remedy = "run with a Python that has pip (python -m ensurepip)"
    else:
        remedy = f"check pip's access to PyPI, or put {filename} into a folder and set PIP_FIND_LINKS to it"
    raise SourceError(filename, "pip to download it", said[-1].strip() if said else brought, remedy)


def pip_environment() -> dict[str, str]:
    """The environment without settings that make pip ignore what it was asked for."""
    return {
        k: v for k, v in os.environ.items() if k not in ("PIP_REQUIRE_HASHES", "PIP_NO_BINARY", "PIP_PRE")
    }


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
    """Unpack a wheel into ``dest`` (made if missing), files 0644 or 0755 whatever the umask."""
    for path, mode, data in members(wheel):
        target = dest.joinpath(*path.split("/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)
