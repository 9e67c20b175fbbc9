# SPDX-License-Identifier: Apache-2.0
"""The pins of the real release hold, and drafts are made of what was really found."""

from __future__ import annotations

import ast
import copy
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts import pins, source
from scripts.errors import SourceError, UsageError
from scripts.manifest import PinnedFile, load, parse
from scripts.overlay import ROOT, sha256

FUNCTION = '''
@decorate(1)
def entry(a, b=2, *, c: int = 3) -> int:
    """Says something."""
    # a comment
    if a:
        return a + b
    return None
'''


def fingerprint(text: str, name: str = "entry") -> str:
    return pins.fingerprints(text.encode(), [name])[name]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a comment", "# another"),
        ('"""Says something."""', '"""Says nothing.\n\n    At length."""'),
        ('    """Says something."""\n', ""),
        ("a + b", "(a +  b)"),
        ("\n    return None", "\n\n\n    return None"),
        ("@decorate(1)", "x = 1\n\n\n@decorate(1)"),
    ],
)
def test_layout_comments_and_docstrings_do_not_count(old: str, new: str) -> None:
    assert old in FUNCTION
    assert fingerprint(FUNCTION.replace(old, new)) == fingerprint(FUNCTION)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a + b", "b + a"), ("b=2", "b=3"), ("b=2", "b"), ("*, c", "c"), ("c: int", "c: float"),
        ("-> int", "-> None"), ("@decorate(1)", "@decorate(2)"), ("@decorate(1)\n", ""),
        ("return None", "return 0"), ("return None", "return"), ("if a", "while a"),
        ("def entry", "async def entry"), ("= 3", "= True"), ("= 3", "= 3.0"),
    ],
)  # fmt: skip
def test_signature_and_body_do_count(old: str, new: str) -> None:
    assert old in FUNCTION
    assert fingerprint(FUNCTION.replace(old, new)) != fingerprint(FUNCTION)


def test_the_definition_that_counts_is_the_last_one() -> None:
    module = ast.parse("def entry(): pass\nif x:\n    entry = other\nelse:\n    class entry: pass\n")
    assert isinstance(pins.definition(module, "entry"), ast.ClassDef)
    assert pins.definition(module, "missing") is None


def test_the_pins_are_those_of_the_real_wheel(real_wheel: Path) -> None:
    manifest = load()
    release = manifest.release("megatron==0.16.1")
    pinned = {file.filename: file.sha256 for file in release.wheels}
    assert source.digest(real_wheel) == pinned[real_wheel.name]
    contents = {path: data for path, _, data in source.members(real_wheel)}
    for path, file in manifest.files.items():
        variant = file.variant(sha256(contents[path]))
        assert variant is not None
        assert "0.16.1" in variant.releases
        assert variant.entries == pins.fingerprints(contents[path], file.entries)


def test_every_published_file_of_the_release_is_pinned() -> None:
    release = load().release("megatron==0.16.1")
    tags = {(f"cp3{minor}", machine) for minor in (10, 11, 12, 13) for machine in ("x86_64", "aarch64")}
    assert {(w.filename.split("-")[2], w.filename.rsplit("28_", 1)[1][:-4]) for w in release.wheels} == tags
    assert len({w.sha256 for w in release.wheels}) == 8
    assert release.sdist is not None
    assert load().yanked == {"0.18.1": "wrong version", "0.19.1": "wrong version"}


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    folder = ROOT / "patches"
    return json.loads((folder / "releases.json").read_text()), json.loads((folder / "files.json").read_text())


PATH = "megatron/core/fusions/fused_bias_swiglu.py"
OTHER = b"def bias_swiglu_impl(input, bias):\n    return input\n"


def published(data: bytes, **changes: Any) -> pins.Published:
    values: dict[str, Any] = {
        "version": "0.99.0",
        "wheels": (PinnedFile("megatron_core-0.99.0-cp311-cp311-manylinux_2_28_x86_64.whl", "1" * 64),),
        "sdist": PinnedFile("megatron_core-0.99.0.tar.gz", "2" * 64),
        "files": {PATH: data},
        **changes,
    }
    return pins.Published(**values)


def test_a_draft_adds_a_variant_for_new_bytes() -> None:
    releases, files = documents()
    pins.draft(published(OTHER, tag="core_v0.99.0"), releases, files)
    manifest = parse(releases, files)
    assert manifest.release("megatron==0.99.0").wheels[0].sha256 == "1" * 64
    variant = manifest.files[PATH].variant(sha256(OTHER))
    assert variant is not None
    assert variant.releases == ("0.99.0",)
    assert "git tag core_v0.99.0, same bytes" in variant.source
    assert set(variant.entries) == {"bias_swiglu_impl"}
    assert manifest.newest() == "0.99.0"


def test_a_draft_joins_a_known_variant_and_can_be_repeated(real_wheel: Path) -> None:
    releases, files = documents()
    data = {path: data for path, _, data in source.members(real_wheel)}[PATH]
    before = copy.deepcopy(files["files"][PATH]["variants"])
    for _ in range(2):
        pins.draft(published(data), releases, files)
    (variant,) = [v for v in files["files"][PATH]["variants"] if v["sha256"] == sha256(data)]
    (old,) = [v for v in before if v["sha256"] == sha256(data)]
    assert variant["releases"] == [*old["releases"], "0.99.0"]
    assert variant["source"] == old["source"]


def test_a_withdrawn_release_is_listed_as_such_only() -> None:
    releases, files = documents()
    before = copy.deepcopy(files)
    pins.draft(published(OTHER, yanked="wrong version"), releases, files)
    assert releases["yanked"]["0.99.0"] == "wrong version"
    assert "0.99.0" not in releases["releases"]
    assert files == before


def fill(folder: Path, wheel: bytes, sdist: bytes | None) -> None:
    with zipfile.ZipFile(folder / "megatron_core-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", "w") as archive:
        archive.writestr(PATH, wheel)
    if sdist is not None:
        with tarfile.open(folder / "megatron_core-1.0.tar.gz", "w:gz") as archive:
            info = tarfile.TarInfo(f"megatron_core-1.0/{PATH}")
            info.size = len(sdist)
            archive.addfile(info, io.BytesIO(sdist))


def test_gather_compares_the_files_of_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "_pip", lambda *arguments: None)
    fill(tmp_path, OTHER, OTHER)
    found = pins.gather("1.0", load(), tmp_path)
    assert found.files == {PATH: OTHER}
    assert found.sdist is not None
    fill(tmp_path, OTHER, OTHER + b"#")
    with pytest.raises(SourceError, match="same bytes"):
        pins.gather("1.0", load(), tmp_path)


def test_gather_without_any_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "_pip", lambda *arguments: None)
    with pytest.raises(SourceError, match="wheels on PyPI"):
        pins.gather("1.0", load(), tmp_path)


def test_a_clone_without_the_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "_pip", lambda *arguments: None)
    fill(tmp_path, OTHER, None)
    with pytest.raises(UsageError, match=r"core_v1\.0"):
        pins.gather("1.0", load(), tmp_path, clone=tmp_path)
