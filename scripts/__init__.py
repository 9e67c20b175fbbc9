# SPDX-License-Identifier: Apache-2.0
"""The pipeline: manifest → source → verify → apply → record → wheel, one module per step."""
