# SPDX-License-Identifier: Apache-2.0
"""Entry of every worker process: ``python start.py WORKER [ARGUMENT …]``.

``WORKER`` is a module of this package, or the path of a program (``….py``) with the same ``main``.

The project's root must not stay on the path of a process that imports Megatron (its folder ``kernels/`` would
shadow the package of that name), so it is there only while the package ``scripts`` is imported: submodules
are then found through the package itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def load(worker: str) -> ModuleType:
    """Import ``scripts.workers.<worker>``, or the program at that path."""
    if not worker.endswith(".py"):
        return importlib.import_module(f"scripts.workers.{worker}")
    spec = importlib.util.spec_from_file_location(Path(worker).stem, worker)
    if spec is None or spec.loader is None:
        raise ImportError(f"{worker} cannot be imported")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Import the worker and run its ``main``.

    Returns:
        The worker's exit code.
    """
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, HERE)]
    sys.path.insert(0, str(ROOT))
    importlib.import_module("scripts.workers")
    del sys.path[0]
    return int(load(sys.argv[1]).main(sys.argv[2:]))


if __name__ == "__main__":
    raise SystemExit(main())
