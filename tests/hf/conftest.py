"""A tiny qoff model with its tokenizer, and transformers' model of the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qoff
from tests.tiny_models import reference_model, tiny_checkpoint, tiny_model


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to convert."""
    return tiny_model(tmp_path_factory.getbasetemp(), "llama")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Any:
    return reference_model(checkpoint)


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> Iterator[tuple[Any, Any]]:
    model, tokenizer = qoff.load(checkpoint)
    yield model, tokenizer
    model.close()


@pytest.fixture
def model(loaded: tuple[Any, Any]) -> Any:
    return loaded[0]


@pytest.fixture
def tokenizer(loaded: tuple[Any, Any]) -> Any:
    return loaded[1]
