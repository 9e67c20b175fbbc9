# SPDX-License-Identifier: Apache-2.0
"""What every test shares: the import of the project's two folders, the device, the release's two trees."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
RELEASE = "megatron==0.16.1"


def _register(name: str, folder: Path) -> None:
    """Import the package in ``folder`` as ``name`` without its parent on ``sys.path``."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


# With the root on sys.path the folder kernels/ would shadow the package of that name that others probe.
sys.path[:] = [p for p in sys.path if Path(p or os.getcwd()).resolve() != ROOT]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # before Triton is first imported: it decides when a kernel is decorated
    )

_register("scripts", ROOT / "scripts")
_register("liger_kernels", ROOT / "kernels")

if os.environ.get("TRITON_INTERPRET") == "1":
    from scripts import interpreter

    interpreter.convert_as_compiled()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--upstream-tests",
        metavar="PATH",
        help="a Megatron-LM checkout of the release: run its own unit tests, overlaid, on a GPU",
    )
    parser.addoption(
        "--clone",
        metavar="PATH",
        help="a Megatron-LM clone with the releases' tags: lay the overlay over a checkout of each",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = {}
    if not torch.cuda.is_available():
        lacking["gpu"] = "needs a GPU"
    if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        lacking["reuse"] = "needs torch 2.8"
    for item in items:
        for name, reason in lacking.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header() -> str:
    import triton

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, Triton's interpreter"
    return f"kernels run on: {where}; torch {torch.__version__}, triton {triton.__version__}"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, else the CPU in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _tree(tmp_path_factory: pytest.TempPathFactory, *, overlaid: bool) -> Path:
    from scripts.apply import build_tree
    from scripts.manifest import load
    from scripts.overlay import load_overlay

    dest = tmp_path_factory.mktemp("overlaid" if overlaid else "pristine") / "tree"
    return build_tree(load().release(RELEASE), load_overlay().ops, dest, overlaid=overlaid)


@pytest.fixture(scope="session")
def pristine_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Megatron-Core of the release as upstream ships it."""
    return _tree(tmp_path_factory, overlaid=False)


@pytest.fixture(scope="session")
def overlaid_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same release with every op of the overlay applied."""
    return _tree(tmp_path_factory, overlaid=True)
