# SPDX-License-Identifier: Apache-2.0
"""Triton kernels under Megatron-Core: switches, counters and report of the overlay.

``python -m megatron.core.liger`` prints the report. Importing this package reads the ``LIGER_MEGATRON*``
environment variables, and neither imports Triton nor touches a device.
"""

from __future__ import annotations

import os
import sys

__all__ = [
    "OVERLAY_VERSION",
    "FallbackError",
    "LigerMegatronCrossEntropy",
    "LigerMegatronRMSNorm",
    "LigerMegatronSwiGLU",
    "RankError",
    "SettingsError",
    "counters",
    "report",
    "reset_counters",
]

try:
    from . import installed, job, settings

    installed.require(settings.named(os.environ))
    from .activations import GEGLU as GEGLU  # they have no class, but a switch and counters
    from .cross_entropy import LigerMegatronCrossEntropy
    from .dispatch import FallbackError, counters, reset_counters
    from .linear_cross_entropy import model_loss as model_loss  # the same
    from .norms import LigerMegatronRMSNorm
    from .ranks import RankError
    from .report import report
    from .settings import SettingsError
    from .swiglu import LigerMegatronSwiGLU
    from .version import OVERLAY_VERSION

    job.watch()
except Exception as error:
    # Python keeps the parts of a package that fails, and would give them to whoever asks a second time.
    for part in [name for name in sys.modules if name.startswith(f"{__name__}.")]:
        del sys.modules[part]
    if type(error).__module__ == f"{__name__}.settings":
        raise
    # No ImportError: upstream and what is built on it take that for a library that is not there, and go on.
    raise RuntimeError(
        f"the liger overlay in {os.path.dirname(__file__)} cannot be imported ({type(error).__name__}: "
        f"{error}): its files are damaged, or of different versions. Lay it over this tree again, revert "
        "it, or install the wheel again"
    ) from error
