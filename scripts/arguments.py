# SPDX-License-Identifier: Apache-2.0
"""Types of command-line arguments. An empty one comes from an unset variable and never means a default."""

from __future__ import annotations

from pathlib import Path

from scripts.errors import UsageError


def text(value: str) -> str:
    """A word that is not empty; raises UsageError."""
    if not value.strip():
        remedy = "give the option a value, or leave it away (is a variable unset?)"
        raise UsageError("command line", "a value", "an empty one", remedy)
    return value


def is_wheel(release: str | None) -> bool:
    """Whether what stands for a release is the path of a wheel."""
    return release is not None and release.endswith(".whl")


def path(value: str) -> Path:
    """A path; a ``~`` it begins with is expanded here too, since a shell leaves it alone in ``--tree=~/x``.

    Raises UsageError.
    """
    try:
        given = Path(text(value))
        return given.expanduser() if value.startswith("~") else given  # ./~ is a folder of that name
    except RuntimeError as error:
        raise UsageError("command line", "a path", f"{value} ({error})", "write the path in full") from None
