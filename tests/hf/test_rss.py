"""Memory of a process that generates: the budget, the KV cache and a stated slack, no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from qoff.checkpoint import Checkpoint, CheckpointWriter
from qoff.kernels.layout.qtensor import QTensor
from qoff.models.layer_weights import layer_weights, outer_weights
from qoff.models.names import layer_prefix
from qoff.models.spec import DecoderSpec
from tests.kernels.operands import random_weight
from tests.programs import printed
from tests.tiny_families import VOCAB
from tests.tiny_models import save_tokenizer, tiny_checkpoint

BUDGET = 16 << 20
SLACK = 12 << 20  # stacks of threads, bounce buffers, allocators

PROGRAM = """
import json, sys, threading, time
import torch, qoff

def rss():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096

def generate(path, memory):
    model, tokenizer = qoff.load(path, device_memory=memory)
    out = model.generate(torch.full((1, 40), 5), max_new_tokens=5, min_new_tokens=5,
                         do_sample=False, return_dict_in_generate=True)
    return model, out.past_key_values.tokens.nbytes

def watch():
    global most
    while watching:
        most = max(most, rss())
        time.sleep(0.001)

warm, big, *budgets = sys.argv[1:]
generate(warm, None)[0].close()  # code and threads that any model needs
for budget in budgets:
    before, most, watching = rss(), 0, True
    thread = threading.Thread(target=watch)
    thread.start()
    model, cache = generate(big, int(budget) or None)
    watching = False
    thread.join()
    stats = model.stats()
    print(json.dumps({"growth": most - before, "cache": cache, "read": stats.disk_bytes,
                      "arena": stats.arena_peak}))
    model.close()
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of over 100 MB, whose layers have all the same weights."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=32,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        pad_token_id=0,
    ).to_dict()
    spec = DecoderSpec.from_config(config)
    path = tmp_path_factory.mktemp("rss") / "big"

    def weights(which: tuple, bits: int) -> dict[str, QTensor | torch.Tensor]:
        return {
            w.name: torch.ones(w.rows)
            if w.columns is None
            else random_weight(w.rows, w.columns, bits, packing="rows16")
            for w in which
        }

    layer = weights(layer_weights(spec, 0), 4)
    quantization = {"bits": 4, "group_size": 64, "solver": "rtn", "packing": "rows16"}
    with CheckpointWriter(path) as writer:
        for i in range(spec.num_layers):
            writer.write_layer(i, {layer_prefix(i) + name: w for name, w in layer.items()})
        writer.write_outer(weights(outer_weights(spec), 8))
        writer.finish({**config, "quantization_config": quantization})
    save_tokenizer(path)
    return path


def measure(warm: Path, big: Path, *budgets: int) -> list[dict[str, int]]:
    lines = printed("-c", PROGRAM, warm, big, *budgets).splitlines()
    return [json.loads(line) for line in lines]


def test_generating_stays_within_budget_cache_and_slack(
    big: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = Checkpoint.open(big)
    size = sum(file.nbytes for file in checkpoint.layers)
    assert size > 100e6
    warm = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")
    streamed, resident = measure(warm, big, BUDGET, 0)
    assert streamed["arena"] <= BUDGET
    assert streamed["read"] > 3 * (size - BUDGET)  # every pass streams what is not resident
    assert streamed["growth"] <= BUDGET + SLACK
    assert resident["growth"] >= 0.95 * size > BUDGET + resident["cache"] + SLACK
