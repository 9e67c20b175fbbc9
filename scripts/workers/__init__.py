# SPDX-License-Identifier: Apache-2.0
"""What parity and train run in processes of their own, each on one Megatron-Core tree."""
