# SPDX-License-Identifier: Apache-2.0
"""``LigerMegatronCrossEntropy`` on one rank; test_cross_entropy_ranks.py has it on two."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from liger_kernels.cross_entropy import cross_entropy_reference


def make(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 2, 24, generator=generator).to(device).requires_grad_()
    target = torch.randint(24, (4, 2), generator=generator)
    target[1, 0] = -100
    return logits, target.to(device)


def counts(liger: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = liger.counters()["cross_entropy"]
    return {**found["entries"]["LigerMegatronCrossEntropy"], "launches": found["launches"]}


def test_signature(liger: ModuleType) -> None:
    defaults = {
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "reduction": "none",
        "label_smoothing_formula": "megatron",
        "label_smoothing_mode": "global",
    }
    parameters = inspect.signature(liger.LigerMegatronCrossEntropy).parameters
    assert {name: p.default for name, p in parameters.items()} == defaults
    forward = inspect.signature(liger.LigerMegatronCrossEntropy.forward).parameters
    assert list(forward) == ["self", "vocab_parallel_logits", "target", "tp_group"]
    module = liger.LigerMegatronCrossEntropy(3, 0.1, "sum", "pytorch", "partition")
    assert str(module) == (
        "LigerMegatronCrossEntropy(ignore_index=3, label_smoothing=0.1, reduction='sum', "
        "label_smoothing_formula='pytorch', label_smoothing_mode='partition')"
    )
    assert module.state_dict() == module.sharded_state_dict() == {}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_as_torch(
    liger: ModuleType, device: torch.device, smoothing: float, reduction: str, ignore_index: int
) -> None:
    logits, target = make(device)
    target = torch.where(target < 0, ignore_index, target)
    module = liger.LigerMegatronCrossEntropy(ignore_index, smoothing, reduction, "pytorch")
    loss = module(logits, target)
    exact = logits.detach().double().requires_grad_()
    right = F.cross_entropy(
        exact.flatten(0, 1),
        target.flatten(),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=smoothing,
    )
    if reduction == "none":
        right = right.view(4, 2)
    torch.testing.assert_close(loss.double(), right.detach(), rtol=1e-6, atol=1e-6, check_dtype=False)
    ours, theirs = (torch.autograd.grad(x.sum(), y)[0] for x, y in ((loss, logits), (right, exact)))
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    assert counts(liger) == {
        "kernel": 1,
        "off": 0,
        "upstream": {},
        "launches": {"cross_entropy_backward": 1, "cross_entropy_forward": 1},
    }


@pytest.mark.parametrize("mode", ["global", "partition"])
def test_megatrons_formula(liger: ModuleType, device: torch.device, mode: str) -> None:
    """Of one rank, both scopes are the whole vocabulary."""
    logits, target = make(device)
    loss = liger.LigerMegatronCrossEntropy(label_smoothing=0.2, label_smoothing_mode=mode)(logits, target)
    right = cross_entropy_reference(logits.detach().double(), target, label_smoothing=0.2)
    torch.testing.assert_close(loss.detach(), right.float(), rtol=1e-6, atol=1e-6)


def test_mean_of_nothing(liger: ModuleType, device: torch.device) -> None:
    logits, target = make(device)
    module = liger.LigerMegatronCrossEntropy(reduction="mean")
    assert module(logits, torch.full_like(target, -100)).isnan()


def test_one_label(liger: ModuleType, device: torch.device) -> None:
    logits = torch.ones(3, 1, device=device)
    target = torch.zeros(3, dtype=torch.int64, device=device)
    module = liger.LigerMegatronCrossEntropy(label_smoothing_formula="pytorch")
    assert not module(logits, target).any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("label_smoothing", 1.0),
        ("label_smoothing", -0.1),
        ("reduction", "avg"),
        ("label_smoothing_formula", "nemo"),
        ("label_smoothing_mode", "local"),
    ],
)
def test_wrong_arguments(liger: ModuleType, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*{value!r}"):
        liger.LigerMegatronCrossEntropy(**{name: value})


def test_wrong_shape(liger: ModuleType, device: torch.device) -> None:
    logits, target = make(device)
    with pytest.raises(ValueError, match=r"\[4, 2\], not \[8\]"):
        liger.LigerMegatronCrossEntropy()(logits, target.flatten())


def test_not_served(liger: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other code behind it, so it says why and what to use."""
    logits, target = make(device)
    module = liger.LigerMegatronCrossEntropy()
    with pytest.raises(RuntimeError, match=r"logits of a dtype other than .* fused_vocab_parallel"):
        module(logits.double(), target)
    with pytest.raises(RuntimeError, match="a group that is not"):
        module(logits, target, "group")
    monkeypatch.setattr(importlib.import_module("megatron.core.liger.cross_entropy").OP, "enabled", False)
    with pytest.raises(RuntimeError, match="off by LIGER_MEGATRON"):
        module(logits, target)
    assert counts(liger)["kernel"] == 0


def test_under_torch_compile(liger: ModuleType, device: torch.device) -> None:
    """The kernel runs between two graphs."""
    logits, target = make(device)
    module = liger.LigerMegatronCrossEntropy(reduction="mean")
    compiled = torch.compile(lambda x: module(x * 2, target) + 1, backend="eager")
    expected = module(logits * 2, target) + 1
    for _ in range(2):
        assert torch.equal(compiled(logits), expected)
    assert counts(liger)["kernel"] == 3
