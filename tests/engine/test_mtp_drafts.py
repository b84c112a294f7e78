"""Drafts of a model's own layer for multi-token prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qoff.engine import LLM, SamplingParams
from qoff.engine.mtp_drafts import MtpBatch
from qoff.engine.request import Sequence
from qoff.kvcache import KVQuant
from qoff.plan import Plan
from tests.mtp_models import reference_with_mtp, tiny_with_mtp

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
        drafted = sum(one.drafted for one in llm.rounds)
        assert sum(one.accepted for one in llm.rounds) == drafted > 50
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
