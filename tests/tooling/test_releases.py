# SPDX-License-Identifier: Apache-2.0
"""Every pinned release: its wheel repacked, its tree overlaid and back, a checkout of its tag."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import tarfile
from collections.abc import Callable
from email.parser import BytesParser
from pathlib import Path

import pytest

from scripts import __main__ as cli
from scripts import source, wheel
from scripts.apply import apply_tree
from scripts.manifest import TouchedFile, load
from scripts.overlay import MARK, RECORD, load_overlay, sha256, split
from scripts.wheelpack import read_wheel

MANIFEST = load()
OVERLAY = load_overlay(manifest=MANIFEST)
Snapshot = Callable[[Path], object]

# 0.19.2 has no tag.
TAGGED = [v for v, release in MANIFEST.releases.items() if f"git tag core_v{v}" in release.source]

every_release = pytest.mark.parametrize("version", MANIFEST.releases)


def changed_files(version: str) -> dict[str, TouchedFile]:
    """The files that have an entry in a release."""
    return {
        path: file
        for path, file in MANIFEST.files.items()
        if any(version in variant.releases and variant.has_entries for variant in file.variants)
    }


def patched(version: str) -> wheel.Patched:
    """The wheel for the running Python (or the newest that the release has), with every op."""
    release = MANIFEST.releases[version]
    path = source.fetch_file(release, source.choose(release, nearest=True))
    upstream = read_wheel(path.read_bytes(), path.name)
    return wheel.patch(upstream, MANIFEST, OVERLAY, OVERLAY.ops, release)


@every_release
def test_the_wheel_is_upstreams_but_for_the_overlay(version: str) -> None:
    made = patched(version)
    before, after = made.upstream, made.wheel
    assert after.filename == before.filename.replace(version, f"{version}+liger.{OVERLAY.version}")
    assert after.files[f"{after.dist_info}/WHEEL"] == before.files[f"{before.dist_info}/WHEEL"]
    old, new = (BytesParser().parsebytes(w.files[w.metadata]) for w in (before, after))
    for name in ("Name", "Requires-Python", "Requires-Dist", "Provides-Extra"):
        assert old.get_all(name) == new.get_all(name)
    assert old["Requires-Python"] == (
        ">=3.12" if version >= "0.17" else ">=3.10" if version >= "0.13" else None
    )
    text = after.files[f"{after.dist_info}/licenses/LICENSES/Megatron-LM.txt"]
    assert sha256(text) == MANIFEST.license(version).sha256
    changed = changed_files(version)
    for path in (path for path in before.files if path.startswith("megatron/")):
        if path in changed:
            found = split(after.files[path])
            assert found is not None
            assert found.intact
            assert found.base == before.files[path]
            if changed[path].action == "extend":
                assert found.tail == OVERLAY.tails[path]
            else:
                assert OVERLAY.diffs[path].change(found.base) == (_above(after.files[path]), found.hunks)
                ast.parse(after.files[path])
        else:
            assert after.files[path] == before.files[path]
    helpers = [path for path in before.files if path.endswith(".so")]
    assert helpers
    assert json.loads(after.files[RECORD])["release"] == version


def _above(data: bytes) -> bytes:
    """What stands above the marker."""
    return data.partition(MARK)[0]


@every_release
def test_a_tree_of_it_is_overlaid_and_comes_back(
    version: str, tmp_path: Path, take_snapshot: Snapshot, capsys: pytest.CaptureFixture[str]
) -> None:
    release = MANIFEST.releases[version]
    upstream = source.fetch_file(release, source.choose(release, nearest=True))
    source.unpack(upstream, tmp_path / "site")
    before = take_snapshot(tmp_path / "site")
    tree = ["--tree", str(tmp_path / "site")]
    ops = ",".join(OVERLAY.ops)
    assert cli.main(["status", *tree, "--expect", "pristine"]) == 0
    assert cli.main(["apply", f"megatron=={version}", *tree, "--ops", ops]) == 0
    assert cli.main(["status", *tree, "--expect", "overlaid", "--ops", ops]) == 0
    made = patched(version).wheel.files
    changed = changed_files(version)
    for path in (*OVERLAY.added, *changed):
        assert (tmp_path / "site" / path).read_bytes() == made[path]
    others = [v for v in MANIFEST.releases if v not in json.loads(made[RECORD])["files_as_in"]]
    for other in others:
        assert cli.main(["apply", f"megatron=={other}", *tree, "--ops", ops, "--dry-run"]) == 5
    capsys.readouterr()
    assert cli.main(["diff", *tree]) == 0
    diff = capsys.readouterr().out
    assert diff.count("\ndiff --git") + 1 == len(OVERLAY.added) + len(changed) + 2  # both records
    assert cli.main(["revert", *tree]) == 0
    assert take_snapshot(tmp_path / "site") == before


@pytest.mark.parametrize("version", TAGGED)
def test_a_checkout_of_its_tag_has_the_same_files_afterwards(
    version: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    clone = pytestconfig.getoption("--clone")
    if clone is None:
        pytest.skip("needs --clone PATH, a Megatron-LM clone with the releases' tags")
    command = ["git", "-C", clone, "archive", "--format=tar", f"core_v{version}", "megatron"]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as sources:
        sources.extractall(tmp_path, filter="data")
    planned = apply_tree(tmp_path, OVERLAY.ops, MANIFEST, OVERLAY)
    assert version in planned.files_as_in
    made = patched(version).wheel.files
    changed = changed_files(version)
    for path in (*OVERLAY.added, *changed):
        assert (tmp_path / path).read_bytes() == made[path]
    records = [json.loads(data)["files"] for data in ((tmp_path / RECORD).read_bytes(), made[RECORD])]
    assert records[0] == records[1]


def test_all_releases_but_one_have_a_tag() -> None:
    assert [version for version in MANIFEST.releases if version not in TAGGED] == ["0.19.2"]
