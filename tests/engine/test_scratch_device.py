"""Passes of a round share dequantized weights on a GPU: the same answers, each matrix once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from qoff.engine import LLM, Completion
from qoff.engine.schedule import Schedule
from qoff.kernels.layout.qtensor import QTensor
from qoff.kvcache.store.placement import DEVICE
from qoff.plan import Plan
from tests.engine.test_llm_device import ON_GPU, PARAMS, checkpoint, few_programs, where
from tests.engine.test_llm_device import PLAN as DEVICE_PLAN
from tests.models.test_triton_decoder import least_budget
from tests.triton_module import triton_module

linear, scratches = triton_module("linear.linear"), triton_module("linear.scratch")

__all__ = ["checkpoint", "few_programs", "where"]  # fixtures, the last with pytest.mark.gpu
PROMPTS = [[5, 9, 3, 7, 8], [4] * 9, [6, 3], [11, 12, 13, 14, 15, 16], [8, 7, 6]]
PLAN = replace(DEVICE_PLAN, prefill_tokens=8)  # pieces, beside steps
MATRICES = 2 * 4 + 1  # of two layers and the head


def w4_linear(x: Tensor, weight: QTensor, bias: None, end: Any, scratch: Any) -> Tensor:
    """`linear.w4_linear`, where all products are of dequantized matrices."""
    if not len(x):
        out: Tensor = end.target(x, weight)
        return out
    found: Tensor = scratches.through_scratch(x, weight, bias, end, scratch)
    return found


@pytest.fixture
def rounds(few_programs: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each round: its passes, and how often something was dequantized; on any GPU."""
    found: list[tuple[int, int]] = []
    launches = 0
    dequantize, compute = scratches.dequantize_into, Schedule.round

    def dequantize_into(*operands: Any) -> None:
        nonlocal launches
        launches += 1
        dequantize(*operands)

    def counted(schedule: Schedule, passes: Sequence[Any]) -> list[Tensor]:
        before = launches
        logits = compute(schedule, passes)
        found.append((len(passes), launches - before))
        return logits

    monkeypatch.setattr(linear, "way", lambda *_: scratches.ScratchConfig)
    monkeypatch.setattr(linear, "w4_linear", w4_linear)
    monkeypatch.setattr(scratches, "dequantize_into", dequantize_into)
    monkeypatch.setattr(Schedule, "round", counted)
    return found


def answers(llm: LLM) -> list[Completion]:
    return llm.generate(PROMPTS, replace(PARAMS, logprobs=1))


def streaming(checkpoint: Path, plan: Plan, where: dict[str, Any]) -> Plan:
    """With as little memory as can be: layers take turns in two slots."""
    with LLM(checkpoint, plan, **where) as llm:
        weights = least_budget(checkpoint, 2 if ON_GPU else 0)
        return replace(plan, device_memory=llm.memory.total(DEVICE) + weights)


@pytest.mark.parametrize("streams", [False, True], ids=["resident", "streaming"])
def test_each_matrix_is_dequantized_once_a_round(
    streams: bool,
    checkpoint: Path,
    where: dict[str, Any],
    rounds: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QOFF_CUDA_GRAPHS", "0")  # whose steps go through all layers by themselves
    alone = replace(PLAN, schedule="sequential")
    with LLM(checkpoint, alone, **where) as llm:
        expected = answers(llm)
        assert llm.runtime.scratch is not None
    assert rounds
    for passes, launches in rounds:  # the head has nothing to do for a piece before a prompt's last
        assert passes * (MATRICES - 1) <= launches <= passes * MATRICES
    plan = streaming(checkpoint, PLAN, where) if streams else PLAN
    rounds.clear()
    with LLM(checkpoint, plan, **where) as llm:
        scratch = llm.runtime.scratch
        assert isinstance(scratch, scratches.Scratch)
        assert answers(llm) == expected
        assert scratch._memory is not None
        assert scratch._memory.nbytes == scratch.held
        assert not scratch._kept
        if streams:
            assert llm.runtime.store.stats.bytes_read > 0
    assert {passes for passes, _ in rounds} >= {2, 3}
    assert {launches for passes, launches in rounds if passes > 1} == {MATRICES}


@pytest.mark.skipif(ON_GPU, reason="a GPU records in the tests above")
def test_recorded_steps_share_them_too(
    checkpoint: Path, where: dict[str, Any], rounds: list[tuple[int, int]]
) -> None:
    """Their recordings are chosen by what there is; here they are the work itself."""
    hooks = replace(where["_instrumentation"], record=lambda work: work)
    where = {**where, "_instrumentation": hooks}
    with LLM(checkpoint, replace(PLAN, schedule="sequential"), **where) as llm:
        expected = answers(llm)
    with LLM(checkpoint, streaming(checkpoint, PLAN, where), **where) as llm:
        replays = llm.runtime.decoder.replays  # type: ignore[union-attr]
        for _ in range(3):
            before = replays.replayed
            rounds.clear()
            assert answers(llm) == expected
        assert replays.replayed > before
        assert not replays.failed
    assert {launches for passes, launches in rounds if passes > 1} == {MATRICES}
