# SPDX-License-Identifier: Apache-2.0
"""The benchmark: bytes and shares, the gate before any timing, what is listed, CSV, plots, refusals."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import __main__ as cli
from scripts import bench, measurements, plots
from scripts.errors import ExpectationError
from scripts.measurements import Row
from scripts.workers import bench_providers, bench_worker
from scripts.workers.bench_ops import LARGEST, MODES, OPS, PROVIDERS
from scripts.workers.bench_providers import Call, Tensors

SHAPE = (6, 40)
CPU = ("--device", "cpu", "--tiny")


# --- Bytes and shares ---


@pytest.mark.parametrize(
    ("op", "forward", "backward"),
    [
        ("swiglu", 3, 5),
        ("swiglu_bias", 3, 5),
        ("swiglu_weighted", 3, 5),
        ("swiglu_fp8", 4, 4),
        ("cross_entropy", 1, 2),
        ("rms_norm", 2, 3),
        ("rms_norm_residual", 2, 4),
        ("layer_norm", 2, 3),
        ("linear_cross_entropy", 0, 0),
    ],
)
def test_the_fewest_bytes(op: str, forward: int, backward: int) -> None:
    found = [OPS[op].fewest_bytes(mode, (8192, 4096), 2) for mode in MODES]
    unit = 8192 * 4096 * 2
    assert found == [forward * unit, backward * unit, (forward + backward) * unit]


def test_the_share_is_that_of_a_known_measurement() -> None:
    """SwiGLU of 8192 × 4096 took 127 µs where a copy reached 4.26 TB/s: 99 %."""
    fewest = OPS["swiglu"].fewest_bytes("full", (8192, 4096), 2)
    assert measurements.share(fewest, 127.0, 4260.0) == pytest.approx(0.992, abs=1e-3)
    assert measurements.share(8_000_000, 2.0, 4000.0) == 1.0


def test_the_share_of_an_output_layer_is_that_of_its_products() -> None:
    result = {
        "op": "linear_cross_entropy", "rows": 8, "columns": 64, "status": "ok", "reason": "", "copy": 1e11,
        "modes": {mode: {"gpu_us": us} for mode, us in (("forward", 2.0), ("backward", 5.0), ("full", 7.0))},
        "products_us": 6.0,
    }  # fmt: skip
    rows = measurements.rows_of(result, "kernels", dtype="bf16", repeats=1, device="cuda", commit="c")
    assert {row.mode: row.share for row in rows} == pytest.approx(
        {"forward": 1, "backward": 0.8, "full": 6 / 7}
    )
    # One whose forward makes the gradients has a share as a whole only.
    result["modes"]["backward"] = {"gpu_us": 0.1}
    rows = measurements.rows_of(result, "kernels", dtype="bf16", repeats=1, device="cuda", commit="c")
    assert [row.share for row in rows] == [None, None, pytest.approx(6 / 7)]


@pytest.mark.parametrize(
    ("per_row", "fixed", "limit"),
    [
        (1000, 0, 2**20),
        (1000, 5_000_000, 2**20),
        (1, 0, 50_000),
        (0, 7, 12_345),
        (200_000, 0, 2**20),
        (1, 0, 3),
    ],
)
def test_the_most_rows_that_fit(per_row: int, fixed: int, limit: int) -> None:
    memory = 100_000_000
    tried = []

    def peak_of(rows: int) -> int | None:
        assert 0 < rows <= limit
        assert rows not in tried
        tried.append(rows)
        peak = fixed + per_row * rows + (rows % 7)
        return peak if peak <= memory else None

    rows, peak, reason = bench_worker.search_largest(peak_of, memory, limit)
    true = min(limit, (memory - fixed) // per_row if per_row else limit)
    assert rows in tried
    assert peak == fixed + per_row * rows + rows % 7
    assert true - max(1024, 0.021 * true) - 1 <= rows <= true
    more = min((t for t in tried if t > rows), default=limit)
    assert reason == (f"more than {limit} were not tried" if rows == limit else f"{more}: out of memory")


def test_a_guess_that_is_far_off_is_made_good() -> None:
    """As of a library that needs twice as much from some size on."""
    rows, _, reason = bench_worker.search_largest(
        lambda n: n * (1000 if n < 20_000 else 2000) if n < 50_000 else None, 100_000_000, 2**20
    )
    assert 48_000 <= rows < 50_000
    assert "out of memory" in reason


def test_a_search_for_the_most_rows_ends_at_an_error() -> None:
    def peak_of(rows: int) -> int:
        if rows > 9000:
            raise ValueError("no more than 9000")
        return rows

    found = bench_worker.search_largest(peak_of, 10**9, 2**20)
    assert found == (8192, 8192, "1048576: ValueError: no more than 9000")
    assert bench_worker.search_largest(lambda rows: None, 10**9, 2**20)[0] == 0


@pytest.mark.gpu
def test_what_fits_on_a_gpu(device: torch.device) -> None:
    torch.cuda.set_per_process_memory_fraction(0.05)
    try:
        bind = bench_providers.load("torch")["cross_entropy"]
        found = bench_worker.run_largest(bind, "cross_entropy", 32000, "bf16", device, 2**20)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found["status"] == "ok"
    assert "out of memory" in found["reason"]
    # Two of bf16 and at least two of float32 for each of a token's logits.
    assert found["rows"] * 32000 * 12 < 0.05 * torch.cuda.get_device_properties(device).total_memory


def _event(name: str, start: float, duration: float) -> tuple[str, float, float]:
    return name, start, duration


def test_device_time_is_that_of_the_kernels_between_flushes() -> None:
    flush = bench_worker.FLUSH
    events = [
        _event("warm up", 0, 100),
        *(_event(flush, start, 50) for start in (10, 100, 200, 300, 400, 500)),
        _event("clone", 60, 9),  # first part: the inputs
        _event("forward", 150, 3), _event("forward", 155, 4), _event("Memcpy DtoH", 160, 1),
        _event("backward", 250, 11),
        _event("forward", 450, 6),
        _event("backward", 550, 12), _event("reduce", 570, 2),
    ]  # fmt: skip
    inputs, forward, backward = bench_worker.part_times(events[::-1], 3)
    assert (inputs, forward, backward) == ([9, 0], [8, 6], [11, 14])
    flushes = [event for event in events if event[0] == flush]
    for seen in (0, 1, 2, 4, 5):
        some = [event for event in events if event not in flushes[seen:]]
        with pytest.raises(RuntimeError, match=f"{seen} flushes"):
            bench_worker.part_times(some, 3)


# --- The gate ---


@pytest.fixture
def timer(device: torch.device) -> bench_worker.Timer:
    return bench_worker.Timer(device, 2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("op", OPS)
def test_what_is_right_is_measured(op: str, dtype: str, timer: bench_worker.Timer) -> None:
    for provider in ("kernels", "torch")[: 1 if OPS[op].stored else 2]:  # torch keeps no float8 copy
        found = bench_worker.run_case(bench_providers.load(provider)[op], op, SHAPE, dtype, timer)
        assert found["status"] == "ok", found
        assert 0 < found["error"] <= bench_worker.limit(op, "gradient", dtype)
        assert found["modes"].keys() == set(MODES)
        for numbers in found["modes"].values():
            assert numbers["host_us"] > 0
            on_gpu = timer.device.type == "cuda"
            assert (numbers["gpu_us"] is not None) == (numbers["peak_bytes"] is not None) == on_gpu


@pytest.mark.gpu
def test_a_copy_and_a_call_on_a_gpu(device: torch.device, timer: bench_worker.Timer) -> None:
    copy = bench_worker.copy_bandwidth(device)
    found = bench_worker.run_case(
        bench_providers.load("kernels")["swiglu"], "swiglu", (8192, 4096), "bf16", timer
    )
    modes = found["modes"]
    fewest = OPS["swiglu"].fewest_bytes("full", (8192, 4096), 2)
    assert 0.5 < measurements.share(fewest, modes["full"]["gpu_us"], copy / 1e9) < 1.3
    assert modes["forward"]["peak_bytes"] == 8192 * 4096 * 2
    assert modes["full"]["peak_bytes"] == 3 * 8192 * 4096 * 2


class _Gradient(torch.autograd.Function):
    """The identity, with ``change`` applied to the gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.change(gradient), None


def _without_last_column(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[..., :-1], torch.zeros_like(x[..., -1:])], dim=-1)


def _only_largest(x: torch.Tensor) -> torch.Tensor:
    """Of each row the largest element: of a loss's gradient, all but the softmax."""
    return torch.where(x.abs() == x.abs().amax(-1, keepdim=True), x, 0)


def _wrong_row(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:-1], -x[-1:]])


def _of_result(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Call], Call]:
    return lambda right: lambda t: change(right(t))


def _of_gradient(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Call], Call]:
    def plant(right: Call) -> Call:
        def call(t: Tensors) -> torch.Tensor:
            return right({**t, name: _Gradient.apply(t[name], change)})

        return call

    return plant


WRONG = {
    "swiglu: 2 % off": ("swiglu", _of_result(lambda x: x * 1.02)),
    "swiglu: last column": ("swiglu", _of_result(_without_last_column)),
    "swiglu: NaN": ("swiglu", _of_result(lambda x: x * torch.nan)),
    "swiglu: sign of the gradient": ("swiglu", _of_gradient("x", lambda g: -g)),
    "swiglu: last column of the gradient": ("swiglu", _of_gradient("x", _without_last_column)),
    "swiglu: bias gradient": ("swiglu_bias", _of_gradient("bias", lambda g: g * 1.05)),
    "swiglu: a row's weight gradient": ("swiglu_weighted", _of_gradient("weights", _wrong_row)),
    "cross-entropy: no softmax": ("cross_entropy", _of_gradient("x", _only_largest)),
    "cross-entropy: a token": ("cross_entropy", _of_result(_wrong_row)),
    "output layer: mean": ("linear_cross_entropy", _of_result(lambda x: x * 1.02)),
    "output layer: gradient": ("linear_cross_entropy", _of_gradient("x", _wrong_row)),
    "output layer: weight gradient": ("linear_cross_entropy", _of_gradient("weight", lambda g: -g)),
    "RMSNorm: a row": ("rms_norm", _of_result(_wrong_row)),
    "RMSNorm: weight gradient": ("rms_norm", _of_gradient("weight", _without_last_column)),
    "RMSNorm: gradient of the residual": (
        "rms_norm_residual",
        lambda right: lambda t: right({**t, "branch": t["branch"] * 1.05}),
    ),
    "LayerNorm: bias gradient": ("layer_norm", _of_gradient("bias", lambda g: g * 0)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_not_timed(
    name: str, timer: bench_worker.Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer, "measure", lambda *_: pytest.fail("was timed"))
    op, plant = WRONG[name]
    right = bench_providers.load("torch")[op]
    found = bench_worker.run_case(lambda t: plant(right(t)), op, (8, 500), "bf16", timer)
    assert found["status"] == "wrong"
    assert not found["error"] <= bench_worker.limit(
        op, "gradient" if "gradient" in name else "result", "bf16"
    )
    assert "gradient" not in name or "gradient of" in found["reason"]


def test_a_result_of_another_shape_is_wrong(timer: bench_worker.Timer) -> None:
    right = bench_providers.load("torch")
    for op in ("cross_entropy", "rms_norm"):
        inputs = bench_worker.make_inputs(op, SHAPE, "fp32", timer.device)
        found = bench_worker._run(right[op](inputs.fresh()), inputs)
        found["result"] = found["result"][:-1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench_worker, "_run", lambda *_, found=found: found)
            error, place = bench_worker.gate(lambda t: t["x"], op, inputs, "fp32")
        assert (error, place) == (torch.inf, "result")


def test_the_truth_is_the_same_in_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for op in OPS:
        inputs = bench_worker.make_inputs(op, SHAPE, "bf16", device)
        call = bench_providers.load("kernels")[op](inputs.fresh())
        whole = bench_worker.gate(call, op, inputs, "bf16")
        with monkeypatch.context() as patch:
            patch.setattr(bench_worker, "CHUNK_ELEMENTS", 2 * inputs.elements)
            parts = len(list(bench_worker._truths(op, inputs)))
            assert parts == SHAPE[0] / 2
            assert bench_worker.gate(call, op, inputs, "bf16")[0] == pytest.approx(whole[0], rel=1e-6)


def test_calls_that_the_overlaid_tree_leaves_to_upstream_are_told() -> None:
    def counters(**call: Any) -> dict[str, Any]:
        return {"swiglu": {"entries": {"bias_swiglu_impl": {"kernel": 0, "off": 0, "upstream": {}, **call}}}}

    assert bench_worker._left(counters(kernel=1)) == ""
    assert bench_worker._left(counters()) == "left to upstream: not among the tree's ops"
    assert bench_worker._left(counters(off=1)) == "left to upstream: off"
    assert bench_worker._left(counters(kernel=1, upstream={"a dtype": 1})) == "left to upstream: a dtype"


# --- The command ---


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The worker's part in this process, so that a provider can be planted."""

    def run_world(worker: str, plan: dict[str, Any], *, folder: Path, watch: Any, **_: Any) -> None:
        assert worker == "bench_worker"
        folder.mkdir(parents=True)
        for row in bench_worker.measure(plan, device):
            with (folder / bench.RESULTS).open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            watch()

    monkeypatch.setattr(bench, "run_world", run_world)


def _read(out: Path) -> list[dict[str, str]]:
    with (out / bench.CSV).open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In processes of their own, as a person types it."""
    words = ["--tiny", "--op", "rms_norm,swiglu", "--providers", "quack,torch,upstream,kernels"]
    assert cli.main(["bench", *words, "--repeats", "2", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    rows = _read(tmp_path)
    assert {(row["op"], row["provider"], row["mode"]) for row in rows} == {
        (op, provider, mode)
        for op in ("swiglu", "rms_norm")
        for provider in ("kernels", "upstream", "torch", "quack")
        for mode in MODES
    }
    assert len(rows) == 24
    status = {(row["provider"], row["status"]) for row in rows}
    assert {("kernels", "ok"), ("torch", "ok"), ("upstream", "missing")} <= status
    for row in rows:
        if row["status"] == "ok":
            assert float(row["error"]) > 0
            assert (row["torch"], row["commit"]) == (str(torch.__version__), rows[0]["commit"])
            assert row["triton"]
            assert row["version"]
        else:
            assert row["reason"]
            assert not row["gpu_us"]
        if not torch.cuda.is_available():
            assert not row["share"]
    assert "not measured  upstream: no tree" in shown.out
    assert "not measured  quack" in shown.out
    assert "[1/8] kernels swiglu 6 × 40: " in shown.err
    if not torch.cuda.is_available():
        assert "say nothing about any device" in shown.out


@pytest.mark.parametrize(("provider", "code"), [("kernels", 1), ("torch", 0)])
def test_a_wrong_result_is_shown_and_fails_where_it_is_ours(
    provider: str,
    code: int,
    in_process: None,
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = bench_providers.load("torch")
    planted = {op: lambda t, op=op: lambda u: right[op](t)(u) * 1.1 for op in right}
    monkeypatch.setitem(bench_providers.LOADERS, provider, lambda: planted)
    words = ["bench", "--device", device.type, "--tiny", "--op", "swiglu", "--providers", provider]
    assert cli.main([*words, "--out", str(tmp_path)]) == code
    shown = capsys.readouterr().out
    assert "WRONG: error " in shown
    assert ("FAILED  " in shown) == (code == 1)
    for row in _read(tmp_path):
        assert row["status"] == "wrong"
        assert row["gpu_us"] == row["share"] == row["host_us"] == row["peak_mib"] == ""


def test_a_call_that_raises_is_a_row_and_the_others_go_on(
    in_process: None, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = dict(bench_providers.load("kernels"))

    def broken(_: Tensors) -> Call:
        raise ValueError("one\ntwo")

    monkeypatch.setitem(bench_providers.LOADERS, "kernels", lambda: right | {"swiglu": broken})
    words = ["--device", device.type, "--tiny", "--op", "swiglu,rms_norm", "--providers", "kernels"]
    assert cli.main(["bench", *words, "--out", str(tmp_path)]) == 1
    found = {row["op"]: (row["status"], row["reason"]) for row in _read(tmp_path)}
    assert found == {"swiglu": ("failed", "ValueError: one"), "rms_norm": ("ok", "")}


def test_a_process_that_dies_leaves_what_it_had(
    in_process: None, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = bench.run_world

    def dies(worker: str, plan: dict[str, Any], **named: Any) -> None:
        complete(worker, {**plan, "cases": plan["cases"][:1]}, **named)
        raise ExpectationError("tree", "an end", "rank 0 ended with signal 11:\nlast words", "read")

    monkeypatch.setattr(bench, "run_world", dies)
    words = ["--device", device.type, "--tiny", "--op", "swiglu,rms_norm", "--providers", "kernels"]
    assert cli.main(["bench", *words, "--out", str(tmp_path)]) == 1
    found = {row["op"]: (row["status"], row["reason"]) for row in _read(tmp_path)}
    assert found["swiglu"] == ("ok", "")
    assert found["rms_norm"] == ("failed", "rank 0 ended with signal 11: last words")


def test_why_a_provider_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    options = bench.Options((), "bf16", 1, "cuda", 1.0, {})
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    why = {name: bench._missing(provider, options) for name, provider in PROVIDERS.items()}
    assert [name for name in why if not why[name]] == [
        "kernels",
        "kernels-in-place",
        "kernels-plain",
        "torch",
        "compile",
    ]
    assert why["quack"] == "no package quack (pip install quack-kernels)"
    assert "no tree" in why["overlaid"]


def test_a_package_of_that_name_that_is_another(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A loader that fails makes rows with the reason, not an error."""

    def fails() -> dict[str, Any]:
        raise ImportError("cannot import name 'rmsnorm'")

    monkeypatch.setitem(bench_providers.LOADERS, "quack", fails)
    plan = {"provider": "quack", "cases": [("rms_norm", *SHAPE)], "dtype": "bf16", "repeats": 1}
    (row,) = bench_worker.measure(plan, device)
    assert (row["status"], row["reason"]) == ("missing", "ImportError: cannot import name 'rmsnorm'")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--op", "gelu"], 2),
        (["--op", ""], 2),
        (["--providers", "kernels,nobody"], 2),
        (["--tiny", "--shapes", "8x8"], 2),
        (["--shapes", "8192"], 2),
        (["--shapes", "0x8"], 2),
        (["--tiny", "--repeats", "0"], 2),
        (["--device", "cpu"], 2),
        (["--device", "cpu", "--quick"], 2),
        (["--tiny", "--dtype", "int8"], 2),
        ([*CPU, "--largest"], 2),
        (["--largest", "0"], 2),
        ([*CPU, "megatron==0.16.1", "--tree", "."], 2),
        ([*CPU, "megatron==0.1"], 3),
        ([*CPU, "--tree", "/dev/null"], 5),
        ([*CPU, "--out", "/dev/null/folder"], 5),
        (["--plot", "/no/such.csv"], 5),
        (["--plot", __file__], 2),
    ],
)
def test_refusals(words: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run_world", lambda *_, **__: pytest.fail("went on"))
    monkeypatch.setattr(plots, "available", lambda: True)
    monkeypatch.setattr(bench, "OUT", tmp_path)
    try:
        found = cli.main(["bench", *words])
    except SystemExit as stop:  # argparse's own
        found = stop.code
    assert found == code


# --- CSV, table, plots ---


def _rows(*, on_gpu: bool = True, providers: tuple[str, ...] = ("kernels", "torch")) -> list[Row]:
    """Rows of two shapes of two ops, with times that are no measurement."""
    rows: list[Row] = []
    for op in ("cross_entropy", "rms_norm"):
        for provider in providers:
            for tokens, columns in ((64, 128), (8, 1024), (8, 4096)):
                modes = {
                    mode: {"gpu_us": n, "host_us": 5.0, "peak_bytes": 2**21}
                    if on_gpu
                    else {"gpu_us": None, "host_us": 5.0, "peak_bytes": None}
                    for mode, n in zip(MODES, (1.0, 2.0, 3.0))
                }
                result = {
                    "op": op, "rows": tokens, "columns": columns, "status": "ok", "reason": "",
                    "error": 1e-3, "modes": modes, "copy": 1e11 if on_gpu else None, "device": "a GPU",
                    "torch": "1", "triton": "2", "python": "3", "version": "4",
                }  # fmt: skip
                rows += measurements.rows_of(
                    result, provider, dtype="bf16", repeats=7, device="cuda", commit="c"
                )
    missing = {
        "op": "rms_norm",
        "rows": 8,
        "columns": 1024,
        "status": "missing",
        "reason": "not here, it says",
    }
    return rows + measurements.rows_of(missing, "quack", dtype="bf16", repeats=7, device="cuda", commit="c")


def test_rows_hold_shares_of_their_own_bytes_and_copy() -> None:
    row = next(row for row in _rows() if row.op == "rms_norm" and row.mode == "full" and row.columns == 1024)
    assert row.fewest_bytes == 5 * 8 * 1024 * 2
    assert row.share == pytest.approx(5 * 8 * 1024 * 2 / 3e-6 / 1e11)
    assert (row.peak_mib, row.copy_gb_s) == (2.0, 100.0)


def test_a_csv_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = _rows()
    files = [tmp_path / "a" / "one.csv", tmp_path / "two.csv"]
    for file, part in zip(files, (rows[:10], rows[10:])):
        with measurements.Writer(file) as writer:
            writer.write(part)
    assert files[0].read_text().splitlines()[0] == ",".join(measurements.FIELDS)
    found = measurements.read(files)
    assert len(found) == len(rows)
    for ours, theirs in zip(found, rows):
        for name in measurements.FIELDS:
            a, b = getattr(ours, name), getattr(theirs, name)
            assert a == (pytest.approx(b, rel=1e-2, abs=1e-4) if isinstance(b, float) else b), name


def test_a_csv_is_written_row_by_row(tmp_path: Path) -> None:
    writer = measurements.Writer(tmp_path / "some.csv")
    writer.write(_rows()[:4])
    assert len(measurements.read([tmp_path / "some.csv"])) == 4
    writer.__exit__()


def test_a_row_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "some.csv"
    with measurements.Writer(file) as writer:
        writer.write(_rows()[:4])
    for text in (
        file.read_text().replace("full", "full,more", 1).rsplit(",", 3)[0],
        "op,rows\nswiglu,1\n",
        "",
    ):
        file.write_text(text)
        assert cli.main(["bench", "--plot", str(file)]) == 2


def test_the_table_has_every_provider_and_its_columns_line_up() -> None:
    text = measurements.table(_rows())
    assert "not measured  quack: not here, it says (rms_norm)" in text
    first = next(i for i, line in enumerate(text) if line.startswith("shape"))
    body = text[first : first + 7]
    assert [len(line) for line in body] == [len(body[0])] * 7
    assert body[1].split()[:4] == ["64", "×", "128", "kernels"]
    assert body[2].split()[0] == "torch"


def test_a_table_of_a_cpu_has_no_empty_columns_and_says_what_it_is() -> None:
    text = "\n".join(measurements.table(_rows(on_gpu=False)))
    assert "say nothing about any device" in text
    assert "peak" not in text
    assert "%" not in text


def _largest() -> list[Row]:
    """What two providers of one op found, numbers that are no measurement; a third is missing."""
    found: list[Row] = []
    about = {"op": "linear_cross_entropy", "columns": 64, "device": "a GPU", "torch": "1", "triton": "2"}
    for provider, rows, reason in (("kernels", 4096, "more than 4096 were not tried"), ("cce", 10, "11: no")):
        modes = {LARGEST: {"peak_bytes": 3 * 2**30}}
        result = {**about, "rows": rows, "status": "ok", "reason": reason, "modes": modes}
        found += measurements.rows_of(
            result, provider, dtype="bf16", repeats=1, device="cuda", commit="c", modes=(LARGEST,)
        )
    missing = {**about, "rows": 8192, "status": "missing", "reason": "none"}
    return found + measurements.rows_of(
        missing, "liger", dtype="bf16", repeats=1, device="cuda", commit="c", modes=(LARGEST,)
    )


def test_the_table_of_what_fits() -> None:
    text = measurements.table(_largest())
    lines = [" ".join(line.split()) for line in text]
    assert "linear_cross_entropy kernels 64 4096 3.0 more than 4096 were not tried" in lines
    assert "linear_cross_entropy cce 64 10 3.0 11: no" in lines
    assert "not measured liger: none" in lines
    assert not any("cold cache" in line or "interpreter" in line for line in lines)


def test_what_fits_is_drawn_from_a_csv(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with measurements.Writer(tmp_path / "some.csv") as writer:
        writer.write(_largest())
    assert cli.main(["bench", "--plot", str(tmp_path / "some.csv")]) == 0
    assert [path.name for path in tmp_path.glob("*.png")] == ["largest.png"]
    figure = plots._largest([row for row in _largest() if row.status == "ok"])
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert shown == ["4,096 (more were not tried)", "10"]


def test_plots_are_drawn_from_a_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with measurements.Writer(tmp_path / "some.csv") as writer:
        writer.write(_rows(providers=("kernels", "overlaid", "torch", "te-in-place")))
    assert cli.main(["bench", "--plot", str(tmp_path / "some.csv")]) == 0
    shown = capsys.readouterr().out
    for name in ("cross_entropy.png", "rms_norm.png", "memory.png"):
        data = (tmp_path / name).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert len(data) > 10_000
        assert str(tmp_path / name) in shown
    assert sorted(p.name for p in tmp_path.glob("*.png")) == [
        "cross_entropy.png",
        "memory.png",
        "rms_norm.png",
    ]


def test_lines_are_named_once_in_their_colours() -> None:
    pytest.importorskip("matplotlib")
    rows = [
        row for row in _rows(providers=("upstream", "kernels", "quack")) if row.op == "rms_norm" and row.share
    ]
    figure = plots._speed(rows)
    assert [axis.get_title() for axis in figure.axes[:3]] == ["forward", "backward", "forward + backward"]
    for axis in figure.axes:
        names = {text.get_text(): text.get_color() for text in axis.texts}
        last = axis in (figure.axes[2], figure.axes[5])
        assert names == (
            {PROVIDERS[p].label: plots.COLOURS[p] for p in ("upstream", "kernels", "quack")} if last else {}
        )
    # The 64 rows of 128 are points of the shares, and no part of the lines of 8 rows.
    lines = [
        line
        for line in figure.axes[0].get_lines()
        if len(line.get_xdata()) == 2 and line.get_label()[0] != "_"
    ]
    assert [list(line.get_xdata()) for line in lines] == [[1024, 4096]] * 3
    assert all(128 not in line.get_xdata() for line in figure.axes[3].get_lines())


def test_of_two_runs_the_last_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[Row]] = []
    monkeypatch.setattr(plots, "_speed", lambda rows: drawn.append(rows))
    monkeypatch.setattr(plots, "_memory", lambda rows: None)
    monkeypatch.setattr(plots, "_save", lambda figure, file: file)
    first = _rows()
    again = [replace(row, gpu_us=9.0) for row in first if row.op == "rms_norm" and row.share]
    others = [replace(row, dtype="fp32", gpu_us=1e6) for row in first if row.share]
    assert len(plots.draw(first + again + others, tmp_path)) == 3
    cross_entropy, rms_norm = drawn
    assert {row.gpu_us for row in cross_entropy} == {1.0, 2.0, 3.0}
    assert {row.gpu_us for row in rms_norm} == {9.0}
    assert len(rms_norm) == len(again)


def test_nothing_is_drawn_of_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with measurements.Writer(tmp_path / "some.csv") as writer:
        writer.write(_rows(on_gpu=False))
    assert cli.main(["bench", "--plot", str(tmp_path / "some.csv")]) == 2
    assert not list(tmp_path.glob("*.png"))


def test_without_matplotlib_plots_are_refused_and_runs_say_so(
    in_process: None,
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    words = ["--device", device.type, "--tiny", "--op", "swiglu", "--providers", "torch"]
    assert cli.main(["bench", *words, "--out", str(tmp_path)]) == 0
    assert "no plots: matplotlib" in capsys.readouterr().out
    assert cli.main(["bench", "--plot", str(tmp_path / bench.CSV)]) == 2


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([0.5, 0.1, 0.9], [0.5, 0.1, 0.9]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.52, 0.5, 0.54], [0.52, 0.42, 0.62]),
        ([1.0, 0.99], [1.0, 0.9]),
        ([0.0, 0.3, 0.02], [0.0, 0.3, 0.1]),
        ([], []),
    ],
)
def test_names_keep_apart(places: list[float], expected: list[float]) -> None:
    assert plots.spread(places, 0.1) == pytest.approx(expected)
