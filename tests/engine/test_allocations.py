"""What a plan counts as working space is an upper bound of what passes allocate, and not by far."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qoff.engine import LLM, SamplingParams
from qoff.engine.request import Sequence as Request
from qoff.engine.sampling import LogitsRow, Sampler
from qoff.kernels.cpu.jit.pool import default_pool
from qoff.kernels.sampling import sampling_bytes
from qoff.kvcache import KVPlacement, KVQuant
from qoff.memory.instrumentation import Instrumentation
from qoff.models.convert.convert import convert
from qoff.plan import Plan
from tests.mtp_models import save_with_mtp
from tests.tiny_models import QUANT, save_model
from tests.triton_module import triton_module

KV = KVQuant(8, 8, window=0)
PLAN = Plan(batch_size=2, batches=2, context=240, prefill_tokens=210, kv=KV)
PARTS = ("recent KV", "hidden states", "working space", "states")
LENGTHS = (150, 20, 70)
SHORT = (80, 10, 66)  # where each token costs the interpreter much
PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
SIZES = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}


class Peak(TorchDispatchMode):
    """The most bytes that were alive at once of the memory that ops of torch have allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {_storage(x).data_ptr() for x in tree_leaves((args, kwargs)) if _is_memory(x)}
        result = func(*args, **(kwargs or {}))
        for x in filter(_is_memory, tree_leaves(result)):
            storage = _storage(x)
            if storage.data_ptr() not in given and storage.data_ptr() not in self._known:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        place, nbytes = storage.data_ptr(), storage.nbytes()
        self._known[place] = nbytes
        self.live += nbytes
        if self.live > self.most:
            gc.collect()  # Triton's interpreter leaves cycles with what kernels were given
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self._remove, place)

    def _remove(self, place: int) -> None:
        self.live -= self._known.pop(place)


def _is_memory(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.numel() > 0


def _storage(x: torch.Tensor) -> torch.UntypedStorage:
    return x.untyped_storage()


def counted_and_taken(
    folder: Path,
    plan: Plan,
    family: str,
    sizes: dict[str, Any],
    ops: Any = None,
    lengths: Sequence[int] = LENGTHS,
    params: SamplingParams = PARAMS,
) -> tuple[int, int]:
    """Bytes beside weights and packed blocks, which are in arenas: those of the plan, and a run."""
    save_model(folder / "model", family, **{**SIZES, **sizes})
    convert(folder / "model", folder / "checkpoint", quant=QUANT)
    return of_checkpoint(folder / "checkpoint", plan, ops, lengths, params)


def of_checkpoint(
    path: Path,
    plan: Plan,
    ops: Any = None,
    lengths: Sequence[int] = LENGTHS,
    params: SamplingParams = PARAMS,
) -> tuple[int, int]:
    """See `counted_and_taken`."""
    prompts = [[3 + i % 29 for i in range(length)] for length in lengths]
    tested = Instrumentation(ops=ops)
    peak, pool = Peak(), default_pool()
    pool.shrink()  # as at a start
    with peak, LLM(path, plan, _instrumentation=tested) as llm:
        assert len(list(llm.generate(prompts, params))) == len(prompts)
        purposes, scratch = llm.memory.purposes["device"], len(pool._workspace)
        counted = sum(purposes.get(part, 0) for part in PARTS)
        drafts = llm._rounds.current.opened.drafts
        if drafts is not None:
            own = drafts.executor
            counted += drafts.nbytes - own.memory.purposes["device"]["KV blocks"]
            counted -= own.runtime.residency.device_weight_bytes
    return counted, peak.most + scratch


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma2", "opt", "qwen3-moe", "gemma3n"),
        *("qwen3-next-head64", "kimi-linear", "ling3", "olmo-hybrid", "lfm2", "falcon-h1"),
    ],
)
def test_on_a_cpu_at_most_twice_as_much_is_counted(family: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    if family == "qwen3-next-head64":
        sizes["layer_types"] = ["linear_attention", "full_attention", "linear_attention"]
    if family == "lfm2":
        sizes["layer_types"] = ["conv", "full_attention", "conv"]
    if family == "gemma3n":
        sizes |= {"intermediate_size": [256] * 4, "num_hidden_layers": 4}
        sizes |= {"vocab_size_per_layer_input": 512}
    counted, taken = counted_and_taken(tmp_path, PLAN, family, sizes)
    assert taken <= counted <= 2 * taken


@pytest.mark.parametrize("family", ["glm4-moe", "qwen3-next-head64"])
def test_drafts_of_a_model_for_itself_are_counted(family: str, tmp_path: Path) -> None:
    """What its layer for multi-token prediction takes, too, and is given."""
    save_with_mtp(tmp_path / "model", family, sure=True, hidden_size=128, intermediate_size=256)
    convert(tmp_path / "model", tmp_path / "checkpoint", quant=QUANT)
    plan = replace(PLAN, draft_model="mtp", draft_tokens=7)
    params = replace(PARAMS, temperature=0, max_tokens=20)
    counted, taken = of_checkpoint(tmp_path / "checkpoint", plan, params=params)
    assert taken <= counted <= 2 * taken


def test_logits_of_all_passes_of_a_round_are_counted(tmp_path: Path) -> None:
    """Of a large vocabulary, and of prompts that are scored: a row for each token of a pass."""
    plan = Plan(batch_size=1, batches=4, context=64, prefill_tokens=48, draft_tokens=31, kv=KV)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 16384}
    sizes |= {"num_hidden_layers": 1}
    scored = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    counted, taken = counted_and_taken(
        tmp_path, plan, "llama", sizes, lengths=[40] * 4, params=scored
    )
    assert taken <= counted <= 2 * taken


@pytest.mark.parametrize(
    ("cpu_attention", "family"),
    [
        ("always", "llama"),
        ("never", "llama"),
        ("always", "deepseek-v3"),
        ("never", "qwen3-next-head64"),
        ("never", "kimi-linear"),
        ("never", "ling3"),
        ("never", "olmo-hybrid"),
        ("never", "gemma4-small"),
        ("never", "gemma3n"),
        ("never", "lfm2"),
        ("never", "falcon-h1"),
        ("never", "mimo-v2"),
    ],
)
def test_on_the_ops_of_a_gpu_at_most_four_times_as_much_is_counted(
    cpu_attention: Any, family: str, tmp_path: Path
) -> None:
    """As if no op freed anything before its end; without what cuBLAS takes."""
    triton_ops = triton_module("ops")
    if torch.cuda.is_available():
        pytest.skip("Triton interprets kernels only where there is no GPU")
    from qoff.kernels.triton.linear.linear import CUBLAS_BYTES

    placement = KVPlacement(0.3, 0.7)
    plan = replace(PLAN, kv_placement=placement, cpu_attention=cpu_attention)
    lengths = LENGTHS
    if family != "qwen3-next-head64":  # of whose short passes less is counted
        plan, lengths = replace(plan, prefill_tokens=100), SHORT
    sizes: dict[str, Any] = {"intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 2}
    if family == "deepseek-v3":
        sizes |= {"num_key_value_heads": 2, "head_dim": 32, "first_k_dense_replace": 2}
    if family in ("qwen3-next-head64", "kimi-linear", "ling3", "olmo-hybrid"):
        sizes["layer_types"] = ["linear_attention", "full_attention"]
    if family == "lfm2":
        sizes["layer_types"] = ["conv", "full_attention"]
    if family == "gemma3n":
        sizes |= {"num_hidden_layers": 4, "intermediate_size": [32] * 4}
        sizes |= {"vocab_size_per_layer_input": 64, "sliding_window": 40}
    if family == "mimo-v2":
        sizes |= {"head_dim": 192, "v_head_dim": 128, "mlp_layer_types": ["dense"] * 2}
        sizes |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 40}
    if family == "gemma4-small":
        kinds = ["sliding_attention", "full_attention"] * 2
        sizes |= {"num_hidden_layers": 4, "layer_types": kinds, "global_head_dim": 128}
        sizes |= {"vocab_size_per_layer_input": 64, "sliding_window": 40}
    counted, taken = counted_and_taken(tmp_path, plan, family, sizes, triton_ops, lengths)
    assert taken <= counted - CUBLAS_BYTES <= 4 * taken


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9, min_p=0.01),
        SamplingParams(top_k=6000, top_p=0.9),
        SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, logprobs=20),
    ],
    ids=["top_p", "top_k", "penalties"],
)
@pytest.mark.parametrize("count", [1, 180])
def test_choosing_tokens_takes_no_more_than_is_counted(params: SamplingParams, count: int) -> None:
    vocab, context = 6000, 64
    logits = torch.randn(count, vocab)
    prompt = tuple(range(context - 1))
    sequences = [Request(i, 0, None, prompt, params, 1) for i in range(count)]
    with Peak() as peak:
        sampler = Sampler(vocab, count, context, torch.device("cpu"))
        for place, one in enumerate(sequences):
            sampler.begin(place, one)
        sampler.draw([LogitsRow(i, one, logits[i]) for i, one in enumerate(sequences)])
    assert peak.most <= sampling_bytes(vocab, count, context, on_cpu=True) + 4 * count * context
