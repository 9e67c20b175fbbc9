# SPDX-License-Identifier: Apache-2.0
"""A touched file that some releases do not have: absent there, and missing everywhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scripts.errors import ExpectationError, TreeError
from scripts.manifest import Release
from scripts.overlay import RECORD, sha256
from scripts.record import read_record
from scripts.status import expect, judge, lines
from scripts.verify import ABSENT, MISSING, inspect, plan

ALPHA = "megatron/core/fusions/alpha.py"
BETA = "megatron/core/fusions/beta.py"
BETA2 = "megatron/core/tensor_parallel/beta.py"
GAMMA = "megatron/core/models/gamma.py"
OLD = "0.9"


def older(world: Any, *absent: str, shared: bool = True) -> Any:
    """The world with a release before 1.0 that has the same files (``shared``) but for the absent ones."""
    files = dict(world.manifest.files)
    for path, file in files.items():
        if path in absent:
            files[path] = replace(file, absent=(OLD,))
        elif shared:
            files[path] = replace(file, variants=(replace(file.variants[0], releases=(OLD, "1.0")),))
    old = Release(OLD, world.manifest.releases["1.0"].wheels)
    manifest = replace(world.manifest, files=files, releases={OLD: old, **world.manifest.releases})
    for path in absent:
        world.path(path).unlink()
    return replace(world, manifest=manifest)


def test_an_absent_file_keeps_nothing_from_its_op(world: Any) -> None:
    w = older(world, BETA2)
    before = w.snapshot()
    planned = w.apply("alpha", "beta")
    assert (planned.ops, planned.files_as_in) == (("alpha", "beta"), (OLD,))
    assert not w.path(BETA2).exists()
    state = inspect(w.tree.read, w.manifest, w.overlay)
    assert {f.path: f.verdict for f in state.upstream}[BETA2] == ABSENT
    assert judge(w.tree, state, w.manifest, w.overlay) == "overlaid, version 1, ops alpha, beta"
    assert f"{BETA2}: not there, as in {OLD}" in lines(w.tree, state, w.overlay)
    expect(w.tree, "overlaid", ("alpha", "beta"), w.manifest, w.overlay)
    w.revert()
    assert w.snapshot() == before
    expect(w.tree, "pristine", (), w.manifest, w.overlay)


def test_an_op_without_any_file_is_left_out(world: Any) -> None:
    w = older(world, BETA, BETA2, GAMMA)
    planned = w.apply("alpha", "beta")
    assert planned.ops == ("alpha",)
    record = read_record(w.path(RECORD).read_bytes())
    assert record is not None
    assert record.ops == ("alpha",)
    expect(w.tree, "overlaid", ("alpha", "beta"), w.manifest, w.overlay)
    with pytest.raises(TreeError, match="a release without any"):
        w.apply("beta")


def test_an_op_that_the_release_has_not_got_is_not_named_as_missing(world: Any) -> None:
    w = older(world, BETA, BETA2, GAMMA)
    with pytest.raises(ExpectationError) as caught:
        expect(w.tree, "overlaid", ("alpha", "beta"), w.manifest, w.overlay)
    assert caught.value.expected == "overlaid (alpha)"
    assert caught.value.remedy.endswith("--ops alpha")


@pytest.mark.parametrize("named", [True, False])
def test_a_release_that_has_the_file_needs_it(world: Any, named: bool) -> None:
    w = older(world, BETA2)
    release = w.manifest.releases["1.0"] if named else None
    if named:
        with pytest.raises(TreeError, match="no file") as caught:
            plan(w.tree.read, w.manifest, w.overlay, ("beta",), release)
        assert caught.value.file == BETA2
    else:  # the other files are of both releases, one of which has no such file
        assert plan(w.tree.read, w.manifest, w.overlay, ("beta",)).files_as_in == (OLD,)
    assert plan(w.tree.read, w.manifest, w.overlay, ("beta",), w.manifest.releases[OLD]).files_as_in == (OLD,)


def test_a_deleted_file_is_missing(world: Any) -> None:
    w = older(world, BETA2, shared=False)  # what is there is of 1.0 alone
    state = inspect(w.tree.read, w.manifest, w.overlay)
    assert {f.path: f.verdict for f in state.upstream}[BETA2] == MISSING
    with pytest.raises(TreeError, match="no file"):
        w.apply("beta")
    with pytest.raises(ExpectationError, match="missing"):
        expect(w.tree, "pristine", (), w.manifest, w.overlay)


def test_a_file_that_came_back_is_judged_by_its_bytes(world: Any) -> None:
    w = older(world, BETA2)
    w.path(BETA2).write_bytes(b"somebody's\n")
    assert sha256(b"somebody's\n") not in {v.sha256 for v in w.manifest.files[BETA2].variants}
    with pytest.raises(TreeError, match="sha256"):
        w.apply("beta")
