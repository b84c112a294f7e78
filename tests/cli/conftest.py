"""A tiny model, and the checkpoint that it becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import tiny_checkpoint, tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.getbasetemp(), "llama")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")
