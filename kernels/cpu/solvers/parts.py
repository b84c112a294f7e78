"""Rows that do not depend on each other, on several threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor


def by_parts(do: Callable[..., None], each: int, *tensors: Tensor, dim: int = 0) -> None:
    """`do` with arrays of `each` neighbours of all tensors along a dimension, on a thread each.

    The last ones may be fewer. do: compiled, without Python's lock.
    """
    count = tensors[0].shape[dim]
    parts = [
        [x.narrow(dim, start, min(each, count - start)).numpy() for x in tensors]
        for start in range(0, count, each)
    ]
    if len(parts) <= 1:
        for part in parts:
            do(*part)
        return
    with ThreadPoolExecutor(len(parts)) as threads:
        for _ in threads.map(lambda part: do(*part), parts):
            pass
