"""A checkpoint for every kind of transfers."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qoff.checkpoint import Checkpoint
from qoff.memory import DiskReader
from tests.instruments import threads_beside
from tests.memory.checkpoints import write_checkpoint
from tests.memory.kinds import KINDS, LAYERS, PACKING


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("ck") / "model", LAYERS, PACKING, tied=False)


@pytest.fixture
def checkpoint(pristine: Checkpoint, tmp_path: Path) -> Checkpoint:
    shutil.copytree(pristine.path, tmp_path / "model")
    return Checkpoint.open(tmp_path / "model")


@pytest.fixture
def reader() -> Iterator[DiskReader]:
    """Of small chunks, by two threads."""
    reader = DiskReader(threads=2, chunk=4096)
    yield reader
    reader.close()


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    assert threads_beside(threads) == []
