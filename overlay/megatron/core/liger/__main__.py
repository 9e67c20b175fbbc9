# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron.core.liger [--json] [--script PATH]``: see :mod:`megatron.core.liger.report`."""

from __future__ import annotations

import sys

from .report import main

sys.exit(main())
