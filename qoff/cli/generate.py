"""`qoff generate`: text as it comes, then what it cost."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from qoff.errors import QoffError
from qoff.hf.chat import ChatRenderer
from qoff.hf.load import load_tokenizer, open_model
from qoff.hf.model import QoffForCausalLM
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.io.timeline import Timeline
from qoff.units import format_size


class _TimedStreamer(TextStreamer):
    """Prints text as it comes (unless quiet) and notes when each token came.

    stamps: seconds, of the start and of each token. waits: for weights until then, since the
    model's start.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, waited: Callable[[], float], quiet: bool
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._waited, self._quiet = waited, quiet
        self._prompt_seen = False
        self.stamps = [time.perf_counter()]
        self.waits: list[float] = []

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.stamps.append(time.perf_counter())
            self.waits.append(self._waited())
        self._prompt_seen = True
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if not self._quiet:
            super().on_finalized_text(text, stream_end)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, raw: bool) -> dict[str, Tensor]:
    """Return input_ids and attention_mask, through the chat template if any, unless `raw`.

    Raises QoffError for a prompt without tokens.
    """
    if raw or not tokenizer.chat_template:
        encoded: Any = tokenizer(prompt, return_tensors="pt")
    else:
        with ChatRenderer() as renderer:
            text = renderer.render(tokenizer, [{"role": "user", "content": prompt}])
        encoded = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    if not encoded["input_ids"].numel():
        raise QoffError("the prompt has no tokens; write something, or leave out --raw")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def open_for(
    checkpoint: Path,
    prompt: str,
    new_tokens: int,
    raw: bool,
    timeline: Timeline | None,
    **options: Any,
) -> tuple[QoffForCausalLM, PreTrainedTokenizerBase, dict[str, Tensor]]:
    """A model with room for this prompt and its answer, its tokenizer, and the prompt's tokens."""
    tokenizer = load_tokenizer(checkpoint, options["trust_remote_code"])
    inputs = encode(tokenizer, prompt, raw)
    context = inputs["input_ids"].shape[1] + new_tokens
    watched = Instrumentation(timeline=timeline)
    model = open_model(checkpoint, context=context, instrumentation=watched, **options)
    return model, tokenizer, inputs


def answer(
    model: QoffForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Mapping[str, Tensor],
    *,
    quiet: bool = False,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Generate once: the text, and what it cost in seconds, bytes and tokens per second.

    inputs: of `encode`. options: of `generate`. Prints the text as it comes unless quiet. "rounds"
    are seconds of each token, and how many of these were spent waiting for the disk.
    """
    torch.manual_seed(seed)
    before = model.stats()
    streamer = _TimedStreamer(tokenizer, lambda: model.stats().wait_s, quiet)
    generating: Any = model  # transformers types `generate` for models of its own
    out = generating.generate(
        **inputs,
        streamer=streamer,
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        **options,
    )
    after = model.stats()
    prompt_tokens = inputs["input_ids"].shape[1]
    new = out.sequences[0, prompt_tokens:]
    first, *others = seconds = [b - a for a, b in pairwise(streamer.stamps)]
    waits = [b - a for a, b in pairwise([before.wait_s, *streamer.waits])]
    return {
        "text": str(tokenizer.decode(new, skip_special_tokens=True)),
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(new),
        "prefill_tokens_per_s": prompt_tokens / first,
        "first_token_s": first,
        "decode_tokens_per_s": len(others) / sum(others) if sum(others) > 0 else 0.0,
        "disk_bytes": after.disk_bytes - before.disk_bytes,
        "disk_busy_s": after.disk_busy_s - before.disk_busy_s,
        "wait_s": after.wait_s - before.wait_s,
        "arena_peak_bytes": after.arena_peak,
        "arena_capacity_bytes": after.arena_capacity,
        "resident_bytes": after.resident_bytes,
        "kv_cache_bytes": out.past_key_values.tokens.nbytes,
        "peak_rss_bytes": peak_rss(),
        "rounds": list(zip(seconds, waits, strict=True)),
    }


def rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and values of an answer, for a table."""
    peak, capacity = (format_size(found[f"arena_{name}_bytes"]) for name in ("peak", "capacity"))
    return [
        ("prefill", f"{found['prefill_tokens_per_s']:.1f} tok/s ({found['prompt_tokens']} tokens)"),
        ("time to first token", f"{found['first_token_s'] * 1e3:.0f} ms"),
        ("decode", f"{found['decode_tokens_per_s']:.1f} tok/s ({found['new_tokens']} tokens)"),
        ("read from disk", format_size(found["disk_bytes"])),
        ("peak of the arena", f"{peak} of {capacity}"),
        ("KV cache", format_size(found["kv_cache_bytes"])),
        ("peak RSS of the process", format_size(found["peak_rss_bytes"])),
    ]


def peak_rss() -> int:
    """Largest resident set of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the parent's memory at the time of the fork
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
