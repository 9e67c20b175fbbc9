# SPDX-License-Identifier: Apache-2.0
"""What every worker needs of its process: a device, upstream's CUDA calls on CPU, the overlay if there."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from scripts.workers.entries import ENTRIES, Entry

MARKER = "# >>> liger overlay "


def prepare(device: str) -> torch.device:
    """Make the process ready for Megatron on ``"cpu"`` or ``"cuda"``; call before Megatron is imported.

    Returns:
        The device of this rank's tensors.
    """
    warnings.filterwarnings("ignore")
    if device == "cuda":
        index = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    torch.set_num_threads(1)
    from scripts import interpreter

    interpreter.convert_as_compiled()
    return torch.device("cpu")


class Stream:
    """A CUDA stream or event on CPU, where all that is asked of it has happened when it is asked."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record_event(self, *_: object) -> Stream:
        return self

    def nothing(self, *_: object) -> None: ...

    wait_stream = wait_event = wait = record = synchronize = nothing

    def query(self) -> bool:
        return True


def use_cpu_for_cuda() -> None:
    """Point the CUDA calls that upstream makes even on CPU tensors at their CPU forms."""
    from megatron.core.tensor_parallel import random as megatron_random

    cpu = torch.device("cpu")
    stream = Stream()

    def get_state(*_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(state)

    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: cpu),
        (torch.cuda, "get_rng_state", get_state),
        (torch.cuda, "set_rng_state", set_state),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Stream),
        (torch.cuda, "current_stream", lambda *_: stream),
        (torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
        (megatron_random, "_get_cuda_rng_state", get_state),
        (megatron_random, "_set_cuda_rng_state", set_state),
    ]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)
    # The CPU generator now *is* the device's, which upstream remarks on at every fork.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)


def give_checkpoints_a_format() -> str | None:
    """Make distributed checkpoints work where torch's writer wants a format that this release does not give.

    Returns:
        What was changed, in words, or None where nothing had to be.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    name, write = "serialization_format", filesystem_async._write_item
    if name not in inspect.signature(write).parameters or name in inspect.getsource(filesystem_async):
        return None
    from torch.distributed.checkpoint import filesystem

    named = {name: filesystem.SerializationFormat.TORCH_SAVE}
    filesystem_async._write_item = functools.partial(write, **named)
    return f"this release gives torch {torch.__version__} no {name} for its checkpoints: torch_save was added"


def use_no_transformer_engine() -> None:
    """Give upstream what it uses without asking whether TransformerEngine is there, where it is not."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    def nothing(**_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    replacements: list[tuple[Any, str, Any]] = [
        (multi_latent_attention, "HAVE_TE", False),
        (moe_utils, "te_general_gemm", None),
        (random, "FP8GlobalStateManager", SimpleNamespace(is_fp8_enabled=lambda: False)),
        (random, "activation_recompute_forward", nothing),
        (random, "fp8_autocast", nothing),
    ]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)


def attention_for_mla() -> type[torch.nn.Module]:
    """Upstream's local attention with the arguments that its MLA has for it; values are as wide as heads."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):  # type: ignore[misc]
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
            super().__init__(*args, **named)

    return Attention


def init_group(folder: Path, device: str) -> None:
    """Join the process group of this world through a file in ``folder``, so that no port is needed."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=size,
    )


def tree() -> Path:
    """The tree under test."""
    return Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).resolve()


def check_tree() -> None:
    """Make sure that the tree under test is the one imported.

    Raises:
        RuntimeError: another ``megatron.core`` comes first.
    """
    import megatron.core

    found = Path(megatron.core.__file__).resolve()
    if tree() not in found.parents:
        raise RuntimeError(f"megatron.core was imported from {found}, not from {tree()}")


def overlay() -> ModuleType | None:
    """The overlay's package, or None on a pristine tree."""
    if importlib.util.find_spec("megatron.core.liger") is None:
        return None
    return importlib.import_module("megatron.core.liger")


def patched_files() -> list[str]:
    """The upstream files that the tree's record says diffs changed."""
    record = importlib.import_module("megatron.core.liger.installed").record() or {"files": {}}
    return sorted(path for path, entry in record["files"].items() if entry["action"] == "patch")


def versions() -> dict[str, str]:
    """Versions of what the results depend on."""
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "device": device,
    }


def import_or_none(name: str) -> ModuleType | None:
    """Import a module, or None where this release has no such module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            return None
        raise


def who_is_behind(entry: Entry) -> dict[str, str]:
    """Which function or class each name of ``entry`` leads to.

    Returns:
        By module (the defining one first): ``"ours"`` (code below the overlay's marker line), ``"upstream"``,
        or ``"absent"``.
    """
    return {name: _origin(import_or_none(name), entry) for name in (entry.module, *entry.routes)}


def _origin(holder: ModuleType | None, entry: Entry) -> str:
    found = getattr(holder, entry.name, None)
    return "absent" if found is None else origin(found)


def origin(found: Any) -> str:
    """Whether a function or class is ``"ours"``, written below the marker line, or ``"upstream"``'s."""
    # Not unwrapped: ours is wrapped to look like upstream's, and the question is which one is called.
    # Of a class, what its own body defines; it may derive from upstream's.
    made = vars(found).get("__new__") or vars(found)["__init__"] if isinstance(found, type) else found
    code = getattr(made, "__func__", made).__code__
    source = Path(code.co_filename).read_text(encoding="utf-8").splitlines()
    marker = next((n for n, text in enumerate(source, 1) if text.startswith(MARKER)), None)
    return "ours" if marker is not None and code.co_firstlineno > marker else "upstream"


def all_origins() -> dict[str, dict[str, str]]:
    """:func:`who_is_behind` of every entry, by the entry's name."""
    return {entry.name: who_is_behind(entry) for entry in ENTRIES}


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Leave this rank's report where the parent looks for it."""
    target = folder / f"rank{os.environ['RANK']}.json"
    target.write_text(json.dumps(report, indent=1), encoding="utf-8")
