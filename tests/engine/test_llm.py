"""Many sequences through a model: the same answers whatever the plan, and none lost."""

from __future__ import annotations

import gc
import json
import random
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from qoff.engine import LLM, SamplingParams
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.memory import plan_residency
from qoff.models import runtime
from qoff.models.native.decoder import Decoder
from qoff.plan import Plan
from tests.instruments import POISON, threads_beside
from tests.tiny_families import EOS
from tests.tiny_models import budgets

LETTERS = random.Random(3)
PROMPTS = [
    [LETTERS.randrange(4, 128) for _ in range(length)] for length in (190, 1, 64, 130, 20, 200, 33)
]
# Four of the answers complete a block, after 8 to 18 tokens.
PARAMS = SamplingParams(temperature=0, max_tokens=35, ignore_eos=True)
QUANT = KVQuant(window=16)
CONTEXT = 300


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    """The answers when everything is resident, one sequence at a time."""
    return answers(checkpoint, Plan(batch_size=1, context=CONTEXT, kv=QUANT))


def answers(checkpoint: Path, plan: Plan) -> list[tuple[int, ...]]:
    with LLM(checkpoint, plan, _instrumentation=POISON) as llm:
        found = llm.generate(PROMPTS, PARAMS)
        assert [result.index for result in found] == list(range(len(PROMPTS)))
        assert all(llm.blocks.used(tier) == 0 for tier in ("device", "host", "disk"))
    assert {result.finish_reason for result in found} == {"length"}
    return [result.token_ids for result in found]


@settings(max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    fractions=st.tuples(st.sampled_from([0, 0.3, 0.5, 1]), st.sampled_from([0, 0.4, 1])),
    batches=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    activations=st.sampled_from(["device", "host", "disk"]),
    schedule=st.sampled_from(["block", "sequential"]),
    cpu_attention=st.sampled_from(["auto", "never"]),
    prefill=st.sampled_from([200, 1000]),  # whole prompts: pieces see what is packed before them
    weights=st.sampled_from([1, 0.7, 0.5]),  # the part of them that fits
    drafts=st.sampled_from([0, 3]),
)
def test_the_answers_do_not_depend_on_the_plan(
    checkpoint: Path,
    expected: list[tuple[int, ...]],
    fractions: tuple[float, float],
    batches: tuple[int, int],
    activations: str,
    schedule: str,
    cpu_attention: str,
    prefill: int,
    weights: float,
    drafts: int,
) -> None:
    device, host = fractions
    plan = Plan(
        batch_size=batches[0],
        batches=batches[1],
        context=CONTEXT,
        prefill_tokens=prefill,
        kv=QUANT,
        kv_placement=KVPlacement(device, min(host, 1 - device)),
        cpu_attention=cpu_attention,  # type: ignore[arg-type]
        activations=activations,  # type: ignore[arg-type]
        schedule=schedule,  # type: ignore[arg-type]
        device_memory=None,
        draft_tokens=drafts,
    )
    if weights < 1:
        plan = streaming(checkpoint, plan, weights)
    assert answers(checkpoint, plan) == expected


SPARSE = replace(QUANT, attention_top=0.4)


@pytest.fixture(scope="module")
def sparse(checkpoint: Path) -> list[tuple[int, ...]]:
    """The answers of sparse attention to blocks that are resident."""
    return answers(checkpoint, Plan(batch_size=1, context=CONTEXT, kv=SPARSE))


@pytest.mark.parametrize(
    ("device", "host", "schedule"), [(0, 0, "block"), (0, 1, "sequential"), (0.3, 0.4, "block")]
)
def test_sparse_attention_is_the_same_wherever_blocks_lie(
    checkpoint: Path, sparse: list[tuple[int, ...]], device: float, host: float, schedule: str
) -> None:
    plan = Plan(
        batch_size=3,
        batches=2,
        context=CONTEXT,
        kv=SPARSE,
        kv_placement=KVPlacement(device, host),
        cpu_attention="never",
        schedule=schedule,  # type: ignore[arg-type]
    )
    assert answers(checkpoint, plan) == sparse


def streaming(checkpoint: Path, plan: Plan, part: float = 0.7) -> Plan:
    """The plan with a device that holds a part of the weights."""
    with LLM(checkpoint, plan) as llm:
        rest, weights = llm.memory.total("device"), llm.runtime.residency.device_bytes
    return replace(plan, device_memory=rest + int(weights * part))


@pytest.mark.parametrize("host", [0, 1])
def test_steps_over_blocks_that_move_are_replayed(
    checkpoint: Path, expected: list[tuple[int, ...]], host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of some sequences, then of others, too, which moves what comes behind them.

    A layer at a time, as beside passes that read prompts.
    """
    monkeypatch.setattr(runtime, "sweep_passes", lambda *_: None)
    placement = KVPlacement(0, host)
    plan = Plan(batch_size=2, batches=2, context=CONTEXT, kv=QUANT, kv_placement=placement)
    plan = replace(plan, cpu_attention="never", prefill_tokens=200)
    with LLM(checkpoint, plan, _instrumentation=POISON) as llm:
        found = llm.generate(PROMPTS[:4], PARAMS)
        decoder = llm.runtime.decoder
        assert isinstance(decoder, Decoder)
        assert decoder.replays is not None
        assert decoder.replays.replayed > 2 * 25 * llm.runtime.spec.num_layers
    assert [result.token_ids for result in found] == expected[:4]


def test_a_prompt_shorter_than_the_sinks_is_read_beside_longer_ones(checkpoint: Path) -> None:
    kv = KVQuant(window=16, sinks=48)
    alone = answers(checkpoint, Plan(batch_size=1, context=CONTEXT, kv=kv))
    assert answers(checkpoint, Plan(batch_size=7, context=CONTEXT, kv=kv)) == alone


def test_places_are_refilled_and_short_answers_come_first(checkpoint: Path) -> None:
    plan = Plan(batch_size=2, context=CONTEXT, kv=QUANT)
    lengths = [40, 3, 9, 1, 20]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    with LLM(checkpoint, plan) as llm:
        found = list(llm.stream(PROMPTS[:5], params))
        assert [len(r.token_ids) for r in sorted(found, key=lambda r: r.index)] == lengths
        assert [r.index for r in found] == [1, 2, 3, 4, 0]
        assert len(llm.rounds) <= 40  # where steps are done together, a round is several
        assert sum(r.generated for r in llm.rounds) == sum(lengths)
        assert sum(r.read for r in llm.rounds) == sum(map(len, PROMPTS[:5]))


def test_answers_of_one_prompt_share_its_blocks(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(batch_size=4, context=CONTEXT, kv=QUANT)
    with LLM(checkpoint, plan) as llm:
        params = SamplingParams(max_tokens=5, seed=1, n=4, ignore_eos=True)
        taken: list[int] = []
        allocate = llm.blocks.allocate
        monkeypatch.setattr(
            llm.blocks,
            "allocate",
            lambda indices, *rest: taken.extend(indices) or allocate(indices, *rest),
        )
        found = llm.generate([PROMPTS[5]], params)
        assert taken == [0, 1]  # of 200 tokens, 184 of which are not recent
        again = llm.generate([PROMPTS[5]], params)
    assert [r.sample for r in found] == [0, 1, 2, 3]
    assert len({r.token_ids for r in found}) > 1
    assert found == again


def test_a_greedy_fork_continues_like_the_first(
    checkpoint: Path, expected: list[tuple[int, ...]]
) -> None:
    plan = Plan(batch_size=3, context=CONTEXT, kv=QUANT)
    with LLM(checkpoint, plan) as llm:
        params = replace(PARAMS, n=3)
        found = llm.generate([PROMPTS[0]], params)
    assert [r.token_ids for r in found] == [expected[0]] * 3


def test_draws_depend_on_the_seed_alone(checkpoint: Path) -> None:
    def draws(plan: Plan, seed: int) -> list[tuple[int, ...]]:
        params = SamplingParams(
            max_tokens=12, temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, seed=seed
        )
        with LLM(checkpoint, plan) as llm:
            found = llm.generate(PROMPTS, params)
            return [r.token_ids for r in found]

    small = Plan(batch_size=1, context=CONTEXT, kv=QUANT)
    large = Plan(batch_size=3, batches=2, context=CONTEXT, kv=QUANT)
    assert draws(small, 1) == draws(large, 1) != draws(large, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9, "top_p": 0.95, "seed": 1, "min_tokens": 5},
        {"temperature": 0, "stop_token_ids": list(range(4, 128, 9)), "min_tokens": 20},
        {"temperature": 0.7, "top_k": 9, "seed": 3, "stop": ["a", "e"]},
    ],
    ids=["drawn", "end tokens", "stop texts"],
)
def test_answers_do_not_depend_on_how_many_steps_are_done_at_once(
    options: dict[str, Any], checkpoint: Path
) -> None:
    params = SamplingParams(max_tokens=40, **options)
    with LLM(checkpoint, Plan(batch_size=3, context=CONTEXT, kv=QUANT)) as llm:
        schedule: Any = llm._rounds._schedule
        found = llm.generate(PROMPTS, params)
        rounds = len(llm.rounds)
        schedule.steps = lambda *_: []
        assert llm.generate(PROMPTS, params) == found
        assert rounds < len(llm.rounds) - rounds


def test_a_seed_gives_the_same_answer_whatever_the_prompts_place(checkpoint: Path) -> None:
    with LLM(checkpoint, Plan(batch_size=4, context=CONTEXT, kv=QUANT)) as llm:
        two, one, other = (
            llm.generate(prompts, SamplingParams(max_tokens=9, seed=seed, n=n))
            for prompts, seed, n in (
                ([PROMPTS[1], PROMPTS[0], PROMPTS[0]], 7, 2),
                ([PROMPTS[0]], 7, 1),
                ([PROMPTS[0]], 8, 1),
            )
        )
    answers = [found.token_ids for found in (*two, *one, *other)]
    assert answers[2:4] == answers[4:6] == answers[6:]  # the second answer draws with seed + 1
    assert answers[6] != answers[7]


@pytest.mark.parametrize("activations", ["device", "host"])
def test_layers_larger_than_a_slot_come_in_tiles(
    activations: Any,
    checkpoint: Path,
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    least, _ = budgets(checkpoint)
    monkeypatch.setattr(
        runtime,
        "plan_residency",
        lambda path, _, *args, **kw: plan_residency(path, least, *args, **kw),
    )
    plan = Plan(batch_size=1, batches=3, context=CONTEXT, kv=QUANT, activations=activations)
    with LLM(checkpoint, plan, _instrumentation=POISON) as llm:
        assert {0, 5} <= llm.runtime.residency.tiled
        found = llm.generate(PROMPTS[:3], PARAMS)
    assert [r.token_ids for r in found] == expected[:3]


def test_ends_at_eos_and_at_stop_texts(checkpoint: Path) -> None:
    with LLM(checkpoint, Plan(batch_size=2, context=CONTEXT, kv=QUANT)) as llm:
        (free,) = llm.generate(
            ["abc"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        )
        token = free.token_ids[10]
        first = free.token_ids.index(token)
        (ended,) = llm.generate(
            ["abc"],
            SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=(token,)),
        )
        assert (ended.token_ids, ended.finish_reason) == (free.token_ids[:first], "stop")
        stop = free.text[7:10]
        (cut,) = llm.generate(
            ["abc"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop)
        )
        assert (cut.text, cut.finish_reason) == (free.text[: free.text.index(stop)], "stop")
        many = llm.generate(PROMPTS, SamplingParams(max_tokens=90, temperature=2.0))
    assert all(EOS not in r.token_ids for r in many)
    assert {r.finish_reason for r in many} <= {"stop", "length"}


def test_an_abandoned_run_gives_everything_back(checkpoint: Path) -> None:
    with LLM(checkpoint, Plan(batch_size=2, context=CONTEXT, kv=QUANT)) as llm:
        each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 90, 5)]
        results = llm.stream([PROMPTS[0], PROMPTS[5], PROMPTS[1]], each)
        next(results)
        assert llm.blocks.used("device") > 0
        results.close()
        assert llm.blocks.used("device") == 0
        assert llm.generate(PROMPTS[:1], PARAMS)[0].finish_reason == "length"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_their_answer_alone(
    wrong: float, checkpoint: Path, expected: list[tuple[int, ...]]
) -> None:
    with LLM(checkpoint, Plan(batch_size=2, context=CONTEXT, kv=QUANT)) as llm:
        schedule: Any = llm._rounds._schedule
        compute = schedule.round
        schedule.steps = lambda *_: []  # a token a round

        def damaged(passes: Any) -> Any:
            found = compute(passes)
            if len(llm.rounds) == 4:
                found[0][1, 7] = wrong
            return found

        schedule.round = damaged
        good, bad = llm.generate(PROMPTS[:2], PARAMS)
    assert (good.token_ids, good.finish_reason) == (expected[0], "length")
    assert (bad.token_ids, bad.finish_reason) == (expected[1][:4], "error")
    assert "logits are not finite" in bad.error


def test_threads_and_memory_are_given_back(checkpoint: Path) -> None:
    before = set(threading.enumerate())
    plan = Plan(context=CONTEXT, kv=QUANT, kv_placement=KVPlacement(0.2, 0.3), activations="disk")
    llm = LLM(checkpoint, plan)
    assert len(llm.generate(PROMPTS[:2], PARAMS)) == 2
    del llm
    gc.collect()
    assert threads_beside(before) == []


def test_the_trace_shows_computation_and_moves(checkpoint: Path, tmp_path: Path) -> None:
    plan = Plan(
        batch_size=2,
        batches=2,
        context=CONTEXT,
        kv=QUANT,
        kv_placement=KVPlacement(0.2, 0.4),
        cpu_attention="never",
        activations="host",
    )
    path = tmp_path / "trace.json"
    with LLM(checkpoint, streaming(checkpoint, plan), trace=path) as llm:
        llm.generate(PROMPTS, PARAMS)
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    assert {"compute", "host to device", "device to host", "host to disk"} <= lanes.keys()
    for lane in ("host to device", "host to disk"):
        moved = [e for e in events if e["ph"] == "X" and e["tid"] == lanes[lane]]
        assert sum(e["args"]["bytes"] for e in moved) > 0
    compute = [e for e in events if e["ph"] == "X" and e["tid"] == lanes["compute"]]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in pairwise(compute))


def test_the_memory_of_a_plan_is_what_the_arenas_have(checkpoint: Path) -> None:
    plan = Plan(
        batch_size=3,
        batches=2,
        context=CONTEXT,
        kv=QUANT,
        kv_placement=KVPlacement(0.25, 0.25),
        cpu_attention="never",
        activations="disk",
    )
    with LLM(checkpoint, plan) as llm:
        for tier, arena in llm.arenas.items():
            purposes = llm.memory.purposes[tier]
            assert arena.capacity == purposes["KV blocks"] + purposes["hidden states"]
            assert arena.used == arena.capacity
