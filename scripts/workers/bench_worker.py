# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-calls, disable-error-code="untyped-decorator"
"""Measure one provider: its results against float64 first, then time, host time and memory of those right.

Every call gets fresh copies of the inputs, since some write over them. A call's time is the sum of its
kernels' durations as the profiler sees them, from a cold cache: a kernel that writes a large buffer runs
before each part of a call, and by its name tells the parts apart. So that gaps between kernels do not matter,
the device is kept busy until the host has launched them all.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from scripts.workers import bench_providers, runtime
from scripts.workers.bench_ops import HIDDEN_SIZE, LARGEST, MODES, OPS, PROVIDERS, RESULTS, TOKENS, Shape
from scripts.workers.bench_providers import (
    ACTIVATIONS,
    EPS,
    Bind,
    Call,
    Tensors,
    UnavailableError,
    activation,
    kernels,
    with_branch,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Of a result with one rounding the error (as `rms_error` measures it) was 0.1 of the dtype's epsilon, of
# upstream's and PyTorch's own, which round in between, up to 0.6. In float32 rounded sums outweigh that.
LIMITS = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-16}
# A gradient of a large vocabulary is too small for float16 unless the loss is scaled, as it is in training.
LOSS_SCALE = {"fp16": 4096.0}

# The standard deviation of an output layer's logits. All that write them in a narrow dtype round them, and as
# an exponential's relative error is its argument's absolute one, a logit's size multiplies what that costs.
LOGITS = 4.0

CONSTANTS = {"target", "branch"}  # of the tensors: nobody wants their gradient

CHUNK_ELEMENTS = 2**25  # of float64 at a time
FLUSH_BYTES = 2**28  # several times any cache
COPY_BYTES = 2**31
COPY_REPEATS = 20
WARM_UP = 3
_CLOCK = 2e9  # cycles a second, no fewer than devices make


def main(argv: list[str]) -> int:
    """Measure as the plan in ``argv[0]`` says; a line of JSON for each case, as soon as it is done."""
    plan = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    folder = Path(plan["folder"])
    device = runtime.prepare(plan["device"])
    in_megatron = PROVIDERS[plan["provider"]].tree is not None
    if in_megatron:
        bench_providers.join_megatron(folder, plan["device"])
    with (folder / RESULTS).open("a", encoding="utf-8", buffering=1) as stream:
        for row in measure(plan, device):
            stream.write(json.dumps(row) + "\n")
    runtime.write_report(folder, {})
    if in_megatron:
        torch.distributed.destroy_process_group()
    return 0


def measure(plan: Mapping[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """The rows of ``plan``: one for each of its ``cases`` (op, rows, columns)."""
    about: dict[str, Any] = {**runtime.versions(), "copy": None}
    try:
        ops, why = bench_providers.load(plan["provider"]), ""
    except UnavailableError as error:
        ops, why = {}, str(error)
    about["version"] = bench_providers.version(plan["provider"])
    limit = plan.get("largest")
    if ops and device.type == "cuda" and limit is None:
        about["copy"] = copy_bandwidth(device)
    timer = Timer(device, plan["repeats"]) if ops else None
    overlay = runtime.overlay() if PROVIDERS[plan["provider"]].tree == "overlaid" else None
    for op, rows, columns in plan["cases"]:
        row = {**about, "op": op, "rows": rows, "columns": columns, "error": None, "modes": {}}
        if op not in ops or timer is None:
            yield {**row, "status": "missing", "reason": why or "does not offer this op"}
            continue
        try:
            if limit is None:
                row |= run_case(ops[op], op, (rows, columns), plan["dtype"], timer, overlay)
            else:
                row |= run_largest(ops[op], op, columns, plan["dtype"], device, limit)
        except Exception as error:  # whatever a library raises is a result here
            found = str(error).strip().splitlines() or [""]
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {found[0]}"}
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield row


# --- A case ---


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case.

    Attributes:
        by_row: those with a row for each token; every call gets a copy.
        shared: parameters and labels, the same objects in every call.
        elements: the widest row that a call computes.
        gradient: the gradient of the result.
    """

    by_row: Tensors
    shared: Tensors
    gradient: torch.Tensor
    elements: int

    def fresh(self) -> Tensors:
        """The tensors for one call."""
        return {name: x.clone() for name, x in self.by_row.items()} | self.shared

    def poison(self) -> None:
        """Leave NaN in the memory that the next call will get."""
        tensors = [*self.by_row.values(), self.gradient]
        # Two of each: the call's copy of the input takes one.
        poisoned = [torch.full_like(x, torch.nan, requires_grad=False) for x in tensors for _ in range(2)]
        del poisoned


def make_inputs(op: str, shape: Shape, dtype: str, device: torch.device) -> Inputs:
    """Random tensors for ``op``; the same ones in every process on the same kind of device."""
    rows, columns = shape
    kind = DTYPES[dtype]
    generator = torch.Generator(device).manual_seed(rows + columns)

    def normal(*size: int, of: torch.dtype = kind) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=of)

    labels = torch.randint(columns, (rows,), generator=generator, device=device)
    scale = LOSS_SCALE.get(dtype, 1.0)
    if op == "linear_cross_entropy":
        weight = normal(columns, HIDDEN_SIZE).mul_(LOGITS / HIDDEN_SIZE**0.5)
        by_row, shared = {"x": normal(rows, HIDDEN_SIZE)}, {"weight": weight, "target": labels}
        return _with_gradients(by_row, shared, torch.tensor(scale, device=device), columns)
    by_row, shared = {"x": normal(rows, columns)}, {}
    gradient = normal(rows, columns)
    if op in ACTIVATIONS:
        width = columns if op.startswith("squared_relu") else 2 * columns
        by_row = {"x": normal(rows, width)}
        if op.endswith("_bias"):
            shared = {"bias": normal(width)}
        if op.endswith("_weighted"):
            by_row["weights"] = normal(rows, 1, of=torch.float32).abs()
    elif op == "cross_entropy":
        shared = {"target": labels}
        gradient = normal(rows, of=torch.float32) * scale
    else:
        shared = {"weight": normal(columns)}
        if op == "layer_norm":
            shared["bias"] = normal(columns)
        if op == "rms_norm_residual":
            by_row["branch"] = normal(rows, columns)
    return _with_gradients(by_row, shared, gradient, by_row["x"].shape[1])


def _with_gradients(by_row: Tensors, shared: Tensors, gradient: torch.Tensor, elements: int) -> Inputs:
    for name in by_row.keys() - CONSTANTS:
        by_row[name].requires_grad_()
    for name in shared.keys() - CONSTANTS:
        shared[name] = torch.nn.Parameter(shared[name])
    return Inputs(by_row, shared, gradient, elements)


def truth(op: str, t: Tensors, rows: int) -> torch.Tensor:
    """The result in the tensors' dtype, float64, by PyTorch alone; of a mean over ``rows`` ``t``'s part."""
    if op in ACTIVATIONS:
        call = activation(op, reference=True)
        result = call(t)
        if OPS[op].stored:  # the gradient is that at what float8 keeps of the input
            x = t["x"]
            kept = x + (x.detach().to(torch.float8_e4m3fn).to(x.dtype) - x.detach())
            at_kept = call({**t, "x": kept})
            result = at_kept + (result - at_kept).detach()
    elif op == "cross_entropy":
        result = kernels("cross_entropy").cross_entropy_reference(t["x"], t["target"])
    elif op == "linear_cross_entropy":
        reference = kernels("linear_cross_entropy").linear_cross_entropy_reference
        result = reference(t["x"], t["weight"], t["target"]).sum() / rows
    elif op == "rms_norm_residual":
        result = with_branch(lambda t: kernels("norms").rms_norm_reference(t["x"], t["weight"], EPS))(t)
    elif op == "rms_norm":
        result = kernels("norms").rms_norm_reference(t["x"], t["weight"], EPS)
    else:
        result = kernels("norms").layer_norm_reference(t["x"], t["weight"], t["bias"], EPS)
    exact: torch.Tensor = result
    return exact


def run_case(
    bind: Bind, op: str, shape: Shape, dtype: str, timer: Timer, overlay: ModuleType | None = None
) -> dict[str, Any]:
    """Compare one call with float64; only what is right is measured.

    ``overlay``: the overlaid tree's package, whose counters tell whether a kernel served the call.

    Raises:
        Exception: whatever the call raises.
    """
    inputs = make_inputs(op, shape, dtype, timer.device)
    if overlay is not None:
        overlay.reset_counters()
    call = bind(inputs.fresh())
    error, place = gate(call, op, inputs, dtype)
    if overlay is not None and (reason := _left(overlay.counters())):
        return {"status": "missing", "reason": reason, "error": error}
    if not error <= limit(op, place, dtype):
        return {"status": "wrong", "reason": f"error {error:.1e} of {place}", "error": error}
    products = timer.products(inputs, shape[1]) if OPS[op].products_of("full") else None
    modes = timer.measure(call, inputs)
    return {"status": "ok", "reason": "", "error": error, "modes": modes, "products_us": products}


def _left(counters: Mapping[str, Any]) -> str:
    """Why the overlaid tree left calls to upstream; empty where it served them all."""
    calls = [call for op in counters.values() for call in op["entries"].values()]
    reasons = [reason for call in calls for reason in call["upstream"]] + ["off"] * any(
        call["off"] for call in calls
    )
    if not any(call["kernel"] for call in calls):
        reasons = reasons or ["not among the tree's ops"]
    return f"left to upstream: {', '.join(reasons)}" if reasons else ""


# --- The gate ---


def _run(call: Call, inputs: Inputs) -> Tensors:
    """Result and gradients of one call, by name."""
    t = inputs.fresh()
    wanted = {name: x for name, x in t.items() if x.requires_grad}
    out = call(t)
    gradients = torch.autograd.grad(out, list(wanted.values()), inputs.gradient.to(out.dtype))
    return {"result": out.detach(), **{f"gradient of {name}": g for name, g in zip(wanted, gradients)}}


def limit(op: str, name: str, dtype: str) -> float:
    """How large the error of a call's result or gradient may be."""
    of_logits = OPS[op].products_of("full") and name != "result"
    return LIMITS[dtype] * (LOGITS if of_logits else 1.0)


def gate(call: Call, op: str, inputs: Inputs, dtype: str) -> tuple[float, str]:
    """The largest error, by its limit, of one call's result and gradients, and of which tensor; NaN is larger
    than all.
    """
    inputs.poison()
    found = _run(call, inputs)
    errors: list[tuple[float, str]] = []
    sums: Tensors = {}
    scalars: dict[str, list[torch.Tensor]] = {}
    first = 0
    for exact in _truths(op, inputs):
        rows = exact["gradient of x"].shape[0]
        for name, true in exact.items():
            if true.dim() == 0 or name.removeprefix("gradient of ") in inputs.shared:
                sums[name] = sums.get(name, torch.zeros_like(true)) + true
            elif true.numel() == rows:
                scalars.setdefault(name, []).append(true.flatten())
            else:
                errors.append((_of_rows(found[name], true, first), name))
        first += rows
    whole = sums | {name: torch.cat(parts) for name, parts in scalars.items()}
    for name, true in whole.items():
        ours = found[name]
        fits = ours.numel() == true.numel()
        one_row = (ours.reshape(1, -1), true.reshape(1, -1))
        errors.append((rms_error(*one_row) if fits else torch.inf, name))
    worst = max(errors, key=lambda error: error[0] / limit(op, error[1], dtype))
    return next((error for error in errors if error[0] != error[0]), worst)


def _of_rows(found: torch.Tensor, true: torch.Tensor, first: int) -> float:
    if found.dim() != 2 or found.shape[1] != true.shape[1] or found.shape[0] < first + len(true):
        return torch.inf
    return rms_error(found[first : first + len(true)], true)


def rms_error(found: torch.Tensor, true: torch.Tensor) -> float:
    """Of the worst row, the root mean square of its elements' errors; both are ``[rows, columns]``.

    An element's error is relative to its true size plus the row's mean size: so neither does one large
    element (the label's, in the gradient of a loss) hide all others, nor does an element near zero count as
    wrong for the rounding of its terms.
    """
    size = true.abs()
    error = (found.double() - true).abs() / (size + size.mean(-1, keepdim=True))
    return float(error.square().mean(-1).sqrt().max().item())


def _truths(op: str, inputs: Inputs) -> Iterator[Tensors]:
    """Result and gradients in float64, some rows at a time; those of parameters are such rows' part."""
    total = inputs.by_row["x"].shape[0]
    step = max(1, CHUNK_ELEMENTS // inputs.elements)
    for first in range(0, total, step):
        rows = slice(first, first + step)
        exact = {
            name: x.detach()[rows].double().requires_grad_(x.requires_grad)
            for name, x in inputs.by_row.items()
        }
        for name, x in inputs.shared.items():
            labels = name == "target"
            exact[name] = x[rows] if labels else x.detach().double().requires_grad_()
        wanted = {name: x for name, x in exact.items() if x.requires_grad}
        out = truth(op, exact, total)
        gradient = inputs.gradient[rows] if inputs.gradient.dim() else inputs.gradient
        gradients = torch.autograd.grad(out, list(wanted.values()), gradient.double())
        yield {"result": out.detach(), **{f"gradient of {name}": g for name, g in zip(wanted, gradients)}}


# --- Time and memory ---


@triton.jit
def flush_cache_kernel(buffer, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(buffer + o, tl.zeros([BLOCK], dtype=tl.int32))


FLUSH = "flush_cache_kernel"
_FLUSH_BLOCK = 4096

#: A device event: name, start and duration in microseconds.
Event = tuple[str, float, float]


def part_times(events: Sequence[Event], parts: int) -> list[list[float]]:
    """Device time of each part of each call: of the events between one flush of the cache and the next.

    Args:
        events: in any order; those before the first flush do not count.
        parts: how many parts a call has, each after a flush of its own.

    Returns:
        Of each part its times, in microseconds, in the order of calls.

    Raises:
        RuntimeError: the flushes do not make whole calls.
    """
    times: list[float] = []
    for name, _, duration in sorted(events, key=lambda event: event[1]):
        if name.startswith(FLUSH):
            times.append(0.0)
        elif times:
            times[-1] += duration
    if not times or len(times) % parts:
        raise RuntimeError(f"the profiler saw {len(times)} flushes of the cache, no multiple of {parts}")
    return [times[part::parts] for part in range(parts)]


def _events(profiler: torch.profiler.profile) -> list[Event]:
    """What the device did."""
    return [
        (event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]


class Timer:
    """Measures right calls on one device; on a CPU the host's clock is all there is."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.repeats = repeats
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._buffer = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
            with self._profile():  # what a process's first profile sees is not complete
                self._flush()

    def measure(self, call: Call, inputs: Inputs) -> dict[str, dict[str, float | None]]:
        """By mode: ``gpu_us`` and ``host_us``, medians, and ``peak_bytes`` above the inputs."""
        warm_up, repeats = (WARM_UP, self.repeats) if self._on_gpu else (0, 1)
        for _ in range(warm_up):
            _run(call, inputs)
        host = self._host(call, inputs, repeats)
        gpu = self._gpu(call, inputs, max(host["full"])) if self._on_gpu else {}
        peak = self._memory(call, inputs) if self._on_gpu else {}
        return {
            mode: {
                "gpu_us": statistics.median(gpu[mode]) if gpu else None,
                "host_us": statistics.median(host[mode]) * 1e6,
                "peak_bytes": peak.get(mode),
            }
            for mode in MODES
        }

    def products(self, inputs: Inputs, columns: int) -> float | None:
        """Microseconds of the three products that an output layer's call is at least; none on a CPU."""
        if not self._on_gpu:
            return None
        x, weight = inputs.by_row["x"].detach(), inputs.shared["weight"].detach()
        logits = torch.randn(x.shape[0], columns, dtype=x.dtype, device=x.device)
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        with self._profile() as profiler:
            for _ in range(WARM_UP + self.repeats):
                self._flush()
                torch.cuda._sleep(int(1e-3 * _CLOCK))  # as before a call, which the device does not start hot
                self._flush()
                torch.mm(x, weight.t(), out=logits)
                torch.mm(logits, weight, out=dx)
                torch.mm(logits.t(), x, out=dweight)
        _, times = part_times(_events(profiler), 2)
        return statistics.median(times[WARM_UP:])

    def _flush(self) -> None:
        flush_cache_kernel[(self._buffer.numel() // _FLUSH_BLOCK,)](self._buffer, BLOCK=_FLUSH_BLOCK)

    @contextmanager
    def _profile(self) -> Iterator[torch.profiler.profile]:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            yield profiler
            torch.cuda.synchronize()

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _parts(self, call: Call, inputs: Inputs, between: Callable[[str], None]) -> None:
        """One call; ``between`` is told what has just been done."""
        t = inputs.fresh()
        wanted = [x for x in t.values() if x.requires_grad]
        between("inputs")
        out = call(t)
        between("forward")
        gradients = torch.autograd.grad(out, wanted, inputs.gradient.to(out.dtype))
        between("backward")
        del out, gradients

    def _host(self, call: Call, inputs: Inputs, repeats: int) -> dict[str, list[float]]:
        """Seconds until the host has made each part of a call, of which the device may still be at work."""
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        clock: dict[str, float] = {}

        def between(part: str) -> None:
            if part == "inputs":
                self._synchronize()
            clock[part] = time.perf_counter()

        for _ in range(repeats):
            self._parts(call, inputs, between)
            times["forward"].append(clock["forward"] - clock["inputs"])
            times["backward"].append(clock["backward"] - clock["forward"])
            times["full"].append(clock["backward"] - clock["inputs"])
        return times

    def _gpu(self, call: Call, inputs: Inputs, host: float) -> dict[str, list[float]]:
        """Microseconds of device time; ``host``: seconds that the host takes for a call."""

        def between(part: str) -> None:
            if part == "inputs":
                torch.cuda._sleep(int((2 * host + 1e-3) * _CLOCK))
            if part != "backward":
                self._flush()

        with self._profile() as profiler:
            for _ in range(self.repeats):
                self._flush()
                self._parts(call, inputs, between)
        _, forward, backward = part_times(_events(profiler), 3)
        if len(forward) != self.repeats:
            raise RuntimeError(f"the profiler saw {len(forward)} of {self.repeats} calls")
        return {
            "forward": forward,
            "backward": backward,
            "full": [sum(both) for both in zip(forward, backward)],
        }

    def _memory(self, call: Call, inputs: Inputs) -> dict[str, float]:
        """Bytes above those that the inputs and the result's gradient take."""
        peaks: dict[str, float] = {}
        before = 0

        def between(part: str) -> None:
            nonlocal before
            torch.cuda.synchronize()
            if part == "inputs":
                before = torch.cuda.memory_allocated()
            else:
                peaks[part] = torch.cuda.max_memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()

        self._parts(call, inputs, between)
        return {**peaks, "full": max(peaks.values())}


# --- The most rows ---

_ROWS_STEP = 1024
_TRIES = 16
_CLOSER = 0.02  # how near the most rows that fit and the fewest that do not come, before the step


def run_largest(
    bind: Bind, op: str, columns: int, dtype: str, device: torch.device, limit: int
) -> dict[str, Any]:
    """The most rows, up to ``limit``, of which one forward and backward fits; results are not judged."""

    def peak_of(rows: int) -> int | None:
        try:
            inputs = make_inputs(op, (rows, columns), dtype, device)
            t = inputs.by_row | inputs.shared
            torch.cuda.reset_peak_memory_stats()
            out = bind(t)(t)
            wanted = [x for x in t.values() if x.requires_grad]
            gradients = torch.autograd.grad(out, wanted, inputs.gradient.to(out.dtype))
            torch.cuda.synchronize()
            del out, gradients
            return torch.cuda.max_memory_allocated()
        except RuntimeError as error:  # libraries that allocate for themselves have errors of their own
            if "out of memory" not in str(error):
                raise
            return None
        finally:
            torch.cuda.empty_cache()

    free, _ = torch.cuda.mem_get_info()
    rows, peak, reason = search_largest(peak_of, free, limit)
    if not rows:
        return {"status": "failed", "reason": reason}
    return {"rows": rows, "status": "ok", "reason": reason, "modes": {LARGEST: {"peak_bytes": peak}}}


def search_largest(peak_of: Callable[[int], int | None], available: int, limit: int) -> tuple[int, int, str]:
    """The most rows that fit, to a step of 1024 and 2 %, their peak, and what more of them came to.

    Args:
        peak_of: the bytes that a number of rows takes, None where they are too many. What else it raises
            ends the search.
        available: bytes, from which the first guess is made by the peaks of few rows.
        limit: no more rows than these are tried.
    """
    known: list[tuple[int, int]] = [(0, 0)]
    failed, reason = limit + 1, f"more than {limit} were not tried"
    guess = TOKENS // 2
    for _ in range(_TRIES):
        best, peak = known[-1]
        near = best > 0 and failed <= limit and failed - best <= max(_ROWS_STEP, int(_CLOSER * failed))
        if near or best in (limit, failed - 1):
            break
        rows = min(max(guess, best + 1), failed - 1)
        if rows < failed - 1 and rows - rows % _ROWS_STEP > best:
            rows -= rows % _ROWS_STEP
        try:
            found = peak_of(rows)
        except Exception as error:  # whatever a library raises is a result here
            said = str(error).strip().splitlines() or [""]
            reason = f"{rows}: {type(error).__name__}: {said[0]}"
            break
        if found is None:
            near_miss = failed > limit and len(known) > 2
            failed, reason = rows, f"{rows}: out of memory"
            guess = int(rows * (1 - _CLOSER)) if near_miss else (best + rows) // 2
            continue
        known.append((rows, found))
        guess = int(rows * (1 + _CLOSER)) if failed > limit else (rows + failed) // 2
        if len(known) == 2:
            guess = 2 * rows
        elif len(known) == 3:
            slope = (found - peak) / (rows - best)
            guess = rows + int((available - found) / slope) if slope > 0 else limit
    best, peak = known[-1]
    return best, peak, reason


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read plus written, of a large copy on ``device``."""
    a = torch.randn(COPY_BYTES // 2, dtype=torch.bfloat16, device=device)
    b = torch.empty_like(a)
    times: list[float] = []
    for _ in range(WARM_UP + COPY_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * COPY_BYTES / statistics.median(times[WARM_UP:])
