"""Recurrent layers in batches: states that are counted, and go back to before drafts alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import qoff
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM, SamplingParams
from qoff.engine.simulated.run import Driver, Simulation
from qoff.errors import ArgumentError
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.processor import usable_threads
from qoff.kvcache.store.placement import KVPlacement
from qoff.models.forward_pass import ForwardPass
from qoff.models.runtime import Runtime
from qoff.plan.native_sizes import NativeSizes
from tests.engine.test_llm_plans import BATCHES, PLAN, PROMPTS
from tests.engine.test_simulated import PLAIN_PLAN, moved, real
from tests.known_drafts import KnownDrafts, counts
from tests.plan.machines import machine
from tests.tiny_models import reference_model, tiny_checkpoint


@pytest.fixture(
    scope="module",
    params=["qwen3-next-head64", "kimi-linear", "ling3", "olmo-hybrid", "lfm2", "falcon-h1"],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), request.param)


def test_states_are_counted(checkpoint: Path) -> None:
    with LLM(checkpoint, BATCHES) as llm:
        assert llm.memory.purposes["device"]["states"] == _state_bytes(llm)


def _state_bytes(llm: LLM) -> int:
    """What there is of states in all batches."""
    batches = llm._rounds.current.opened.batches
    return sum(batch.cache.states.nbytes for batch in batches)  # type: ignore[attr-defined]


def test_rejected_drafts_leave_nothing_in_states(checkpoint: Path) -> None:
    """Drafts of which a part, all or nothing is accepted, in passes that follow one another."""
    plan = replace(PLAN, batches=2, draft_tokens=3)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [[1], *PROMPTS, PROMPTS[0][:3]]
    with LLM(checkpoint, PLAN) as llm:
        wanted = [x.token_ids for x in llm.generate(prompts, params)]
    drafts = KnownDrafts(dict(zip(map(tuple, prompts), wanted, strict=True)))
    with LLM(checkpoint, plan) as llm:
        drafts.draft_for(llm)
        assert [x.token_ids for x in llm.generate(prompts, params)] == wanted
        drafted, accepted = counts(llm)
        assert 20 < accepted < drafted - drafts.wrong < drafted - 10
        assert llm.memory.purposes["device"]["states"] == _state_bytes(llm)


@pytest.mark.parametrize("kv", [None, "8", "8/0:16"])
def test_generates_what_transformers_does(checkpoint: Path, kv: str | None) -> None:
    """With all of K and V packed, some or none, the newest ones being floats; and goes on."""
    ids = torch.tensor([PROMPTS[2][:40]])
    wanted = reference_model(checkpoint).generate(ids, max_new_tokens=12, do_sample=False)
    model, _ = qoff.load(checkpoint, kv=kv)
    with model:
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), wanted)
        cache = qoff.QoffCache(model)
        model(wanted[:, :45], past_key_values=cache)
        again = model.generate(
            wanted[:, :46], past_key_values=cache, max_new_tokens=6, do_sample=False
        )
        assert torch.equal(again, wanted)
        with pytest.raises(ArgumentError, match="cannot go back to an earlier token"):
            cache.crop(-1)
        cache.reset()
        assert torch.equal(
            model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False), wanted
        )


def test_beams_are_those_of_transformers(checkpoint: Path) -> None:
    ids = torch.tensor([PROMPTS[2][:30]])
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3}
    wanted = reference_model(checkpoint).generate(ids, **options)
    model, _ = qoff.load(checkpoint, kv=None)
    with model:
        assert torch.equal(model.generate(ids, **options), wanted)


def test_a_pass_that_ends_half_way_leaves_no_states_to_go_on_from(checkpoint: Path) -> None:
    with Runtime(checkpoint) as runtime:
        cache = runtime.new_cache(1)
        first, second = Ragged.of([3], [0]), Ragged.of([1], [3])
        runtime.forward(ForwardPass(torch.tensor([4, 5, 6]), first, cache, first.last_rows))
        step = ForwardPass(torch.tensor([7]), second, cache, second.last_rows)
        steps = runtime.decoder.steps(step)
        next(steps)
        steps.close()
        with pytest.raises(ArgumentError, match="ended half-way"):
            runtime.forward(step)
        cache.forget(3)
        again = ForwardPass(torch.tensor([4, 5, 6]), first, cache, first.last_rows)
        assert runtime.forward(again).isfinite().all()


def test_the_simulator_moves_what_the_engine_does(checkpoint: Path, tmp_path: Path) -> None:
    plan = replace(PLAIN_PLAN, spill_folder=tmp_path, kv_placement=KVPlacement(0.3, 0.3))
    with real(checkpoint, plan) as executor:
        wanted = moved(Driver(executor))
    here = replace(machine(), cores=usable_threads())
    with Simulation(NativeSizes.of_checkpoint(Checkpoint.open(checkpoint)), plan, here) as run:
        assert moved(run.driver) == wanted
        assert run.driver.executor.memory.purposes["device"]["states"] > 0
