"""The throughput engine on the ops of a GPU: the same answers wherever blocks, hidden states and
weights are, and no byte that the plan does not count.

Without a GPU everything is in CPU tensors, and Triton interprets the kernels.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.engine import LLM, Completion, SamplingParams
from qoff.engine.batch import BatchSlots
from qoff.errors import DiskReadError
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.reference.experts import activate
from qoff.kvcache import DeviceCache, KVPlacement, KVQuant
from qoff.kvcache.device.blocks import DeviceBlocks
from qoff.kvcache.device.cache import DeviceCachePass
from qoff.kvcache.device.prefetch import BlockPrefetcher, PrefetchedBlocks
from qoff.kvcache.device.write_back import WriteBackQueue
from qoff.kvcache.store.placement import DEVICE, DISK, HOST
from qoff.kvcache.store.ring import BlockRing
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.models.convert.convert import convert
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.decoder import Decoder
from qoff.plan import Plan
from tests.instruments import POISON
from tests.links import Link, behind
from tests.models.test_triton_decoder import CHANGES, least_budget
from tests.tiny_models import QUANT, save_model
from tests.triton_module import interpret_few, triton_module

triton_ops = triton_module("ops")

ON_GPU = torch.cuda.is_available()
LETTERS = random.Random(3)
PROMPTS = [[LETTERS.randrange(3, 32) for _ in range(length)] for length in (126, 20, 200)]
# The first answer completes a block.
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
KV = KVQuant(8, 8, window=0, layers={1: (4, 8)})  # records of two sizes
PLAN = Plan(batch_size=2, batches=2, context=208, prefill_tokens=210, kv=KV)
SPARSE = replace(KV, attention_top=0.3)
THIRDS = KVPlacement(0.34, 0.33)
PIECES = replace(PLAN, prefill_tokens=100)  # with blocks behind them


@pytest.fixture(scope="module", params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of an `LLM` on the ops of a GPU."""
    if request.param == "gpu":
        return {"device": "cuda", "_instrumentation": POISON}
    if ON_GPU:
        pytest.skip("Triton interprets kernels only where there is no GPU")
    return {"_instrumentation": replace(POISON, ops=triton_ops)}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, which takes long for each program, only attention and cache are Triton's.

    The decoder's tests run it on all kernels.
    """
    if not ON_GPU:
        interpret_few(monkeypatch, w4_linear)


def w4_linear(x: Tensor, weight: QTensor, bias: None, end: Any, scratch: int) -> Tensor:
    """`kernels.triton.linear.linear.w4_linear` in torch, rows for themselves."""
    y = (x.float()[:, None] * weight.dequantize()).sum(-1)
    y = activate(y, "silu") if end.silu_mul else y
    y = (y if end.residual is None else y + end.residual).to(x.dtype)
    return y if end.out is None else end.out.copy_(y)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device")
    save_model(folder / "model", **{**CHANGES, "num_hidden_layers": 2, "num_attention_heads": 2})
    convert(folder / "model", folder / "checkpoint", quant=QUANT)
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def expected(checkpoint: Path, where: dict[str, Any]) -> Callable[[Plan], list[Completion]]:
    """The answers with everything on the device, by how prompts are cut."""
    found: dict[int, list[Completion]] = {}

    def look_up(plan: Plan) -> list[Completion]:
        if plan.prefill_tokens not in found:
            with LLM(checkpoint, replace(PLAN, prefill_tokens=plan.prefill_tokens), **where) as llm:
                found[plan.prefill_tokens] = answers(llm)
        return found[plan.prefill_tokens]

    return look_up


def answers(llm: LLM) -> list[Completion]:
    return llm.generate(PROMPTS, PARAMS)


def blocks_of(llm: LLM) -> tuple[DeviceBlocks, TieredBlocks, BlockPrefetcher | None]:
    """The blocks on the device, the others, and what these pass through."""
    resident = llm.blocks
    assert isinstance(resident, DeviceBlocks)
    assert isinstance(resident.offloaded, TieredBlocks)
    return resident, resident.offloaded, resident.prefetcher


def assert_nothing_held(llm: LLM) -> None:
    """No block is used, no slot taken, no write-back on its way."""
    resident, offloaded, prefetcher = blocks_of(llm)
    assert (resident.pool.used, offloaded.used(HOST), offloaded.used(DISK)) == (0, 0, 0)
    assert resident.write_back is not None
    assert not resident.write_back._taken
    assert not resident.write_back._sent
    assert resident.write_back.nbytes == 4 * write_back_bytes(llm)  # it has not grown
    for ring in (offloaded.ring, *([] if prefetcher is None else [prefetcher.ring])):
        assert len(ring._free) == len(ring.slots)
        assert not ring._ahead


def write_back_bytes(llm: LLM) -> int:
    """Bytes of one of the two places, on one of its two sides."""
    assert llm.memory.on_gpu is not None
    ((_, blocks),) = llm.memory.on_gpu.groups
    return blocks.write_back_bytes


@pytest.mark.parametrize(
    "plan",
    [
        replace(
            PLAN,
            kv_placement=THIRDS,
            cpu_attention="never",
            activations="host",
            schedule="sequential",
        ),
        replace(PLAN, kv_placement=THIRDS, activations="disk"),
        replace(PLAN, kv_placement=KVPlacement(0, 0), cpu_attention="never", device_memory=0),
        replace(PIECES, kv_placement=KVPlacement(0.34, 0.66), activations="host"),
        replace(PIECES, kv_placement=KVPlacement(0, 0.34), cpu_attention="always", device_memory=0),
        replace(PIECES, kv_placement=THIRDS, draft_tokens=3),
    ],
    ids=["moved-row", "disk", "moved-disk-streaming", "auto", "always-streaming", "drafted"],
)
def test_the_answers_do_not_depend_on_the_plan(
    plan: Plan,
    checkpoint: Path,
    where: dict[str, Any],
    expected: Callable[[Plan], list[Completion]],
) -> None:
    if plan.device_memory is not None:  # as little as can be beside what the plan takes
        with LLM(checkpoint, replace(plan, device_memory=None), **where) as llm:
            weights = least_budget(checkpoint, 2 if ON_GPU else 0)
            plan = replace(plan, device_memory=llm.memory.total(DEVICE) + weights)
    with LLM(checkpoint, plan, **where) as llm:
        assert [r.token_ids for r in answers(llm)] == [r.token_ids for r in expected(plan)]
        assert_nothing_held(llm)
        prefetcher = blocks_of(llm)[2]
        reads_whole = plan.cpu_attention == "auto" and plan.prefill_tokens > plan.context
        assert (prefetcher is None) == (reads_whole or plan.cpu_attention == "always")
        if plan.device_memory is not None:
            assert llm.runtime.store.stats.bytes_read > 0


def test_steps_are_replayed_with_the_same_answers(
    checkpoint: Path,
    where: dict[str, Any],
    expected: Callable[[Plan], list[Completion]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those that pack a block, with empty slots, of sequences that end and begin."""
    passes: list[bool] = []
    decode = BatchSlots.decode

    def counted(batch: BatchSlots) -> ForwardPass | None:
        run = decode(batch)
        passes.append(run is not None)
        return run

    monkeypatch.setattr(BatchSlots, "decode", counted)
    hooks = where["_instrumentation"]
    if not ON_GPU:
        hooks = replace(hooks, record=importlib.import_module("tests.tape").record)
    with LLM(checkpoint, PLAN, **{**where, "_instrumentation": hooks}) as llm:
        decoder = llm.runtime.decoder
        assert isinstance(decoder, Decoder)
        replays = decoder.replays
        assert replays is not None
        for _ in range(2):  # what kernels are told, they are told in the first
            before, passes[:] = replays.replayed, []
            assert [r.token_ids for r in answers(llm)] == [r.token_ids for r in expected(PLAN)]
        assert sum(passes) > 3
        assert replays.replayed - before == sum(passes)
        assert not replays.failed


def test_attention_to_a_part_of_the_blocks(
    checkpoint: Path, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answers alone, in batches, by steps that are replayed, and wherever blocks lie."""
    chosen: list[int] = []
    decode = triton_module("attention.decode")
    select = decode.select_blocks

    def watched(*arguments: Any) -> Any:
        found = select(*arguments)
        chosen.append(0 if found is None else int(found.counts.max()))
        return found

    if not ON_GPU:  # nothing waits for a GPU within a recording
        monkeypatch.setattr(decode, "select_blocks", watched)
    alone = replace(PLAN, kv=SPARSE, batch_size=1, batches=1)
    hooks = where["_instrumentation"]
    if not ON_GPU:
        hooks = replace(hooks, record=importlib.import_module("tests.tape").record)
    with LLM(checkpoint, alone, **where) as llm:
        expected = [r.token_ids for r in answers(llm)]
    together = replace(PLAN, kv=SPARSE)
    with LLM(checkpoint, together, **{**where, "_instrumentation": hooks}) as llm:
        assert [r.token_ids for r in answers(llm)] == expected
    if not ON_GPU:
        assert max(chosen) == 1  # of at most 3 blocks
    for placement in (THIRDS, KVPlacement(0, 1), KVPlacement(0, 0)):
        with LLM(checkpoint, replace(together, kv_placement=placement), **where) as llm:
            assert [r.token_ids for r in answers(llm)] == expected
            assert_nothing_held(llm)


def test_where_attention_to_far_blocks_is(
    checkpoint: Path, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of prompts take the blocks to the device, single tokens go to the blocks."""
    moved: list[int] = []
    takes = BlockPrefetcher.takes

    def watched(prefetcher: BlockPrefetcher, blocks: list[int], rows: int) -> bool:
        found = takes(prefetcher, blocks, rows)
        moved.append(rows if found else -rows)
        return found

    monkeypatch.setattr(BlockPrefetcher, "takes", watched)
    plan = replace(PIECES, kv_placement=THIRDS, batch_size=1, batches=1)
    with LLM(checkpoint, plan, **where) as llm:
        llm.generate([[*PROMPTS[2], *PROMPTS[1][:4]]], PARAMS)
    assert moved == [200, -8, *[-2] * 3]


def test_prompts_that_begin_alike_share_blocks_of_all_batches(
    checkpoint: Path, where: dict[str, Any]
) -> None:
    prompts = [[*PROMPTS[2][:130], *tail] for tail in ([7, 8, 9], [9], [], [10] * 30)]
    plan = replace(PLAN, kv_placement=THIRDS, share_prefixes=True, batch_size=2)
    with LLM(checkpoint, plan, **where) as llm:
        found = llm.generate(prompts, PARAMS)
        assert sum(r.read for r in llm.rounds) == 133 + 3 + 2 + 32
        assert_nothing_held(llm)
        (alone,) = llm.generate(prompts[:1], PARAMS)
    assert found[0].token_ids == alone.token_ids
    assert [len(r.token_ids) for r in found] == [4] * 4


def test_answers_of_one_prompt_are_forks_of_its_sequence(
    checkpoint: Path, where: dict[str, Any], expected: Callable[[Plan], list[Completion]]
) -> None:
    plan = replace(PLAN, kv_placement=KVPlacement(0, 0.5), cpu_attention="never")
    with LLM(checkpoint, plan, **where) as llm:
        found = llm.generate(PROMPTS[:1], replace(PARAMS, n=2))
        assert_nothing_held(llm)
    assert [r.token_ids for r in found] == [expected(plan)[0].token_ids] * 2


@pytest.mark.parametrize(
    ("cpu_attention", "kv"),
    [("auto", KV), ("always", KV), ("never", KV), ("auto", SPARSE)],
    ids=["auto", "always", "never", "sparse"],
)
def test_the_memory_of_a_plan_is_what_is_allocated(
    cpu_attention: Any, kv: KVQuant, checkpoint: Path, where: dict[str, Any]
) -> None:
    plan = replace(PIECES, kv_placement=THIRDS, cpu_attention=cpu_attention, activations="disk")
    plan = replace(plan, kv=kv)
    with LLM(checkpoint, plan, **where) as llm:
        for tier, arena in llm.arenas.items():
            purposes = llm.memory.purposes[tier]
            parts = ("KV blocks", "KV on the move", "hidden states")
            assert arena.capacity == sum(purposes[part] for part in parts)
            assert arena.used == arena.capacity
        purposes = llm.memory.purposes[DISK]
        assert purposes["KV blocks"] > 0
        cache = llm._executor.new_cache()
        assert isinstance(cache, DeviceCache)
        rings = cache.rings.nbytes
        assert llm.memory.purposes[DEVICE]["recent KV"] == plan.batches * rings
        assert llm.memory_by_tier()[DEVICE]["weights"] == llm.runtime.residency.device_bytes


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [{"kv_placement": THIRDS}, {"kv": SPARSE}, {"kv": SPARSE, "kv_placement": THIRDS}],
    ids=["offloaded", "sparse", "both"],
)
def test_no_more_of_the_gpu_is_taken_than_the_plan_says(
    changes: dict[str, Any], checkpoint: Path
) -> None:
    plan = replace(PIECES, **changes)
    before = torch.cuda.memory_allocated()
    with LLM(checkpoint, plan, device="cuda") as llm:
        torch.cuda.reset_peak_memory_stats()
        answers(llm)
        taken = torch.cuda.max_memory_allocated() - before
        assert taken <= sum(llm.memory_by_tier()[DEVICE].values())


PLACES = [
    (DeviceCachePass, "open"),
    (DeviceCachePass, "close"),
    (DeviceCachePass, "end"),
    (PrefetchedBlocks, "open"),
    (BlockPrefetcher, "bring"),
    (BlockRing, "use"),
    (WriteBackQueue, "take"),
    (WriteBackQueue, "deliver"),
    (TieredBlocks, "write"),
]


@pytest.fixture(scope="module")
def moving(checkpoint: Path, where: dict[str, Any]) -> Iterator[LLM]:
    plan = replace(PIECES, kv_placement=THIRDS, cpu_attention="never", activations="host")
    with LLM(checkpoint, plan, **where) as llm:
        yield llm


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda x: getattr(x, "__name__", x))
def test_an_interrupted_pass_gives_everything_back(
    owner: type, name: str, moving: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = getattr(owner, name), 2

    def method(this: Any, *rest: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return real(this, *rest, **options)

    monkeypatch.setattr(owner, name, method)
    with pytest.raises(KeyboardInterrupt):
        answers(moving)
    assert_nothing_held(moving)


def test_after_interruptions_the_answers_are_the_same(
    moving: LLM, expected: Callable[[Plan], list[Completion]]
) -> None:
    assert answers(moving) == expected(moving.plan)


class Broken(Link):
    """A link to the device over which nothing comes any more, once it is broken."""

    def __init__(self) -> None:
        super().__init__(1e12)
        self.broken = False

    def pass_through(self, nbytes: int) -> None:
        if self.broken:
            raise SystemExit(1)


@pytest.mark.skipif(ON_GPU, reason="links to a GPU are not simulated")
def test_a_copier_that_dies_is_an_error(checkpoint: Path) -> None:
    link = Broken()
    plan = replace(PIECES, kv_placement=THIRDS, cpu_attention="never")
    hooks = behind(host=link, hooks=replace(POISON, ops=triton_ops))
    with LLM(checkpoint, plan, _instrumentation=hooks) as llm:
        results = llm.stream(PROMPTS, PARAMS)
        link.broken = True
        with pytest.raises(DiskReadError, match="died"):
            list(results)
        assert_nothing_held(llm)
