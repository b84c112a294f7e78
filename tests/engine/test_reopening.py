"""Another plan in the place of the one that is open: no token changes, and nothing is lost."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff.engine import LLM, SamplingParams
from qoff.engine.calls import Call
from qoff.engine.executor import CpuExecutor
from qoff.errors import BudgetError, ClosedError, QoffError
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.memory.instrumentation import Instrumentation
from qoff.plan import Plan
from tests.adapters import save_adapter
from tests.reopening import changing
from tests.tiny_models import tiny_checkpoint

PLAN = Plan(
    batch_size=4,
    batches=2,
    context=320,
    prefill_tokens=64,
    kv=KVQuant(window=16),
    kv_placement=KVPlacement(0.3, 0.3),
    activations="host",
)
NEAR = replace(PLAN, batch_size=2, batches=3, kv_placement=KVPlacement(), schedule="sequential",
               activations="device")  # fmt: skip
FAR = replace(PLAN, batch_size=7, batches=1, kv_placement=KVPlacement(0, 0), activations="device")
NUMBERS = torch.Generator().manual_seed(0)
LENGTHS = (90, 250, 40, 200, 77, 5, 130, 64, 30, 100)
PROMPTS = [torch.randint(100, (n,), generator=NUMBERS).tolist() for n in LENGTHS]
EACH = [
    SamplingParams(max_tokens=4 + i, ignore_eos=True, **how)  # type: ignore[arg-type]
    for i, how in enumerate(
        [
            {"temperature": 0, "logprobs": 2},
            {"temperature": 1, "seed": 3, "n": 3},
            {"temperature": 0, "repetition_penalty": 1.2},
            {"temperature": 0.7, "seed": 9, "top_p": 0.9, "top_k": 20},
            {"temperature": 0, "n": 4},
        ]
        * 2
    )
]


def answers(llm: LLM, **more: Any) -> list[object]:
    found = llm.generate(PROMPTS, EACH, **more)
    return [(one.index, one.sample, one.token_ids, one.logprobs) for one in found]


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[object]:
    with LLM(checkpoint, replace(PLAN, adapt=False), device="cpu") as llm:
        return answers(llm)


def test_no_token_changes(checkpoint: Path, wanted: list[object]) -> None:
    """More answers of a prompt than a batch has slots, caches and hidden states on all tiers."""
    streaming = replace(FAR, device_memory=7 << 20, kv_placement=KVPlacement(0.5, 0))
    plans = NEAR, FAR, streaming, PLAN
    with changing(*plans) as opened, LLM(checkpoint, PLAN, device="cpu") as llm:
        assert answers(llm) == wanted
        assert llm.plan == opened[-1]
        assert llm.kv_used == 0
        numbers = [one.number for one in llm.rounds]
        assert answers(llm) == wanted
    assert opened == [PLAN, NEAR, FAR, streaming, PLAN]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("with_drafts", [False, True], ids=["adapters", "drafts"])
def test_adapters_and_drafts_come_along(
    with_drafts: bool, checkpoint: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    more, plans = dict[str, Any](), [PLAN, NEAR, FAR]
    ask: dict[str, Any] = {}
    if with_drafts:
        small = str(tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64"))
        plans = [replace(one, draft_model=small, draft_tokens=3) for one in plans]
    else:
        save_adapter(checkpoint, tmp_path / "a", lora_alpha=16)
        more = {"adapters": {"none": tmp_path / "a", "a": tmp_path / "a"}}
        ask = {"adapter": ["a", None] * 5}
    with LLM(checkpoint, replace(PLAN, adapt=False), device="cpu", **more) as llm:
        wanted = answers(llm, **ask)
    with changing(*plans[1:]) as opened, LLM(checkpoint, plans[0], device="cpu", **more) as llm:
        assert answers(llm, **ask) == wanted
        assert llm.adapters == tuple(more.get("adapters", ()))
        kept = {"draft model"} if with_drafts else {"adapters"}
        assert kept <= llm.memory_by_tier()["device"].keys()
    assert len(opened) == 3


def test_shared_prefixes_are_found_again(checkpoint: Path) -> None:
    plans = [replace(one, share_prefixes=True) for one in (PLAN, NEAR)]
    prompts = [PROMPTS[1][:192] + prompt[:9] for prompt in PROMPTS * 2]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with changing(plans[1]) as opened, LLM(checkpoint, plans[0], device="cpu") as llm:
        assert len(llm.generate(prompts, params)) == len(prompts)
        read = sum(one.read for one in llm.rounds)
        assert llm.kv_used == 0
    assert len(opened) == 2
    assert read < 0.6 * sum(map(len, prompts))


def test_never_are_both_plans_in_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, most = set[int](), 0
    executors = list[weakref.ref[CpuExecutor]]()
    start = CpuExecutor.__init__

    def pages(nbytes: int) -> torch.Tensor:
        nonlocal most
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        mapped = mmap.mmap(-1, nbytes)
        key = len(there) + 1000 * most
        there.add(key)
        most = max(most, len(there))
        weakref.finalize(mapped, there.discard, key)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def noted(self: CpuExecutor, *arguments: Any, **options: Any) -> None:
        assert all(one() is None for one in executors)
        executors.append(weakref.ref(self))
        start(self, *arguments, **options)

    monkeypatch.setattr(CpuExecutor, "__init__", noted)
    arenas = list[int]()

    def opening(_: Plan) -> None:
        arenas.append(len(there))

    hooks = Instrumentation(pages=pages)
    with changing(NEAR, FAR, opening=opening):  # noqa: SIM117
        with LLM(checkpoint, PLAN, device="cpu", _instrumentation=hooks) as llm:
            answers(llm)
    assert most > 0
    assert arenas == [0, 0, 0]
    assert len(executors) == 3


@pytest.fixture
def no_leaks() -> Iterator[None]:
    folder = Path("/proc/self/fd")
    files, threads = len(list(folder.iterdir())), set(threading.enumerate())
    yield
    left = [t.name for t in set(threading.enumerate()) - threads if t.name.startswith("qoff-")]
    assert (left, len(list(folder.iterdir()))) == ([], files)


def refusing(*plans: Plan) -> Callable[[Plan], None]:
    """Refuses to open these, when another one was open."""
    before = list[Plan]()

    def opening(plan: Plan) -> None:
        before.append(plan)
        if len(before) > 1 and plan in plans:
            raise BudgetError("another program took the memory")

    return opening


@pytest.mark.usefixtures("no_leaks")
def test_a_plan_that_cannot_be_opened_leaves_the_old_one(
    checkpoint: Path, wanted: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    opening = refusing(NEAR)
    with changing(NEAR, opening=opening) as opened, LLM(checkpoint, PLAN, device="cpu") as llm:
        assert answers(llm) == wanted
        assert llm.plan == PLAN
    assert opened == [PLAN, PLAN]
    (refused, _) = caplog.messages
    assert refused.startswith("another plan cannot be opened")
    assert refused.endswith("another program took the memory")


@pytest.mark.usefixtures("no_leaks")
def test_what_fails_halfway_is_given_back(
    checkpoint: Path, wanted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_blocks = CpuExecutor._open_blocks

    def fail(self: CpuExecutor) -> Any:
        if self.plan == FAR:
            raise BudgetError("no blocks")
        return open_blocks(self)

    monkeypatch.setattr(CpuExecutor, "_open_blocks", fail)
    with changing(FAR) as opened, LLM(checkpoint, PLAN, device="cpu") as llm:
        assert answers(llm) == wanted
    assert opened == [PLAN, FAR, PLAN]


@pytest.mark.usefixtures("no_leaks")
def test_where_nothing_can_be_opened_all_callers_are_told(checkpoint: Path) -> None:
    opening = refusing(NEAR, PLAN)
    with changing(NEAR, opening=opening), LLM(checkpoint, PLAN, device="cpu") as llm:
        with ThreadPoolExecutor(2) as pool:
            for found in [pool.submit(answers, llm) for _ in range(2)]:
                with pytest.raises(QoffError, match=r"opened again.*another program took"):
                    found.result()
        with pytest.raises(ClosedError, match=r"closed.*another program took the memory"):
            answers(llm)


@pytest.mark.usefixtures("no_leaks")
def test_an_interrupted_change_is_made_by_the_next_round(
    checkpoint: Path, wanted: list[object]
) -> None:
    times = 0

    def interrupt(plan: Plan) -> None:
        nonlocal times
        times += plan == NEAR
        if plan == NEAR and times == 1:
            raise KeyboardInterrupt

    with changing(NEAR, opening=interrupt), LLM(checkpoint, PLAN, device="cpu") as llm:
        with pytest.raises(KeyboardInterrupt):
            answers(llm)
        assert llm.reopening
        assert llm.kv_used == 0
        assert llm.memory_by_tier()["host"]
        assert answers(llm) == wanted
        assert llm.plan == NEAR
    assert times == 2


def test_callers_may_come_and_go_meanwhile(checkpoint: Path) -> None:
    """One asks while a plan is opened; another one, who waits, gives up."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    late, gone, first = Call(), Call(), Call()
    found = list[LLM]()

    def opening(plan: Plan) -> None:
        if plan == NEAR:
            (llm,) = found
            assert llm.reopening
            llm.cancel(gone)
            with ThreadPoolExecutor(1) as pool:  # a round cannot ask
                pool.submit(llm.submit, [PROMPTS[2]], params, late).result()

    with changing(NEAR, opening=opening), LLM(checkpoint, PLAN, device="cpu") as llm:
        (wanted,) = llm.generate([PROMPTS[2]], replace(params, max_tokens=3))
        found.append(llm)
        llm.submit(PROMPTS[:9], params, first)
        llm.submit(PROMPTS[:1], params, gone)
        llm.work(lambda: not llm._rounds._places.calls)
        assert llm.plan == NEAR
    assert not gone.done
    assert gone.error is None
    assert late.done[0].token_ids[:3] == wanted.token_ids
