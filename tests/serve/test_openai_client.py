"""The unmodified `openai` client gets from the server what `qoff.LLM` answers."""

from __future__ import annotations

import threading
import time
from typing import Any

import openai
import pytest
from openai import OpenAI

from qoff.api.requests import Asked
from qoff.engine import SamplingParams

from .conftest import MODEL, Running

CHAT: Any = [{"role": "user", "content": "Hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_a_chat_is_answered_as_the_engine_answers(client: OpenAI, served: Running) -> None:
    assert served.engine.llm is not None
    (wanted,) = served.engine.llm.chat(CHAT, PARAMS)
    without_effect: dict[str, Any] = {"user": "me", "metadata": {"a": "b"}, "store": False}
    without_effect |= {"service_tier": "auto", "logit_bias": {}, "top_p": 0}
    answer = {"role": "assistant", "content": "", "function_call": None, "refusal": None}
    sent_back = client.chat.completions.create(
        model=MODEL, messages=[*CHAT, answer, *CHAT], max_tokens=1, temperature=1e-8
    )
    assert sent_back.choices[0].finish_reason in ("length", "stop")
    found = client.chat.completions.create(model=MODEL, messages=CHAT, **GREEDY, **without_effect)
    assert found.choices[0].message.content == wanted.text
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(wanted.prompt_token_ids)
    assert found.usage.completion_tokens == 12


def test_a_stream_is_the_same_text_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert chunks[-1].usage == whole.usage
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == whole.choices[0].message.content
    assert sum(map(bool, texts)) > 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_before_it(client: OpenAI, stream: bool) -> None:
    whole = client.completions.create(model=MODEL, prompt="abc", **GREEDY).choices[0].text
    stop = whole[5:7]
    wanted = whole[: whole.index(stop)]
    if stream:
        chunks = list(
            client.completions.create(model=MODEL, prompt="abc", stop=stop, stream=True, **GREEDY)
        )
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = client.completions.create(
            model=MODEL, prompt="abc", stop=[stop], **GREEDY
        ).choices
        text, reason = choice.text, choice.finish_reason
    assert (text, reason) == (wanted, "stop")


def test_a_stop_text_that_comes_too_early_does_not_silence_a_stream(client: OpenAI) -> None:
    options: Any = {**GREEDY, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(model=MODEL, prompt="abc", **options).choices[0].text
    options |= {"stop": whole[1], "extra_body": {"ignore_eos": True, "min_tokens": 20}}
    wanted = client.completions.create(model=MODEL, prompt="abc", **options).choices[0]
    chunks = list(client.completions.create(model=MODEL, prompt="abc", stream=True, **options))
    texts = [chunk.choices[0].text for chunk in chunks]
    assert ("".join(texts), chunks[-1].choices[0].finish_reason) == (
        wanted.text,
        wanted.finish_reason,
    )
    assert sum(map(bool, texts)) > 12


def test_several_prompts_have_n_answers_each_drawn_by_seed(client: OpenAI, served: Running) -> None:
    options: Any = {"temperature": 1, "seed": 7, "n": 2, "max_tokens": 6}
    options |= {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    prompts = ["Hello", "abc"]
    found = client.completions.create(model=MODEL, prompt=prompts, **options)
    assert served.engine.llm is not None
    wanted = served.engine.llm.generate(prompts, SamplingParams(**options))
    assert [one.index for one in found.choices] == [0, 1, 2, 3]
    assert [one.text for one in found.choices] == [one.text for one in wanted]
    pieces = ["", "", "", ""]
    for chunk in client.completions.create(model=MODEL, prompt=prompts, stream=True, **options):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == [one.text for one in wanted]


def test_log_probabilities_are_those_of_the_engine(client: OpenAI, served: Running) -> None:
    assert served.engine.llm is not None
    (wanted,) = served.engine.llm.chat(
        CHAT, SamplingParams(temperature=0, max_tokens=5, logprobs=3)
    )
    for stream in (False, True):
        found: Any = client.chat.completions.create(
            model=MODEL, messages=CHAT, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3,
            stream=stream,
        )  # fmt: skip
        entries = []
        for part in found if stream else [found]:
            entries += part.choices[0].logprobs.content
        assert [one.logprob for one in entries] == pytest.approx(
            [step[token].logprob for token, step in
             zip(wanted.token_ids, wanted.logprobs or (), strict=True)], abs=1e-4
        )  # fmt: skip
        assert all(len(one.top_logprobs) == 3 for one in entries)


def test_a_document_is_made_beside_the_loop(served: Running, monkeypatch: Any) -> None:
    """And each of its tokens is decoded once: log-probabilities of a long prompt take seconds."""
    assert served.engine.llm is not None
    threads, decoded = list[str](), list[int]()
    document, tokenizer = Asked.document, served.engine.llm.tokenizer
    assert tokenizer is not None
    decode: Any = tokenizer.decode

    def decoding(tokens: list[int], **how: Any) -> Any:
        decoded.extend(tokens)
        return decode(tokens, **how)

    def making(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(tokenizer, "decode", decoding)
            return document(*args)

    monkeypatch.setattr(Asked, "document", making)
    body = {"prompt": "abcabc", "max_tokens": 1, "prompt_logprobs": 3}
    assert served.ask("/v1/completions", body)[0] == 200
    assert [one.startswith("qoff-serve-reader") for one in threads] == [True]
    assert decoded
    assert len(set(decoded)) == len(decoded)


def test_prompts_are_echoed_as_lm_eval_wants_them(client: OpenAI, served: Running) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    llm = served.engine.llm
    assert llm is not None
    prompts = [list(llm.encode(text)) for text in ("Hello there", "abc")]
    found = client.completions.create(
        model=MODEL, prompt=prompts, temperature=0, max_tokens=1, logprobs=1, echo=True
    )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    answers = llm.generate([{"prompt_token_ids": one} for one in prompts], params)
    scores = LocalCompletionsAPI.parse_logprobs(found.to_dict(), ctxlens=[2, 1])
    for (score, greedy), at, one, choice in zip(
        scores, (2, 1), answers, found.choices, strict=True
    ):
        steps = list(zip(one.prompt_token_ids, one.prompt_logprobs or (), strict=True))[at:]
        mine = [step[token] for token, step in steps if step is not None]
        assert score == pytest.approx(sum(each.logprob for each in mine), abs=1e-4)
        assert greedy == all(each.rank == 1 for each in mine)
        assert choice.logprobs is not None
        text, offsets = choice.text, choice.logprobs.text_offset or []
        pieces = [text[a:b] for a, b in zip(offsets, [*offsets[1:], None], strict=True)]
        assert pieces == choice.logprobs.tokens
    assert not any("prompt_logprobs" in one for one in found.to_dict()["choices"])  # type: ignore[attr-defined]
    both = client.completions.create(
        model=MODEL, prompt=prompts[1], max_tokens=1, logprobs=1, echo=True,
        extra_body={"prompt_logprobs": 1},
    ).choices[0]  # fmt: skip
    assert len(both.to_dict()["prompt_logprobs"]) == len(prompts[1])  # type: ignore[arg-type]
    plain = client.completions.create(model=MODEL, prompt="abc", echo=True, **GREEDY)
    assert plain.choices[0].text.startswith("abc")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="abc", echo=True, stream=True)


def test_tokens_are_made_likely_and_unlikely(client: OpenAI, served: Running) -> None:
    (token,) = served.ask("/tokenize", {"prompt": "a"})[1]["tokens"][-1:]
    options = {**GREEDY, "logit_bias": {str(token): 100}}
    found = client.completions.create(model=MODEL, prompt="abc", **options)
    assert set(found.choices[0].text) == {"a"}
    for wrong in ({"a": 1}, {"1": 200}, {"-1": 1}, {"9" * 5000: 1}, {str(10**9): 1}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt="abc", **{**GREEDY, "logit_bias": wrong})


def test_models_tokens_and_health(client: OpenAI, served: Running) -> None:
    assert [one.id for one in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    status, found, _ = served.ask("/tokenize", {"prompt": "Hello"})
    assert (status, found["count"]) == (200, len(found["tokens"]))
    assert served.ask("/detokenize", {"tokens": found["tokens"]})[1] == {"prompt": "Hello"}
    _, chat, _ = served.ask("/tokenize", {"messages": CHAT})
    assert chat["count"] > found["count"]
    assert served.ask("/health")[0] == 200


def test_metrics_count_what_was_answered(client: OpenAI, served: Running) -> None:
    def value(name: str) -> float:
        _, text, _ = served.ask("/metrics")
        return sum(
            float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)
        )

    names = ("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count",
             "vllm:inter_token_latency_seconds_count", "vllm:request_success_total",
             *(f"vllm:request_{part}_time_seconds_count"
               for part in ("queue", "prefill", "decode", "inference")))  # fmt: skip
    times = [f"vllm:request_{part}_time_seconds_sum" for part in ("queue", "inference")]
    times.append("vllm:e2e_request_latency_seconds_sum")
    spent = list(map(value, times))
    tokens = value("vllm:iteration_tokens_total_sum")
    before = [value(name) for name in names]
    client.completions.create(model=MODEL, prompt="abc", **GREEDY)
    found = [value(name) - old for name, old in zip(names, before, strict=True)]
    assert found == [12, 1, 11, 1, 1, 1, 1, 1]
    until = time.monotonic() + 10  # a round is counted when it is over, after its answers
    while value("vllm:iteration_tokens_total_sum") < tokens + 3 + 12:
        assert time.monotonic() < until
    queued, computed, whole = (value(x) - y for x, y in zip(times, spent, strict=True))
    assert 0 < queued + computed <= whole
    assert value("vllm:cache_config_info{") == 1
    assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0


def test_clients_share_rounds(served: Running, client: OpenAI) -> None:
    """Four streams at once take little more rounds than one."""
    assert served.engine.llm is not None
    rounds = served.engine.llm.rounds
    before = rounds[-1].number if rounds else -1
    found: list[str] = []

    def ask() -> None:
        options = {**GREEDY, "max_tokens": 60}
        chunks = client.completions.create(model=MODEL, prompt="abc", stream=True, **options)
        found.append("".join(chunk.choices[0].text for chunk in chunks))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert rounds[-1].number - before < 180


def test_embeddings(client: OpenAI, served: Running) -> None:
    assert served.engine.llm is not None
    wanted = [one.embedding for one in served.engine.llm.embed(["Hi", "there"])]
    found = client.embeddings.create(model=MODEL, input=["Hi", "there"])  # asks for base64
    assert [one.index for one in found.data] == [0, 1]
    assert [one.embedding for one in found.data] == [pytest.approx(one) for one in wanted]
    assert found.usage.prompt_tokens == found.usage.total_tokens > 0
    ids = [list(served.engine.llm.encode("Hi"))]
    plain = client.embeddings.create(model=MODEL, input=ids, encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(wanted[0])
    few = client.embeddings.create(model=MODEL, input="Hi", dimensions=4)
    assert sum(x * x for x in few.data[0].embedding) == pytest.approx(1)
    assert len(few.data[0].embedding) == 4
    for wrong in ({"dimensions": 100_000}, {"input": []}, {"input": "x" * 500}):
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model=MODEL, **{"input": "Hi", **wrong})  # type: ignore
