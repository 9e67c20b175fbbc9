# SPDX-License-Identifier: Apache-2.0
"""The activations beside SwiGLU: GeGLU, quick-GeGLU and squared ReLU, one switch and what serves each."""

from __future__ import annotations

from .dispatch import Op
from .gated import CLAMP_VALUE, FP8_INPUT_STORE, LINEAR_OFFSET, Form

OP = Op("activations", kernel="gated.geglu", launches=("geglu_", "quick_geglu_", "squared_relu_"))
GEGLU = Form(OP, "geglu")
QUICK_GEGLU = Form(OP, "quick_geglu", (FP8_INPUT_STORE, LINEAR_OFFSET, CLAMP_VALUE), bias_and_weights=True)
SQUARED_RELU = Form(OP, "squared_relu", gated=False)
