"""The demo model on the CPU: qoff, transformers in fp32, llama.cpp; tokens/s.

qoff by transformers' `generate`, by its own loop, and by `generate` with 8-bit activations. All on
the same threads, in turn, greedily, over the same pseudo-random prompts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import greedy
from bench.demo import PROMPT, fetch_checkpoint, fetch_gguf
from bench.greedy import Timing
from bench.harness import Bar, Report, arguments
from bench.peers import llama_cpp, transformers_model
from bench.sampling import interleaved, torch_threads
from qoff.eval.perplexity.models import open_float
from qoff.hf.load import load
from qoff.measure.samples import Samples

GENERATE, NATIVE, EIGHT_BIT, TRANSFORMERS, LLAMA = (
    "qoff generate",
    "qoff runtime",
    "qoff 8-bit",
    "transformers fp32",
    "llama.cpp",
)
OURS = (GENERATE, NATIVE, EIGHT_BIT)
Generate = Callable[[Tensor, int], tuple[Tensor, Timing]]


@dataclass(frozen=True)
class Work:
    """A prompt of some sequences, the tokens to generate, and the rate that is asked for."""

    name: str
    batch: int
    prompt: int
    new: int
    rate: str  # "prefill", "decode" or "total"

    def of(self, timing: Timing) -> float:
        """Tokens per second of one generation."""
        if self.rate == "prefill":
            return self.batch * self.prompt / timing.prefill_s
        return timing.decode_rate if self.rate == "decode" else timing.total_rate


WORK = (
    Work("decode, short context", 1, 16, 65, "decode"),
    Work("decode, 1024 deep", 1, 1024, 65, "decode"),
    Work("prefill of 512", 1, 512, 1, "prefill"),
    Work("16 sequences, 128 in, 32 out", 16, 128, 32, "total"),
)
QUICK_WORK = (
    Work("decode, short context", 1, 8, 5, "decode"),
    Work("decode, 64 deep", 1, 64, 5, "decode"),
    Work("prefill of 32", 1, 32, 1, "prefill"),
    Work("2 sequences, 16 in, 4 out", 2, 16, 4, "total"),
)


def prompts(work: Work, vocab: int) -> Tensor:
    """Ordinary token ids, int64 [batch, prompt], those of the llama.cpp bench where they exist."""
    numbers = torch.arange(work.batch * work.prompt) * 7919 % llama_cpp.TOKENS
    return ((llama_cpp.FIRST_TOKEN + numbers) % vocab).view(work.batch, work.prompt)


def sample(
    generate: Generate, work: Work, vocab: int, timings: list[Timing]
) -> Callable[[], float]:
    """Return a measurement of one alternative: tokens per second. It appends to `timings`."""
    ids = prompts(work, vocab)

    def measure() -> float:
        timings.append(generate(ids, work.new)[1])
        return work.of(timings[-1])

    return measure


def sample_llama(peer: llama_cpp.LlamaCpp, work: Work) -> Callable[[], float]:
    """Return a measurement of llama.cpp: tokens per second, by its own clock."""
    if work.rate == "prefill":
        return lambda: peer.prefill(work.prompt)
    return lambda: peer.decode(work.new, work.prompt)


def agreement(ours: Generate, theirs: Generate, ids: Tensor, new: int) -> dict[str, int]:
    """Compare the greedy answers to one prompt: equal tokens, and where the first differs."""
    a, b = ours(ids, new)[0][0], theirs(ids, new)[0][0]
    equal = a == b
    first = new if bool(equal.all()) else int(equal.logical_not().nonzero()[0])
    return {"tokens": new, "equal": int(equal.sum()), "equal_from_the_start": first}


@dataclass(frozen=True)
class Measured:
    """The alternatives at one kind of work."""

    rates: dict[str, Samples]  # tokens per second
    prefill_shares: dict[str, Samples]  # of the wall time; not of llama.cpp


class Contestants:
    """The loaded models; a context manager."""

    def __init__(self, checkpoint: Path, gguf: Path, context: int) -> None:
        self._stack = ExitStack()
        self.threads = torch.get_num_threads()
        ours, self.tokenizer = load(checkpoint, kv=None)
        self._stack.callback(ours.close)
        eight, _ = load(checkpoint, activation_bits=8, kv=None)
        self._stack.callback(eight.close)
        theirs = open_float(gguf)
        self.vocab: int = ours.config.vocab_size
        self.generate: dict[str, Generate] = {
            GENERATE: lambda ids, new: transformers_model.generate(ours, ids, new),
            NATIVE: lambda ids, new: self._native(ours.runtime, ids, new),
            EIGHT_BIT: lambda ids, new: transformers_model.generate(eight, ids, new),
            TRANSFORMERS: lambda ids, new: transformers_model.generate(theirs, ids, new),
        }
        self.llama: llama_cpp.LlamaCpp | None = None
        if llama_cpp.installed():
            peer = llama_cpp.LlamaCpp(gguf, self.threads, context=context)
            self.llama = self._stack.enter_context(peer)

    def __enter__(self) -> Contestants:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, work: Work, rounds: int) -> Measured:
        """Sample every alternative that can do this work."""
        timings: dict[str, list[Timing]] = {name: [] for name in self.generate}
        calls = {
            name: sample(g, work, self.vocab, timings[name]) for name, g in self.generate.items()
        }
        if self.llama is not None and work.batch == 1:
            calls[LLAMA] = sample_llama(self.llama, work)
        for call in calls.values():
            call()  # compiles and allocates
        rates = interleaved(calls, rounds)
        shares = {
            name: Samples(tuple(t.prefill_s / t.wall_s for t in noted[1:]))
            for name, noted in timings.items()
        }
        return Measured(rates, shares)

    def compare(self, prompt: str, new: int) -> dict[str, dict[str, int]]:
        """Agreement of the qoff alternatives with transformers on a prompt of text."""
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        ids = torch.tensor([self.tokenizer.encode(str(text), add_special_tokens=False)])
        theirs = self.generate[TRANSFORMERS]
        return {name: agreement(self.generate[name], theirs, ids, new) for name in OURS}

    @staticmethod
    def _native(runtime: Any, ids: Tensor, new: int) -> tuple[Tensor, Timing]:
        with torch_threads(1):  # as `generate` of qoff does
            return greedy.generate(runtime, ids, new)


def bars(ratios: dict[str, dict[str, float]], work: Sequence[Work]) -> list[Bar]:
    """Return what the project wants of each kind of work, in the order of `WORK`."""
    short, _, prefill, batch = (ratios[w.name] for w in work)
    wanted = [
        (f"{GENERATE} / {LLAMA}, short decode", 1.0, short),
        (f"{NATIVE} / {LLAMA}, short decode", 1.5, short),
        (f"{GENERATE} / {TRANSFORMERS}, prefill", 1.0, prefill),
        (f"{GENERATE} / {TRANSFORMERS}, batch", 5.0, batch),
        (f"{EIGHT_BIT} / {TRANSFORMERS}, batch", 5.0, batch),
    ]
    pairs = [(what, least, found.get(what.rpartition(", ")[0])) for what, least, found in wanted]
    return [Bar(what, least, ratio) for what, least, ratio in pairs if ratio is not None]


def report(found: dict[str, Measured], work: Sequence[Work], settings: dict[str, Any]) -> Report:
    """Return the table, ratios and bars of the samples, by work and by alternative."""
    names = (*OURS, TRANSFORMERS, LLAMA)
    result = Report(
        "cpu_decode",
        settings,
        f"SmolLM2-135M, Q4_1, {settings['threads']} threads: tokens/s, median (spread)",
        ("", *names, "/ tf", "8-bit / tf", "/ llama", "runtime / llama"),
        unit="tokens/s",
    )
    missing = "-" if settings["llama_cpp"] else "not installed"
    for one in work:
        samples, shares = found[one.name].rates, found[one.name].prefill_shares
        ratios = {
            f"{ours} / {peer}": samples[ours].median / samples[peer].median
            for ours in OURS
            for peer in (TRANSFORMERS, LLAMA)
            if peer in samples
        }
        shown = (
            f"{GENERATE} / {TRANSFORMERS}",
            f"{EIGHT_BIT} / {TRANSFORMERS}",
            f"{GENERATE} / {LLAMA}",
            f"{NATIVE} / {LLAMA}",
        )
        cells = [_cell(samples[n]) if n in samples else missing for n in names]
        times = [f"{ratios[key]:.2f}" if key in ratios else "-" for key in shown]
        result.rows.append((one.name, *cells, *times))
        result.measured[one.name] = {name: s.summary() for name, s in samples.items()}
        result.measured[one.name]["prefill_share_of_wall"] = {
            name: share.median for name, share in shares.items()
        }
        if one.rate == "total":
            parts = ", ".join(f"{name} {share.median:.0%}" for name, share in shares.items())
            result.notes.append(f"{one.name}: prefill's part of the time: {parts}")
        result.ratios[one.name] = ratios
    result.bars = bars(result.ratios, work)
    return result


def _cell(samples: Samples) -> str:
    return f"{samples.median:.1f} ({samples.spread:.0%})"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    warnings.filterwarnings("ignore", module="transformers")
    args = arguments(__doc__, argv)
    work, rounds, new = (QUICK_WORK, 2, 4) if args.quick else (WORK, 5, 64)
    context = max(w.prompt + w.new for w in work) + 63 & ~63
    with Contestants(fetch_checkpoint(), fetch_gguf(), context) as contestants:
        agreed = contestants.compare(PROMPT, new)
        found = {one.name: contestants.measure(one, rounds) for one in work}
        settings = {
            "rounds": rounds,
            "threads": contestants.threads,
            "llama_cpp": contestants.llama is not None,
            "quick": args.quick,
        }
    result = report(found, work, settings)
    result.measured["greedy_agreement_with_transformers"] = agreed
    result.notes += [
        f"{name}: {n['equal_from_the_start']} of {n['tokens']} greedy tokens equal transformers' "
        "before the first that differs"
        for name, n in agreed.items()
    ]
    result.publish(args.out)


if __name__ == "__main__":
    main()
