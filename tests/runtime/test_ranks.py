# SPDX-License-Identifier: Apache-2.0
"""How ranks ask each other, with a store in this process: once, not for ever, and with the bad news heard."""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

OP = "cross_entropy"


@pytest.fixture
def ranks(liger: ModuleType) -> ModuleType:
    return importlib.import_module("megatron.core.liger.ranks")


class Group:
    """Rank 0 of a group of processes 4 and 5, which are in its store."""

    def __init__(self) -> None:
        self.whole = torch.distributed.HashStore()
        self.store = torch.distributed.PrefixStore("megatron.core.liger", self.whole)

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.fixture
def group(ranks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setattr(ranks, "_store_of", lambda group: group.whole)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [4, 5])
    monkeypatch.setattr(ranks, "TIMEOUT", 0.2)
    monkeypatch.setattr(ranks, "LINGER", 0.2)
    return Group()


def test_a_group_is_known_by_its_store(ranks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch.distributed.ProcessGroup(0, 1)
    assert not ranks.known(found)
    monkeypatch.setattr(ranks, "_store_of", lambda group: torch.distributed.HashStore())
    assert ranks.known(found)
    for other in (None, SimpleNamespace(), "group"):
        assert not ranks.known(other)


@pytest.mark.parametrize(
    ("record", "ops"),
    [
        (None, "unknown"),
        ({}, "unknown"),
        ({"ops": []}, "unknown"),
        ({"ops": ["norms", "swiglu"]}, "norms,swiglu"),
    ],
)
def test_what_a_rank_says_of_itself(
    ranks: ModuleType, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any] | None, ops: str
) -> None:
    settings = importlib.import_module("megatron.core.liger.settings")
    monkeypatch.setattr(ranks.installed, "record", lambda: record)
    assert ranks.fingerprint(OP, ranks.KERNEL)["ops"] == ops
    for value, enabled in (("0", "0"), ("swiglu,norms", "norms,swiglu")):
        monkeypatch.setattr(ranks, "SETTINGS", settings.read({"LIGER_MEGATRON": value}))
        assert ranks.fingerprint(OP, ranks.KERNEL)["LIGER_MEGATRON"] == enabled


@pytest.mark.parametrize("verdict", [None, "they differ"])
def test_a_group_is_asked_once_and_refused_each_time(
    ranks: ModuleType, monkeypatch: pytest.MonkeyPatch, verdict: str | None
) -> None:
    asked: list[object] = []

    def ask(*arguments: object) -> str | None:
        asked.append(arguments)
        return verdict

    monkeypatch.setattr(ranks, "_ask", ask)
    one, other = Group(), Group()
    for found in (one, one, other, one):
        if verdict is None:
            ranks.agree(found, OP, ranks.KERNEL)
        else:
            with pytest.raises(ranks.RankError, match=f"^{verdict}$"):
                ranks.agree(found, OP, ranks.KERNEL)
    assert asked == [(one, OP, ranks.KERNEL), (other, OP, ranks.KERNEL)]


def test_ranks_that_run_the_same_go_on_at_once(
    ranks: ModuleType, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "LINGER", 30.0)
    group.store.set("runs 1", json.dumps(ranks.fingerprint(OP, ranks.KERNEL)))
    begun = time.monotonic()
    assert ranks._ask(group, OP, ranks.KERNEL) is None
    assert time.monotonic() - begun < 15
    assert json.loads(group.store.get("runs 0")) == ranks.fingerprint(OP, ranks.KERNEL)
    assert not group.store.check(["heard 0"])


HOOKS = "hooks on the output layer"


def decide(ranks: ModuleType, group: Group, *decisions: str) -> None:
    for runs in decisions:
        ranks.decided(group, "linear_cross_entropy", "GPTModel", runs)


def test_decisions_that_stay_ask_nobody(
    ranks: ModuleType, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_ask_of_change", lambda *_: pytest.fail("has asked"))
    decide(ranks, group, ranks.KERNEL, ranks.KERNEL)
    ranks.decided(group, "linear_cross_entropy", "MTP", HOOKS)  # of its own
    decide(ranks, group, ranks.KERNEL)


def test_a_change_on_all_ranks_goes_on(ranks: ModuleType, group: Group) -> None:
    for number, runs in enumerate((HOOKS, ranks.KERNEL, HOOKS), 1):
        group.store.set(f"linear_cross_entropy GPTModel {number} 1", runs)
    decide(ranks, group, ranks.KERNEL, HOOKS, HOOKS, ranks.KERNEL, HOOKS)
    assert not ranks.asked(group)
    left = [group.store.check([f"linear_cross_entropy GPTModel {number} 0"]) for number in (1, 2, 3)]
    assert left == [False, True, True]  # a job that changes in each step fills no store


@pytest.mark.parametrize("other", [None, "kernel", "something else"])
def test_a_change_on_one_rank_is_an_error(ranks: ModuleType, group: Group, other: str | None) -> None:
    decide(ranks, group, ranks.KERNEL)
    if other is not None:
        group.store.set("linear_cross_entropy GPTModel 1 1", other)
    said = "rank 4 changed from 'kernel' to 'hooks on the output layer', and rank 5 did not within 0.2 s"
    with pytest.raises(ranks.RankError, match=said):
        decide(ranks, group, HOOKS)
    with pytest.raises(ranks.RankError, match=said):
        ranks.agree(group, OP, ranks.KERNEL)


def test_a_change_whose_store_is_gone(
    ranks: ModuleType, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    decide(ranks, group, ranks.KERNEL)
    monkeypatch.setattr(ranks, "_present", gone)
    with pytest.raises(
        ranks.RankError, match="ranks 4, 5 cannot be asked whether they did: Connection reset"
    ):
        decide(ranks, group, HOOKS)


def test_a_decision_is_told_with_what_is_asked(ranks: ModuleType, group: Group) -> None:
    """So that a rank whose layer has hooks from the start is named for them."""
    decide(ranks, group, HOOKS)
    theirs = {"linear_cross_entropy in GPTModel": "kernel"} | ranks.fingerprint(OP, ranks.KERNEL)
    group.store.set("runs 1", json.dumps(theirs))
    said = ranks._ask(group, OP, ranks.KERNEL)
    assert f"rank 4 with linear_cross_entropy in GPTModel={HOOKS}; rank 5 with" in said
    assert "linear_cross_entropy in GPTModel=kernel." in said


@pytest.mark.parametrize("heard", [True, False])
def test_bad_news_is_stayed_for(
    ranks: ModuleType, group: Group, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    """Until the other has it too, and no longer than it may take: the first may hold the store."""
    group.store.set("runs 1", json.dumps(ranks.fingerprint(OP, "off by LIGER_MEGATRON")))
    monkeypatch.setattr(ranks, "LINGER", 30.0 if heard else 0.2)
    other = threading.Timer(0.2, lambda: group.store.set("heard 1", ""))
    if heard:
        other.start()
    begun = time.monotonic()
    verdict = ranks._ask(group, OP, ranks.KERNEL)
    assert (0 if heard else 0.2) <= time.monotonic() - begun < 15
    assert verdict is not None
    assert "rank 5 differs: " in verdict
    assert group.store.check(["heard 0"])
    other.cancel()


def test_a_rank_that_does_not_answer_is_not_waited_for_for_ever(ranks: ModuleType, group: Group) -> None:
    begun = time.monotonic()
    verdict = ranks._ask(group, OP, ranks.KERNEL)
    assert 0.2 <= time.monotonic() - begun < 15
    assert verdict is not None
    assert "rank 4 on the kernel; rank 5 without an answer within 0.2 s" in verdict
    assert ranks._ask(group, OP, "off by LIGER_MEGATRON") is None


def test_an_answer_that_comes_late_counts(
    ranks: ModuleType, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT", 30.0)
    answer = json.dumps(ranks.fingerprint(OP, ranks.KERNEL))
    threading.Timer(0.2, lambda: group.store.set("runs 1", answer)).start()
    assert ranks._ask(group, OP, ranks.KERNEL) is None


@pytest.mark.parametrize("step", ["set", "check", "get"])
def test_a_store_that_has_gone_is_an_error_with_a_name(
    ranks: ModuleType, group: Group, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Its holder ended, likely with bad news of its own: no rank goes on into a collective."""
    group.store.set("runs 1", json.dumps(ranks.fingerprint(OP, ranks.KERNEL)))

    def gone(*_: object) -> None:
        raise RuntimeError("connection reset")

    steps: dict[str, Callable[..., Any]] = {
        name: getattr(group.store, name) for name in ("set", "check", "get")
    }
    broken = SimpleNamespace(**{**steps, step: gone})
    monkeypatch.setattr(ranks.distributed_c10d, "PrefixStore", lambda *_: broken)
    verdict = ranks._ask(group, OP, ranks.KERNEL)
    assert verdict == f"{OP}: cannot ask ranks 4, 5 what they run: connection reset"
