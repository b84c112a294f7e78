"""`qoff generate`: text as it comes, then what it cost."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from qoff.engine.answers import default_params, end_tokens
from qoff.engine.request import SamplingParams, Sequence
from qoff.engine.sampling import LogitsRow, Sampler
from qoff.errors import ArgumentError, QoffError
from qoff.hf.chat import ChatRenderer
from qoff.hf.load import Opened, open_runtime
from qoff.hf.tokenizer import load_tokenizer
from qoff.kernels.torch_threads import one_torch_thread
from qoff.measure.model_rates import Sequences
from qoff.memory.experts import ExpertStats
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.io.timeline import Timeline
from qoff.models.modules.decoder import ModuleDecoder
from qoff.models.runtime import Runtime
from qoff.models.spec import DecoderSpec
from qoff.units import format_size


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, raw: bool) -> list[int]:
    """Return the prompt's tokens, through the chat template if any, unless `raw`.

    Without the template an empty prompt is what the tokenizer begins a text with, as for `LLM`.
    Raises ArgumentError for a prompt that is not UTF-8, that is empty within a template, or that
    has no tokens.
    """
    check_text(prompt, "the prompt")
    if raw or not tokenizer.chat_template:
        encoded: Any = tokenizer(prompt)
    elif not prompt:
        raise ArgumentError("the prompt is empty; write something, or give --raw for any text")
    else:
        with ChatRenderer() as renderer:
            text = renderer.render(tokenizer, [{"role": "user", "content": prompt}])
        encoded = tokenizer(text, add_special_tokens=False)
    if not encoded["input_ids"]:
        raise ArgumentError("the prompt has no tokens; write something")
    return list(encoded["input_ids"])


def read_prompt(prompt: str) -> str:
    """The prompt itself; for "-" what standard input has, without line ends at its end."""
    if prompt != "-":
        return prompt
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape").rstrip("\r\n")


def check_text(text: str, what: str) -> None:
    """Raise ArgumentError for text with bytes, or halves of characters, that UTF-8 has not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"{what} is not UTF-8 (character {error.start + 1} is {text[error.start]!a}); "
            "convert it, with iconv for instance"
        ) from error


def open_for(
    checkpoint: Path,
    prompt: str,
    new_tokens: int,
    raw: bool,
    timeline: Timeline | None,
    **options: Any,
) -> tuple[Opened, PreTrainedTokenizerBase, list[int]]:
    """What runs a model, with room for this prompt and its answer; tokenizer, prompt's tokens."""
    tokenizer = load_tokenizer(checkpoint, options["trust_remote_code"])
    ids = encode(tokenizer, prompt, raw)
    watched = Instrumentation(timeline=timeline)
    context = len(ids) + new_tokens
    opened = open_runtime(checkpoint, context=context, instrumentation=watched, **options)
    return opened, tokenizer, ids


def answer(
    opened: Opened,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    params: SamplingParams,
    quiet: bool = False,
) -> dict[str, Any]:
    """Generate once: the text, and what it cost in seconds, bytes and tokens per second.

    ids: of the prompt. Prints the text as it comes unless quiet. "rounds" are seconds of each
    token, and how many of these were spent waiting for the disk. An answer ends where the model's
    positions do. Raises ArgumentError for a prompt that leaves it none, QoffError for logits that
    are not finite, and what a pass does.
    """
    runtime, checkpoint = opened.runtime, opened.runtime.checkpoint
    penalty = default_params(checkpoint).repetition_penalty
    params, limits = replace(params, repetition_penalty=penalty), limits_of(runtime)
    limits.check_positions(len(ids) + 1)
    most = min(params.max_tokens or 1, (limits.position_limit or sys.maxsize) - len(ids))
    sequence = Sequence(0, 0, None, tuple(ids), params, most, end_tokens(checkpoint))
    room = len(ids) + (most if opened.budget is not None else 0)
    before, stamps, waits = runtime.stats(), [time.perf_counter()], []
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    with torch.inference_mode(), one_torch_thread():
        sequences = Sequences(runtime, 1, room, opened.budget)
        for token in tokens_of(sequence, sequences, checkpoint.path):
            stamps.append(time.perf_counter())
            waits.append(runtime.stats().wait_s)
            if not quiet:
                streamer.put(torch.tensor([token]))
    if not quiet:
        streamer.end()
    after, new = runtime.stats(), sequence.answer
    first, *others = seconds = [b - a for a, b in pairwise(stamps)]
    return {
        "text": str(tokenizer.decode(new, skip_special_tokens=True)),
        "prompt_tokens": len(ids),
        "new_tokens": len(new),
        "prefill_tokens_per_s": len(ids) / first,
        "first_token_s": first,
        "decode_tokens_per_s": len(others) / sum(others) if sum(others) > 0 else 0.0,
        "disk_bytes": after.disk_bytes - before.disk_bytes,
        "disk_busy_s": after.disk_busy_s - before.disk_busy_s,
        "wait_s": after.wait_s - before.wait_s,
        "experts": _experts(before.experts, after.experts),
        "arena_peak_bytes": after.arena_peak,
        "arena_capacity_bytes": after.arena_capacity,
        "resident_bytes": after.resident_bytes,
        "kv_cache_bytes": sequences.nbytes,
        "peak_rss_bytes": peak_rss(),
        "rounds": [
            (spent, b - a)
            for spent, (a, b) in zip(seconds, pairwise([before.wait_s, *waits]), strict=True)
        ],
    }


def limits_of(runtime: Runtime) -> DecoderSpec | ModuleDecoder:
    """What says how many positions a model has."""
    decoder = runtime.decoder
    return decoder if isinstance(decoder, ModuleDecoder) else decoder.spec


def _experts(before: ExpertStats, after: ExpertStats) -> dict[str, int]:
    """What the cache of experts did meanwhile; nothing where they do not come one by one."""
    done = {name: value - getattr(before, name) for name, value in asdict(after).items()}
    return done if done["bytes"] or done["hits"] else {}


def tokens_of(sequence: Sequence, read: Sequences, checkpoint: Path) -> Iterator[int]:
    """The tokens of an answer, the one that ends it included. read: has some of the prompt."""
    context = len(sequence.prompt) + sequence.max_tokens
    following = list(sequence.prompt[read.length :])
    sampler: Sampler | None = None
    while len(sequence.answer) < sequence.max_tokens and not sequence.ended:
        logits = read.logits(torch.tensor([following]))[0]
        if sampler is None:
            sampler = Sampler(len(logits), 1, context, logits.device)
            sampler.begin(0, sequence)
        sampler.draw([LogitsRow(0, sequence, logits)])
        if sequence.error:
            raise QoffError(f"{checkpoint}: {sequence.error}")
        following = sequence.answer[-1:]
        sequence.ended = following[0] in sequence.ends
        yield following[0]


def rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and values of an answer, for a table."""
    peak, capacity = (format_size(found[f"arena_{name}_bytes"]) for name in ("peak", "capacity"))
    told, experts = list[tuple[str, str]](), found["experts"]
    count, decode = found["new_tokens"], f"{found['decode_tokens_per_s']:.1f} tok/s"
    if experts:
        counts = "{hits} there, {misses} read, {guessed} read ahead, {wrong} of them in vain"
        told.append(("experts", counts.format(**experts)))
        told.append(("guesses of experts", "{guesses}, {right} of them right".format(**experts)))
    return [
        ("prefill", f"{found['prefill_tokens_per_s']:.1f} tok/s ({found['prompt_tokens']} tokens)"),
        ("time to first token", f"{found['first_token_s'] * 1e3:.0f} ms"),
        ("decode", f"{decode} ({count} tokens)" if count > 1 else "not timed (1 token)"),
        ("read from disk", format_size(found["disk_bytes"])),
        *told,
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
