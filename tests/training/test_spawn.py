# SPDX-License-Identifier: Apache-2.0
"""Worker processes: what they report, and how a failing or hanging rank ends all of them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from scripts.errors import ExpectationError
from scripts.workers import spawn


def _worker(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    script = folder / "worker.py"
    script.write_text(
        f"import json, os, sys, time\nrank = int(os.environ['RANK'])\n{body}\n", encoding="utf-8"
    )
    monkeypatch.setattr(spawn, "START", script)


def test_reports_come_in_rank_order_and_the_plan_arrives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _worker(
        monkeypatch,
        tmp_path,
        "plan = json.load(open(sys.argv[2]))\n"
        "first = os.environ['PYTHONPATH'].split(os.pathsep)[0]\n"
        "json.dump([rank, plan['x'], first], open(f'rank{rank}.json', 'w'))",
    )
    reports = spawn.run_world(
        "any", {"x": 7}, tree=tmp_path / "tree", folder=tmp_path / "w", ranks=2, timeout=30
    )
    assert [list(report) for report in reports] == [
        [0, 7, str(tmp_path / "tree")],
        [1, 7, str(tmp_path / "tree")],
    ]


def test_a_rank_that_dies_ends_the_others_and_its_error_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = (
        "open(f'pid{rank}', 'w').write(str(os.getpid()))\n"
        "if rank == 1: raise SystemExit('the reason')\n"
        "time.sleep(60)"
    )
    _worker(monkeypatch, tmp_path, body)
    start = time.monotonic()
    with pytest.raises(ExpectationError, match=r"rank 1 ended with code 1:\nthe reason"):
        spawn.run_world("any", {}, tree=None, folder=tmp_path / "w", ranks=2, timeout=50)
    assert time.monotonic() - start < 20
    pid = tmp_path / "w" / "pid0"
    if pid.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def test_a_rank_that_hangs_is_ended_when_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _worker(monkeypatch, tmp_path, "print('waiting', flush=True)\ntime.sleep(60)")
    with pytest.raises(ExpectationError, match="still running when the time was up"):
        spawn.run_world("any", {}, tree=None, folder=tmp_path / "w", timeout=1)


def test_the_environment_has_the_tree_first_and_not_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(spawn.ROOT), "/elsewhere"]))
    monkeypatch.setenv("LIGER_MEGATRON", "0")
    env = spawn.environment(Path("/tree"), "cpu")
    assert env["PYTHONPATH"].split(os.pathsep) == ["/tree", "/elsewhere"]
    assert "LIGER_MEGATRON" not in env
    assert env["TRITON_INTERPRET"] == "1"
    assert "TRITON_INTERPRET" not in spawn.environment(Path("/tree"), "cuda")


def test_log_lines_picks_by_prefix(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text("a b\nliger x\n  liger y\n", encoding="utf-8")
    assert spawn.log_lines(tmp_path, "liger") == ["liger x"]
    assert json.dumps(spawn.log_lines(tmp_path, "none")) == "[]"


def test_a_worker_may_be_a_program_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys\nfrom dataclasses import dataclass\nfrom scripts.workers import spawn\n\n"
        "@dataclass\nclass Report:\n    root_is_not_on_the_path: bool\n\n"
        "def main(argv):\n"
        "    json.dump(vars(Report(str(spawn.ROOT) not in sys.path)), open('rank0.json', 'w'))\n"
        "    return 0\n",
        encoding="utf-8",
    )
    reports = spawn.run_world(str(program), {}, tree=None, folder=tmp_path / "w", timeout=30)
    assert reports == [{"root_is_not_on_the_path": True}]
