"""What is freed during a step stays in the C library's heap, until memory runs short."""

import ctypes
import time
from collections.abc import Iterator

import pytest

from qoff import system_memory
from qoff.system_memory import keep_freed, keep_large_apart, own_memory
from qoff.train.heap import reused

pytestmark = pytest.mark.skipif(system_memory._trim() is None, reason="needs the GNU C library")
_PIECE, _COUNT = 4 << 20, 8


@pytest.fixture(autouse=True)
def _heap() -> Iterator[None]:
    yield
    keep_large_apart()


@pytest.mark.parametrize("free", [1 << 40, 1 << 20, None], ids=["much", "little", "not known"])
def test_freed_memory_stays_unless_there_is_little(
    free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qoff.train.heap.free_memory", lambda: free)
    libc, half, large = ctypes.CDLL(None), _PIECE * _COUNT // 2, 2 * _PIECE * _COUNT
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    keep_freed()
    pieces = [libc.malloc(_PIECE) for _ in range(_COUNT)]
    for piece in pieces:
        ctypes.memset(piece, 1, _PIECE)
    for piece in pieces:
        libc.free(piece)
    before = own_memory()
    with reused():
        held = bytearray(b"1") * large  # too large for the heap
        until = time.monotonic() + (20 if free == 1 << 20 else 0.2)
        while (kept := own_memory() - before - large) > -half and time.monotonic() < until:
            time.sleep(0.005)
        del held
    assert (kept < -half) == (free == 1 << 20)
