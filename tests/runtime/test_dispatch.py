# SPDX-License-Identifier: Apache-2.0
"""What decides where a call goes, asked alone: options, tensors, words of the environment, versions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture
def dispatch(liger: ModuleType) -> ModuleType:
    return importlib.import_module("megatron.core.liger.dispatch")


def upstream(x, known=None, none=None, off=False, on=True, number=0, *rest, needed, **more): ...  # type: ignore[no-untyped-def]


OPTIONS = inspect.signature(upstream).parameters
AT_REST: dict[str, Any] = {"x": 1, "needed": None, "on": None, "number": None}


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, None),
        ({"known": 5}, None),
        ({"none": None}, None),
        ({"none": 0}, "none"),
        ({"none": False}, "none"),
        ({"off": False}, None),
        ({"off": True}, "off"),
        ({"on": False}, "on"),
        ({"on": True}, "on"),
        ({"number": 0}, "number"),
        ({"needed": 1}, "needed"),
        ({"needed": False}, "needed"),
        ({"rest": ()}, None),
        ({"rest": (0,)}, "rest"),
        ({"more": {}}, None),
        ({"more": {"later": None}}, "more"),
    ],
)
def test_what_an_option_asks_for(dispatch: ModuleType, given: dict[str, Any], asked: str | None) -> None:
    assert dispatch.later_option(OPTIONS, {**AT_REST, **given}, ("x", "known")) == asked


def test_an_option_that_is_on_by_default_asks(dispatch: ModuleType) -> None:
    options = inspect.signature(lambda on=True: None).parameters
    assert dispatch.later_option(options, {}, ()) == "on"
    assert dispatch.later_option(options, {}, ("on",)) is None
    # One that has to be given and is not: the call is upstream's to refuse.
    assert dispatch.later_option(inspect.signature(lambda needed: None).parameters, {}, ()) == "needed"


class Mine(torch.Tensor):
    """A subclass, as quantised weights are."""


TENSORS: dict[str, tuple[Callable[[], torch.Tensor], bool]] = {
    "a tensor": (lambda: torch.ones(2, 2), True),
    "a view": (lambda: torch.ones(2, 2).t(), True),
    "a parameter": (lambda: torch.nn.Parameter(torch.ones(2)), True),
    "a subclass": (lambda: torch.ones(2).as_subclass(Mine), False),
    "sparse": (lambda: torch.ones(2, 2).to_sparse(), False),
    "to be negated": (lambda: torch._neg_view(torch.ones(2)), False),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_what_a_kernel_may_read(dispatch: ModuleType, kind: str) -> None:
    make, plain = TENSORS[kind]
    assert dispatch.is_plain(make()) is plain


def test_whether_somebody_watches(dispatch: ModuleType) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert not dispatch.watched()
    with Mode():
        assert dispatch.watched()
    seen: list[bool] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        seen.append(dispatch.watched())
        return x + 1

    torch.jit.trace(traced, torch.ones(1), check_trace=False)
    assert seen[0]
    assert not dispatch.watched()


@pytest.mark.parametrize(
    ("text", "pair"),
    [("2.10.0a0+nv", (2, 10)), ("3.2", (3, 2)), ("3", (0, 0)), ("git", (0, 0)), ("", (0, 0))],
)
def test_the_numbers_of_a_version(dispatch: ModuleType, text: str, pair: tuple[int, int]) -> None:
    assert dispatch.version_pair(text) == pair


@pytest.mark.parametrize(
    ("version", "setting", "said"),
    [
        (
            "2.7.1+cu126",
            "swiglu",
            ["LIGER_MEGATRON_IN_PLACE has no effect with torch 2.7.1+cu126: before 2.8 "],
        ),
        ("2.8.0", "swiglu", []),
        ("2.7.1", "", []),
    ],
)
def test_in_place_that_an_old_torch_cannot_do_is_said_at_the_start(
    dispatch: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str, setting: str, said: list[str]
) -> None:
    job = importlib.import_module("megatron.core.liger.job")
    settings = importlib.import_module("megatron.core.liger.settings")
    heard: list[str] = []
    monkeypatch.setattr(dispatch, "SETTINGS", settings.read({"LIGER_MEGATRON_IN_PLACE": setting}))
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(dispatch.LOGGER, "warning", heard.append)
    monkeypatch.setattr(job.atexit, "register", lambda _: None)
    job.watch()
    assert [text[: len(begin)] for text, begin in zip(heard, said, strict=True)] == said


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("1", True), ("True", True), ("ON", True), ("y", True), ("yes", True), ("0", False), ("2", False),
     ("", False), ("off", False), (None, False)],
)  # fmt: skip
def test_who_wants_the_interpreter(
    dispatch: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str | None, wanted: bool
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert dispatch.interpreter_wanted() is wanted


def test_the_first_call_alone_is_announced(dispatch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way it goes, and before it is refused."""
    job = importlib.import_module("megatron.core.liger.job")
    said: list[str | None] = []
    monkeypatch.setattr(job, "announce", lambda entry, reason, tensor: said.append(reason))
    monkeypatch.setattr(dispatch.LOGGER, "warning", lambda *_: None)
    entry = dispatch.OPS["swiglu"].entry("bias_swiglu_impl")
    assert dispatch.OPS["swiglu"].entry("bias_swiglu_impl") is entry
    x = torch.ones(1)
    for call, reason in (
        (lambda: entry.served(x), None),
        (lambda: entry.skipped(x), dispatch.OFF),
        (lambda: entry.fell_back("because", x), "because"),
    ):
        monkeypatch.setattr(dispatch, "job_pending", True)
        said.clear()
        call()
        call()
        assert said == [reason]
    monkeypatch.setattr(dispatch, "job_pending", True)
    entry.declined("built so")  # nothing has run
    assert said == ["because"]
    assert dispatch.job_pending


def test_a_reset_leaves_no_count(dispatch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "job_pending", False)
    for op in dispatch.OPS.values():
        monkeypatch.setattr(op, "entries", dict(op.entries))  # the two that follow go with the test
        for entry in (op.entry("one"), op.entry("two")):
            entry.kernel, entry.off = 2, 3
            entry.upstream["because"] = 1
    module = dispatch.kernel_module("launches") or dispatch.importlib.import_module(
        "megatron.core.liger.kernels.launches"
    )
    module.LAUNCHES["swiglu_forward"] += 1
    module.COLLECTIVES["cross_entropy"] += 1
    dispatch.reset_counters()
    for counts in dispatch.counters().values():
        assert counts["launches"] == {}
        assert counts["collectives"] == 0
        for entry in counts["entries"].values():
            assert entry == {"kernel": 0, "off": 0, "upstream": {}}
