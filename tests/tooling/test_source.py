# SPDX-License-Identifier: Apache-2.0
"""Fetching: the right wheel is chosen, and nothing that is not pinned is ever opened."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts import source
from scripts.errors import SourceError, UsageError
from scripts.manifest import PinnedFile, Release, load

NAME = "megatron_core-1.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"


def make_wheel(path: Path, files: dict[str, bytes] | None = None) -> Path:
    info = "megatron_core-1.0.dist-info"
    files = files or {
        "megatron/core/__init__.py": b"",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: megatron-core\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Release]:
    """A folder that pip takes wheels from instead of an index, and the release that pins what is in it."""
    folder = tmp_path / "shop"
    folder.mkdir()
    wheel = make_wheel(folder / NAME)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder, Release("1.0", (PinnedFile(NAME, source.digest(wheel)),))


def test_fetch_takes_the_pinned_wheel_with_pip_alone(shop: tuple[Path, Release], tmp_path: Path) -> None:
    _, release = shop
    found = source.fetch(release, "3.11", "x86_64", tmp_path / "cache")
    assert found.name == NAME
    assert source.digest(found) == release.wheels[0].sha256


def test_a_cached_wheel_needs_no_pip(
    shop: tuple[Path, Release], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, release = shop
    cached = source.fetch(release, "3.11", "x86_64", tmp_path / "cache")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    assert source.fetch(release, "3.11", "x86_64", tmp_path / "cache") == cached


@pytest.mark.parametrize("brought", [True, False])
def test_what_another_run_brought_meanwhile_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brought: bool
) -> None:
    """While this one waited for the lock: taken if it is the pinned file, else replaced."""
    whole = make_wheel(tmp_path / "whole.whl").read_bytes()
    pin = PinnedFile(NAME, source.digest(tmp_path / "whole.whl"))
    calls: list[str] = []

    @contextmanager
    def waited(cache: Path) -> Iterator[bool]:
        (cache / NAME).write_bytes(whole if brought else b"half")
        yield True

    def download(version: str, filename: str, folder: Path) -> Path:
        calls.append(version)
        (folder / filename).write_bytes(whole)
        return folder / filename

    monkeypatch.setattr(source, "locked", waited)
    monkeypatch.setattr(source, "download", download)
    found = source.fetch_file(Release("1.0", (pin,)), pin, tmp_path / "cache")
    assert found.read_bytes() == whole
    assert calls == ([] if brought else ["1.0"])
    monkeypatch.setattr(source, "locked", lambda cache: pytest.fail("it waited"))
    assert source.fetch_file(Release("1.0", (pin,)), pin, tmp_path / "cache") == found
    found.write_bytes(b"half")
    with pytest.raises(pytest.fail.Exception, match="it waited"):
        source.fetch_file(Release("1.0", (pin,)), pin, tmp_path / "cache")


@pytest.mark.parametrize(
    ("code", "brings", "said", "found"),
    [
        (0, NAME, "", None),
        (1, NAME, "ERROR: an end that was not good", "an end that was not good"),
        (0, "other.whl", "WARNING: not this line\n\n", "other.whl"),
        (0, None, "", "nothing"),
        (1, None, "ERROR: first\nERROR: last\nWARNING: upgrade pip\n", "ERROR: last"),
    ],
)
def test_a_download_is_done_when_pip_says_so_and_the_file_is_there(
    code: int,
    brings: str | None,
    said: str,
    found: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pip(*_: object, **__: object) -> Any:
        if brings is not None:
            (tmp_path / brings).write_bytes(b"")
        return subprocess.CompletedProcess([], code, stdout="Looking in indexes: https://x\n", stderr=said)

    monkeypatch.setattr(subprocess, "run", pip)
    if found is None:
        assert source.pip_download("megatron-core==1.0", tmp_path, [], NAME) == tmp_path / NAME
        return
    with pytest.raises(SourceError) as caught:
        source.pip_download("megatron-core==1.0", tmp_path, [], NAME)
    assert caught.value.found.removeprefix("ERROR: ").startswith(found.removeprefix("ERROR: ") + "; ")
    assert caught.value.found.endswith("looked in https://x")


@pytest.mark.parametrize(
    "words", ["externally-managed-environment", "Disk quota exceeded", "no space left on device"]
)
def test_more_of_pips_words_have_a_remedy(words: str, tmp_path: Path) -> None:
    remedy = source.pip_remedy(f"ERROR: {words}", tmp_path / "folder")
    assert remedy is not None
    assert ("BREAK_SYSTEM_PACKAGES" in remedy) == words.startswith("externally")
    assert (str(tmp_path) in remedy) != words.startswith("externally")
    assert source.pip_remedy("ERROR: something else", tmp_path) is None


def test_a_damaged_cache_is_fetched_anew(shop: tuple[Path, Release], tmp_path: Path) -> None:
    _, release = shop
    cached = source.fetch(release, "3.11", "x86_64", tmp_path / "cache")
    cached.write_bytes(cached.read_bytes()[:-1])
    assert (
        source.digest(source.fetch(release, "3.11", "x86_64", tmp_path / "cache")) == release.wheels[0].sha256
    )


def test_other_bytes_than_pinned_are_refused_and_not_kept(shop: tuple[Path, Release], tmp_path: Path) -> None:
    folder, release = shop
    make_wheel(folder / NAME, {**_contents(folder / NAME), "megatron/core/evil.py": b"evil = 1\n"})
    with pytest.raises(SourceError) as caught:
        source.fetch(release, "3.11", "x86_64", tmp_path / "cache")
    assert caught.value.exit_code == 4
    assert release.wheels[0].sha256 in caught.value.expected
    assert list((tmp_path / "cache").iterdir()) == []


def _contents(path: Path) -> dict[str, bytes]:
    return {name: data for name, _, data in source.members(path)}


def test_a_folder_in_the_wheels_place(shop: tuple[Path, Release], tmp_path: Path) -> None:
    (tmp_path / "cache" / NAME).mkdir(parents=True)
    with pytest.raises(SourceError) as caught:
        source.fetch(shop[1], "3.11", "x86_64", tmp_path / "cache")
    assert caught.value.found == "a folder"
    assert (tmp_path / "cache" / NAME).is_dir()


@pytest.mark.parametrize("name", ["megatron_core-1.0.tar.gz", "megatron_core-1.0-py3-none-any.whl"])
def test_a_pin_that_is_no_wheel_of_a_python(name: str, tmp_path: Path) -> None:
    release = Release("1.0", (PinnedFile(name, "0" * 64),))
    with pytest.raises(SourceError, match="correct the pin"):
        source.fetch_file(release, release.wheels[0], tmp_path / "cache")


def test_no_wheel_to_be_had(shop: tuple[Path, Release], tmp_path: Path) -> None:
    folder, release = shop
    (folder / NAME).unlink()
    with pytest.raises(SourceError) as caught:
        source.fetch(release, "3.11", "x86_64", tmp_path / "cache")
    assert "PIP_FIND_LINKS" in caught.value.remedy


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
@pytest.mark.parametrize(
    ("platform", "machine"),
    [
        ("manylinux_2_28_aarch64", "aarch64"),
        ("manylinux_2_24_x86_64", "x86_64"),
        ("x86_64", "x86_64"),
        ("aarch64", "aarch64"),
    ],
)
def test_every_python_and_platform_of_the_real_release(python: str, platform: str, machine: str) -> None:
    found = source.choose(load().release("megatron==0.16.1"), python, platform).filename
    assert f"-cp{python.replace('.', '')}-" in found
    assert found.endswith(f"{machine}.whl")


def test_the_running_python_is_the_default() -> None:
    found = source.choose(load().release("megatron==0.16.1")).filename
    assert f"-cp{sys.version_info[0]}{sys.version_info[1]}-" in found


@pytest.mark.parametrize(
    ("python", "platform"), [("3.9", None), ("3.11", "win_amd64"), ("3.11", "x86"), ("3.99", None)]
)
def test_what_upstream_does_not_have(python: str, platform: str | None) -> None:
    with pytest.raises(SourceError, match="manylinux_2_28_aarch64"):
        source.choose(load().release("megatron==0.16.1"), python, platform)


def test_the_nearest_wheel_is_the_newest_pythons_for_the_machine() -> None:
    names = [
        "megatron_core-1.0-py3-none-any.whl",
        "megatron_core-1.0-cp39-cp39-manylinux_2_28_x86_64.whl",
        "megatron_core-1.0-cp310-cp310-manylinux_2_28_x86_64.whl",
        "megatron_core-1.0-cp313-cp313-manylinux_2_28_aarch64.whl",
        "megatron_core-1.0-cp312-cp312-musllinux_1_2_x86_64.whl",
    ]
    release = Release("1.0", tuple(PinnedFile(name, "0" * 64) for name in names))
    assert source.choose(release, "3.12", "x86_64", nearest=True).filename == names[2]
    assert source.choose(release, "3.9", "x86_64", nearest=True).filename == names[1]
    for platform, nearest in (("x86_64", False), ("riscv64", True)):
        with pytest.raises(SourceError) as caught:
            source.choose(release, "3.12", platform, nearest=nearest)
        assert caught.value.expected == f"a wheel for Python 3.12 on {platform}"
        assert caught.value.found.startswith("wheels for 3.9 manylinux_2_28_x86_64, 3.10 ")


@pytest.mark.parametrize("python", ["3", "python3.11", "2.7", "3.11.4", " "])
def test_a_malformed_python(python: str) -> None:
    with pytest.raises(UsageError):
        source.choose(load().release("megatron==0.16.1"), python)


@pytest.mark.parametrize(
    "name", ["../out.py", "/etc/out.py", "megatron/../../out.py", "megatron\\..\\out.py"]
)
def test_a_wheel_that_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    wheel = make_wheel(tmp_path / NAME, {name: b""})
    with pytest.raises(SourceError, match="paths inside"):
        source.unpack(wheel, tmp_path / "dest")
    assert not (tmp_path / "out.py").exists()


def test_what_is_no_wheel(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"PK no zip")
    with pytest.raises(SourceError, match="a wheel"):
        source.unpack(tmp_path / NAME, tmp_path / "dest")


def test_unpacked_files_have_plain_modes(real_tree: Path) -> None:
    modes = {stat.S_IMODE(path.stat().st_mode) for path in real_tree.rglob("*") if path.is_file()}
    assert modes <= {0o644, 0o755}
    assert (real_tree / "megatron/core/__init__.py").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PIP_CONSTRAINT", "constraints.txt"),
        ("PIP_REQUIRE_HASHES", "1"),
        ("PIP_REQUIRE_VIRTUALENV", "1"),
        ("PIP_NO_BINARY", ":all:"),
        ("PIP_PRE", "1"),
        ("PIP_PLATFORM", "win_amd64"),
    ],
)
@pytest.mark.parametrize("where", ["environment", "configuration"])
def test_pips_settings_for_other_packages_do_not_get_in_the_way(
    shop: tuple[Path, Release],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    where: str,
) -> None:
    """Containers set a constraint file for all that is installed later, sites ask for hashes or for an
    environment.
    """
    _, release = shop
    (tmp_path / "constraints.txt").write_text("megatron-core==0.9\n")
    value = value.replace("constraints.txt", str(tmp_path / "constraints.txt"))
    if where == "environment":
        monkeypatch.setenv(name, value)
    else:
        setting = name.removeprefix("PIP_").lower().replace("_", "-")
        (tmp_path / "pip.conf").write_text(f"[global]\n{setting} = {value}\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert source.fetch(release, "3.11", "x86_64", tmp_path / "cache").name == NAME


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("ERROR: Could not find an activated virtualenv (required).", "PIP_REQUIRE_VIRTUALENV"),
        ("ERROR: In --require-hashes mode, all requirements must have their versions pinned", "HASHES"),
        ("The user requested (constraint) megatron-core==0.9", "PIP_CONSTRAINT"),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "free some",
        ),
        ("/usr/bin/python3: No module named pip", "ensurepip"),
    ],
)
def test_the_likely_cause_of_pips_failure_is_named(
    said: str, remedy: str, shop: tuple[Path, Release], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr=said)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(SourceError) as caught:
        source.fetch(shop[1], "3.11", "x86_64", tmp_path / "cache")
    assert remedy in caught.value.remedy


def test_what_a_killed_download_left_is_swept_away(shop: tuple[Path, Release], tmp_path: Path) -> None:
    left = tmp_path / "cache" / "download-a1b2c3d4"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    source.fetch(shop[1], "3.11", "x86_64", tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [NAME]


def test_a_download_that_goes_on_is_left_alone(
    shop: tuple[Path, Release], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = tmp_path / "cache" / "download-a1b2c3d4"
    live.mkdir(parents=True)

    def refuse(fd: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    source.fetch(shop[1], "3.11", "x86_64", tmp_path / "cache")
    assert live.exists()


def test_two_fetches_at_once_bring_it_once(
    shop: tuple[Path, Release], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    calls.mkdir()
    bring = source.download

    def count(version: str, filename: str, folder: Path) -> Path:
        (calls / str(os.getpid())).touch()
        return bring(version, filename, folder)

    monkeypatch.setattr(source, "download", count)
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                source.fetch(shop[1], "3.11", "x86_64", tmp_path / "cache")
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert len(list(calls.iterdir())) == 1


REFUSED = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\nERROR: no luck"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("time.sleep", found.append)
    return found


@pytest.mark.parametrize(
    "said",
    [
        REFUSED,
        "ERROR: HTTP error 503 while getting https://index/x.whl",
        "urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool: Read timed out.",
        "ERROR: Could not install packages due to an OSError: Max retries exceeded with url",
        "urllib3.exceptions.IncompleteRead: IncompleteRead(1 bytes read, 2 more expected)",
    ],
)
def test_a_network_that_fails_twice(
    said: str,
    shop: tuple[Path, Release],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pauses: list[float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, failures = subprocess.run, [said, said]

    def fail_at_first(*arguments: Any, **named: Any) -> Any:
        if failures:
            return subprocess.CompletedProcess([], 1, stdout="", stderr=failures.pop())
        return run(*arguments, **named)

    monkeypatch.setattr(subprocess, "run", fail_at_first)
    found = source.fetch(shop[1], "3.11", "x86_64", tmp_path / "cache")
    assert source.digest(found) == shop[1].wheels[0].sha256
    assert pauses == [5, 20]
    assert capsys.readouterr().err.count(f"{NAME}: ") == 2


@pytest.mark.parametrize(("said", "times"), [(REFUSED, 3), ("ERROR: No matching distribution found", 1)])
def test_what_is_said_of_a_download_that_fails(
    said: str,
    times: int,
    shop: tuple[Path, Release],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pauses: list[float],
) -> None:
    """The file, and where it was looked for. Only what may pass is tried again."""
    calls: list[object] = []

    def fail(*arguments: object, **named: object) -> Any:
        calls.append(arguments)
        return subprocess.CompletedProcess([], 1, stdout="Looking in links: /shop\n", stderr=said)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(SourceError) as caught:
        source.fetch(shop[1], "3.11", "x86_64", tmp_path / "cache")
    assert len(calls) == times
    assert len(pauses) == times - 1
    assert caught.value.file == NAME
    assert "looked in /shop, PyPI, if pip's no-index is not set" in caught.value.found
    assert caught.value.found.endswith(", 3 times") == (times == 3)


def test_an_index_that_does_not_answer(
    shop: tuple[Path, Release], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """pip's own words; its password does not get into them."""
    shop[0].joinpath(NAME).unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://somebody:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "1")  # it says nothing of a single try
    with pytest.raises(SourceError) as caught:
        source.fetch(shop[1], "3.11", "x86_64", tmp_path / "cache")
    assert pauses == [5, 20]
    assert caught.value.file == NAME
    assert "127.0.0.1:9/simple" in caught.value.found
    assert str(shop[0]) in caught.value.found
    assert "secret" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []
