# SPDX-License-Identifier: Apache-2.0
"""The form of an extended file."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import overlay
from scripts.errors import ExpectationError
from scripts.overlay import ROOT, extend, load_overlay, overlay_version, sha256, split

PATCH = "patches/megatron/core/models/backends.py.patch"
LINES = st.lists(st.sampled_from([b"x = 1", b"  y  ", b"", b"\t", b"# caf\xc3\xa9", b"\xff\x00"]), max_size=4)
BASES = st.builds(
    lambda lines, end, last: end.join(lines) + last,
    LINES,
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.sampled_from([b"", b"\n", b"\r\n", b"\r", b"   ", b"\n\n\n"]),
)


@given(base=BASES | st.binary(max_size=40), tail=st.binary(max_size=40), version=st.integers(0, 99))
def test_split_gives_back_what_extend_joined(base: bytes, tail: bytes, version: int) -> None:
    found = split(extend(base, tail, "some_op", version))
    assert found is not None
    assert (found.base, found.tail, found.version, found.op, found.intact) == (
        base,
        tail,
        version,
        "some_op",
        True,
    )


@given(base=BASES, tail=st.binary(max_size=20))
def test_the_marker_stands_on_a_line_of_its_own(base: bytes, tail: bytes) -> None:
    data = extend(base, tail, "op")
    assert data.startswith(base)
    assert data.endswith(tail)
    marker = data[len(base) : len(data) - len(tail)]
    assert marker.lstrip(b"\n").startswith(b"# >>> liger overlay for Megatron-Core, version ")
    assert marker.startswith(b"\n") == (base != b"" and not base.endswith(b"\n"))
    assert marker.endswith(b"\n")


@given(base=BASES)
def test_an_upstream_file_that_quotes_a_marker_is_still_told_apart(base: bytes) -> None:
    upstream = extend(base, b"not ours\n", "op", 7)
    found = split(extend(upstream + b"x = 1\n", b"tail\n", "op", 1))
    assert found is not None
    assert found.intact
    assert found.base == upstream + b"x = 1\n"


@given(base=st.binary(max_size=60))
def test_a_file_without_a_marker_is_not_extended(base: bytes) -> None:
    assert split(base) is None


@pytest.mark.parametrize(
    ("change", "base_intact", "tail_intact"),
    [
        (lambda d: d + b"#", True, False),
        (lambda d: d.replace(b"tail\n", b"tale\n"), True, False),
        (lambda d: b"#" + d, False, True),
        (lambda d: d.replace(b"x = 1", b"x = 2"), False, True),
        (lambda d: d.replace(b"\n", b"\r\n"), False, False),
        (lambda d: d.replace(b"# >>>", b"\n# >>>"), False, True),
        (lambda d: d.replace(b"base-bytes=6", b"base-bytes=5"), False, True),
        (lambda d: d.replace(b"base-bytes=6", b"base-bytes=999"), False, True),
    ],
)
def test_changes_by_hand_show(change: object, base_intact: bool, tail_intact: bool) -> None:
    assert callable(change)
    found = split(change(extend(b"x = 1\n", b"tail\n", "op", 1)))
    assert found is not None
    assert (found.base_intact, found.tail_intact) == (base_intact, tail_intact)


def test_the_marker_says_what_it_must() -> None:
    base, tail = b"x = 1", b"tail\n"
    assert extend(base, tail, "swiglu", 3) == (
        b"x = 1\n# >>> liger overlay for Megatron-Core, version 3 (op swiglu): all below this line was"
        b" added to the upstream file, which ends above it. base-sha256=%b"
        b" base-bytes=5 tail-sha256=%b\ntail\n" % (sha256(base).encode(), sha256(tail).encode())
    )


def test_the_projects_own_overlay_loads() -> None:
    ours = load_overlay()
    assert ours.version == overlay_version() >= 1
    assert ours.ops
    assert "megatron/core/liger/__init__.py" in ours.added
    assert "megatron/core/liger/kernels/gated.py" in ours.added
    assert "megatron/core/fusions/fused_bias_swiglu.py" in ours.tails
    assert not set(ours.added) & set(ours.tails)


VERSION = "overlay/megatron/core/liger/version.py"
TAIL = "overlay/megatron/core/fusions/fused_bias_swiglu.py"
FAULTS: dict[str, tuple[str, bytes | None, str, str]] = {
    "a tail without a pin": (TAIL.replace("swiglu", "other"), b"", "a pin in patches/files.json", "none"),
    "a pin without a tail": (TAIL, None, "the tail of a pinned file", "no file"),
    "no version": (VERSION, b"", "OVERLAY_VERSION = <integer>", "no such line"),
    "no file with it": (VERSION, None, "OVERLAY_VERSION = <integer>", "no such line"),
    "a version of text": (
        VERSION,
        b"OVERLAY_VERSION: str = '1'",
        "OVERLAY_VERSION = <integer>",
        "no such line",
    ),
    "a version that is a truth": (
        VERSION,
        b"OVERLAY_VERSION = True",
        "OVERLAY_VERSION = <integer>",
        "no such",
    ),
    "a version to compute": (
        VERSION,
        b"OVERLAY_VERSION = 1 + 1",
        "OVERLAY_VERSION = <integer>",
        "no such line",
    ),
    "another name": (VERSION, b"VERSION = 1", "OVERLAY_VERSION = <integer>", "no such line"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_sources_that_do_not_hold_together_stop_every_command(tmp_path: Path, case: str) -> None:
    path, data, expected, found = FAULTS[case]
    for name in ("overlay", "kernels", "patches"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / path).unlink(missing_ok=True)
    if data is not None:
        (tmp_path / path).write_bytes(data)
    with pytest.raises(ExpectationError) as caught:
        load_overlay(tmp_path)
    assert (caught.value.file, caught.value.expected) == (path, expected)
    assert found in caught.value.found
    assert caught.value.exit_code == 1


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own with this project's sources, committed."""
    for name in os.environ:
        if name.startswith("GIT_"):
            monkeypatch.delenv(name)
    root = tmp_path / "checkout"
    for name in ("overlay", "kernels", "patches"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / ".gitignore").write_text("*.log\nignored.py\n")
    (root / "kernels/notes.md").write_text("no part of a tree\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    commit(root)
    return root


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(root: Path) -> None:
    person = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgSign=false")
    git(root, *person, "commit", "-q", "--allow-empty", "-m", "all")


def nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean checkout."""


def other_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("overlay/notes.txt", "kernels/run.log", "patches/files.json.orig", "new.py", "scripts.py"):
        (root / path).write_bytes(b"")
    (root / "kernels/folder.py").mkdir()
    (root / "kernels/__pycache__").mkdir()
    (root / "kernels/__pycache__/rows.cpython-311.pyc").write_bytes(b"")


def another_repository_in_the_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(root.parent, "init", "-q", "other")
    monkeypatch.setenv("GIT_DIR", str(root.parent / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(root.parent / "other"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(root.parent / "no index"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(root.parent / "other" / ".git" / "objects"))


def settings(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("status.showUntrackedFiles", "no"),
        ("core.fileMode", "true"),
        ("core.autocrlf", "true"),
    ):
        git(root, "config", name, value)
    (root / "kernels/rows.py").chmod(0o755)


def no_index(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / ".git/index").unlink()


def another_owner(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for path in (root, root / ".git"):
        os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    "change",
    [nothing, other_files, another_repository_in_the_environment, settings, no_index, another_owner],
)
def test_the_commit_depends_on_what_is_written_alone(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    change(checkout, monkeypatch)
    assert load_overlay(checkout).commit == head


def test_a_head_whose_files_git_does_not_list(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shallow or a damaged repository: no commit is better than a wrong one."""
    run = overlay._git
    monkeypatch.setattr(
        overlay, "_git", lambda root, *words: None if words[0] == "ls-tree" else run(root, *words)
    )
    assert load_overlay(checkout).commit is None


def test_a_repository_of_longer_hashes(checkout: Path) -> None:
    shutil.rmtree(checkout / ".git")
    command = ["git", "-C", str(checkout), "init", "-q", "--object-format=sha256"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this git has no sha256 repositories")
    git(checkout, "add", ".")
    commit(checkout)
    head = git(checkout, "rev-parse", "HEAD")
    assert len(head) == 64
    assert load_overlay(checkout).commit == head


@pytest.mark.parametrize(
    "path", ["kernels/rows.py", "kernels/fresh.py", "kernels/ignored.py", "patches/releases.json", PATCH]
)
def test_other_bytes_than_the_commits_show(checkout: Path, path: str) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    file = checkout / path
    file.write_bytes((file.read_bytes() if file.exists() else b"") + b"\n")
    assert load_overlay(checkout).commit == f"{head}+dirty"
    git(checkout, "update-index", "--assume-unchanged", "kernels/rows.py")
    assert load_overlay(checkout).commit == f"{head}+dirty"


def test_a_missing_file_shows(checkout: Path) -> None:
    (checkout / "kernels/rows.py").unlink()
    assert str(load_overlay(checkout).commit).endswith("+dirty")


@pytest.mark.parametrize("how", ["no repository", "a repository above", "no git", "no commit"])
def test_sources_without_git_have_no_commit(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "no git":
        monkeypatch.setenv("PATH", str(checkout))
    else:
        shutil.rmtree(checkout / ".git")
    if how == "a repository above":
        git(checkout.parent, "init", "-q")
        git(
            checkout.parent,
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "commit",
            "-q",
            "--allow-empty",
            "-m",
            "a",
        )
    if how == "no commit":
        git(checkout, "init", "-q")
    assert load_overlay(checkout).commit is None
