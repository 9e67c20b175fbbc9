# SPDX-License-Identifier: Apache-2.0
"""Entry of every worker process: ``python start.py WORKER [ARGUMENT …]``.

The project's root must not stay on the path of a process that imports Megatron (its folder ``kernels/`` would
shadow the package of that name), so it is there only while the package ``scripts`` is imported: submodules
are then found through the package itself.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def main() -> int:
    """Import ``scripts.workers.<WORKER>`` and run its ``main``.

    Returns:
        The worker's exit code.
    """
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, HERE)]
    sys.path.insert(0, str(ROOT))
    importlib.import_module("scripts.workers")
    del sys.path[0]
    worker = importlib.import_module(f"scripts.workers.{sys.argv[1]}")
    return int(worker.main(sys.argv[2:]))


if __name__ == "__main__":
    raise SystemExit(main())
