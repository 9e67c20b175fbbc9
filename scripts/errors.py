# SPDX-License-Identifier: Apache-2.0
"""What the pipeline refuses, and with which exit code."""

from __future__ import annotations

import shlex


def command(*words: object) -> str:
    """A command of this project as a remedy tells to type it."""
    return shlex.join(["python", "-m", "scripts", *map(str, words)])


def quoted(path: object) -> str:
    """A path as a remedy tells to type it."""
    return shlex.quote(str(path))


class OverlayError(Exception):
    """A refusal: the file it is about, what was expected there, what was found, and one remedy."""

    exit_code = 1

    def __init__(self, file: object, expected: str, found: str, remedy: str) -> None:
        self.file = str(file)
        self.expected = expected
        self.found = found
        self.remedy = remedy
        super().__init__(self.file, expected, found, remedy)

    def __str__(self) -> str:
        return "\n".join(
            f"{label + ':':10}{text}"
            for label, text in (
                ("file", self.file.replace("\n", "\\n")),
                ("expected", self.expected.replace("\n", "\\n")),
                ("found", self.found),  # may be what another program said
                ("remedy", self.remedy.replace("\n", "\\n")),
            )
        )


class ExpectationError(OverlayError):
    """The command ran, and what it checks does not hold (status --expect, parity, lint, train)."""

    exit_code = 1


class UsageError(OverlayError):
    """The arguments make no sense together."""

    exit_code = 2


class ReleaseError(OverlayError):
    """A release that is not pinned here, or that upstream has withdrawn."""

    exit_code = 3


class SourceError(OverlayError):
    """Upstream's release could not be had, or is not the pinned one."""

    exit_code = 4


class TreeError(OverlayError):
    """A tree that the overlay does not go onto: unknown files, no Megatron, read-only; or a failing disk."""

    exit_code = 5


class StateError(OverlayError):
    """A tree whose overlaid files were changed by hand, or that is in the way of one."""

    exit_code = 6
