# SPDX-License-Identifier: Apache-2.0
"""What parity runs: a list of cases per op, each one call of an entry with a float64 truth of its own.

An op joins with one function that yields :class:`Case` and is named in :data:`OPS`. The truths are plain
formulas written here, not upstream's code and not the kernels' references: they share no mistake with either.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from scripts.workers.entries import LINEAR

Tensors = dict[str, torch.Tensor]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        op: the op that owns the entry.
        entry: the entry's name; a name of a class for a module.
        name: what is special about this call.
        dtype: of the tensors under test.
        module: the module through which the entry is reached.
        inputs: makes the tensors on a device, the same ones for the same generator. Those that require a
            gradient are compared with their gradients.
        call: calls the entry (first argument) with them and returns the output.
        truth: the output in float64, differentiable, of the same tensors in float64.
        grad_output: makes the output's gradient from a contiguous one of its shape; None: no backward.
        backward_inputs: changes the float64 tensors before the truth's gradients are taken.
        kernels: launches that the overlaid tree must make, by kernel; empty where nothing is computed.
        fallback: the reason for which the overlaid tree must leave the call to upstream, or None.
        deviates: where the overlay does not give what upstream gives, and why: by tensor (``out``,
            ``d NAME``, or an input that upstream overwrites). The truth is the overlay's then, upstream must
            be off it, and the overlay is measured by the rounding of the dtype alone.
        upstream_raises: upstream fails here and the overlay must not.
        raises: both must fail, with the same error.
        slack: share of the pristine error allowed on top, where other operations in the dtype make it.
        is_layer: the output is a layer's, which may be a view; any other must own its storage.
        needs: a parameter of the entry or a name of the module, without which a release does not have this
            call.
    """

    op: str
    entry: str
    name: str
    dtype: torch.dtype
    module: str
    inputs: Callable[[torch.Generator, torch.device], Tensors]
    call: Callable[..., torch.Tensor]
    truth: Callable[[Tensors], torch.Tensor] | None = None
    grad_output: Callable[[torch.Tensor], torch.Tensor] | None = lambda g: g
    backward_inputs: Callable[[Tensors], Tensors] = lambda t: t
    kernels: Mapping[str, int] = field(default_factory=dict)
    fallback: str | None = None
    deviates: Mapping[str, str] = field(default_factory=dict)
    upstream_raises: bool = False
    raises: bool = False
    slack: float = 0.0
    is_layer: bool = False
    needs: str | None = None

    @property
    def id(self) -> str:
        """Unique, and the same in every process."""
        return f"{self.module.rpartition('.')[2]}.{self.entry} {short(self.dtype)}: {self.name}"

    def missing(self, module: Any) -> bool:
        """Whether a release does not have this call; ``module`` is the imported one, None where there is
        none.
        """
        entry: Any = getattr(module, self.entry, None)
        if entry is None or self.needs is None:
            return entry is None
        parameters = inspect.signature(getattr(entry, "forward", entry)).parameters
        return self.needs not in parameters and not hasattr(module, self.needs)

    def generator(self) -> torch.Generator:
        """The case's own source of random numbers, on CPU."""
        return torch.Generator().manual_seed(zlib.crc32(self.id.encode()))

    def output_gradient(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The gradient that goes into the backward; its values depend on the case and the shape only."""
        assert self.grad_output is not None
        generator = torch.Generator().manual_seed(zlib.crc32(self.id.encode()) + 1)
        return self.grad_output(torch.randn(shape, generator=generator).to(device, dtype))


def short(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bf16``."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
    return names.get(dtype, str(dtype))


# --- Output gradients as training makes them ---


def _expanded(gradient: torch.Tensor) -> torch.Tensor:
    """One number for every element, as the backward of ``sum`` makes it."""
    return torch.full((), 0.75, dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)


def _transposed(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.transpose(0, 1).contiguous().transpose(0, 1)


def _row_varying(gradient: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(1, gradient.shape[0] + 1, dtype=gradient.dtype, device=gradient.device)
    return rows.view(-1, *[1] * (gradient.dim() - 1)).expand(gradient.shape)


def _columns_apart(gradient: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(
        *gradient.shape[:-1], 2 * gradient.shape[-1], dtype=gradient.dtype, device=gradient.device
    )
    wide[..., ::2] = gradient
    return wide[..., ::2]


def _rows_apart(gradient: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(
        *gradient.shape[:-1], gradient.shape[-1] + 5, dtype=gradient.dtype, device=gradient.device
    )
    wide[..., : gradient.shape[-1]] = gradient
    return wide[..., : gradient.shape[-1]]


# --- SwiGLU ---

FUSIONS = "megatron.core.fusions.fused_bias_swiglu"
MLP = "megatron.core.transformer.mlp"
EXPERTS = "megatron.core.transformer.moe.experts"
SHARED_EXPERTS = "megatron.core.transformer.moe.shared_experts"

FORWARD = {"swiglu_forward": 1}
BOTH = {**FORWARD, "swiglu_backward": 1}
WITH_BIAS = {**BOTH, "swiglu_bias_reduce": 1}


def _swiglu_truth(t: Tensors) -> torch.Tensor:
    y = t["input"] + t["bias"] if "bias" in t else t["input"]
    gate, up = y[..., : y.shape[-1] // 2], y[..., y.shape[-1] // 2 :]
    out = gate / (1 + torch.exp(-gate)) * up
    return out * t["weights"].view(*out.shape[:-1], 1) if "weights" in t else out


def _quantised(t: Tensors) -> Tensors:
    """The input as upstream's float8 store keeps it for the backward."""
    return {**t, "input": t["input"].to(torch.float8_e4m3fn).double()}


def _swiglu_inputs(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    bias: torch.dtype | None = None,
    weights: torch.dtype | None = None,
    layout: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    scale: float = 1.0,
    frozen: tuple[str, ...] = (),
    weights_layout: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> Callable[[torch.Generator, torch.device], Tensors]:
    def make(generator: torch.Generator, device: torch.device) -> Tensors:
        def random(size: tuple[int, ...], kind: torch.dtype, by: float = 1.0) -> torch.Tensor:
            return (torch.randn(size, generator=generator) * by).to(device, kind)

        tensors = {"input": layout(random(shape, dtype, scale))}
        if bias is not None:
            tensors["bias"] = random(tuple(tensors["input"].shape[-1:]), bias)
        if weights is not None:
            rows = tensors["input"].shape[:-1].numel()
            tensors["weights"] = weights_layout(random((rows, 1), weights).abs())
        return {name: t.detach().requires_grad_(name not in frozen) for name, t in tensors.items()}

    return make


def _call_plain(entry: Callable[..., torch.Tensor], t: Tensors) -> torch.Tensor:
    return entry(t["input"], t.get("bias"))


def _call_weighted(entry: Callable[..., torch.Tensor], t: Tensors) -> torch.Tensor:
    return entry(t["input"], None, t["weights"])


def _swiglu_base(dtype: torch.dtype, module: str = FUSIONS) -> tuple[Case, Case, Case]:
    """A plain, a biased and a weighted call that the other cases vary."""
    plain = Case(
        "swiglu",
        "bias_swiglu_impl",
        "2-D",
        dtype,
        module,
        _swiglu_inputs((24, 96), dtype),
        _call_plain,
        _swiglu_truth,
        kernels=BOTH,
    )
    bias = replace(
        plain, name="2-D, bias", inputs=_swiglu_inputs((24, 96), dtype, bias=dtype), kernels=WITH_BIAS
    )
    weighted = replace(
        plain,
        entry="weighted_bias_swiglu_impl",
        name="2-D, weights fp32",
        inputs=_swiglu_inputs((24, 96), dtype, weights=torch.float32),
        call=_call_weighted,
    )
    return plain, bias, weighted


def _everywhere(case: Case, dtype: torch.dtype, large: float = 60.0, **extra: Any) -> Iterator[Case]:
    """A call of an activation, and the same in all shapes and strides; ``extra``: its other operands."""
    yield case
    what = case.name.removeprefix("2-D")

    def like(name: str, shape: tuple[int, ...] = (24, 96), **more: Any) -> Case:
        layout = {k: more.pop(k) for k in ("layout", "scale", "frozen", "weights_layout") if k in more}
        return replace(case, name=name, inputs=_swiglu_inputs(shape, dtype, **extra, **layout), **more)

    # Shapes: a row shorter than any block, odd widths, a row of several blocks, one row, 3-D as the
    # layers pass it.
    for shape in ((24, 2), (7, 74), (2, 2 * 9001), (1, 96), (5, 3, 128), (1, 1, 34)):
        yield like(f"{list(shape)}{what}", shape)
    yield like(f"no tokens{what}", (0, 96), kernels={})
    # Upstream views the flat result as three-dimensional, which is ambiguous without elements.
    yield like(f"no tokens, 3-D{what}", (0, 1, 96), kernels={}, upstream_raises=True)
    yield like(f"large values{what}", scale=large)
    yield like(f"rows apart{what}", (24, 101), layout=lambda x: x[:, :96])
    yield like(f"every other row{what}", (48, 96), layout=lambda x: x[::2])
    yield like(f"columns apart{what}", (24, 192), layout=lambda x: x[:, ::2])
    yield like(f"3-D, rows apart{what}", (5, 6, 96), layout=lambda x: x[:, ::2])
    yield like(f"transposed 3-D{what}", (3, 5, 96), layout=lambda x: x.transpose(0, 1), upstream_raises=True)
    for name, make in (
        ("expanded", _expanded),
        ("transposed", _transposed),
        ("row-varying", _row_varying),
        ("columns apart", _columns_apart),
        ("rows apart", _rows_apart),
    ):
        yield like(f"grad_output {name}{what}", grad_output=make)
        yield like(f"grad_output {name}, 3-D{what}", (5, 3, 96), grad_output=make)
    forward = {name: n for name, n in case.kernels.items() if name.endswith("_forward")}
    yield like(f"forward only{what}", grad_output=None, kernels=forward)


def swiglu(dtype: torch.dtype) -> Iterator[Case]:
    """Every way in which a model reaches the SwiGLU entries, in ``dtype``."""
    plain, bias, weighted = _swiglu_base(dtype)
    w32, wx = torch.float32, dtype
    yield from _everywhere(plain, dtype)
    yield from _everywhere(bias, dtype, bias=dtype)
    yield from _everywhere(weighted, dtype, weights=w32)
    yield replace(
        bias,
        name="bias frozen",
        inputs=_swiglu_inputs((24, 96), dtype, bias=dtype, frozen=("bias",)),
        kernels=BOTH,
    )
    yield replace(
        bias, name="input frozen", inputs=_swiglu_inputs((24, 96), dtype, bias=dtype, frozen=("input",))
    )
    for name in ("input", "weights"):
        yield replace(
            weighted,
            name=f"{name} frozen, weights",
            inputs=_swiglu_inputs((24, 96), dtype, weights=w32, frozen=(name,)),
        )
    if wx is not w32:
        yield replace(
            weighted, name=f"weights {short(wx)}", inputs=_swiglu_inputs((24, 96), dtype, weights=wx)
        )
    yield replace(
        weighted,
        name="weights expanded",
        inputs=_swiglu_inputs((24, 96), dtype, weights=w32, weights_layout=lambda w: w[:1].expand_as(w)),
    )
    yield from _swiglu_kept(dtype)
    yield from _swiglu_routes(dtype)
    yield from _swiglu_left_to_upstream(dtype)
    plain, bias, scaled = _layer(
        "swiglu",
        dtype,
        lambda gate, up: gate / (1 + torch.exp(-gate)) * up,
        lambda: {"activation_func": torch.nn.functional.silu},
    )
    yield replace(plain, kernels=BOTH)
    yield replace(bias, kernels=WITH_BIAS)
    yield replace(scaled, kernels=BOTH)


def _swiglu_kept(dtype: torch.dtype) -> Iterator[Case]:
    """What else may be kept of the input for the backward: a float8 copy, or a marked tensor."""
    plain, bias, weighted = _swiglu_base(dtype)
    for shape in ((24, 96), (5, 3, 128), (7, 74)):
        fp8: dict[str, Any] = {"name": f"fp8 store {list(shape)}", "backward_inputs": _quantised}
        yield replace(
            plain,
            inputs=_swiglu_inputs(shape, dtype),
            call=lambda entry, t: entry(t["input"], None, True),
            **fp8,
        )
        yield replace(
            bias,
            inputs=_swiglu_inputs(shape, dtype, bias=dtype),
            call=lambda entry, t: entry(t["input"], t["bias"], fp8_input_store=True),
            **fp8 | {"name": f"{fp8['name']}, bias"},
        )
        yield replace(
            weighted,
            inputs=_swiglu_inputs(shape, dtype, weights=torch.float32),
            call=lambda entry, t: entry(t["input"], None, t["weights"], True),
            **fp8 | {"name": f"{fp8['name']}, weights"},
        )
    yield replace(
        plain,
        name="fp8 store, forward only",
        call=lambda entry, t: entry(t["input"], None, True),
        grad_output=None,
        kernels=FORWARD,
    )
    for fp8_store in (False, True):
        yield replace(
            bias,
            name=f"offloaded input{', fp8 store' * fp8_store}",
            call=lambda entry, t, fp8_store=fp8_store: entry(t["input"], t["bias"], fp8_store, True),
            backward_inputs=_quantised if fp8_store else plain.backward_inputs,
            needs="cpu_offload_input",
        )


def _swiglu_routes(dtype: torch.dtype) -> Iterator[Case]:
    for module in (MLP, SHARED_EXPERTS, EXPERTS):
        plain, bias, _ = _swiglu_base(dtype, module)
        # As the layers call it: every argument by position.
        yield replace(
            plain,
            name="as called",
            call=lambda entry, t: entry(t["input"], None, *[False] * (_parameters(entry) - 2)),
        )
        yield replace(bias, name="as called, bias", call=lambda entry, t: entry(t["input"], t["bias"], False))
    for module in (MLP, EXPERTS):
        _, _, weighted = _swiglu_base(dtype, module)
        yield replace(
            weighted,
            name="as called, weights",
            call=lambda entry, t: entry(t["input"], None, t["weights"], False),
        )


def _parameters(entry: Callable[..., torch.Tensor]) -> int:
    return len(inspect.signature(entry).parameters)


def _swiglu_left_to_upstream(dtype: torch.dtype) -> Iterator[Case]:
    """Calls that the kernel does not serve, and calls that nobody serves."""
    plain, bias, weighted = _swiglu_base(dtype)
    upstream: dict[str, Any] = {"kernels": {}}
    if dtype is not torch.float32:
        yield replace(
            bias,
            name="bias fp32",
            inputs=_swiglu_inputs((24, 96), dtype, bias=torch.float32, frozen=("bias",)),
            fallback="input and bias of different dtypes",
            **upstream,
        )
    else:
        yield replace(
            plain,
            name="fp64",
            dtype=torch.float64,
            inputs=_swiglu_inputs((24, 96), torch.float64),
            fallback="a dtype other than bfloat16, float16 and float32",
            **upstream,
        )
    fails: dict[str, Any] = {"kernels": {}, "raises": True, "truth": None, "grad_output": None}
    for shape in ((96,), (2, 3, 4, 96)):
        yield replace(plain, name=f"{len(shape)}-D", inputs=_swiglu_inputs(shape, dtype), **fails)
        yield replace(
            weighted,
            name=f"{len(shape)}-D, weights",
            inputs=_swiglu_inputs(shape, dtype, weights=torch.float32),
            **fails,
        )
    yield replace(plain, name="odd width", inputs=_swiglu_inputs((4, 95), dtype), **fails)
    yield replace(
        weighted,
        name="bias and weights",
        inputs=_swiglu_inputs((24, 96), dtype, bias=dtype, weights=torch.float32),
        call=lambda entry, t: entry(t["input"], t["bias"], t["weights"]),
        **fails,
    )
    yield replace(
        plain, name="unknown option", call=lambda entry, t: entry(t["input"], None, no_such_option=1), **fails
    )


def _layer(
    op: str,
    dtype: torch.dtype,
    activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    config: Callable[[], dict[str, Any]],
    clamp: float | None = None,
) -> tuple[Case, Case, Case]:
    """The layer that uses the entries, built as a model builds it: plain, with biases, with per-token
    weights.

    ``activation``: of gate and up, in float64; ``config``: what the layer's config says of it; ``clamp``:
    what bounds both, before the bias.
    """
    hidden, ffn, tokens = 32, 40, (6, 2)

    def inputs(bias: bool, scales: bool) -> Callable[[torch.Generator, torch.device], Tensors]:
        shapes: dict[str, tuple[int, ...]] = {
            "hidden_states": (*tokens, hidden),
            "linear_fc1.weight": (2 * ffn, hidden),
            "linear_fc2.weight": (hidden, ffn),
        }
        if bias:
            shapes |= {"linear_fc1.bias": (2 * ffn,), "linear_fc2.bias": (hidden,)}

        def make(generator: torch.Generator, device: torch.device) -> Tensors:
            made = {
                name: (torch.randn(shape, generator=generator) * 0.3).to(device, dtype)
                for name, shape in shapes.items()
            }
            if scales:
                made["per_token_scale"] = torch.rand(tokens[0] * tokens[1], generator=generator).to(device)
                made["hidden_states"] = made["hidden_states"].view(-1, hidden)
            return {name: t.requires_grad_() for name, t in made.items()}

        return make

    def call(layer: Callable[..., Any], t: Tensors) -> torch.Tensor:
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.mlp import MLPSubmodules

        described = TransformerConfig(
            num_layers=1,
            hidden_size=hidden,
            ffn_hidden_size=ffn,
            num_attention_heads=2,
            gated_linear_unit=True,
            **config(),
            bias_activation_fusion=True,
            add_bias_linear="linear_fc1.bias" in t,
            gradient_accumulation_fusion=False,
            params_dtype=dtype,
            use_cpu_initialization=True,
        )
        submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        mlp = layer(described, submodules).to(t["hidden_states"].device)
        # The tensors themselves take the parameters' places, so that they get the gradients.
        parameters = {name: tensor for name, tensor in t.items() if name.startswith("linear_")}
        scales = {"per_token_scale": t["per_token_scale"]} if "per_token_scale" in t else {}
        out, bias = torch.func.functional_call(mlp, parameters, (t["hidden_states"],), scales)
        result: torch.Tensor = out if bias is None else out + bias
        return result

    def truth(t: Tensors) -> torch.Tensor:
        y = t["hidden_states"] @ t["linear_fc1.weight"].T
        y = y if clamp is None else _bounded(y, clamp)
        y = y + t["linear_fc1.bias"] if "linear_fc1.bias" in t else y
        out = activation(y[..., :ffn], y[..., ffn:])
        out = out * t["per_token_scale"].unsqueeze(-1) if "per_token_scale" in t else out
        out = out @ t["linear_fc2.weight"].T
        return out + t["linear_fc2.bias"] if "linear_fc2.bias" in t else out

    base = Case(op, "MLP", "layer", dtype, MLP, inputs(False, False), call, truth, is_layer=True)
    # The layer's two matrix products round as often as the activation does, so chance decides which tree is
    # nearer.
    base = replace(base, slack=0.5)
    scaled = replace(base, name="layer, per-token scale", inputs=inputs(False, True), needs="per_token_scale")
    return (
        base,
        replace(base, name="layer, bias", inputs=inputs(True, False)),
        scaled,
    )


# --- GeGLU, quick-GeGLU, squared ReLU ---

GEGLU = "megatron.core.fusions.fused_bias_geglu"
SQUARED_RELU = "megatron.core.fusions.fused_weighted_squared_relu"
QUICK_OFFSET, QUICK_CLAMP = 1.0, 0.75


def _bounded(y: torch.Tensor, bound: float) -> torch.Tensor:
    gate, up = y.chunk(2, -1)
    return torch.cat((gate.clamp(max=bound), up.clamp(-bound, bound)), -1)


def _geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return 0.5 * gate * (1 + torch.tanh(0.79788456 * (gate + 0.044715 * gate**3))) * up


def _quick(gate: torch.Tensor, up: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + offset)


def _geglu_truth(t: Tensors) -> torch.Tensor:
    y = t["input"] + t["bias"] if "bias" in t else t["input"]
    return _geglu(*y.chunk(2, -1))


def _quick_truth(offset: float = 0.0, clamp: float | None = None) -> Callable[[Tensors], torch.Tensor]:
    def truth(t: Tensors) -> torch.Tensor:
        y = t["input"] if clamp is None else _bounded(t["input"], clamp)
        if "stored" in t:  # the values of the float8 store, the gradients of what was stored
            y = y + (y.to(torch.float8_e4m3fn).double() - y).detach()
        gate, up = (y + t["bias"] if "bias" in t else y).chunk(2, -1)
        return _quick(gate, up, offset) * t["weights"].view(*gate.shape[:-1], 1)

    return truth


def _squared_relu_truth(t: Tensors) -> torch.Tensor:
    x = t["input"]
    return torch.where(x > 0, x, torch.zeros_like(x)) ** 2 * t["weights"].view(*x.shape[:-1], 1)


def _call_quick(*options: Any, **named: Any) -> Callable[..., torch.Tensor]:
    return lambda entry, t: entry(t["input"], t.get("bias"), t["weights"], *options, **named)


def _launches(kind: str, backward: int = 1, bias: bool = False) -> dict[str, int]:
    launches = {f"{kind}_forward": 1, f"{kind}_backward": backward}
    return launches | ({f"{kind}_bias_reduce": 1} if bias else {})


def _activations_base(dtype: torch.dtype) -> tuple[Case, Case, Case, Case, Case]:
    """A call of GeGLU, plain and biased, of quick-GeGLU, plain and biased, and of squared ReLU."""
    w32 = torch.float32
    geglu = Case(
        "activations",
        "bias_geglu_impl",
        "2-D",
        dtype,
        GEGLU,
        _swiglu_inputs((24, 96), dtype),
        _call_plain,
        _geglu_truth,
        kernels=_launches("geglu"),
    )
    geglu_bias = replace(
        geglu,
        name="2-D, bias",
        inputs=_swiglu_inputs((24, 96), dtype, bias=dtype),
        kernels=_launches("geglu", bias=True),
    )
    quick = replace(
        geglu,
        entry="weighted_bias_quick_geglu_impl",
        name="2-D, weights fp32",
        inputs=_swiglu_inputs((24, 96), dtype, weights=w32),
        call=_call_quick(),
        truth=_quick_truth(),
        kernels=_launches("quick_geglu"),
    )
    quick_bias = replace(
        quick,
        name="2-D, bias, weights fp32",
        inputs=_swiglu_inputs((24, 96), dtype, bias=dtype, weights=w32),
        # The sums over rows and those over columns.
        kernels=_launches("quick_geglu", backward=2, bias=True),
    )
    squared = replace(
        quick,
        entry="weighted_squared_relu_impl",
        module=SQUARED_RELU,
        call=lambda entry, t: entry(t["input"], t["weights"]),
        truth=_squared_relu_truth,
        kernels=_launches("squared_relu"),
    )
    return geglu, geglu_bias, quick, quick_bias, squared


def activations(dtype: torch.dtype) -> Iterator[Case]:
    """Every way in which a model reaches the entries of the activations beside SwiGLU, in ``dtype``."""
    geglu, geglu_bias, quick, quick_bias, squared = _activations_base(dtype)
    w32 = torch.float32
    yield from _everywhere(geglu, dtype)
    yield from _everywhere(geglu_bias, dtype, bias=dtype)
    yield from _everywhere(quick, dtype, weights=w32)
    yield from _everywhere(quick_bias, dtype, bias=dtype, weights=w32)
    # Its square is to be one of float16, too.
    yield from _everywhere(squared, dtype, large=20.0, weights=w32)
    for frozen in ("input", "bias"):
        yield replace(
            geglu_bias,
            name=f"{frozen} frozen",
            inputs=_swiglu_inputs((24, 96), dtype, bias=dtype, frozen=(frozen,)),
            kernels=geglu_bias.kernels if frozen == "input" else _launches("geglu"),
        )
    for frozen in ("input", "bias", "weights"):
        once = _launches("quick_geglu", bias=frozen == "weights")
        yield replace(
            quick_bias,
            name=f"{frozen} frozen, bias, weights",
            inputs=_swiglu_inputs((24, 96), dtype, bias=dtype, weights=w32, frozen=(frozen,)),
            kernels=quick_bias.kernels if frozen == "input" else once,
        )
    for case in (quick, squared):
        for frozen in ("input", "weights"):
            yield replace(
                case,
                name=f"{frozen} frozen, weights",
                inputs=_swiglu_inputs((24, 96), dtype, weights=w32, frozen=(frozen,)),
            )
        if dtype is not w32:
            yield replace(
                case,
                name=f"weights {short(dtype)}",
                inputs=_swiglu_inputs((24, 96), dtype, weights=dtype),
            )
        yield replace(
            case,
            name="weights expanded",
            inputs=_swiglu_inputs((24, 96), dtype, weights=w32, weights_layout=lambda w: w[:1].expand_as(w)),
        )
    yield from _quick_options(dtype)
    yield from _activations_routes(dtype)
    yield from _activations_left_to_upstream(dtype)
    yield from _activations_modules(dtype)


def _quick_options(dtype: torch.dtype) -> Iterator[Case]:
    _, _, quick, quick_bias, _ = _activations_base(dtype)
    w32 = torch.float32
    kinds: tuple[tuple[Case, dict[str, Any], str], ...] = (
        (quick, {}, ""),
        (quick_bias, {"bias": dtype}, ", bias"),
    )
    for case, extra, what in kinds:
        # Half-precision types cannot hold the second offset, and upstream rounds it.
        for offset in (QUICK_OFFSET, 0.3):
            yield replace(
                case,
                name=f"offset {offset}{what}",
                call=_call_quick(linear_offset=offset),
                truth=_quick_truth(offset),
            )
        for shape in ((24, 96), (5, 3, 128), (7, 74)):
            inputs = _swiglu_inputs(shape, dtype, weights=w32, **extra)
            yield replace(
                case,
                name=f"clamped, offset {list(shape)}{what}",
                inputs=inputs,
                call=_call_quick(False, QUICK_OFFSET, QUICK_CLAMP),
                truth=_quick_truth(QUICK_OFFSET, QUICK_CLAMP),
            )
            yield replace(
                case,
                name=f"fp8 store, offset {list(shape)}{what}",
                inputs=inputs,
                call=_call_quick(True, QUICK_OFFSET),
                truth=_quick_truth(QUICK_OFFSET),
                backward_inputs=_quantised,
            )


def _activations_routes(dtype: torch.dtype) -> Iterator[Case]:
    """As the layers call the entries: every argument by position."""
    geglu, geglu_bias, quick, quick_bias, squared = _activations_base(dtype)
    for module in (MLP, SHARED_EXPERTS, EXPERTS):
        yield replace(geglu, module=module, name="as called")
        yield replace(geglu_bias, module=module, name="as called, bias")
    for module in (MLP, EXPERTS):
        for case, what in ((quick, ""), (quick_bias, ", bias")):
            yield replace(case, module=module, name=f"as called{what}", call=_call_quick(False, 0.0, None))
            yield replace(
                case,
                module=module,
                name=f"as called, clamped{what}",
                call=_call_quick(False, QUICK_OFFSET, QUICK_CLAMP),
                truth=_quick_truth(QUICK_OFFSET, QUICK_CLAMP),
            )
    yield replace(squared, module=EXPERTS, name="as called")


def _activations_left_to_upstream(dtype: torch.dtype) -> Iterator[Case]:
    """Calls that the kernel does not serve, and calls that nobody serves."""
    geglu, geglu_bias, quick, _, squared = _activations_base(dtype)
    upstream: dict[str, Any] = {"kernels": {}}
    yield replace(
        quick,
        name="fp8 store, clamped",
        call=_call_quick(True, QUICK_OFFSET, QUICK_CLAMP),
        truth=_quick_truth(QUICK_OFFSET, QUICK_CLAMP),
        backward_inputs=lambda t: {**t, "stored": torch.ones(())},
        fallback="fp8_input_store together with a clamp",
        **upstream,
    )
    if dtype is not torch.float32:
        yield replace(
            geglu_bias,
            name="bias fp32",
            inputs=_swiglu_inputs((24, 96), dtype, bias=torch.float32, frozen=("bias",)),
            fallback="input and bias of different dtypes",
            **upstream,
        )
    else:
        kinds: tuple[tuple[Case, dict[str, Any]], ...] = ((geglu, {}), (squared, {"weights": torch.float32}))
        for case, extra in kinds:
            yield replace(
                case,
                name="fp64",
                dtype=torch.float64,
                inputs=_swiglu_inputs((24, 96), torch.float64, **extra),
                fallback="a dtype other than bfloat16, float16 and float32",
                **upstream,
            )
    fails: dict[str, Any] = {"kernels": {}, "raises": True, "truth": None, "grad_output": None}
    for shape in ((96,), (2, 3, 4, 96)):
        yield replace(geglu, name=f"{len(shape)}-D", inputs=_swiglu_inputs(shape, dtype), **fails)
        for case in (quick, squared):
            yield replace(
                case,
                name=f"{len(shape)}-D, weights",
                inputs=_swiglu_inputs(shape, dtype, weights=torch.float32),
                **fails,
            )
    yield replace(geglu, name="odd width", inputs=_swiglu_inputs((4, 95), dtype), **fails)
    yield replace(
        geglu, name="unknown option", call=lambda entry, t: entry(t["input"], None, no_such_option=1), **fails
    )


def _activations_modules(dtype: torch.dtype) -> Iterator[Case]:
    def config(**named: Any) -> Callable[[], dict[str, Any]]:
        return lambda: {"activation_func": torch.nn.functional.gelu, **named}

    def quick_config() -> dict[str, Any]:
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        return {
            "activation_func": quick_gelu,
            "glu_linear_offset": QUICK_OFFSET,
            "activation_func_clamp_value": QUICK_CLAMP,
        }

    plain, bias, _ = _layer("activations", dtype, _geglu, config())
    yield replace(plain, name="GeGLU layer", kernels=_launches("geglu"))
    yield replace(bias, name="GeGLU layer, bias", kernels=_launches("geglu", bias=True))

    def quick(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return _quick(gate, up, QUICK_OFFSET)

    # With biases and per-token weights upstream's local layer fails: it adds to a view in place.
    _, _, scaled = _layer("activations", dtype, quick, quick_config, QUICK_CLAMP)
    yield replace(
        scaled, name=f"quick-GeGLU {scaled.name}", kernels=_launches("quick_geglu"), needs="quick_gelu"
    )


# --- Cross-entropy ---

FUSED_CE = "megatron.core.fusions.fused_cross_entropy"
UNFUSED_CE = "megatron.core.tensor_parallel.cross_entropy"
TENSOR_PARALLEL = "megatron.core.tensor_parallel"
LANGUAGE_MODULE = "megatron.core.models.common.language_module.language_module"

CE_FORWARD = {"cross_entropy_forward": 1}
CE_BOTH = {**CE_FORWARD, "cross_entropy_backward": 1}

OVERWRITTEN = {"logits": "upstream overwrites float32 logits in the forward"}
ROUNDED = {"d logits": "upstream's fused gradient goes through bfloat16"}
NEGATIVE = "a negative label has no loss, where upstream has one until it is masked"


def _cross_entropy_truth(smoothing: float = 0.0) -> Callable[[Tensors], torch.Tensor]:
    def truth(t: Tensors) -> torch.Tensor:
        logits, labels = t["logits"], t["labels"].long()
        total = torch.logsumexp(logits, -1)
        columns = logits.shape[-1]
        present = (labels >= 0) & (labels < columns)
        known = torch.where(present, labels, 0).unsqueeze(-1)
        target = total - logits.gather(-1, known).squeeze(-1)
        beyond = total - logits.amax(-1).detach() if logits.numel() else total
        loss = torch.where(present, target, beyond)
        if smoothing:
            others = (total.unsqueeze(-1) - logits).sum(-1) - target
            loss = (1 - smoothing) * loss + smoothing / (columns - 1) * others
        return torch.where(labels >= 0, loss, torch.zeros_like(loss))

    return truth


def _cross_entropy_inputs(
    shape: tuple[int, ...],
    columns: int,
    dtype: torch.dtype,
    *,
    scale: float = 3.0,
    layout: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    labels_layout: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    labels: tuple[int, ...] = (),
    labels_dtype: torch.dtype = torch.int64,
) -> Callable[[torch.Generator, torch.device], Tensors]:
    """``labels``: the first ones; the others are random ones of the vocabulary."""

    def make(generator: torch.Generator, device: torch.device) -> Tensors:
        logits = layout((torch.randn((*shape, columns), generator=generator) * scale).to(device, dtype))
        target = torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator)
        target.view(-1)[: len(labels)] = torch.tensor(labels, dtype=torch.int64)
        return {
            "logits": logits.detach().requires_grad_(),
            "labels": labels_layout(target.to(device, labels_dtype)),
        }

    return make


def _tensor_parallel_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def _call_fused(entry: Callable[..., torch.Tensor], t: Tensors) -> torch.Tensor:
    return entry(t["logits"], t["labels"], _tensor_parallel_group())


def _call_unfused(entry: Callable[..., torch.Tensor], t: Tensors) -> torch.Tensor:
    return entry(t["logits"], t["labels"])


def _cross_entropy_base(dtype: torch.dtype) -> tuple[Case, Case]:
    """A fused and an unfused call that the other cases vary."""
    overwritten = OVERWRITTEN if dtype is torch.float32 else {}
    unfused = Case(
        "cross_entropy",
        "vocab_parallel_cross_entropy",
        "[6, 2, 48]",
        dtype,
        UNFUSED_CE,
        _cross_entropy_inputs((6, 2), 48, dtype),
        _call_unfused,
        _cross_entropy_truth(),
        kernels=CE_BOTH,
        deviates=overwritten,
    )
    rounded = {} if dtype is torch.bfloat16 else ROUNDED
    fused = replace(
        unfused,
        entry="fused_vocab_parallel_cross_entropy",
        module=FUSED_CE,
        call=_call_fused,
        deviates={**overwritten, **rounded},
    )
    return fused, unfused


def cross_entropy(dtype: torch.dtype) -> Iterator[Case]:
    """Every way in which a model reaches the cross-entropy entries on one rank, in ``dtype``."""
    for base in _cross_entropy_base(dtype):
        yield base

        def like(
            name: str,
            shape: tuple[int, ...] = (6, 2),
            columns: int = 48,
            *,
            _base: Case = base,
            without: tuple[str, ...] = (),
            **more: Any,
        ) -> Case:
            names = ("scale", "layout", "labels_layout", "labels")
            made = _cross_entropy_inputs(
                shape, columns, dtype, **{n: more.pop(n) for n in names if n in more}
            )
            more["deviates"] = {
                k: v for k, v in {**_base.deviates, **more.get("deviates", {})}.items() if k not in without
            }
            return replace(_base, name=name, inputs=made, **more)

        # Shapes: one row shorter than any tile, odd vocabularies, several tiles, one token, two dimensions.
        for shape, columns in (((6, 2), 5), ((7, 1), 37), ((1, 1), 1025), ((2, 1), 9001), ((5,), 48)):
            yield like(f"{[*shape, columns]}", shape, columns)
        yield like("one label", columns=1, without=("d logits",))
        yield like(
            "no tokens",
            (0, 1),
            kernels={},
            upstream_raises=base.call is _call_fused,
            without=("logits", "d logits"),
        )
        yield like("large values", scale=60.0)
        yield like("rows apart", columns=53, layout=lambda x: x[..., :48])
        yield like("columns apart", columns=96, layout=lambda x: x[..., ::2])
        # Upstream views what it has as two dimensions; a copy to float32 may have made that possible.
        wide = dtype is torch.float32
        skipped: dict[str, Any] = {"upstream_raises": wide, "without": ("logits", "d logits") if wide else ()}
        yield like("every other token", (12, 2), layout=lambda x: x[::2], **skipped)
        raises: dict[str, Any] = {"upstream_raises": True, "without": ("logits", "d logits")}
        yield like("transposed", (2, 6), layout=lambda x: x.transpose(0, 1), **raises)
        yield like("labels transposed", labels_layout=lambda t: t.t().contiguous().t(), **raises)
        for name, make in (
            ("expanded", _expanded),
            ("transposed", _transposed),
            ("row-varying", _row_varying),
            ("columns apart", _columns_apart),
            ("rows apart", _rows_apart),
        ):
            yield like(f"grad_output {name}", grad_output=make)
        yield like("forward only", grad_output=None, kernels=CE_FORWARD, without=("d logits",))
        yield like("labels beyond the vocabulary", labels=(48, 49, 2**40))
        ignored = (-100, -1, -(2**40))
        yield like("negative labels", labels=ignored, deviates={"out": NEGATIVE, "d logits": NEGATIVE})
        yield like(
            "negative labels, masked", labels=ignored, grad_output=_first_masked, deviates={"out": NEGATIVE}
        )
    yield from _cross_entropy_smoothed(dtype)
    yield from _cross_entropy_routes(dtype)
    yield from _cross_entropy_left_to_upstream(dtype)


def _first_masked(gradient: torch.Tensor) -> torch.Tensor:
    """Nothing for the first tokens, as a loss mask makes it."""
    return torch.cat([torch.zeros_like(gradient[:2]), gradient[2:]])


def _cross_entropy_smoothed(dtype: torch.dtype) -> Iterator[Case]:
    _, unfused = _cross_entropy_base(dtype)

    def call(smoothing: float) -> Callable[..., torch.Tensor]:
        return lambda entry, t: entry(t["logits"], t["labels"], smoothing)

    for smoothing in (0.0, 0.1, 0.5):
        yield replace(
            unfused,
            name=f"label smoothing {smoothing}",
            call=call(smoothing),
            truth=_cross_entropy_truth(smoothing),
        )
    yield replace(
        unfused,
        name="label smoothing by name",
        call=lambda entry, t: entry(t["logits"], t["labels"], label_smoothing=0.1),
        truth=_cross_entropy_truth(0.1),
    )

    def gap(generator: torch.Generator, device: torch.device) -> Tensors:
        logits = torch.tensor([[[0.0, 200.0]], [[200.0, 0.0]]], dtype=dtype, device=device)
        return {
            "logits": logits.requires_grad_(),
            "labels": torch.ones(2, 1, dtype=torch.int64, device=device),
        }

    yield replace(
        unfused,
        name="label smoothing, a large gap",
        inputs=gap,
        call=call(0.1),
        truth=_cross_entropy_truth(0.1),
        deviates={**unfused.deviates, "out": "upstream takes the logarithm after the softmax"},
    )


def _cross_entropy_routes(dtype: torch.dtype) -> Iterator[Case]:
    """Through the package's own names, and as the model's loss calls them: labels ``[b, s]``."""
    fused, unfused = _cross_entropy_base(dtype)
    yield replace(unfused, name="as called", module=TENSOR_PARALLEL)
    yield replace(fused, name="as called", module=LANGUAGE_MODULE)

    def loss(fusion: bool) -> Callable[..., torch.Tensor]:
        def call(entry: Any, t: Tensors) -> torch.Tensor:
            from types import SimpleNamespace

            group = _tensor_parallel_group()
            config = SimpleNamespace(cross_entropy_loss_fusion=fusion, cross_entropy_fusion_impl="native")
            groups = SimpleNamespace(tp=group)
            model = SimpleNamespace(
                config=config, pg_collection=groups, model_comm_pgs=groups, tp_group=group
            )
            out: torch.Tensor = entry.compute_language_model_loss(model, t["labels"].t(), t["logits"])
            return out

        return call

    for base, name in ((fused, "fused"), (unfused, "unfused")):
        yield replace(
            base,
            entry="LanguageModule",
            name=name,
            module=LANGUAGE_MODULE,
            call=loss(name == "fused"),
            truth=lambda t: _cross_entropy_truth()(t).t(),
        )


def _cross_entropy_left_to_upstream(dtype: torch.dtype) -> Iterator[Case]:
    """Calls that the kernel does not serve, and calls that nobody serves."""
    for base in _cross_entropy_base(dtype):
        upstream: dict[str, Any] = {"kernels": {}, "deviates": {}}
        yield replace(
            base,
            name="labels int32",
            inputs=_cross_entropy_inputs((6, 2), 48, dtype, labels_dtype=torch.int32),
            fallback="labels of a dtype other than int64",
            **upstream,
        )
        if dtype is torch.float32:
            yield replace(
                base,
                name="fp64",
                dtype=torch.float64,
                inputs=_cross_entropy_inputs((6, 2), 48, torch.float64),
                fallback="logits of a dtype other than bfloat16, float16 and float32",
                **upstream,
            )
        fails: dict[str, Any] = {**upstream, "raises": True, "truth": None, "grad_output": None}
        yield replace(
            base,
            name="labels flat",
            inputs=_cross_entropy_inputs((6, 2), 48, dtype, labels_layout=lambda t: t.flatten()),
            **fails,
        )
        yield replace(
            base,
            name="unknown option",
            call=lambda entry, t: entry(t["logits"], t["labels"], no_such_option=1),
            **fails,
        )
    fused, unfused = _cross_entropy_base(dtype)
    yield replace(fused, name="no group", call=lambda e, t: e(t["logits"], t["labels"], None), **fails)
    yield replace(fused, name="group left away", call=_call_unfused, **fails)
    yield replace(
        unfused, name="label smoothing 1", call=lambda e, t: e(t["logits"], t["labels"], 1.0), **fails
    )


# --- Norms ---

TORCH_NORM = "megatron.core.transformer.torch_norm"
FUSED_NORM = "megatron.core.fusions.fused_layer_norm"
BACKENDS = "megatron.core.models.backends"
# Other names for the two classes; LNImpl is the one or the other, as Apex is there or not.
NORM_NAMES = (
    (BACKENDS, "WrappedTorchNorm"),
    ("megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs", "WrappedTorchNorm"),
    ("megatron.core.transformer.torch_layer_norm", "WrappedTorchLayerNorm"),
    (BACKENDS, "LNImpl"),
    ("megatron.core.models.gpt.gpt_layer_specs", "LNImpl"),
)
FUSED_NORM_NAMES = (
    FUSED_NORM,
    "megatron.core.transformer.transformer_block",
    "megatron.core.models.bert.bert_lm_head",
)

NORM_FORWARD = {"norm_forward": 1}
NORM_FROZEN = {**NORM_FORWARD, "norm_backward": 1}
NORM_BOTH = {**NORM_FROZEN, "norm_reduce": 1}
NORM_LONG = {**NORM_BOTH, "norm_row_sums": 1}

NORM_EPS = 1e-5
# Of a config, what upstream's local norms refuse.
REFUSED_BY_UPSTREAM = {
    "sequence_parallel": True,
    "persist_layer_norm": True,
    "memory_efficient_layer_norm": True,
    "layernorm_zero_centered_gamma": True,
}


def _norm_inputs(
    normalization: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    of_parameters: torch.dtype | None = None,
    layout: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    scale: float = 1.0,
    shift: float = 0.0,
    frozen: tuple[str, ...] = (),
) -> Callable[[torch.Generator, torch.device], Tensors]:
    """Values ``scale`` apart around ``shift``; parameters in ``of_parameters``, by default in ``dtype``."""
    names = ("weight", "bias") if normalization == "LayerNorm" else ("weight",)

    def make(generator: torch.Generator, device: torch.device) -> Tensors:
        tensors = {"x": layout((torch.randn(shape, generator=generator) * scale + shift).to(device, dtype))}
        for name in names:
            values = torch.randn(tensors["x"].shape[-1], generator=generator)
            tensors[name] = values.to(device, of_parameters or dtype)
        return {name: t.detach().requires_grad_(name not in frozen) for name, t in tensors.items()}

    return make


def _call_norm(normalization: str, **choice: Any) -> Callable[..., torch.Tensor]:
    def call(entry: Callable[..., torch.nn.Module], t: Tensors) -> torch.Tensor:
        from types import SimpleNamespace

        config = SimpleNamespace(**{**dict.fromkeys(REFUSED_BY_UPSTREAM, False), **choice})
        config.normalization = normalization
        norm = entry(config=config, hidden_size=t["x"].shape[-1], eps=NORM_EPS)
        # The tensors themselves take the parameters' places, so that they get the gradients.
        parameters = {name: tensor for name, tensor in t.items() if name != "x"}
        out: torch.Tensor = torch.func.functional_call(norm, parameters, (t["x"],))
        return out

    return call


def _norm_truth(normalization: str, zero_centered: bool = False) -> Callable[[Tensors], torch.Tensor]:
    def truth(t: Tensors) -> torch.Tensor:
        x = t["x"]
        if normalization == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        if x.numel():
            x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + NORM_EPS)
        out = x * (1 + t["weight"] if zero_centered else t["weight"])
        return out + t["bias"] if "bias" in t else out

    return truth


def _has_apex() -> bool:
    """Whether upstream's FusedLayerNorm works here."""
    import importlib

    try:
        importlib.import_module("apex.normalization.fused_layer_norm")
    except ImportError:
        return False
    return True


def _norm_base(normalization: str, dtype: torch.dtype) -> Case:
    return Case(
        "norms",
        "WrappedTorchNorm",
        normalization,
        dtype,
        TORCH_NORM,
        _norm_inputs(normalization, (6, 2, 48), dtype),
        _call_norm(normalization),
        _norm_truth(normalization),
        kernels=NORM_BOTH,
    )


def norms(dtype: torch.dtype) -> Iterator[Case]:
    """Every way in which a model calls the norms, in ``dtype``."""
    for normalization in ("RMSNorm", "LayerNorm"):
        base = _norm_base(normalization, dtype)
        yield base

        def like(
            name: str,
            shape: tuple[int, ...] = (6, 2, 48),
            *,
            _base: Case = base,
            **more: Any,
        ) -> Case:
            names = ("of_parameters", "layout", "scale", "shift", "frozen")
            layout = {k: more.pop(k) for k in names if k in more}
            return replace(
                _base,
                name=f"{_base.name}, {name}",
                inputs=_norm_inputs(_base.name, shape, dtype, **layout),
                **more,
            )

        # Shapes: a row shorter than any block, odd widths, head dimensions, a row of several blocks, one row.
        for shape in ((24, 5), (7, 37), (40, 64), (9, 192), (2, 1025), (96,), (1, 1, 34)):
            yield like(f"{list(shape)}", shape)
        yield like("a row of several blocks", (2, 40000), kernels=NORM_LONG)
        yield like("no tokens", (0, 1, 48), kernels={})
        yield like("large values", scale=60.0)
        yield like("small values", scale=1e-3)
        yield like("far from zero", shift=30.0)
        # Query and key norms get heads of one wide buffer; MLA's, a part of a down projection.
        yield like("heads", (6, 2, 2, 96), layout=lambda x: x[..., 32:64])
        yield like("compressed", (6, 2, 56), layout=lambda x: x.split([48, 8], dim=-1)[0])
        yield like("every other token", (12, 2, 48), layout=lambda x: x[::2])
        yield like("columns apart", (6, 2, 96), layout=lambda x: x[..., ::2])
        yield like("transposed", (2, 6, 48), layout=lambda x: x.transpose(0, 1))
        for name, make in (
            ("expanded", _expanded),
            ("transposed", _transposed),
            ("row-varying", _row_varying),
            ("columns apart", _columns_apart),
            ("rows apart", _rows_apart),
        ):
            yield like(f"grad_output {name}", grad_output=make)
        yield like("forward only", grad_output=None, kernels=NORM_FORWARD)
        yield like("x frozen", frozen=("x",))
        parameters = ("weight", "bias") if normalization == "LayerNorm" else ("weight",)
        yield like("parameters frozen", frozen=parameters, kernels=NORM_FROZEN)
        for choice in REFUSED_BY_UPSTREAM:
            yield like(
                choice,
                call=_call_norm(normalization, **{choice: True}),
                truth=_norm_truth(normalization, choice == "layernorm_zero_centered_gamma"),
                upstream_raises=True,
            )
        for module in FUSED_NORM_NAMES:
            fails = normalization == "RMSNorm" or not _has_apex()
            yield replace(base, entry="FusedLayerNorm", module=module, upstream_raises=fails)
        yield from _norms_left_to_upstream(base)
    for module, name in NORM_NAMES:
        yield replace(_norm_base("LayerNorm", dtype), entry=name, module=module)
    for other in DTYPES:
        if other is not dtype:
            # As a residual in float32 makes it. Torch's LayerNorm has a rule of its own on each device.
            yield replace(
                _norm_base("RMSNorm", dtype),
                name=f"RMSNorm, parameters {short(other)}",
                inputs=_norm_inputs("RMSNorm", (6, 2, 48), dtype, of_parameters=other),
            )


def _norms_left_to_upstream(base: Case) -> Iterator[Case]:
    """Calls that the kernel does not serve, and calls that nobody serves."""
    normalization = base.name
    if base.dtype is torch.float32:
        yield replace(
            base,
            name=f"{normalization}, fp64",
            dtype=torch.float64,
            inputs=_norm_inputs(normalization, (6, 2, 48), torch.float64),
            kernels={},
            fallback="a dtype other than bfloat16, float16 and float32",
        )
    fails: dict[str, Any] = {"kernels": {}, "raises": True, "truth": None, "grad_output": None}

    def narrow(entry: Callable[..., torch.nn.Module], t: Tensors) -> torch.Tensor:
        return _call_norm(normalization)(
            lambda config, hidden_size, eps: entry(config=config, hidden_size=hidden_size + 1, eps=eps), t
        )

    def unknown(entry: Callable[..., torch.nn.Module], t: Tensors) -> torch.Tensor:
        return _call_norm("GroupNorm")(entry, t)

    def option(entry: Callable[..., torch.nn.Module], t: Tensors) -> torch.Tensor:
        return _call_norm(normalization)(lambda **named: entry(**named, no_such_option=1), t)

    yield replace(base, name=f"{normalization}, another width", call=narrow, **fails)
    yield replace(base, name=f"{normalization}, unknown norm", call=unknown, **fails)
    yield replace(base, name=f"{normalization}, unknown option", call=option, **fails)


OPS: dict[str, Callable[[torch.dtype], Iterator[Case]]] = {
    "swiglu": swiglu,
    "cross_entropy": cross_entropy,
    "norms": norms,
    "activations": activations,
    LINEAR: lambda dtype: iter(()),
}


def a_few(cases: list[Case]) -> list[Case]:
    """Of each entry, through each module, the first call that the kernel serves and, if any, upstream too."""
    found: dict[tuple[str, str], Case] = {}
    served = [case for case in cases if case.kernels and not (case.fallback or case.raises)]
    for case in sorted(served, key=lambda case: case.upstream_raises):
        found.setdefault((case.module, case.entry), case)
    return list(found.values())


def chosen(calls: Mapping[str, str]) -> list[Case]:
    """The cases of ops: ``{op: "all"}`` or, of an op, ``"few"``, see :func:`a_few`.

    Raises:
        RuntimeError: see :func:`all_cases`; or another word.
    """
    found = []
    for op, which in calls.items():
        if which not in ("all", "few"):
            raise RuntimeError(f"no such choice of cases: {which}")
        cases = all_cases([op])
        found += cases if which == "all" else a_few(cases)
    return found


def all_cases(ops: list[str]) -> list[Case]:
    """The cases of the named ops in every dtype.

    Raises:
        RuntimeError: an op has no cases, or two cases have the same id.
    """
    missing = [op for op in ops if op not in OPS]
    if missing:
        raise RuntimeError(f"no parity cases for {', '.join(missing)}")
    cases = [case for op in ops for dtype in DTYPES for case in OPS[op](dtype)]
    ids = [case.id for case in cases]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice:
        raise RuntimeError(f"cases of the same id: {', '.join(twice)}")
    return cases
