# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron.core.liger``: what it says of the installation, of this process, and of a script."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from scripts.manifest import load

from .conftest import Python

FUSED = "megatron/core/fusions/fused_bias_swiglu.py"


def test_text(python: Python, overlaid_tree: Path) -> None:
    done = python("-m", "megatron.core.liger", RANK="0", WORLD_SIZE="2")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("liger overlay 1 for Megatron-Core 0.16.1, commit ")
    assert lines[1] == f"  {overlaid_tree}/megatron/core"
    assert "  swiglu: installed, enabled, " in done.stdout
    assert "used 0 times in this process" in done.stdout
    assert "this process has just begun" in done.stdout
    assert f"  installed: {FUSED} " in done.stdout
    assert "problem" not in done.stdout
    assert "at exit" not in done.stdout  # the report is no job


def test_without_triton(python: Python, overlaid_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n", encoding="utf-8")
    path = f"{tmp_path}{os.pathsep}{overlaid_tree}"
    done = python("-m", "megatron.core.liger", PYTHONPATH=path, LIGER_MEGATRON="0")
    assert "triton none" in done.stdout
    assert (
        "swiglu: installed, off by LIGER_MEGATRON, not usable here (Triton cannot be imported)" in done.stdout
    )


def test_json(python: Python, overlaid_tree: Path) -> None:
    data = json.loads(python("-m", "megatron.core.liger", "--json", TRITON_INTERPRET="1").stdout)
    assert (data["overlay"], data["release"]) == (1, "0.16.1")
    variants = [v for file in load().files.values() for v in file.variants if "0.16.1" in v.releases]
    common = set.intersection(*(set(variant.releases) for variant in variants))
    assert data["files_as_in"] == sorted(common)
    assert data["core"] == f"{overlaid_tree}/megatron/core"
    assert data["problems"] == []
    swiglu = data["ops"]["swiglu"]
    assert swiglu["installed"] == "installed"
    assert (swiglu["enabled"], swiglu["usable"], swiglu["why_not"], swiglu["used"]) == (True, True, None, 0)
    assert set(data["files"]) >= {FUSED, "megatron/core/liger/kernels/gated.py"}
    for entry in data["files"].values():
        assert entry["state"] == "installed"
        assert entry["found"] == entry["expected"]


def test_damage(python: Python, overlaid_tree: Path, pristine_tree: Path, tmp_path: Path) -> None:
    """A changed file, one that is upstream's, a missing one: each is named, and the exit code is 1."""
    tree = Path(shutil.copytree(overlaid_tree, tmp_path / "copy"))
    kernels = tree / "megatron/core/liger/kernels"
    with (kernels / "gated.py").open("a", encoding="utf-8") as file:
        file.write("# mine\n")
    (kernels / "launches.py").unlink()
    shutil.copy(pristine_tree / FUSED, tree / FUSED)
    data = json.loads(python("-m", "megatron.core.liger", "--json", tree=tree, expect=1).stdout)
    assert data["ops"]["swiglu"]["installed"] == "not installed"
    assert [problem.partition(" (sha256 ")[0] for problem in data["problems"]] == [
        f"{FUSED}: not installed",
        "megatron/core/liger/kernels/gated.py: changed since it was applied",
        "megatron/core/liger/kernels/launches.py: not installed",
    ]


def test_damaged_record(python: Python, overlaid_tree: Path, tmp_path: Path) -> None:
    tree = Path(shutil.copytree(overlaid_tree, tmp_path / "copy"))
    (tree / "megatron/core/liger/overlay.json").write_text("{", encoding="utf-8")
    done = python("-m", "megatron.core.liger", tree=tree, expect=1)
    assert "overlay.json is missing or damaged: apply the overlay again" in done.stdout
    assert "  swiglu: not installed, " in done.stdout


@pytest.fixture
def installed(liger: ModuleType) -> ModuleType:
    return importlib.import_module("megatron.core.liger.installed")


@pytest.mark.parametrize(
    "data", [None, b"", b"{", b"\xff", b"[]", b"1", b"{}", b'{"files": null}', b'{"files": []}']
)
def test_what_is_no_record(installed: ModuleType, tmp_path: Path, data: bytes | None) -> None:
    """Such a tree has no files of ours to speak of, and nothing that could stop a job."""
    (tmp_path / "liger").mkdir()
    if data is not None:
        (tmp_path / "liger/overlay.json").write_bytes(data)
    assert installed.record(tmp_path) is None
    assert installed.files(tmp_path) == {}
    (tmp_path / "liger/overlay.json").write_bytes(b'{"files": {}}')
    assert installed.record(tmp_path) == {"files": {}}


@pytest.mark.parametrize(
    ("record", "release"),
    [
        (None, "of unknown release (no record)"),
        ({"release": None, "files_as_in": []}, "of unknown release (no record)"),
        ({"release": "1.2", "files_as_in": ["1.2", "1.3"]}, "1.2"),
        ({"release": None, "files_as_in": ["1.2", "1.3", "1.4"]}, "(files as in 1.2, 1.3, 1.4)"),
        ({"files_as_in": ["1.2", "1.3", "1.4", "1.5"]}, "(files as in 1.2 … 1.5, 4 releases)"),
    ],
)
def test_release(
    installed: ModuleType, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any] | None, release: str
) -> None:
    monkeypatch.setattr(installed, "record", lambda: record)
    assert installed.release.__wrapped__() == release


def test_ops_that_are_not_there(installed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last variable too; a record that does not say is no reason to stop."""
    named = {"LIGER_MEGATRON": ["swiglu"], "LIGER_MEGATRON_IN_PLACE": ["swiglu", "norms"]}
    for record in (None, {}, {"ops": None}, {"ops": {"swiglu": 1}}, {"ops": ["norms", "swiglu"]}):
        monkeypatch.setattr(installed, "record", lambda record=record: record)
        installed.require(named)
    monkeypatch.setattr(installed, "record", lambda: {"ops": ["swiglu"]})
    with pytest.raises(ValueError, match=r"^LIGER_MEGATRON_IN_PLACE names norms, .* tree are swiglu \("):
        installed.require(named)
    installed.require({"LIGER_MEGATRON": ["swiglu"], "LIGER_MEGATRON_IN_PLACE": []})


def test_a_file_that_is_upstreams_or_nobodys(installed: ModuleType, tmp_path: Path) -> None:
    def sha256(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    core = tmp_path / "megatron/core"
    (core / "liger").mkdir(parents=True)
    extended = {"action": "extend", "op": "a", "before": sha256(b"theirs"), "after": sha256(b"ours")}
    added = {"action": "add", "op": None, "before": None, "after": sha256(b"ours")}
    document = {"files": {"x.py": extended, "y.py": added}}
    (core / "liger/overlay.json").write_text(json.dumps(document), encoding="utf-8")
    for data, states in {
        b"ours": ("installed", "installed"),
        b"theirs": ("not installed", "changed since it was applied"),
        b"mine": ("changed since it was applied", "changed since it was applied"),
        None: ("changed since it was applied", "not installed"),
    }.items():
        for name in ("x.py", "y.py"):
            (tmp_path / name).unlink(missing_ok=True)
            if data is not None:
                (tmp_path / name).write_bytes(data)
        found = installed.files(core)
        assert tuple(entry["state"] for entry in found.values()) == states
        assert installed.op_state("a", found) == states[0]
        assert {entry["found"] for entry in found.values()} == {None if data is None else sha256(data)}


SCRIPT = {"script": "train.py", "core": "/x/megatron/core", "this": False, "overlaid": False, "overlay": None}


@pytest.mark.parametrize(
    ("record", "script", "problem"),
    [
        ({"overlay": 1}, None, None),
        (None, None, "overlay.json is missing or damaged: apply the overlay again"),
        ({"overlay": 2}, None, "the record is of overlay 2, this code of 1"),
        ({"overlay": 1}, {"core": None}, "train.py would find no megatron.core"),
        ({"overlay": 1}, {}, "SHADOWED: train.py would import /x/megatron/core, which is not overlaid; "),
        ({"overlay": 1}, {"overlay": 1}, "which has been changed since it was overlaid; "),
        ({"overlay": 1}, {"overlaid": True, "overlay": 1}, None),
        ({"overlay": 1}, {"this": True}, None),  # its files are problems of their own
    ],
)
def test_problems(
    report: ModuleType, record: dict[str, Any] | None, script: dict[str, Any] | None, problem: str | None
) -> None:
    data = {"files": {}, "script": None if script is None else {**SCRIPT, **script}}
    found = report._problems(record, data)
    assert len(found) == (problem is not None)
    assert (problem or "") in "".join(found)


def test_a_tree_that_was_overlaid_and_changed_is_not_overlaid(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    core = tmp_path / "megatron/core"
    (core / "liger").mkdir(parents=True)
    monkeypatch.setattr(report, "core_of_script", lambda script: core)
    assert report._script(Path("x.py"))["overlaid"] is False  # no record
    added = {"action": "add", "op": None, "before": None, "after": hashlib.sha256(b"ours").hexdigest()}
    document = {"overlay": 1, "files": {"x.py": added, "y.py": added}}
    (core / "liger/overlay.json").write_text(json.dumps(document), encoding="utf-8")
    for data, overlaid in ((b"ours", True), (b"mine", False)):
        (tmp_path / "x.py").write_bytes(b"ours")
        (tmp_path / "y.py").write_bytes(data)
        found = report._script(Path("x.py"))
        assert (found["overlaid"], found["overlay"], found["this"]) == (overlaid, 1, False)


def test_every_file_that_is_not_right_is_a_problem(report: ModuleType) -> None:
    states = ("installed", "changed", "installed", "not installed")
    files = {f"{i}.py": {"state": state, "found": i, "expected": "e"} for i, state in enumerate(states)}
    assert report._problems({"overlay": 1}, {"files": files, "script": None}) == [
        "1.py: changed (sha256 1, expected e)",
        "3.py: not installed (sha256 3, expected e)",
    ]


@pytest.mark.parametrize(
    ("reason", "interpreted", "cuda", "found"),
    [
        ("Triton is older than 3.2", True, True, "Triton is older than 3.2"),
        (None, True, False, None),
        (None, False, True, None),
        (None, False, False, "no CUDA device, and TRITON_INTERPRET=1 is not set"),
    ],
)
def test_why_an_op_is_not_usable_here(
    report: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    reason: str | None,
    interpreted: bool,
    cuda: bool,
    found: str | None,
) -> None:
    platform = SimpleNamespace(reason=reason, interpreted=interpreted)
    monkeypatch.setattr(report.dispatch, "platform", lambda: platform)
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    assert report._why_not("swiglu") == found


def test_a_broken_driver_is_reported(report: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise RuntimeError("no driver")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", fail)
    assert report._device() == "unknown (RuntimeError)"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert report._device() == "cpu"


@pytest.mark.parametrize("words", [[], ["--json"]])
@pytest.mark.parametrize("problems", [[], ["one"]])
def test_a_problem_is_the_exit_code(
    report: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    problems: list[str],
) -> None:
    data = {**report.report(), "problems": problems}
    monkeypatch.setattr(report, "report", lambda script: data)
    monkeypatch.setattr(report.job, "silence", lambda: None)
    assert report.main(words) == len(problems)
    said = capsys.readouterr().out
    assert json.loads(said)["problems"] == problems if words else said.count("problem: one") == len(problems)


def test_a_script_that_is_not_there_is_misuse(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(report.job, "silence", lambda: None)
    with pytest.raises(SystemExit) as caught:
        report.main(["--script", str(tmp_path / "none.py")])
    assert caught.value.code == 2
    assert f"no such script: {tmp_path}/none.py" in capsys.readouterr().err


def test_tail_changed_by_hand(liger: ModuleType, overlaid_tree: Path, tmp_path: Path) -> None:
    installed = importlib.import_module("megatron.core.liger.installed")
    core = Path(shutil.copytree(overlaid_tree / "megatron/core", tmp_path / "copy/megatron/core"))
    assert installed.op_state("swiglu", installed.files(core)) == "installed"
    with (core.parent.parent / FUSED).open("a", encoding="utf-8") as file:
        file.write("# mine\n")
    assert installed.op_state("swiglu", installed.files(core)) == "changed since it was applied"
    assert installed.op_state("another", installed.files(core)) == "not installed"


def test_counts_of_this_process(fused: ModuleType, liger: ModuleType) -> None:
    import torch

    fused.bias_swiglu_impl(torch.ones(2, 8, device="cuda" if torch.cuda.is_available() else "cpu"), None)
    data = liger.report()
    assert data["ops"]["swiglu"]["used"] == 1
    assert data["ops"]["swiglu"]["launches"] == {"swiglu_forward": 1}
    assert data["script"] is None
    json.dumps(data)


def test_script_says_shadowed(
    python: Python, overlaid_tree: Path, pristine_tree: Path, tmp_path: Path
) -> None:
    """A checkout that holds the script comes before the installed overlay."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "megatron").symlink_to(pristine_tree / "megatron")
    script = checkout / "pretrain.py"
    script.write_text("raise SystemExit('the script was run')\n", encoding="utf-8")
    done = python("-m", "megatron.core.liger", "--script", str(script), expect=1, cwd=tmp_path)
    core = f"{pristine_tree}/megatron/core"
    assert f"script {script} would import {core}\n  another one, not overlaid\n" in done.stdout
    assert f"problem: SHADOWED: {script} would import {core}, which is not overlaid" in done.stdout
    assert f"apply --tree {pristine_tree}" in done.stdout


def test_script_of_this_core(
    liger: ModuleType, overlaid_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(overlaid_tree))
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    with pytest.raises(FileNotFoundError, match="no such script"):
        liger.report(script)
    script.touch()
    data = liger.report(script)
    assert data["script"] == {
        "script": str(script),
        "core": f"{overlaid_tree}/megatron/core",
        "this": True,
        "overlaid": True,
        "overlay": 1,
    }
    assert data["problems"] == []
    text = sys.modules["megatron.core.liger.report"].text(data)
    assert f"would import {overlaid_tree}/megatron/core\n  this one, overlaid, version 1" in text

    monkeypatch.delenv("PYTHONPATH")
    (problem,) = liger.report(script)["problems"]
    assert problem == f"{script} would find no megatron.core"


class Places:
    """Small trees that hold a ``megatron/core``, for what finds it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def core(self, name: str, package: bool = False) -> Path:
        core = self.root / name / "megatron" / "core"
        core.mkdir(parents=True)
        (core / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
        if package:
            (core.parent / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
        return core

    def portion(self, name: str, package: bool = False) -> None:
        (self.root / name / "megatron" / "training").mkdir(parents=True)
        if package:
            (self.root / name / "megatron" / "__init__.py").touch()

    def script(self, name: str) -> Path:
        (self.root / name).mkdir(parents=True, exist_ok=True)
        path = self.root / name / "train.py"
        path.write_text("raise SystemExit('the script was run')\n", encoding="utf-8")
        return path

    def actual(self, script: Path) -> Path | None:
        """What a run finds: a script at the same place that asks the import system itself."""
        probe = script.with_name("probe_of_it.py")
        probe.write_text("import megatron.core\n", encoding="utf-8")
        done = subprocess.run([sys.executable, str(probe)], capture_output=True, text=True)
        files = [
            line.split('"')[1] for line in done.stderr.splitlines() if "megatron/" in line and '"' in line
        ]
        return Path(files[0]).parent if files else None


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return Places(tmp_path)


@pytest.fixture
def report(liger: ModuleType) -> ModuleType:
    return (
        importlib.import_module("megatron.core.liger.dispatch") and sys.modules["megatron.core.liger.report"]
    )


def test_script_folder_first(places: Places, report: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = places.core("near"), places.core("far")
    monkeypatch.setenv("PYTHONPATH", "far")  # relative to where it runs
    assert (
        report.core_of_script(places.script("near")) == near == places.actual(places.root / "near/train.py")
    )
    assert (
        report.core_of_script(places.script("other")) == far == places.actual(places.root / "other/train.py")
    )


def test_none(places: Places, report: ModuleType) -> None:
    assert report.core_of_script(places.script("other")) is None
    places.core(".")  # where the command is run, which is not where the script is
    assert report.core_of_script(places.script("other")) is None
    places.portion("portion")
    assert report.core_of_script(places.script("portion")) is None


def test_first_portion_with_core_wins(
    places: Places, report: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.portion("near")
    first, _ = places.core("a"), places.core("b")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["a", "b"]))
    script = places.script("near")
    assert report.core_of_script(script) == first == places.actual(script)


def test_a_package_ends_the_namespace(
    places: Places, report: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ``megatron/__init__.py`` wins over portions before it, and hides all others, even without a core."""
    places.core("near")
    package = places.core("package", package=True)
    monkeypatch.setenv("PYTHONPATH", "package")
    script = places.script("near")
    assert report.core_of_script(script) == package
    assert places.actual(script) == package.parent  # its __init__.py runs first
    places.portion("empty", package=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["empty", "package"]))
    assert report.core_of_script(script) is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no safe path")
def test_safe_path(places: Places, report: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    places.core("near")
    far = places.core("far")
    monkeypatch.setenv("PYTHONPATH", "far")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    script = places.script("near")
    assert report.core_of_script(script) == far == places.actual(script)


def test_links_and_folders(places: Places, report: ModuleType) -> None:
    """A linked script counts as where it leads to; a folder with a ``__main__.py`` as itself."""
    near = places.core("near")
    script = places.script("near")
    places.core("away")
    link = places.root / "away" / "link.py"
    link.symlink_to(script)
    assert report.core_of_script(link) == near
    (places.root / "near" / "__main__.py").touch()
    assert report.core_of_script(places.root / "near") == near


def test_modules_beside_the_script_are_not_imported(places: Places, report: ModuleType) -> None:
    near = places.core("near")
    script = places.script("near")
    for name in ("json", "importlib"):
        (places.root / "near" / f"{name}.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    shutil.copy(places.root / "near" / "json.py", places.root / "json.py")
    assert report.core_of_script(script) == near


def test_site_packages(places: Places, report: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment's own site-packages, and a source that a ``.pth`` file there names, come last."""
    venv.create(places.root / "env", with_pip=False, symlinks=True)
    python = places.root / "env/bin/python"
    site = next((places.root / "env/lib").glob("python*/site-packages"))
    monkeypatch.setattr(sys, "executable", str(python))
    source = places.core("source")
    (site / "megatron_core.pth").write_text(f"{source.parent.parent}\n", encoding="utf-8")
    script = places.script("other")
    assert report.core_of_script(script) == source == places.actual(script)
    installed = places.core(str(site.relative_to(places.root)))
    assert report.core_of_script(script) == installed == places.actual(script)
    near = places.core("near")
    assert report.core_of_script(places.script("near")) == near
