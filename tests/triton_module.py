"""Modules of Triton kernels, for tests that are skipped without Triton."""

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest
from torch import Tensor

from qoff.kernels.reference import elementwise


def triton_module(name: str) -> ModuleType:
    """Import `qoff.kernels.triton.<name>`; skip if Triton, and nothing else, is missing."""
    pytest.importorskip("triton")
    return importlib.import_module(f"qoff.kernels.triton.{name}")


def interpret_few(monkeypatch: pytest.MonkeyPatch, w4_linear: Callable[..., Tensor]) -> None:
    """Have Triton compute attention, cache and experts alone; w4_linear: in place of its own."""
    attention, ops = triton_module("attention.op"), triton_module("ops")
    monkeypatch.setattr(attention, "rope", elementwise.rope)
    for module in (ops, attention):
        monkeypatch.setattr(module, "rms_norm", elementwise.rms_norm)
    monkeypatch.setattr(ops.linear, "w4_linear", w4_linear)
