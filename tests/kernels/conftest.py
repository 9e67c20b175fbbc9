# SPDX-License-Identifier: Apache-2.0
"""What the kernels' tests share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from liger_kernels import launches


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh memory holds NaN, so that an element that nobody writes shows. Values are the same each time."""
    torch.manual_seed(0)

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
            fresh = allocate(*args, **kwargs)
            if fresh.is_floating_point():
                fresh.detach().fill_(float("nan"))
            return fresh

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", poisoned(torch.empty))
        patch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        yield


@pytest.fixture
def launched() -> Counter[str]:
    """The count of launches, from zero."""
    launches.LAUNCHES.clear()
    return launches.LAUNCHES
