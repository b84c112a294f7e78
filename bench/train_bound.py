"""What a step of training takes at least on this machine: its arithmetic and its bytes, each alone.

Products are torch's, in bfloat16, of the shapes of a Llama: forward, forward again as layers are
computed again, and two backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qoff.kernels.cpu.optim.update import Moments, Rule, update
from qoff.memory.arena import map_pages
from qoff.train.homes import Homes
from qoff.train.layout import PIECE
from qoff.train.updates import BUFFERS

_ADAM = Rule("adam", 1e-3, 0.9, 0.999, keep=1 - 1e-5, root=1.1, eps=1e-8)
_PROBE = 2 << 30  # bytes that are read and written to measure the disk


def bound(
    config: dict[str, Any], tokens: int, count: int, moved: dict[str, int], folder: Path
) -> dict[str, Any]:
    """Seconds of a step's parts, each alone: products, attention, optimizer, disk.

    A step has `count` micro-batches of `tokens`. moved: bytes, by what and "read" or "written".
    """
    layers = config["num_hidden_layers"]
    hidden, wide, heads = (
        config[f"{name}"] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    size = hidden // heads
    kv = config["num_key_value_heads"] * size
    shapes = [(hidden, hidden)] * 2 + [(kv, hidden)] * 2 + [(wide, hidden)] * 2 + [(hidden, wide)]
    each = {shape: _products(shape, tokens) for shape in {*shapes}}
    products = layers * sum(2 * each[s][0] + each[s][1] + each[s][2] for s in shapes)
    products += sum(_products((config["vocab_size"], hidden), tokens))
    attention = layers * _attention(tokens, heads, size, config["num_key_value_heads"])
    weights = layers * sum(n * k for n, k in shapes) + 2 * config["vocab_size"] * hidden
    read, written = (sum(n for name, n in moved.items() if name.endswith(x)) for x in _WAYS)
    rate = _disk_rate(folder)
    return {
        "products_s": count * products,
        "attention_s": count * attention,
        "optimizer_s": weights / _optimizer_rate(),
        "disk_s": max(read, written) / rate,
        "disk_rate": rate,
        "weights": weights,
    }


_WAYS = ("read", "written")


def _products(shape: tuple[int, int], tokens: int) -> list[float]:
    """Seconds of forward, gradient of the input and of the weights, in bfloat16."""
    n, k = shape
    x, w, y = (torch.randn(s, dtype=torch.bfloat16) for s in ((tokens, k), (n, k), (tokens, n)))
    return [_least(lambda: x @ w.t()), _least(lambda: y @ w), _least(lambda: y.t() @ x)]


def _attention(tokens: int, heads: int, size: int, kv_heads: int) -> float:
    """Seconds of a layer's attention: forward twice, and backward."""
    q = torch.randn(1, heads, tokens, size, dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(1, kv_heads, tokens, size, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )

    def run() -> Tensor:
        wide, values = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        return functional.scaled_dot_product_attention(q, wide, values, is_causal=True)

    def both() -> None:
        run().sum().backward()

    with torch.no_grad():
        forward = _least(run)
    return forward + _least(both)


def _least(call: Callable[[], object]) -> float:
    """Seconds of the fastest of three calls."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _optimizer_rate() -> float:
    """Weights per second of Adam on memory, with bfloat16 copies."""
    n = 16 * PIECE
    master, first, second, grad = (
        map_pages(4 * n).view(torch.float32).fill_(1e-3) for _ in range(4)
    )
    copy = map_pages(2 * n).view(torch.bfloat16).fill_(1e-3)
    return n / _least(lambda: update(_ADAM, master, grad, Moments(first, second), copy))


def _disk_rate(folder: Path) -> float:
    """Bytes per second, each way, of what passes through buffers as states do, unchanged."""
    size = 12 * PIECE
    homes = Homes(BUFFERS * size, 0, _PROBE // size * size, folder)
    try:
        places = [homes.home("probe", size, False) for _ in range(_PROBE // size)]
        free = [homes.device.alloc(size, "probe") for _ in range(BUFFERS)]
        for place in places:
            homes.write(place, free[0], lambda: None).result()
        start = time.perf_counter()
        reads: list[tuple[Future[None], Tensor]] = []
        writes: list[tuple[Future[None], Tensor]] = []
        for i, place in enumerate(places):
            if len(writes) == 2:
                write, buffer = writes.pop(0)
                write.result()
                free.append(buffer)
            for ahead in places[i + len(reads) : i + 2]:
                if free:
                    buffer = free.pop()
                    reads.append((homes.read(ahead, buffer), buffer))
            read, buffer = reads.pop(0)
            read.result()
            writes.append((homes.write(place, buffer, lambda: None), buffer))
        for write, _ in writes:
            write.result()
        return len(places) * size / (time.perf_counter() - start)
    finally:
        homes.close()
