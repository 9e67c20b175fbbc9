# SPDX-License-Identifier: Apache-2.0
"""The overlay's own version: it counts up, independent of Megatron-Core's releases."""

from __future__ import annotations

OVERLAY_VERSION = 1
