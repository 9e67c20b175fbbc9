# SPDX-License-Identifier: Apache-2.0
"""The ``LIGER_MEGATRON*`` environment variables, read once, when this module is imported.

A wrong value stops the import: a job must not train for hours with a switch that was misspelt.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

OPS = ("swiglu", "cross_entropy", "norms", "activations", "linear_cross_entropy")
"""Every op this overlay has."""

ON_REQUEST = ("linear_cross_entropy",)
"""The ops that run only where ``LIGER_MEGATRON`` names them; ``default`` stands for all others."""

IN_PLACE_OPS = ("swiglu", "cross_entropy", "activations")
"""The ops that can write the gradient over the saved activation."""

SWITCH = "LIGER_MEGATRON"
STRICT = "LIGER_MEGATRON_STRICT"
IN_PLACE = "LIGER_MEGATRON_IN_PLACE"
CHECK_LABELS = "LIGER_MEGATRON_CHECK_LABELS"
LABEL_SMOOTHING = "LIGER_MEGATRON_LABEL_SMOOTHING"
LINEAR_CE_MB = "LIGER_MEGATRON_LINEAR_CE_MB"
VARIABLES = (SWITCH, STRICT, IN_PLACE, CHECK_LABELS, LABEL_SMOOTHING, LINEAR_CE_MB)

LABEL_SMOOTHING_SCOPES = ("global", "partition")
"""Over which part of the vocabulary label smoothing spreads; the first is the default."""

DEFAULT_LINEAR_CE_MB = 512.0
MOST_LINEAR_CE_MB = 2.0**43
"""Its bytes are the first number that an int64 does not hold."""

logger = logging.getLogger("megatron.core.liger")


class SettingsError(ValueError):
    """An environment variable of the overlay has a value it cannot have; the message lists the right ones."""


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    ``enabled``: ops that run on the kernel where they can. ``strict``: a fallback of an enabled op is an
    error. ``in_place``: ops whose backward reuses the saved activation's memory for the gradient.
    ``check_labels``: wait for the device at each loss and refuse labels beyond the vocabulary.
    ``label_smoothing``: one of :data:`LABEL_SMOOTHING_SCOPES`. ``linear_ce_mb``: MiB that one call of
    ``linear_cross_entropy`` may take beside its tensors and their gradients.
    """

    enabled: frozenset[str]
    strict: bool
    in_place: frozenset[str]
    check_labels: bool
    label_smoothing: str
    linear_ce_mb: float


def _items(name: str, value: str, allowed: tuple[str, ...], right: str) -> list[str]:
    items = [item.strip() for item in value.split(",")]
    wrong = [item for item in items if item not in allowed]
    if wrong:
        raise SettingsError(f"{name}={value!r}: {', '.join(map(repr, wrong))} not known; right are {right}")
    bare = [item.removeprefix("-") for item in items]
    twice = sorted({item for item in bare if bare.count(item) > 1})
    if twice:
        raise SettingsError(f"{name}={value!r}: {', '.join(map(repr, twice))} named twice; right are {right}")
    return items


def _by_default() -> frozenset[str]:
    return frozenset(OPS) - frozenset(ON_REQUEST)


def _enabled(value: str) -> frozenset[str]:
    if value in ("", "1", "default"):
        return _by_default()
    if value == "0":
        return frozenset()
    right = (
        f"0 (all off), 1 or default (all but {', '.join(ON_REQUEST)}), or a comma-separated list: NAME for "
        f"only what is named, default,NAME to add, -NAME to remove; names: {', '.join(OPS)}"
    )
    allowed = ("default", *OPS, *(f"-{op}" for op in OPS))
    items = _items(SWITCH, value, allowed, right)
    added = {item for item in items if not item.startswith("-")}
    enabled = added & set(OPS)
    if "default" in added or not added:
        enabled |= _by_default()
    return frozenset(enabled - {item[1:] for item in items if item.startswith("-")})


def _flag(name: str, value: str, off: str, on: str) -> bool:
    if value not in ("", "0", "1"):
        raise SettingsError(f"{name}={value!r}: right are 0 ({off}) and 1 ({on})")
    return value == "1"


def _scope(value: str) -> str:
    if value not in ("", *LABEL_SMOOTHING_SCOPES):
        raise SettingsError(
            f"{LABEL_SMOOTHING}={value!r}: right are global (over the whole vocabulary, the same loss on all "
            "ranks) and partition (over each rank's own part, as upstream)"
        )
    return value or LABEL_SMOOTHING_SCOPES[0]


def _in_place(value: str) -> frozenset[str]:
    if value in ("", "0"):
        return frozenset()
    right = f"0 (none) or a comma-separated list of {', '.join(IN_PLACE_OPS)}"
    return frozenset(_items(IN_PLACE, value, IN_PLACE_OPS, right))


def _mebibytes(value: str) -> float:
    try:
        found = float(value) if value else DEFAULT_LINEAR_CE_MB
    except ValueError:
        found = 0.0
    if not 0.0 < found < MOST_LINEAR_CE_MB:
        raise SettingsError(
            f"{LINEAR_CE_MB}={value!r}: right is a number of MiB above 0, such as "
            f"{DEFAULT_LINEAR_CE_MB:g}, and below {MOST_LINEAR_CE_MB:.0f}"
        )
    return found


def read(environ: Mapping[str, str]) -> Settings:
    """The settings in ``environ``; surrounding blanks do not count.

    Raises:
        SettingsError: a value is wrong. It names the variable, the value and the right ones.
    """

    def value(name: str) -> str:
        return environ.get(name, "").strip()

    return Settings(
        enabled=_enabled(value(SWITCH)),
        strict=_flag(STRICT, value(STRICT), "fall back and log it", "a fallback is an error"),
        in_place=_in_place(value(IN_PLACE)),
        check_labels=_flag(CHECK_LABELS, value(CHECK_LABELS), "count wrong ones", "refuse them"),
        label_smoothing=_scope(value(LABEL_SMOOTHING)),
        linear_ce_mb=_mebibytes(value(LINEAR_CE_MB)),
    )


def named(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """The ops that ``environ`` asks for by name, by variable; those that it takes away do not count."""
    found = {name: environ.get(name, "").replace(",", " ").split() for name in (SWITCH, IN_PLACE)}
    return {name: [item for item in items if item in OPS] for name, items in found.items()}


def unknown(environ: Mapping[str, str]) -> list[str]:
    """The names in ``environ`` that begin like the overlay's variables but are none of them, sorted."""
    return sorted(name for name in environ if name.startswith(SWITCH) and name not in VARIABLES)


SETTINGS = read(os.environ)

if _unknown := unknown(os.environ):
    logger.warning("no such setting: %s; the settings are %s", ", ".join(_unknown), ", ".join(VARIABLES))
