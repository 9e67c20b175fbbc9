# SPDX-License-Identifier: Apache-2.0
"""``python -m scripts COMMAND …``: what ``nox -s COMMAND -- …`` runs, for machines without nox.

``python CHECKOUT/scripts COMMAND …`` does the same from any folder. This file and the package's
``__init__.py`` also run on Pythons that are too old for the rest, to say so.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from pathlib import Path
from typing import TextIO

COMMANDS = {
    "apply": "fetch, verify and overlay a release into build/, or a tree in place",
    "wheel": "repack upstream's wheel with the overlay into dist/",
    "status": "say of each touched file of a tree what it is",
    "revert": "take the overlay out of a tree, byte for byte",
    "diff": "print all that the overlay changed in a tree",
    "parity": "compare overlaid Megatron with the pristine one",
    "train": "train a small GPT on both and compare",
    "bench": "measure the kernels beside upstream, PyTorch and other libraries",
    "tests": "run the tests; without a GPU in Triton's interpreter",
    "lint": "check the patch set itself",
    "port": "say what moved under the overlay in an unknown release or tree",
    "pin": "draft the pins of releases",
}
_MODULES = {"pin": "pins"}
_OLDEST = (3, 10)
_FOLDER = Path(__file__).resolve().parent


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns its exit code. A refusal is four lines on stderr and an exit code of its own."""
    if sys.version_info[:2] < _OLDEST:
        running = ".".join(map(str, sys.version_info[:3]))
        print(f"needs Python {'.'.join(map(str, _OLDEST))} or newer; this is {running}", file=sys.stderr)
        return 2
    argv = sys.argv[1:] if argv is None else argv
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="python -m scripts",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Version-pinned source overlays for Megatron-Core.\n\ncommands:\n"
        + "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items()),
        epilog="exit codes: 0 done; 1 an expectation, parity or lint failed; 2 usage; 3 unknown or yanked "
        "release; 4 no such wheel, or not the pinned one; 5 a tree that the overlay does not go onto, or "
        "a file or folder that cannot be read or written; 6 files changed by hand",
    )
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="COMMAND --help says more")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="its arguments")
    command = parser.parse_args(argv[:1]).command
    # argparse has taken the command alone; nox and habit put a bare -- between it and its arguments.
    rest = argv[2:] if argv[1:2] == ["--"] else argv[1:]
    from scripts.errors import OverlayError
    from scripts.files import failed

    try:
        run = importlib.import_module(f"scripts.{_MODULES.get(command, command)}").main
        # With the root on the path, the folder kernels/ would pass for the package of that name.
        sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() not in (_FOLDER, _FOLDER.parent)]
        code: int = run(rest)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except OverlayError as error:
        refusal = error
    except OSError as error:
        refusal = failed(error, command)
    if sys.stdout is not None:
        sys.stdout.flush()
    print(refusal, file=sys.stderr)
    return refusal.exit_code


class _Output(io.FileIO):
    """A standard stream whose reader may leave: the command goes on and ends with its own result."""

    _over = False

    # Also called by the interpreter as it ends: what was told once is not raised again.
    def write(self, data):  # type: ignore[no-untyped-def]
        if self._over:
            return len(data)
        try:
            return super().write(data)
        except BrokenPipeError:
            self._over = True
            return len(data)
        except OSError as error:
            self._over = True
            raise type(error)(error.errno, error.strerror, "standard output") from None


def _stream(old: TextIO) -> TextIO:
    """A standard stream that survives its reader and prints any path in any encoding."""
    if not isinstance(old, io.TextIOWrapper):  # None: closed by whoever started this
        return old
    old.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(old.fileno(), "w", closefd=False)),
        encoding=old.encoding,
        errors="backslashreplace",
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )


def _run() -> int:
    if not __package__:  # the folder was run
        sys.path.insert(0, str(_FOLDER.parent))
    if sys.version_info[:2] >= _OLDEST:
        sys.stdout, sys.stderr = _stream(sys.stdout), _stream(sys.stderr)
    return main()


if __name__ == "__main__":
    sys.exit(_run())
