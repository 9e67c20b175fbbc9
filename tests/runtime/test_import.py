# SPDX-License-Identifier: Apache-2.0
"""The import contract: no Triton, no device, never half of the overlay. And what lies under the kernels."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from .conftest import DEVICE, KERNELS, Python

# Upstream's own modules may import Triton (through torch.compile), so: ours have not, at any import of it.
IMPORT = """
import sys, traceback

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            files = [frame.filename for frame in traceback.extract_stack()]
            own = [f for f in files if "/megatron/core/liger/" in f or f.endswith("fused_bias_swiglu.py")]
            assert not own, own
        return None

sys.meta_path.insert(0, Watch())
import torch
for name in ("_lazy_init", "is_available", "device_count", "current_device"):
    def touched(*_, __name=name):
        files = [frame.filename for frame in traceback.extract_stack()]
        own = [f for f in files if "/megatron/core/liger/" in f]
        assert not own, (__name, own)
        return 0
    setattr(torch.cuda, name, touched)
import megatron.core.fusions.fused_bias_swiglu as fused
assert not any(name.startswith("megatron.core.liger.kernels") for name in sys.modules)
assert not torch.cuda.is_initialized()
from megatron.core.liger import counters
assert counters()["swiglu"]["launches"] == {}
print("imported", fused.bias_swiglu_impl.__module__)
"""


def test_import_needs_neither_triton_nor_device(python: Python) -> None:
    assert python(code=IMPORT).stdout == "imported megatron.core.fusions.fused_bias_swiglu\n"


def test_without_triton_and_without_interpreter(python: Python) -> None:
    """A machine without Triton runs upstream's code and says why; so does a CPU without the interpreter."""
    code = """
import sys, torch
if {missing}:
    sys.modules["triton"] = None
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, _upstream_bias_swiglu_impl
from megatron.core.liger import counters
x = torch.randn(3, 8)
assert torch.equal(bias_swiglu_impl(x, None), _upstream_bias_swiglu_impl(x, None))
print(counters()["swiglu"]["entries"]["bias_swiglu_impl"])
"""
    for missing, reason, interpret in (
        (True, "Triton cannot be imported", "1"),
        (False, "a CPU tensor without TRITON_INTERPRET=1", "0"),
    ):
        done = python(code=code.format(missing=missing), TRITON_INTERPRET=interpret)
        assert f"{{'kernel': 0, 'off': 0, 'upstream': {{{reason!r}: 1}}}}" in done.stdout
        assert f"swiglu upstream ({reason})" in done.stdout.partition(" | torch ")[0]
        assert done.stderr.count(f"swiglu: bias_swiglu_impl runs upstream's code: {reason}") == 1


@pytest.fixture
def copy(overlaid_tree: Path, tmp_path: Path) -> Path:
    """A copy of the overlaid tree to damage."""
    return Path(shutil.copytree(overlaid_tree, tmp_path / "copy"))


def remove(package: Path) -> None:
    shutil.rmtree(package)


def remove_a_module(package: Path) -> None:
    (package / "swiglu.py").unlink()


def remove_init(package: Path) -> None:
    """What is left is a namespace package, which Python would import."""
    (package / "__init__.py").unlink()


def empty_init(package: Path) -> None:
    (package / "__init__.py").write_text("", encoding="utf-8")


def empty_activations(package: Path) -> None:
    (package / "activations.py").write_text("", encoding="utf-8")


def empty_job(package: Path) -> None:
    (package / "job.py").write_text("", encoding="utf-8")


def spoil(package: Path) -> None:
    (package / "dispatch.py").write_text("import a_module_that_nobody_has\n", encoding="utf-8")


def cut_short(package: Path) -> None:
    data = (package / "norms.py").read_bytes()
    (package / "norms.py").write_bytes(data[: data.index(b"class TakenOver") + 20])


def mix(package: Path) -> None:
    """A module of a version in which another one's name is not there yet."""
    path = package / "settings.py"
    path.write_text(
        path.read_text(encoding="utf-8").replace("LABEL_SMOOTHING", "SMOOTHING"), encoding="utf-8"
    )


DAMAGED = ("RuntimeError: the liger overlay in ", "/megatron/core/liger cannot be imported (")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove, ("ModuleNotFoundError: No module named 'megatron.core.liger'",)),
        (remove_a_module, (*DAMAGED, "megatron.core.liger.swiglu")),
        (remove_init, ("RuntimeError: the liger overlay in ", "/liger has lost its __init__.py")),
        (empty_init, ("RuntimeError: the liger overlay in ", "/liger has lost its __init__.py")),
        (empty_activations, (*DAMAGED, "cannot import name 'GEGLU'")),
        (empty_job, (*DAMAGED, "AttributeError")),
        (spoil, (*DAMAGED, "a_module_that_nobody_has", "revert it")),
        (cut_short, (*DAMAGED, "IndentationError", "norms.py")),
        (mix, (*DAMAGED, "ImportError: cannot import name 'LABEL_SMOOTHING'")),
    ],
)
def test_never_half(
    python: Python, copy: Path, damage: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    """The import of Megatron-Core stops, and says at what."""
    damage(copy / "megatron/core/liger")
    code = """
import sys
try:
    import megatron.core.fusions.fused_bias_swiglu
except Exception as error:
    print(f"{type(error).__name__}: {error}")
assert "megatron.core.fusions.fused_bias_swiglu" not in sys.modules
"""
    done = python(code=code, tree=copy)
    for word in words:
        assert word in done.stdout


def empty_a_module(package: Path) -> None:
    """The last that the package imports."""
    (package / "version.py").write_text("", encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "switch", "words"),
    [(empty_a_module, "1", DAMAGED), (lambda package: None, "swiglu", ("SettingsError: LIGER_MEGATRON",))],
    ids=["damaged", "not installed"],
)
def test_a_second_import_is_refused_too(
    python: Python,
    release_tree: Callable[..., Path],
    damage: Callable[[Path], None],
    switch: str,
    words: tuple[str, ...],
) -> None:
    """Of a caller who passes over the first refusal: a library that tries, a notebook's cell run twice."""
    tree = release_tree("norms", "cross_entropy")
    damage(tree / "megatron/core/liger")
    code = """
for name in ("transformer.torch_norm", "fusions.fused_cross_entropy", "transformer.torch_norm"):
    try:
        __import__(f"megatron.core.{name}")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""
    done = python(code=code, tree=tree, LIGER_MEGATRON=switch)
    for word in words:
        assert done.stdout.count(word) == 3


def test_norms_are_never_half(python: Python, release_tree: Callable[..., Path]) -> None:
    """Upstream takes an ImportError of a norm for an Apex that is not there, and goes on without."""
    tree = release_tree("norms")
    spoil(tree / "megatron/core/liger")
    code = """
import sys, types
sys.modules["apex"] = types.ModuleType("apex")
import megatron.core.models.gpt
"""
    done = python(code=code, tree=tree, expect=1)
    assert "RuntimeError: the liger overlay in " in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("module", "data", "words"),
    [("launches.py", None, "No module named"), ("gated.py", b"", "has no attribute 'swiglu'")],
    ids=["missing", "empty"],
)
def test_kernels_that_cannot_be_imported(
    python: Python, copy: Path, module: str, data: bytes | None, words: str
) -> None:
    """Said at the first call, which runs nothing; an op that is off misses nothing."""
    path = copy / "megatron/core/liger/kernels" / module
    path.unlink() if data is None else path.write_bytes(data)
    code = f"""
import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer import TransformerConfig
config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, normalization="RMSNorm")
WrappedTorchNorm(config, 8).to({DEVICE})(torch.ones(2, 8, device={DEVICE}))
print("went on", flush=True)
bias_swiglu_impl(torch.ones(2, 8, device={DEVICE}), None)
"""
    done = python(code=code, tree=copy, expect=1, **KERNELS, LIGER_MEGATRON="-norms")
    assert "went on" in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: swiglu: the liger overlay's kernels in ")
    assert words in last
    assert "LIGER_MEGATRON=-swiglu" in last


@pytest.fixture
def dispatch(liger: ModuleType) -> ModuleType:
    return importlib.import_module("megatron.core.liger.dispatch")


def a_triton(version: str, interpret: bool = False) -> Any:
    return SimpleNamespace(
        __version__=version, knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=interpret))
    )


@pytest.mark.parametrize(
    ("triton", "torch_version", "hip", "cuda", "cpu"),
    [
        ("3.2.0", "2.6.0", None, None, "a CPU tensor without TRITON_INTERPRET=1"),
        ("3.10.0+git1", "2.10.0a0+nv", None, None, "a CPU tensor without TRITON_INTERPRET=1"),
        ("3.1.0", "2.6.0", None, "Triton is older than 3.2", "Triton is older than 3.2"),
        ("2.9.9", "2.6.0", None, "Triton is older than 3.2", "Triton is older than 3.2"),
        ("3.2.0", "2.5.1+cu124", None, "torch is older than 2.6", "torch is older than 2.6"),
        ("3.2.0", "1.13.0", None, "torch is older than 2.6", "torch is older than 2.6"),
        ("3.2.0", "2.6.0", "6.2", "ROCm has not been measured", "ROCm has not been measured"),
        (None, "2.6.0", None, "Triton cannot be imported", "Triton cannot be imported"),
    ],
)
def test_platforms(
    dispatch: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    triton: str | None,
    torch_version: str,
    hip: str | None,
    cuda: str | None,
    cpu: str | None,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None if triton is None else a_triton(triton))
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.version, "hip", hip)
    platform = dispatch.Platform()
    assert platform.triton == triton
    assert platform.unusable("cuda") == cuda
    assert platform.unusable("cpu") == cpu
    assert platform.unusable("xpu") == "a tensor on a device that is neither CUDA nor CPU"


@pytest.mark.parametrize("value", ["0", "1"])
def test_interpreter(dispatch: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """With Triton's knobs, and with a Triton that has none yet."""
    monkeypatch.setenv("TRITON_INTERPRET", value)
    on = value == "1"
    for triton in (a_triton("3.6.0", interpret=on), SimpleNamespace(__version__="3.2.0")):
        monkeypatch.setitem(sys.modules, "triton", triton)
        platform = dispatch.Platform()
        assert platform.interpreted is on
        assert (platform.unusable("cpu") is None) is on
        assert platform.unusable("cuda") is None
