# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel launch of cross-entropy for one target, with no device; findings are printed as JSON.

Runs as a program of its own, like `compile_variants.py` and for its reasons. The public function runs on CPU
tensors with each kernel replaced by a recorder, and what its launchers pass is compiled.
"""

from __future__ import annotations

import importlib.util
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed
from compile_variants import ROOT, spills

# Many rows to a program, whole and with lanes that hold nothing; odd, no wide access; one tile to a row; a
# pipeline of tiles, with and without a masked part.
WIDTHS = (1, 5, 128, 1025, 4096, 20480, 151936)
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64"}


@dataclass(frozen=True)
class Call:
    """A kernel as a launcher calls it, specialised as Triton does."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[int, ...]
    warps: int


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
            self.kernel, tuple(signature.items()), tuple(constants.items()), tuple(divisible), num_warps
        )
        self.calls.setdefault(call, f"{self.kernel.fn.__name__}: {self.label}")


class Group:
    """Of two ranks, seen from the second."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def cases(ce: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    for columns in WIDTHS:
        for dtype, name in TYPES.items():
            # float16 differs from bfloat16 in the conversion only
            if dtype == torch.int64 or (dtype != torch.bfloat16 and columns != 151936):
                continue
            plain = columns in (1, 20480) or dtype == torch.float16
            for smoothing in (0.0,) if plain else (0.0, 0.1):
                label = f"columns={columns}, {name}, smoothing={smoothing}"
                yield label, partial(step, ce, columns, dtype, label_smoothing=smoothing)
    for smoothing, scope in ((0.0, "global"), (0.1, "global"), (0.1, "partition")):
        options = {"group": Group(), "label_smoothing": smoothing, "label_smoothing_scope": scope}
        yield (
            f"two ranks, columns=18992, bf16, smoothing={smoothing}",
            partial(step, ce, 18992, torch.bfloat16, **options),
        )


def step(ce: Any, columns: int, dtype: torch.dtype, **options: Any) -> None:
    logits = torch.empty(6, 2, columns, dtype=dtype, requires_grad=True)
    loss = ce.vocab_parallel_cross_entropy(logits, torch.zeros(6, 2, dtype=torch.int64), **options)
    loss.backward(torch.ones(2, 6).t())


def record(ce: Any, warp_size: int) -> dict[Call, str]:
    """Every launch for vocabularies of all widths, with a label."""
    ce.choose_tile = partial(ce.choose_tile, warp_size=warp_size)
    torch.distributed.all_gather_into_tensor = lambda *args, **kwargs: None
    calls: dict[Call, str] = {}
    recorders = [
        (name, Recorder(kernel, calls)) for name, kernel in vars(ce).items() if name.endswith("_kernel")
    ]
    for name, recorder in recorders:
        setattr(ce, name, recorder)
    for label, function in cases(ce):
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


def load() -> Any:
    spec = importlib.util.spec_from_file_location(
        "liger_kernels", ROOT / "kernels" / "__init__.py", submodule_search_locations=[str(ROOT / "kernels")]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["liger_kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["liger_kernels"])
    from liger_kernels import cross_entropy

    return cross_entropy


def main(target_name: str) -> None:
    backend, arch, warp_size = target_name.split(":")
    calls = record(load(), int(warp_size))
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
                "aligned": "columns" in {call.kernel.arg_names[index] for index in call.divisible},
                "constants": {k: v for k, v in call.constants if isinstance(v, int)},
                "float64": bool(re.search(r"\.f64|_f64", text) or re.search(r"\bf64\b", assembly["ttgir"])),
                "float_atomics": bool(re.search(r"(?:atom|red)\.\S*\.b?f\d|atomic_\w*_f\d", text)),
                "spilled": spilled,
                "registers": registers,
                "shared": compiled.metadata.shared,
                "exponentials": len(re.findall(r"ex2\.approx|v_exp_f32", text)),
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
