# SPDX-License-Identifier: Apache-2.0
"""What all kernels' autograd functions do where inputs were copied and saved tensors come back changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from liger_kernels.cross_entropy import vocab_parallel_cross_entropy
from liger_kernels.gated import swiglu
from liger_kernels.linear_cross_entropy import linear_cross_entropy
from liger_kernels.norms import layer_norm, rms_norm

ROWS, N = 6, 8


def functions(device: torch.device) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    target = torch.tensor([0, 1, 2, 3, 4, 5], device=device)
    weight, bias = torch.rand(N, device=device), torch.rand(N, device=device)
    layer = torch.linspace(-1, 1, 9 * N, device=device).view(9, N).sin()
    return {
        "cross_entropy": lambda x: vocab_parallel_cross_entropy(x, target),
        "linear_cross_entropy": lambda x: linear_cross_entropy(x, layer, target),
        "rms_norm": lambda x: rms_norm(x, weight, 1e-5),
        "layer_norm": lambda x: layer_norm(x, weight, bias, 1e-5),
        "rms_norm, strided weight": lambda x: rms_norm(x, weight.repeat_interleave(2)[::2], 1e-5),
        "swiglu": swiglu,
    }


NAMES = (
    "cross_entropy",
    "linear_cross_entropy",
    "rms_norm",
    "layer_norm",
    "rms_norm, strided weight",
    "swiglu",
)


@pytest.mark.parametrize("layout", ["contiguous", "columns apart", "rows last"])
@pytest.mark.parametrize("name", NAMES)
def test_a_second_derivative_raises_whatever_was_copied(name: str, layout: str, device: torch.device) -> None:
    shape, view = {
        "contiguous": ((ROWS, N), lambda p: p),
        "columns apart": ((ROWS, 2 * N), lambda p: p[:, ::2]),
        "rows last": ((N, ROWS), lambda p: p.t()),
    }[layout]
    leaf = torch.randn(shape, device=device).requires_grad_()
    loss = functions(device)[name](view(leaf)).sum()
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        (loss + gradient.square().sum()).backward()


# Not the output layer's: for other strides a library's product adds in another order (its own tests have it).
@pytest.mark.parametrize("how", ["apart", "transposed"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "linear_cross_entropy"])
def test_saved_tensors_may_come_back_with_other_strides(name: str, how: str, device: torch.device) -> None:
    def apart(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, torch.full_like(x, 7)], -1)

    pack, unpack = {
        "apart": (apart, lambda x: x[..., 0]),
        "transposed": (lambda x: x.t().contiguous() if x.dim() == 2 else x, lambda x: x.t()),
    }[how]
    function = functions(device)[name]
    start = torch.randn(ROWS, N, device=device)
    dout = torch.randn_like(function(start))
    gradients = []
    for hooked in (False, True):
        leaf = start.clone().requires_grad_()
        if hooked:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = function(leaf * 1)
        else:
            out = function(leaf * 1)
        gradients.append(torch.autograd.grad(out, leaf, dout)[0])
    assert torch.equal(*gradients)


OPERANDS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "cross_entropy": (vocab_parallel_cross_entropy, ((ROWS, N), (ROWS,))),
    "linear_cross_entropy": (linear_cross_entropy, ((ROWS, 5), (N, 5), (ROWS,))),
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), ((ROWS, N), (N,))),
    "residual": (lambda x, w: sum(rms_norm(x, w, 1e-5, residual=True)), ((ROWS, N), (N,))),
    "layer_norm": (lambda x, w, b: layer_norm(x, w, b, 1e-5), ((ROWS, N), (N,), (N,))),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_pending_negation(name: str, device: torch.device) -> None:
    """A view whose sign is not in memory: every operand, and the output's gradient. Gated ones: their own."""
    function, shapes = OPERANDS[name]
    labels = name.endswith("cross_entropy")
    inputs = [torch.randn(shape, device=device) for shape in shapes]
    if labels:
        inputs[-1] = torch.arange(1, ROWS + 1, device=device)
    dout = torch.randn_like(function(*inputs))
    results = []
    for negate in (False, True):
        leaves = [(-x if negate else x.clone()) for x in inputs]
        trained = leaves[: len(leaves) - labels]
        for leaf in trained:
            leaf.requires_grad_()
        out = function(*(torch._neg_view(x) if negate else x for x in leaves))
        gradients = torch.autograd.grad(out, trained, torch._neg_view(-dout) if negate else dout)
        results.append([out, *(-x if negate else x for x in gradients)])
    for plain, negated in zip(*results):
        assert torch.equal(plain, negated)
