"""The page at `/`: what it is made of, what it reads, and what it does in a browser."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qoff.engine.round_stats import RoundStats
from qoff.kernels.layout.heads import HeadShape
from qoff.kvcache.quant import KVFormat
from qoff.kvcache.store.placement import DEVICE
from qoff.plan import Plan
from qoff.plan.gpu import device_block_plans
from qoff.serve.page import PAGE
from qoff.serve.stats import WINDOW_S, memory, recent

from .chromium import Browser, found
from .conftest import OPTIONS, Running, running

ENTER, ESCAPE = ("Enter", 13), ("Escape", 27)
TEXT = PAGE.read_text()


def round_of(ended: float, seconds: float = 1.0, **more: float) -> RoundStats:
    names = ("weights_wait_s", "kv_wait_s", "activations_wait_s", "disk_bytes", "host_bytes",
             "spilled_bytes")  # fmt: skip
    return RoundStats(0, 10, 20, 0, 0, seconds, **(dict.fromkeys(names, 0.0) | more), ended=ended)


def test_it_asks_nobody_else() -> None:
    assert not re.findall(r"(?:https?:)?//[a-z]|@import|url\(|\ssrc=|innerHTML", TEXT)
    assert re.findall(r'\shref="([^"#][^"]*)"', TEXT) == ["data:,"]


def test_browsers_run_no_other_script(served: Running) -> None:
    status, text, headers = served.ask("/")
    assert (status, text) == (200, TEXT)
    assert headers["content-type"].startswith("text/html")
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy.pop("script-src").startswith("'sha256-")
    assert policy.pop("style-src").startswith("'sha256-")
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


def test_what_it_reads_is_there(served: Running) -> None:
    paths = set(re.findall(r'fetch\("([^"]+)"', TEXT))
    assert len(paths) == 2
    for path in paths:
        assert not path.startswith("/"), "behind a proxy the page may have a path in front"
        assert served.ask(f"/{path}")[0] in (200, 405), path
    stats = served.ask("/stats")[1]
    assert stats["state"] == "ready"
    known = re.findall(r"stats\.(\w+)", TEXT)
    assert {"model", "recent", "answers", "memory"} <= set(known) <= stats.keys()
    assert set(re.findall(r"rates\.(\w+)", TEXT)) <= stats["recent"]["rates"].keys()
    assert set(re.findall(r"asked\.(\w+)", TEXT)) == stats["answers"].keys()
    shares = re.search(r"const SHARES = {(.*?)};", TEXT, re.DOTALL)
    assert shares is not None
    assert re.findall(r"(\w+): \[", shares[1]) == list(stats["recent"]["shares"])
    purposes = re.search(r"const PURPOSES = (\[.*?\])", TEXT, re.DOTALL)
    assert purposes is not None
    device = stats["memory"]["device"]
    shape, forms = HeadShape(1, 1, 64, 0.125), (KVFormat(64),)
    on_gpu = device_block_plans(Plan(), [shape], forms).tier_bytes()[DEVICE]
    names = json.loads(purposes[1])
    assert set(names) >= device["purposes"].keys() | on_gpu.keys()
    assert set(re.findall(r"--c(\d):", TEXT)) == {str(n + 1) for n in range(len(names))}
    assert device["used"] == sum(device["purposes"].values()) > 0


def test_it_is_there_while_the_model_loads_and_without_a_key(checkpoint: Path) -> None:
    from qoff.serve.engine import Engine
    from qoff.serve.server import Server

    engine = Engine("m", 4, 10)
    with Server(engine, replace(OPTIONS, api_keys=("one",))) as server:
        served = Running(server, engine)
        assert served.ask("/")[0] == 200
        assert served.ask("/stats")[0] == 401
        stats = served.ask("/stats", None, {"Authorization": "Bearer one"})[1]
        assert stats == {"model": "m", "state": "loading"}
    engine.stop()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_another_plan_of_a_cpu_divides_the_same_memory(device: str) -> None:
    residency = SimpleNamespace(
        device_weight_bytes=3, resident_bytes=2, streamed=False, expert_slots=0
    )
    found = []
    for given, there in (((100, 50), (20, 5)), ((150, None), (25, 0))):
        tiers = {
            "device": {"weights": 3, "KV blocks": there[0]},
            "host": {"weights": 0, "KV blocks": there[1]},
            "disk": {"weights": 0, "KV blocks": 0},
        }
        llm: Any = SimpleNamespace(
            device=torch.device(device),
            plan=Plan(device_memory=given[0], host_memory=given[1]),
            residency=residency,
            memory_by_tier=lambda x=tiers: x,
        )
        found.append(memory(llm))
    assert (found[0] == found[1]) == (device == "cpu")
    if device == "cpu":
        assert "host" not in found[0]
        assert (found[0]["device"]["budget"], found[0]["device"]["used"]) == (150, 28)


def test_rates_and_limits_are_of_the_last_seconds() -> None:
    rounds = [round_of(90), round_of(99), round_of(100, weights_wait_s=0.7, disk_bytes=50)]
    now = recent(rounds, 100)
    assert now["rates"]["generated_tokens"] == 40 / WINDOW_S
    assert now["rates"]["disk_bytes"] == 50 / WINDOW_S
    assert now["shares"]["idle"] == pytest.approx(1 - 2 / WINDOW_S)
    assert now["limit"] == "compute"
    assert sum(now["shares"].values()) == pytest.approx(1)
    assert recent([replace(rounds[-1], disk_bytes=0)], 100)["limit"] == "link"
    assert recent(rounds[-1:], 100)["limit"] == "disk"
    assert recent(rounds, 200)["limit"] == recent([], 200)["limit"] == "idle"
    long = recent([round_of(100, seconds=20, kv_wait_s=15)], 100)
    assert long["rates"]["generated_tokens"] == 1
    assert long["shares"]["kv"] == 0.75
    assert asdict(rounds[0])["ended"] == 90


def test_a_server_in_a_long_round_is_not_idle() -> None:
    rounds = [round_of(80, seconds=20), round_of(100, seconds=20, kv_wait_s=15)]
    assert recent(rounds, 106, began=100) == recent(rounds, 100)
    assert recent(rounds, 106)["limit"] == "idle"
    ended = [*rounds, round_of(120, seconds=20)]  # since it was looked at when the round began
    assert recent(ended, 120, began=100) == recent(rounds, 100)
    first = recent(rounds, 206, began=200)
    assert (first["limit"], first["shares"]["compute"], first["shares"]["idle"]) == (
        "compute",
        1,
        0,
    )
    assert first["rates"]["generated_tokens"] == 0


def test_it_is_known_when_a_round_is_under_way(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, seen = served.engine.llm, list[float | None]()
    assert llm is not None
    schedule: Any = llm._rounds._schedule
    compute = schedule.round
    monkeypatch.setattr(schedule, "round", lambda x: (seen.append(llm.round_began), compute(x))[1])
    start = time.perf_counter()
    status, _, _ = served.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert status == 200
    assert seen[0] is not None
    assert start < seen[0] < time.perf_counter()
    until = start + 20
    while llm.round_began is not None and time.perf_counter() < until:
        time.sleep(0.001)
    assert llm.round_began is None


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = found()
    if path is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with Browser(path) as opened:
        yield opened


def home(served: Running) -> str:
    return served.url.removesuffix("v1")


def ask(browser: Browser, text: str) -> None:
    browser.value("document.getElementById('prompt').focus()")
    browser.type(text)
    browser.press(*ENTER)


def test_a_conversation_in_a_browser(browser: Browser, served: Running) -> None:
    browser.messages.clear()
    browser.requests.clear()
    browser.open(home(served))
    browser.wait("document.getElementById('running').textContent === '0 of 4'")
    browser.value("document.getElementById('most').value = 60")
    attack = "<img src=x onerror=alert(1)> `<b>`"
    with served.slowed(0.1):
        ask(browser, attack)
        browser.wait("document.querySelector('.streaming')")
        browser.wait("document.querySelector('.streaming .said')?.textContent.length > 2")
        assert served.engine.in_flight == 1
        browser.press(*ESCAPE)
        browser.wait("!document.getElementById('send').hidden")
    browser.wait("document.querySelector('.note')?.textContent.includes('stopped')")
    shown = browser.value("document.querySelector('.user .said').textContent")
    assert shown == "<img src=x onerror=alert(1)> <b>"
    assert browser.value("document.querySelectorAll('.said img, .said b').length") == 0

    browser.open(home(served))  # what was said is there still
    assert browser.value("document.querySelectorAll('.turn').length") == 2
    browser.type("two")
    browser.press("Enter", 13, modifiers=8)
    assert browser.value("document.getElementById('prompt').value") == "two\n"
    browser.press(*ENTER)
    browser.wait("document.querySelectorAll('.assistant .note').length === 2")
    assert "tokens/s" in browser.value("document.querySelectorAll('.note')[1].textContent")
    browser.value("document.getElementById('new').click()")
    assert not browser.value("document.querySelectorAll('.turn').length")
    assert browser.messages == []
    assert all(url.startswith((home(served), "data:")) for url in browser.requests)


def test_errors_and_keys_in_a_browser(browser: Browser, checkpoint: Path) -> None:
    options = replace(OPTIONS, api_keys=("one",), read_timeout_s=5)
    with running(checkpoint, options) as served:
        browser.open(home(served), width=390, height=844, dark=True)
        browser.wait("!document.getElementById('key-row').hidden")
        browser.value("settings(false), setTimeout = (_, pause) => waits = pause, watch()")
        assert browser.value("$('settings').hidden && waits >= 5000")  # it opens them once
        ask(browser, "Hi")
        browser.wait("document.querySelector('.wrong')")
        assert browser.value("document.activeElement.id") == "key"
        assert "API key" in browser.value("document.querySelector('.wrong').textContent")
        browser.value("document.getElementById('key').focus()")
        browser.type("one")
        browser.value("document.querySelector('.wrong button').click()")
        browser.wait("document.querySelector('.assistant .note')")
        assert not browser.value("document.querySelectorAll('.wrong').length")
        browser.value("document.getElementById('strip').click()")
        assert browser.value("document.activeElement.id") == "close"
        assert browser.value("document.documentElement.scrollWidth") <= 390
        focused = "$('prompt').focus(), document.activeElement.id"
        assert browser.value(focused) == "close"  # what is covered takes no focus
        browser.press(*ESCAPE)
        assert browser.value(focused) == "prompt"
        browser.value("document.getElementById('strip').click()")
        browser.call("Emulation.setDeviceMetricsOverride", width=1280, height=800,
                     deviceScaleFactor=1, mobile=False)  # fmt: skip
        browser.wait("!document.querySelector('main').inert")


_FETCH = """
real ??= fetch, fetch = (url, options) => url === "stats" ? real(url, options) :
  new Promise((_, fail) => {
    sent = JSON.parse(options.body).messages.map(message => message.content);
    if (%s) fail(new Error("broken"));
    options.signal.onabort = () => fail(options.signal.reason);
  })"""


def test_questions_without_answers_in_a_browser(browser: Browser, served: Running) -> None:
    browser.open(home(served))
    browser.value("$('new').click(), real = sent = null")
    browser.value(_FETCH % "false")
    ask(browser, "one")
    browser.press(*ESCAPE)
    browser.wait("$('prompt').value === 'one'")  # a draft again
    assert browser.value("talk.length === 0 && !$('send').disabled")
    browser.press(*ENTER)
    browser.value("settings(true), $('system').focus(), stop()")
    browser.wait("!$('send').hidden")
    assert browser.value("document.activeElement.id") == "system"  # nobody is taken away
    browser.value(_FETCH % "true")
    browser.value("send()")
    browser.wait("document.querySelector('.wrong')")
    ask(browser, "two")
    browser.wait("document.querySelector('.wrong') && running === null && sent[0] !== 'one'")
    assert browser.value("sent") == ["two"]
    browser.value("$('temperature').value = 0.75")
    assert browser.value("$('temperature').checkValidity()")
    browser.value("$('new').click()")


_THINKING = """
real ??= fetch, fetch = (url, options) => url === "stats" ? real(url, options) :
  Promise.resolve(new Response(new ReadableStream({ start(stream) {
    emit = (delta, reason = null) => stream.enqueue(new TextEncoder().encode(
      "data: " + JSON.stringify({ choices: [{ delta, finish_reason: reason }] }) + "\\n\\n"));
    finish = () => stream.enqueue(new TextEncoder().encode("data: [DONE]\\n\\n"));
    options.signal.onabort = () => stream.error(options.signal.reason);
    sent = JSON.parse(options.body).messages;
  } })))"""


def test_thinking_in_a_browser(browser: Browser, served: Running) -> None:
    browser.messages.clear()
    browser.open(home(served), width=390, height=844)
    browser.value("$('new').click(), real = sent = emit = finish = null")
    browser.value(_THINKING)
    ask(browser, "2 + 2?")
    browser.wait("emit")
    browser.value("emit({ role: 'assistant', content: '' }), emit({ reasoning_content: 'Hm <b>' })")
    browser.wait("document.querySelector('.thought')?.open")
    assert browser.value("$('log').innerText").endswith("Hm <b>")
    summary = "document.querySelector('.thought summary')"
    assert browser.value(f"{summary}.getBoundingClientRect().height") >= 40  # a thumb's
    browser.value("emit({ content: 'Four.' })")
    browser.wait("!document.querySelector('.thought').open")
    browser.value(f"{summary}.focus()")
    browser.press(*ENTER)
    browser.wait("document.querySelector('.thought').open")
    browser.value("emit({ content: ' So.' }), emit({}, 'stop'), finish()")
    browser.wait("running === null")
    assert browser.value("document.querySelector('.thought').open")  # as the reader left it
    assert browser.value(f"document.activeElement === {summary}")
    assert browser.value("document.querySelector('.assistant > .said').textContent") == "Four. So."
    assert browser.value("document.documentElement.scrollWidth") <= 390

    ask(browser, "And?")
    browser.wait("running && sent.length === 3")
    assert browser.value("sent[1]") == {"role": "assistant", "content": "Four. So."}
    browser.value("emit({ reasoning_content: 'Hm' }), emit({}, 'length'), finish()")
    browser.wait("running === null")
    browser.open(home(served))  # what was thought is there still, open where nothing was said
    shown = "[...document.querySelectorAll('.thought')].map(one => one.open)"
    assert browser.value(shown) == [False, True]
    browser.value("$('new').click()")
    assert browser.messages == []
