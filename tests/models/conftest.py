"""Mixtures of which a CPU has experts beside a GPU, for the files that share them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # imports what other files do without
    from tests.models.cpu_experts import Model


@pytest.fixture(
    scope="session", params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> str:
    from tests.engine.test_llm_device import ON_GPU

    if request.param == "interpreter" and ON_GPU:
        pytest.skip("Triton interprets kernels only where there is no GPU")
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only attention, cache and experts are Triton's; the decoder's tests run it on all kernels."""
    from tests.models.cpu_experts import ON_GPU, w4_linear
    from tests.triton_module import interpret_few

    if not ON_GPU:
        interpret_few(monkeypatch, w4_linear)


@pytest.fixture(scope="session")
def models(base: Path, device: str) -> Callable[[str], Model]:
    """A mixture of `cpu_experts.FAMILIES`, made once."""
    from tests.models.cpu_experts import made

    return lambda family: made(base / "cpu-experts" / family, family, device)
