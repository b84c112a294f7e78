"""Who sequences are computed for, and how it hears of them."""

from __future__ import annotations

from collections import deque

from .request import Completion, Sequence


class Call:
    """What a caller wants: its answers, or what went wrong in a round with its sequences.

    `grew` and `failed` are called by the thread that computes a round, at the end of it. Whoever
    wants tokens as they come overrides them, calls these, too, and returns soon. follows: sequences
    like these that will be asked for later; inf where nobody knows how many. background: prompts of
    other calls are read first.
    """

    follows: float = 0.0
    background = False

    def __init__(self) -> None:
        self.left = 0  # answers that were not taken
        self.done: deque[Completion] = deque()
        self.error: BaseException | None = None

    def grew(self, sequence: Sequence, answer: Completion | None) -> None:
        """A sequence was in a round, and may have another token; answer: if it is done."""
        if answer is not None:
            self.done.append(answer)

    def failed(self, error: BaseException) -> None:
        """A round failed; none of the caller's sequences goes on."""
        self.error = error


class Vectors(Call):
    """A call whose sequences are pooled. vectors: what they gave, by the prompts' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors: dict[int, list[float]] = {}

    def grew(self, sequence: Sequence, answer: Completion | None) -> None:
        if answer is not None and not answer.error and sequence.pooled is not None:
            self.vectors[sequence.index] = sequence.pooled.vector().tolist()
        super().grew(sequence, answer)
