# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel launch of an op for one target, with no device, and print the findings as JSON.

Runs as a program of its own (`compile_gate.py gated cuda:90:32 232448`): under `TRITON_INTERPRET=1` the
decorated functions are the interpreter's, and cannot be compiled. `TRITON_DUMP_PTXAS_LOG=1` and an empty
cache folder give the assembler's report. What to compile is not listed: the public functions run on CPU
tensors with each kernel replaced by a recorder, and what their launchers pass is compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import compile_cases
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}
# The arguments through which the kernels of an op read and write whole rows.
READ = {"gated": {"y", "partials"}, "cross": {"logits"}, "norm": {"x", "dweight_partials", "dbias_partials"}}
WRITTEN = {"gated": {"out", "dy"}, "cross": {"dlogits"}, "norm": {"out", "dx"}}
# Ops without kernels of their own, and the module whose kernels they launch.
LAUNCHES = {"linear_cross_entropy": "cross_entropy"}


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
                signature[name] = "i32" if value < 2**31 else "i64"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    divisible.append(index)
        call = Call(
            self.kernel,
            tuple(signature.items()),
            tuple(constants.items()),
            tuple(divisible),
            num_warps,
            values.get("n", values.get("columns", 0)),
        )
        self.calls.setdefault(call, f"{self.kernel.fn.__name__}: {self.label}")


def record(module: Any, cases: Iterator[tuple[str, Callable[[], None]]]) -> dict[Call, str]:
    """Every launch that the cases make, with the label of the first."""
    calls: dict[Call, str] = {}
    kernels = [(name, kernel) for name, kernel in vars(module).items() if name.endswith("_kernel")]
    recorders = [(name, Recorder(kernel, calls)) for name, kernel in kernels]
    for name, recorder in recorders:
        setattr(module, name, recorder)
    for label, function in cases:
        for _, recorder in recorders:
            recorder.label = label
        function()
    return calls


def build(call: Call, target: Any) -> Any:
    """The call, compiled."""
    import triton
    from triton.compiler import ASTSource

    attributes = {(index,): [["tt.divisibility", 16]] for index in call.divisible}
    source = ASTSource(call.kernel, dict(call.signature), dict(call.constants), attributes)
    return triton.compile(source, target=target, options={"num_warps": call.warps})


def spills(assembly: Any, log: str) -> tuple[int, int]:
    """Bytes or registers spilled, and registers a thread uses."""
    if "amdgcn" in assembly:
        text = assembly["amdgcn"]
        counts = [int(x) for x in re.findall(r"\.(?:vgpr|sgpr)_spill_count:\s*(\d+)", text)]
        assert counts
        return sum(counts), int(re.findall(r"\.vgpr_count:\s*(\d+)", text)[0])
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    assert frames, f"no report of the assembler: {log!r}"
    assert registers, log
    return sum(int(x) for frame in frames for x in frame), max(int(x) for x in registers)


def findings(call: Call, label: str, target: Any) -> dict[str, Any]:
    """What the compiled call does that it should or should not."""
    log = io.StringIO()
    with redirect_stdout(log):
        compiled = build(call, target)
    assembly = compiled.asm
    text = assembly["amdgcn" if target.backend == "hip" else "ptx"]
    spilled, registers = spills(assembly, log.getvalue())
    op = call.kernel.fn.__name__.partition("_")[0]
    pointers = {name for name, kind in call.signature if kind.startswith("*")}
    # 16 bytes at once: to or from global memory, or on their way to shared memory when loads are staged
    wide_load = r"ld\.global\S*\.v4\.b32|cp\.async\.cg.*0x10|(?:global|buffer)_load_dwordx4"
    wide_store = r"st\.global\S*\.v4\.b32|(?:global|buffer)_store_dwordx4"
    return {
        "name": label,
        "kernel": call.kernel.fn.__name__,
        "columns": call.columns,
        "reads_rows": bool(pointers & READ[op]),
        "writes_rows": bool(pointers & WRITTEN[op]),
        "constants": {k: v for k, v in call.constants if isinstance(v, int)},
        "float64": bool(re.search(r"\.f64|_f64", text) or re.search(r"f64\b", assembly["ttgir"])),
        "float_atomics": bool(re.search(r"(?:atom|red)\.\S*\.b?f\d|atomic_\w*_f\d", text)),
        "spilled": spilled,
        "registers": registers,
        "shared": compiled.metadata.shared,
        "exponentials": len(re.findall(r"ex2\.approx|v_exp_f32", text)),
        "wide_loads": len(re.findall(wide_load, text)),
        "wide_stores": len(re.findall(wide_store, text)),
    }


def load(name: str) -> Any:
    """The module of that name in the folder of kernels."""
    folder = ROOT / "kernels"
    spec = importlib.util.spec_from_file_location(
        "liger_kernels", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["liger_kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["liger_kernels"])
    return importlib.import_module(f"liger_kernels.{name}")


def main(op: str, target_name: str, shared_memory: int) -> None:
    backend, arch, warp_size = target_name.split(":")
    kernels = module = load(op)
    if op in LAUNCHES:
        kernels = importlib.import_module(f"liger_kernels.{LAUNCHES[op]}")
    # Before 8.9 CUDA has none, and gfx942 converts another float8, without negative zero.
    compile_cases.FLOAT8 = backend == "cuda" and int(arch) >= 89
    calls = record(kernels, getattr(compile_cases, op)(module, int(warp_size), shared_memory))
    from triton.backends.compiler import GPUTarget

    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp_size))
    print(json.dumps([findings(call, label, target) for call, label in calls.items()]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
