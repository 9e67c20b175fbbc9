# SPDX-License-Identifier: Apache-2.0
"""The pins of the real release hold, and drafts are made of what was really found."""

from __future__ import annotations

import ast
import copy
import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from scripts import pins, source
from scripts.errors import ExpectationError, ReleaseError, SourceError, UsageError
from scripts.manifest import PinnedFile, load, parse
from scripts.overlay import ROOT, sha256
from scripts.wheel import pinned_license

PATH = "megatron/core/fusions/fused_bias_swiglu.py"
RELEASES = [
    "0.12.0", "0.12.1", "0.12.2", "0.12.3", "0.13.0", "0.13.1",
    "0.14.0", "0.15.0", "0.15.1", "0.15.2", "0.15.3",
    "0.16.0", "0.16.1", "0.17.0", "0.17.1",
    "0.18.0", "0.18.2", "0.19.0", "0.19.2",
]  # fmt: skip
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


def test_a_name_with_a_type_is_a_definition_too() -> None:
    found = pins.definition(
        ast.parse("entry = 1\nentry: int = 2\nother: int = 3\nx.entry: int = 4\n"), "entry"
    )
    assert found is not None
    assert found.lineno == 2


def test_a_method_is_an_entry_of_its_own() -> None:
    before = "class A:\n    def entry(self):\n        return 1\n    def other(self):\n        return 2\n"
    assert fingerprint(before, "A.entry") == fingerprint(before.replace("2", "3"), "A.entry")
    assert fingerprint(before, "A.entry") != fingerprint(before.replace("1", "3"), "A.entry")
    for name in ("A.gone", "B.entry", "entry", "A.entry.inner"):
        assert pins.definition(ast.parse(before), name) is None
    assert pins.definition(ast.parse("def A():\n    def entry(): ...\n"), "A.entry") is None


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
        found = pins.fingerprints(contents[path], file.entries)
        assert variant.entries == {name: found.get(name) for name in file.entries}


def test_every_published_file_of_every_release_is_pinned() -> None:
    manifest = load()
    assert list(manifest.releases) == RELEASES
    assert manifest.yanked == {"0.18.1": "wrong version", "0.19.1": "wrong version"}
    for version, release in manifest.releases.items():
        minors = (10, 11) if version < "0.14" else (10, 11, 12, 13) if version < "0.17" else (11, 12, 13)
        tags = {(f"cp3{minor}", machine) for minor in minors for machine in ("x86_64", "aarch64")}
        names = [wheel.filename for wheel in release.wheels]
        assert {(name.split("-")[2], name.rsplit("28_", 1)[1][:-4]) for name in names} == tags
        assert len({w.sha256 for w in release.wheels}) == len(tags) == len(names)
        assert release.sdist is not None


@pytest.mark.parametrize("version", ["0.18.1", "0.19.1"])
def test_a_withdrawn_release_is_refused_by_name(version: str) -> None:
    with pytest.raises(ReleaseError, match="withdrawn") as caught:
        load().release(f"megatron=={version}")
    assert version in caught.value.found
    assert all(release in caught.value.expected for release in RELEASES)


def test_only_the_first_release_has_no_weighted_form() -> None:
    variants = load().files[PATH].variants
    without = [v.releases for v in variants if v.entries["weighted_bias_swiglu_impl"] is None]
    assert without == [("0.12.0",)]


def test_the_licence_text_of_a_release_is_its_own() -> None:
    manifest = load()
    texts = [pinned_license(manifest, version) for version in RELEASES]
    assert [len(set(texts[:n])) for n in (7, 11, 19)] == [1, 2, 3]
    assert all(b"NVIDIA CORPORATION" in text for text in texts)


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    folder = ROOT / "patches"
    return json.loads((folder / "releases.json").read_text()), json.loads((folder / "files.json").read_text())


OTHER = b"def bias_swiglu_impl(input, bias):\n    return input\n"


def published(data: bytes, **changes: Any) -> pins.Published:
    version = changes.get("version", "0.99.0")
    name = f"megatron_core-{version}"
    values: dict[str, Any] = {
        "version": version,
        "wheels": (PinnedFile(f"{name}-cp311-cp311-manylinux_2_28_x86_64.whl", "1" * 64),),
        "sdist": PinnedFile(f"{name}.tar.gz", "2" * 64),
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
    assert variant.entries["bias_swiglu_impl"] is not None
    assert variant.entries["weighted_bias_swiglu_impl"] is None
    others = [file for path, file in manifest.files.items() if path != PATH]
    assert others
    known = load().files
    assert all(file.absent == (*known[file.path].absent, "0.99.0") for file in others)
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


def test_a_draft_keeps_variants_and_releases_in_order() -> None:
    releases, files = documents()
    pins.draft(published(OTHER, version="0.12.10"), releases, files)
    assert list(parse(releases, files).releases)[3:6] == ["0.12.3", "0.12.10", "0.13.0"]
    firsts = [variant["releases"][0] for variant in files["files"][PATH]["variants"]]
    assert firsts == ["0.12.0", "0.12.1", "0.12.10", "0.13.0", *load().previews]
    for _ in range(2):  # a file that was thought to be missing, and one that is missing now
        pins.draft(published(OTHER, version="0.12.10", files={}), releases, files)
        assert files["files"][PATH]["absent"] == ["0.12.10"]
    pins.draft(published(OTHER, version="0.12.10"), releases, files)
    assert "absent" not in files["files"][PATH]


def test_a_draft_pins_the_licence_text() -> None:
    releases, files = documents()
    known = pinned_license(load(), "0.12.0")
    assert pins.draft(published(OTHER, tag="core_v0.99.0", license=known), releases, files) == {}
    assert parse(releases, files).license("0.99.0").path == "LICENSES/Megatron-LM-0.12.0.txt"
    new = pins.draft(published(OTHER, tag="core_v0.99.0", license=b"new"), releases, files)
    assert new == {"LICENSES/Megatron-LM-0.99.0.txt": b"new"}
    pin = parse(releases, files).license("0.99.0")
    assert (pin.sha256, pin.source) == (sha256(b"new"), "LICENSE at git tag core_v0.99.0")
    assert pins.draft(published(OTHER), releases, files) == {}
    manifest = parse(releases, files)
    assert manifest.license("0.99.0") == manifest.license("0.19.2")
    assert "that of 0.19.2, the release before" in manifest.releases["0.99.0"].source


def test_the_first_release_of_all_needs_a_tag() -> None:
    releases, files = documents()
    with pytest.raises(UsageError, match="licence"):
        pins.draft(published(OTHER, version="0.1.0"), releases, files)


def test_a_withdrawn_release_is_listed_as_such_only() -> None:
    releases, files = documents()
    before = copy.deepcopy(files)
    pins.draft(published(OTHER, yanked="wrong version"), releases, files)
    assert releases["yanked"]["0.99.0"] == "wrong version"
    assert "0.99.0" not in releases["releases"]
    assert files == before


WHEEL = "megatron_core-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
SDIST = "megatron_core-1.0.tar.gz"


def fill(folder: Path, wheel: bytes, sdist: bytes | None) -> None:
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(PATH, wheel)
    if sdist is not None:
        with tarfile.open(folder / SDIST, "w:gz") as archive:
            info = tarfile.TarInfo(f"megatron_core-1.0/{PATH}")
            info.size = len(sdist)
            archive.addfile(info, io.BytesIO(sdist))


Fake = Callable[..., list[list[str]]]


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A pip that says which links it saw, and brings nothing; gives the arguments of its calls."""

    def install(*names: str, said: str = "") -> list[list[str]]:
        calls: list[list[str]] = []
        links = "".join(f"  Found link https://x/{name} (from y), version: 1\n" for name in names)

        def pip(version: str, folder: Path, arguments: list[str]) -> str:
            calls.append(arguments)
            return links + said

        monkeypatch.setattr(pins, "_pip", pip)
        return calls

    return install


def test_gather_compares_the_files_of_a_release(tmp_path: Path, index: Fake) -> None:
    index(WHEEL, SDIST, "megatron_core-1.1-cp311-cp311-any.whl", "megatron_core-1.2rc0.tar.gz")
    fill(tmp_path, OTHER, OTHER)
    found = pins.gather("1.0", load(), tmp_path)
    assert found.files == {PATH: OTHER}
    assert found.sdist is not None
    assert found.finals == ("1.0", "1.1")
    assert PATH not in found.absent
    assert len(found.absent) == len(load().files) - 1
    fill(tmp_path, OTHER, OTHER + b"#")
    with pytest.raises(SourceError, match="same bytes"):
        pins.gather("1.0", load(), tmp_path)


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_file_that_only_some_have_is_a_disagreement(tmp_path: Path, index: Fake, order: str) -> None:
    """Whether the wheel that lacks it comes before the one that has it or after."""
    other = WHEEL.replace("cp311", "cp310" if order == "first" else "cp312")
    index(WHEEL, other)
    fill(tmp_path, OTHER, None)
    with zipfile.ZipFile(tmp_path / other, "w") as archive:
        archive.writestr("megatron/core/__init__.py", b"")
    with pytest.raises(SourceError) as caught:
        pins.gather("1.0", load(), tmp_path)
    assert (caught.value.file, caught.value.expected) == (PATH, "the same bytes in every file of the release")
    assert caught.value.found == (f"only in {WHEEL}" if order == "first" else f"not in {other}")


def test_what_else_an_sdist_holds_is_passed_over(tmp_path: Path, index: Fake) -> None:
    """Other files, and what is no file at a path of a touched one."""
    index(WHEEL, SDIST)
    fill(tmp_path, OTHER, None)
    with tarfile.open(tmp_path / SDIST, "w:gz") as archive:
        for name, data in (("setup.py", b"x"), (PATH, OTHER)):
            info = tarfile.TarInfo(f"megatron_core-1.0/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        other = next(
            path for path in load().files if path.startswith("megatron/core/fusions/") and path != PATH
        )
        link = tarfile.TarInfo(f"megatron_core-1.0/{other}")
        link.type, link.linkname = tarfile.SYMTYPE, Path(PATH).name
        archive.addfile(link)
    assert pins.gather("1.0", load(), tmp_path).files == {PATH: OTHER}


def test_a_file_that_does_not_come_is_not_passed_over(tmp_path: Path, index: Fake) -> None:
    other = WHEEL.replace("311", "312")
    calls = index(WHEEL, other, SDIST)
    fill(tmp_path, OTHER, OTHER)
    with pytest.raises(SourceError, match="every file that the index lists"):
        pins.gather("1.0", load(), tmp_path)
    assert calls[1:] == [source.wheel_arguments(other)]


def test_gather_without_any_wheel(tmp_path: Path, index: Fake) -> None:
    index("megatron_core-1.1-cp311-cp311-any.whl", SDIST)
    with pytest.raises(SourceError, match="wheels on PyPI"):
        pins.gather("1.0", load(), tmp_path)


def test_why_a_release_was_withdrawn(tmp_path: Path, index: Fake) -> None:
    index(WHEEL, said="WARNING: … yanked\nReason for being yanked: wrong version\n")
    fill(tmp_path, OTHER, None)
    assert pins.gather("1.0", load(), tmp_path).yanked == "wrong version"


@pytest.mark.parametrize(
    ("code", "words", "refused"),
    [
        (0, "Saved", False),
        (1, "ERROR: No matching distribution found for megatron-core==1.0", False),
        (1, "ERROR: Could not find a version that satisfies it", False),
        (1, "ERROR: connection reset\n\n", True),
        (1, "", True),
    ],
)
def test_a_pip_that_fails_is_no_release_without_files(
    code: int, words: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], code, stdout="looked\n", stderr=words)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: done)
    if not refused:
        assert pins._pip("1.0", tmp_path, []) == "looked\n" + words
        return
    with pytest.raises(SourceError) as caught:
        pins._pip("1.0", tmp_path, [])
    assert caught.value.file == "megatron-core 1.0"
    assert caught.value.found == (words.strip() or "no word")


def test_a_release_that_nobody_pinned_is_told(
    tmp_path: Path, index: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"megatron_core-{v}.tar.gz" for v in ("0.11.0", "0.16.0", "0.18.1", "0.20.0", "0.21.0rc1")]
    index(WHEEL, *names)
    monkeypatch.setattr(pins.tempfile, "TemporaryDirectory", lambda prefix: nullcontext(str(tmp_path)))
    fill(tmp_path, OTHER, None)
    assert pins.main(["megatron==1.0"]) == 0
    said = capsys.readouterr()
    assert "note: 0.20.0 is published" in said.err
    assert said.err.count("is published") == 1
    assert json.loads(said.out)["releases"].keys() == {"1.0"}


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def test_a_clone_is_compared_at_the_tag(tmp_path: Path, index: Fake) -> None:
    index(WHEEL)
    fill(tmp_path, OTHER, None)
    clone = tmp_path / "clone"
    (clone / PATH).parent.mkdir(parents=True)
    (clone / PATH).write_bytes(OTHER)
    (clone / "LICENSE").write_bytes(b"terms")
    git(tmp_path, "init", "-q", str(clone))
    with pytest.raises(UsageError, match=r"core_v1\.0") as caught:
        pins.gather("1.0", load(), tmp_path, clone)
    assert "--untagged 1.0" in caught.value.remedy
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "one")
    git(clone, "tag", "core_v1.0")
    found = pins.gather("1.0", load(), tmp_path, clone)
    assert (found.tag, found.license) == ("core_v1.0", b"terms")
    extra = next(path for path in load().files if path != PATH)
    (clone / extra).parent.mkdir(parents=True, exist_ok=True)
    (clone / extra).write_bytes(b"")
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "two")
    git(clone, "tag", "-f", "core_v1.0")
    with pytest.raises(SourceError, match="only in tag core_v1"):
        pins.gather("1.0", load(), tmp_path, clone)


def test_pins_are_written_with_the_licence_text(
    tmp_path: Path, index: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index(WHEEL)
    fill(tmp_path, OTHER, None)
    clone, root = tmp_path / "clone", tmp_path / "root"
    (clone / PATH).parent.mkdir(parents=True)
    (clone / PATH).write_bytes(OTHER)
    (clone / "LICENSE").write_bytes(b"terms")
    git(tmp_path, "init", "-q", str(clone))
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "one")
    git(clone, "tag", "core_v1.0")
    for folder in ("patches", "LICENSES"):
        shutil.copytree(ROOT / folder, root / folder)
    monkeypatch.setattr(pins, "ROOT", root)
    monkeypatch.setattr(pins.tempfile, "TemporaryDirectory", lambda prefix: nullcontext(str(tmp_path)))
    assert pins.main(["megatron==1.0", "--clone", str(clone), "--write"]) == 0
    assert capsys.readouterr().out == ""
    manifest = load(root)
    assert manifest.newest() == "1.0"
    assert pinned_license(manifest, "1.0", root) == b"terms"
    assert [path for path, file in manifest.files.items() if "1.0" not in file.absent] == [PATH]
    (root / "LICENSES" / "Megatron-LM-1.0.txt").write_bytes(b"other terms")
    with pytest.raises(ExpectationError, match="sha256"):
        pinned_license(manifest, "1.0", root)
