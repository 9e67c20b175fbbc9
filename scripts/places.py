# SPDX-License-Identifier: Apache-2.0
"""Where else than in a folder that is named an overlay can be: a wheel file, and what a Python imports."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from scripts.errors import SourceError, StateError, TreeError
from scripts.manifest import Manifest
from scripts.overlay import sha256
from scripts.source import require_plain
from scripts.tree import INIT, Tree
from scripts.wheelpack import Wheel, read_wheel


class Packed(Tree):
    """A wheel as a tree to judge: it is read where it lies, and cannot be written."""

    def __init__(self, path: Path, wheel: Wheel) -> None:
        super().__init__(path)
        self.wheel = wheel

    @classmethod
    def open(cls, path: Path) -> Packed:
        """The wheel at ``path``. Raises SourceError for a file that is none, or that does not agree with its
        own RECORD; TreeError for one without Megatron-Core.
        """
        require_plain(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            found = error.strerror or type(error).__name__
            raise SourceError(path, "a wheel", found, "give the path of a wheel file") from None
        wheel = read_wheel(data, path.name)
        if INIT not in wheel.files:
            raise TreeError(path, f"a wheel that has {INIT}", "no such file in it", "give megatron-core's")
        return cls(path, wheel)

    def origin(self, manifest: Manifest) -> str:
        """Whether this is a file that upstream published."""
        found = sha256(self.root.read_bytes())
        for version, release in manifest.releases.items():
            if any(pin.sha256 == found for pin in release.wheels):
                return f"upstream's wheel of {version}, as pinned"
        return f"sha256 {found}, which no wheel of upstream's that is pinned has"

    def read(self, path: str) -> bytes | None:
        return self.wheel.files.get(path)

    def in_the_way(self, paths: Iterable[str]) -> StateError | None:
        return None

    def leftovers(self, paths: Iterable[str], folder: str) -> list[str]:
        return []

    def installed_record(self) -> str | None:
        return self.wheel.record


# Finders are asked, and nothing is imported: megatron is a namespace package, whose first folder with a core
# wins. The interpreter puts its own folder first, which is no part of the environment.
_FINDER = """
import importlib.util, json, os, sys
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
parent, found = importlib.util.find_spec("megatron"), []
if parent is not None and parent.submodule_search_locations is not None:
    folders = list(parent.submodule_search_locations)
    for finder in sys.meta_path:
        spec = getattr(finder, "find_spec", lambda *_: None)("megatron.core", folders)
        if spec is not None and spec.origin:
            found.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(spec.origin)))))
            break
    roots = (os.path.dirname(os.path.realpath(folder)) for folder in folders)
    found += [r for r in roots if os.path.isfile(os.path.join(r, "megatron", "core", "__init__.py"))]
print({answer!r} + json.dumps(found))
"""
_ANSWER = "liger overlay: "


def imported(environment: Path) -> tuple[Tree, list[str]]:
    """The tree from which a Python imports ``megatron.core``, and others on its path that are hidden by it.

    ``environment`` is a Python executable or the folder of a virtual environment. Raises TreeError when there
    is no such Python, or no Megatron-Core for it.
    """
    python = environment / "bin" / "python" if environment.is_dir() else environment
    expected = "a Python, or the folder of its environment"
    try:
        command = [str(python), "-W", "ignore", "-c", _FINDER.replace("{answer!r}", repr(_ANSWER))]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        found = getattr(error, "strerror", None) or type(error).__name__
        raise TreeError(python, expected, found, "give the Python that runs the job") from None
    if done.returncode:
        found = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise TreeError(python, expected, found, "give the Python that runs the job")
    try:  # a line of its own among what an environment's start and end may print
        (answer,) = (line for line in done.stdout.splitlines() if line.startswith(_ANSWER))
        roots = list(dict.fromkeys(json.loads(answer.removeprefix(_ANSWER))))
    except ValueError:
        remedy = "give the Python that runs the job"
        raise TreeError(python, expected, "a program that is no Python", remedy) from None
    if not roots:
        remedy = "install megatron-core there, or set PYTHONPATH as for the job"
        raise TreeError(python, "a Python that finds megatron.core", "one that finds none", remedy)
    return Tree.locate(Path(roots[0])), roots[1:]
