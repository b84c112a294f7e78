"""What all tests of training have in common."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from qoff.memory.arena import map_pages
from qoff.memory.instrumentation import Instrumentation
from qoff.train.homes import Homes


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """More are slower on matrices of this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of `offload` that holds nothing is NaN, so that what is computed of it is seen."""
    hooks = Instrumentation(poison=True, pages=_nans)
    made = partial(Homes, instrumentation=hooks)
    monkeypatch.setattr(sys.modules["qoff.train.offload"], "Homes", made)


def _nans(nbytes: int) -> Tensor:
    return map_pages(nbytes).fill_(0xFF)
