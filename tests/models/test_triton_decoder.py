"""The decoder on the Triton ops, in the interpreter on CPU tensors, against the other ops."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, BudgetError, OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference import elementwise
from qoff.kernels.reference import ops as reference_ops
from qoff.kvcache import KVQuant
from qoff.memory import plan_residency
from qoff.memory.instrumentation import Instrumentation
from qoff.models.convert.convert import convert
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.decoder import Decoder
from qoff.models.runtime import Runtime
from tests.tiny_models import QUANT, PlainRun, save_model
from tests.tolerances import FLOAT16_LOGITS, assert_close
from tests.triton_module import triton_module

triton_ops = triton_module("ops")

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton interprets kernels only where there is no GPU"
)
KV8 = KVQuant(8, 8, window=16)
CHANGES = {
    "head_dim": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "vocab_size": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "qwen3-tied": {"num_attention_heads": 2},  # norms of heads
    "phimoe": {  # a SparseMixer, and biases everywhere
        "num_attention_heads": 2,
        "num_local_experts": 4,
        "sliding_window": 40,
        "rope_scaling": None,
    },
    "apertus": {"num_attention_heads": 2},  # an activation with numbers of its own
    "mistral-window": {"sliding_window": 40},
    "smollm3": {"num_hidden_layers": 2},  # one layer does not rotate
    "ministral3": {"num_attention_heads": 2},  # queries are scaled by position
    "gemma2": {"num_attention_heads": 2, "sliding_window": 40},
    "llama4": {  # one layer rotates, in chunks, the other has experts
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 40,
    },
    "deepseek-v3": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32},
    "glm-5": {  # one layer chooses tokens, the next goes by that, too
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "index_topk": 40,
    },
    "mistral4": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 48},
    "afmoe": {  # norms after experts, gates of attention
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 40,
    },
    "laguna": {  # gates of heads, of which layers have other numbers; scores level off
        "moe_router_logit_softcapping": 2.0,
        "num_hidden_layers": 2,
        "num_attention_heads_per_layer": [3, 2],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 40,
    },
    "step-3.5": {  # the same, and limits of gate and up
        "num_hidden_layers": 2,
        "num_sliding_attention_heads": 3,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "share_expert_dim": 32,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "swiglu_limits": [0.0, 0.03],
        "swiglu_limits_shared": [0.05, 0.04],
        "sliding_window": 40,
    },
    "mimo-v2": {  # sinks in windows alone; value heads of fewer channels than those of keys
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "head_dim": 192,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 40,
    },
    "gpt-neox": {"hidden_size": 64},  # a quarter of a head rotates
    "qwen3-next-head64": {  # linear attention, and gates of the other
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_only_layers": [0, 1],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "kimi-linear": {  # KDA, and latent attention without RoPE
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 2,
        "mlp_layer_types": ["dense", "dense"],
    },
    "ling3": {  # KDA with a floor, and latent attention with gates of heads
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense"],
    },
    "olmo-hybrid": {  # states that turn signs; norms before or after by layer
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_value_head_dim": 32,
    },
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "nemotron-h-latent": {  # Mamba, experts without a gate in a narrower space
        "num_attention_heads": 1,
        "head_dim": 64,
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
    },
    "falcon-h1": {"num_hidden_layers": 2, "mamba_n_heads": 4, "mamba_d_ssm": 64},
    "gemma3n": {  # several streams, sparse gates, K and V that others have appended
        "num_attention_heads": 2,
        "num_hidden_layers": 4,
        "intermediate_size": [32] * 4,
        "sliding_window": 40,
        "vocab_size_per_layer_input": 24,
    },
    "gemma4-moe": {  # heads of two sizes, normalized values, scaled layers
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_global_key_value_heads": 1,
        "global_head_dim": 512,
        "sliding_window": 40,
    },
    "gemma4-small": {  # embeddings of layers, and K and V that others have appended
        "num_attention_heads": 2,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_global_key_value_heads": 1,
        "global_head_dim": 512,
        "sliding_window": 40,
        "vocab_size_per_layer_input": 32,
    },
    "opt": {"hidden_size": 64, "ffn_dim": 32, "max_position_embeddings": 192},
}


def checkpoint(folder: Path, family: str = "llama") -> Path:
    """A model with heads that can be packed."""
    save_model(folder / "model", family, **{**CHANGES, **FAMILIES[family]})
    convert(folder / "model", folder / "checkpoint", quant=QUANT)
    return folder / "checkpoint"


# What the reference in float16 is off by, too: small sums of large terms, with a low soft cap.
# The reference in float16 differs from that in float32 by 0.054 in a step of gemma4-small, by
# 0.0024 in the prompt of step-3.5.
COARSER = {"gemma3n": 2, "gemma4-moe": 2, "gemma4-small": 5, "step-3.5": 2}


class Runs:
    """One model on several ops, each with a packed cache of its own; all are told the same."""

    def __init__(self, path: Path, sequences: int, kv: KVQuant = KV8, coarser: int = 1) -> None:
        self.runs = [
            PlainRun(path, triton_ops, dtype=torch.float16),
            PlainRun(path, cpu),
            PlainRun(path, reference_ops),
        ]
        self.bits, self.coarser = kv.k_bits, coarser
        self.vocab = self.runs[0].decoder.spec.vocab_size
        self.caches: list[Any] = [run.decoder.new_cache(sequences, kv=kv) for run in self.runs]

    def forward(self, counts: list[int]) -> None:
        """A pass over random tokens: all logits of the Triton run are close to the others'."""
        ragged = Ragged.of(counts, self.caches[0].lengths)
        tokens = torch.randint(3, self.vocab, (ragged.tokens,))
        packed = any(self.caches[0].packed)
        found, *others = (
            run.forward(ForwardPass(tokens, ragged, cache, torch.arange(ragged.tokens)))
            for run, cache in zip(self.runs, self.caches, strict=True)
        )
        assert found.dtype == torch.float32
        for other in others:
            tolerance = self.coarser * FLOAT16_LOGITS[self.bits if packed else 0]
            assert_close(found, other, tolerance=tolerance)

    def select(self, sequences: list[int]) -> None:
        for cache in self.caches:
            cache.select(sequences)

    def forget(self, tokens: int) -> None:
        for cache in self.caches:
            cache.forget(tokens)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program costs the interpreter much the same, however many rows it computes."""
    from qoff.kernels.triton.linear import gemv

    if torch.cuda.is_available():
        return
    config = gemv.GemvConfig(block_n=256, warps=1)
    monkeypatch.setattr(gemv, "choose", lambda *_: config)


@interpreted
def test_prefill_decoding_over_a_block_beams_and_a_retreat(tmp_path: Path) -> None:
    runs = Runs(checkpoint(tmp_path), 2)
    runs.forward([78, 3])
    for _ in range(4):  # a block is packed when it has left the window of 16 tokens
        runs.forward([1, 1])
    assert runs.caches[0].packed == runs.caches[1].packed == [64, 0]
    runs.select([1, 0, 0])
    runs.forward([1, 1, 1])
    runs.forget(40)
    runs.forward([2, 90, 1])
    runs.forward([1, 1, 1])


@interpreted
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_other_families(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long passes are rotated by the reference: a program of the kernel turns but one token."""
    attention = triton_module("attention.op")
    rope = attention.rope
    monkeypatch.setattr(
        attention, "rope", lambda x, *rest: (elementwise.rope if len(x) > 32 else rope)(x, *rest)
    )
    runs = Runs(checkpoint(tmp_path, family), 3, coarser=COARSER.get(family, 1))
    runs.forward([81, 1, 5])
    runs.forward([1, 1, 1])
    runs.forward([1, 45, 2])


@interpreted
def test_four_bits_and_no_window(tmp_path: Path) -> None:
    runs = Runs(checkpoint(tmp_path), 1, KVQuant(4, 4, window=0))
    runs.forward([64])
    runs.forward([1])


@pytest.mark.parametrize("family", ["deepseek-v3", "gemma4-moe"])
def test_attention_to_a_part_of_the_blocks_that_no_kernel_does_is_refused(
    tmp_path: Path, family: str
) -> None:
    run = PlainRun(checkpoint(tmp_path, family), triton_ops, dtype=torch.float16)
    with pytest.raises(ArgumentError, match=r"latents, or with heads of over 256 .*device='cpu'"):
        run.decoder.new_cache(1, kv=replace(KV8, attention_top=0.5))


def test_a_cache_without_bits_is_refused(tmp_path: Path) -> None:
    run = PlainRun(checkpoint(tmp_path), triton_ops, dtype=torch.float16)
    with pytest.raises(ArgumentError, match="KVQuant"):
        run.decoder.new_cache(1)


@interpreted
def test_greedy_tokens_are_those_of_the_reference(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    assert greedy(PlainRun(path, triton_ops, dtype=torch.float16)) == greedy(
        PlainRun(path, reference_ops)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_on_a_gpu_are_those_of_the_cpu(
    tmp_path: Path,
    family: str,
    streaming: bool,
    graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QOFF_CUDA_GRAPHS", str(int(graphs)))
    path = checkpoint(tmp_path, family)
    budget = least_budget(path, host_staging=2) if streaming else None
    how: dict[str, Any] = {"device": "cuda", "dtype": torch.float16, "device_memory": budget}
    with Runtime(path, kv=KV8) as on_cpu, Runtime(path, kv=KV8, **how) as on_gpu:
        assert greedy(on_gpu, 16) == greedy(on_cpu, 16)
        assert isinstance(on_gpu.decoder, Decoder)
        replays, plan = on_gpu.decoder.replays, on_gpu.residency
        # Nothing is recorded where experts come one by one: which compute, their choice says.
        assert (replays is not None) == (graphs and not plan.expert_slots)
        if replays is not None:
            # Layers with embeddings of their own are not recorded one by one, and no layer is
            # whose matrices come in tiles, one after another.
            one_by_one = streaming and on_gpu.spec.per_layer is not None
            whole = on_gpu.spec.num_layers - len(plan.tiled_layers)
            assert (replays.replayed > 0) == (whole > 0 and not one_by_one)
            assert not replays.failed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_logits_on_a_gpu_are_those_of_the_cpu(tmp_path: Path, dtype: torch.dtype) -> None:
    path = checkpoint(tmp_path)
    tokens, ragged = torch.randint(3, 32, (150,)), Ragged.of([149, 1], [0, 0])
    coarser = 1 if dtype == torch.float16 else 8
    with Runtime(path, kv=KV8) as on_cpu, Runtime(path, kv=KV8, device="cuda", dtype=dtype) as gpu:
        caches = on_cpu.new_cache(2), gpu.new_cache(2)
        for batch, bits in ((ragged, 0), (Ragged.of([1, 1], [149, 1]), 8)):
            expected, found = (
                run.forward(
                    ForwardPass(tokens[: batch.tokens], batch, cache, torch.arange(batch.tokens))
                )
                for run, cache in zip((on_cpu, gpu), caches, strict=True)
            )
            assert_close(found.cpu(), expected, tolerance=coarser * FLOAT16_LOGITS[bits])


def test_a_gpu_that_is_not_there_and_bad_arguments_are_refused(
    tmp_path: Path,
) -> None:
    path = checkpoint(tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(OpError, match="no GPU that torch can use"):
            Runtime(path, kv=KV8, device="cuda")
    hooks = Instrumentation(ops=triton_ops)
    with pytest.raises(ArgumentError, match="KVQuant"):
        Runtime(path, device="cuda", instrumentation=hooks)
    with pytest.raises(ArgumentError, match=r"not torch\.float32"):
        Runtime(path, kv=KV8, device="cuda", dtype=torch.float32, instrumentation=hooks)
    with pytest.raises(ArgumentError, match="no 8-bit activations on this device"):
        Runtime(path, kv=KV8, device="cuda", activation_bits=8, instrumentation=hooks)


@interpreted
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_runtime_on_the_ops_of_a_gpu(tmp_path: Path, family: str) -> None:
    """Weights of packing split32, streamed through slots, to the Triton ops.

    Of learned positions most tiles have none of a step's tokens.
    """
    path = checkpoint(tmp_path, family)
    hooks = Instrumentation(poison=True, ops=triton_ops)
    with Runtime(path, kv=KV8, device_memory=least_budget(path), instrumentation=hooks) as runtime:
        assert runtime.decoder.dtype == torch.float16
        assert greedy(runtime, 4) == greedy(PlainRun(path, triton_ops, dtype=torch.float16), 4)


def least_budget(path: Path, host_staging: int = 0) -> int:
    """The smallest budget, in steps of 4 KiB, that is not refused: as much as can be streams."""
    opened = Checkpoint.open(path)
    budget = 0
    while True:
        budget += 4096
        with contextlib.suppress(BudgetError):
            plan_residency(opened, budget, 2, packing="split32", host_staging=host_staging)
            return budget


def greedy(run: PlainRun | Runtime, tokens: int = 8) -> list[int]:
    cache = run.new_cache(1) if isinstance(run, Runtime) else run.decoder.new_cache(1, kv=KV8)
    found: list[int] = []
    fresh: Tensor = torch.arange(3, 20)
    for _ in range(tokens):
        ragged = Ragged.of([len(fresh)], cache.lengths)
        logits = run.forward(ForwardPass(fresh, ragged, cache, ragged.last_rows))
        fresh = logits.argmax(-1).cpu()
        found += fresh.tolist()
    return found
