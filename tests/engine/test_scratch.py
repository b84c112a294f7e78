"""What a run asks of the pool's workspace, at most, is what its plan has counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import qoff
from qoff.engine import LLM, SamplingParams
from qoff.hf.budget import shared_bytes
from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kvcache import KVPlacement, KVQuant
from qoff.models.convert.convert import convert
from qoff.models.modules import pass_bytes
from qoff.models.modules.decoder import ModuleDecoder
from qoff.models.native.caches import head_shapes
from qoff.models.native.decoder import Decoder
from qoff.models.native.scratch import scratch_bytes
from qoff.plan import Memory, Plan
from tests.adapters import save_adapter
from tests.module_models import module_checkpoint
from tests.tiny_models import QUANT, save_model, tiny_checkpoint

PLAN = Plan(batch_size=3, batches=2, context=700, prefill_tokens=120, kv=KVQuant(window=16))
PROMPTS = [[3 + i % 29 for i in range(length)] for length in (650, 20, 130, 1, 64)]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.1, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 0},
]
HEAD64 = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is asked of pools."""
    found, taken = list[int](), Pool.workspace

    def workspace(self: Pool, nbytes: int) -> int:
        found.append(nbytes)
        return taken(self, nbytes)

    monkeypatch.setattr(Pool, "workspace", workspace)
    return found


def answered(llm: LLM, adapter: str | None = None, prompts: Sequence[list[int]] = PROMPTS) -> None:
    params = [SamplingParams(max_tokens=20, ignore_eos=True, **way) for way in WAYS]
    each = [params[i % 3] for i in range(len(prompts))]
    for some, how in ((prompts, each), (prompts[1:4], params[1]), (prompts[1:4], params[2])):
        assert not any(one.error for one in llm.generate(some, how, adapter=adapter))


def counted(llm: LLM) -> int:
    decoder, plan = llm.runtime.decoder, llm.plan
    assert isinstance(decoder, Decoder)
    passes = plan.passes(decoder.spec.vocab_size, llm.runtime.residency.in_parts)
    forms = plan.kv.packed_forms(decoder.head_shapes)
    return scratch_bytes(decoder.spec, decoder.head_shapes, forms, passes)


_KDA = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense"],
}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"activation_bits": 8, "draft_tokens": 3}),
    ("llama", {}, {"kv": KVQuant(8, 8, 32, sinks=16, attention_top=0.5)}),
    ("llama", {}, {"kv_placement": KVPlacement(0.3, 0.3), "kv": KVQuant(window=0)}),
    ("gemma2", {"sliding_window": 100}, {}),
    ("qwen3-moe", {}, {}),
    ("qwen3-next-head64", {}, {"prefill_tokens": 64}),
    ("kimi-linear", _KDA, {"prefill_tokens": 64}),
    ("ling3", _KDA, {"prefill_tokens": 64}),
    ("olmo-hybrid", {}, {"prefill_tokens": 64}),
    ("lfm2-moe", {"num_dense_layers": 3}, {"prefill_tokens": 64}),
    ("nemotron-h-latent", {"num_attention_heads": 2, "head_dim": 64}, {"prefill_tokens": 64}),
    ("falcon-h1", {}, {"prefill_tokens": 64}),
    ("mimo-v2", {"head_dim": 192, "v_head_dim": 128}, {"prefill_tokens": 64}),
    ("deepseek-v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, {"prefill_tokens": 16}),
    ("glm-5", {"index_topk": 100}, {"prefill_tokens": 64}),
]


@pytest.mark.parametrize(("family", "sizes", "changes"), CASES)
def test_no_op_asks_for_more_than_a_plan_counts(
    family: str, sizes: dict[str, Any], changes: dict[str, Any], asked: list[int], tmp_path: Path
) -> None:
    own = (
        "deepseek",
        "glm-5",
        "qwen3-next",
        "kimi",
        "ling",
        "olmo-hybrid",
        "lfm2",
        "nemotron",
        "falcon",
        "mimo",
    )
    more = {} if family.startswith(own) else HEAD64
    save_model(tmp_path / "model", family, **more, **sizes)
    convert(tmp_path / "model", tmp_path / "checkpoint", quant=QUANT)
    plan = replace(PLAN, **changes)
    with LLM(tmp_path / "checkpoint", plan, device="cpu") as llm:
        answered(llm)
        whole = counted(llm)
        assert max(asked) <= whole <= (2 if plan.activation_bits == 16 else 5) * max(asked)
        spec, weights = llm.runtime.spec, llm.runtime.residency.device_bytes
    # Where layers stream in tiles; of more tokens working space is more than these weights.
    small = replace(plan, prefill_tokens=2, batches=1, draft_tokens=0)
    beside = Memory.of(small, spec, head_shapes(spec), tiled=True).total("device")
    asked.clear()
    bounded = replace(small, device_memory=beside + weights // 2)
    with LLM(tmp_path / "checkpoint", bounded, device="cpu") as llm:
        assert not llm.runtime.store.all_resident
        answered(llm, prompts=[PROMPTS[i] for i in (4, 3, 1)])  # two tokens at a time
        assert max(asked) <= counted(llm)


def test_adapters_ask_for_what_is_counted_with_them(
    asked: list[int], base: Path, tmp_path: Path
) -> None:
    path = tiny_checkpoint(base, "llama-head64")
    save_adapter(path, tmp_path / "adapter", r=400)
    with LLM(path, PLAN, device="cpu", adapters={"a": str(tmp_path / "adapter")}) as llm:
        alone = counted(llm)
        answered(llm, "a")
        adapters = llm._executor.adapters
        assert adapters is not None
        work = adapters.work_bytes(PLAN.pass_tokens, PLAN.decode_tokens, False)
    assert alone < max(asked) <= alone + work


@pytest.mark.parametrize("kv", [None, 4, KVQuant(8, 4, 16, {1: (16, 16)})], ids=str)
def test_generate_asks_for_no_more_than_a_budget_counts(
    kv: Any, asked: list[int], base: Path
) -> None:
    model, _ = qoff.load(tiny_checkpoint(base, "llama-head64"), kv=kv)
    with model:
        decoder = model.runtime.decoder
        assert isinstance(decoder, Decoder)
        for rows, length, draws in ((1, 230, False), (3, 60, True)):
            asked.clear()
            ids = torch.randint(3, 120, (rows, length))
            model.generate(ids, do_sample=draws, max_new_tokens=20, eos_token_id=None)
            quant = None if kv is None else model.runtime.kv
            assert max(asked) <= shared_bytes(decoder, quant, rows, length, rows, length + 20)


@pytest.mark.parametrize("kv", [None, 4], ids=str)
def test_modules_ask_for_no_more_than_they_count(kv: Any, asked: list[int], base: Path) -> None:
    model, _ = qoff.load(module_checkpoint(base, "stablelm-head64"), kv=kv)
    with model:
        decoder = model.runtime.decoder
        assert isinstance(decoder, ModuleDecoder)
        model.generate(torch.randint(3, 100, (2, 100)), max_new_tokens=3, do_sample=False)
        assert max(asked) <= pass_bytes.scratch_bytes(decoder, 2, 100, 103)


def test_a_closed_llm_gives_the_workspace_back(base: Path) -> None:
    path = tiny_checkpoint(base, "llama-head64")
    with LLM(path, PLAN, device="cpu") as other:
        other.generate(PROMPTS[1:3], SamplingParams(max_tokens=5))
        with LLM(path, PLAN, device="cpu") as llm:
            answered(llm)
            assert len(default_pool()._workspace)
        assert not len(default_pool()._workspace)
        answered(other)  # whose recordings know it
