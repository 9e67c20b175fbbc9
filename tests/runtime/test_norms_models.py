# SPDX-License-Identifier: Apache-2.0
"""The norms in models of upstream's local specs: through every name, in every place, on one and two ranks."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.apply import apply_tree, build_tree
from scripts.manifest import load
from scripts.overlay import load_overlay

from .conftest import Python

PROGRAM = Path(__file__).with_name("norms_rank.py")

# Upstream's modules that keep a name of their own for the norm's class, and those names.
HOLDERS = {
    "megatron.core.models.backends": "LNImpl",
    "megatron.core.models.gpt.gpt_layer_specs": "LNImpl",
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs": "LNImpl",
    "megatron.core.models.multimodal.llava_spec": "LNImpl",
    "megatron.core.models.T5.t5_spec": "LNImpl",
    "megatron.core.models.vision.vit_layer_specs": "LNImpl",
    "megatron.core.models.bert.bert_layer_specs": "LNImpl",
    "megatron.core.transformer.transformer_block": "LayerNormImpl",
    "megatron.core.transformer.torch_layer_norm": "WrappedTorchLayerNorm",
    "megatron.core.models.bert.bert_lm_head": "LNImpl",
}

ROUTES = f"""
import importlib
from types import SimpleNamespace
HOLDERS = {HOLDERS!r}
classes = {{}}
for module, name in HOLDERS.items():
    classes[module] = getattr(importlib.import_module(module), name)
    print("route", module, classes[module].__name__)
backends = importlib.import_module("megatron.core.models.backends")
classes["first"] = backends.LocalSpecProvider().layer_norm()
classes["rms"] = backends.LocalSpecProvider().layer_norm(rms_norm=True, for_qk=True)
classes["then"] = backends.LocalSpecProvider().layer_norm()
for holder, cls in classes.items():
    for normalization in ("RMSNorm", "LayerNorm", "RMSNorm"):
        config = SimpleNamespace(normalization=normalization, sequence_parallel=True, persist_layer_norm=True,
                                 layernorm_zero_centered_gamma=True, memory_efficient_layer_norm=True)
        norm = cls(config=config, hidden_size=8, eps=1e-5)
        assert type(norm).__module__ == "megatron.core.liger.norms", (holder, type(norm))
        assert type(norm).__name__ == normalization, (holder, type(norm))
        assert all(parameter.sequence_parallel is True for parameter in norm.parameters()), holder
        assert norm.weight.tolist() == [0.0] * 8, holder
from megatron.core.models.bert.bert_lm_head import BertLMHead
from megatron.core.transformer import TransformerConfig
head = BertLMHead(8, TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1,
                                       persist_layer_norm=True, normalization="RMSNorm"))
assert type(head.layer_norm).__module__ == "megatron.core.liger.norms"
print("done")
"""


@pytest.mark.parametrize("apex", ["none", "without kernels", "whole"])
def test_every_name(python: Python, overlaid_tree: Path, tmp_path: Path, apex: str) -> None:
    """Whatever of Apex there is, and although upstream rebinds one of the names as it goes."""
    if apex != "none":
        (tmp_path / "apex/normalization").mkdir(parents=True)
        (tmp_path / "apex/__init__.py").touch()
    if apex == "whole":
        kernels = tmp_path / "apex/normalization/fused_layer_norm.py"
        kernels.write_text("class FusedLayerNormAffineFunction: ...\n", encoding="utf-8")
        (tmp_path / "apex/normalization/__init__.py").touch()
    done = python(code=ROUTES, PYTHONPATH=f"{overlaid_tree}{os.pathsep}{tmp_path}")
    assert done.stdout.splitlines()[-2 if "at exit" in done.stdout else -1] == "done"
    found = dict(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("route "))
    wanted = dict.fromkeys(HOLDERS, "WrappedTorchNorm" if apex == "none" else "FusedLayerNorm")
    wanted["megatron.core.transformer.torch_layer_norm"] = "WrappedTorchNorm"
    wanted["megatron.core.models.bert.bert_lm_head"] = (
        "FusedLayerNorm" if apex == "whole" else "WrappedTorchNorm"
    )
    assert found == wanted


OFF = """
from types import SimpleNamespace
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
def config(sequence_parallel):
    return SimpleNamespace(normalization="LayerNorm", sequence_parallel=sequence_parallel,
        persist_layer_norm=False, layernorm_zero_centered_gamma=False, memory_efficient_layer_norm=False)
print(type(WrappedTorchNorm(config(False), 8)))
for make in (lambda: WrappedTorchNorm(config(True), 8), lambda: FusedLayerNorm(config(False), 8)):
    try:
        make()
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_switched_off(python: Python) -> None:
    printed = python(code=OFF, LIGER_MEGATRON="-norms").stdout.splitlines()
    assert printed[:3] == [
        "<class 'torch.nn.modules.normalization.LayerNorm'>",
        "AssertionError sequence parallel not supported by torch LayerNorm",
        "ValueError Apex must be installed to use FusedLayerNorm.",
    ]


def run_ranks(
    folder: Path, tree: Path, ranks: int, plan: dict[str, dict[str, Any]], **environ: str
) -> list[dict[str, dict[str, Any]]]:
    """What ``norms_rank.py`` found on each rank."""
    folder.mkdir()
    torch.save(plan, folder / "plan")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LIGER_")}
    kept |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(tree), **environ}
    if torch.cuda.device_count() < ranks:
        kept |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    kept["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    processes = []
    for rank in range(ranks):
        with (folder / f"log{rank}").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", str(PROGRAM), str(rank), str(ranks), str(folder)],
                    env={**kept, "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    deadline = time.monotonic() + 170
    try:
        for rank, process in enumerate(processes):
            code = process.wait(max(deadline - time.monotonic(), 1))
            assert code == 0, (folder / f"log{rank}").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"result{rank}") for rank in range(ranks)]


RMS = {"mla": False, "normalization": "RMSNorm"}
LAYER = {"mla": False, "normalization": "LayerNorm"}
MLA = {"mla": True, "normalization": "RMSNorm"}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
# What upstream's local norms refuse.
REACH = {"persist_layer_norm": True, "memory_efficient_layer_norm": True}


def assert_gradients(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        scale = tensor.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=1e-5 * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


def places(mla: bool) -> set[str]:
    layers = ("decoder.layers.0", "mtp.layers.0.transformer_layer")
    attention = ("q_layernorm", "kv_layernorm" if mla else "k_layernorm")
    found = {f"{layer}.{place}" for layer in layers for place in ("input_layernorm", "pre_mlp_layernorm")}
    found |= {f"{layer}.self_attention.{place}" for layer in layers for place in attention}
    found |= {f"mtp.layers.0.{place}" for place in ("enorm", "hnorm", "final_layernorm")}
    return found | {"decoder.final_layernorm"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_models(overlaid_tree: Path, pristine_tree: Path, tmp_path: Path, ranks: int) -> None:
    """Losses and norms' gradients of pristine upstream; on two ranks ours run with sequence parallelism.

    After ``finalize_model_grads`` both ranks have the same gradients to the last bit. One run recomputes the
    input and pre-MLP norms, whose outputs upstream empties in between.
    """
    pristine = run_ranks(
        tmp_path / "pristine", pristine_tree, ranks, {"rms": RMS, "layer": LAYER, "mla": MLA}
    )
    for name, gradient in pristine[0]["mla"]["gradients"].items():
        if "q_layernorm" in name:
            # Without sequence parallelism upstream adds up the ranks' gradients, but each has the whole one.
            gradient /= ranks
    changes = {**REACH, "sequence_parallel": ranks > 1}
    plan = {
        "rms": {**RMS, **changes},
        "layer": {**LAYER, **changes},
        "mla": {**MLA, **changes},
        "mla recomputed": {**MLA, **changes, **RECOMPUTED},
    }
    results = run_ranks(tmp_path / "ranks", overlaid_tree, ranks, plan)
    for name in plan:
        wanted = pristine[0][name.split()[0]]
        for result in results:
            found = result[name]
            assert set(found["norms"]) == set(wanted["norms"]) == places(mla="mla" in name)
            kind = "LayerNorm" if name == "layer" else "RMSNorm"
            assert set(found["norms"].values()) == {f"megatron.core.liger.norms.{kind}"}
            assert set(wanted["norms"].values()) == {f"torch.nn.modules.normalization.{kind}"}
            assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert_gradients(found["gradients"], wanted["gradients"])
            for parameter, gradient in results[0][name]["gradients"].items():
                assert torch.equal(found["gradients"][parameter], gradient), parameter
            count = len(places(mla=True))
            again = 4 if "recomputed" in name else 0
            assert found["counts"]["launches"] == {
                "norm_forward": count + again,
                "norm_backward": count,
                "norm_reduce": count,
            }
            calls = found["counts"]["entries"]["WrappedTorchNorm"]
            assert calls == {"kernel": count + again, "off": 0, "upstream": {}}


FUSED = {**RMS, "num_layers": 2, "fused_residual_rmsnorm": True}
EXPERTS = {**FUSED, "num_moe_experts": 4, "moe_ffn_hidden_size": 12, "mtp_num_layers": None}
HEADS = {f"decoder.layers.{i}.{place}" for i in (0, 1) for place in ("input_layernorm", "pre_mlp_layernorm")}
HEADS_OF_MTP = {f"mtp.layers.0.mtp_model_layer.{place}" for place in ("input_layernorm", "pre_mlp_layernorm")}


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.2"])
def test_norms_that_give_their_residual(tmp_path: Path, version: str) -> None:
    """Layers take it, multi-token prediction's and those of experts too: upstream's losses and gradients.

    These releases free the residual with the output of a norm that they recompute: there, none is given.
    """
    release = load().release(f"megatron=={version}")
    plain, ours = (
        build_tree(release, ["norms"], tmp_path / name, overlaid=name == "ours", nearest=True)
        for name in ("plain", "ours")
    )
    plan = {
        "dense": FUSED,
        "experts": EXPERTS,
        "dense, off": {**FUSED, "fused_residual_rmsnorm": False},
        "dense, fp32": {**FUSED, "fp32_residual_connection": True},
        "dense, recomputed": {**FUSED, **RECOMPUTED},
    }
    (upstream,) = run_ranks(
        tmp_path / "of plain", plain, 1, {name: plan[name] for name in ("dense", "experts")}
    )
    (results,) = run_ranks(tmp_path / "of ours", ours, 1, plan)
    (off,) = run_ranks(tmp_path / "of off", ours, 1, {"dense": FUSED}, LIGER_MEGATRON="-norms")
    assert not upstream["dense"]["tied"] | upstream["experts"]["tied"] | off["dense"]["tied"]
    assert off["dense"]["loss"] == upstream["dense"]["loss"]
    for name, found in results.items():
        wanted = upstream[name.partition(",")[0]]
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert_gradients(found["gradients"], wanted["gradients"])
        assert_gradients({"": found["embeddings"]}, {"": wanted["embeddings"]})
        given = {"dense, off": set(), "dense, recomputed": set(), "experts": HEADS}
        assert found["tied"] == given.get(name, HEADS | HEADS_OF_MTP)
        entries = found["counts"]["entries"]
        assert entries["WrappedTorchNorm"]["upstream"] == {}
        count = len(wanted["norms"])
        assert found["counts"]["launches"] == {
            "norm_forward": count + (6 if "recomputed" in name else 0),
            "norm_backward": count,
            "norm_reduce": count,
        }
        if name == "dense, recomputed":
            ((reason, times),) = entries["LocalSpecProvider.layer_norm"]["upstream"].items()
            assert "recomputed" in reason
            assert times == 6
        elif "LocalSpecProvider.layer_norm" in entries:
            assert entries["LocalSpecProvider.layer_norm"]["upstream"] == {}


def test_a_recomputed_norm_that_gives_its_residual(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """The preview keeps the residual, and empties and fills the output alone."""
    clone = pytestconfig.getoption("--clone")
    if clone is None:
        pytest.skip("needs --clone PATH, a Megatron-LM clone with the preview's commit")
    manifest = load()
    (preview,) = manifest.previews.values()
    command = ["git", "-C", clone, "archive", "--format=tar", preview.commit, "megatron"]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    for name in ("plain", "ours"):
        with tarfile.open(fileobj=io.BytesIO(archive)) as sources:
            sources.extractall(tmp_path / name, filter="data")
    apply_tree(tmp_path / "ours", ("norms",), manifest, load_overlay(manifest=manifest))
    # Without TransformerEngine its heads of multi-token prediction cannot be built.
    dense = {**FUSED, "mtp_num_layers": None}
    plan = {"dense": dense, "experts": EXPERTS}
    (upstream,) = run_ranks(tmp_path / "of plain", tmp_path / "plain", 1, plan)
    recomputed = {name: {**settings, **RECOMPUTED} for name, settings in plan.items()}
    (results,) = run_ranks(tmp_path / "of ours", tmp_path / "ours", 1, recomputed)
    for name, found in results.items():
        assert found["tied"] == HEADS
        assert found["loss"] == pytest.approx(upstream[name]["loss"], rel=1e-5)
        assert_gradients(found["gradients"], upstream[name]["gradients"])
        assert_gradients({"": found["embeddings"]}, {"": upstream[name]["embeddings"]})
        count = len(found["norms"])
        assert found["counts"]["launches"] == {
            "norm_forward": count + len(HEADS),
            "norm_backward": count,
            "norm_reduce": count,
        }
