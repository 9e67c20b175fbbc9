# SPDX-License-Identifier: Apache-2.0
"""The wheel command on upstream's real wheels, what pip makes of the result, and wheels of a source tree."""

from __future__ import annotations

import base64
import csv
import difflib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import packaging
import pytest
from packaging.specifiers import SpecifierSet

from scripts import files, source, wheel
from scripts.errors import ExpectationError, SourceError, StateError, TreeError, UsageError
from scripts.manifest import load
from scripts.overlay import load_overlay, split
from scripts.verify import FileState, Plan
from scripts.wheelfile import read_archive

ROOT = Path(wheel.__file__).resolve().parent.parent
RELEASE = "megatron==0.16.1"
LABEL = "0.16.1+liger.1"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
TOUCHED = "megatron/core/fusions/fused_bias_swiglu.py"


def _make(out: Path, *arguments: str) -> Path:
    assert wheel.main([*arguments, "--out", str(out)]) == 0
    (made,) = out.iterdir()
    return made


def _files(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {i.filename: archive.read(i) for i in archive.infolist() if not i.is_dir()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched wheel for the interpreter that runs the tests."""
    return _make(tmp_path_factory.mktemp("dist"), RELEASE)


@pytest.mark.parametrize(("python", "platform"), [("3.11", "x86_64"), ("3.12", "manylinux_2_28_aarch64")])
def test_upstreams_wheel_repacked(
    python: str, platform: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _make(tmp_path / "dist", RELEASE, "--python", python, "--platform", platform)
    release = load().release(RELEASE)
    upstream = source.fetch(release, python, platform)
    assert path.name == upstream.name.replace("0.16.1", LABEL)

    before, after = _files(upstream), _files(path)
    folder = f"megatron_core-{LABEL}.dist-info"
    old_folder = "megatron_core-0.16.1.dist-info"
    ours = load_overlay()
    new = {*ours.added, "megatron/core/liger/overlay.json"}
    legal = {f"{folder}/licenses/{name}" for name in ("LICENSE", "NOTICE", "LICENSES/Megatron-LM.txt")}
    assert set(after) == {name.replace(old_folder, folder) for name in before} | new | legal
    pinned = load().files
    changed = set(ours.tails)
    assert set(pinned) == {*ours.tails, *ours.diffs}
    for name in ours.tails:
        assert after[name].startswith(before[name])
        assert after[name].endswith(ours.tails[name])
    for name in ours.diffs:
        parts = split(after[name])
        if parts is None:  # this release has no call site there
            assert after[name] == before[name]
            assert not pinned[name].variant(hashlib.sha256(before[name]).hexdigest()).has_entries
            continue
        changed.add(name)
        assert (parts.base, parts.intact) == (before[name], True)
    for name, content in ours.added.items():
        assert after[name] == content
    assert after[f"{folder}/WHEEL"] == before[f"{old_folder}/WHEEL"]
    record = json.loads(after["megatron/core/liger/overlay.json"])
    assert record["release"] == "0.16.1"
    for name, entry in record["files"].items():
        assert entry["after"] == hashlib.sha256(after[name]).hexdigest()

    # The raw bytes of each member that is upstream's.
    one = {m.name: m for m in read_archive(upstream.read_bytes(), "").members}
    two = {m.name.replace(folder, old_folder): m for m in read_archive(path.read_bytes(), "").members}
    rewritten = {*changed, f"{old_folder}/METADATA", f"{old_folder}/RECORD"}
    for name in set(one) - rewritten:
        assert (one[name].data, one[name].local_extra) == (two[name].data, two[name].local_extra)
        assert one[name].local[:26] == two[name].local[:26]
        assert one[name].mode == two[name].mode
    assert [n for n in two if n in one and n not in rewritten] == [n for n in one if n not in rewritten]

    listed = set()
    for name, digest, size in csv.reader(io.StringIO(after[f"{folder}/RECORD"].decode())):
        listed.add(name)
        if name != f"{folder}/RECORD":
            found = base64.urlsafe_b64encode(hashlib.sha256(after[name]).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={found}", str(len(after[name])))
    assert listed == set(after)

    old, new_text = before[f"{old_folder}/METADATA"].decode(), after[f"{folder}/METADATA"].decode()
    lines = difflib.ndiff(old.split("\n"), new_text.split("\n"))
    changes = [line for line in lines if line[:2] in ("- ", "+ ")]
    assert [line for line in changes if line.startswith("- ")] == ["- Version: 0.16.1"]
    assert changes[:6] == [
        "- Version: 0.16.1",
        f"+ Version: {LABEL}",
        "+ Classifier: Private :: Do Not Upload",
        "+ License-File: LICENSE",
        "+ License-File: LICENSES/Megatron-LM.txt",
        "+ License-File: NOTICE",
    ]
    assert any("Modified" in line for line in changes)

    printed = capsys.readouterr().out
    assert hashlib.sha256(path.read_bytes()).hexdigest() in printed
    assert f"{path.stat().st_size} bytes" in printed
    assert "pip install --no-deps --force-reinstall" in printed


def test_the_versions_that_the_command_says_are_accepted(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for specifier in ("==0.16.1", "~=0.16.1", "<=0.16.1", ">=0.16.1"):
        assert LABEL in SpecifierSet(specifier)
    for specifier in ("===0.16.1", "!=0.16.1", ">0.16.1"):
        assert LABEL not in SpecifierSet(specifier)
    wheel.main([RELEASE, "--out", str(made.parent)])
    printed = capsys.readouterr().out
    assert "==0.16.1, ~=0.16.1 or <=0.16.1" in printed
    assert "not for ===0.16.1, !=0.16.1 or >0.16.1" in printed


def _interpreters() -> Iterator[str]:
    """This one, and whichever other supported ones are installed."""
    yield sys.executable
    for minor in range(10, 14):
        found = shutil.which(f"python3.{minor}")
        if found and minor != sys.version_info[1]:
            version = [found, "-c", "import sys; print(sys.version_info[1])"]
            done = subprocess.run(version, capture_output=True, text=True)
            if done.stdout.strip() == str(minor):
                yield found


def test_the_same_bytes_anywhere(tmp_path: Path) -> None:
    """Two copies of the project, umasks, time zones, working folders, and each Python at hand."""
    cached = source.fetch(load().release(RELEASE), "3.12", "aarch64")
    pythons = list(_interpreters())
    runs = [(pythons[i % len(pythons)], umask) for i, umask in enumerate([0o022, 0o077, 0o002, 0o027])]
    found = set()
    for index, (python, umask) in enumerate(runs):
        project = tmp_path / f"copy {index}"
        for name in ("scripts", "overlay", "kernels", "patches", "LICENSES"):
            shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("LICENSE", "NOTICE"):
            shutil.copy(ROOT / name, project / name)
        (project / "build" / "cache").mkdir(parents=True)
        shutil.copy(cached, project / "build" / "cache" / cached.name)
        command = [python, "-m", "scripts", "wheel", "--", RELEASE, "--python", "3.12"]
        environment = {
            **os.environ,
            "TZ": ["UTC", "Asia/Tokyo", "America/Lima", "Europe/Berlin"][index],
            "PYTHONPATH": str(Path(packaging.__file__).parent.parent),
            "PYTHONHASHSEED": str(index),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        subprocess.run(
            [*command, "--platform", "aarch64"],
            cwd=project,
            env=environment,
            umask=umask,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (made,) = (project / "dist").iterdir()
        assert made.stat().st_mode & 0o777 == 0o666 & ~umask
        found.add((made.name, hashlib.sha256(made.read_bytes()).hexdigest()))
    assert len(found) == 1


class _Environment:
    """An environment without packages, and pip from outside it."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")

    def pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check"]
        return subprocess.run([*command, *arguments], capture_output=True, text=True)

    def stub(self, name: str, version: str, *requires: str) -> None:
        """Pretend that a distribution is installed."""
        folder = self.site / f"{name}-{version}.dist-info"
        folder.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {item}" for item in requires)]
        (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))

    def content(self) -> set[str]:
        """All files. Of a namespace package pip leaves the empty folder, whoever made the wheel."""
        return {str(p.relative_to(self.site)) for p in self.site.rglob("*") if p.is_file()}


def test_pip_installs_checks_and_uninstalls_it(made: Path, tmp_path: Path) -> None:
    environment = _Environment(tmp_path / "env")
    for name, version in [("torch", "2.6.0"), ("numpy", "2.0"), ("packaging", "25.0")]:
        environment.stub(name, version)
    for index, specifier in enumerate(("==0.16.1", "~=0.16.1", "<=0.16.1")):
        environment.stub(f"user{index}", "1", f"megatron-core{specifier}")
    before = environment.content()
    done = environment.pip("install", "--no-deps", "--no-index", "--force-reinstall", str(made))
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip()
    assert environment.pip("check").returncode == 0, environment.pip("check").stdout

    program = (
        "import importlib.metadata as m, json, pathlib\n"
        "d = m.distribution('megatron-core')\n"
        "wrong = [str(f) for f in d.files if not f.locate().exists()]\n"
        "print(json.dumps([d.version, d.metadata.get_all('License-File'), wrong,"
        " [str(f) for f in d.files if 'licenses' in str(f)]]))"
    )
    output = subprocess.run([environment.python, "-c", program], capture_output=True, text=True, check=True)
    version, licences, wrong, paths = json.loads(output.stdout)
    assert (version, wrong) == (LABEL, [])
    folder = f"megatron_core-{LABEL}.dist-info/licenses"
    assert sorted(paths) == sorted(f"{folder}/{name}" for name in licences)
    installed = _files(made)
    for name, content in installed.items():
        if not name.endswith("/RECORD"):
            assert (environment.site / name).read_bytes() == content

    environment.stub("stranger", "1", "megatron-core!=0.16.1")
    assert LABEL in environment.pip("check").stdout
    shutil.rmtree(environment.site / "stranger-1.dist-info")

    done = environment.pip("uninstall", "--yes", "megatron-core")
    assert done.returncode == 0, done.stderr
    assert environment.content() == before


@pytest.mark.parametrize(
    ("specifier", "accepted"),
    [("==0.16.1", True), ("~=0.16.1", True), ("===0.16.1", False), (">0.16.1", False)],
)
def test_pip_takes_it_for_the_release(made: Path, tmp_path: Path, specifier: str, accepted: bool) -> None:
    environment = _Environment(tmp_path / "env")
    offered = ["--no-index", "--find-links", str(made.parent), "--no-deps", "--dry-run"]
    done = environment.pip("install", *offered, f"megatron-core{specifier}")
    assert (done.returncode == 0) == accepted
    assert (f"Would install megatron-core-{LABEL}" in done.stdout.replace("_", "-")) == accepted


def test_another_file_than_the_pinned_one_is_refused_unopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = load().release(RELEASE)
    pin = release.wheels[0]
    (tmp_path / pin.filename).write_bytes(b"PK")
    monkeypatch.setattr(source, "fetch_file", lambda *_, **__: tmp_path / pin.filename)
    monkeypatch.setattr(wheel, "read_wheel", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(SourceError) as caught:
        wheel.main([RELEASE, "--out", str(tmp_path / "dist")])
    assert pin.sha256 in caught.value.expected
    assert not (tmp_path / "dist").exists()


def test_every_platform_is_every_pinned_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    release = load().release(RELEASE)
    monkeypatch.setattr(source, "fetch_file", lambda release, pin: Path(pin.filename))
    monkeypatch.setattr(wheel, "_read_pinned", lambda path, _: path.name)
    assert len(release.wheels) == 8
    found: list[object] = [*wheel.fetch(release, None, None, every=True)]
    assert found == [pin.filename for pin in release.wheels]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [RELEASE, "--all-platforms", "--python", "3.12"],
        [RELEASE, "--all-platforms", "--platform", "aarch64"],
        ["--tree", ".", "--python", "3.12"],
        ["--tree", ".", "--all-platforms"],
        [RELEASE, "--ops", "no_such_op"],
        [RELEASE, "--python", "three"],
        ["--tree", ".", "--platform", "aarch64"],
    ],
)
def test_misuse(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        wheel.main([*arguments, "--out", str(tmp_path / "dist")])
    assert not (tmp_path / "dist").exists()


# A build backend without dependencies: what it is given decides the wheel, and it writes down what it saw.
BACKEND = """
import base64, hashlib, json, os, pathlib, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    setup = json.loads(pathlib.Path("setup.json").read_text())
    version, pure, extra = setup["version"], setup["pure"], setup["extra"]
    files = {p.as_posix(): p.read_bytes() for p in sorted(pathlib.Path("megatron").rglob("*")) if p.is_file()}
    seen = {
        "epoch": os.environ.get("SOURCE_DATE_EPOCH"), "no_vcs": os.environ.get("NO_VCS_VERSION"),
        "top": sorted(os.listdir()), "umask": os.umask(0o022), "here": os.getcwd(),
        "modes": sorted({oct(p.stat().st_mode & 0o777) for p in pathlib.Path("megatron").rglob("*.py")}),
    }
    files |= {name: b"" for name in extra} | {"megatron/core/seen.json": json.dumps(seen).encode()}
    info = f"megatron_core-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\\nName: megatron-core\\nVersion: {version}\\n"
    tags = f"Wheel-Version: 1.0\\nRoot-Is-Purelib: {str(pure).lower()}\\nTag: py3-none-any\\n"
    files |= {f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": tags.encode()}
    digest = lambda d: base64.urlsafe_b64encode(hashlib.sha256(d).digest()).decode().rstrip("=")
    lines = [f"{n},sha256={digest(d)},{len(d)}\\n" for n, d in files.items()] + [f"{info}/RECORD,,\\n"]
    files[f"{info}/RECORD"] = "".join(lines).encode()
    name = f"megatron_core-{version}-py3-none-any.whl"
    if setup["broken"]:
        raise SystemExit("error: the backend is broken")
    with zipfile.ZipFile(os.path.join(folder, name), "w") as archive:
        for member, data in files.items():
            archive.writestr(zipfile.ZipInfo(member), data)
    return name
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Sources as upstream's wheel has them, beside what builds them and what a checkout has lying about."""
    root = tmp_path / "checkout"
    source.unpack(source.fetch(load().release(RELEASE)), root)
    for extra in root.glob("*.dist-info"):
        shutil.rmtree(extra)
    for path in root.rglob("*.so"):
        path.unlink()
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    (root / "LICENSE").write_text("the checkout's own\n")
    _set_up(root)
    (root / ".git").mkdir()
    (root / "checkpoints").mkdir()
    (root / "megatron" / "core" / "__pycache__").mkdir()
    (root / "megatron" / "core" / "__pycache__" / "utils.cpython-311.pyc").write_bytes(b"")
    (root / "megatron" / "core" / "datasets" / "helpers_cpp.so").write_bytes(b"of another Python")
    (root / "megatron" / "core" / "utils.py").chmod(0o600)
    return root


def _set_up(root: Path, version: str = "0.16.1", **more: object) -> None:
    setup = {"version": version, "pure": True, "extra": [], "broken": False, **more}
    (root / "setup.json").write_text(json.dumps(setup))


def _snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("overlaid", [False, True])
def test_a_wheel_of_a_tree(checkout: Path, overlaid: bool, tmp_path: Path) -> None:
    from scripts.apply import apply_tree

    pristine = (checkout / TOUCHED).read_bytes()
    if overlaid:
        apply_tree(checkout)
    before = _snapshot(checkout)
    made = _make(tmp_path / "dist", "--tree", str(checkout))
    assert made.name == f"megatron_core-{LABEL}-py3-none-any.whl"
    assert _snapshot(checkout) == before

    files, ours = _files(made), load_overlay()
    assert files[TOUCHED].startswith(pristine)
    assert files[TOUCHED].count(b"# >>> liger overlay") == 1
    assert {n for n in files if n.startswith("megatron/core/liger/")} == {
        *ours.added,
        "megatron/core/liger/overlay.json",
    }
    record = json.loads(files["megatron/core/liger/overlay.json"])
    assert record["release"] is None
    variants = [v for file in load().files.values() for v in file.variants if "0.16.1" in v.releases]
    common = set.intersection(*(set(variant.releases) for variant in variants))
    assert record["files_as_in"] == sorted(common)
    assert not [n for n in files if n.endswith((".pyc", ".so"))]

    seen = json.loads(files["megatron/core/seen.json"])
    assert seen.pop("here") != str(checkout)
    assert seen == {
        "epoch": "315532800",
        "no_vcs": "1",
        "top": ["LICENSE", "backend.py", "megatron", "pyproject.toml", "setup.json"],
        "umask": 0o022,
        "modes": ["0o644"],
    }
    licences = f"megatron_core-{LABEL}.dist-info/licenses/LICENSES/Megatron-LM.txt"
    assert files[licences] == b"the checkout's own\n"
    metadata = files[f"megatron_core-{LABEL}.dist-info/METADATA"]
    assert b"License-File" not in metadata  # the field is Metadata-Version 2.4's
    assert b"**Modified.**" in metadata


def test_the_label_follows_a_local_version(checkout: Path, tmp_path: Path) -> None:
    _set_up(checkout, "0.16.1+3fec9a1")
    assert _make(tmp_path / "dist", "--tree", str(checkout)).name.startswith(
        "megatron_core-0.16.1+3fec9a1.liger.1-"
    )


def test_a_build_without_its_extension_is_refused(checkout: Path, tmp_path: Path) -> None:
    _set_up(checkout, pure=False)
    with pytest.raises(SourceError, match="compiler"):
        wheel.main(["--tree", str(checkout), "--out", str(tmp_path / "dist")])
    assert not (tmp_path / "dist").exists()
    _set_up(checkout, pure=False, extra=["megatron/core/datasets/helpers_cpp.cpython-311.so"])
    assert _make(tmp_path / "dist", "--tree", str(checkout))


def test_a_build_that_fails_says_so(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _set_up(checkout, broken=True)
    with pytest.raises(SourceError, match="pip's words are above"):
        wheel.main(["--tree", str(checkout), "--out", str(tmp_path / "dist")])
    assert "the backend is broken" in capsys.readouterr().err


def test_each_thing_that_is_not_as_in_upstreams_wheel_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def left(path: str, data: bytes | None) -> FileState:
        return FileState(path, "patch", "alpha", "left", data)

    files = (left("a.py", None), left("b.py", b"fork"))
    plan = Plan((), ("alpha",), None, ("1.0", "1.1"), left=files, missing=("beta", "gamma"))
    upstream = SimpleNamespace(filename="up.whl", signatures=("d/RECORD.jws", "d/RECORD.p7s"))
    wheel._report(wheel.Patched(upstream, b"data", plan, upstream), tmp_path / "new.whl")
    said = capsys.readouterr().out
    for line in (
        "  4 bytes, sha256 " + hashlib.sha256(b"data").hexdigest(),
        "  from up.whl, files as in 1.0, 1.1; that does not make it the release",
        "  left: a.py is not there: this call site stays upstream's (op alpha)",
        "  left: b.py is no pinned variant: this call site stays upstream's (op alpha)",
        "  none: beta, this release has nothing for it to change",
        "  none: gamma, this release has nothing for it to change",
        "  left out: d/RECORD.jws, which signs upstream's RECORD",
        "  left out: d/RECORD.p7s, which signs upstream's RECORD",
    ):
        assert line in said.splitlines()


@pytest.mark.parametrize("locks", [True, False])
def test_what_may_be_another_runs_is_left_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    others = [tmp_path / f".megatron_core-1.0-py3-none-any.whl.{number}.tmp" for number in (41, 42)]
    for other in others:
        other.write_bytes(b"half")

    def refuse(fd: int, how: int) -> None:
        raise OSError(37, "No locks available")

    if not locks:
        monkeypatch.setattr("fcntl.flock", refuse)
    assert wheel._write(tmp_path, "new.whl", b"data").read_bytes() == b"data"
    assert [other.exists() for other in others] == [not locks] * 2
    assert len(list(tmp_path.iterdir())) == (1 if locks else 3)


@pytest.mark.parametrize("text", [None, b"another text"])
def test_a_licence_text_that_is_not_the_pinned_one_goes_into_no_wheel(
    tmp_path: Path, text: bytes | None
) -> None:
    manifest = load()
    version = manifest.newest()
    pin = manifest.license(version)
    if text is not None:
        (tmp_path / pin.path).parent.mkdir()
        (tmp_path / pin.path).write_bytes(text)
    with pytest.raises(ExpectationError) as caught:
        wheel.pinned_license(manifest, version, tmp_path)
    assert (caught.value.file, caught.value.expected) == (pin.path, f"sha256 {pin.sha256}")
    found = "no file" if text is None else f"sha256 {hashlib.sha256(text).hexdigest()}"
    assert caught.value.found == found


PIP: dict[str, tuple[int, int, str, str]] = {
    "no wheel": (0, 0, "", "see that pip wheel --no-deps"),
    "two wheels": (0, 2, "", "see that pip wheel --no-deps"),
    "a wheel, and a failure after it": (1, 1, "", "see that pip wheel --no-deps"),
    "a failure that tells its remedy": (1, 0, "No module named pip", "ensurepip"),
}


@pytest.mark.parametrize("case", PIP)
def test_what_pip_leaves_is_one_wheel(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, count, words, remedy = PIP[case]

    def pip(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        out = Path(command[command.index("--wheel-dir") + 1])
        out.mkdir()
        for number in range(count):
            (out / f"{number}.whl").write_bytes(b"")
        return subprocess.CompletedProcess(command, code, f"pip said {words}")

    monkeypatch.setattr(wheel, "subprocess", SimpleNamespace(run=pip, PIPE=-1, STDOUT=-2))
    monkeypatch.setattr(wheel, "read_wheel", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(SourceError) as caught:
        wheel._build(tmp_path / "copy", tmp_path / "built", tmp_path / "checkout")
    assert (caught.value.file, caught.value.expected) == (
        str(tmp_path / "checkout"),
        "one wheel, built by pip",
    )
    assert caught.value.found == f"exit code {code} and {count} wheels; pip's words are above"
    assert remedy in caught.value.remedy
    assert capsys.readouterr().err == f"pip said {words}\n"


def test_a_tree_that_apply_refuses_is_refused(checkout: Path, tmp_path: Path) -> None:
    from scripts.apply import apply_tree

    arguments = ["--tree", str(checkout), "--out", str(tmp_path / "dist")]
    pristine = (checkout / TOUCHED).read_bytes()
    (checkout / TOUCHED).write_bytes(pristine + b"# mine\n")
    with pytest.raises(TreeError):
        wheel.main(arguments)
    (checkout / TOUCHED).write_bytes(pristine)
    apply_tree(checkout)
    with (checkout / TOUCHED).open("ab") as file:
        file.write(b"# mine\n")
    with pytest.raises(StateError):
        wheel.main(arguments)
    assert not (tmp_path / "dist").exists()


def test_links_in_a_circle_are_not_followed(checkout: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (checkout / "megatron" / name).symlink_to(checkout)
    (checkout / "megatron" / "core" / "up").symlink_to("..")
    wheel._copy_sources(checkout, tmp_path / "copy")
    assert (tmp_path / "copy" / TOUCHED).is_file()
    assert not [p for p in (tmp_path / "copy").rglob("*") if p.name in ("a", "b", "up")]


def test_a_tree_that_changes_under_the_build_is_refused(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept out by the lock; on a file system without locks, found in the copy."""
    from scripts.apply import apply_tree

    copied, alone = wheel._copy_sources, []

    def meanwhile(root: Path, dest: Path) -> None:
        with (
            pytest.raises(StateError, match="another command at work"),
            files.locked(root / "megatron/core", 0.0),
        ):
            pass
        alone.append(True)
        copied(root, dest)
        apply_tree(dest)

    monkeypatch.setattr(wheel, "_copy_sources", meanwhile)
    before = _snapshot(checkout)
    with pytest.raises(StateError, match="another version of it"):
        wheel.main(["--tree", str(checkout), "--out", str(tmp_path / "dist")])
    assert alone
    assert _snapshot(checkout) == before
    assert not (tmp_path / "dist").exists()


def test_a_tree_without_a_build_or_without_megatron_is_refused(checkout: Path, tmp_path: Path) -> None:
    (checkout / "pyproject.toml").unlink()
    with pytest.raises(TreeError, match=r"pyproject\.toml"):
        wheel.main(["--tree", str(checkout), "--out", str(tmp_path / "dist")])
    with pytest.raises(TreeError, match="megatron/core"):
        wheel.main(["--tree", str(checkout / "checkpoints"), "--out", str(tmp_path / "dist")])
