"""The C library's heap while a model is trained: what is freed is used again, not given back.

Every layer frees and takes tensors of the same sizes again and again. New pages of the system for
each are a fifth of the time of a step. In glibc's heap they cost nothing, but what is freed there
lies between what stays: a step of a layer like TinyLlama's with 512 tokens leaves 100 to 160 MiB of
gaps. Where memory is limited to not much more than is needed, or by who trains, gaps go back to the
system in time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from qoff.system_memory import (
    free_memory,
    keep_freed,
    keep_large_apart,
    own_memory,
    return_freed,
)

GAPS = 32 << 20  # bytes of them that stay where memory is bounded
_SHARE = 0.75  # of the memory that is free, for which gaps stay
_PERIOD = 0.01  # seconds; a step grows by 10 to 20 MiB in them
_GROWS = 16 << 20  # bytes more than after gaps went back, before they do so again


@contextmanager
def reused(gaps: int | None = None) -> Iterator[None]:
    """Inside, what is freed is used again, and given back where less than a quarter is left of the
    memory that was free: in this machine, or by the limits of control groups.

    gaps: bytes by which the process may grow before that, None: as many as there are. If they are
    bounded, none stay, and the next large piece that is freed goes back at once.
    """
    keep_freed()
    free = free_memory()
    spare = [] if free is None else [int(_SHARE * free)]
    spare += [] if gaps is None else [gaps]
    if not spare:
        yield
        return
    ended = threading.Event()
    most = own_memory() + min(spare)
    watch = threading.Thread(target=_watch, args=(most, ended), name="qoff-heap", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()
        if gaps is not None:
            keep_large_apart()
            return_freed()


def _watch(most: int, ended: threading.Event) -> None:
    while not ended.wait(_PERIOD):
        if own_memory() > most:
            return_freed()
            most = max(most, own_memory() + _GROWS)
