"""One server in this process for all tests of a worker, with a tiny random model."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from threading import Semaphore
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from qoff.engine import LLM
from qoff.plan import Plan
from qoff.serve.options import ServeOptions
from tests.tiny_models import tiny_checkpoint

if TYPE_CHECKING:  # a machine for tests of a GPU has none of what these import
    from openai import OpenAI

    from qoff.serve.engine import Engine
    from qoff.serve.server import Server

PLAN = Plan(batch_size=4, context=200, prefill_tokens=64)
OPTIONS = ServeOptions(port=0, max_queue=4, max_request_bytes=1 << 20, read_timeout_s=0.5)
MODEL = "tiny"


class Held:
    """Rounds that end when they are told to."""

    def __init__(self) -> None:
        self._begun, self._may_end = Semaphore(0), Semaphore(0)

    def wait(self) -> None:
        """Called by a round when it has begun."""
        self._begun.release()
        assert self._may_end.acquire(timeout=20)

    def under_way(self) -> None:
        """Return as soon as a round is."""
        assert self._begun.acquire(timeout=20)
        self._begun.release()

    def end(self, rounds: int = 1) -> None:
        """Let so many rounds end, each as soon as it has begun."""
        for _ in range(rounds):
            assert self._begun.acquire(timeout=20)
            self._may_end.release()

    def free(self) -> None:
        """Let all end."""
        self._may_end.release(1 << 20)


@dataclass(frozen=True)
class Running:
    """A server that answers, and ways to ask it."""

    server: Server
    engine: Engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}/v1"

    def client(self, **options: Any) -> OpenAI:
        from openai import OpenAI

        return OpenAI(base_url=self.url, api_key="any", max_retries=0, **options)

    def ask(
        self,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        method: str | None = None,
        timeout_s: float = 20,
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, document and headers; body: JSON, or bytes as they are."""
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=timeout_s)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            method = method or ("GET" if data is None else "POST")
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            text = answer.read()
            found = {name.lower(): value for name, value in answer.getheaders()}
            is_json = text and found.get("content-type", "").startswith("application/json")
            return answer.status, json.loads(text) if is_json else text.decode(), found
        finally:
            connection.close()

    @contextmanager
    def slowed(self, seconds: float = 0.02) -> Iterator[None]:
        """A token a round, each of so many seconds and more."""
        assert self.engine.llm is not None
        schedule: Any = self.engine.llm._rounds._schedule
        compute = schedule.round
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(schedule, "round", lambda x: (time.sleep(seconds), compute(x))[1])
            patched.setattr(schedule, "steps", lambda *_: [])
            yield

    @contextmanager
    def held(self) -> Iterator[Held]:
        """A token a round, and none ends before it is told to."""
        assert self.engine.llm is not None
        schedule: Any = self.engine.llm._rounds._schedule
        compute, held = schedule.round, Held()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(schedule, "round", lambda x: (held.wait(), compute(x))[1])
            patched.setattr(schedule, "steps", lambda *_: [])
            try:
                yield held
            finally:
                held.free()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=20)


@contextmanager
def running(
    checkpoint: Path,
    options: ServeOptions = OPTIONS,
    plan: Plan = PLAN,
    files: Path | None = None,
    **options_of_llm: Any,
) -> Iterator[Running]:
    """files: folder of its files and batches; None: it has none."""
    from qoff.serve.batches import open_batches
    from qoff.serve.engine import Engine
    from qoff.serve.server import Server

    batches = None
    if files is not None:
        batches = open_batches(files, MODEL, 1 << 20, 3 << 20, options.thinking)
    engine = Engine(MODEL, options.max_queue, options.request_timeout_s, batches)
    with Server(engine, options) as server:
        engine.start(LLM(checkpoint, plan, **options_of_llm))
        try:
            yield Running(server, engine)
        finally:
            server.close()
            engine.stop()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a token for each byte, as llguidance wants them, and a template for tools."""
    path = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64"), path)
    spelled = bytes_to_unicode()
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    letters = [spelled[byte] for byte in (9, 10, *range(32, 127), *range(0xC0, 0xDB))]
    vocab = {token: i for i, token in enumerate(special + letters)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>",
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% if tools %}<tool_call>{{ tools | length }}{% endif %}"
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(checkpoint, files=tmp_path_factory.mktemp("files")) as found:
        yield found


@pytest.fixture(scope="session")
def client(served: Running) -> Iterator[OpenAI]:
    with served.client() as found:
        yield found
