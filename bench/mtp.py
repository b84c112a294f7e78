"""Drafts of a model's own layer for multi-token prediction, on weights that stream.

    python -m bench.mtp --device-memory 512MiB
    python -m bench.mtp --model glm4.5 --device-memory 2GiB --sequences 1,32

A random model answers with drafts of its layer and without. Its layer predicts nothing: what it
drafts is replaced by what the model is known to answer, each token with the given chance and
another one else, so passes cost what they do in a trained model of that acceptance. DeepSeek V3's
layer is right about 85 to 90 % of the time (arXiv 2412.19437, 5.4.3).
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.harness import Report, arguments
from bench.random_model import write_random_checkpoint
from qoff.engine import LLM, SamplingParams
from qoff.engine.mtp_drafts import MtpBatch
from qoff.engine.request import Sequence as Answer
from qoff.plan import Plan

MODELS: dict[str, dict[str, Any]] = {  # with fewer and smaller layers than those of the name
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "glm4.5": {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 1,
    },
}


class Corrected(MtpBatch):
    """Drafts as its layer does, and then says what the model answers, by chance."""

    known: Mapping[tuple[int, ...], tuple[int, ...]]
    chance: float
    draws: random.Random

    def propose(self, wanted: Mapping[int, tuple[Answer, int]]) -> dict[int, list[int]]:
        found = super().propose(wanted)
        for slot, draft in found.items():
            one = wanted[slot][0]
            done = len(one.answer)
            for i, token in enumerate(self.known[one.prompt][done : done + len(draft)]):
                right = self.draws.random() < self.chance
                draft[i] = token if right else 3 + token % 1000
        return found


def answered(llm: LLM, prompts: list[list[int]], tokens: int) -> tuple[Any, float, float]:
    """Answers, seconds of a token of a sequence, and tokens a pass has of a sequence."""
    before = len(llm.rounds)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found = llm.generate(prompts, params)
    rounds = [one for one in llm.rounds[before:] if not one.read]
    seconds = sum(one.seconds for one in rounds)
    made = sum(one.generated for one in rounds) / len(prompts)
    return {tuple(p): x.token_ids for p, x in zip(prompts, found, strict=True)}, seconds, made


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    given = arguments(
        __doc__,
        argv,
        model=(str, "qwen3.5", f"its shape: {', '.join(MODELS)}"),
        device_memory=(str, "512MiB", "for everything"),
        drafts=(str, "0,1,2,3", "tokens drafted, with commas between; 0 first"),
        chances=(str, "0.6,0.85", "that a drafted token is right if those before it are"),
        sequences=(str, "1,8", "that are answered at once"),
        tokens=(int, 48, "of an answer"),
        runs=(int, 3, "of each, in turns"),
        folder=(str, "", "where its checkpoint is kept; default: it is not"),
    )
    lengths, chances = (
        [int(x) for x in given.drafts.split(",")],
        [float(x) for x in given.chances.split(",")],
    )
    settings = {k: getattr(given, k) for k in ("model", "device_memory", "tokens", "runs")}
    report = Report(
        "mtp",
        settings,
        f"a random {given.model} in {given.device_memory}",
        ("sequences", "acceptance", "drafted", "tokens a pass", "tok/s", "times"),
    )
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(given.folder or temporary) / given.model
        if not path.exists():
            write_random_checkpoint(path, MODELS[given.model], mtp=True)
        for sequences in [int(x) for x in given.sequences.split(",")]:
            measure(path, given, sequences, lengths, chances, report)
    report.publish(given.out)


def measure(
    path: Path,
    given: Any,
    sequences: int,
    lengths: list[int],
    chances: list[float],
    report: Report,
) -> None:
    """Add the rows of so many sequences."""
    draws = random.Random(0)
    prompts = [[draws.randrange(3, 32000) for _ in range(64)] for _ in range(sequences)]
    known: Any = {}
    base = 0.0
    for chance in chances:
        for length in lengths:
            if not length and base:
                continue
            plan = Plan(given.device_memory, batch_size=sequences, context=256, adapt=False)
            if length:
                plan = replace(plan, draft_model="mtp", draft_tokens=length)
            with LLM(path, plan, device="cpu") as llm:
                for batch in llm._rounds.current.opened.batches if length else ():
                    drafts: Any = batch._mtp
                    drafts.__class__, drafts.known = Corrected, known
                    drafts.chance, drafts.draws = chance, random.Random(1)
                if not length:
                    known = answered(llm, prompts, given.tokens)[0]
                runs = [answered(llm, prompts, given.tokens) for _ in range(given.runs)]
                assert all(x == known for x, _, _ in runs)
                passes = sum(not one.read for one in llm.rounds) if length else None
            rate = statistics.median(made * sequences / seconds for _, seconds, made in runs)
            base = base or rate
            each = 1.0 if passes is None else given.runs * (given.tokens - 1) / passes
            name = f"{chance}" if length else "-"
            report.rows.append(
                (str(sequences), name, str(length), f"{each:.2f}", f"{rate:.1f}",
                 f"{rate / base:.2f}")
            )  # fmt: skip
            report.measured[f"{sequences}, {name}, {length}"] = {
                "tokens_a_pass": each,
                "tokens_per_s": rate,
                "times": rate / base,
            }


if __name__ == "__main__":
    main()
