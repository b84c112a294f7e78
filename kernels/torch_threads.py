"""torch on one thread for a while.

Between forward passes `generate` does small torch operations. torch's idle threads would spin for
milliseconds after each, on the cores that the next pass computes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# torch's number of threads belongs to the whole process, and so does the count of its users.
_lock = threading.Lock()
_users = 0
_before = 0


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch's own operations on one thread; the last of several users restores the number."""
    global _users, _before
    with _lock:
        if _users == 0:
            _before = torch.get_num_threads()
        _users += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            torch.set_num_threads(_before if _users == 0 else 1)


def torch_threads() -> int:
    """torch's number of threads, as it was before anybody kept it on one, and will be again."""
    with _lock:
        return _before if _users else torch.get_num_threads()
