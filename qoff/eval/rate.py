"""How fast a checkpoint decodes with a cache, for a column of a sweep's table."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from torch import Tensor

from qoff.hf.torch_threads import one_torch_thread
from qoff.kvcache import KVQuant
from qoff.measure.greedy import generate
from qoff.models.runtime import Runtime

_NEW, _ROUNDS = 33, 3  # tokens of a generation, of which the first is not timed; generations


def decode_rate(checkpoint: Path, kv: KVQuant | None, prompt: Tensor) -> float:
    """Tokens per second after a prompt, int64 [T]: the median of three generations after one.

    A rough figure, of one sequence; `qoff bench` measures with care. Errors are those of `Runtime`.
    """
    with Runtime(checkpoint, kv=kv) as runtime, one_torch_thread():
        rates = [generate(runtime, prompt[None], _NEW)[1].decode_rate for _ in range(_ROUNDS + 1)]
    return median(rates[1:])
