"""What rounds move of a mixture of experts."""

from __future__ import annotations

import numpy as np
import pytest

from qoff.plan.certify import choices_of
from qoff.plan.cost import CostModel
from qoff.plan.manual import Plan
from qoff.plan.mixture import HELD, Mixture, Moves
from qoff.plan.phase import RESOURCES
from qoff.plan.workload import Workload

from .machines import machine, mixture


def test_moves_are_what_caches_miss_and_a_convex_curve_below() -> None:
    experts = mixture().spec.experts
    assert experts is not None
    tokens = np.array([1.0, 5.0, 64.0, 2048.0])
    made = Mixture(experts, share=0.9)
    moves, wanted = made.moves(tokens, tokens), 0.9 * made.wanted(tokens)
    for held in HELD:
        missed = wanted * (1 - made.hits(np.array([held]), tokens)[:, 0])
        np.testing.assert_allclose(moves.of(np.full(4, 0.9 * (1 - held))), missed, atol=1e-12)
    np.testing.assert_allclose(moves.of(np.ones(4)), wanted + 0.1)  # nothing stays
    assert (np.diff(moves.slopes) >= -1e-12).all()
    for part in np.linspace(0, 1, 50):
        convex = (moves.slopes * part + moves.offsets).max(-1)
        assert (convex <= moves.of(np.full(4, part)) + 1e-12).all()
    assert (moves.of(np.zeros(4)) == 0).all()


def test_all_weights_that_are_away_are_moved_where_there_are_no_experts() -> None:
    parts = np.array([0.0, 0.3, 1.0])
    np.testing.assert_allclose(Moves.all_of(3).of(parts), parts)


def test_a_disk_with_no_weights_on_it_is_not_read() -> None:
    work, plan = Workload(), Plan(context=640)
    cost = CostModel(mixture(True), machine(True), work, plan.kv, 2)
    for phase in (cost.prefill(choices_of(plan)), cost.decode(choices_of(plan))):
        busy = phase.busy(np.array([[0.5, 0.0, 0.0, 0.0]]))
        assert busy[0, RESOURCES.index("disk read")] == 0


def test_experts_that_the_cpu_computes_leave_their_share_of_what_moves() -> None:
    share, parts = 0.8, np.array([0.0, 0.1, 0.3])
    away = np.array([0.0, share, 1.0])
    moves = Moves(away, np.array([[0.0, 0.4, 0.6]] * 3), np.ones((3, 1)), np.zeros((3, 1)), share)
    assert moves.beside(parts, np.zeros(3)) == pytest.approx(moves.of(parts))
    # Half of the experts compute there: the others' half of what is wanted, all of them away.
    assert moves.beside(np.full(3, 0.4), np.full(3, 0.4)) == pytest.approx(np.full(3, 0.2))
    # And what is no expert moves whole.
    assert moves.beside(np.full(3, 0.5), np.full(3, 0.4)) == pytest.approx(np.full(3, 0.3))
    assert moves.beside(np.zeros(3), np.full(3, share)) == pytest.approx(np.zeros(3))
