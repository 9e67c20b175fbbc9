# SPDX-License-Identifier: Apache-2.0
"""Thin sessions over ``python -m scripts``: the logic, and the help of each command, live there.

A machine without nox runs the same commands as ``python -m scripts COMMAND …``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
ENVIRONMENT = ROOT / ".nox" / "environment" / "bin" / "python"


def _scripts(session: nox.Session, python: str | Path) -> None:
    """Run the command of the session's name, in the caller's folder. nox ends with the command's exit code,
    which it would make 1 if it ran the command itself."""
    command = [str(python), str(ROOT / "scripts"), session.name, *session.posargs]
    code = subprocess.run(command, cwd=session.invoked_from).returncode
    if code:
        raise SystemExit(code)


def _pipeline(session: nox.Session) -> None:
    """A pipeline step needs no more than nox does: no environment of its own."""
    _scripts(session, sys.executable)


def _with_torch(session: nox.Session) -> None:
    _scripts(session, ENVIRONMENT)


@nox.session(default=False)
def environment(session: nox.Session) -> None:
    """The environment with torch, Triton and the checkers that parity, train, bench, tests and lint share."""
    groups = nox.project.load_toml("pyproject.toml")
    session.install(*nox.project.dependency_groups(groups, "test", "bench", "lint"))


@nox.session(python=False, default=False)
def apply(session: nox.Session) -> None:
    """Fetch, verify and overlay a release into build/, or overlay a tree in place (--tree PATH)."""
    _pipeline(session)


@nox.session(python=False, default=False)
def wheel(session: nox.Session) -> None:
    """Repack upstream's wheel with the overlay into dist/."""
    _pipeline(session)


@nox.session(python=False, default=False)
def status(session: nox.Session) -> None:
    """Say of each touched file of --tree whether it is pristine, overlaid or changed by hand."""
    _pipeline(session)


@nox.session(python=False, default=False)
def revert(session: nox.Session) -> None:
    """Take the overlay out of --tree, byte for byte."""
    _pipeline(session)


@nox.session(python=False, default=False)
def diff(session: nox.Session) -> None:
    """Print all that the overlay changed in --tree as one unified diff."""
    _pipeline(session)


@nox.session(python=False, default=False)
def port(session: nox.Session) -> None:
    """Say what moved under the overlay in a release or tree that is not pinned, and what is left to do."""
    _pipeline(session)


@nox.session(python=False, default=False)
def pin(session: nox.Session) -> None:
    """Draft the pins of releases from their published files."""
    _pipeline(session)


@nox.session(python=False, default=False, requires=["environment"])
def parity(session: nox.Session) -> None:
    """Compare every overlaid entry with the pristine one and with float64, in a release, a tree, or all."""
    _with_torch(session)


@nox.session(python=False, default=False, requires=["environment"])
def train(session: nox.Session) -> None:
    """Train a small GPT on the pristine and on the overlaid tree and compare; --compare: speed, too."""
    _with_torch(session)


@nox.session(python=False, default=False, requires=["environment"])
def bench(session: nox.Session) -> None:
    """Measure the kernels beside upstream, PyTorch and whichever other libraries the environment has."""
    _with_torch(session)


@nox.session(python=False, requires=["environment"])
def tests(session: nox.Session) -> None:
    """Everything that needs no GPU, in Triton's interpreter; with a GPU, the same tests compiled."""
    _with_torch(session)


@nox.session(python=False, requires=["environment"])
def lint(session: nox.Session) -> None:
    """ruff, a strict type checker, and the checks of the patch set itself."""
    for check in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        session.run(str(ENVIRONMENT), "-m", *check, external=True)
    _with_torch(session)
