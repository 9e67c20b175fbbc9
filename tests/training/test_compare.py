# SPDX-License-Identifier: Apache-2.0
"""``train --compare``: both trees in one table, and nothing is compared that did not run as it should."""

from __future__ import annotations

import argparse
import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from scripts import compare, train
from scripts.overlay import load_overlay
from scripts.workers.entries import UNTRAINED

OPS = load_overlay().ops
STEPS = 3
ROW = re.compile(
    r"(?P<core>pristine|overlaid) +(?P<loss>unfused|fused) +(?P<ms>[\d.]+) +"
    r"(?P<memory>\d+ MB|not counted on a CPU) +(?P<losses>[\d.]+(?: [\d.]+)*)"
)


def printed(text: str) -> dict[tuple[str, str], dict[str, str]]:
    """The table's rows, by core and loss."""
    rows = [match.groupdict() for line in text.splitlines() if (match := ROW.fullmatch(line))]
    return {(row["core"], row["loss"]): row for row in rows}


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parser.parse_args(argv)


Worlds = dict[str, train.World]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> tuple[str, dict[str, Any]]:
    """What the command prints, and what it writes."""
    file = tmp_path_factory.mktemp("compare") / "measured.json"
    argv = ["megatron==0.16.1", "--compare", "--nproc", "1", "--iterations", str(STEPS)]
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
        code = train.run(arguments(*argv, "--device", device.type, "--json", str(file)))
    assert code == 0, "\n".join(lines)
    return "\n".join(lines), json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture
def worlds(command: tuple[str, dict[str, Any]]) -> Worlds:
    text, data = command
    ours = [line for line in text.splitlines() if line.startswith(train.JOB_LINE)]
    found = {name: (data[name], ours if name == "overlaid" else []) for name in compare.TREES}
    return {name: train.World(copy.deepcopy(reports), lines) for name, (reports, lines) in found.items()}


@pytest.fixture
def options(command: tuple[str, dict[str, Any]]) -> train.Options:
    found = command[1]["options"]
    return train.Options(**{**found, "sizes": train.Sizes(**found["sizes"])})


def test_one_table_with_speed_memory_and_losses(
    command: tuple[str, dict[str, Any]], device: torch.device
) -> None:
    text, data = command
    rows = printed(text)
    assert set(rows) == {(name, run) for name in compare.TREES for run in compare.RUNS}
    assert len({row["ms"] for row in rows.values()}) > 1
    for (name, run), row in rows.items():
        measured = data[name][0]["runs"][run]
        assert row["losses"].split() == [f"{loss:.6f}" for loss in measured["losses"]]
        assert row["ms"] == f"{1e3 * sum(measured['seconds'][1:]) / 2:.1f}"  # the first step warms up
        assert all(second > 0 for second in measured["seconds"])
        if device.type == "cuda":
            assert row["memory"] == f"{max(measured['peak_bytes']) / 1e6:.0f} MB"
    assert ("says nothing of a GPU" in text) == (device.type == "cpu")
    served = re.findall(rf"^ok +kernels of (\w+): in each of {2 * STEPS} steps$", text, re.MULTILINE)
    assert served == [op for op in OPS if op not in UNTRAINED]


def test_the_slowest_rank_and_the_largest_memory_count(worlds: Worlds, options: train.Options) -> None:
    (report,) = worlds["overlaid"].reports
    other = copy.deepcopy(report)
    report["runs"]["fused"] |= {"seconds": [9.0, 0.1, 0.2], "peak_bytes": [5_000_000, 7_000_000, 6_000_000]}
    other["runs"]["fused"] |= {"seconds": [8.0, 0.4, 0.1], "peak_bytes": [9_000_000, 1, 1]}
    worlds["overlaid"].reports.append(other)
    row = printed("\n".join(compare.judge(worlds, OPS, options).table))["overlaid", "fused"]
    assert row["ms"] == "300.0"  # of 400 and 200: the first step warms up
    assert row["memory"] == "9 MB"


def fused(world: str) -> Callable[[Worlds], dict[str, Any]]:
    return lambda worlds: worlds[world].reports[0]["runs"]["fused"]


def no_launch(worlds: Worlds) -> None:
    fused("overlaid")(worlds)["counters"][1]["norms"]["launches"].clear()


def a_fallback(worlds: Worlds) -> None:
    entries = fused("overlaid")(worlds)["counters"][1]["swiglu"]["entries"]
    next(iter(entries.values()))["upstream"]["some reason"] = 1


def two_overlaid_trees(worlds: Worlds) -> None:
    worlds["pristine"].reports[0]["overlaid"] = True


def a_stray_line(worlds: Worlds) -> None:
    worlds["pristine"].job_lines.append("liger overlay 1")


def another_first_loss(worlds: Worlds) -> None:
    fused("overlaid")(worlds)["losses"][0] += 0.1


def no_first_loss(worlds: Worlds) -> None:
    fused("overlaid")(worlds)["losses"][0] = float("nan")


def nothing_learnt(worlds: Worlds) -> None:
    fused("overlaid")(worlds)["losses"].append(100.0)


@pytest.mark.parametrize(
    ("spoil", "failed"),
    [
        (no_launch, {"kernels of norms"}),
        (a_fallback, {"kernels of swiglu"}),
        (two_overlaid_trees, {"the pristine tree"}),
        (a_stray_line, {"the pristine tree"}),
        (another_first_loss, {"first loss"}),
        (no_first_loss, {"first loss", "learning, overlaid, fused"}),
        (nothing_learnt, {"learning, overlaid, fused"}),
    ],
)
def test_what_compares_nothing_fails(
    worlds: Worlds, options: train.Options, spoil: Callable[[Worlds], None], failed: set[str]
) -> None:
    assert compare.judge(worlds, OPS, options).passed
    spoil(worlds)
    result = compare.judge(worlds, OPS, options)
    assert {check.name for check in result.checks if not check.passed} == failed


def test_the_flag_chooses_and_a_failed_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def fake(name: str, passed: bool) -> Callable[..., train.Result]:
        def measured(*_: object) -> train.Result:
            called.append(name)
            return train.Result([train.Check("first", passed, ""), train.Check("second", True, "")])

        return measured

    for passed, code in ((True, 0), (False, 1)):
        monkeypatch.setattr(train, "train", fake("checks", passed))
        monkeypatch.setattr(compare, "compare", fake("table", passed))
        for flag in ([], ["--compare"]):
            assert train.run(arguments("megatron==0.16.1", "--device", "cpu", *flag)) == code
    assert called == ["checks", "table"] * 2


@pytest.mark.parametrize(
    ("flag", "steps"), [([], 5), (["--compare"], 20), (["--compare", "--iterations", "7"], 7)]
)
def test_steps(flag: list[str], steps: int) -> None:
    assert train._options(arguments("megatron==0.16.1", *flag), "cpu", 0).iterations == steps
