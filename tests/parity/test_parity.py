# SPDX-License-Identifier: Apache-2.0
"""Every overlaid entry against the pristine one, by the command's own functions; and that these can fail."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import __main__ as cli
from scripts import parity
from scripts.errors import StateError
from scripts.overlay import load_overlay
from scripts.workers import cases, parity_compare, step
from scripts.workers.entries import ENTRIES, NORM_SLOTS

FUSION = Path("megatron/core/fusions/fused_bias_swiglu.py")
KERNEL = Path("megatron/core/liger/kernels/gated.py")
OPS = load_overlay().ops


@pytest.fixture(scope="module")
def result(
    pristine_tree: Path, overlaid_tree: Path, device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> parity.Result:
    folder = tmp_path_factory.mktemp("parity")
    return parity.compare(pristine_tree, overlaid_tree, OPS, folder, device=device.type)


def test_the_overlaid_tree_computes_what_the_pristine_one_does(result: parity.Result) -> None:
    assert result.problems == []
    assert result.passed


def test_every_entry_of_every_op_ran_on_its_kernel_in_every_dtype(result: parity.Result) -> None:
    ran = {
        (row["entry"], row["dtype"]) for row in result.rows if row["served"] == "kernel" and row["launches"]
    }
    wanted = {(e.name, cases.short(dtype)) for e in ENTRIES if e.op in OPS for dtype in cases.DTYPES}
    assert wanted <= ran


def test_the_cases_reach_every_name_that_a_model_calls(result: parity.Result) -> None:
    reached = {row["id"].split(" ")[0] for row in result.rows}
    wanted = {
        f"{m.rpartition('.')[2]}.{e.name}" for e in ENTRIES if e.op in OPS for m in (e.module, *e.routes)
    }
    assert wanted <= reached


def test_the_table_names_every_entry_and_no_failure(result: parity.Result) -> None:
    text = "\n".join(parity.table(result))
    assert all(entry.name in text for entry in ENTRIES if entry.op in OPS)
    assert "FAILED" not in text


def _changed(tree: Path, folder: Path, file: Path, old: str, new: str) -> Path:
    """A copy of ``tree`` in which ``old``, which is in ``file`` once, is ``new``."""
    copy = folder / "changed"
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (copy / file).write_text(text.replace(old, new), encoding="utf-8")
    return copy


def _failures(pristine: Path, tree: Path, folder: Path, device: torch.device) -> list[str]:
    calls = {"swiglu": "few"}
    result = parity.compare(pristine, tree, OPS, folder / "parity", device=device.type, calls=calls)
    assert not result.passed
    assert "FAILED" in "\n".join(parity.table(result))
    return result.problems


def test_a_tail_that_was_not_applied_fails(
    pristine_tree: Path, overlaid_tree: Path, tmp_path: Path, device: torch.device
) -> None:
    copy = tmp_path / "changed"
    shutil.copytree(overlaid_tree, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(pristine_tree / FUSION, copy / FUSION)
    problems = _failures(pristine_tree, copy, tmp_path, device)
    assert any("is upstream in the overlaid tree, not ours" in problem for problem in problems)
    assert any("bias_swiglu_impl bf16: 2-D:" in problem for problem in problems)


def test_a_kernel_that_stores_nothing_fails(
    pristine_tree: Path, overlaid_tree: Path, tmp_path: Path, device: torch.device
) -> None:
    store = "tl.store(out + o_r * n + o_n, b_out.to(out.dtype.element_ty), mask=m)"
    tree = _changed(overlaid_tree, tmp_path, KERNEL, store, "pass")
    problems = _failures(pristine_tree, tree, tmp_path, device)
    assert any("2-D: out: error" in problem for problem in problems)


def test_a_gradient_of_the_wrong_sign_fails(
    pristine_tree: Path, overlaid_tree: Path, tmp_path: Path, device: torch.device
) -> None:
    tree = _changed(
        overlaid_tree,
        tmp_path,
        KERNEL,
        "b_dgate = b_dout * b_inner_up * (",
        "b_dgate = -b_dout * b_inner_up * (",
    )
    problems = _failures(pristine_tree, tree, tmp_path, device)
    assert all(": d " in problem for problem in problems)
    assert any("2-D: d input: error" in problem for problem in problems)


def test_a_changed_signature_and_a_public_name_fail(
    pristine_tree: Path, overlaid_tree: Path, tmp_path: Path, device: torch.device
) -> None:
    copy = tmp_path / "changed"
    shutil.copytree(overlaid_tree, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / FUSION).open("a", encoding="utf-8") as stream:
        stream.write("\n\nhelper = 1\n\n\ndef bias_swiglu_impl(input, bias):\n    return input\n")
    result = parity.compare(pristine_tree, copy, OPS, tmp_path / "parity", device=device.type, calls={})
    module = "megatron.core.fusions.fused_bias_swiglu"
    assert f"{module}.helper is new and public" in result.wiring
    assert any(problem.startswith(f"{module}.bias_swiglu_impl: signature") for problem in result.wiring)


def test_a_half_applied_tree_is_refused_by_that_name(
    pristine_tree: Path, overlaid_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(overlaid_tree, tmp_path / "tree")
    shutil.copyfile(pristine_tree / FUSION, tmp_path / "tree" / FUSION)
    assert cli.main(["parity", "--tree", str(tmp_path / "tree")]) == StateError.exit_code
    assert "half applied" in capsys.readouterr().err


def test_a_deviation_must_be_there_and_stated() -> None:
    """Where both trees give the same, a stated one is a failure; an input that is overwritten always is."""
    stated, same = (
        next(c for c in cases.cross_entropy(dtype) if c.entry.startswith("fused") and c.name == "[6, 2, 48]")
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert set(stated.deviates) == {"logits", "d logits"}
    assert not same.deviates

    def rows(case: cases.Case, theirs: list[str], ours: list[str]) -> list[str]:
        plain = {"dtype": cases.short(case.dtype), "shape": [6, 2, 48], "contiguous": True}
        out = {**plain, "dtype": "fp32", "shape": [6, 2], "owns storage": True}
        properties = {"out": out, "d logits": {**plain, "owns storage": True}}
        tensors = {"out": torch.zeros((6, 2)), "d logits": torch.zeros((6, 2, 48), dtype=case.dtype)}
        result = {"missing": False, "tensors": tensors, "properties": properties, "error": None}
        truths = parity_compare._truth(case, result)
        result["tensors"] = {name: truths[name].detach().to(t.dtype) for name, t in tensors.items()}
        entries = {case.entry: {"kernel": 1, "off": 0, "upstream": {}}}
        counters = {"launches": dict(case.kernels), "entries": entries}
        found: list[str] = parity_compare._compare(
            case,
            {**result, "overwritten": theirs},
            {**result, "overwritten": ours, "counters": counters},
        )["problems"]
        return found

    assert rows(same, [], []) == []
    assert rows(same, ["logits"], []) == ["upstream overwrites logits, which is not stated"]
    assert rows(same, [], ["logits"]) == ["logits is overwritten"]
    (problem,) = rows(stated, ["logits"], [])
    assert problem.startswith("d logits: upstream is not off any more")
    assert "upstream does not overwrite logits any more" in rows(stated, [], [])


@pytest.mark.parametrize("gone", ["pristine", "overlaid"])
def test_a_call_that_one_tree_alone_has_fails(gone: str) -> None:
    (case,) = cases.chosen({"swiglu": "few"})[:1]
    results = [{"missing": tree == gone} for tree in ("pristine", "overlaid")]
    row = parity_compare._compare(case, *results)
    assert row["problems"] == [
        f"only the {'overlaid' if gone == 'pristine' else 'pristine'} tree has this call"
    ]
    assert parity_compare._compare(case, {"missing": True}, {"missing": True})["problems"] == []


def _step(shift: float = 0.0, *, kernel: bool = False) -> dict[str, Any]:
    """What a model's step gives: off from the truth, 4, by 1e-6 and ``shift``."""
    names = [f"decoder.layers.0.{slot}" for slot in NORM_SLOTS]
    result = {
        "tensors": {"unfused loss": torch.tensor([4 + 1e-6 + shift])},
        "norms": dict.fromkeys(names, step.OURS if kernel else "torch.nn.RMSNorm"),
        "tied": [f"decoder.layers.0.{slot}" for slot in sorted(step.RESIDUAL_SLOTS)] if kernel else [],
        "asked": True,
    }
    if not kernel:
        truth = {**result, "tensors": {"unfused loss": torch.tensor([4.0], dtype=torch.float64)}}
        return {"fp32": result, "fp64": truth}
    counts = {
        op: {
            "launches": {f"{op}_forward": 1},
            "entries": {
                name.split(" or ")[0]: {"kernel": n, "off": 0, "upstream": {}} for name, n in wanted.items()
            },
        }
        for op, wanted in step.expected_calls(list(OPS), len(names)).items()
    }
    return {"fp32": {**result, "counters": counts, "patched": [step.FINAL_NORM, step.BACKENDS]}}


def test_a_models_step_that_is_right() -> None:
    assert set(step.expected_calls(list(OPS), 9)) == set(OPS)  # an op that joins says what it does there
    row = parity_compare._compare_step(_step(), _step(1e-6, kernel=True), list(OPS))
    assert row["problems"] == []
    assert (row["launches"], row["served"]) == (len(OPS), "kernel")


@pytest.mark.parametrize("there", [True, False])
def test_transformer_engines_final_norm_is_ours_where_the_call_site_is(there: bool) -> None:
    te = {"decoder.final_layernorm": "transformer_engine.pytorch.RMSNorm"}
    for ours in (True, False):
        before, after = _step(), _step(kernel=True)
        before["fp32"]["norms"] |= te
        after["fp32"]["norms"] |= dict.fromkeys(te, step.OURS) if ours else te
        after["fp32"]["patched"] = [step.BACKENDS, *([step.FINAL_NORM] if there else [])]
        for entry in after["fp32"]["counters"]["norms"]["entries"].values():
            entry["kernel"] += (len(step.LOSSES) + 1) * ours
        problems = parity_compare._compare_step(before, after, list(OPS))["problems"]
        assert [text.split(" is ")[0] for text in problems] == (
            ["decoder.final_layernorm"] if ours != there else []
        )


def _without(result: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    change(result["fp32"])
    return result


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda r: r["tensors"].update({"unfused loss": torch.tensor([4.001])}), "unfused loss: error 2.5"),
        (lambda r: r["tensors"].update({"unfused loss": torch.tensor([float("nan")])}), "error nan"),
        (lambda r: r["tensors"].clear(), "in one tree only"),
        (lambda r: r["norms"].update({"decoder.layers.0.q_layernorm": "torch.nn.RMSNorm"}), "q_layernorm is"),
        (lambda r: r["norms"].pop("decoder.layers.0.k_layernorm"), "k_layernorm is None"),
        (
            lambda r: r["counters"]["swiglu"]["entries"]["bias_swiglu_impl"].update(kernel=3),
            "3 calls of bias",
        ),
        (lambda r: r["tied"].pop(), "['decoder.layers.0.input_layernorm'], not ['decoder.layers.0.input_l"),
        (lambda r: r["patched"].remove(step.BACKENDS), "not []"),
        (lambda r: r.update(asked=False), "not []"),
        (lambda r: r["counters"]["norms"]["entries"].clear(), "0 calls of WrappedTorchNorm"),
        (
            lambda r: r["counters"]["norms"]["entries"]["WrappedTorchNorm"].update(upstream={"fp8": 1}),
            "norms left to upstream",
        ),
    ],
)
def test_a_models_step_that_is_wrong(change: Callable[[dict[str, Any]], object], problem: str) -> None:
    row = parity_compare._compare_step(_step(), _without(_step(kernel=True), change), list(OPS))
    assert any(problem in text for text in row["problems"]), row["problems"]
    for trees in (({"error": "x"}, _step(kernel=True)), (_step(), {"error": "x"})):
        assert len(parity_compare._compare_step(*trees, list(OPS))["problems"]) == 1


def test_a_few_cases_are_one_of_each_name_and_on_the_kernel() -> None:
    few = cases.chosen(dict.fromkeys(OPS, "few"))
    names = [(case.op, case.module, case.entry) for case in few]
    assert len(set(names)) == len(names)
    served = {(c.op, c.module, c.entry) for c in cases.all_cases(list(OPS)) if not (c.fallback or c.raises)}
    assert set(names) == served
    assert all(case.kernels and not case.fallback and not case.raises for case in few)
    with pytest.raises(RuntimeError, match="no such choice"):
        cases.chosen({"swiglu": "some"})
