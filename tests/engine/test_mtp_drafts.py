"""Drafts of a model's own layer for multi-token prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qoff.engine import LLM, SamplingParams
from qoff.engine.mtp_drafts import MtpBatch
from qoff.engine.request import Sequence
from qoff.errors import ArgumentError, BudgetError
from qoff.kvcache import KVQuant
from qoff.models.convert.convert import convert
from qoff.plan import Plan
from tests.known_drafts import cheap_passes, counts
from tests.mtp_models import reference_with_mtp, save_with_mtp, tiny_with_mtp
from tests.tiny_models import QUANT, tiny_checkpoint

__all__ = ["cheap_passes"]  # a fixture
pytestmark = pytest.mark.usefixtures("cheap_passes")
PLAN = Plan(batch_size=3, context=300, prefill_tokens=40, kv=KVQuant(window=16))
DRAFTS = replace(PLAN, draft_model="mtp", draft_tokens=3)
PROMPTS = [[5, 6, 7, 8, 9] * 20, list(range(10, 57)), [1, 2, 3], [4] * 30, [90, 91]]


@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe", "mellum", "qwen3-next-head64"])
def test_a_layer_that_knows_saves_passes(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tiny_with_mtp(tmp_path_factory.getbasetemp(), family, sure=True)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(path, PLAN, device="cpu") as llm:
        wanted = [x.token_ids for x in llm.generate(PROMPTS, params)]
    with LLM(path, DRAFTS, device="cpu") as llm:
        assert [x.token_ids for x in llm.generate(PROMPTS, params)] == wanted
        drafted, accepted = counts(llm)
        assert accepted == drafted > 50
        assert len(llm.rounds) < 60  # of 80 tokens in each slot


@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe"])
def test_what_is_drafted_is_what_transformers_layer_predicts(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A token, and further ones of what the layer itself left; hidden states come in pieces."""
    path = tiny_with_mtp(tmp_path_factory.getbasetemp(), family)
    model, mtp = reference_with_mtp(path)
    tokens = torch.randint(3, 90, (1, 61), generator=torch.Generator().manual_seed(2))
    one = Sequence(0, 0, None, tuple(tokens[0, :57].tolist()), SamplingParams(), 20)
    plan = replace(DRAFTS, kv=KVQuant(window=64))  # so that nothing is packed
    with LLM(path, plan, device="cpu") as llm, torch.inference_mode():
        hidden = model(tokens[:, :-1], output_hidden_states=True).hidden_states[-1]
        wanted, after, states = list[int](), tokens[:, 1:], hidden
        for _ in range(3):
            positions = torch.arange(after.shape[1])[None]
            left = mtp.forward_layer(0, states, positions, None, input_ids=after)[:, -1:]
            wanted.append(int(model.lm_head(left).argmax()))
            after = torch.cat((after, torch.tensor([[wanted[-1]]])), 1)
            states = torch.cat((states, left), 1)
        drafts = llm._rounds.current.opened.drafts
        assert drafts is not None
        batch = drafts.new_batch(128)
        assert isinstance(batch, MtpBatch)
        batch.note(1, one, 0, hidden[0, :40])
        batch.read_waiting()  # of a prompt, when a pass has read some of it
        batch.note(1, one, 40, hidden[0, 40:57])
        one.answer = tokens[0, 57:59].tolist()
        assert len(batch.propose({1: (one, 2)})[1]) == 2
        # A draft of three tokens was rejected at its second one.
        batch.note(1, one, 57, torch.cat((hidden[0, 57:59], hidden[0, :2])))
        one.answer = tokens[0, 57:60].tolist()
        batch.propose({1: (one, 2)})
        batch.note(1, one, 59, hidden[0, 59:])
        one.answer = tokens[0, 57:].tolist()
        assert batch.propose({1: (one, 3)}) == {1: wanted}
        assert batch.propose({1: (one, 3)}) == {1: []}  # until the model has read more


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose experts take more than all else."""
    folder = tmp_path_factory.mktemp("mixture")
    sizes = {"hidden_size": 256, "n_routed_experts": 32, "moe_intermediate_size": 256}
    save_with_mtp(folder / "model", "glm4-moe", sure=True, **sizes)
    return convert(folder / "model", folder / "checkpoint", quant=QUANT, for_cpu=True)


def test_a_layer_has_its_part_of_the_memory(mixture: Path) -> None:
    """Experts of both come one by one, and the tokens are those of a model in memory."""
    plan = replace(DRAFTS, batch_size=2, prefill_tokens=16, context=160, adapt=False)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(mixture, plan, device="cpu") as llm:
        wanted = [x.token_ids for x in llm.generate(PROMPTS, params)]
        everything = llm.memory.total("device") + llm.runtime.residency.device_weight_bytes
        whole = llm.memory_by_tier()["device"]["draft model"]
    with LLM(mixture, replace(plan, device_memory=everything * 6 // 10), device="cpu") as llm:
        assert [x.token_ids for x in llm.generate(PROMPTS, params)] == wanted
        drafts = llm._rounds.current.opened.drafts
        assert drafts is not None
        residency = drafts.executor.runtime.residency
        assert 0 < residency.expert_slots < 32
        counted = llm.memory_by_tier()["device"]["draft model"]
        assert counted == drafts.nbytes == drafts.bytes_for(llm.plan) < whole
        assert residency.device_bytes < counted
        assert sum(one.accepted for one in llm.rounds) > 20


def test_the_least_memory_is_known(mixture: Path) -> None:
    """Both stream in what an error says that they need, and not in less."""
    plan = replace(DRAFTS, batch_size=2, prefill_tokens=16, context=160, adapt=False)
    with pytest.raises(BudgetError) as failed:
        LLM(mixture, replace(plan, device_memory=0), device="cpu")
    least = failed.value.least
    assert least is not None
    with pytest.raises(BudgetError, match=f"{least:,}"):
        LLM(mixture, replace(plan, device_memory=least - 1), device="cpu")
    with LLM(mixture, replace(plan, device_memory=least), device="cpu") as llm:
        assert sum(llm.memory_by_tier()["device"].values()) <= least
        drafts = llm._rounds.current.opened.drafts
        assert drafts is not None
        assert drafts.executor.runtime.residency.streamed
        assert llm.runtime.residency.streamed


def test_prompts_that_begin_alike_are_drafted_for(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of what they share the layer sees nothing."""
    path = tiny_with_mtp(tmp_path_factory.getbasetemp(), "glm4-moe", sure=True)
    prompts = [[*range(3, 90), *range(3, 60), 5 + i] for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=2)
    found = []
    for share in (False, True):
        with LLM(path, replace(DRAFTS, share_prefixes=share), device="cpu") as llm:
            llm.generate(prompts[:1], params)
            found.append([x.token_ids for x in llm.generate(prompts, params)])
            shared = sum(one.shared for one in llm.rounds)
            drafted, accepted = counts(llm)
    assert found[0] == found[1]
    assert shared > 100
    assert accepted == drafted > 10


def test_a_checkpoint_without_such_a_layer_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    with pytest.raises(ArgumentError, match="has no layer for multi-token prediction"):
        LLM(path, DRAFTS, device="cpu")
