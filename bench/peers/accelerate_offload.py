"""accelerate's `disk_offload`: a random bfloat16 model whose weights are read at every use."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import disk_offload
from transformers import AutoConfig, AutoModelForCausalLM

from qoff.hf.cache import CACHE


class Offloaded:
    """A random model of a config, offloaded into `folder`, which must have room for it.

    Its greedy generation goes on for as long as `token` is called.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=torch.bfloat16
        )
        disk_offload(model.eval(), folder, execution_device=torch.device("cpu"))
        self._model = model
        self._files = [path for path in folder.iterdir() if path.suffix == ".dat"]
        self.nbytes = sum(path.stat().st_size for path in self._files)
        for path in self._files:
            with path.open("rb") as file:
                os.fsync(file.fileno())  # dirty pages cannot be dropped
        self._cache: Any = None
        self._next = torch.ones(1, 8, dtype=torch.int64)
        self.token()

    def drop_page_cache(self) -> None:
        """Make the next token read every weight from disk."""
        for path in self._files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @torch.inference_mode()
    def token(self) -> float:
        """Generate one token; returns the seconds it took."""
        start = time.perf_counter()
        output = self._model(self._next, use_cache=True, **{CACHE: self._cache})
        self._cache = output[CACHE]
        self._next = output.logits[:, -1:].argmax(dim=-1)
        return time.perf_counter() - start


def storage_bytes() -> int:
    """Bytes this process has had read from storage so far; what the page cache served is not in."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise OSError("/proc/self/io has no read_bytes")
