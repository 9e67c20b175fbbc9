# SPDX-License-Identifier: Apache-2.0
"""Every pinned release: imports, every name leads to ours, the calls that the plan has for it; and that a
release which does not hold is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import matrix, pair, parity, plots, source
from scripts.errors import SourceError, UsageError
from scripts.manifest import Release, load
from scripts.overlay import load_overlay
from scripts.workers import step
from scripts.workers.entries import ENTRIES

MANIFEST = load()
OPS = load_overlay().ops
PLAN = matrix.plan(MANIFEST, OPS)


@pytest.mark.parametrize("version", MANIFEST.releases)
def test_a_release_holds(version: str, device: torch.device) -> None:
    found = matrix.check_release(MANIFEST.releases[version], PLAN[version], device.type)
    assert found.problems == []
    assert found.result is not None
    # Every entry that the pins say this release has: on the kernel, through every name that imports it.
    for entry in ENTRIES:
        pin = next(f for f in MANIFEST.files.values() if entry.name in f.entries)
        variant = next((v for v in pin.variants if version in v.releases), None)
        there = variant is not None and variant.entries[entry.name] is not None
        assert (found.result.entries[entry.name][entry.module] == "ours") == there
        rows = [row for row in found.result.rows if row["entry"] == entry.name]
        assert any(row["served"] == "kernel" and row["launches"] for row in rows) == there
    assert [row["entry"] for row in found.result.rows if row["id"] == step.NAME] == ["GPTModel"]
    held = {binding["found"] for binding in found.result.bindings.values() if binding["op"] in OPS}
    assert "ours" in held
    assert "upstream" not in held


def test_each_variant_of_each_extended_file_is_compared_in_full() -> None:
    """And no release is without a call of an op that it has."""
    for path, file in MANIFEST.files.items():
        for variant in file.variants if file.action == "extend" else ():
            releases = [version for version in variant.releases if version in MANIFEST.releases]
            # A preview's own variant is compared by `parity --tree`.
            assert not releases or any(PLAN[version][file.op] == matrix.ALL for version in releases), path
    assert all(set(calls) == set(OPS) for calls in PLAN.values())
    assert list(PLAN) == list(MANIFEST.releases)


def test_an_op_that_has_only_call_sites_goes_by_them() -> None:
    norms = MANIFEST.files_of("norms")
    patched = {file.path: file for file in norms if file.action == "patch"}
    assert patched
    assert [group[-1] for group in matrix.groups(MANIFEST, "norms")] == ["0.16.1", "0.19.2"]
    groups = matrix.groups(replace(MANIFEST, files=patched), "norms")
    assert [group[-1] for group in groups] == [
        "0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2",
    ]  # fmt: skip


FUSION = "megatron.core.fusions.fused_bias_swiglu"
IMPORT = f"from {FUSION} import bias_swiglu_impl as late\n"
# Modules that neither tree has: their text in the pristine one, in the overlaid one, and what is to be told.
MORE = {
    "fine": (IMPORT, IMPORT, None),
    "elsewhere": (
        IMPORT,
        f"{IMPORT}from {FUSION} import _upstream_bias_swiglu_impl as late\n",
        "is upstream in the overlaid tree, not ours",
    ),
    "gone": (IMPORT, "", "is gone in the overlaid tree, not ours"),
    "mended": (f"{IMPORT}import nothing\n", IMPORT, "is ours in the overlaid tree, not ModuleNotFoundError"),
    "unimportable": (f"{IMPORT}import nothing\n", f"{IMPORT}import nothing\n", None),
}


def test_a_name_that_leads_elsewhere_fails(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    opened = pair.open_release

    @contextmanager
    def changed(release: Release, ops: Any) -> Iterator[pair.Pair]:
        with opened(release, ops) as trees:
            for name, texts in MORE.items():
                for tree, text in zip((trees.pristine, trees.overlaid), texts):
                    (tree / f"megatron/core/{name}.py").write_text(str(text), encoding="utf-8")
            yield trees

    monkeypatch.setattr(pair, "open_release", changed)
    found = matrix.check_release(MANIFEST.releases["0.16.1"], {"swiglu": matrix.FEW}, device.type)
    wanted = {f"wiring: megatron.core.{name}.late {told}" for name, (*_, told) in MORE.items() if told}
    assert len(found.problems) == len(wanted)
    for text in wanted:
        assert any(problem.startswith(text) for problem in found.problems), text


def _checked(version: str, rows: list[dict[str, Any]], *, absent: str = "") -> matrix.Checked:
    entries = {e.name: {e.module: "absent" if e.name == absent else "ours"} for e in ENTRIES}
    result = parity.Result(rows=rows, names=3, entries=entries)
    result.versions = {"torch": "1", "triton": "2", "python": "3", "device": "CPU"}
    return matrix.Checked(version, {"swiglu": "few"}, result, None, 1.0, ("swiglu",))


def _row(**changes: Any) -> dict[str, Any]:
    row = {"op": "swiglu", "id": "a call", "served": "kernel", "reasons": [], "problems": []}
    return {**row, **changes}


def test_what_a_cell_says() -> None:
    assert _checked("1", [_row()]).cell("swiglu") == "kernel"
    absent = _checked("1", [_row(), _row(served="missing")], absent="weighted_bias_swiglu_impl")
    assert absent.cell("swiglu") == "kernel; weighted_bias_swiglu_impl not there"
    assert absent.compared() == "1"
    left = _checked("1", [_row(reasons=["too old"], problems=["left"])])
    assert left.cell("swiglu") == "FAILED; upstream's (too old)"
    assert left.problems == ["a call: left"]
    # A call that is upstream's by intent says nothing about the others.
    fallback = _row(served="upstream", reasons=["fp8_input_store"])
    assert _checked("1", [_row(), fallback]).cell("swiglu") == "kernel"
    assert _checked("1", [_row()]).cell("norms") == "not there"
    empty = _checked("1", [])
    assert empty.cell("swiglu") == "not called"
    assert empty.problems == ["swiglu: no call ran"]


def test_a_release_that_cannot_be_had_is_a_row_and_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(release: Release, calls: Any, device: str, timeout: float) -> matrix.Checked:
        if release.version == "0.14.0":
            monkeypatch.setattr(pair, "open_release", refuse)
            return real(release, calls, device, timeout)
        return _checked(release.version, [_row()])

    def refuse(release: Release, ops: Any) -> Any:
        raise SourceError("a wheel", "pip to download it", "no network", "wait")

    real = matrix.check_release
    monkeypatch.setattr(matrix, "check_release", check)
    table = tmp_path / "table.md"
    words = ["all", "--device", "cpu", "--ops", "swiglu", "--markdown", str(table), "--jobs", "2"]
    drawn: list[Any] = []
    monkeypatch.setattr(matrix.plots, "available", lambda: True)
    monkeypatch.setattr(matrix.plots, "draw_matrix", lambda *picture: drawn.append(picture))
    assert parity.main([*words, "--plot", str(tmp_path / "table.png")]) == 1
    ((cells, _, note, file),) = drawn
    assert cells[0] == ("release", "swiglu")
    assert ("0.14.0", "FAILED") in cells
    assert note.startswith("CPU")
    assert file == tmp_path / "table.png"
    said = capsys.readouterr()
    assert "0.14.0 FAILED, 0 s" in said.err
    lines = said.out.splitlines()
    assert [line.split()[0] for line in lines[2 : 2 + len(MANIFEST.releases)]] == list(MANIFEST.releases)
    assert "FAILED  0.14.0: a wheel: expected pip to download it, found no network" in lines
    assert (
        "swiglu: the same entries in 0.12.0; 0.12.1, 0.12.2, 0.12.3; 0.13.0 … 0.19.2 (15 releases)"
        in said.out
    )
    page = table.read_text(encoding="utf-8").splitlines()
    assert page[0] == "| release | swiglu | calls compared | names | verdict |"
    assert len(page) == 2 + len(MANIFEST.releases)
    assert "| 0.14.0 | FAILED | none | 0 | 1 FAILED |" in page


@pytest.mark.skipif(not plots.available(), reason="draws only where matplotlib is")
def test_the_picture(tmp_path: Path) -> None:
    cells = [
        ("release", "swiglu", "norms"),
        ("1", "kernel; x not there", "FAILED"),
        ("2", "not there", "kernel"),
    ]
    file = plots.draw_matrix(cells, "title", "note", tmp_path / "picture.png")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix.plots, "available", lambda: False)
    with pytest.raises(UsageError, match="matplotlib"):
        parity.main(["all", "--plot", "x.png"])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["all", "--tree", "."], "all with --tree"),
        (["all", "--wiring"], "all with --wiring"),
        (["all", "--jobs", "0"], "0"),
        (["all", "--ops", "nonsense"], "nonsense"),
        (["megatron==0.16.1", "--jobs", "2"], "one release or tree"),
        (["megatron==0.16.1", "--markdown", "x.md"], "one release or tree"),
        (["megatron==0.16.1", "--plot", "x.png"], "one release or tree"),
    ],
)
def test_arguments_that_do_not_go_together(words: list[str], found: str) -> None:
    with pytest.raises(UsageError) as caught:
        parity.main(words)
    assert found in caught.value.found


def test_the_trees_of_a_release_without_a_wheel_for_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.12 has none for 3.12 and later: the sources of the newest that it has are the same."""
    release = MANIFEST.releases["0.12.0"]
    fits = source.choose(release, "3.11").filename
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    assert source.choose(release, nearest=True).filename == fits
    with pytest.raises(SourceError):
        source.choose(release)
    with pytest.raises(SourceError):
        source.choose(release, platform="riscv64", nearest=True)


def test_the_two_trees_are_the_whole_wheel_and_gone_afterwards() -> None:
    with pair.open_release(MANIFEST.releases["0.19.2"], ("norms",)) as trees:
        assert trees.ops == ("norms",)
        for tree in (trees.pristine, trees.overlaid):
            assert (tree / "megatron/training").is_dir()  # a wheel carries it since 0.17
    assert not trees.folder.parent.exists()
