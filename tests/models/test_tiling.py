"""A model in tiles computes the same bits, in memory that no whole layer would fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.ops import Ops
from qoff.kernels.reference import ops as reference_ops
from qoff.kvcache import KVCache
from qoff.memory import (
    HEAD,
    Residency,
    Tile,
    Unit,
    WeightStore,
    plan_residency,
    residency_of,
)
from qoff.memory.plan import EMBEDDING
from qoff.models.convert.convert import convert
from qoff.models.forward_pass import ForwardPass, LayerWorkspace
from qoff.models.native.decoder import Decoder
from qoff.models.native.linear import Steps
from qoff.models.runtime import Runtime
from qoff.models.spec import DecoderSpec
from tests.instruments import POISON
from tests.memory.checkpoints import units_of
from tests.tiny_models import QUANT, budgets, save_model, save_tokenizer, take_turns
from tests.tolerances import RELATIVE_RMS, assert_close

FAMILIES = ["llama-biased", "llama-gqa-tied", "qwen3-tied"]
PACKINGS = ["rows16", "split32"]
PROMPTS = [torch.arange(5, 22), torch.tensor([99]), torch.arange(60, 40, -3)]
WIDE = {"hidden_size": 128, "intermediate_size": 416, "vocab_size": 802}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoints(family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("tiling")
    save_model(base / "model", family, **WIDE)
    save_tokenizer(base / "model", WIDE["vocab_size"])
    for packing in PACKINGS:
        convert(base / "model", base / packing, quant=QUANT, for_cpu=packing == "rows16")
    return {packing: base / packing for packing in PACKINGS}


def next_pass(
    tokens: Sequence[Tensor], cache: KVCache, workspace: LayerWorkspace | None = None
) -> ForwardPass:
    ragged = Ragged.of([len(t) for t in tokens], cache.lengths)
    rows = torch.arange(ragged.tokens)
    return ForwardPass(torch.cat(list(tokens)), ragged, cache, rows, workspace=workspace)


def run(
    decoder: Decoder,
    store: WeightStore,
    prompts: Sequence[Tensor] = PROMPTS,
    following: Sequence[int] = (7, 70),
) -> Tensor:
    """Logits of a ragged prefill and of decode steps."""
    cache = decoder.new_cache(len(prompts))
    found = [finish(decoder.steps(next_pass(prompts, cache)), store)]
    for token in following:
        one = next_pass([torch.tensor([token + i]) for i in range(len(prompts))], cache)
        found.append(finish(decoder.steps(one), store))
    return torch.cat(found)


def finish(steps: Steps, store: WeightStore, asked: list[Unit] | None = None) -> Tensor:
    unit = next(steps)
    while True:
        if asked is not None:
            asked.append(unit)
        with store.use(unit) as weights:
            try:
                following = steps.send(weights)
            except StopIteration as end:
                return end.value
        unit = following


def opened(
    checkpoint: Checkpoint, plan: Residency, ops: Ops | type[ContiguousOps] = cpu
) -> tuple[WeightStore, Decoder]:
    store = WeightStore(checkpoint, plan, instrumentation=POISON)
    spec = DecoderSpec.from_config(checkpoint.config)
    decoder = Decoder(spec, ops, lambda *ids: store.gather_rows(EMBEDDING, *ids))
    return store, decoder


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_budget_down_to_two_tiles_gives_the_same_bits(
    packing: str, checkpoints: dict[str, Path]
) -> None:
    path = checkpoints[packing]
    checkpoint = Checkpoint.open(path)
    store, decoder = opened(checkpoint, plan_residency(checkpoint, None))
    with store:
        expected = run(decoder, store)
    least, everything = budgets(path)
    counts = []
    for step in (0, 1, 2, 4, 9):
        budget = int(least * (everything / least) ** (step / 10))
        plan = plan_residency(checkpoint, budget)
        assert plan.device_bytes <= budget
        counts.append(len(plan.tiles))
        store, decoder = opened(checkpoint, plan)
        with store:
            assert torch.equal(run(decoder, store), expected)
    assert counts[0] > counts[2] > 0
    assert counts[-1] == 0


def test_the_reference_ops_in_tiles_of_split32(checkpoints: dict[str, Path]) -> None:
    checkpoint = Checkpoint.open(checkpoints["split32"])
    logits = []
    for tile in (None, 1, 30_000):
        plan = residency_of(checkpoint, [], packing="split32", tile_bytes=tile)
        assert bool(plan.tiles) == (tile is not None)
        store, decoder = opened(checkpoint, plan, reference_ops)
        with store:
            logits.append(run(decoder, store, following=[7]))
    for tiled in logits[1:]:
        assert_close(tiled, logits[0], tolerance=RELATIVE_RMS[torch.float32])


@pytest.mark.parametrize("tokens", [[17, 1], [700]], ids=str)
def test_any_batch_asks_for_the_units_of_the_store_in_order(
    tokens: list[int], checkpoints: dict[str, Path]
) -> None:
    checkpoint = Checkpoint.open(checkpoints["rows16"])
    store, decoder = opened(checkpoint, residency_of(checkpoint, [], tile_bytes=9_000))
    prompts = [torch.arange(n) for n in tokens]
    asked: list[Unit] = []
    with store:
        steps = decoder.steps(next_pass(prompts, decoder.new_cache(len(prompts))))
        assert len(finish(steps, store, asked)) == sum(tokens)
        assert tuple(asked) == units_of(store)
    assert {u.unit for u in asked if isinstance(u, Tile)} == {*range(decoder.spec.num_layers), HEAD}


class Windows:
    """Hidden states that wait elsewhere; on the device there is one window for all batches."""

    def __init__(self, window: Tensor) -> None:
        self._window = window
        self._away: Tensor | None = None

    def load(self) -> Tensor:
        assert self._away is not None
        here = self._window[: len(self._away)]
        here.copy_(self._away)
        return here

    def store(self, hidden: Tensor) -> None:
        self._away = hidden.clone()
        self._window.fill_(torch.nan)


@pytest.mark.parametrize("shared", [False, True])
def test_batches_share_tiles_windows_and_scratch(
    shared: bool, checkpoints: dict[str, Path]
) -> None:
    """Each tile serves all batches; hidden states are away, and a workspace not made for tiles."""
    checkpoint = Checkpoint.open(checkpoints["rows16"])
    prompts = [torch.arange(3 + i, 40, 2 + i) for i in range(4)]
    store, decoder = opened(checkpoint, plan_residency(checkpoint, None))
    with store:
        alone = [
            finish(decoder.steps(next_pass([p], decoder.new_cache(1))), store) for p in prompts
        ]
    store, decoder = opened(checkpoint, residency_of(checkpoint, [], tile_bytes=9_000))
    window = torch.empty(64, decoder.spec.hidden_size)
    workspace = decoder.new_workspace(64) if shared else None
    with store:
        passes = []
        for p in prompts:
            one = next_pass([p], decoder.new_cache(1), workspace)
            one.activations = Windows(window)
            passes.append(decoder.steps(one))
        finished = take_turns(passes, store)
    for found, wanted in zip(finished, alone, strict=True):
        assert torch.equal(found, wanted)


def test_a_prompt_longer_than_the_mlp_takes_at_a_time(checkpoints: dict[str, Path]) -> None:
    checkpoint = Checkpoint.open(checkpoints["rows16"])
    prompt = [torch.randint(3, 800, (n,)) for n in (700, 130)]
    logits = []
    for tile_bytes in (None, 9_000):
        store, decoder = opened(checkpoint, residency_of(checkpoint, [], tile_bytes=tile_bytes))
        with store:
            logits.append(run(decoder, store, prompt))
    assert torch.equal(*logits)


def test_a_runtime_takes_less_than_two_layers(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["split32"]
    least, _ = budgets(path)
    with Runtime(path) as whole, Runtime(path, device_memory=least) as tiled:
        assert tiled.residency.tiles
        batches = [next_pass(PROMPTS, r.new_cache(3)) for r in (whole, tiled)]
        assert torch.equal(whole.forward(batches[0]), tiled.forward(batches[1]))


class ContiguousOps:
    """Ops as on a GPU: results are theirs, and operands must be contiguous."""

    PACKING, CACHE, USES_OUT, RECORDER = cpu.PACKING, cpu.CACHE, False, None
    attention, norm = staticmethod(cpu.attention), staticmethod(cpu.norm)

    @staticmethod
    def w4_linear(x: Tensor, weight: QTensor, **options: Any) -> Tensor:
        for name in ("residual", "out", "bias"):
            assert options[name] is None or options[name].is_contiguous()
        return cpu.w4_linear(x, weight, **options)


def test_ops_that_take_contiguous_operands_only(checkpoints: dict[str, Path]) -> None:
    checkpoint = Checkpoint.open(checkpoints["rows16"])
    logits = []
    for tile_bytes, ops in ((None, cpu), (9_000, ContiguousOps), (None, ContiguousOps)):
        plan = residency_of(checkpoint, [], tile_bytes=tile_bytes)
        store, decoder = opened(checkpoint, plan, ops)
        with store:
            logits.append(run(decoder, store))
    assert torch.equal(logits[1], logits[0])
    assert torch.equal(logits[2], logits[0])
