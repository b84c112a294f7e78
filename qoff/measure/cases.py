"""What is timed: how many tokens, how deep, and where weights and cache are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from qoff.errors import ArgumentError
from qoff.kvcache import KVQuant
from qoff.kvcache.quant import UNPACKED, kv_quant
from qoff.units import parse_size

# No bound of device memory; a cache as the model allows, and one that is not packed.
RESIDENT, AUTO, FLOAT = "all", "auto", "none"


@dataclass(frozen=True)
class Case:
    """Tokens of each of `batch` sequences, read in one pass ("pp") or generated ("tg").

    depth: tokens that each sequence has before. As text: "tg128@d4096 x16". Raises ArgumentError
    for numbers out of range.
    """

    kind: Literal["pp", "tg"]
    tokens: int
    depth: int = 0
    batch: int = 1

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.depth < 0 or self.batch < 1:
            raise ArgumentError(
                f"{self.tokens} tokens at depth {self.depth} of {self.batch} sequences; use at "
                "least 1 token, a depth from 0 up and at least 1 sequence"
            )

    @property
    def positions(self) -> int:
        """Tokens of a sequence in the end."""
        return self.depth + self.tokens

    def __str__(self) -> str:
        depth = f"@d{self.depth}" if self.depth else ""
        return f"{self.kind}{self.tokens}{depth}" + (f" x{self.batch}" if self.batch > 1 else "")


@dataclass(frozen=True)
class Setup:
    """Where a model's weights and KV cache are, and in how many bits.

    device_memory: "all", or a bound of everything like "48MiB". kv_bits: as `qoff.load` takes `kv`
    as text. As text: "48MiB, KV 4-bit". Raises QoffError for text that is neither.
    """

    device_memory: str = RESIDENT
    kv_bits: str = AUTO
    activation_bits: int = 16

    def __post_init__(self) -> None:
        _ = self.budget, self.kv
        if self.activation_bits not in (8, 16):
            raise ArgumentError(f"activations have 8 or 16 bits, not {self.activation_bits}")

    @property
    def budget(self) -> int | None:
        """Bytes for everything on the device; None: as much as it takes."""
        return None if self.device_memory == RESIDENT else parse_size(self.device_memory)

    @property
    def kv(self) -> KVQuant | str | None:
        """How the cache is packed; None: float32; "auto": 4 bits where the model allows."""
        return AUTO if self.kv_bits == AUTO else kv_quant(self.kv_bits)

    def __str__(self) -> str:
        kv = self.kv
        packed = isinstance(kv, KVQuant) and (kv.k_bits != UNPACKED or bool(kv.layers))
        form = f"{self.kv_bits}-bit" if packed else "f32"
        parts = [
            "resident" if self.budget is None else self.device_memory,
            f"KV {AUTO if kv == AUTO else form}",
        ]
        return ", ".join(parts + ["8-bit activations"] * (self.activation_bits == 8))


def numbers(option: str, text: str, least: int, may_be_none: bool = False) -> list[int]:
    """The whole numbers of an option's text, separated by commas, each once.

    "none", where it may be, stands for no number. Raises ArgumentError naming the option.
    """
    words = [word.strip() for word in text.split(",")]
    if may_be_none and words == ["none"]:
        return []
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 10 and int(word) >= least):
            raise ArgumentError(
                f"{option} {text}: {word!r} is not a whole number from {least} up; separate "
                f"several by commas{', or give none' if may_be_none else ''}"
            )
    return list(dict.fromkeys(map(int, words)))


def grid_of_cases(
    prompts: Sequence[int], new: Sequence[int], depths: Sequence[int], batches: Sequence[int]
) -> list[Case]:
    """All combinations; those of one depth and number of sequences follow each other.

    Raises ArgumentError where there is none.
    """
    found = [
        case
        for batch, depth in product(batches, depths)
        for case in (
            *(Case("pp", tokens, depth, batch) for tokens in prompts),
            *(Case("tg", tokens, depth, batch) for tokens in new),
        )
    ]
    if not found:
        raise ArgumentError("nothing to measure: give -p or -n a number of tokens")
    return found


def grid_of_setups(
    memory: Sequence[str], kv_bits: Sequence[str], activation_bits: Sequence[int]
) -> list[Setup]:
    """All combinations of the three, each once."""
    return [Setup(*each) for each in dict.fromkeys(product(memory, kv_bits, activation_bits))]
