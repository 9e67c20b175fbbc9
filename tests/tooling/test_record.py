# SPDX-License-Identifier: Apache-2.0
"""RECORD of an installed megatron-core: complete while the overlay is in, byte for byte back afterwards."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.apply import apply_tree, main
from scripts.errors import StateError, TreeError
from scripts.manifest import load
from scripts.overlay import PACKAGE, RECORD, load_overlay, sha256
from scripts.record import digest, line, rows, with_overlay, without_overlay
from scripts.revert import revert_tree

ALPHA = "megatron/core/fusions/alpha.py"
BETA = "megatron/core/fusions/beta.py"
BETA2 = "megatron/core/tensor_parallel/beta.py"
RECORD_FILE = "megatron_core-1.0.dist-info/RECORD"
BASE, EXTENDED = b"x = 1\n", b"x = 1\n# more\n"
AFTER = {ALPHA: EXTENDED, f"{PACKAGE}/new.py": b"n = 1\n", RECORD: b"{}\n"}
KNOWN = {path: [sha256(data)] for path, data in AFTER.items()}

ROWS = st.sampled_from(
    [
        line(ALPHA, BASE), line("other.py", b"1"), ALPHA.encode() + b",,", b"RECORD,,",
        b'"a,b.py",sha256=x,3',
        b"", b"no row", b"\xff,,", line(ALPHA, b"some third content"), b'"open quote,',
    ]
)  # fmt: skip


@given(rows=st.lists(st.tuples(ROWS, st.sampled_from([b"\n", b"\r\n"])), max_size=6), cut=st.booleans())
def test_record_comes_back_byte_for_byte(rows: list[tuple[bytes, bytes]], cut: bool) -> None:
    record = b"".join(row + end for row, end in rows)
    record = record.rstrip(b"\r\n") if cut else record
    changed = with_overlay(record, AFTER, {ALPHA: BASE})
    assert line(f"{PACKAGE}/new.py", b"n = 1\n") in changed
    assert (line(ALPHA, EXTENDED) in changed) == (line(ALPHA, BASE) in record.splitlines())
    assert without_overlay(changed, KNOWN, {ALPHA: BASE}) == record
    assert without_overlay(record, KNOWN, {ALPHA: BASE}) == record


def rows_of(world: Any) -> dict[str, tuple[str, str]]:
    rows = csv.reader(io.StringIO(world.path(RECORD_FILE).read_bytes().decode()))
    return {row[0]: (row[1], row[2]) for row in rows}


def test_record_lists_every_file_with_its_hash(installed: Any) -> None:
    before = installed.path(RECORD_FILE).read_bytes()
    installed.apply()
    rows = rows_of(installed)
    for path in (*installed.overlay.added, *installed.overlay.tails, RECORD):
        expected = line(path, installed.path(path).read_bytes()).decode().split(",")
        assert rows[path] == (expected[1], expected[2])
    assert b"\n" not in installed.path(RECORD_FILE).read_bytes().replace(b"\r\n", b"")
    installed.apply("alpha")
    installed.revert()
    assert installed.path(RECORD_FILE).read_bytes() == before


def test_two_installed_packages_are_refused(installed: Any) -> None:
    other = installed.path("megatron_core-0.9.dist-info/RECORD")
    other.parent.mkdir()
    other.write_bytes(b"")
    before = installed.snapshot()
    with pytest.raises(TreeError, match="one installed"):
        installed.apply()
    assert installed.snapshot() == before


def cut_after_record(world: Any, *ops: str) -> None:
    """An apply that ends before the first upstream file is written."""
    step = world.tree.write

    def write(tree: Any, path: str, data: bytes) -> None:
        if path in world.upstream:
            raise KeyboardInterrupt
        step(path, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scripts.tree.Tree.write", write)
        with pytest.raises(KeyboardInterrupt):
            world.apply(*ops)


def test_an_op_that_a_cut_run_had_listed_leaves_no_line(installed: Any) -> None:
    before = installed.snapshot()
    cut_after_record(installed)
    installed.apply("alpha")
    listed = rows(installed.path(RECORD_FILE).read_bytes())
    for path in (BETA, BETA2):
        assert listed[path] == digest(installed.upstream[path])
    installed.revert()
    assert installed.snapshot() == before


@pytest.mark.parametrize("step", ["revert", "apply"])
def test_a_file_that_is_not_the_one_of_its_line_is_refused(installed: Any, step: str) -> None:
    """Else the line would stay behind, and nobody would know whose it is."""
    before = installed.snapshot()
    cut_after_record(installed)
    installed.path(ALPHA).write_bytes(b"mine\n")
    cut = installed.snapshot()
    with pytest.raises(StateError, match="RECORD") as caught:
        installed.revert() if step == "revert" else installed.apply("beta")
    assert caught.value.file == ALPHA
    assert installed.snapshot() == cut
    installed.path(ALPHA).write_bytes(installed.upstream[ALPHA])
    installed.revert()
    assert installed.snapshot() == before


def test_an_installed_patched_wheel_is_left_to_pip(installed: Any) -> None:
    installed.apply()
    folder = installed.path("megatron_core-1.0.dist-info")
    folder.rename(folder.with_name("megatron_core-1.0+liger.1.dist-info"))
    before = installed.snapshot()
    assert not any(action.changes for action in installed.apply().actions)
    for step in (installed.revert, lambda: installed.apply("alpha")):
        with pytest.raises(StateError, match="force-reinstall"):
            step()
    assert installed.snapshot() == before


@pytest.fixture(scope="module")
def site_packages(real_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment's site-packages with upstream's wheel installed by pip."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    pip(
        folder,
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--ignore-requires-python",
        str(real_wheel),
    )
    (found,) = folder.glob("lib/python*/site-packages")
    return found


def pip(environment: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_apply_revert_and_uninstall_on_site_packages(
    site_packages: Path, take_snapshot: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    before = take_snapshot(site_packages)
    assert main(["--tree", str(site_packages)]) == 0
    said = capsys.readouterr().out
    assert "megatron_core-0.16.1.dist-info/RECORD" in said
    assert "running" in said or "run from this tree" in said
    revert_tree(site_packages)
    assert take_snapshot(site_packages) == before
    apply_tree(site_packages)
    environment = site_packages.parents[2]
    listed = pip(environment, "show", "-f", "megatron-core")
    for path in (*load_overlay().added, RECORD, *load().files):
        assert path in listed
    pip(environment, "uninstall", "--yes", "megatron-core")
    # Of upstream's own wheel pip leaves the empty namespace folder, too.
    left = [path for path in site_packages.rglob("*") if "megatron" in path.as_posix()]
    assert left == [site_packages / "megatron"]
