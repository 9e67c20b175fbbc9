# SPDX-License-Identifier: Apache-2.0
"""What of two reports counts as wrong, and that it ends the command with 1; on reports made by hand."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts import pair, parity
from scripts.errors import UsageError
from scripts.workers.entries import ENTRIES

OPS = ("swiglu",)
SWIGLU = next(entry for entry in ENTRIES if entry.op == "swiglu")
OTHER = next(entry for entry in ENTRIES if entry.op != "swiglu")


def report(overlaid: bool) -> dict[str, Any]:
    def origin(op: str) -> str:
        return "ours" if overlaid and op in OPS else "upstream"

    return {
        "overlaid": overlaid,
        "wiring": {"first": None, "m": {"f": {"signature": "(x)", "module": "m"}, "_g": {"signature": "()"}}},
        "routes": {"a.f": True, "b.f": True},
        "entries": {e.name: {e.module: origin(e.op), "gone": "absent"} for e in ENTRIES},
        "bindings": {
            "a.f": {"op": "swiglu", "found": origin("swiglu")},
            "a.g": {"op": "norms", "found": "upstream"},
            "a.h": {"op": "swiglu", "found": "absent"},
        },
    }


Change = Callable[[dict[str, Any], dict[str, Any]], object]
WRONG: dict[str, tuple[Change, str]] = {
    "both are overlaid": (
        lambda b, a: b.update(overlaid=True),
        "the pristine tree has megatron.core.liger",
    ),
    "none is": (lambda b, a: a.update(overlaid=False), "the overlaid tree has no megatron.core.liger"),
    "a module that went": (lambda b, a: a["wiring"].update(m=None), "m is in one of the trees only"),
    "a module that came": (lambda b, a: a["wiring"].update(first={}), "first is in one of the trees only"),
    "a name that went": (lambda b, a: a["wiring"]["m"].pop("f"), "m.f is gone"),
    "a private name that went": (lambda b, a: a["wiring"]["m"].pop("_g"), "m._g is gone"),
    "a public name that came": (lambda b, a: a["wiring"]["m"].update(h={}), "m.h is new and public"),
    "a signature": (
        lambda b, a: a["wiring"]["m"]["f"].update(signature="(y)"),
        "m.f: signature is '(y)', was '(x)'",
    ),
    "a property that went": (
        lambda b, a: a["wiring"]["m"]["_g"].clear(),
        "m._g: signature is None, was '()'",
    ),
    "a route of theirs": (lambda b, a: b["routes"].pop("a.f"), "a.f is not the defining module's object"),
    "a route of ours": (
        lambda b, a: a["routes"].update({"a.f": "other"}),
        "a.f is not the defining module's object",
    ),
    "an entry that was not taken over": (
        lambda b, a: a["entries"][SWIGLU.name].update({SWIGLU.module: "upstream"}),
        f"{SWIGLU.name} through {SWIGLU.module} is upstream in the overlaid tree, not ours",
    ),
    "an entry through another module": (
        lambda b, a: a["entries"][SWIGLU.name].update(gone="upstream"),
        f"{SWIGLU.name} through gone is upstream in the overlaid tree, not ours",
    ),
    "an entry of an op that is not asked for": (
        lambda b, a: a["entries"][OTHER.name].update({OTHER.module: "ours"}),
        f"{OTHER.name} through {OTHER.module} is ours in the overlaid tree, not upstream",
    ),
    "an entry in the pristine tree": (
        lambda b, a: b["entries"][SWIGLU.name].update({SWIGLU.module: "ours"}),
        f"{SWIGLU.name} through {SWIGLU.module} is ours in the pristine tree, not upstream",
    ),
    "a binding that was not taken over": (
        lambda b, a: a["bindings"]["a.f"].update(found="upstream"),
        "a.f is upstream in the overlaid tree, not ours",
    ),
    "a binding of an op that is not asked for": (
        lambda b, a: a["bindings"]["a.g"].update(found="ours"),
        "a.g is ours in the overlaid tree, not upstream",
    ),
    "a binding that went": (
        lambda b, a: a["bindings"].pop("a.f"),
        "a.f is gone in the overlaid tree, not ours",
    ),
    "a binding that was nobody's": (
        lambda b, a: a["bindings"]["a.h"].update(found="ours"),
        "a.h is ours in the overlaid tree, not absent",
    ),
}


def test_what_is_right_is_no_problem() -> None:
    assert parity._wiring(report(False), report(True), OPS) == []
    after = report(True)
    after["wiring"]["m"]["_upstream_f"] = {}  # ours, and private
    assert parity._wiring(report(False), after, OPS) == []


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_problem(case: str) -> None:
    change, problem = WRONG[case]
    before, after = copy.deepcopy(report(False)), copy.deepcopy(report(True))
    change(before, after)
    assert parity._wiring(before, after, OPS) == [problem]


def row(*problems: str) -> dict[str, Any]:
    numbers = {"pristine": 0.0, "overlaid": 0.0, "launches": 1}
    names = {"id": "a call", "entry": "f", "dtype": "bf16", "served": "kernel"}
    return {**names, **numbers, "deviates": {}, "problems": list(problems)}


RESULTS: dict[str, tuple[parity.Result, int, str]] = {
    "all is right": (parity.Result([row(), row()], names=1), 0, "wiring: 1 names compared"),
    "a call between others": (parity.Result([row(), row("off"), row()], names=1), 1, "FAILED  a call: off"),
    "a name": (parity.Result([row()], ["m.f is gone"], names=1), 1, "FAILED  wiring: m.f is gone"),
    "nothing was compared": (parity.Result([row()]), 1, "wiring: 0 names compared"),
}


@pytest.mark.parametrize("case", RESULTS)
def test_what_is_found_is_the_exit_code(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result, code, said = RESULTS[case]
    result.versions = {"torch": "1", "triton": "2", "python": "3"}

    @contextmanager
    def opened(arguments: argparse.Namespace) -> Iterator[Any]:
        trees = argparse.Namespace(name="x", pristine=0, overlaid=0, folder=0, ops=OPS, left=["left: a file"])
        yield trees

    monkeypatch.setattr(pair, "open_pair", opened)
    monkeypatch.setattr(parity, "compare", lambda *_, **__: result)
    found = tmp_path / "found.json"
    assert parity.main(["megatron==0.16.1", "--device", "cpu", "--json", str(found)]) == code
    text = capsys.readouterr().out
    assert text.startswith("parity x\nleft: a file\n")
    assert said in text
    assert found.exists()


def test_more_problems_than_are_shown_are_counted() -> None:
    problems = [str(number) for number in range(parity.MAX_PROBLEMS + 2)]
    result = parity.Result([row(*problems)], names=1, versions={"torch": "1", "triton": "2", "python": "3"})
    lines = parity.table(result)
    assert sum(line.startswith("FAILED  ") for line in lines) == parity.MAX_PROBLEMS
    assert lines[-1] == "... and 2 more (--json has all)"


@pytest.mark.parametrize("words", [["--jobs", "1"], ["--markdown", "x"], ["--plot", "x"]])
def test_what_is_for_all_releases_is_refused_for_one(words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parity.main(["megatron==0.16.1", "--device", "cpu", *words])
    assert caught.value.expected == f"{words[0]} with all"
