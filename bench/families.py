"""One shape of every family of the native decoder on the CPU, random weights, beside Llama's.

Decode: time of a token over the bytes it reads (weights, the chosen experts alone, and K and V).
Prefill: time of a token over its multiply-adds. Both relative to Llama's, measured in turn with
each: what is above 1 is time that a family spends on more than its matrices. All have Llama's
sizes, or others of about as many bytes where a family has no gates or has experts.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.greedy import Greedy
from bench.harness import Bar, Report, arguments
from bench.random_model import write_random_checkpoint
from bench.sampling import torch_threads
from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import QuantEntry
from qoff.errors import ArgumentError
from qoff.measure.model_rates import tokens
from qoff.measure.samples import Samples
from qoff.memory.plan import EMBEDDING, is_expert
from qoff.models.families import FAMILIES
from qoff.models.names import PER_LAYER, POSITIONS
from qoff.models.runtime import Runtime
from qoff.models.spec import DecoderSpec

BASE, BAR = "llama", 1.15  # how much more time a byte may take than the base's
START = 16  # tokens before decode
SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
QUICK = {"num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 4, "vocab_size": 512}
_UNGATED = {"intermediate_size": 3456}  # two matrices as large as three of 2304
_EXPERTS = {"intermediate_size": 1152, "num_local_experts": 8, "num_experts_per_tok": 2}
_SMALL = {"num_experts_per_tok": 4, "moe_intermediate_size": 576}
_LATENT = {"num_key_value_heads": 12, "q_lora_rank": 256, "kv_lora_rank": 256, "head_dim": 32,
           "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}  # fmt: skip
_LINEAR = {"linear_num_key_heads": 4, "linear_num_value_heads": 16, "linear_key_head_dim": 64,
           "linear_value_head_dim": 64}  # fmt: skip
_CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention"] * 6}  # of the first layers
_MAMBA = {"mamba_n_heads": 24, "mamba_d_head": "auto", "mamba_d_state": 128, "mamba_n_groups": 1}
CHANGES: dict[str, dict[str, Any]] = {
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                "attention_multiplier": 1 / 64, "logits_scaling": 8.0},
    "cwm": {"bos_token_id": 0, "eos_token_id": 0},  # which it wants to be numbers
    "opt": {"ffn_dim": 3456},
    "gemma3n_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 64,
                     "vocab_size_per_layer_input": 512, "laurel_rank": 64},
    "gpt_neox": _UNGATED,
    "apertus": _UNGATED,
    "starcoder2": _UNGATED,
    **dict.fromkeys(("mixtral", "phimoe"), _EXPERTS),
    "gpt_oss": _EXPERTS | {"max_position_embeddings": 131072},  # as its RoPE says
    "llama4_text": _EXPERTS | {"num_experts_per_tok": 1, "intermediate_size_mlp": 2304},
    "qwen2_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384,
                  "shared_expert_intermediate_size": 768},
    "qwen3_moe": _SMALL | {"num_experts": 16},
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 576},
    "granitemoe": {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 576},
    "qwen3_next": _LINEAR | {"num_experts": 16, "num_experts_per_tok": 4,
                  "moe_intermediate_size": 384, "shared_expert_intermediate_size": 768},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR | {"num_experts": 16, "num_experts_per_tok": 4,
                  "moe_intermediate_size": 384, "shared_expert_intermediate_size": 768},
    "kimi_linear": _LATENT | _SMALL | {
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 4, "q_lora_rank": None,
        "linear_num_heads": 12, "linear_head_dim": 64, "num_experts": 16, "num_shared_experts": 1},
    "olmo_hybrid": _LINEAR | {"linear_num_key_heads": 16},
    "bailing_hybrid": _LATENT | _SMALL | {
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 4, "q_lora_rank": None,
        "head_dim": 64, "num_experts": 16, "num_expert_group": 1, "topk_group": 1},
    "lfm2": _CONVOLUTIONS | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": _CONVOLUTIONS | _SMALL | {"num_experts": 16},
    "bamba": _MAMBA | {"attn_layer_indices": [3, 7, 11, 15]},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 1536},
    "granitemoehybrid": _MAMBA | {
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 4,
        "num_local_experts": 0, "shared_intermediate_size": 2304},
    "nemotron_h": _SMALL | {
        "layer_types": ["linear_attention", "moe", "full_attention", "moe"] * 4,
        "mamba_num_heads": 24, "mamba_head_dim": 64, "n_routed_experts": 16, "n_groups": 1,
        "moe_shared_expert_intermediate_size": 1152},
    **dict.fromkeys(("glm4_moe", "dots1", "solar_open"), _SMALL | {"n_routed_experts": 16,
                    "n_shared_experts": 1}),
    "step3p5": _SMALL | {"n_routed_experts": 16, "share_expert_dim": 576,
                         "pad_token_id": 0},  # which it wants to be a number
    "laguna": _SMALL | {"num_experts": 16, "shared_expert_intermediate_size": 576},
    **dict.fromkeys(("exaone_moe", "hy_v3"), _SMALL | {"num_experts": 16}),
    "mimo_v2_flash": _SMALL | {"n_routed_experts": 16, "num_key_value_heads": 2, "head_dim": 96,
                               "v_head_dim": 64},
    "minimax_m2": {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 576},
    "ernie4_5_moe": {"moe_num_experts": 16, "moe_k": 4, "moe_intermediate_size": 576,
                     "moe_num_shared_experts": 1},
    "youtu": _LATENT,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LATENT | _SMALL |
                    {"n_routed_experts": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
}  # fmt: skip


def config_of(family: str, quick: bool = False) -> dict[str, Any]:
    """The `config.json` of a family's model."""
    found = {"model_type": family, **SHAPE, **(QUICK if quick else {}), **CHANGES.get(family, {})}
    if "layer_types" in found:
        found["layer_types"] = found["layer_types"][: found["num_hidden_layers"]]
    return found


@dataclass(frozen=True)
class Lengths:
    """Tokens that one sample decodes, and tokens of the prompt that another reads."""

    decode: int
    prompt: int


@dataclass(frozen=True)
class Size:
    """What one token takes of a model: bytes that decode reads, multiply-adds of prefill."""

    read_bytes: float
    macs: float


def size(checkpoint: Checkpoint, spec: DecoderSpec, lengths: Lengths) -> Size:
    """Count a checkpoint. K and V are float32; of embeddings and positions only rows are read.

    States are read and written, and take four multiply-adds an element.

    The head is multiplied with the last token of a prompt alone.
    """
    experts = spec.experts
    used = 1.0 if experts is None else experts.top_k / experts.count
    read_bytes = macs = 0.0
    for name, entry in (x for file in checkpoint.files for x in file.weights.items()):
        if name.endswith((EMBEDDING, POSITIONS, PER_LAYER)):
            continue
        part = used if is_expert(name) else 1.0
        read_bytes += part * entry.nbytes
        if isinstance(entry, QuantEntry):
            macs += part * entry.shape[0] * entry.shape[1]
    macs -= spec.vocab_size * spec.hidden_size * (1 - 1 / lengths.prompt)
    for shape in spec.state_shapes:
        read_bytes += 2 * shape.state_bytes
        macs += 4 * math.prod(shape.memory_shape)
    for window in (spec.sliding_window[layer] for layer in spec.attention_layers):
        longest = spec.max_position_embeddings if window is None else window
        read_bytes += 2 * 4 * spec.kv_rows * min(START + lengths.decode / 2, longest)
        macs += 2 * spec.q_rows * min(lengths.prompt / 2, longest)
    return Size(read_bytes, macs)


class Subject:
    """A random model of one family, all of it in memory."""

    def __init__(self, config: Mapping[str, Any], lengths: Lengths, activation_bits: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model")
            write_random_checkpoint(path, config)
            self.runtime = Runtime(path, activation_bits=activation_bits)
        self.size = size(self.runtime.checkpoint, self.runtime.spec, lengths)
        self._lengths = lengths

    def close(self) -> None:
        """Give its memory back."""
        self.runtime.close()

    def decode(self) -> Iterator[float]:
        """Seconds of each token for each byte; what is left of them is not decoded."""
        greedy = Greedy(self.runtime, tokens(self.runtime, 1, START), self._lengths.decode + 1)
        for _ in range(self._lengths.decode):
            start = perf_counter()
            greedy.step()
            yield (perf_counter() - start) / self.size.read_bytes

    def prefill(self) -> Iterator[float]:
        """Seconds of a token of a prompt for each multiply-add, once."""
        prompt = tokens(self.runtime, 1, self._lengths.prompt)
        start = perf_counter()
        Greedy(self.runtime, prompt, 1)
        yield (perf_counter() - start) / self._lengths.prompt / self.size.macs


def chosen(only: str) -> list[str]:
    """The base and the families of these names, with commas between; all without any."""
    wanted = only.split(",") if only else list(FAMILIES)
    if unknown := sorted(set(wanted) - FAMILIES.keys()):
        raise ArgumentError(f"no family is called {unknown[0]!r}; {', '.join(FAMILIES)} are")
    return [BASE, *(name for name in wanted if name != BASE)]


KINDS = ("decode", "prefill")
Call = Callable[[], Iterator[float]]


@dataclass(frozen=True)
class Compared:
    """Samples of a kind, each the median of what was measured in turn with the base.

    ratios: to the base's median beside each.
    """

    own: Samples
    ratios: Samples


def in_turn(own: Call, base: Call, rounds: int) -> Compared:
    """Measure own, base, own, base and so on, a token or a prompt each.

    Turns are as short as they can be: what a machine can do may change within a second.
    """
    medians: list[tuple[float, float]] = []
    for _ in range(rounds):
        turns = list(zip(own(), base(), strict=True))
        medians.append((median(a for a, _ in turns), median(b for _, b in turns)))
    ratios = tuple(a / b for a, b in medians)
    return Compared(Samples(tuple(a for a, _ in medians)), Samples(ratios))


def beside(subject: Subject, base: Subject, rounds: int) -> dict[str, Compared]:
    """Both kinds, by name."""
    found: dict[str, Compared] = {}
    for kind in KINDS:
        own, other = getattr(subject, kind), getattr(base, kind)
        in_turn(own, other, 1)  # compiles and allocates
        found[kind] = in_turn(own, other, rounds)
    return found


def report(
    sizes: Mapping[str, Size], found: Mapping[str, Mapping[str, Compared]], settings: dict[str, Any]
) -> Report:
    """Return table, ratios and bar. found: what `beside` has, of each family."""
    result = Report(
        "families",
        settings,
        f"random weights in one shape, {settings['threads']} threads, {settings['bits']}-bit "
        "activations; / llama: time of a byte (decode) or of a multiply-add (prefill) over Llama's",
        ("family", "MB / token", "ms / token", "/ llama", "spread",
         "prefill M macs / token", "ms / token", "/ llama", "spread"),
        unit="seconds",  # for each byte, for each multiply-add
    )  # fmt: skip
    for name, one in sizes.items():
        cells: list[str] = []
        for kind, each in zip(KINDS, (one.read_bytes, one.macs), strict=True):
            of = found[name][kind]
            result.ratios[f"{kind}, {name}"] = of.ratios.median
            result.measured[f"{kind}, {name}"] = of.own.summary()
            cells += [f"{each / 1e6:.1f}", f"{1e3 * each * of.own.median:.2f}"]
            cells += [f"{of.ratios.median:.2f}", f"{of.ratios.spread:.0%}"]
        result.rows.append((name, *cells))
    worst = max(sizes, key=lambda name: result.ratios[f"decode, {name}"])
    what = f"time of a byte at decode, {BASE} / {worst}, the slowest"
    result.bars = [Bar(what, 1 / BAR, 1 / result.ratios[f"decode, {worst}"])]
    return result


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(
        __doc__, argv, only=(str, "", "families, with commas between"),
        activation_bits=(int, 16, "16 or 8"),
    )  # fmt: skip
    lengths = Lengths(2, 8) if args.quick else Lengths(32, 128)
    sizes: dict[str, Size] = {}
    found: dict[str, dict[str, Compared]] = {}

    def subject(name: str) -> Subject:
        return Subject(config_of(name, args.quick), lengths, args.activation_bits)

    with torch_threads(1), closing(subject(BASE)) as base:
        for name in chosen(args.only):
            with closing(subject(name)) as one:
                sizes[name] = one.size
                found[name] = beside(one, base, 2 if args.quick else 9)
    settings = {"threads": torch.get_num_threads(), "bits": args.activation_bits,
                "lengths": vars(lengths), "quick": args.quick}  # fmt: skip
    report(sizes, found, settings).publish(args.out)


if __name__ == "__main__":
    main()
