"""Speculative decoding on weights that stream: tokens a pass, and tokens per second.

    python -m bench.drafts --device-memory 64MiB

The demo model is asked to repeat and correct paragraphs of the shipped text, one prompt at a time,
with prompt lookup and without, in turns. Answers are compared token by token. With --draft-model,
a small model drafts, in memory of its own beside --device-memory; the demo model drafting for
itself shows what drafts gain that are all accepted:

    python -m bench.drafts --model LARGE --draft-model SMALL
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.demo import fetch_checkpoint
from bench.harness import Report, arguments
from qoff.engine import LLM, SamplingParams
from qoff.eval.texts import read_text
from qoff.plan import Plan

_ASKED = "Correct the spelling of this text, and change nothing else.\n\n{}"
_WORDS = 80  # of a paragraph


def paragraphs(count: int) -> list[str]:
    """Pieces of the shipped text."""
    words = read_text().split()
    return [" ".join(words[i * _WORDS : (i + 1) * _WORDS]) for i in range(count)]


def answered(llm: LLM, text: str, tokens: int) -> tuple[tuple[int, ...], int, float]:
    """The tokens of an answer, in how many rounds after the prompt's, and in how many seconds."""
    before = len(llm.rounds)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    (found,) = llm.chat([{"role": "user", "content": _ASKED.format(text)}], params)
    rounds = [one for one in llm.rounds[before:] if not one.read]
    return found.token_ids, len(rounds), sum(one.seconds for one in rounds)


def beside(checkpoint: Path, plan: Plan, small: str) -> Plan:
    """The plan with a model that drafts, and so much more memory that the weights have as much."""
    drafting = replace(plan, draft_model=small)
    with LLM(checkpoint, replace(drafting, device_memory=None), device="cpu") as llm:
        taken = llm.memory_by_tier()["device"]["draft model"]
    assert plan.device_memory is not None
    return replace(drafting, device_memory=plan.device_memory + taken)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    given = arguments(
        __doc__,
        argv,
        device_memory=(str, "64MiB", "for everything"),
        drafts=(str, "0,4,8,16", "tokens drafted, with commas between; 0 first"),
        prompts=(int, 4, "paragraphs"),
        tokens=(int, 96, "of an answer"),
        model=(str, "", "checkpoint that answers; default: the demo's"),
        draft_model=(str, "", "checkpoint that drafts; default: prompt lookup"),
    )
    lengths = [int(one) for one in given.drafts.split(",")]
    checkpoint = Path(given.model) if given.model else fetch_checkpoint()
    settings = {
        name: getattr(given, name) for name in ("device_memory", "prompts", "tokens", "draft_model")
    }
    seconds = {n: list[float]() for n in lengths}
    passes = dict.fromkeys(lengths, 0)
    same = dict.fromkeys(lengths, 0)
    with ExitStack() as opened:
        llms = {}
        for n in lengths:
            plan = Plan(given.device_memory, batch_size=1, context=512, draft_tokens=n)
            if n and given.draft_model:
                plan = beside(checkpoint, plan, given.draft_model)
            llms[n] = opened.enter_context(LLM(checkpoint, plan))
            if not llms[n].runtime.residency.slots:
                raise SystemExit(f"in {given.device_memory} no weights stream: give it less")
            answered(llms[n], "warm up", 8)
        for text in paragraphs(given.prompts):
            wanted: tuple[int, ...] = ()
            for n, llm in llms.items():
                found, rounds, spent = answered(llm, text, given.tokens)
                wanted = wanted or found
                passes[n] += rounds
                seconds[n].append(spent)
                same[n] += found == wanted
    report = Report(
        "drafts",
        settings,
        f"{checkpoint.name} in {given.device_memory}, one prompt at a time",
        ("drafted", "tokens a pass", "tok/s", "times", "same answers"),
    )
    total = given.prompts * (given.tokens - 1)  # the first comes of the prompt
    base = statistics.median(seconds[lengths[0]])
    for n in lengths:
        median = statistics.median(seconds[n])
        rate, each = (given.tokens - 1) / median, total / passes[n]
        report.rows.append(
            (str(n), f"{each:.2f}", f"{rate:.1f}", f"{base / median:.2f}",
             f"{same[n]} of {given.prompts}")
        )  # fmt: skip
        report.measured[str(n)] = {"tokens_a_pass": each, "tokens_per_s": rate}
    report.publish(given.out)


if __name__ == "__main__":
    main()
