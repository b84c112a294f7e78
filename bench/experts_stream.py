"""A mixture of experts larger than memory: tokens per second, and what its disk allows.

A random Qwen3-MoE, whose experts are 4-bit, is written (`--layers` of 48; `--path` keeps it), and
runs in a budget. Its bound is the time in which the disk reads the missed experts, at the rate of
O_DIRECT reads alone in the same minutes. Its routes are replayed for each policy and cache size.
Run it in a control group of as much memory as the budget and 512 MiB, for what others may use.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.bandwidth import RawRead
from bench.random_model import write_random_checkpoint
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM, SamplingParams
from qoff.kernels.layout.ragged import Ragged
from qoff.memory.experts.simulator import rates
from qoff.models.forward_pass import ForwardPass
from qoff.models.runtime import Runtime
from qoff.plan import Plan
from qoff.units import format_size, parse_size

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def one_by_one(path: Path, budget: int, prompt: int, tokens: int) -> dict[str, Any]:
    """Decoding of one sequence, whose tokens are random: rates, and what the cache did."""
    with Runtime(path, device_memory=budget) as runtime:
        cache, experts = runtime.new_cache(1), runtime.store.experts
        assert experts is not None
        ids = torch.randint(32000, (prompt + tokens,), generator=torch.Generator().manual_seed(1))
        start = time.perf_counter()
        _read(runtime, ids[:prompt], cache)
        prefill = time.perf_counter() - start
        experts.record = []
        before, start = runtime.store.stats, time.perf_counter()
        for one in ids[prompt:].split(1):
            _read(runtime, one, cache)
        seconds, after = time.perf_counter() - start, runtime.store.stats
        done, was = after.experts, before.experts
        counts, routes, plan = experts.counts, experts.record, runtime.residency
    wanted = sum(len(numbers) for _, numbers in routes)
    read = after.bytes_read - before.bytes_read
    sizes = [sum(counts) * part // 16 for part in (1, 2, 4, 8)]
    return {
        "slots": plan.expert_slots,
        "prefill_s": prefill,
        "tokens_per_s": tokens / seconds,
        "hit_rate": (done.hits - was.hits) / wanted,
        "missed": done.misses - was.misses,
        "guessed": done.guessed - was.guessed,
        "wrong": done.wrong - was.wrong,
        "read_bytes_per_token": read / tokens,
        "read_bytes_per_s": read / seconds,
        "wait_s": after.wait_s - before.wait_s,
        "disk_busy_s": after.disk_busy_s - before.disk_busy_s,
        "seconds": seconds,
        "raw_bytes_per_s": RawRead(Checkpoint.open(path))(),
        "policies": {"slots": sizes, **rates(counts, routes, sizes, len(routes) // 2)},
    }


def _read(runtime: Runtime, fresh: torch.Tensor, cache: Any) -> None:
    ragged = Ragged.of([len(fresh)], cache.lengths)
    with torch.inference_mode():
        runtime.forward(ForwardPass(fresh, ragged, cache, ragged.last_rows))


def many(path: Path, budget: int, prompt: int, tokens: int) -> dict[str, Any]:
    """64 sequences in the block schedule: the decode rounds."""
    plan = Plan(
        batch_size=16,
        batches=4,
        context=prompt + tokens,
        prefill_tokens=256,
        device_memory=budget,
    )
    numbers = torch.Generator().manual_seed(2)
    prompts = torch.randint(32000, (64, prompt), generator=numbers).tolist()
    with LLM(path, plan) as llm:
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(seed=1, max_tokens=tokens, ignore_eos=True))
        seconds = time.perf_counter() - start
        rounds = [one for one in llm.rounds if not one.read and one.generated == 64]
        done, slots = llm.runtime.store.stats.experts, llm.runtime.residency.expert_slots
    raw = RawRead(Checkpoint.open(path))()
    decode = sum(one.seconds for one in rounds)
    return {
        "slots": slots,
        "seconds": seconds,
        "decode_tokens_per_s": 64 * len(rounds) / decode,
        "read_bytes_per_s": sum(one.disk_bytes for one in rounds) / decode,
        "raw_bytes_per_s": raw,
        "hits": done.hits,
        "misses": done.misses,
        "guessed": done.guessed,
        "wrong": done.wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--path", type=Path, help="the checkpoint, written if it is not there")
    parser.add_argument("--memory", default="1536MiB", help="budget")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--only", choices=["one", "many"])
    parser.add_argument("--json", action="store_true", help="print what `--only` finds, no more")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.path or Path(folder) / "mixture"
        if not path.exists():
            config = QWEN3_MOE | {"num_hidden_layers": given.layers}
            write_random_checkpoint(path, config, embedding=config["hidden_size"] ** 0.5)
        size = sum(file.nbytes for file in Checkpoint.open(path).files)
        budget = parse_size(given.memory)
        if given.json:
            run = many if given.only == "many" else one_by_one
            print(json.dumps(run(path, budget, given.prompt, given.tokens)))
            return
        print(f"{format_size(size)} of weights in {format_size(budget)}")
        for name, run in (("one", one_by_one), ("many", many)):
            if given.only in (None, name):
                print(name, json.dumps(run(path, budget, given.prompt, given.tokens), indent=1))


if __name__ == "__main__":
    main()
