# SPDX-License-Identifier: Apache-2.0
"""``python -m scripts COMMAND …``: what ``nox -s COMMAND -- …`` runs, for machines without nox."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

COMMANDS = {
    "apply": "fetch, verify and overlay a release into build/, or a tree in place",
    "wheel": "repack upstream's wheel with the overlay into dist/",
    "status": "say of each touched file of a tree what it is",
    "revert": "take the overlay out of a tree, byte for byte",
    "diff": "print all that the overlay changed in a tree",
    "parity": "compare overlaid Megatron with the pristine one",
    "train": "train a small GPT on both and compare",
    "tests": "run the tests; without a GPU in Triton's interpreter",
    "lint": "check the patch set itself",
    "pin": "draft the pins of a release",
}
_MODULES = {"pin": "pins"}


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns its exit code. A refusal is four lines on stderr and an exit code of its own."""
    argv = sys.argv[1:] if argv is None else argv
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="python -m scripts",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Version-pinned source overlays for Megatron-Core.\n\ncommands:\n"
        + "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items()),
        epilog="exit codes: 0 done; 1 an expectation, parity or lint failed; 2 usage; 3 unknown or yanked "
        "release; 4 no such wheel, or not the pinned one; 5 a tree that the overlay does not go onto; "
        "6 files changed by hand",
    )
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="COMMAND --help says more")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="its arguments")
    command = parser.parse_args(argv[:1]).command
    # argparse has taken the command alone; nox and habit put a bare -- between it and its arguments.
    rest = argv[2:] if argv[1:2] == ["--"] else argv[1:]
    from scripts.errors import OverlayError

    try:
        run = importlib.import_module(f"scripts.{_MODULES.get(command, command)}").main
        # With the root on the path, the folder kernels/ would pass for the package of that name.
        root = Path(__file__).resolve().parent.parent
        sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != root]
        code: int = run(rest)
        return code
    except OverlayError as error:
        sys.stdout.flush()
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
