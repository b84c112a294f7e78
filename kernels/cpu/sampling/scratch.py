"""What choosing tokens on the CPU takes of a pool's workspace, in bytes."""

from __future__ import annotations

GROUP = 256  # tokens, of which one is drawn if their group is
STATE = 624  # words of torch's generator
_LANES = 16  # words that are made together


def columns(vocab: int) -> int:
    """Weights of a row: whole groups, and at least one more than tokens."""
    return (vocab // GROUP + 1) * GROUP


def words_bytes(numbers: int) -> int:
    """Bytes that the words of so many numbers take, with the state before and after them."""
    return 4 * (2 * STATE + 2 * numbers + 2 * _LANES)


def weights_bytes(vocab: int, rows: int) -> int:
    """The weights of all tokens of so many rows."""
    return 4 * columns(vocab) * rows


def sampling_bytes(vocab: int, rows: int, *, of_torch: bool) -> int:
    """`draw` of so many rows of logits, or `multinomial`, by torch's generator.

    Weights, and behind them those that are left, or that generator's words.
    """
    weights = weights_bytes(vocab, rows)
    return weights + max(weights, words_bytes(vocab) if of_torch else 0)
