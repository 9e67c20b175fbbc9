# SPDX-License-Identifier: Apache-2.0
"""The environment variables: what each value means, and that a wrong one stops the import."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import Python


@pytest.fixture
def settings(liger: ModuleType) -> ModuleType:
    return importlib.import_module("megatron.core.liger.settings")


@pytest.fixture
def three_ops(settings: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "OPS", ("a", "b", "c"))


@pytest.mark.usefixtures("three_ops")
@pytest.mark.parametrize(
    ("value", "enabled"),
    [
        (None, "abc"),
        ("", "abc"),
        ("1", "abc"),
        ("default", "abc"),
        ("0", ""),
        ("a", "a"),
        (" a , c ", "ac"),
        ("default,b", "abc"),
        ("-b", "ac"),
        ("-b,-a", "c"),
        ("default,-c", "ab"),
        ("a,-b", "a"),
    ],
)
def test_switch(settings: ModuleType, value: str | None, enabled: str) -> None:
    environ = {} if value is None else {"LIGER_MEGATRON": value}
    assert settings.read(environ).enabled == set(enabled)


@pytest.mark.usefixtures("three_ops")
@pytest.mark.parametrize(
    "value", ["2", "on", "d", "A", "a,", ",", "0,a", "1,a", "-", "-d", "--a", "a b", "a,a", "a,-a"]
)
def test_wrong_switch(settings: ModuleType, value: str) -> None:
    with pytest.raises(settings.SettingsError) as error:
        settings.read({"LIGER_MEGATRON": value})
    message = str(error.value)
    assert f"LIGER_MEGATRON={value!r}" in message
    assert "a, b, c" in message
    assert "0 (all off)" in message


@pytest.mark.parametrize(("value", "strict"), [("", False), ("0", False), ("1", True), (" 1 ", True)])
def test_strict(settings: ModuleType, value: str, strict: bool) -> None:
    assert settings.read({"LIGER_MEGATRON_STRICT": value}).strict is strict


@pytest.mark.parametrize(
    ("value", "ops"),
    [
        ("", set()),
        ("0", set()),
        ("swiglu", {"swiglu"}),
        ("swiglu,cross_entropy", {"swiglu", "cross_entropy"}),
        ("activations", {"activations"}),
    ],
)
def test_in_place(settings: ModuleType, value: str, ops: set[str]) -> None:
    assert settings.read({"LIGER_MEGATRON_IN_PLACE": value}).in_place == ops


@pytest.mark.parametrize(("value", "check"), [("", False), ("0", False), ("1", True)])
def test_check_labels(settings: ModuleType, value: str, check: bool) -> None:
    assert settings.read({"LIGER_MEGATRON_CHECK_LABELS": value}).check_labels is check


@pytest.mark.parametrize(
    ("value", "scope"), [("", "global"), ("global", "global"), (" partition ", "partition")]
)
def test_label_smoothing(settings: ModuleType, value: str, scope: str) -> None:
    assert settings.read({"LIGER_MEGATRON_LABEL_SMOOTHING": value}).label_smoothing == scope


@pytest.mark.parametrize(
    ("value", "right"), [("", 512.0), ("64", 64.0), (" 0.5 ", 0.5), ("1e3", 1000.0), ("1e12", 1e12)]
)
def test_budget(settings: ModuleType, value: str, right: float) -> None:
    assert settings.read({"LIGER_MEGATRON_LINEAR_CE_MB": value}).linear_ce_mb == right


@pytest.mark.parametrize(
    "value", ["0", "-0.0", "-1", "nan", "inf", "-inf", "1e308", "1e309", "8796093022208", "512MB", "a"]
)
def test_wrong_budget(settings: ModuleType, value: str) -> None:
    """The kernel takes it as a whole number of bytes: what has none is no value of a setting."""
    with pytest.raises(settings.SettingsError) as error:
        settings.read({"LIGER_MEGATRON_LINEAR_CE_MB": value})
    message = str(error.value)
    assert f"LIGER_MEGATRON_LINEAR_CE_MB={value!r}" in message
    assert "right is a number of MiB above 0, such as 512, and below 8796093022208" in message


@pytest.mark.parametrize("value", ["0", "1", "Partition", "shard", "global,partition"])
def test_wrong_label_smoothing(settings: ModuleType, value: str) -> None:
    with pytest.raises(settings.SettingsError) as error:
        settings.read({"LIGER_MEGATRON_LABEL_SMOOTHING": value})
    for part in (f"LIGER_MEGATRON_LABEL_SMOOTHING={value!r}", "global (", "partition ("):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LIGER_MEGATRON_CHECK_LABELS", "yes"),
        ("LIGER_MEGATRON_CHECK_LABELS", "cross_entropy"),
        ("LIGER_MEGATRON_STRICT", "yes"),
        ("LIGER_MEGATRON_STRICT", "2"),
        ("LIGER_MEGATRON_IN_PLACE", "1"),
        ("LIGER_MEGATRON_IN_PLACE", "linear"),
        ("LIGER_MEGATRON_IN_PLACE", "-swiglu"),
    ],
)
def test_wrong_value(settings: ModuleType, name: str, value: str) -> None:
    with pytest.raises(settings.SettingsError, match=f"^{name}='{value}'.*right are 0 "):
        settings.read({name: value})


def test_unknown_names(settings: ModuleType) -> None:
    environ = dict.fromkeys(
        ("LIGER_MEGATRON", "LIGER_MEGATRON_STRCT", "LIGER_MEGATRON_STRICT", "LIGER_OTHER"), "1"
    )
    assert settings.unknown(environ) == ["LIGER_MEGATRON_STRCT"]


def test_wrong_value_stops_the_import(python: Python) -> None:
    done = python(
        code="import megatron.core.fusions.fused_bias_swiglu",
        expect=1,
        LIGER_MEGATRON="swiglo",
        TRITON_INTERPRET="1",
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "SettingsError: LIGER_MEGATRON='swiglo': 'swiglo' not known; right are" in last
    assert "swiglu" in last.split("right are")[1]


def test_environment_of_a_process(python: Python) -> None:
    """Off, a misspelt variable, in place: read from the environment, once."""
    code = """
import os, torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, _upstream_bias_swiglu_impl
from megatron.core.liger import counters
from megatron.core.liger.settings import SETTINGS
os.environ["LIGER_MEGATRON"] = "1"
x = torch.randn(3, 8)
assert torch.equal(bias_swiglu_impl(x, None), _upstream_bias_swiglu_impl(x, None))
entry = counters()["swiglu"]["entries"]["bias_swiglu_impl"]
assert entry == {"kernel": 0, "off": 1, "upstream": {}}, entry
assert counters()["swiglu"]["launches"] == {}
assert SETTINGS.strict and SETTINGS.in_place == {"swiglu"}, SETTINGS
"""
    done = python(
        code=code,
        LIGER_MEGATRON="0",
        LIGER_MEGATRON_STRICT="1",  # switched off is no fallback
        LIGER_MEGATRON_IN_PLACE="swiglu",
        LIGER_MEGATRON_INPLACE="swiglu",
        TRITON_INTERPRET="1",
    )
    assert (
        done.stderr.count("no such setting: LIGER_MEGATRON_INPLACE; the settings are LIGER_MEGATRON, ") == 1
    )
    assert "swiglu off by LIGER_MEGATRON" in done.stdout.partition(" | torch ")[0]
    assert "bias_swiglu_impl 1 off by LIGER_MEGATRON" in done.stdout


def test_an_op_that_is_not_installed(python: Python, release_tree: Callable[[str], Path]) -> None:
    """Named, it is refused; taken away, or among all of them, it is not."""
    tree = release_tree("swiglu")
    code = "import megatron.core.fusions.fused_bias_swiglu"
    for name, value in (("LIGER_MEGATRON", "swiglu,norms"), ("LIGER_MEGATRON_IN_PLACE", "cross_entropy")):
        done = python(code=code, tree=tree, expect=1, **{name: value})
        last = done.stderr.strip().splitlines()[-1]
        assert f"SettingsError: {name} names {value.rpartition(',')[2]}, which is not installed here" in last
        assert "are swiglu" in last
    for value in ("1", "default", "-norms", "swiglu", "0"):
        python(code=code, tree=tree, LIGER_MEGATRON=value)
