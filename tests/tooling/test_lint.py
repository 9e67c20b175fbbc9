# SPDX-License-Identifier: Apache-2.0
"""Every rule of the patch set's lint finds what it is for, and the set itself is sound."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import lint
from scripts.errors import ExpectationError
from scripts.lint import PatchSet, Problem, Rule
from scripts.manifest import (
    License,
    Manifest,
    PinnedFile,
    Preview,
    Release,
    TouchedFile,
    Variant,
    load,
    parse,
    preview_name,
    span,
)
from scripts.overlay import ROOT, sha256

PATH = "megatron/core/fusions/alpha.py"
PROBLEM = Problem("a.py", 3, "wrong", "rule")
TAIL = b"""# SPDX-License-Identifier: Apache-2.0
# entry: alpha
#   kind: speed
#   why: one pass
#     instead of two
#   upstream: none
#   retires when: never
_upstream_alpha = alpha


def alpha(x):
    return _upstream_alpha(x)
"""
GUARDED = b"""# SPDX-License-Identifier: Apache-2.0
if "alpha" in globals():
    # entry: alpha
    #   kind: speed
    #   why: one pass
    #   upstream: none
    #   retires when: never
    _upstream_alpha = alpha

    def alpha(x):
        return _upstream_alpha(x)
"""
CALLER = "megatron/core/models/caller.py"
DIFF = b"""# SPDX-License-Identifier: Apache-2.0
# entry: Caller.call
#   op: alpha
#   kind: fix
#   why: it calls alpha twice
#   upstream: none
#   retires when: never

# fits: %b becomes: %b
--- a/megatron/core/models/caller.py
+++ b/megatron/core/models/caller.py
@@ -3 +3 @@
-    alpha(alpha(x))
+    alpha(x)
""" % (b"e" * 64, b"f" * 64)
SETTINGS = b'# SPDX-License-Identifier: Apache-2.0\nOPS = ("alpha",)\n'


def sound() -> PatchSet:
    variant = Variant("a" * 64, ("1.0",), "made here", {"alpha": "b" * 64})
    release = Release(
        "1.0",
        (PinnedFile("megatron_core-1.0-cp311-cp311-x.whl", "c" * 64),),
        PinnedFile("megatron_core-1.0.tar.gz", "d" * 64),
        "made here",
    )
    caller = Variant("e" * 64, ("1.0",), "made here", {"Caller.call": "b" * 64})
    files = {
        PATH: TouchedFile(PATH, "extend", "alpha", ("alpha",), (variant,)),
        CALLER: TouchedFile(CALLER, "patch", "alpha", ("Caller.call",), (caller,), optional=True),
    }
    text = License("LICENSES/theirs.txt", sha256(b"theirs"), ("1.0",), "made here")
    return PatchSet(
        Manifest({"1.0": release}, {}, files, (text,)),
        {f"overlay/{PATH}": TAIL},
        {"overlay/megatron/core/liger/settings.py": SETTINGS},
        {"LICENSES/theirs.txt": b"theirs"},
        diffs={f"patches/{CALLER}.patch": DIFF},
    )


def with_tail(change: Callable[[bytes], bytes]) -> PatchSet:
    return replace(sound(), tails={f"overlay/{PATH}": change(TAIL)})


def with_file(path: str = PATH, **changes: Any) -> PatchSet:
    patch_set = sound()
    file = replace(patch_set.manifest.files[path], **changes)
    files = {**patch_set.manifest.files, path: file}
    return replace(patch_set, manifest=replace(patch_set.manifest, files=files))


def with_diff(change: Callable[[bytes], bytes], path: str = CALLER) -> PatchSet:
    return replace(sound(), diffs={f"patches/{path}.patch": change(DIFF)})


def with_variant(**changes: Any) -> PatchSet:
    return with_file(variants=(replace(sound().manifest.files[PATH].variants[0], **changes),))


def with_release(**changes: Any) -> PatchSet:
    patch_set = sound()
    release = replace(patch_set.manifest.releases["1.0"], **changes)
    return replace(patch_set, manifest=replace(patch_set.manifest, releases={"1.0": release}))


def with_preview(version: str, source: str = "made here") -> PatchSet:
    patch_set, commit = sound(), "0" * 40
    preview = Preview(preview_name(version, commit), commit, source)
    return replace(patch_set, manifest=replace(patch_set.manifest, previews={preview.version: preview}))


def with_license(**changes: Any) -> PatchSet:
    patch_set = sound()
    text = replace(patch_set.manifest.licenses[0], **changes)
    return replace(patch_set, manifest=replace(patch_set.manifest, licenses=(text,)))


def with_licenses_of_one_path() -> PatchSet:
    """Two releases under one text, by two entries."""
    patch_set = with_file(
        variants=(replace(sound().manifest.files[PATH].variants[0], releases=("1.0", "1.1")),)
    )
    (text,) = patch_set.manifest.licenses
    texts = (text, replace(text, releases=("1.1",)))
    return replace(patch_set, manifest=replace(patch_set.manifest, licenses=texts))


def with_tail_and_variant(tail: bytes, variant: Variant) -> PatchSet:
    patch_set = with_file(variants=(*sound().manifest.files[PATH].variants, variant))
    return replace(patch_set, tails={f"overlay/{PATH}": tail})


def with_settings(data: bytes) -> PatchSet:
    return replace(sound(), added={"overlay/megatron/core/liger/settings.py": data})


def added(text: bytes) -> PatchSet:
    patch_set = sound()
    data = b"# SPDX-License-Identifier: Apache-2.0\n" + text
    return replace(patch_set, added={**patch_set.added, "kernels/new.py": data})


VARIANT = sound().manifest.files[PATH].variants[0]
WITHOUT = Variant("e" * 64, ("2.0",), "made here", {"alpha": None})
WHEEL = sound().manifest.releases["1.0"].wheels[0]
BROKEN: list[tuple[Rule, PatchSet, str]] = [
    (lint.parses, with_tail(lambda d: d + b"def ("), "does not parse"),
    (lint.licensed, with_tail(lambda d: b"\n" + d), "first line"),
    (lint.nothing_else, replace(sound(), others=("overlay/notes.txt",)), "no step"),
    (lint.releases_pinned, with_release(wheels=(WHEEL, WHEEL)), "listed twice"),
    (lint.releases_pinned, with_release(wheels=()), "lacks wheels"),
    (lint.releases_pinned, with_release(sdist=None), "lacks wheels"),
    (lint.releases_pinned, with_release(source=""), "lacks wheels"),
    (
        lint.releases_pinned,
        with_release(sdist=PinnedFile("megatron_core-1.0.1.tar.gz", "d" * 64)),
        "no file of 1.0",
    ),
    (lint.releases_pinned, replace(sound(), manifest=replace(sound().manifest, yanked={"1.0": "x"})), "both"),
    (lint.variants_once, with_file(variants=(VARIANT, replace(VARIANT, releases=()))), "listed twice"),
    (
        lint.variants_once,
        with_file(variants=(VARIANT, replace(VARIANT, sha256="e" * 64))),
        "1.0 is listed twice",
    ),
    (lint.previews_ahead, with_preview("1.0"), "is a preview, and 1.0 is pinned"),
    (lint.previews_ahead, with_preview("1.1", source=""), "lacks a source"),
    (lint.releases_complete, with_preview("1.1"), "has no variant"),
    (lint.variants_once, with_file(absent=("1.0",)), "1.0 is listed twice"),
    (lint.variants_once, with_variant(releases=("1.10", "1.9")), "1.10, 1.9 are not in order"),
    (lint.variants_once, with_file(absent=("3", "2")), "3, 2 are not in order"),
    (
        lint.variants_once,
        with_file(variants=(replace(VARIANT, releases=("2",)), replace(VARIANT, sha256="e" * 64))),
        "2, 1.0 are not in order",
    ),
    (lint.variants_once, with_variant(source=""), "lacks releases or a source"),
    (lint.variants_once, with_variant(releases=()), "lacks releases or a source"),
    (lint.releases_complete, with_file(variants=()), "1.0 has no variant"),
    (lint.releases_complete, with_variant(releases=("1.0", "2.0")), "2.0 is not in"),
    (lint.releases_complete, with_file(absent=("2.0",)), "2.0 is not in"),
    (lint.licenses_pinned, with_license(releases=()), "1.0 has 0 licence texts"),
    (lint.licenses_pinned, with_license(releases=("1.0", "1.0")), "1.0 has 2 licence texts"),
    (lint.licenses_pinned, with_license(releases=("1.0", "2.0")), "2.0, which is not pinned"),
    (lint.licenses_pinned, with_license(source=""), "lacks releases or a source"),
    (lint.licenses_pinned, with_license(sha256="f" * 64), "is not the pinned text"),
    (lint.licenses_pinned, replace(sound(), texts={}), "is not there"),
    (lint.licenses_pinned, with_license(path="LICENSES/other.txt"), "is not there"),
    (lint.licenses_pinned, with_licenses_of_one_path(), "is listed twice"),
    (
        lint.licenses_pinned,
        replace(sound(), texts={**sound().texts, "LICENSES/b.txt": b"b"}),
        "no release in patches/releases.json is under it",
    ),
    (lint.pins_have_tails, replace(sound(), tails={}), "has no tail"),
    (
        lint.pins_have_tails,
        replace(sound(), tails={**sound().tails, "overlay/megatron/x.py": TAIL}),
        "has no pin",
    ),
    (lint.parses, with_diff(lambda d: d.replace(b"-    alpha", b"     alpha")), "no context"),
    (lint.pins_have_tails, replace(sound(), diffs={}), "has no diffs"),
    (lint.pins_have_tails, with_file(CALLER, action="extend"), "has no tail"),
    (lint.pins_have_tails, with_file(CALLER, action="extend"), "the pinned action is extend"),
    (lint.pins_have_tails, with_diff(lambda d: d, PATH), "the pinned action is extend"),
    (lint.pins_have_tails, with_diff(lambda d: d, "megatron/x.py"), "has no pin"),
    (lint.diffs_fit_pins, with_diff(lambda d: d.replace(b"caller.py", b"other.py")), "the diff is of"),
    (lint.diffs_fit_pins, with_diff(lambda d: d.replace(b"e" * 64, b"d" * 64)), "fits dddddddddddd, which"),
    (lint.diffs_fit_pins, with_diff(lambda d: d.replace(b"e" * 64, b"d" * 64)), "no diff fits eeeeeeeeeeee"),
    (lint.diffs_fit_pins, with_diff(lambda d: d.replace(b"op: alpha", b"op: beta")), "op is beta, and alpha"),
    (lint.optional_has_a_rest, with_file(optional=True), "every file of alpha is optional"),
    (lint.ledger_complete, with_diff(lambda d: d.replace(b"kind: fix", b"")), "kind"),
    (lint.ledger_matches_pins, with_file(CALLER, entries=()), "not among the pinned"),
    (lint.ledger_complete, with_tail(lambda d: d.replace(b"#   kind: speed\n", b"")), "kind"),
    (lint.ledger_complete, with_tail(lambda d: d.replace(b"speed", b"taste")), "kind is taste"),
    (lint.ledger_complete, with_tail(lambda d: d.replace(b"never", b"")), "retires when"),
    (lint.ledger_matches_pins, with_file(entries=("alpha", "beta")), "beta is pinned but has no header"),
    (lint.ledger_matches_pins, with_file(entries=()), "not among the pinned"),
    (lint.ledger_matches_pins, with_tail(lambda d: d + b"# entry: alpha\n"), "two headers"),
    (
        lint.ledger_matches_code,
        with_tail(lambda d: d.replace(b"_upstream_alpha = alpha", b"")),
        "_upstream_alpha",
    ),
    (
        lint.ledger_matches_code,
        with_tail(lambda d: d.replace(b"def alpha", b"def _alpha")),
        "alpha is not bound",
    ),
    (lint.ledger_matches_code, with_tail(lambda d: d + b"helper = 1\n"), "helper is bound"),
    (lint.ledger_matches_code, with_tail(lambda d: d + b"import os\n"), "os is bound"),
    (lint.fingerprints_complete, with_variant(entries={}), "nothing is said of alpha"),
    (lint.fingerprints_complete, with_variant(entries={"alpha": None}), "no entry to take over"),
    (lint.fingerprints_complete, with_variant(entries={"alpha": None}), "alpha has no fingerprint"),
    (lint.fingerprints_complete, with_variant(entries={"alpha": "b" * 64, "other": "b" * 64}), "no entry"),
    (lint.fingerprints_complete, with_variant(entries={"alpha": "draft"}), "no sha256"),
    (lint.tails_apply, with_tail_and_variant(TAIL, WITHOUT), "where a variant lacks it"),
    (lint.tails_apply, with_tail(lambda d: GUARDED), "on a condition, and every variant has it"),
    (lint.ops_agree, with_file(op="beta"), "OPS is"),
    (lint.ops_agree, replace(sound(), added={}), "OPS is"),
    (lint.ops_agree, with_settings(b"OPS: tuple[str, ...]\n"), "OPS is ()"),
    (lint.ops_agree, with_settings(b"def OPS(): ...\n"), "OPS is ()"),
    (lint.imports_sound, added(b"import kernels.swiglu\n"), "a tree does not have"),
    (lint.imports_sound, added(b"def f():\n    from scripts import apply\n"), "a tree does not have"),
    (
        lint.imports_sound,
        with_tail(lambda d: d + b"from megatron.core.transformer import x as _x\n"),
        "import time",
    ),
    (lint.imports_sound, with_tail(lambda d: d + b"from __future__ import annotations\n"), "__future__"),
]


@pytest.mark.parametrize("rule", lint.RULES, ids=lambda rule: rule.__name__)
def test_every_rule_passes_a_sound_set_and_has_a_test(rule: Rule) -> None:
    assert list(rule(sound())) == []
    assert rule in [broken[0] for broken in BROKEN]


@pytest.mark.parametrize(("rule", "patch_set", "message"), BROKEN, ids=lambda v: getattr(v, "__name__", None))
def test_a_rule_finds_its_fault_and_no_other_rule_does(rule: Rule, patch_set: PatchSet, message: str) -> None:
    found = list(rule(patch_set))
    assert any(message in problem.message for problem in found), found
    for problem in found:
        assert problem.file.startswith(("overlay/", "kernels/", "patches/", "LICENSES/"))


@pytest.mark.parametrize("path", [f"overlay/{PATH}", f"patches/{CALLER}.patch"])
def test_what_has_no_pin_is_one_problem_and_no_traceback(path: str) -> None:
    """Every other rule passes over it, and finds what else is wrong."""
    patch_set = sound()
    name = path.partition("/")[2].removesuffix(".patch")
    files = {key: file for key, file in patch_set.manifest.files.items() if key != name}
    patch_set = replace(patch_set, manifest=replace(patch_set.manifest, files=files))
    found = {rule.__name__: [p.message for p in rule(patch_set) if p.file == path] for rule in lint.RULES}
    assert [message for messages in found.values() for message in messages if "has no pin" in message]
    assert found["ledger_matches_pins"] == found["ledger_complete"] == found["tails_apply"] == []


def test_an_extended_file_without_entries_needs_no_fingerprint() -> None:
    assert not list(
        lint.fingerprints_complete(with_file(entries=(), variants=(replace(VARIANT, entries={}),)))
    )


def test_an_entry_that_a_variant_lacks_is_asked_for() -> None:
    assert list(lint.tails_apply(with_tail_and_variant(GUARDED, WITHOUT))) == []
    for rule in (lint.ledger_complete, lint.ledger_matches_pins, lint.ledger_matches_code):
        assert list(rule(with_tail_and_variant(GUARDED, WITHOUT))) == []


def test_a_release_without_the_file_is_said_so() -> None:
    patch_set = sound()
    releases = {**patch_set.manifest.releases, "0.9": patch_set.manifest.releases["1.0"]}
    files = {p: replace(file, absent=("0.9",)) for p, file in patch_set.manifest.files.items()}
    said = replace(patch_set, manifest=replace(patch_set.manifest, releases=releases, files=files))
    assert list(lint.releases_complete(said)) == []
    unsaid = replace(patch_set, manifest=replace(patch_set.manifest, releases=releases))
    problems = list(lint.releases_complete(unsaid))
    assert len(problems) == 2
    assert all("0.9 has no variant" in problem.message for problem in problems)


def test_imports_inside_functions_and_for_types_are_fine() -> None:
    text = b"""from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from megatron.core.transformer import x
def f():
    from megatron.core.transformer import y
from . import kernels
from .kernels import z
from .scripts import w
"""
    assert list(lint.imports_sound(added(text))) == []


def test_a_ledger_header_is_read_whole() -> None:
    (entry,) = lint.ledger(TAIL)
    assert (entry.name, entry.line) == ("alpha", 2)
    assert entry.fields == {
        "kind": "speed", "why": "one pass instead of two", "upstream": "none", "retires when": "never",
    }  # fmt: skip
    indented = b"\n".join(b"    " + row for row in TAIL.splitlines())
    assert lint.ledger(indented)[0].fields == entry.fields


@pytest.mark.parametrize(
    ("releases", "shown"),
    [
        ([], ""),
        (["1.0", "1.1", "1.2"], "1.0, 1.1, 1.2"),
        (["1.0", "1.1", "1.2", "1.3"], "1.0 … 1.3 (4 releases)"),
    ],
)
def test_many_releases_are_counted(releases: list[str], shown: str) -> None:
    assert span(releases) == shown


def test_the_projects_own_set_is_sound() -> None:
    assert lint.check(ROOT) == []


@pytest.mark.parametrize(
    ("words", "found", "compared", "code", "said"),
    [
        ([], [], [], 0, "the patch set is sound"),
        ([], [PROBLEM], [], 1, "a.py:3: wrong [rule]\n1 problems"),
        (["--clone", "."], [], [], 0, "the patch set is sound"),
        (["--clone", "."], [], [PROBLEM], 1, "a.py:3: wrong [rule]\n1 problems"),
        (["--clone", "."], [PROBLEM], None, 1, "a.py:3: wrong [rule]\n1 problems"),
    ],
)
def test_a_problem_is_told_and_ends_lint_with_1(
    words: list[str],
    found: list[Problem],
    compared: list[Problem] | None,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Previews are compared with a clone only where one is given and the set itself is sound."""

    def compare(*_: object) -> list[Problem]:
        assert words
        assert compared is not None
        return compared

    monkeypatch.setattr(lint, "check", lambda root: found)
    monkeypatch.setattr(lint, "previews_are_of", compare)
    assert lint.main(words) == code
    assert capsys.readouterr().out.startswith(said)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for folder in ("patches", "overlay", "kernels", "LICENSES"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("files.json", lambda d: d.update(schema=2)),
        ("files.json", lambda d: next(iter(d["files"].values())).update(action="replace")),
        ("files.json", lambda d: next(iter(d["files"].values())).pop("op")),
        ("files.json", lambda d: next(iter(d["files"].values())).update(extra=1)),
        ("files.json", lambda d: next(iter(d["files"].values()))["variants"][0].update(sha256="ABC")),
        ("files.json", lambda d: d["files"].update({"../x.py": next(iter(d["files"].values()))})),
        ("releases.json", lambda d: d.pop("releases")),
        ("releases.json", lambda d: d["releases"]["0.16.1"].update(wheels={})),
        ("releases.json", lambda d: d["releases"]["0.16.1"]["wheels"][0].pop("sha256")),
        ("releases.json", lambda d: d.update(yanked=["0.18.1"])),
        ("releases.json", lambda d: d.update(yanked={"0.18.1": None})),
        ("releases.json", lambda d: d.pop("licenses")),
        ("releases.json", lambda d: d["licenses"][0].update(path="../LICENSE")),
        ("files.json", lambda d: next(iter(d["files"].values())).update(absent="0.12.0")),
    ],
)
def test_a_wrong_schema_is_a_problem_with_its_place(
    copy: Path, name: str, change: Callable[[Any], object]
) -> None:
    edit_json(copy / "patches" / name, change)
    (problem,) = lint.check(copy)
    assert problem.rule == "schema"
    assert f"patches/{name}" in problem.file
    with pytest.raises(ExpectationError):
        load(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1, "schema": 1}'])
def test_what_is_no_such_json(copy: Path, text: str) -> None:
    (copy / "patches" / "files.json").write_text(text)
    assert [problem.rule for problem in lint.check(copy)] == ["schema"]


def test_a_stray_file_and_a_missing_one(copy: Path) -> None:
    (copy / "kernels" / "notes.md").write_text("x")
    assert [problem.rule for problem in lint.check(copy)] == ["nothing_else"]
    (copy / "kernels" / "notes.md").unlink()
    (copy / "patches" / "releases.json").unlink()
    assert [problem.rule for problem in lint.check(copy)] == ["schema"]


def test_parse_needs_both_documents_of_the_schema() -> None:
    with pytest.raises(ExpectationError, match="schema"):
        parse({}, {"schema": 1, "files": {}})
