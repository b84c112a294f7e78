"""The decoder's logits are those of transformers on the dequantized weights."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference import ops as reference_ops
from qoff.kvcache import PlainCache
from qoff.memory import Weights
from qoff.models.forward_pass import ForwardPass
from qoff.models.modules.structure import cache_argument
from qoff.models.native.linear import Steps
from tests.module_models import padded
from tests.tiny_families import FAMILIES
from tests.tiny_models import PlainRun, reference_model, tiny_checkpoint
from tests.tolerances import DECODER_LOGITS, LINEAR_LOGITS, RELATIVE_RMS, assert_close

OPS = [cpu, reference_ops]
DECODE_STEPS = 10
LENGTHS = (1, 21, 8)  # of the sequences of a ragged batch
KINDS = (  # of decoders
    *("llama", "gemma2", "gpt-neox", "qwen3-moe", "deepseek-v3", "llama4", "qwen3.5-moe"),
    *("gemma3n", "gemma4-moe", "gemma4-small", "lfm2-moe", "nemotron-h-latent"),
    "falcon-h1",
)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), request.param, "split32")


def tolerance(run: PlainRun, ops: ModuleType) -> float:
    """How far logits may be off: CPU ops round the inputs of matrices."""
    if ops is reference_ops:
        return RELATIVE_RMS[torch.float32]
    return LINEAR_LOGITS if run.decoder.spec.recurrent else DECODER_LOGITS


def forward(run: PlainRun, cache: PlainCache, tokens: list[Tensor]) -> Tensor:
    """Logits of all new tokens, those of one sequence after those of the other."""
    ragged = Ragged.of([len(t) for t in tokens], cache.lengths)
    batch = ForwardPass(torch.cat(tokens), ragged, cache, torch.arange(ragged.tokens))
    return run.forward(batch)


@lru_cache(1)
def inputs_and_logits(path: Path, lengths: tuple[int, ...], vocab: int) -> Any:
    """Prompts, the tokens that follow, and transformers' logits."""
    torch.manual_seed(4)  # tokens for which no two experts of any family are nearly as likely
    prompts = [torch.randint(3, vocab, (n,)) for n in lengths]
    decoded = torch.randint(3, vocab, (len(prompts), DECODE_STEPS))
    return prompts, decoded, expected_logits(path, prompts, decoded)


@torch.no_grad()
def expected_logits(path: Path, prompts: list[Tensor], decoded: Tensor) -> list[Tensor]:
    """transformers' logits of the real tokens of a prefill, and of every decode step."""
    model = reference_model(path)
    if model.config.model_type == "llama4_text" and len(prompts) > 1:
        # transformers scales its queries by their columns, padding included.
        rows = zip(prompts, decoded, strict=True)
        alone = [expected_logits(path, [prompt], row[None]) for prompt, row in rows]
        return [torch.cat(parts) for parts in zip(*alone, strict=True)]
    cache = str(cache_argument(model))
    ids, mask = padded(prompts)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
    found = [out.logits[mask.bool()]]
    for column in decoded.T[:, :, None]:
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=torch.int64)], 1)
        positions = mask.sum(1, keepdim=True) - 1
        out = model(
            column,
            attention_mask=mask,
            position_ids=positions,
            **{cache: out[cache]},
        )
        found.append(out.logits[:, 0])
    return found


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.PACKING)
def test_logits_are_those_of_transformers(checkpoint: Path, ops: ModuleType) -> None:
    compare(checkpoint, LENGTHS, ops)


@pytest.mark.parametrize("family", KINDS)
def test_so_are_those_of_one_sequence(family: str, base: Path) -> None:
    compare(tiny_checkpoint(base, family, "split32"), (17,), cpu)


def compare(path: Path, lengths: tuple[int, ...], ops: ModuleType) -> None:
    """Prompts of these lengths and the tokens that follow, in qoff and in transformers."""
    run = PlainRun(path, ops)
    vocab = run.decoder.spec.vocab_size
    prompts, decoded, (prefill, *steps) = inputs_and_logits(path, lengths, vocab)
    cache = run.decoder.new_cache(len(prompts))
    assert_close(forward(run, cache, prompts), prefill, tolerance=tolerance(run, ops))
    for column, wanted in zip(decoded.T, steps, strict=True):
        found = forward(run, cache, list(column[:, None]))
        assert_close(found, wanted, tolerance=tolerance(run, ops))
    assert cache.lengths == [n + DECODE_STEPS for n in lengths]


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.PACKING)
@pytest.mark.parametrize("first", [1, 16])
def test_a_prompt_in_two_parts_gives_the_logits_of_the_whole(
    checkpoint: Path, first: int, ops: ModuleType
) -> None:
    run = PlainRun(checkpoint, ops)
    prompt = torch.randint(3, run.decoder.spec.vocab_size, (21,))
    whole = forward(run, run.decoder.new_cache(1), [prompt])
    cache = run.decoder.new_cache(1)
    parts = [forward(run, cache, [part]) for part in (prompt[:first], prompt[first:])]
    assert_close(torch.cat(parts), whole, tolerance=tolerance(run, ops))


@pytest.mark.parametrize("family", KINDS)
def test_only_the_wanted_rows_go_through_the_end_of_the_last_layer(
    family: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PlainRun(tiny_checkpoint(tmp_path_factory.getbasetemp(), family), cpu)
    prompts = [torch.randint(3, run.decoder.spec.vocab_size, (n,)) for n in LENGTHS]
    every = forward(run, run.decoder.new_cache(3), prompts)
    ragged = Ragged.of(LENGTHS, [0, 0, 0])
    counts: list[int] = []
    layer_steps = run.decoder.layer.steps

    def counted(layer: int, weights: Weights, work: ForwardPass, *keep: Any) -> Steps:
        hidden = yield from layer_steps(layer, weights, work, *keep)
        counts.append(len(hidden))
        return hidden

    monkeypatch.setattr(run.decoder.layer, "steps", counted)
    all_rows = ragged.tokens
    for rows, left in (
        (ragged.last_rows, 3),
        (torch.tensor([], dtype=torch.int64), 1),
        (torch.tensor([5, 0]), all_rows),  # not ascending
        (torch.arange(1, all_rows), all_rows),
    ):
        work = ForwardPass(torch.cat(prompts), ragged, run.decoder.new_cache(3), rows)
        found = run.forward(work)
        assert torch.equal(found, every[rows])
        assert counts[-1] == left
        assert set(counts[:-1]) == {all_rows}
        counts.clear()
