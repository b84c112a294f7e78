"""Guesses of routers are read where passes with them take less time than without."""

from __future__ import annotations

import pytest

from qoff.memory.experts.trial import GuessTrial, Mark


class Passes:
    """Passes of a cache, in which reading an expert takes 0.1 s.

    They miss 20, 22 and 24 experts by turns, and four more where they read guesses: tokens want
    others.
    """

    def __init__(self) -> None:
        self.trial = GuessTrial()
        self.now, self.missing, self.guesses, self.read = 0.0, 0, 0, list[bool]()

    def mark(self) -> Mark:
        return Mark(self.now, self.missing, self.guesses)

    def run(self, passes: int, with_guesses: float, without: float, guesses: int = 3) -> list[bool]:
        """Whether each of some passes read guesses; seconds beside reading what it misses."""
        for number in range(passes):
            self.trial.begin(self.mark(), 0.1)
            self.read.append(self.trial.reads)
            missing = 20 + 2 * (number % 3) + 4 * self.trial.reads
            self.missing += missing
            self.guesses += guesses
            self.now += 0.1 * missing + (with_guesses if self.trial.reads else without)
            self.trial.arrived(self.mark())
            self.now += 60.0  # until somebody asks for another pass
        return self.read[-passes:]


@pytest.mark.parametrize(("with_guesses", "better"), [(0.3, True), (0.5, False)])
def test_passes_go_on_as_they_take_less_time(with_guesses: float, better: bool) -> None:
    passes = Passes()
    tried = passes.run(33, with_guesses, 0.4)
    assert tried[:32] == [True] * 8 + [False] * 8 + [True] * 8 + [False] * 8
    assert passes.run(500, with_guesses, 0.4) == [better] * 500


def test_what_came_before_the_first_pass_is_no_pass() -> None:
    passes = Passes()
    passes.now, passes.guesses = 1e5, 3  # the machine has been up for long
    passes.trial.arrived(passes.mark())
    assert passes.run(17, 0.3, 0.4) == [True] * 8 + [False] * 8 + [True]


def test_both_are_tried_again_when_the_disk_may_be_another() -> None:
    passes = Passes()
    passes.run(33, 0.3, 0.4)
    assert False not in passes.run(511, 0.5, 0.4)
    passes.run(33, 0.5, 0.4)
    assert passes.run(100, 0.5, 0.4) == [False] * 100


def test_passes_without_guesses_tell_nothing() -> None:
    passes = Passes()
    assert False not in passes.run(100, 0.3, 0.1, guesses=0)
