# SPDX-License-Identifier: Apache-2.0
"""Triage of a release or tree that is not pinned: what moved is found, and nothing else is reported."""

from __future__ import annotations

import ast
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import __main__ as cli
from scripts import port
from scripts.manifest import load

SWIGLU = "megatron/core/fusions/fused_bias_swiglu.py"
NORM = "megatron/core/transformer/torch_norm.py"
LOSS = "megatron/core/tensor_parallel/cross_entropy.py"
OLD = {
    SWIGLU: b'''
import torch

def helper(x):
    return x

def bias_swiglu_impl(input, bias, fp8_input_store=False):
    """Says something."""
    return helper(input)

def weighted_bias_swiglu_impl(input, bias, weights):
    return helper(input)
''',
    NORM: b"""
class WrappedTorchNorm:
    kind = "torch"
    def __new__(cls, config, hidden_size, eps=1e-5):
        return make(hidden_size)
""",
    LOSS: b"def vocab_parallel_cross_entropy(logits, target, label_smoothing=0.0):\n    return 0\n",
    "megatron/core/fusions/fused_cross_entropy.py": b"def fused_vocab_parallel_cross_entropy(a): ...\n",
    "megatron/core/fusions/fused_layer_norm.py": b"class FusedLayerNorm:\n    pass\n",
    "megatron/core/transformer/mlp.py": b"""
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
def forward(x, b):
    return bias_swiglu_impl(x, b, False)
""",
    "megatron/core/parallel_state.py": b"""
def get_tensor_model_parallel_group(): ...
def get_tensor_model_parallel_world_size(): ...
def is_initialized(): ...
def model_parallel_is_initialized(): ...
""",
}


def report(changes: dict[str, bytes | None]) -> port.Report:
    new = {path: data for path, data in {**OLD, **changes}.items() if data is not None}
    return port.triage("old", OLD, "new", new, load())


def found(report: port.Report, path: str) -> port.File:
    return next(file for file in report.files if file.path == path)


def entry(report: port.Report, path: str, name: str) -> port.Entry:
    return next(e for e in found(report, path).entries if e.name == name)


def edited(path: str, before: str, after: str) -> dict[str, bytes | None]:
    assert before.encode() in OLD[path]
    return {path: OLD[path].replace(before.encode(), after.encode())}


def test_nothing_moved() -> None:
    same = report({"megatron/core/other.py": b"x = 1\n"})
    assert {file.verdict for file in same.files} == {port.SAME}
    assert not any(e.changed or e.notes or e.body or e.callers for f in same.files for e in f.entries)


def test_a_change_around_the_entries_asks_for_pins_only() -> None:
    changed = report(edited(SWIGLU, "    return x\n", "    return x + 0  # and a comment\n"))
    assert found(changed, SWIGLU).verdict == port.AROUND
    assert found(changed, SWIGLU).pinned == ()
    assert not any(e.changed or e.body for e in found(changed, SWIGLU).entries)
    assert {f.verdict for f in changed.files if f.path != SWIGLU} == {port.SAME}


def test_comments_and_docstrings_of_an_entry_are_no_change() -> None:
    changed = report(edited(SWIGLU, '"""Says something."""', '"""Says more."""  # here'))
    assert found(changed, SWIGLU).verdict == port.AROUND


def test_an_option_that_came() -> None:
    changed = report(edited(SWIGLU, "fp8_input_store=False)", "fp8_input_store=False, clamp_value=None)"))
    assert found(changed, SWIGLU).verdict == port.CHANGED
    swiglu = entry(changed, SWIGLU, "bias_swiglu_impl")
    assert any("clamp_value=None" in note for note in swiglu.notes)
    assert swiglu.retires_when
    assert not entry(changed, SWIGLU, "weighted_bias_swiglu_impl").changed
    assert not changed.settled
    assert "clamp_value=None" in "\n".join(port.lines(changed, None))


def test_a_body_that_changed() -> None:
    changed = report(
        edited(
            NORM,
            "return make(hidden_size)",
            "norm = make(hidden_size)\n        norm.more = False\n        return norm",
        )
    )
    norm = entry(changed, NORM, "WrappedTorchNorm")
    assert not norm.notes
    assert "+        norm.more = False" in norm.body


def test_a_class_attribute_and_a_method_that_went() -> None:
    changed = report(edited(NORM, '    kind = "torch"\n', "    def reset(self, all): ...\n"))
    notes = entry(changed, NORM, "WrappedTorchNorm").notes
    assert any("WrappedTorchNorm.reset is new: (self, all)" in note for note in notes)
    assert any("WrappedTorchNorm.kind is gone" in note for note in notes)


def test_an_entry_that_moved_and_a_file_that_went() -> None:
    moved = {LOSS: b"x = 1\n", "megatron/core/losses.py": OLD[LOSS], NORM: None}
    changed = report(moved)
    assert found(changed, NORM).verdict == port.GONE
    assert any(
        "now in megatron/core/losses.py" in note
        for note in entry(changed, LOSS, "vocab_parallel_cross_entropy").notes
    )
    assert found(changed, LOSS).names == ["- vocab_parallel_cross_entropy", "+ x"]


def test_a_caller_that_calls_otherwise() -> None:
    changed = report(
        edited("megatron/core/transformer/mlp.py", "(x, b, False)", "(x, b, fp8_input_store=True)")
    )
    assert found(changed, SWIGLU).verdict == port.SAME
    assert entry(changed, SWIGLU, "bias_swiglu_impl").callers == [
        "- megatron/core/transformer/mlp.py: bias_swiglu_impl(x, b, False)",
        "+ megatron/core/transformer/mlp.py: bias_swiglu_impl(x, b, fp8_input_store=True)",
    ]
    assert not changed.settled


def file(verdict: str, entry: port.Entry | None = None, diff: list[str] | None = None) -> port.File:
    found = port.File("a.py", verdict, "0" * 64, ("1.0",), [entry] if entry else [], [])
    found.diff = diff or []
    return found


UNSETTLED: dict[str, port.Report] = {
    "a name that went": port.Report("old", "new", [file(port.SAME)], ["a.py takes b from c"]),
    "an entry that changed": port.Report("old", "new", [file(port.CHANGED)], []),
    "a file that went": port.Report("old", "new", [file(port.GONE)], []),
    "a diff to be read": port.Report("old", "new", [file(port.AROUND, diff=["it would fit"])], []),
    "a caller": port.Report("old", "new", [file(port.AROUND, port.Entry("f", False, callers=["+ f()"]))], []),
    "a note": port.Report("old", "new", [file(port.SAME, port.Entry("f", False, notes=["gone"]))], []),
}


@pytest.mark.parametrize("case", UNSETTLED)
def test_one_thing_to_look_at_is_enough(case: str) -> None:
    """Also between files where nothing moved; the command then ends with 1."""
    found = UNSETTLED[case]
    right = [file(port.SAME, port.Entry("f", False)), file(port.AROUND)]
    assert port.Report("old", "new", right, []).settled
    assert not found.settled
    assert not port.Report("old", "new", [right[0], *found.files, right[1]], found.missing).settled


@pytest.mark.parametrize(
    ("change", "code"), [(None, 1), (b"", 0), (b"# around\n", 0), (b"def bias_swiglu_impl(): ...\n", 1)]
)
def test_a_release_is_looked_through_as_pip_brings_it(
    change: bytes | None,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wheel(path: Path, data: bytes | None) -> Path:
        no_source = b"bias_swiglu_impl("
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("megatron/core/x.txt", "other/x.py"):
                archive.writestr(name, no_source)
            if data is not None:
                archive.writestr(SWIGLU, data)
        return path

    def gather(version: str, manifest: Any, folder: Path) -> Any:
        assert version == "9.9"
        wheel(folder / "last.whl", None if change is None else OLD[SWIGLU] + change)
        return SimpleNamespace(wheels=[SimpleNamespace(filename=name) for name in ("first.whl", "last.whl")])

    monkeypatch.setattr(port, "fetch_file", lambda *_: wheel(tmp_path / "base.whl", OLD[SWIGLU]))
    monkeypatch.setattr(port.pins, "gather", gather)
    monkeypatch.setattr(port, "missing_names", lambda new: [])
    assert port.main(["megatron==9.9", "--base", "0.16.1", "--diff"]) == code
    said = capsys.readouterr().out
    assert said.startswith("megatron-core 9.9, compared with megatron-core 0.16.1\n")
    assert "pins: python -m scripts pin megatron==9.9 --clone CLONE --write, then lint" in said
    assert "parity: python -m scripts parity megatron==9.9 (" in said
    assert said.count("diff --git") == bool(change)
    assert ("+" + (change or b"").decode() in said) == bool(change)
    assert ("nothing of the overlay's code is concerned" in said) == (code == 0)


def test_what_an_entry_that_is_neither_function_nor_class_was() -> None:
    assert port.interface(None) == {}
    assert port.interface(ast.parse("f = g").body[0]) == {"value": "f = g"}


def test_names_that_the_overlay_takes_are_looked_for() -> None:
    assert any("parallel_state" in note for note in report({"megatron/core/parallel_state.py": b""}).missing)


def test_pinned_trees_overlaid_or_not(pristine_tree: Path, overlaid_tree: Path) -> None:
    """A pinned release is settled against itself, and the overlay in a tree is looked through."""
    old = port.read_tree(pristine_tree)
    for tree in (pristine_tree, overlaid_tree):
        same = port.triage("old", old, "new", port.read_tree(tree), load())
        assert same.settled
        assert not same.missing
        assert all("0.16.1" in file.pinned for file in same.files)


def test_the_command(pristine_tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["port", "--tree", str(pristine_tree), "--base", "0.16.1"]) == 0
    assert "nothing of the overlay's code is concerned" in capsys.readouterr().out
    assert cli.main(["port", "--tree", str(pristine_tree), "--base", "0.12.0", "--diff"]) == 1
    printed = capsys.readouterr().out
    assert f"{SWIGLU}: changed in an entry" in printed
    assert "+def weighted_bias_swiglu_impl" in printed


@pytest.mark.parametrize(
    ("words", "code"), [([], 2), (["megatron==0.16.1", "--tree", "."], 2), (["--tree", "/nowhere"], 5)]
)
def test_refusals(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["port", *words]) == code
    assert "expected:" in capsys.readouterr().err


BACKENDS = "megatron/core/models/backends.py"


def test_a_patched_file_gets_a_draft_or_is_said_to_need_a_diff(pristine_tree: Path) -> None:
    old = port.read_tree(pristine_tree)
    data = old[BACKENDS]
    same = port.triage("old", old, "new", {**old, BACKENDS: data + b"# more\n"}, load())
    moved = port.triage("old", old, "new", {**old, BACKENDS: b"# more\n" + data}, load())
    gone = port.triage("old", old, "new", {**old, BACKENDS: data.replace(b"global LNImpl", b"pass")}, load())
    shifts = []
    for report in (same, moved):
        file = found(report, BACKENDS)
        assert (file.verdict, file.pinned) == (port.AROUND, ())
        assert not report.settled
        where, line = file.diff
        assert where.startswith(f"the diff at patches/{BACKENDS}.patch:")
        assert f"# fits: {file.sha256} shift: " in line
        assert line in "\n".join(port.lines(report, None))
        shifts.append(int(line.split("shift: ")[1].split()[0]))
    assert shifts[1] == shifts[0] + 1
    file = found(gone, BACKENDS)
    assert file.verdict == port.CHANGED
    assert file.diff == [
        f"no diff of patches/{BACKENDS}.patch fits, wherever its lines are looked for: write one"
    ]
    assert "upstream returns the class" in entry(gone, BACKENDS, "LocalSpecProvider.layer_norm").retires_when
