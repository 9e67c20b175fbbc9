# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a collective must run the same overlay with the same settings.

A rank on the kernel makes one collective to a loss and one on upstream's code makes three; a job that mixes
them hangs, or adds up unrelated numbers. So before a group's first collective its ranks tell each other what
they run, through the group's store: no collective, which is what would hang.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d

from . import installed
from .settings import CHECK_LABELS, LABEL_SMOOTHING, LINEAR_CE_MB, OPS, SETTINGS, STRICT, SWITCH
from .version import OVERLAY_VERSION

TIMEOUT = 120.0
"""Seconds to wait for the other ranks. They come from the same layer, but one may still be compiling."""

LINGER = 10.0
"""Seconds that a rank with bad news stays, at most, so that the others hear it: it may hold the store."""

LONGEST_NAP = 0.5

KERNEL = "kernel"

LOGGER = logging.getLogger("megatron.core.liger")

_verdicts: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
# What this process has decided for a group: by op and entry what runs, and how often that has changed.
_decisions: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], tuple[str, int]]] = (
    weakref.WeakKeyDictionary()
)


class RankError(RuntimeError):
    """Ranks of one group run different things; the message names the ranks and what is different."""


def known(group: Any) -> bool:
    """Whether ``group`` is one of torch.distributed's, which has a store."""
    return isinstance(group, torch.distributed.ProcessGroup) and _store_of(group) is not None


def asked(group: torch.distributed.ProcessGroup) -> bool:
    """Whether the ranks of ``group`` have told each other what they run."""
    return group in _verdicts


def agree(group: torch.distributed.ProcessGroup, op: str, runs: str) -> None:
    """Return when all ranks of ``group`` run the same; asks them at the first call only.

    Args:
        group: a :func:`known` group of more than one rank. Each of its ranks makes this call.
        op: the op whose collective is about to come.
        runs: :data:`KERNEL`, or why upstream's code runs.

    Raises:
        RankError: a rank runs something else, or did not answer in time while another is on the kernel.
    """
    if group not in _verdicts:
        _verdicts[group] = _ask(group, op, runs)
    verdict = _verdicts[group]
    if verdict is not None:
        raise RankError(verdict)


def decided(group: torch.distributed.ProcessGroup, op: str, entry: str, runs: str) -> None:
    """Note what runs, where that is not known from types and settings alone (hooks, replaced functions), and
    return when the ranks of ``group`` have changed alike since the last call.

    A rank that changes alone would leave the others in a collective that it does not make.

    Args:
        group: a :func:`known` group of more than one rank. Each of its ranks makes this call.
        op, entry: whose call it is.
        runs: :data:`KERNEL`, or why upstream's code runs.

    Raises:
        RankError: another rank has not changed, or to something else.
    """
    decisions = _decisions.setdefault(group, {})
    before, changes = decisions.get((op, entry), (runs, 0))
    if runs != before:
        changes += 1
        verdict = _ask_of_change(group, f"{op} {entry}", changes, op, before, runs)
        if verdict is not None:
            _verdicts[group] = verdict
            raise RankError(verdict)
    decisions[op, entry] = runs, changes


def fingerprint(op: str, runs: str) -> dict[str, str]:
    """What must be the same on all ranks, by name. In place is not in it: that concerns one rank alone."""
    return {
        "overlay": str(OVERLAY_VERSION),
        "ops": ",".join(map(str, (installed.record() or {}).get("ops") or ("unknown",))),
        SWITCH: ",".join(sorted(SETTINGS.enabled)) or "0",
        STRICT: str(int(SETTINGS.strict)),
        CHECK_LABELS: str(int(SETTINGS.check_labels)),
        LABEL_SMOOTHING: SETTINGS.label_smoothing,
        LINEAR_CE_MB: repr(SETTINGS.linear_ce_mb),
        op: runs,
    }


def _store_of(group: torch.distributed.ProcessGroup) -> Any:
    found = distributed_c10d._world.pg_map.get(group)
    return found[1] if found else None


def _ask_of_change(
    group: torch.distributed.ProcessGroup, who: str, number: int, op: str, before: str, runs: str
) -> str | None:
    """Why the ranks may not go on after this one's change, or None."""
    store = distributed_c10d.PrefixStore("megatron.core.liger", _store_of(group))
    ranks = torch.distributed.get_process_group_ranks(group)
    members = range(group.size())
    what, rank = f"{who} {number}", group.rank()
    change = f"{op}: rank {ranks[rank]} changed from {before!r} to {runs!r}"
    try:
        store.set(f"{what} {rank}", runs)
        present = _present(store, what, members, TIMEOUT)
        said = {member: store.get(f"{what} {member}").decode() for member in present}
        if number > 2:  # all have read it, as they were at the change after it
            store.delete_key(f"{who} {number - 2} {rank}")
    except RuntimeError as error:  # of the store: another rank, which held it, has ended
        return f"{change}, and ranks {_list(ranks)} cannot be asked whether they did: {error}"
    other = [ranks[member] for member in members if said.get(member) != runs]
    if not other:
        return None
    return (
        f"{change}, and {_ranks(other)} did not within {TIMEOUT:g} s. What decides (hooks on a layer, a "
        "profiler that counts operators, a function that somebody replaces) has to be the same on all ranks "
        f"that share a loss: {_list(ranks)}"
    )


def _ask(group: torch.distributed.ProcessGroup, op: str, runs: str) -> str | None:
    """Why the ranks may not go on, or None."""
    store = distributed_c10d.PrefixStore("megatron.core.liger", _store_of(group))
    size = group.size()
    ranks = torch.distributed.get_process_group_ranks(group)
    said: dict[int, dict[str, str]] = {}
    try:
        noted = {f"{name} in {entry}": said for (name, entry), (said, _) in _decisions.get(group, {}).items()}
        store.set(f"runs {group.rank()}", json.dumps(noted | fingerprint(op, runs)))
        for member in _present(store, "runs", range(size), TIMEOUT):
            said[member] = json.loads(store.get(f"runs {member}"))
        verdict = judge({ranks[member]: value for member, value in said.items()}, ranks, op)
        if verdict is not None:
            store.set(f"heard {group.rank()}", "")
            _present(store, "heard", sorted(said), LINGER)
    except RuntimeError as error:  # of the store: another rank, which held it, has ended
        verdict = f"{op}: cannot ask ranks {_list(ranks)} what they run: {error}"
    return verdict


def _present(store: Any, kind: str, members: Sequence[int], seconds: float) -> list[int]:
    """The members that have left a word of that kind, when all have or the time is up."""
    deadline = time.monotonic() + seconds
    keys = [f"{kind} {member}" for member in members]
    nap = 0.001
    # Not store.wait: it locks the store for as long as it waits, and the process group's watchdog needs it.
    while not store.check(keys):
        if (left := deadline - time.monotonic()) <= 0:
            return [member for member, key in zip(members, keys) if store.check([key])]
        time.sleep(min(nap, left))
        nap = min(2 * nap, LONGEST_NAP)
    return list(members)


def judge(said: dict[int, dict[str, str]], ranks: Sequence[int], op: str) -> str | None:
    """What is wrong with the answers, or None.

    Args:
        said: the fingerprints by rank.
        ranks: who was asked.
        op: the op that asked.
    """
    silent = [rank for rank in ranks if rank not in said]
    kinds = sorted({tuple(sorted(value.items())) for value in said.values()})
    if len(kinds) <= 1 and not silent:
        return None
    if len(kinds) == 1 and said[next(iter(said))][op] != KERNEL:
        # Upstream's code on all of them, and most likely on the silent ones too: nothing that could hang.
        LOGGER.warning("%s: ranks %s do not say what they run", op, _list(silent))
        return None
    groups = [([rank for rank in ranks if said.get(rank) == dict(kind)], dict(kind)) for kind in kinds]
    groups.sort(key=lambda item: (-len(item[0]), item[0]))
    every = sorted({name for _, values in groups for name in values})
    names = [name for name in every if len({values.get(name) for _, values in groups}) > 1]
    parts = []
    for members, values in groups:
        # Of an op: this one's call was left to upstream, whose own loss asked.
        shown = [f"{name}={values.get(name, 'not asked' if name in OPS else 'unknown')}" for name in names]
        parts.append(
            f"{_ranks(members)} with {', '.join(shown)}" if shown else f"{_ranks(members)} on the kernel"
        )
    if silent:
        parts.append(
            f"{_ranks(silent)} without an answer within {TIMEOUT:g} s: without this overlay, or stuck before"
        )
    odd = sorted(rank for members, _ in groups[1:] for rank in members) + silent
    return (
        f"{op}: ranks {_list(ranks)} share a loss and do not run the same, {_ranks(odd)} "
        f"{'differs' if len(odd) == 1 else 'differ'}: {'; '.join(parts)}. Give every rank the same overlay "
        f"and the same {SWITCH}* variables"
    )


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_list(ranks)}"
