# SPDX-License-Identifier: Apache-2.0
"""Compile every launch of the norms' kernels for one target, with no device, and print the findings as JSON.

Runs as a program of its own, like `compile_variants.py` and for its reasons. What to compile is not listed:
the public functions run on CPU tensors with each kernel replaced by a recorder, and what their launchers pass
is compiled.
"""

from __future__ import annotations

import importlib.util
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from compile_variants import ROOT, spills

# Narrow and odd; a head's, many rows to a program; odd; one row to a program, in each launch of the backward;
# in blocks of columns in both directions.
WIDTHS = (7, 128, 4095, 4096, 7168, 8192, 16384, 65536)

MULTIPROCESSORS = 132

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Call:
    """A kernel as a launcher calls it, specialised as Triton does: see `recorded`."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[int, ...]
    warps: int
    columns: int = field(compare=False)  # of its rows: the first of those compiled alike


class Recorder:
    """Stands in for a kernel and notes its launches."""

    def __init__(self, kernel: Any, calls: dict[Call, str]) -> None:
        self.kernel, self.calls, self.label = kernel, calls, ""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < size < 2**31 for size in grid)
        return self.recorded

    def recorded(self, *args: Any, num_warps: int, **kwargs: Any) -> None:
        parameters = self.kernel.params
        values = dict(zip((p.name for p in parameters), args)) | kwargs
        signature, constants, divisible = {}, {}, []
        for index, parameter in enumerate(parameters):
            name, value = parameter.name, values[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = f"*{TYPES[value.dtype]}"
                divisible.append(index)
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif value == 1 and not parameter.do_not_specialize:
                signature[name], constants[name] = "constexpr", 1
            else:
                signature[name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    divisible.append(index)
        call = Call(
            self.kernel,
            tuple(signature.items()),
            tuple(constants.items()),
            tuple(divisible),
            num_warps,
            values["n"],
        )
        self.calls.setdefault(call, f"{self.kernel.fn.__name__}: {self.label}")


def record(norms: Any, warp_size: int, shared_memory: int) -> dict[Call, str]:
    """Every launch of the norms for rows of all widths, with a label."""
    norms.multiprocessors = lambda x: MULTIPROCESSORS
    norms.shared_memory = lambda x: shared_memory
    for choice in ("choose_forward", "choose_backward"):
        setattr(norms, choice, partial(getattr(norms, choice), warp_size=warp_size))
    calls: dict[Call, str] = {}
    recorders = [
        (name, Recorder(kernel, calls)) for name, kernel in vars(norms).items() if name.endswith("_kernel")
    ]
    for name, recorder in recorders:
        setattr(norms, name, recorder)
    for label, function in cases(norms):
        for _, recorder in recorders:
            recorder.label = label
        function()
    return calls


def cases(norms: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    for n in WIDTHS:
        for dtype, name in TYPES.items():
            # float16 differs from bfloat16 in the conversion only, float32 in the launches too.
            if (dtype == torch.float16 and n != 128) or (dtype == torch.float32 and n % 128):
                continue
            for layer_norm in (False, True):
                for wanted in ("all", "x", "parameters"):
                    label = f"{'layer' if layer_norm else 'rms'}_norm, n={n}, {name}, gradients of {wanted}"
                    yield label, partial(step, norms, n, dtype, layer_norm, wanted)
    yield "slice of heads", partial(step, norms, 128, torch.bfloat16, False, "all", heads=True)
    yield "mixed dtypes", partial(step, norms, 4096, torch.float32, False, "all", weight=torch.bfloat16)
    yield "mixed dtypes", partial(step, norms, 4096, torch.bfloat16, False, "all", weight=torch.float32)
    yield "zero-centred", partial(step, norms, 4096, torch.bfloat16, False, "all", zero_centered=True)


def step(
    norms: Any,
    n: int,
    dtype: torch.dtype,
    layer_norm: bool,
    wanted: str,
    *,
    heads: bool = False,
    weight: torch.dtype | None = None,
    zero_centered: bool = False,
) -> None:
    x = torch.ones(6, n, dtype=dtype)
    if heads:
        x = torch.ones(6, 16, 3 * n, dtype=dtype)[:, :8, n : 2 * n]
    parameters = [torch.ones(n, dtype=weight or dtype) for _ in range(2 if layer_norm else 1)]
    x.requires_grad_(wanted != "parameters")
    for parameter in parameters:
        parameter.requires_grad_(wanted != "x")
    function = norms.layer_norm if layer_norm else norms.rms_norm
    out = function(x, *parameters, 1e-5, zero_centered=zero_centered)
    dy = torch.ones(out.shape, dtype=dtype)
    if heads:
        dy = torch.ones(8, 6, n, dtype=dtype).transpose(0, 1)
    out.backward(dy)


def build(call: Call, target: Any) -> Any:
    import triton
    from triton.compiler import ASTSource

    attributes = {(index,): [["tt.divisibility", 16]] for index in call.divisible}
    source = ASTSource(call.kernel, dict(call.signature), dict(call.constants), attributes)
    return triton.compile(source, target=target, options={"num_warps": call.warps})


def load() -> Any:
    spec = importlib.util.spec_from_file_location(
        "liger_kernels", ROOT / "kernels" / "__init__.py", submodule_search_locations=[str(ROOT / "kernels")]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["liger_kernels"] = module
    spec.loader.exec_module(module)
    from liger_kernels import norms

    return norms


def main(target_name: str, shared_memory: int) -> None:
    backend, arch, warp_size = target_name.split(":")
    calls = record(load(), int(warp_size), shared_memory)
    from triton.backends.compiler import GPUTarget

    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp_size))
    results = []
    for call, label in calls.items():
        log = io.StringIO()
        with redirect_stdout(log):
            compiled = build(call, target)
        assembly = compiled.asm
        text = assembly["amdgcn" if backend == "hip" else "ptx"]
        spilled, registers = spills(assembly, log.getvalue())
        results.append(
            {
                "name": label,
                "kernel": call.kernel.fn.__name__,
                "n": call.columns,
                "writes_rows": bool(
                    {"out", "dx"} & (dict(call.signature).keys() - dict(call.constants).keys())
                ),
                "warps": call.warps,
                "constants": {k: v for k, v in call.constants if isinstance(v, int)},
                "float64": bool(re.search(r"\.f64|_f64", text) or re.search(r"\bf64\b", assembly["ttgir"])),
                "spilled": spilled,
                "registers": registers,
                "shared": compiled.metadata.shared,
                "wide_loads": len(
                    re.findall(
                        r"ld\.global\S*\.v4\.b32|cp\.async\.cg.*0x10|(?:global|buffer)_load_dwordx4", text
                    )
                ),
                "wide_stores": len(
                    re.findall(r"st\.global\S*\.v4\.b32|(?:global|buffer)_store_dwordx4", text)
                ),
            }
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
