# SPDX-License-Identifier: Apache-2.0
"""What the benchmark measures: ops, their shapes, the fewest bytes each must move, and who offers them.

Parent and worker share these tables, so they need the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Rows and columns: tokens by the width of the result, or by the vocabulary.
Shape = tuple[int, int]

#: The file in which a worker leaves a line of JSON for each case.
RESULTS = "results.jsonl"

MODES = ("forward", "backward", "full")
#: The mode of a search for the most rows that fit into the device's memory.
LARGEST = "largest"
ELEMENT_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
TOKENS = 8192
#: Of the output layer of linear_cross_entropy.
HIDDEN_SIZE = 4096


@dataclass(frozen=True)
class Op:
    """An operation.

    Attributes:
        name: its name.
        title: its name for readers.
        columns: what its columns are.
        forward: units (elements of a shape's rows × columns) that a forward reads and writes at least.
        backward: the same of a backward. Of statistics, weights and losses a token has one each: not counted.
        shapes: what is measured by default.
        quick: what is measured with ``--quick``.
        stored: bytes of an element that a forward also writes and a backward also reads, in any dtype.
        products: matrix products of rows × columns × ``HIDDEN_SIZE`` in a forward and a backward, of an op
            that those bound and not bytes.
    """

    name: str
    title: str
    columns: str
    forward: tuple[int, int]
    backward: tuple[int, int]
    shapes: tuple[Shape, ...]
    quick: tuple[Shape, ...]
    stored: int = 0
    products: tuple[int, int] = (0, 0)

    def fewest_bytes(self, mode: str, shape: Shape, element_size: int) -> int:
        """The bytes that ``mode`` must move for ``shape``."""
        parts = {"forward": [self.forward], "backward": [self.backward]}
        units = parts.get(mode) or [self.forward, self.backward]
        return sum(sum(part) * element_size + self.stored for part in units) * shape[0] * shape[1]

    def products_of(self, mode: str) -> int:
        """The matrix products of ``mode``."""
        forward, backward = self.products
        return {"forward": forward, "backward": backward, "full": forward + backward}[mode]


def _tokens(*columns: int) -> tuple[Shape, ...]:
    return tuple((TOKENS, n) for n in columns)


# The first are the heads of a query or key norm: as many elements as 8192 rows of 4096.
_NORMS: tuple[Shape, ...] = ((262144, 128), *_tokens(2048, 4096, 7168, 8192, 16384))

_ALL_OPS = (
    Op(
        "swiglu",
        "SwiGLU",
        "ffn size",
        (2, 1),
        (3, 2),
        _tokens(1536, 2816, 4096, 8192, 14336, 32768),
        _tokens(4096),
    ),
    Op("swiglu_bias", "SwiGLU with bias", "ffn size", (2, 1), (3, 2), _tokens(4096, 14336), _tokens(4096)),
    Op(
        "swiglu_weighted",
        "SwiGLU with per-token weights",
        "ffn size",
        (2, 1),
        (3, 2),
        ((16384, 1536), (TOKENS, 4096)),
        ((16384, 1536),),
    ),
    Op(
        "swiglu_fp8",
        "SwiGLU, input kept in float8",
        "ffn size",
        (2, 1),
        (1, 2),
        _tokens(4096, 14336),
        (),
        stored=2,
    ),
    Op("geglu", "GeGLU", "ffn size", (2, 1), (3, 2), _tokens(4096, 14336), _tokens(4096)),
    Op("geglu_bias", "GeGLU with bias", "ffn size", (2, 1), (3, 2), _tokens(4096), ()),
    Op(
        "quick_geglu_weighted",
        "quick-GeGLU, clamped, with weights",
        "ffn size",
        (2, 1),
        (3, 2),
        # Experts of 2880 (gpt-oss).
        ((16384, 2880), (TOKENS, 4096)),
        ((16384, 2880),),
    ),
    Op(
        "squared_relu_weighted",
        "squared ReLU with per-token weights",
        "ffn size",
        (1, 1),
        (2, 1),
        ((16384, 2688), (TOKENS, 4096)),
        ((16384, 2688),),
    ),
    Op(
        "cross_entropy",
        "cross-entropy",
        "vocabulary",
        (1, 0),
        (1, 1),
        _tokens(4096, 8192, 16384, 32000, 65536, 128256, 151936, 262144),
        _tokens(32000, 128256),
    ),
    Op(
        "linear_cross_entropy",
        "output layer and cross-entropy",
        "vocabulary",
        (0, 0),
        (0, 0),
        _tokens(32000, 128256, 151936, 262144),
        _tokens(151936),
        products=(1, 2),
    ),
    Op("rms_norm", "RMSNorm", "hidden size", (1, 1), (2, 1), _NORMS, _tokens(4096)),
    Op(
        "rms_norm_residual",
        "RMSNorm that gives its residual",
        "hidden size",
        (1, 1),
        (3, 1),
        _tokens(2048, 4096, 8192, 16384),
        _tokens(4096),
    ),
    Op("layer_norm", "LayerNorm", "hidden size", (1, 1), (2, 1), _NORMS, _tokens(4096)),
)
OPS = {op.name: op for op in _ALL_OPS}

#: A few rows, for Triton's interpreter.
TINY: Shape = (6, 40)


@dataclass(frozen=True)
class Provider:
    """Whoever computes the ops.

    Attributes:
        name: its name on the command line.
        label: its name for readers.
        ours: whether a wrong result is this project's fault.
        tree: which of the two trees it is part of, or None.
        module: the package that it needs, or None.
        distribution: the package's name where packages are installed from.
    """

    name: str
    label: str
    ours: bool = False
    tree: str | None = None
    module: str | None = None
    distribution: str | None = None


_ALL_PROVIDERS = (
    Provider("kernels", "this project", ours=True),
    Provider("kernels-in-place", "this project, in place", ours=True),
    Provider("kernels-plain", "this project, logits kept", ours=True),
    Provider("overlaid", "this project", ours=True, tree="overlaid"),
    Provider("upstream", "Megatron-Core", tree="pristine"),
    Provider("upstream-unfused", "Megatron-Core, unfused", tree="pristine"),
    Provider("torch", "torch"),
    Provider("compile", "torch.compile"),
    Provider("liger", "Liger", module="liger_kernel", distribution="liger-kernel"),
    Provider("liger-in-place", "Liger, in place", module="liger_kernel", distribution="liger-kernel"),
    Provider("te", "TransformerEngine", module="transformer_engine", distribution="transformer-engine"),
    Provider(
        "te-in-place",
        "TransformerEngine, in place",
        module="transformer_engine",
        distribution="transformer-engine",
    ),
    Provider("quack", "QuACK", module="quack", distribution="quack-kernels"),
    Provider("cce", "ml-cross-entropy", module="cut_cross_entropy", distribution="cut-cross-entropy"),
    Provider(
        "cce-exact",
        "ml-cross-entropy, exact",
        module="cut_cross_entropy",
        distribution="cut-cross-entropy",
    ),
)
PROVIDERS = {provider.name: provider for provider in _ALL_PROVIDERS}
