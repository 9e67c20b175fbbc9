# SPDX-License-Identifier: Apache-2.0
"""Run parity's cases on the tree that is on the path, and write down what each one gave."""

from __future__ import annotations

import inspect
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.workers import runtime, step
from scripts.workers.bindings import bindings
from scripts.workers.cases import Case, chosen, short
from scripts.workers.entries import ENTRIES, LINEAR

RESULTS = "results.pt"


def main(argv: list[str]) -> int:
    """Run the plan in ``argv[0]``: tensors into its folder's ``results.pt``, all else into the report."""
    plan = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    folder = Path(plan["folder"])
    device = runtime.prepare(plan["device"])
    runtime.check_tree()
    if device.type == "cpu":
        runtime.use_cpu_for_cuda()
    runtime.init_group(folder, plan["device"])
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    report = {
        "overlaid": runtime.overlay() is not None,
        "versions": runtime.versions(),
        "wiring": {name: _names(name) for name in sorted({entry.module for entry in ENTRIES})},
        "routes": _routes(),
        "entries": runtime.all_origins(),
        "bindings": bindings(runtime.tree()),
    }
    results = {case.id: _run(case, device) for case in chosen(plan["calls"])}
    if plan["calls"]:
        results[step.NAME] = _step(device, LINEAR in plan["ops"])
    torch.save(results, folder / RESULTS)
    runtime.write_report(folder, report)
    torch.distributed.destroy_process_group()
    return 0


def _run(case: Case, device: torch.device) -> dict[str, Any]:
    """Output and gradients of one call (on CPU), their properties, the error if any, and the counts.

    Nothing but ``missing`` where the release does not have the call.
    """
    module = runtime.import_or_none(case.module)
    if case.missing(module):
        return {"missing": True}
    overlay = runtime.overlay()
    if overlay is not None:
        overlay.reset_counters()
    if case.fallback or case.raises:
        # Upstream's code answers in both trees, but torch.compile gives up on a function after a number of
        # recompilations, and the pristine tree has had more of them.
        torch.compiler.reset()
    entry = getattr(module, case.entry)
    tensors = case.inputs(case.generator(), device)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    result: dict[str, Any] = {"missing": False, "tensors": {}, "properties": {}, "error": None}
    try:
        out = case.call(entry, tensors)
        _record(result, "out", out)
        if case.grad_output is not None:
            wanted = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
            gradients = torch.autograd.grad(
                out,
                list(wanted.values()),
                case.output_gradient(out.shape, out.dtype, device),
                allow_unused=True,
            )
            for name, gradient in zip(wanted, gradients):
                _record(result, f"d {name}", gradient)
    except Exception as error:
        text = str(error).replace(str(runtime.tree()), "TREE")
        result["error"] = (type(error).__name__, re.sub(r"0x[0-9a-f]+", "ADDRESS", text))
    result["overwritten"] = [name for name, was in before.items() if not torch.equal(was, tensors[name])]
    if overlay is not None:
        result["counters"] = overlay.counters().get(case.op)
    return result


def _step(device: torch.device, linear: bool) -> dict[str, Any]:
    """A model's step in float32; of the pristine tree also in float64. Its error, where there is one."""
    dtypes = [torch.float32] if runtime.overlay() is not None else [torch.float32, torch.float64]
    try:
        return {short(dtype): step.run(device, dtype, linear) for dtype in dtypes}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _record(result: dict[str, Any], name: str, tensor: torch.Tensor | None) -> None:
    if tensor is None:
        result["properties"][name] = None
        return
    result["tensors"][name] = tensor.detach().cpu().contiguous()
    result["properties"][name] = {
        "dtype": short(tensor.dtype),
        "shape": list(tensor.shape),
        "contiguous": tensor.is_contiguous(),
        # Upstream's recompute empties an output's storage, so a kernel's output must have one to itself.
        "owns storage": tensor._base is None
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(),
    }


def _names(module: str) -> dict[str, dict[str, Any]] | None:
    """Every name of a module with what its users could notice; None when the release has no such module."""
    found = runtime.import_or_none(module)
    if found is None:
        return None
    return {name: _describe(value) for name, value in vars(found).items() if not name.startswith("__")}


def _describe(value: Any) -> dict[str, Any]:
    described = {"kind": type(value).__name__, "module": getattr(value, "__module__", None)}
    described["qualname"] = getattr(value, "__qualname__", None)
    if inspect.isfunction(value) or inspect.isclass(value):
        described["signature"] = _or_error(lambda: str(inspect.signature(value)))
        described["doc"] = value.__doc__
        described["pickle"] = _or_error(lambda: str(pickle.loads(pickle.dumps(value)) is value))
    return described


def _or_error(make: Callable[[], str]) -> str:
    try:
        return make()
    except Exception as error:
        return type(error).__name__


def _routes() -> dict[str, bool]:
    """For each name that a module bound at its import: whether it is the defining module's present object."""
    same = {}
    for entry in ENTRIES:
        defined = getattr(runtime.import_or_none(entry.module), entry.name, None)
        for route in entry.routes:
            holder = runtime.import_or_none(route)
            if defined is not None and holder is not None and hasattr(holder, entry.name):
                same[f"{route}.{entry.name}"] = getattr(holder, entry.name) is defined
    return same
