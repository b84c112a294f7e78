"""Small models with recurrent layers on the CPU: qoff's decoder beside transformers' modules.

In the shapes of Qwen3-Next, Kimi Linear, Granite 4 H and Nemotron 3, both on the same 4-bit weights
but for what the first two forget by, which has 8 bits in the former, in turn: a decode step behind
a prompt, and that prompt.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from bench.greedy import Greedy
from bench.harness import Bar, Report, arguments
from bench.sampling import interleaved, torch_threads
from qoff.measure.model_rates import tokens
from qoff.models.convert import convert as conversion
from qoff.models.runtime import Runtime
from qoff.quant import QuantConfig

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "vocab_size": 8192,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "num_experts": 16,
        "shared_expert_intermediate_size": 256,
    },
    "kimi_linear": {
        "num_key_value_heads": 8,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "mlp_layer_types": ["sparse"] * 4,
        "linear_num_heads": 16,
        "linear_head_dim": 128,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_experts": 16,
    },
    "granitemoehybrid": {
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "mamba_n_heads": 32,
        "mamba_d_state": 128,
        "num_local_experts": 16,
        "intermediate_size": 256,
        "shared_intermediate_size": 512,
    },
    "nemotron_h": {
        "head_dim": 128,
        "layers_block_type": [
            *["linear_attention", "moe"] * 3,
            *("full_attention", "moe"),
        ],
        "mamba_num_heads": 32,
        "mamba_head_dim": 64,
        "n_routed_experts": 16,
        "moe_shared_expert_intermediate_size": 512,
    },
}
QUICK = {"hidden_size": 256, "vocab_size": 512}
WAYS = ("native", "modules")


def runtimes(family: str, folder: Path, quick: bool) -> dict[str, Runtime]:
    """The same random model both ways, all of it in memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {"model_type": family, **SHAPE, **FAMILIES[family], **(QUICK if quick else {})}
    config = AutoConfig.for_model(**shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    quant = QuantConfig(solver="rtn")
    conversion.convert(folder / "model", folder / "native", quant=quant, for_cpu=True)
    with patch.object(conversion, "is_native", lambda config: False):
        conversion.convert(folder / "model", folder / "modules", quant=quant, for_cpu=True)
    return {way: Runtime(folder / way) for way in WAYS}


def decoding(runtime: Runtime, prompt: int, steps: int) -> Callable[[], float]:
    """Measures seconds of a step, the median of some behind a prompt."""

    def measure() -> float:
        greedy = Greedy(runtime, tokens(runtime, 1, prompt), steps + 1)
        stamps = [perf_counter()]
        for _ in range(steps):
            greedy.step()
            stamps.append(perf_counter())
        return median(b - a for a, b in pairwise(stamps))

    return measure


def reading(runtime: Runtime, prompt: int) -> Callable[[], float]:
    """Measures seconds of a prompt."""

    def measure() -> float:
        ids, start = tokens(runtime, 1, prompt), perf_counter()
        Greedy(runtime, ids, 1)
        return perf_counter() - start

    return measure


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(__doc__, argv)
    prompt, steps = (16, 2) if args.quick else (256, 16)
    calls: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        stack.enter_context(torch_threads(1))
        for family in FAMILIES:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for way, runtime in runtimes(family, folder, args.quick).items():
                stack.callback(runtime.close)
                calls[f"{family}: step, {way}"] = decoding(runtime, prompt, steps)
                calls[f"{family}: prompt, {way}"] = reading(runtime, prompt)
        for call in calls.values():
            call()  # compiles and allocates
        found = interleaved(calls, 2 if args.quick else 5)
    result = Report(
        "recurrent",
        {"threads": torch.get_num_threads(), "prompt": prompt, "quick": args.quick},
        f"random weights, one sequence, a prompt of {prompt} tokens",
        ("", *(f"{way}, ms" for way in WAYS), "modules / native"),
        unit="seconds",
    )
    result.measured = {name: samples.summary() for name, samples in found.items()}
    for what in (f"{family}: {work}" for family in FAMILIES for work in ("step", "prompt")):
        native, modules = (found[f"{what}, {way}"].median for way in WAYS)
        result.ratios[what] = modules / native
        cells = (f"{1e3 * native:.2f}", f"{1e3 * modules:.2f}", f"{modules / native:.2f}")
        result.rows.append((what, *cells))
    slowest = min(result.ratios[f"{family}: step"] for family in FAMILIES)
    result.bars = [Bar("a step, modules / native, at least", 1.0, slowest)]
    result.publish(args.out)


if __name__ == "__main__":
    main()
