# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for Megatron-Core; they need torch and triton only."""

if __name__ == "kernels":
    # transformers probes for a distribution's package of this very name; finding this folder breaks its
    # import.
    raise ImportError(
        "this folder is not the package 'kernels': it is installed as megatron.core.liger.kernels; "
        "take the folder that holds it off sys.path"
    )
