"""Models of transformers' modules: what plans forecast of rounds of decoding, and what they take.

A dense model in the shape of StableLM 2 1.6B with fewer layers, and a mixture in the shape of
DeepSeek V4 with few and small layers, of random weights. Each is planned for memory that holds all
of it, and for parts of that, and every plan is run. Where experts come one by one, the same plan is
run with layers that come as a whole, too, as other offloaders bring them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import torch

from bench.harness import Bar, Report
from bench.random_model import write_random_modules
from qoff import LLM, SamplingParams
from qoff.checkpoint import Checkpoint
from qoff.errors import BudgetError
from qoff.measure.profile import measured_profile
from qoff.models.modules import outline
from qoff.plan import Plan
from qoff.plan.module_sizes import ModuleSizes
from qoff.plan.search import find_plan
from qoff.plan.workload import Lengths, Workload

STABLELM: dict[str, Any] = {
    "model_type": "stablelm",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "float16",
}
DEEPSEEK_V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 1024,
    "vocab_size": 32000,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "q_lora_rank": 256,
    "o_groups": 4,
    "o_lora_rank": 256,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 128,
    "sliding_window": 128,
    "partial_rotary_factor": 0.25,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "max_position_embeddings": 8192,
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 4,
    "mlp_layer_types": ["hash_moe", *["moe"] * 7],
    "dtype": "bfloat16",
}
_PROMPT, _NEW, _REQUESTS = 128, 24, 4
_PARTS = (None, 0.6, 0.3)  # of the bytes of the weights that memory is for; None: all
_ERROR, _TIMES = 0.25, 5.0  # wanted


@contextmanager
def _whole_layers() -> Iterator[None]:
    """Experts come with their layers."""
    with patch.object(outline, "are_uniform", lambda checkpoint: False):
        yield


def _round_s(path: Path, plan: Plan, requests: int, new: int) -> tuple[float, float]:
    """Seconds of a round of decoding, the median, and bytes that one reads from disk: the mean."""
    prompts = [[5 + (7 * i + 13 * j) % 900 for i in range(_PROMPT)] for j in range(requests)]
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=new, ignore_eos=True)
    with LLM(path, plan=plan) as llm:
        llm.generate(prompts, replace(params, max_tokens=2))  # compares files with checksums
        before = len(llm.rounds)
        llm.generate(prompts, params)
        rounds = [one for one in [*llm.rounds][before:] if one.generated and not one.read]
    return median(one.seconds for one in rounds), mean(one.disk_bytes for one in rounds)


def measure(quick: bool) -> Report:
    """Both models, each in all of its memory."""
    result = Report(
        "planner-modules",
        {"quick": quick, "prompt": _PROMPT, "new": _NEW, "requests": _REQUESTS},
        "rounds of decoding of transformers' modules, measured and forecast",
        ("model", "memory", "sequences", "forecast ms", "measured ms", "error", "read a round"),
    )
    errors = list[float]()
    folder = Path(tempfile.mkdtemp(prefix="qoff-modules-"))
    try:
        for name, config in (("StableLM", STABLELM), ("DeepSeek V4", DEEPSEEK_V4)):
            path = folder / name
            layers = {"num_hidden_layers": 2} if quick else {}
            if quick and "layer_types" in config:
                layers |= {kind: config[kind][:2] for kind in ("layer_types", "mlp_layer_types")}
            write_random_modules(path, {**config, **layers})
            sizes = ModuleSizes(Checkpoint.open(path), stored=True)
            on = measured_profile(torch.device("cpu"), path, folder)
            for requests in (1, _REQUESTS):
                work = Workload(Lengths.of(_PROMPT), Lengths.of(_NEW), requests)
                for part in _PARTS:
                    errors += _run(result, name, path, sizes, on, work, part)
    finally:
        shutil.rmtree(folder)
    result.ratios["median error"] = median(errors)
    result.bars.append(Bar("1 - median error", 1 - _ERROR, 1 - median(errors)))
    return result


def _run(
    result: Report,
    name: str,
    path: Path,
    sizes: ModuleSizes,
    on: Any,
    work: Workload,
    part: float | None,
) -> list[float]:
    memory = on.usable["device"] if part is None else (256 << 20) + int(part * sizes.nbytes)
    try:
        found = find_plan(sizes, on.with_memory(device=memory), work)
    except BudgetError as refusal:
        result.notes.append(f"{name}, {memory >> 20} MiB: {refusal}")
        return []
    plan = replace(found.plan, adapt=False)
    took, read = _round_s(path, plan, work.requests, _NEW)
    error = found.decode.seconds / took - 1
    label = f"{name}, {memory >> 20} MiB, {work.requests} sequences"
    result.rows.append(
        (name, f"{memory >> 20} MiB", f"{plan.batches} x {plan.batch_size}",
         f"{found.decode.seconds * 1e3:.1f}", f"{took * 1e3:.1f}", f"{error:+.0%}",
         f"{read / 1e6:.0f} MB")
    )  # fmt: skip
    result.measured[label] = {
        "forecast_s": found.decode.seconds,
        "measured_s": took,
        "read": read,
        "busy_s": dict(found.decode.busy),
    }
    if found.hits is not None:
        try:
            with _whole_layers():
                whole, bytes_ = _round_s(path, plan, work.requests, _NEW)
        except BudgetError as refusal:
            result.notes.append(f"{label}, whole layers: {refusal}")
            return [abs(error)]
        result.ratios[f"{label}: times as fast as with whole layers"] = whole / took
        result.measured[label] |= {"whole_layers_s": whole, "whole_layers_read": bytes_}
        result.bars.append(Bar(f"{label}: over whole layers", _TIMES, whole / took))
    return [abs(error)]
