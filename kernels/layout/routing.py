"""Routing: how a router's scores choose the experts of a token, and how much each counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qoff.errors import OpError

NEVER_ZERO = 1e-20  # is added to the sum that weights are divided by


@dataclass(frozen=True)
class Routing:
    """The `top_k` experts whose shares are the largest compute for a token, weighted by these.

    shares: a score becomes its part of the softmax of all ("all"), or of the chosen ones ("topk"),
    or its sigmoid ("sigmoid"); or ("mixer", SparseMixer, arXiv 2409.12136) the part of a chosen one
    of the softmax of those that were not chosen before it and are close: less than it by at most
    2 * `jitter` times their size, or its own if that is larger. Where there are groups of
    neighbouring experts, only those of the `top_groups` are chosen from: whose `group_best` best
    shares have the largest sums, 2 (arXiv 2412.19437) or 1 (arXiv 2405.04434). A
    correction of each expert is added to its share when groups and experts are chosen, and not to
    its weight. normalized: weights are divided by their sum. scale: they are multiplied by it in
    the end, and by gains of each expert, if there are any. Raises OpError for groups that there are
    not.
    """

    top_k: int
    shares: Literal["all", "topk", "sigmoid", "mixer"] = "all"
    normalized: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    group_best: int = 2
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.groups < 1 or not 1 <= self.top_groups <= self.groups:
            raise OpError(f"a token chooses from 1 to {self.groups} groups, not {self.top_groups}")
        if self.group_best not in (1, 2):
            raise OpError(f"groups are judged by 1 or 2 experts, not {self.group_best}")

    def judged(self, corrected: bool) -> bool:
        """Whether experts are chosen by other numbers than the router's scores."""
        return self.shares == "sigmoid" or corrected or self.groups > 1

    def check(self, experts: int) -> None:
        """Raise OpError unless a token can choose from so many experts."""
        if not 1 <= self.top_k <= experts:
            raise OpError(f"a token chooses 1 to {experts} experts, not {self.top_k}")
        if self.groups == 1:
            return
        each = experts // self.groups
        if experts % self.groups or each < self.group_best or each * self.top_groups < self.top_k:
            raise OpError(
                f"{experts} experts are no {self.groups} groups of which {self.top_groups} have "
                f"{self.top_k} experts for a token"
            )
