"""`qoff generate`: text as it comes, then what it cost."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from qoff.budgets import resolve_device
from qoff.errors import ArgumentError, QoffError
from qoff.hf.load import AUTO, find_checkpoint, load, load_tokenizer
from qoff.hf.model import QoffForCausalLM
from qoff.kvcache import KVQuant
from qoff.units import format_size


@dataclass
class Timing:
    """When the prompt and each generated token were done, in seconds."""

    started: float
    stamps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # for weights so far, since the model's start

    @property
    def first_token_s(self) -> float:
        return self.stamps[0] - self.started

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, by the time they took."""
        elapsed = self.stamps[-1] - self.stamps[0]
        return (len(self.stamps) - 1) / elapsed if elapsed > 0 else 0.0


class _TimedStreamer(TextStreamer):
    """Prints text as it comes (unless quiet) and notes when each token came."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        timing: Timing,
        waited: Callable[[], float],
        quiet: bool,
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._timing = timing
        self._waited = waited
        self._quiet = quiet
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self._timing.stamps.append(time.perf_counter())
            self._timing.waits.append(self._waited())
        self._prompt_seen = True
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if not self._quiet:
            super().on_finalized_text(text, stream_end)


@dataclass(frozen=True)
class Answer:
    """A generated text and its cost. Seconds, bytes, tokens per second."""

    text: str
    prompt_tokens: int
    new_tokens: int
    prefill_tokens_per_s: float
    first_token_s: float
    decode_tokens_per_s: float
    disk_bytes: int
    disk_busy_s: float
    wait_s: float
    arena_peak_bytes: int
    arena_capacity_bytes: int
    resident_bytes: int
    kv_cache_bytes: int
    peak_rss_bytes: int
    rounds: tuple[tuple[float, float], ...]  # of each token: seconds, waited for the disk

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def round_rows(self) -> list[tuple[str, ...]]:
        """A row for each token: its number, milliseconds, of these waiting for the disk."""
        return [
            (str(i), f"{seconds * 1e3:.1f}", f"{wait * 1e3:.1f}")
            for i, (seconds, wait) in enumerate(self.rounds)
        ]

    def rows(self) -> list[tuple[str, str]]:
        """Labels and values for a table."""
        return [
            ("prefill", f"{self.prefill_tokens_per_s:.1f} tok/s ({self.prompt_tokens} tokens)"),
            ("time to first token", f"{self.first_token_s * 1e3:.0f} ms"),
            ("decode", f"{self.decode_tokens_per_s:.1f} tok/s ({self.new_tokens} tokens)"),
            ("read from disk", format_size(self.disk_bytes)),
            (
                "peak of the arena",
                f"{format_size(self.arena_peak_bytes)} of {format_size(self.arena_capacity_bytes)}",
            ),
            ("KV cache", format_size(self.kv_cache_bytes)),
            ("peak RSS of the process", format_size(self.peak_rss_bytes)),
        ]


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, raw: bool) -> dict[str, Tensor]:
    """Return input_ids and attention_mask, through the chat template if any, unless `raw`."""
    if raw or not tokenizer.chat_template:
        encoded: Any = tokenizer(prompt, return_tensors="pt")
    else:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def cache_form(kv: str, attention_top: float) -> KVQuant | str:
    """The KV cache that the options describe. Raises ArgumentError for what is none."""
    if attention_top == 1:
        return kv
    if kv == "none":
        raise ArgumentError("--attention-top leaves out packed blocks; it needs --kv")
    packed = KVQuant() if kv == AUTO else KVQuant.of(kv)
    return replace(packed, attention_top=attention_top)


def open_for(
    prompt: str, new_tokens: int, path: str, *, raw: bool, device: str, **options: Any
) -> tuple[QoffForCausalLM, PreTrainedTokenizerBase]:
    """The model and tokenizer of `qoff.load`, with room for this prompt and its answer."""
    found = {name: options[name] for name in ("progress", "trust_remote_code") if name in options}
    checkpoint = find_checkpoint(path, for_cpu=resolve_device(device).type == "cpu", **found)
    tokenizer = load_tokenizer(checkpoint, found.get("trust_remote_code", False))
    context = encode(tokenizer, prompt, raw)["input_ids"].shape[1] + new_tokens
    return load(checkpoint, device=device, context=max(1, context), **options)


def answer(
    model: QoffForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    raw: bool = False,
    quiet: bool = False,
    seed: int = 0,
    **options: Any,
) -> Answer:
    """Generate once and measure it; `options` go to `generate`. Prints unless quiet.

    Raises QoffError for a prompt without tokens.
    """
    inputs = encode(tokenizer, prompt, raw)
    if not inputs["input_ids"].numel():
        raise QoffError("the prompt has no tokens; write something, or leave out --raw")
    torch.manual_seed(seed)
    before = model.stats()
    timing = Timing(time.perf_counter())
    generating: Any = model  # transformers types `generate` for models of its own
    out = generating.generate(
        **inputs,
        streamer=_TimedStreamer(tokenizer, timing, lambda: model.stats().wait_s, quiet),
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        **options,
    )
    after = model.stats()
    prompt_tokens = inputs["input_ids"].shape[1]
    new = out.sequences[0, prompt_tokens:]
    return Answer(
        text=str(tokenizer.decode(new, skip_special_tokens=True)),
        prompt_tokens=prompt_tokens,
        new_tokens=len(new),
        prefill_tokens_per_s=prompt_tokens / timing.first_token_s,
        first_token_s=timing.first_token_s,
        decode_tokens_per_s=timing.decode_tokens_per_s,
        disk_bytes=after.disk_bytes - before.disk_bytes,
        disk_busy_s=after.disk_busy_s - before.disk_busy_s,
        wait_s=after.wait_s - before.wait_s,
        arena_peak_bytes=after.arena_peak,
        arena_capacity_bytes=after.arena_capacity,
        resident_bytes=after.resident_bytes,
        kv_cache_bytes=out.past_key_values.tokens.nbytes,
        peak_rss_bytes=peak_rss(),
        rounds=tuple(
            zip(
                _steps([timing.started, *timing.stamps]),
                _steps([before.wait_s, *timing.waits]),
                strict=True,
            )
        ),
    )


def _steps(values: Sequence[float]) -> list[float]:
    """Differences between neighbours."""
    return [after - before for before, after in pairwise(values)]


def peak_rss() -> int:
    """Largest resident set of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the parent's memory at the time of the fork
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
