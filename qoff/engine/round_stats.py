"""What a round did, and what it waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Counts(NamedTuple):
    """Tokens of a round, as in `RoundStats`."""

    read: int
    generated: int
    drafted: int
    accepted: int
    drafts: int = 0
    accepted_at: tuple[int, ...] = ()


@dataclass(frozen=True)
class RoundStats:
    """One round: tokens, seconds, how long the computation waited for what, bytes moved."""

    number: int  # of all rounds of the LLM, from 0
    read: int  # tokens of prompts
    generated: int
    drafted: int  # tokens of answers that were proposed
    accepted: int  # of these: what the model chose
    seconds: float
    ended: float  # by `time.perf_counter`
    weights_wait_s: float
    kv_wait_s: float
    activations_wait_s: float
    disk_bytes: float  # read
    host_bytes: float  # between host and device, both ways
    spilled_bytes: float  # written to disk
    drafts: int = 0  # answers of which tokens were proposed
    accepted_at: tuple[int, ...] = ()  # of their drafts' first tokens, the second ones, ...
    queried: int = 0  # tokens of prompts that were looked up among those read before
    shared: int = 0  # of these: found, and not read again
