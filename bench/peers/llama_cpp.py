"""llama.cpp as a peer: prefill and decode rates of a GGUF file, batch 1, as llama.cpp times them.

It runs in this process through the package xllamacpp (`pip install -e .[bench]`), whose `Server`
takes completions over token ids and returns llama.cpp's own timings, without its HTTP and JSON.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qoff.errors import FormatError, QoffError

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 8}  # enum ggml_type
FLASH_ATTENTION = 1  # LLAMA_FLASH_ATTN_TYPE_ENABLED; a quantized V cache needs it
FIRST_TOKEN, TOKENS = 100, 1000  # ids of the prompt: ordinary tokens of any real vocabulary


class PeerNotInstalledError(QoffError, ImportError):
    """The package that a peer runs through is not installed; the message says how to get it."""


@dataclass(frozen=True)
class Rates:
    """One timed completion: tokens and seconds of prefill, and of decode at the depth it left."""

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int  # timed ones: the first comes out of the prefill
    decode_seconds: float

    @property
    def prefill(self) -> float:
        """Prompt tokens per second."""
        return self.prefill_tokens / self.prefill_seconds

    @property
    def decode(self) -> float:
        """Generated tokens per second; raises ZeroDivisionError where none was timed."""
        return self.decode_tokens / self.decode_seconds


def installed() -> bool:
    """Whether xllamacpp can be imported."""
    return importlib.util.find_spec("xllamacpp") is not None


class LlamaCpp:
    """A GGUF file loaded in llama.cpp on the CPU; a context manager that frees it.

    Raises `PeerNotInstalledError` without xllamacpp, `FormatError` for a file llama.cpp refuses.
    """

    def __init__(
        self, path: str | Path, threads: int, *, context: int = 2048, kv_type: str = "f16"
    ) -> None:
        """Load `path` with `threads` compute threads and room for `context` tokens of K and V.

        `kv_type`, a name in `KV_TYPES`, is the type of both.
        """
        if not installed():
            raise PeerNotInstalledError(
                "llama.cpp is not installed: get the package xllamacpp by `pip install -e .[bench]`"
            )
        if not Path(path).is_file():
            raise FormatError(f"{path}: no such file; expected a GGUF model")
        module = importlib.import_module("xllamacpp")
        self.version: str = f"xllamacpp {module.__version__}"
        self.path, self.threads, self.context, self.kv_type = Path(path), threads, context, kv_type
        try:
            self._server: Any = module.Server(self._parameters(module))
        except RuntimeError as error:
            raise FormatError(f"{path}: llama.cpp could not load it: {error}") from error

    def _parameters(self, module: Any) -> Any:
        parameters = module.CommonParams()
        parameters.model.path = str(self.path)
        parameters.n_ctx = self.context
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.n_parallel = 1
        parameters.n_gpu_layers = 0
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = self.threads
        kv = module.ggml_type(KV_TYPES[self.kv_type])
        parameters.cache_type_k = parameters.cache_type_v = kv
        parameters.flash_attn_type = module.llama_flash_attn_type(FLASH_ATTENTION)
        parameters.fit_params = False
        parameters.cache_ram_mib = 0  # no store of earlier prompts beside the KV cache
        parameters.warmup = True
        parameters.verbosity = 0
        return parameters

    def measure(self, prompt: int, generate: int, *, keep: bool = False) -> Rates:
        """Prefill `prompt` pseudo-random tokens, then decode `generate` >= 2 greedily.

        Decode is therefore measured at depths `prompt` to `prompt + generate`. llama.cpp counts the
        token that prefill yields among the generated; it took no decode step and is left out here.
        Prefill begins from nothing; with `keep`, from what the KV cache holds of the same prompt,
        and its rate then says nothing.
        Raises ValueError if that is over the context, RuntimeError if llama.cpp did otherwise.
        """
        if prompt < 1 or generate < 2 or prompt + generate > self.context:
            raise ValueError(f"{prompt} + {generate} tokens in a context of {self.context}")
        answer = self._server.handle_completions(
            {
                "prompt": [FIRST_TOKEN + i * 7919 % TOKENS for i in range(prompt)],
                "n_predict": generate,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": keep,
            }
        )
        timings = answer.get("timings") if isinstance(answer, dict) else None
        if (
            not timings
            or timings["predicted_n"] != generate
            or not (timings["prompt_n"] == prompt or keep)
        ):
            raise RuntimeError(f"llama.cpp did not time {prompt} + {generate} tokens: {answer}")
        return Rates(
            prefill_tokens=timings["prompt_n"],
            prefill_seconds=timings["prompt_ms"] / 1e3,
            decode_tokens=generate - 1,
            decode_seconds=timings["predicted_ms"] / 1e3,
        )

    def prefill(self, tokens: int = 512) -> float:
        """Tokens per second of one prefill of `tokens` tokens."""
        return self.measure(tokens, 2).prefill

    def decode(self, tokens: int = 64, depth: int = 16) -> float:
        """Tokens per second of greedy decoding after a prompt of `depth` tokens, read once."""
        return self.measure(depth, tokens, keep=True).decode

    def close(self) -> None:
        """Free the model; the object cannot measure any more."""
        self._server = None

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
