"""The server on a GPU: the answers of a CPU, whoever asks or leaves meanwhile, and a clean end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff.engine import LLM, SamplingParams
from qoff.kvcache import KVPlacement, KVQuant
from qoff.models.convert.convert import convert
from qoff.plan import Plan
from tests.models.test_triton_decoder import CHANGES
from tests.tiny_models import QUANT, save_model, save_tokenizer
from tests.tolerances import FLOAT16_LOGITS, assert_close

from .conftest import OPTIONS, Running, running
from .test_hostile_clients import wait_for

pytestmark = pytest.mark.gpu

TEXTS = "/v1/completions"
# Those with a block are long enough to lie in device and host memory.
PROMPTS = [
    "".join(chr(33 + (step * i + 1) * i % 50) for i in range(length))
    for length, step in ((70, 8), (66, 30), (9, 35))
]
CLEAR = 0.2  # of logits: by less than that float16 might choose another token
PLAN = Plan(
    batch_size=2,
    batches=2,
    context=96,
    prefill_tokens=64,
    kv=KVQuant(8, 8, window=0),
    kv_placement=KVPlacement(0.5, 0.5),
    share_prefixes=True,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save_model(folder / "model", **{**CHANGES, "vocab_size": 64})
    save_tokenizer(folder / "model", 64)
    convert(folder / "model", folder / "checkpoint", quant=QUANT)
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Running]:
    with running(checkpoint, plan=PLAN, device="cuda", dtype="float16") as found:
        yield found


def ask(served: Running, path: str, **body: Any) -> Any:
    """The document; an interpreter takes its time."""
    status, found, _ = served.ask(path, body, timeout_s=300)
    assert status == 200, found
    return found


def complete(served: Running, prompt: str, **more: Any) -> list[str]:
    said = {"temperature": 0, "max_tokens": 3, "ignore_eos": True} | more
    choices = ask(served, TEXTS, prompt=prompt, **said)["choices"]
    return [one["text"] for one in choices]


@pytest.fixture(scope="module")
def on_cpu(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, PLAN, device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted(on_cpu: LLM) -> list[list[str]]:
    """The texts of a CPU, none of whose tokens is chosen by little."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2)
    found = on_cpu.generate(PROMPTS, params)
    for step in (step for one in found for step in one.logprobs or ()):
        first, second = sorted(choice.logprob for choice in step.values())[:-3:-1]
        assert first - second > CLEAR
    return [[one.text] for one in found]


def test_answers_are_those_of_a_cpu(served: Running, wanted: list[list[str]]) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        found = list(clients.map(lambda prompt: complete(served, prompt), PROMPTS))
    assert found == wanted
    assert complete(served, PROMPTS[0]) == wanted[0]  # most of which was read before

    assert complete(served, PROMPTS[2], n=2) == wanted[2] * 2


def test_vectors_are_those_of_a_cpu(served: Running, on_cpu: LLM) -> None:
    found = ask(served, "/v1/embeddings", input=PROMPTS)["data"]
    expected = [one.embedding for one in on_cpu.embed(PROMPTS)]
    bound = FLOAT16_LOGITS[PLAN.kv.k_bits]
    for one, vector in zip(found, expected, strict=True):
        assert_close(torch.tensor(one["embedding"]), torch.tensor(vector), tolerance=bound)


def test_who_leaves_in_a_round_leaves_nothing(served: Running, wanted: list[list[str]]) -> None:
    llm = served.engine.llm
    assert llm is not None
    body = json.dumps({"prompt": PROMPTS[1], "max_tokens": 25, "stream": True, "ignore_eos": True})
    with served.held() as rounds:
        with served.connect() as sock:
            head = f"POST {TEXTS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            sock.sendall((head + body).encode())
            rounds.end(2)
            rounds.under_way()
        wait_for(lambda: not served.engine.in_flight, 60)
        rounds.free()
        assert complete(served, PROMPTS[0]) == wanted[0]
        wait_for(lambda: llm.kv_used == 0, 60)


def test_a_server_that_stops_within_a_round_begins_again(
    checkpoint: Path, wanted: list[list[str]]
) -> None:
    options = replace(OPTIONS, shutdown_timeout_s=0.1)
    body = json.dumps({"prompt": PROMPTS[1], "max_tokens": 25, "ignore_eos": True})
    head = f"POST {TEXTS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with running(checkpoint, options, PLAN, device="cuda", dtype="float16") as stopped:
        llm = stopped.engine.llm
        assert llm is not None
        with stopped.connect() as sock:
            sock.sendall((head + body).encode())
            wait_for(lambda: llm.round_began is not None, 60)
            stopped.server.close()
    with running(checkpoint, options, PLAN, device="cuda", dtype="float16") as again:
        assert complete(again, PROMPTS[2]) == wanted[2]
