# SPDX-License-Identifier: Apache-2.0
"""The small GPT on both trees, through the command's own functions; and that the comparison can fail."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import pair, train
from scripts.errors import UsageError
from scripts.manifest import load
from scripts.overlay import load_overlay
from scripts.workers.entries import UNTRAINED

FUSION = Path("megatron/core/fusions/fused_bias_swiglu.py")
LIGER = Path("megatron/core/liger")
KERNEL = LIGER / "kernels/gated.py"
INSTALLED = load_overlay().ops
OPS = tuple(op for op in INSTALLED if op not in UNTRAINED)
# A quarter of the tokens in a step, and a vocabulary that is learnt from so few; for all but the first test.
SMALL = dataclasses.replace(train.ON_CPU, sequence=16, micro_batches=1, vocabulary=64)


def _options(
    device: torch.device, *, ranks: int = 1, sizes: train.Sizes = train.ON_CPU, **changes: int | bool
) -> train.Options:
    if device.type == "cuda":
        ranks, sizes = min(ranks, torch.cuda.device_count()), train.ON_GPU
    return train.Options(device.type, ranks, sizes, **{"iterations": 2, **changes})  # type: ignore[arg-type]


def _failed(result: train.Result) -> set[str]:
    return {check.name for check in result.checks if not check.passed}


@dataclasses.dataclass(frozen=True)
class Measured:
    """The right trees, measured with ``options`` in ``folder``."""

    pristine: Path
    folder: Path
    options: train.Options
    worlds: dict[str, train.World]

    def failed_with(self, name: str, tree: Path, folder: Path) -> set[str]:
        """What fails when the world ``name`` is that of ``tree``; in ``folder``."""
        work = folder / "work"
        shutil.copytree(
            self.folder, work, ignore=shutil.ignore_patterns(*train.WORLDS, f"checkpoint-{name}-*")
        )
        again = train.measure(self.pristine, tree, INSTALLED, work, self.options, [name])
        return _failed(train.judge({**self.worlds, **again}, INSTALLED, self.options))


def _measured(pristine: Path, overlaid: Path, folder: Path, options: train.Options) -> Measured:
    return Measured(pristine, folder, options, train.measure(pristine, overlaid, INSTALLED, folder, options))


@pytest.fixture(scope="module")
def small(
    pristine_tree: Path, overlaid_tree: Path, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> Measured:
    """On one rank."""
    folder = tmp_path_factory.mktemp("small")
    return _measured(pristine_tree, overlaid_tree, folder, _options(device, sizes=SMALL))


@pytest.fixture(scope="module")
def sequence_parallel(
    pristine_tree: Path, overlaid_tree: Path, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> Measured:
    """On two tensor-parallel ranks."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    options = _options(device, ranks=2, sizes=SMALL, tp=2, in_place=True, sequence_parallel=True)
    folder = tmp_path_factory.mktemp("sequence-parallel")
    return _measured(pristine_tree, overlaid_tree, folder, options)


def test_both_trees_learn_alike_on_two_data_parallel_ranks(
    pristine_tree: Path, overlaid_tree: Path, tmp_path: Path, device: torch.device
) -> None:
    options = _options(device, ranks=2, iterations=5)
    result = train.train(pristine_tree, overlaid_tree, INSTALLED, tmp_path, options)
    assert _failed(result) == set()
    assert result.passed
    names = {check.name for check in result.checks}
    assert {f"launches of {op}" for op in OPS} <= names
    assert {f"calls of {op}, by hand" for op in OPS} <= names
    assert {f"LIGER_MEGATRON=0, {op}" for op in OPS} <= names
    assert {"losses", "gradients", "learning, by hand", "learning, LIGER_MEGATRON=0"} <= names
    ways = ("pristine -> overlaid", "overlaid -> overlaid", "overlaid -> pristine", "on -> off", "off -> on")
    ways += ("pristine -> by hand", "by hand -> by hand", "by hand -> pristine")
    assert {f"checkpoint {way}" for way in ways} <= names
    text = "\n".join(result.table)
    for entry in ("bias_swiglu_impl", "vocab_parallel_cross_entropy", "fused_vocab_parallel_cross_entropy"):
        assert f"\n{entry} " in text
    for name in ("LigerMegatronSwiGLU", "LigerMegatronCrossEntropy", "LigerMegatronRMSNorm"):
        assert f"\n{name} " in text
    assert "\nLigerMegatronSwiGLU is the activation of megatron.core.transformer.mlp.MLP\n" in text


def test_the_trees_of_a_release_whose_specs_have_no_activation_learn_alike(device: torch.device) -> None:
    with pair.open_release(load().releases["0.12.3"], OPS) as trees:
        options = _options(device, sizes=SMALL)
        result = train.train(trees.pristine, trees.overlaid, trees.ops, trees.folder, options)
    assert _failed(result) == set()
    details = {check.name: check.detail for check in result.checks}
    for slots in ("norm slots", "norm slots, by hand"):
        assert details[slots].startswith("5 of 5")
    for op in OPS:
        assert details[f"calls of {op}, by hand"].endswith("Megatron's own: never")
    assert (
        "is the activation of scripts.workers.gpt.MLPWithActivation (an MLP's spec has no activation"
        in "\n".join(result.table)
    )


def test_both_trees_learn_alike_under_sequence_parallelism_in_place(sequence_parallel: Measured) -> None:
    result = train.judge(sequence_parallel.worlds, INSTALLED, sequence_parallel.options)
    assert _failed(result) == set()
    checks = {check.name: check.detail for check in result.checks}
    assert "collectives of cross_entropy" in checks
    assert checks["norm slots"] == "5 of 5 ours"
    assert checks["norm slots, by hand"] == "5 of 5 LigerMegatronRMSNorm"
    assert checks["norms' gradients on all ranks, unfused"] == "the same bits"
    assert checks["norms' gradients on all ranks, by hand"] == "the same bits"


def test_both_trees_learn_alike_on_two_tensor_parallel_ranks(
    pristine_tree: Path, overlaid_tree: Path, tmp_path: Path, device: torch.device
) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    options = _options(device, ranks=2, sizes=SMALL, tp=2)
    assert _failed(train.train(pristine_tree, overlaid_tree, INSTALLED, tmp_path, options)) == set()


def test_the_small_model_that_is_to_fail_below_passes(small: Measured) -> None:
    assert _failed(train.judge(small.worlds, INSTALLED, small.options)) == set()


def _changed(tree: Path, folder: Path, *changes: tuple[Path, str, str]) -> Path:
    """A copy of ``tree`` in which the second text of each change, once in its file, is the third."""
    copied = folder / "changed"
    shutil.copytree(tree, copied, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in changes:
        text = (copied / file).read_text(encoding="utf-8")
        assert text.count(old) == 1
        (copied / file).write_text(text.replace(old, new), encoding="utf-8")
    return copied


def test_a_tail_that_was_not_applied_fails(small: Measured, overlaid_tree: Path, tmp_path: Path) -> None:
    tree = _changed(overlaid_tree, tmp_path)
    shutil.copyfile(small.pristine / FUSION, tree / FUSION)
    failed = small.failed_with("overlaid", tree, tmp_path)
    assert {"launches of swiglu", "code behind bias_swiglu_impl", "the job's own line"} <= failed


def test_a_kernel_that_stores_nothing_fails(small: Measured, overlaid_tree: Path, tmp_path: Path) -> None:
    store = "tl.store(out + o_r * n + o_n, b_out.to(out.dtype.element_ty), mask=m)"
    tree = _changed(overlaid_tree, tmp_path, (KERNEL, store, "pass"))
    failed = small.failed_with("overlaid", tree, tmp_path)
    assert "gradients" in failed
    assert "launches of swiglu" not in failed


def test_a_gradient_of_the_wrong_sign_fails(small: Measured, overlaid_tree: Path, tmp_path: Path) -> None:
    tree = _changed(
        overlaid_tree,
        tmp_path,
        (KERNEL, "b_dgate = b_dout * b_inner_up * (", "b_dgate = -b_dout * b_inner_up * ("),
    )
    failed = small.failed_with("overlaid", tree, tmp_path)
    assert {"gradients", "losses"} <= failed
    assert "launches of swiglu" not in failed


def test_a_loss_without_its_target_fails(small: Measured, overlaid_tree: Path, tmp_path: Path) -> None:
    """The loss itself is right, and its gradient is the softmax alone."""
    right = (
        "return tl.where(o == b_local[None, :, None, None], b_dx - b_at_target[None, :, None, None], b_dx)"
    )
    file = LIGER / "kernels/cross_entropy.py"
    failed = small.failed_with(
        "overlaid", _changed(overlaid_tree, tmp_path, (file, right, "return b_dx")), tmp_path
    )
    assert {"gradients", "losses"} <= failed
    assert "launches of cross_entropy" not in failed


def test_norms_that_are_not_marked_for_sequence_parallelism_fail(
    sequence_parallel: Measured, overlaid_tree: Path, tmp_path: Path
) -> None:
    right = "parameter.sequence_parallel = self.sequence_parallel"
    wrong = "parameter.sequence_parallel = False"
    tree = _changed(overlaid_tree, tmp_path, (LIGER / "norms.py", right, wrong))
    failed = sequence_parallel.failed_with("overlaid", tree, tmp_path)
    same = {f"norms' gradients on all ranks, {run}" for run in ("unfused", "by hand")}
    assert {"gradients"} | same <= failed
    assert not {"norm slots", "norm slots, by hand"} & failed


SWIGLU_BY_HAND = "    output = SWIGLU.run(in_place, input, bias, **asked)\n    _MODULE.served(input)\n"


def test_classes_that_call_megatrons_own_entries_fail(
    small: Measured, overlaid_tree: Path, tmp_path: Path
) -> None:
    """Where those are taken over, the launches and the numbers are the same."""
    swiglu = (
        "    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl\n"
        "    output = bias_swiglu_impl(input, bias)\n"
    )
    loss = (
        "        _MODULE.served(logits)\n"
        "        return run(logits, target, group, label_smoothing, self.label_smoothing_mode,"
        " self.ignore_index)\n"
    )
    megatrons_loss = (
        "        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy\n"
        "        return vocab_parallel_cross_entropy(logits, target)\n"
    )
    norm = (
        "class LigerMegatronRMSNorm:\n"
        "    def __new__(cls, **named):\n"
        "        from megatron.core.transformer.torch_norm import WrappedTorchNorm\n"
        "        return WrappedTorchNorm(**named)\n\n\n"
    )
    tree = _changed(
        overlaid_tree,
        tmp_path,
        (LIGER / "swiglu.py", SWIGLU_BY_HAND, swiglu),
        (LIGER / "cross_entropy.py", loss, megatrons_loss),
        (LIGER / "norms.py", "class TakenOver:", f"{norm}class TakenOver:"),
    )
    failed = small.failed_with("overlaid", tree, tmp_path)
    assert failed == {f"calls of {op}, by hand" for op in OPS} | {"norm slots, by hand"}


def test_a_class_that_launches_nothing_fails(small: Measured, overlaid_tree: Path, tmp_path: Path) -> None:
    """It counts its calls, and its numbers are right."""
    eager = (
        "    gate, up = input.float().chunk(2, dim=-1)\n"
        "    output = (F.silu(gate) * up).to(input.dtype)\n"
        "    _MODULE.served(input)\n"
    )
    tree = _changed(overlaid_tree, tmp_path, (LIGER / "swiglu.py", SWIGLU_BY_HAND, eager))
    assert small.failed_with("overlaid", tree, tmp_path) == {"launches of swiglu"}


def test_a_switch_that_switches_nothing_off_fails(
    small: Measured, overlaid_tree: Path, tmp_path: Path
) -> None:
    right = '    if value == "0":\n        return frozenset()\n'
    wrong = right.replace("frozenset()", "_by_default()")
    tree = _changed(overlaid_tree, tmp_path, (LIGER / "settings.py", right, wrong))
    failed = small.failed_with("off", tree, tmp_path)
    off = {f"LIGER_MEGATRON=0, {what}" for what in (*OPS, "the job's own line", "norm slots")}
    assert failed == off | {"checkpoint off -> on"}  # which the right tree's job still has of the right tree


def _lose_a_launch(run: dict[str, Any]) -> None:
    run["counters"][-1]["norms"]["launches"]["norm_reduce"] -= 1


def _launch_one(run: dict[str, Any]) -> None:
    run["counters"][-1]["swiglu"]["launches"]["swiglu_forward"] = 1


def _load_others(run: dict[str, Any]) -> None:
    run["loaded"] = run["loaded"][::-1]


@pytest.mark.parametrize(
    ("world", "run", "change", "check"),
    [
        ("overlaid", "by hand", _lose_a_launch, "launches of norms"),
        ("on", "off -> on", _lose_a_launch, "launches of norms"),
        ("off", "on -> off", _launch_one, "LIGER_MEGATRON=0, swiglu"),
        ("back", "by hand -> pristine", _load_others, "checkpoint by hand -> pristine"),
        ("overlaid", "pristine -> by hand", _load_others, "checkpoint pristine -> by hand"),
        ("off", "on -> off", lambda run: run["losses"].pop(), "checkpoint on -> off"),
        ("off", "on -> off", lambda run: run.update(losses=[float("nan")]), "checkpoint on -> off"),
    ],
)
def test_one_wrong_report_fails_one_check(
    small: Measured, world: str, run: str, change: Callable[[dict[str, Any]], None], check: str
) -> None:
    worlds = copy.deepcopy(small.worlds)
    change(worlds[world].reports[0]["runs"][run])
    assert _failed(train.judge(worlds, INSTALLED, small.options)) == {check}


@pytest.mark.parametrize(("theirs", "failed"), [("upstream", True), ("absent", False)])
def test_an_entry_may_be_absent_where_the_pristine_tree_has_none(
    small: Measured, theirs: str, failed: bool
) -> None:
    worlds, entry = copy.deepcopy(small.worlds), "weighted_bias_swiglu_impl"
    for world, origin in (("pristine", theirs), ("overlaid", "absent")):
        entries = worlds[world].reports[0]["entries"]
        entries[entry] = dict.fromkeys(entries[entry], origin)
    result = train.judge(worlds, INSTALLED, small.options)
    name = f"code behind {entry}"
    assert _failed(result) == ({name} if failed else set())
    assert (name in {check.name for check in result.checks}) == failed


def _arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["--tp", "3", "--nproc", "4"], "--tp 3 --nproc 4"),
        (["--tp", "4"], "--tp 4"),
        (["--tp", "0"], "--tp 0"),
        (["--tp", "-1"], "--tp -1"),
        (["--nproc", "0"], "--tp 1 --nproc 0"),
        (["--nproc", "-2"], "--tp 1 --nproc -2"),
        (["--iterations", "1"], "--iterations 1"),
        (["--sequence-parallel"], "--sequence-parallel alone"),
        ([], "neither"),
        (["megatron==0.16.1", "--tree", "."], "both"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(argv: list[str], found: str) -> None:
    with pytest.raises(UsageError) as caught:
        train.run(_arguments("--device", "cpu", *argv))
    assert caught.value.found == found


@pytest.mark.parametrize(
    ("argv", "gpus", "ranks"),
    [
        ([], 3, 3),
        (["--tp", "2"], 3, 2),
        (["--tp", "2"], 1, "2 ranks"),
        (["--nproc", "4"], 3, "4 ranks"),
        (["--nproc", "3"], 3, 3),
        (["--tp", "0"], 3, "--tp 0"),
        (["--tp", "-1"], 3, "--tp -1"),
    ],
)
def test_no_more_ranks_than_gpus(argv: list[str], gpus: int, ranks: int | str) -> None:
    arguments = _arguments("megatron==0.16.1", *argv)
    if isinstance(ranks, int):
        assert train._options(arguments, "cuda", gpus).ranks == ranks
        return
    with pytest.raises(UsageError) as caught:
        train._options(arguments, "cuda", gpus)
    assert caught.value.found == ranks


def test_sequence_parallelism_is_refused_while_the_norms_are_upstreams() -> None:
    arguments = ("--ops", "swiglu", "--device", "cpu", "--tp", "2", "--sequence-parallel")
    with pytest.raises(UsageError, match="upstream's local norms refuse"):
        train.run(_arguments("megatron==0.16.1", *arguments))
