# SPDX-License-Identifier: Apache-2.0
"""Compile every variant of the kernels for one target, with no device, and print the findings as JSON.

Runs as a program of its own (`compile_variants.py cuda:90:32`): under `TRITON_INTERPRET=1` the decorated
functions are the interpreter's, and cannot be compiled. `TRITON_DUMP_PTXAS_LOG=1` and an empty cache folder
give the assembler's report.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import re
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


# Odd and narrow; many rows to a program; one block of columns; several blocks.
WIDTHS = (7, 128, 4096, 32768)
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Variant:
    """One specialisation: the kernel's arguments by kind, and how it is launched."""

    name: str
    kernel: str
    pointers: dict[str, str | None]
    aligned: bool
    warps: int
    constants: dict[str, int]


def variants(warp_size: int) -> list[Variant]:
    """The forms of each kernel at the widths that differ in their launch."""
    from liger_kernels.swiglu import BIAS_REDUCE, choose_launch

    forms: list[tuple[str, str, str, dict[str, str | None]]] = []
    nothing: dict[str, str | None] = {"bias": None, "weights": None}
    forward = {**nothing, "y": "x", "out": "x"}
    forms += [
        ("forward", "swiglu_forward_kernel", "forward", forward),
        ("forward, bias", "swiglu_forward_kernel", "forward", {**forward, "bias": "x"}),
        ("forward, weights", "swiglu_forward_kernel", "forward", {**forward, "weights": "fp32"}),
    ]
    backward = {**nothing, "y": "x", "dout": "x", "dy": "x", "dweights": None}
    weighted = {**backward, "weights": "fp32", "dweights": "fp32"}
    forms += [
        ("backward", "swiglu_backward_kernel", "backward", backward),
        ("backward, frozen bias", "swiglu_backward_kernel", "backward", {**backward, "bias": "x"}),
        ("backward, weights", "swiglu_backward_kernel", "backward", weighted),
        ("backward, frozen weights", "swiglu_backward_kernel", "backward", {**weighted, "dweights": None}),
        ("backward, weights only", "swiglu_backward_kernel", "backward", {**weighted, "dy": None}),
    ]
    bias = {"y": "x", "bias": "x", "dout": "x", "dy": "x", "partials": "fp32"}
    forms += [
        ("backward, bias", "swiglu_bias_backward_kernel", "bias_backward", bias),
        ("backward, bias only", "swiglu_bias_backward_kernel", "bias_backward", {**bias, "dy": None}),
    ]

    found = []
    for n, (dtype, size), (name, kernel, kind, pointers) in itertools.product(WIDTHS, DTYPES.items(), forms):
        if dtype != "bf16" and (n != max(WIDTHS) or (dtype == "fp16" and "," in name)):
            continue
        launch = choose_launch(kind, n, size, warp_size)
        constants = {"ROWS": launch.rows, "BLOCK": launch.block}
        if kind == "bias_backward":
            constants["STAGES"] = launch.stages
        if launch.column_blocks(n) == 1:
            constants["column_blocks"] = 1
        typed = {k: dtype if v == "x" else v for k, v in pointers.items()}
        found.append(Variant(f"{name}, n={n}, {dtype}", kernel, typed, n % 16 == 0, launch.warps, constants))
    for dtype in ("bf16", "fp32"):
        constants = {"ROWS": BIAS_REDUCE.rows, "BLOCK": BIAS_REDUCE.block}
        pointers = {"partials": "fp32", "dbias": dtype}
        found.append(
            Variant(
                f"bias reduce, {dtype}",
                "swiglu_bias_reduce_kernel",
                pointers,
                True,
                BIAS_REDUCE.warps,
                constants,
            )
        )
    seen = {}
    for variant in found:
        seen.setdefault(repr(replace(variant, name="")), variant)
    return list(seen.values())


# Arguments that Triton specialises only on the width of the integer.
UNSPECIALISED = ("rows", "splits")


def build(variant: Variant, target: Any) -> Any:
    """The variant, compiled."""
    import triton
    from liger_kernels import swiglu
    from triton.compiler import ASTSource

    kernel = getattr(swiglu, variant.kernel)
    signature, constants, attributes = {}, dict(variant.constants), {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in variant.pointers:
            dtype = variant.pointers[name]
            signature[name] = "constexpr" if dtype is None else f"*{dtype}"
            if dtype is None:
                constants[name] = None
            else:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if variant.aligned and name not in UNSPECIALISED and name != "column_blocks":
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options={"num_warps": variant.warps})


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


def main(target_name: str) -> None:
    spec = importlib.util.spec_from_file_location(
        "liger_kernels", ROOT / "kernels" / "__init__.py", submodule_search_locations=[str(ROOT / "kernels")]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["liger_kernels"] = module
    spec.loader.exec_module(module)
    from triton.backends.compiler import GPUTarget

    backend, arch, warp_size = target_name.split(":")
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp_size))
    results = []
    for variant in variants(target.warp_size):
        log = io.StringIO()
        with redirect_stdout(log):
            assembly = build(variant, target).asm
        text = assembly["amdgcn" if backend == "hip" else "ptx"]
        spilled, registers = spills(assembly, log.getvalue())
        results.append(
            {
                **asdict(variant),
                "float64": bool(re.search(r"\.f64|_f64", text) or re.search(r"\bf64\b", assembly["ttgir"])),
                "spilled": spilled,
                "registers": registers,
                # 16 bytes at once: to or from global memory, or on their way to shared memory when loads are
                # staged
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
    main(sys.argv[1])
