# SPDX-License-Identifier: Apache-2.0
"""An optional file that is no pinned variant stays as it is: its op goes on without it, and says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scripts import status
from scripts.apply import _print_actions, apply_tree
from scripts.errors import ExpectationError, StateError, TreeError
from scripts.overlay import MARK, RECORD
from scripts.record import read_record
from scripts.status import expect, judge, lines
from scripts.verify import LEFT, MISSING, inspect, plan

BETA = "megatron/core/fusions/beta.py"
BETA2 = "megatron/core/tensor_parallel/beta.py"
GAMMA = "megatron/core/models/gamma.py"
THEIRS = b"def gamma(x):\n    return 3 * x\n"


def verdicts(world: Any) -> dict[str, str]:
    return {f.path: f.verdict for f in inspect(world.tree.read, world.manifest, world.overlay).upstream}


def said(world: Any) -> str:
    state = inspect(world.tree.read, world.manifest, world.overlay)
    return judge(world.tree, state, world.manifest, world.overlay)


@pytest.mark.parametrize("theirs", [THEIRS, None])
def test_a_fork_s_own_call_site_stays(
    world: Any, theirs: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if theirs is None:
        world.path(GAMMA).unlink()
    else:
        world.path(GAMMA).write_bytes(theirs)
    before = world.snapshot()
    why = "is not there" if theirs is None else "is no pinned variant"
    line = f"{why}: this call site stays upstream's (op beta)"
    assert verdicts(world)[GAMMA] == LEFT
    assert said(world) == "pristine"
    expect(world.tree, "pristine", (), world.manifest, world.overlay)

    planned = world.apply()
    assert [file.path for file in planned.left] == [GAMMA]
    assert (planned.ops, planned.files_as_in) == (("alpha", "beta"), ("1.0",))
    _print_actions(planned)
    assert f"  left    {GAMMA}  {line}\n" in capsys.readouterr().out
    record = read_record(world.path(RECORD).read_bytes())
    assert record is not None
    assert GAMMA not in record.files
    assert said(world) == "overlaid, version 1, ops alpha, beta"
    expect(world.tree, "overlaid", ("alpha", "beta"), world.manifest, world.overlay)
    state = inspect(world.tree.read, world.manifest, world.overlay)
    assert f"{GAMMA}: {line}" in lines(world.tree, state, world.overlay)
    assert not world.apply().changes
    world.revert()
    assert world.snapshot() == before


def test_without_its_op_nothing_is_said_of_it(world: Any) -> None:
    world.path(GAMMA).write_bytes(THEIRS)
    assert world.apply("alpha").left == ()


def test_a_named_release_needs_its_own(world: Any) -> None:
    world.path(GAMMA).write_bytes(THEIRS)
    with pytest.raises(TreeError) as caught:
        plan(world.tree.read, world.manifest, world.overlay, None, world.manifest.releases["1.0"])
    assert caught.value.file == GAMMA
    assert caught.value.remedy.endswith("; --ops alpha still applies")


def test_what_is_not_optional_is_refused(world: Any) -> None:
    files = {**world.manifest.files, GAMMA: replace(world.manifest.files[GAMMA], optional=False)}
    strict = replace(world, manifest=replace(world.manifest, files=files))
    world.path(GAMMA).write_bytes(THEIRS)
    before = world.snapshot()
    with pytest.raises(TreeError) as caught:
        strict.apply()
    assert caught.value.file == GAMMA
    assert "--ops alpha still applies" in caught.value.remedy
    assert strict.apply("alpha").ops == ("alpha",)
    strict.revert()
    assert world.snapshot() == before
    world.path(GAMMA).unlink()
    assert verdicts(strict)[GAMMA] == MISSING


def test_an_op_of_left_files_alone_is_none(world: Any) -> None:
    files = {p: replace(f, optional=True) for p, f in world.manifest.files.items()}
    loose = replace(world, manifest=replace(world.manifest, files=files))
    for path in (BETA, BETA2, GAMMA):
        world.path(path).write_bytes(THEIRS)
    assert loose.apply().ops == ("alpha",)
    with pytest.raises(TreeError):
        loose.apply("beta")


def test_a_change_by_hand_is_not_taken_for_a_fork(world: Any) -> None:
    world.apply()
    patched = world.path(GAMMA).read_bytes()
    for data in (
        patched.replace(b"import gamma", b"import delta"),
        patched.replace(b"# -    return y", b"# -    return z"),
        patched[:-5],
        patched.replace(b"base-sha256=", b"base-sha256= "),
        patched[: patched.index(MARK)],  # the changed lines stay, and nothing says whose they are
        patched[: patched.index(MARK) - 1],
        b"import megatron.core.liger\n" + patched[: patched.index(MARK)],
    ):
        world.path(GAMMA).write_bytes(data)
        for step in (world.apply, world.revert):
            with pytest.raises(StateError) as caught:
                step()
            assert caught.value.file == GAMMA
        assert said(world).startswith("changed by hand")
        assert world.path(GAMMA).read_bytes() == data
    world.path(GAMMA).write_bytes(patched)
    world.revert()
    assert world.path(GAMMA).read_bytes() == world.upstream[GAMMA]


def test_deleted_after_apply(world: Any) -> None:
    world.apply()
    world.path(GAMMA).unlink()
    with pytest.raises(StateError, match="no file"):
        world.revert()


def test_an_overlay_that_no_longer_knows_the_content_takes_its_change_back(world: Any) -> None:
    """Whatever wrote a patched file: it says itself what it was."""
    world.apply()
    pin = world.manifest.files[GAMMA]
    files = {
        **world.manifest.files,
        GAMMA: replace(pin, variants=(replace(pin.variants[0], sha256="0" * 64),)),
    }
    forgot = replace(
        world,
        manifest=replace(world.manifest, files=files),
        overlay=replace(world.overlay, diffs={}),
    )
    planned = apply_tree(world.root, None, forgot.manifest, forgot.overlay)
    assert {a.path: a.kind for a in planned.actions}[GAMMA] == "restore"
    assert world.path(GAMMA).read_bytes() == world.upstream[GAMMA]
    assert [file.path for file in planned.left] == [GAMMA]
    assert [file.path for file in plan(world.tree.read, forgot.manifest, forgot.overlay).left] == [GAMMA]


def test_a_result_other_than_the_pinned_one_is_refused(world: Any) -> None:
    patch = world.overlay.diffs[GAMMA]
    (diff,) = patch.diffs
    fits = {name: replace(fit, becomes="0" * 64) for name, fit in diff.fits.items()}
    diffs = {GAMMA: replace(patch, diffs=(replace(diff, fits=fits),))}
    wrong = replace(world, overlay=replace(world.overlay, diffs=diffs))
    before = world.snapshot()
    with pytest.raises(ExpectationError, match="gives the pinned result"):
        wrong.apply()
    assert world.snapshot() == before


def test_status_says_what_the_tree_claims_without_it(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    world.path(GAMMA).write_bytes(THEIRS)
    world.path("megatron/core/package_info.py").write_bytes(b"MAJOR = 9\nMINOR = 9\nPATCH = 0\n")
    state = inspect(world.tree.read, world.manifest, world.overlay)
    claim = status._claim(world.tree, state, world.manifest)
    assert claim is not None
    assert "as in 1.0" in claim
