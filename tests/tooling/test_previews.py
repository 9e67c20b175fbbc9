# SPDX-License-Identifier: Apache-2.0
"""A commit of upstream's main that is pinned ahead of its release: told apart from releases everywhere."""

from __future__ import annotations

import copy
import io
import json
import re
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import lint, matrix, pins
from scripts.apply import apply_tree
from scripts.errors import ExpectationError, ReleaseError, UsageError
from scripts.lint import PatchSet
from scripts.manifest import Manifest, Preview, Release, load, parse, preview_name
from scripts.overlay import ROOT, load_overlay, sha256
from scripts.revert import revert_tree
from scripts.status import _claim, expect
from scripts.tree import Tree
from scripts.verify import inspect

ALPHA = "megatron/core/fusions/alpha.py"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "2.0.0.preview+01234567"
MANIFEST = load()


def documents() -> tuple[Any, Any]:
    texts = [
        (ROOT / "patches" / name).read_text(encoding="utf-8") for name in ("releases.json", "files.json")
    ]
    return json.loads(texts[0]), json.loads(texts[1])


def ahead(world: Any) -> Any:
    """The world with a preview that has another alpha, which the tree gets."""
    files = {}
    for path, file in world.manifest.files.items():
        first = file.variants[0]
        if path == ALPHA:
            new = replace(first, sha256=sha256(b"def alpha(x):\n    return x * 1\n"), releases=(NAME,))
            files[path] = replace(file, variants=(first, new))
        else:
            files[path] = replace(file, variants=(replace(first, releases=("1.0", NAME)),))
    world.path(ALPHA).write_bytes(b"def alpha(x):\n    return x * 1\n")
    previews = {NAME: Preview(NAME, COMMIT, "made here")}
    return replace(world, manifest=replace(world.manifest, files=files, previews=previews))


def claim(world: Any) -> str | None:
    return _claim(world.tree, inspect(world.tree.read, world.manifest, world.overlay), world.manifest)


def test_a_tree_of_it_is_overlaid_and_comes_back(world: Any) -> None:
    assert "preview" not in str(claim(world))
    w = ahead(world)
    before = w.snapshot()
    said = f"a preview, not a release: upstream's commit {COMMIT}, as far as the touched files say"
    assert claim(w) == said
    planned = w.apply()
    assert (planned.files_as_in, planned.release) == ((NAME,), None)
    expect(w.tree, "overlaid", w.overlay.ops, w.manifest, w.overlay)
    assert claim(w) == said
    w.revert()
    assert w.snapshot() == before


def test_nothing_is_built_from_it_by_name(world: Any) -> None:
    with pytest.raises(ReleaseError, match="a preview, which has no wheel") as caught:
        ahead(world).manifest.release(f"megatron=={NAME}")
    assert COMMIT in caught.value.remedy
    assert ahead(world).manifest.newest() == "1.0"


def test_the_matrix_names_it(world: Any) -> None:
    assert f"{NAME}: a preview, not here" in "\n".join(matrix.text([], ahead(world).manifest, (), 0.0))
    assert "a preview" not in "\n".join(matrix.text([], world.manifest, (), 0.0))


@pytest.mark.parametrize(
    ("name", "node", "expected"),
    [
        ("2.0.0", {"commit": COMMIT, "source": "x"}, "a version, then"),
        ("2.0.0.preview+76543210", {"commit": COMMIT, "source": "x"}, "a version, then"),
        ("main.preview+01234567", {"commit": COMMIT, "source": "x"}, "a version, then"),
        (NAME, {"commit": COMMIT[:8], "source": "x"}, "what matches"),
        (NAME, {"commit": COMMIT}, "str"),
        (NAME, {"commit": COMMIT, "source": "x", "wheels": []}, "one of commit, source"),
    ],
)
def test_the_schema_refuses(name: str, node: Any, expected: str) -> None:
    releases, files = documents()
    releases["previews"] = {name: node}
    with pytest.raises(ExpectationError) as caught:
        parse(releases, files)
    assert expected in caught.value.expected


def test_a_release_cannot_have_its_name() -> None:
    releases, files = documents()
    releases["releases"][NAME] = {"wheels": [], "source": "x"}
    with pytest.raises(ExpectationError, match="a version such as"):
        parse(releases, files)


def patch_set(**previews: Preview) -> PatchSet:
    return PatchSet(Manifest({"1.9.0": Release("1.9.0", ())}, {}, {}, previews=previews), {}, {})


def test_lint_finds_one_that_is_late_or_without_a_source() -> None:
    sound = Preview(NAME, COMMIT, "made here")
    assert not list(lint.previews_ahead(patch_set(**{NAME: sound})))
    late = list(lint.previews_ahead(patch_set(**{"1.9.0.preview+01234567": sound})))
    assert [p.message for p in late] == ["1.9.0.preview+01234567 is a preview, and 1.9.0 is pinned"]
    bare = list(lint.previews_ahead(patch_set(**{NAME: replace(sound, source="")})))
    assert [p.message for p in bare] == [f"{NAME} lacks a source"]


def test_lint_finds_one_that_no_file_lists(world: Any) -> None:
    w = ahead(world)
    assert not list(lint.releases_complete(PatchSet(w.manifest, {}, {})))
    files = {**w.manifest.files, ALPHA: replace(w.manifest.files[ALPHA], variants=())}
    missing = list(lint.releases_complete(PatchSet(replace(w.manifest, files=files), {}, {})))
    assert any(f"{NAME} has no variant" in p.message for p in missing)
    stray = list(lint.releases_complete(PatchSet(replace(w.manifest, previews={}), {}, {})))
    assert stray
    assert all("is not in" in p.message for p in stray)


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)
    return done.stdout.decode().strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with one commit, which says version 9.0.0 and has one of the touched files."""
    root = tmp_path / "clone"
    first = next(iter(MANIFEST.files))
    for path, text in (
        ("megatron/core/package_info.py", "MAJOR = 9\nMINOR = 0\nPATCH = 0\n"),
        (first, "def bias_swiglu_impl(input, bias): ...\n"),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    return root


def test_pin_takes_the_place_of_another(clone: Path) -> None:
    first = next(iter(MANIFEST.files))
    commit = git(clone, "rev-parse", "HEAD")
    name, full, contents = pins.gather_preview(clone, commit[:9], MANIFEST)
    assert (name, full, list(contents)) == (preview_name("9.0.0", commit), commit, [first])
    releases, files = documents()
    pins.draft_preview(name, full, contents, releases, files)
    manifest = parse(releases, files)
    assert list(manifest.previews) == [name]
    for path, file in manifest.files.items():
        listed = [v.sha256 for v in file.variants if name in v.releases]
        assert listed == ([sha256(contents[path])] if path in contents else [])
        assert (name in file.absent) == (path not in contents)
        assert not any(old in v.releases for old in MANIFEST.previews for v in file.variants)
    assert not list(lint.previews_are_of(manifest, clone))
    again = copy.deepcopy((releases, files))
    pins.draft_preview(name, full, contents, releases, files)
    assert (releases, files) == again


def test_pin_prints_a_preview(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --write nothing else changes, and no release is shown."""
    commit = git(clone, "rev-parse", "HEAD")
    assert pins.main(["--preview", "HEAD", "--clone", str(clone)]) == 0
    shown = json.loads(capsys.readouterr().out)
    name = preview_name("9.0.0", commit)
    assert (list(shown["previews"]), shown["releases"], shown["yanked"]) == ([name], {}, {})
    assert shown["previews"][name]["commit"] == commit
    assert name in json.dumps(shown["files"])


def test_a_release_takes_the_place_of_its_preview() -> None:
    releases, files = documents()
    assert releases["previews"]
    (version,) = (name.split(".preview")[0] for name in releases["previews"])
    pins.draft(pins.Published(version, (), None, {}, "tag", license=b"terms"), releases, files)
    assert releases["previews"] == {}
    assert ".preview+" not in json.dumps(files)


def test_lint_compares_with_a_clone(clone: Path) -> None:
    commit = git(clone, "rev-parse", "HEAD")
    name, full, contents = pins.gather_preview(clone, commit, MANIFEST)
    releases, files = documents()
    pins.draft_preview(name, full, {path: data + b"#" for path, data in contents.items()}, releases, files)
    (problem,) = lint.previews_are_of(parse(releases, files), clone)
    assert re.search(r"is [0-9a-f]{12} here, [0-9a-f]{12} in the commit", problem.message)
    pins.draft_preview(name, full, {}, releases, files)
    (problem,) = lint.previews_are_of(parse(releases, files), clone)
    assert "is no file here" in problem.message


def test_pin_refuses(clone: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=COMMIT):
        pins.gather_preview(clone, COMMIT, MANIFEST)
    git(clone, "rm", "-q", "megatron/core/package_info.py")
    git(clone, "commit", "-qm", "two")
    with pytest.raises(UsageError, match="a version in"):
        pins.gather_preview(clone, "HEAD", MANIFEST)
    releases, files = documents()
    with pytest.raises(UsageError, match="a commit past"):
        pins.draft_preview(preview_name(MANIFEST.newest(), COMMIT), COMMIT, {}, releases, files)
    for words in ([], ["--preview", COMMIT], ["megatron==1.0", "--preview", COMMIT, "--clone", str(clone)]):
        with pytest.raises(UsageError, match="releases, or a preview and a clone"):
            pins.main(words)


def test_a_checkout_of_the_commit_is_overlaid_whole(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    clone = pytestconfig.getoption("--clone")
    if clone is None:
        pytest.skip("needs --clone PATH, a Megatron-LM clone with the preview's commit")
    assert not list(lint.previews_are_of(MANIFEST, Path(clone)))
    (preview,) = MANIFEST.previews.values()
    command = ["git", "-C", clone, "archive", "--format=tar", preview.commit, "megatron"]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as sources:
        sources.extractall(tmp_path, filter="data")
    overlay = load_overlay(manifest=MANIFEST)
    before = {path: (tmp_path / path).read_bytes() for path in MANIFEST.files}
    planned = apply_tree(tmp_path, overlay.ops, MANIFEST, overlay)
    assert planned.files_as_in == (preview.version,)
    assert planned.bases.keys() == MANIFEST.files.keys()
    assert (planned.left, planned.missing) == ((), ())
    expect(Tree.locate(tmp_path), "overlaid", overlay.ops, MANIFEST, overlay)
    revert_tree(tmp_path, MANIFEST, overlay)
    assert {path: (tmp_path / path).read_bytes() for path in MANIFEST.files} == before
