"""Modules of Triton kernels, for tests that are skipped without Triton."""

import importlib
from types import ModuleType

import pytest


def triton_module(name: str) -> ModuleType:
    """Import `qoff.kernels.triton.<name>`; skip if Triton, and nothing else, is missing."""
    pytest.importorskip("triton")
    return importlib.import_module(f"qoff.kernels.triton.{name}")
