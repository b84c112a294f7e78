"""The model of most tests of `qoff.LLM`: of heads whose KV cache can be packed, and six layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64-deep")
