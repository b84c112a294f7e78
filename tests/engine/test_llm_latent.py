"""Latent attention: its packed cache, on every tier, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import qoff
from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, QoffError, UnsupportedModelError
from qoff.eval.mixing.kv_bits import measured
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference import ops as reference_ops
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.caches import check_kv
from qoff.models.runtime import Runtime
from qoff.models.spec import DecoderSpec
from qoff.models.spec_parts import IndexSpec
from tests.engine.test_llm_plans import BATCHES, PLAN, PROMPTS, QUANT, answers
from tests.tiny_models import PlainRun, tiny_checkpoint
from tests.tolerances import PACKED_ATTENTION, assert_close


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "deepseek-v3")


def test_sparse_attention_is_the_same_wherever_blocks_lie(checkpoint: Path) -> None:
    sparse = replace(QUANT, attention_top=0.4)
    resident = answers(checkpoint, replace(PLAN, kv=sparse))
    moved = replace(BATCHES, kv=sparse, kv_placement=KVPlacement(0, 0), cpu_attention="never")
    assert answers(checkpoint, moved) == resident


@pytest.mark.parametrize("bits", [4, 8, 3])
def test_a_packed_cache_is_what_the_reference_says(checkpoint: Path, bits: int) -> None:
    """Both read the same records; what differs is rounding of scores and weights."""
    found, tokens = [], torch.randint(3, 128, (230,))
    for ops in (cpu, reference_ops):
        run = PlainRun(checkpoint, ops)
        cache = run.decoder.new_cache(1, kv=KVQuant(bits, bits, window=16))
        logits = []
        for begin, end in ((0, 200), (200, 229), (229, 230)):
            ragged = Ragged.of([end - begin], [begin])
            rows = torch.arange(end - begin)
            one = ForwardPass(tokens[begin:end], ragged, cache, rows)
            logits.append(run.forward(one).clone())
        found.append(torch.cat(logits))
    assert_close(*found, tolerance=5 * PACKED_ATTENTION)


def test_a_token_of_deepseek_v3_takes_324_bytes_of_a_layer() -> None:
    form = KVFormat(576, latent=512)
    assert form.nbytes == 324 * BLOCK_TOKENS


def test_what_there_is_not_is_refused_in_a_line(checkpoint: Path) -> None:
    with pytest.raises(QoffError, match="give both the same bits, not 8 and 4") as refusal:
        qoff.load(checkpoint, kv="8,4")
    assert "\n" not in str(refusal.value)
    spec = DecoderSpec.from_config(Checkpoint.open(checkpoint).config)
    with pytest.raises(ArgumentError, match="on a GPU no token is a sink; use sinks=0"):
        check_kv(spec, replace(QUANT, sinks=2), on_device=True)
    indexed = replace(spec, index=IndexSpec(16, 64, 32, 40, (True,) * spec.num_layers))
    with pytest.raises(ArgumentError, match="an index of this model chooses"):
        check_kv(indexed, replace(QUANT, attention_top=0.4), on_device=False)
    refused = pytest.raises(UnsupportedModelError, match="values of this model are channels")
    with Runtime(checkpoint, kv=QUANT) as runtime, refused:
        measured(runtime, torch.tensor(PROMPTS[0]))
