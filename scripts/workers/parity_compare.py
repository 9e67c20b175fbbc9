# SPDX-License-Identifier: Apache-2.0
"""Compare the two results of parity's cases with each other and with float64.

The measure is the largest absolute error of a tensor. A kernel computes in float32 and rounds once, and no
result in the dtype can be nearer to the truth than the rounded truth; so its largest error can exceed that of
upstream, which rounds at least as often, only by the error of the float32 arithmetic itself. That is all that
is allowed on top: ``ULPS`` units of float32 at the size of the largest true value. A module whose other
operations round in the dtype has in addition the share of the pristine error that its case names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from scripts.workers import step
from scripts.workers.cases import Case, Tensors, chosen, short

ULPS = 8 * 2.0**-23
# The worst error of a model's step here, of the worst upstream's: both are the end of some hundred float32
# roundings in another order. A norm with another eps or a layer left out is off by four orders more.
STEP_FACTOR = 4.0


def main(argv: list[str]) -> int:
    """Compare the results that the plan in ``argv[0]`` names and leave the rows as the report."""
    plan = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    before = torch.load(plan["pristine"], weights_only=True)
    after = torch.load(plan["overlaid"], weights_only=True)
    rows = [_compare(case, before[case.id], after[case.id]) for case in chosen(plan["calls"])]
    rows.append(_compare_step(before[step.NAME], after[step.NAME], plan["ops"]))
    report = Path(plan["folder"]) / f"rank{os.environ['RANK']}.json"
    report.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    return 0


def _compare(case: Case, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """One row: errors as shares of the largest true value, launches, and every problem found."""
    problems: list[str] = []
    row: dict[str, Any] = {
        "id": case.id,
        "op": case.op,
        "entry": case.entry,
        "dtype": short(case.dtype),
        "pristine": 0.0,
        "overlaid": 0.0,
        "problems": problems,
        "served": "raises" if case.raises else "upstream" if case.fallback else "kernel",
        "launches": 0,
        "reasons": [],
        "deviates": {},
    }
    if before["missing"] or after["missing"]:
        if before["missing"] is not after["missing"]:
            problems.append(f"only the {'overlaid' if before['missing'] else 'pristine'} tree has this call")
        row["served"] = "missing"
        return row
    _errors(case, before["error"], after["error"], problems)
    row["launches"], row["reasons"] = _counts(case, after.get("counters"), problems)
    row["deviates"] = dict(case.deviates)
    if after["error"] is None and not case.raises:
        _properties(case, before, after, problems)
        _overwritten(case, before["overwritten"], after["overwritten"], problems)
        _values(case, before, after, row)
    return row


def _compare_step(before: dict[str, Any], after: dict[str, Any], ops: list[str]) -> dict[str, Any]:
    """The row of a model's step: each loss and gradient against float64, who ran it, the norms' classes.

    Which tensor is further off is chance, so each of ours is held against the worst of upstream's.
    """
    problems: list[str] = []
    row: dict[str, Any] = {
        "id": step.NAME,
        "op": "model",
        "entry": "GPTModel",
        "dtype": "fp32",
        "pristine": 0.0,
        "overlaid": 0.0,
        "problems": problems,
        "served": "kernel",
        "launches": 0,
        "reasons": [],
        "deviates": {},
    }
    problems += [
        f"{tree}: {r['error']}" for tree, r in (("upstream", before), ("here", after)) if "error" in r
    ]
    if problems:
        return row
    truth, theirs, ours = before["fp64"]["tensors"], before["fp32"]["tensors"], after["fp32"]["tensors"]
    if truth.keys() != ours.keys():
        problems.append(f"results are of {sorted(truth.keys() ^ ours.keys())} in one tree only")
        return row
    row["pristine"] = max(_share(theirs[name], truth[name]) for name in truth)
    limit = STEP_FACTOR * row["pristine"] + ULPS
    for name in truth:
        row["overlaid"] = _max(row["overlaid"], error := _share(ours[name], truth[name]))
        if not error <= limit:
            problems.append(f"{name}: error {error:.2e} of the largest value, limit {limit:.2e}")
    norms = after["fp32"]["norms"]
    there = step.FINAL_NORM in after["fp32"]["patched"]
    wanted = {
        name: step.OURS if "norms" in ops and (there or not was.startswith("transformer_engine")) else was
        for name, was in before["fp32"]["norms"].items()
    }
    problems += [
        f"{name} is {norms.get(name)}, not {right}"
        for name, right in wanted.items()
        if norms.get(name) != right
    ]
    tied = step.BACKENDS in after["fp32"]["patched"] and after["fp32"]["asked"]
    heads = [name for name in norms if name.rpartition(".")[2] in step.RESIDUAL_SLOTS] if tied else []
    if after["fp32"]["tied"] != sorted(heads):
        problems.append(
            f"the norms that give their residual are {after['fp32']['tied']}, not {sorted(heads)}"
        )
    _count_step(after["fp32"]["counters"], ops, [*norms.values()].count(step.OURS), row)
    return row


def _count_step(counters: Any, ops: list[str], norms: int, row: dict[str, Any]) -> None:
    for op, wanted in step.expected_calls(ops, norms).items():
        entries = counters[op]["entries"]
        for name, calls in wanted.items():
            found = sum(entries[n]["kernel"] for n in name.split(" or ") if n in entries)
            if found != calls:
                row["problems"].append(f"{found} calls of {name} on the kernel, not {calls}")
        left = {n: e["upstream"] for n, e in entries.items() if e["upstream"] or e["off"]}
        if left:
            row["problems"].append(f"{op} left to upstream: {left}")
        row["launches"] += sum(counters[op]["launches"].values())


def _share(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest error of a tensor over its largest true value."""
    return (found.double() - truth.double()).abs().max().item() / (truth.abs().max().item() or 1.0)


def _errors(case: Case, before: Any, after: Any, problems: list[str]) -> None:
    if case.raises:
        if before is None:
            problems.append("upstream raises no error")
        if before != after:
            problems.append(f"error {after} instead of {before}")
        return
    if case.upstream_raises and before is None:
        problems.append("upstream raises no error here any more: compare the case like the others")
    if before is not None and not case.upstream_raises:
        problems.append(f"upstream raises {before}")
    if after is not None:
        problems.append(f"raises {after}")


def _counts(case: Case, counters: Any, problems: list[str]) -> tuple[int, list[str]]:
    """Check who served the call; returns the number of launches and why any was left to upstream."""
    if not counters:
        problems.append(f"the overlaid tree counts nothing for {case.op}")
        return 0, []
    launches: dict[str, int] = counters["launches"]
    if case.raises:
        return sum(launches.values()), []
    if launches != dict(case.kernels):
        problems.append(f"launches {launches} instead of {dict(case.kernels)}")
    calls = list(counters["entries"].values())
    reasons = [reason for call in calls for reason, n in call["upstream"].items() for _ in range(n)]
    expected = [case.fallback] if case.fallback else []
    if reasons != expected:
        problems.append(f"left to upstream for {reasons} instead of {expected}")
    served = sum(call["kernel"] for call in calls)
    if served != (0 if case.fallback else 1) or any(call["off"] for call in calls):
        problems.append(f"{served} calls on the kernel")
    return sum(launches.values()), reasons


def _properties(case: Case, before: dict[str, Any], after: dict[str, Any], problems: list[str]) -> None:
    for name, ours in after["properties"].items():
        if ours and not case.is_layer and not case.fallback and not ours["owns storage"]:
            problems.append(f"{name} is a view, or shares its storage")
        theirs = before["properties"].get(name, ours) if not case.upstream_raises else ours
        if ours is None or theirs is None:
            if ours is not theirs:
                problems.append(f"{name} is {ours} instead of {theirs}")
            continue
        problems += [
            f"{name}: {key} {ours[key]} instead of {theirs[key]}"
            for key in ("dtype", "shape")
            if ours[key] != theirs[key]
        ]
        if theirs["contiguous"] and not ours["contiguous"]:
            problems.append(f"{name} is not contiguous")
    if not case.upstream_raises and before["properties"].keys() != after["properties"].keys():
        problems.append(f"has {sorted(after['properties'])} instead of {sorted(before['properties'])}")


def _overwritten(case: Case, theirs: list[str], ours: list[str], problems: list[str]) -> None:
    """The overlay writes to no input, unless upstream serves the call; where upstream does, it is stated."""
    if case.fallback:
        if ours != theirs:
            problems.append(f"upstream, which served it, overwrites {ours} instead of {theirs}")
        return
    problems += [f"{name} is overwritten" for name in ours]
    if case.upstream_raises:
        return
    stated = [name for name in case.deviates if name != "out" and not name.startswith("d ")]
    problems += [f"upstream overwrites {name}, which is not stated" for name in theirs if name not in stated]
    problems += [f"upstream does not overwrite {name} any more" for name in stated if name not in theirs]


def _values(case: Case, before: dict[str, Any], after: dict[str, Any], row: dict[str, Any]) -> None:
    truths = _truth(case, after)
    for name, truth in truths.items():
        ours = after["tensors"].get(name)
        if ours is None or ours.shape != truth.shape:
            row["problems"].append(
                f"{name}: {'nothing' if ours is None else list(ours.shape)}, not {list(truth.shape)}"
            )
            continue
        if not truth.numel():
            continue
        scale = truth.abs().max().item() or 1.0
        error = (ours.double() - truth).abs().max().item()
        # Where upstream fails there is only the dtype itself to measure by.
        theirs = before["tensors"].get(name, truth.to(ours.dtype))
        reference = (theirs.double() - truth).abs().max().item()
        if deviation := case.deviates.get(name):
            off, reference = reference, (truth.to(ours.dtype).double() - truth).abs().max().item()
            if off <= reference + 2 * ULPS * scale:
                row["problems"].append(f"{name}: upstream is not off any more ({deviation})")
        limit = reference * (1 + case.slack) + ULPS * scale
        if case.upstream_raises or deviation:
            limit += ULPS * scale
        row["pristine"] = max(row["pristine"], reference / scale)
        row["overlaid"] = _max(row["overlaid"], error / scale)
        if case.fallback and not torch.equal(ours, theirs):
            row["problems"].append(f"{name} differs from upstream's, which served it")
        if not error <= limit:
            row["problems"].append(
                f"{name}: error {error / scale:.2e} of the largest value, limit {limit / scale:.2e}"
            )


def _max(a: float, b: float) -> float:
    return b if b != b else max(a, b)


def _truth(case: Case, after: dict[str, Any]) -> Tensors:
    """Output and gradients in float64, from the same numbers."""
    assert case.truth is not None
    cpu = torch.device("cpu")
    tensors = case.inputs(case.generator(), cpu)
    exact = {name: t.detach().double() for name, t in tensors.items()}
    out = case.truth(exact)
    truths = {"out": out}
    if case.grad_output is None:
        return truths
    wanted = [name for name, t in tensors.items() if t.requires_grad]
    exact = {
        name: t.clone().requires_grad_(name in wanted) for name, t in case.backward_inputs(exact).items()
    }
    gradient = case.output_gradient(out.shape, after["tensors"]["out"].dtype, cpu).double()
    gradients = torch.autograd.grad(case.truth(exact), [exact[name] for name in wanted], gradient)
    return truths | {f"d {name}": g for name, g in zip(wanted, gradients)}
