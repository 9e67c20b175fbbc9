# SPDX-License-Identifier: Apache-2.0
"""Where a call goes, kernel or upstream, and the count of both.

An :class:`Op` is one switch in ``LIGER_MEGATRON`` with one kernel; an :class:`Entry` is a function or class
that was taken over for it. Triton is imported and a device touched when an entry is first called, not before.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from .settings import IN_PLACE, ON_REQUEST, SETTINGS, STRICT, SWITCH
from .settings import OPS as NAMES

if not hasattr(sys.modules[__package__], "__all__"):
    # Python takes a folder without it, or with an empty one, for a package all the same, and half of this one
    # would run.
    raise RuntimeError(
        f"the liger overlay in {os.path.dirname(__file__)} has lost its __init__.py. Lay it over this tree "
        "again, revert it, or install the wheel again"
    )

TORCH_FLOOR = (2, 6)
TRITON_FLOOR = (3, 2)
IN_PLACE_TORCH = (2, 8)

ROCM = "ROCm has not been measured"
OLD_TORCH = f"torch is older than {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]}"
NO_TRITON = "Triton cannot be imported"
OLD_TRITON = f"Triton is older than {TRITON_FLOOR[0]}.{TRITON_FLOOR[1]}"
ON_CPU = "a CPU tensor without TRITON_INTERPRET=1"
OTHER_DEVICE = "a tensor on a device that is neither CUDA nor CPU"
COMPILING = "traced by torch.compile"
NOT_PLAIN = "an argument that is no plain tensor"
WATCHED = "watched by a torch dispatch mode or torch.jit.trace"
OFF = f"off by {SWITCH}"
NOT_ENABLED = "not enabled"

_PLAIN = (torch.Tensor, torch.nn.Parameter)

LOGGER = logging.getLogger("megatron.core.liger")


class FallbackError(RuntimeError):
    """Under ``LIGER_MEGATRON_STRICT=1``: an enabled op would have run upstream's code."""


class Platform:
    """What lies under the kernels in this process.

    ``reason``: why no kernel can run here, or None. ``triton``: Triton's version, or None. ``interpreted``:
    kernels run in Triton's interpreter, so CPU tensors are served too.
    """

    def __init__(self) -> None:
        self.triton: str | None = None
        self.interpreted = False
        try:
            import triton
        except Exception:  # an unusable Triton must not stop a job that upstream's code can run
            pass
        else:
            self.triton = str(triton.__version__)
            # The kernels are decorated right after this, and decorating is when Triton decides.
            knobs = getattr(triton, "knobs", None)
            self.interpreted = knobs.runtime.interpret if knobs else os.environ.get("TRITON_INTERPRET") == "1"
        self.reason = self._reason()
        self._by_device = {"cuda": self.reason, "cpu": self.reason or (None if self.interpreted else ON_CPU)}

    def _reason(self) -> str | None:
        if torch.version.hip is not None:
            return ROCM
        if version_pair(torch.__version__) < TORCH_FLOOR:
            return OLD_TORCH
        if self.triton is None:
            return NO_TRITON
        if version_pair(self.triton) < TRITON_FLOOR:
            return OLD_TRITON
        return None

    def unusable(self, device: str) -> str | None:
        """Why no kernel can run on tensors of a device type, or None."""
        return self._by_device.get(device, OTHER_DEVICE)


def interpreter_wanted() -> bool:
    """Whether the environment asks for Triton's interpreter, in any of the words that Triton takes for yes.

    Also where nothing here imports Triton, which decides for itself when it is.
    """
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def version_pair(text: str) -> tuple[int, int]:
    """The first two numbers of a version; ``(0, 0)`` when it has none."""
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def without_effect() -> str | None:
    """What of the settings has no effect with this torch, or None."""
    if SETTINGS.in_place and version_pair(torch.__version__) < IN_PLACE_TORCH:
        return (
            f"{IN_PLACE} has no effect with torch {torch.__version__}: before {IN_PLACE_TORCH[0]}."
            f"{IN_PLACE_TORCH[1]} it does not tell whether hooks on saved tensors are at work"
        )
    return None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a kernel may read the tensor's memory as it is: no subclass, strided, no pending negation."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_neg()


def watched() -> bool:
    """Whether something records PyTorch's operators in this thread; it would not see a kernel's launch."""
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._get_tracing_state() is not None


def later_option(
    options: Mapping[str, inspect.Parameter], given: Mapping[str, Any], known: Container[str]
) -> str | None:
    """The first of upstream's options that this overlay does not know and that a call asks for.

    An option asks for something, given or by default, unless it is None, or False by default too. ``options``
    are parameters of upstream's signature, ``given`` the values of a call, ``known`` what is served or read.
    """
    for name, parameter in options.items():
        if name in known:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            if given.get(name):
                return name
            continue
        value = given.get(name, parameter.default)
        if value is not None and not (value is False and parameter.default is False):
            return name
    return None


class Op:
    """One switch in ``LIGER_MEGATRON``: its kernel and its entries.

    Args:
        name: as in the settings.
        kernel: module under ``kernels`` and the function in it, ``"module.function"``.
        launches: how the names of its launches begin.
        device_counts: gives what the kernels count on the device, by name; called with whether to wait for
            it, and without waiting None stands for a count that the device has not finished.
    """

    def __init__(
        self,
        name: str,
        kernel: str,
        launches: tuple[str, ...],
        device_counts: Callable[[bool], Mapping[str, int | None]] = lambda wait: {},
    ) -> None:
        self.name = name
        self.enabled = name in SETTINGS.enabled
        self.in_place = name in SETTINGS.in_place
        self.launches = launches
        self.device_counts = device_counts
        self.entries: dict[str, Entry] = {}
        self._kernel = kernel
        OPS[name] = self

    def load(self, other: str | None = None) -> Callable[..., Any]:
        """The kernel's function, or another one of its module. Imports Triton: for platforms that have no
        reason against it.

        Raises:
            RuntimeError: the module cannot be imported.
        """
        module, name = self._kernel.rsplit(".", 1)
        try:
            found = importlib.import_module(f".kernels.{module}", __package__)
            function: Callable[..., Any] = getattr(found, other or name)
        except Exception as error:
            raise RuntimeError(
                f"{self.name}: the liger overlay's kernels in {os.path.dirname(__file__)} cannot be imported "
                f"({type(error).__name__}: {error}). Lay it over this tree again, revert it, install the "
                f"wheel again, or switch the op off with {SWITCH}=-{self.name}"
            ) from error
        return function

    def entry(self, name: str) -> Entry:
        """The entry of that name, the same one each time."""
        return self.entries.get(name) or Entry(self, name)


class Entry:
    """One taken-over function or class, and how its calls went."""

    def __init__(self, op: Op, name: str) -> None:
        self.op = op
        self.name = name
        self.kernel = 0
        self.off = 0
        self.upstream: dict[str, int] = {}
        op.entries[name] = self

    def served(self, tensor: torch.Tensor) -> None:
        """Count a call that ran on the kernel."""
        if job_pending:
            _first_call(self, None, tensor)
        self.kernel += 1

    def skipped(self, tensor: torch.Tensor) -> None:
        """Count a call of an op that is switched off; it runs upstream's code, which is no fallback."""
        if job_pending:
            _first_call(self, OFF, tensor)
        self.off += 1

    def fell_back(self, reason: str, tensor: torch.Tensor | None = None) -> None:
        """Count a call that upstream's code has to serve, and log it the first time.

        Raises:
            FallbackError: ``LIGER_MEGATRON_STRICT=1``.
        """
        if job_pending:
            _first_call(self, reason, tensor)
        self.declined(reason)

    def declined(self, reason: str) -> None:
        """The same for a class that is left to upstream as it is built: nothing says yet where the job runs.

        Raises:
            FallbackError: ``LIGER_MEGATRON_STRICT=1``.
        """
        if SETTINGS.strict:
            raise FallbackError(
                f"{self.op.name}: {self.name} would run upstream's code ({reason}); {STRICT}=1 forbids that. "
                f"Change the call, unset {STRICT}, or switch the op off with {SWITCH}=-{self.op.name}"
            )
        self.upstream[reason] = self.upstream.get(reason, 0) + 1
        if (self.op.name, reason) not in _logged:
            _logged.add((self.op.name, reason))
            LOGGER.warning("%s: %s runs upstream's code: %s", self.op.name, self.name, reason)

    def traced(self) -> None:
        """Count a call that torch.compile traces: once a trace, because a compiled graph counts nothing."""
        _count_trace(self.op.name, self.name)


# Run by the tracer, not traced: a counter read in a graph would be a guard that fails at each call. It takes
# names because a tracer need only take constants (torch 2.11's refuses anything else).
_compiler: Any = torch.compiler
_count_trace: Callable[[str, str], None] = _compiler.assume_constant_result(
    lambda op, entry: OPS[op].entries[entry].fell_back(COMPILING)
)

OPS: dict[str, Op] = {}
job_pending = True
_logged: set[tuple[str, str]] = set()
_platform: Platform | None = None


def platform() -> Platform:
    """This process's :class:`Platform`, found at the first call. Imports Triton when it is there."""
    global _platform
    if _platform is None:
        _platform = Platform()
    return _platform


def off(op: str) -> str:
    """What is to be said of an op that is not enabled."""
    return NOT_ENABLED if op in ON_REQUEST else OFF


def in_order() -> list[Op]:
    """The ops as the settings order them; their modules are imported in any order."""
    return sorted(OPS.values(), key=lambda op: NAMES.index(op.name))


def _first_call(entry: Entry, reason: str | None, tensor: torch.Tensor | None) -> None:
    global job_pending
    job_pending = False
    from . import job

    job.announce(entry, reason, tensor)


def kernel_module(name: str) -> Any:
    """The module of that name under ``kernels`` if it has been loaded, else None. Imports nothing."""
    return sys.modules.get(f"{__package__}.kernels.{name}")


def launches() -> dict[str, int]:
    """Kernel launches by name, for all ops; empty before the first kernel was loaded."""
    module = kernel_module("launches")
    return dict(module.LAUNCHES) if module else {}


def counters() -> dict[str, dict[str, Any]]:
    """How often each op ran, and where. Reads Python numbers only: no device is touched.

    Returns:
        ``{op: {"entries": {name: {"kernel": n, "off": n, "upstream": {reason: n}}}, "launches": {name: n},
        "collectives": n}}`` with the calls that the kernel served (one without elements launches nothing),
        the calls of an op that is switched off, the fallbacks, the kernels launched, backward included, and
        the collectives between ranks.
    """
    launched = launches()
    module = kernel_module("launches")
    return {
        op.name: {
            "entries": {
                entry.name: {"kernel": entry.kernel, "off": entry.off, "upstream": dict(entry.upstream)}
                for entry in op.entries.values()
            },
            "launches": {name: n for name, n in sorted(launched.items()) if name.startswith(op.launches)},
            "collectives": module.COLLECTIVES[op.name] if module else 0,
        }
        for op in in_order()
    }


def reset_counters() -> None:
    """Set every count to zero, launches included; those on a device stay. What was logged stays logged."""
    for op in OPS.values():
        for entry in op.entries.values():
            entry.kernel = entry.off = 0
            entry.upstream.clear()
    module = kernel_module("launches")
    if module:
        module.LAUNCHES.clear()
        module.COLLECTIVES.clear()
