"""Hidden states of batches that wait their turn, on the host or on disk."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from .arena import PAGE, Arena, round_up
from .io.copies import Copies
from .io.spill import SpillFile

WINDOWS = 2  # on the device: one is computed on while another is filled


class ActivationStore:
    """Room for the hidden states of passes, each of up to so many tokens.

    tier: "host" or "disk"; what goes to disk passes through host memory. Hidden states that are
    computed on are in one of two windows on the device, in `dtype`. All moves are in the order of
    the calls, so that a window may be filled again as soon as it was asked to be emptied. Where
    the device is a GPU, `copies` are made for it.
    """

    def __init__(
        self,
        tier: str,
        tokens: Sequence[int],
        hidden_size: int,
        arenas: dict[str, Arena],
        copies: Copies,
        spill: SpillFile | None = None,
        spill_at: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.wait_s = 0.0  # that `load` waited
        self.dtype = dtype
        regions = _regions(tokens, hidden_size, dtype)
        widest = max(regions)
        self.hidden_size = hidden_size
        self.copies = copies
        self.windows = [
            arenas["device"].alloc(widest, "hidden states at work") for _ in range(WINDOWS)
        ]
        homes = regions if tier == "host" else [widest]
        self._homes = [arenas["host"].alloc(region, "hidden states") for region in homes]
        self._tier = tier
        self._spill = spill if tier == "disk" else None
        self._spill_at = [*accumulate(regions, initial=spill_at)]
        self._next = 0

    @staticmethod
    def bytes_for(
        tier: str, tokens: Sequence[int], hidden_size: int, dtype: torch.dtype = torch.float32
    ) -> dict[str, int]:
        """Bytes by tier that such a store takes."""
        regions = _regions(tokens, hidden_size, dtype)
        return {
            "device": WINDOWS * max(regions),
            "host": sum(regions) if tier == "host" else max(regions),
            "disk": sum(regions) if tier == "disk" else 0,
        }

    def of_pass(self, number: int) -> ParkedActivations:
        """The hidden states of one pass."""
        return ParkedActivations(self, number)

    def window(self) -> int:
        """The window whose turn it is."""
        self._next = (self._next + 1) % WINDOWS
        return self._next

    def move(self, number: int, window: Tensor, out: bool) -> Future[None]:
        """Start moving bytes of a window to their home, or from there."""
        lane = f"device to {self._tier}" if out else f"{self._tier} to device"
        if self._spill is None:
            home = self._homes[number][: window.nbytes]
            pair = (home, window) if out else (window, home)
            return self.copies.submit([pair], lane, "hidden states")
        spill = partial(self._move_spilled, self._spill, number, window, out)
        return self.copies.call(spill, window.nbytes, lane, "hidden states")

    @property
    def by_jobs(self) -> bool:
        """Whether jobs may move hidden states, as they stay in memory."""
        return self._spill is None and self.copies.unwatched

    def home(self, number: int) -> Tensor:
        """Where the bytes of a pass are on the host."""
        return self._homes[number]

    def _move_spilled(self, spill: SpillFile, number: int, window: Tensor, out: bool) -> None:
        # Here, as the next move waits for this one: other threads would only have to be woken.
        home = self._homes[0][: round_up(window.nbytes, PAGE)]
        at = self._spill_at[number]
        if out:
            self.copies.put(home[: window.nbytes], window)
            spill.write_here(at, home)
        else:
            spill.read_here(at, home)
            self.copies.put(window, home[: window.nbytes])


class ParkedActivations:
    """The hidden states of one pass in a store; between `store` and `load` they are elsewhere."""

    def __init__(self, store: ActivationStore, number: int) -> None:
        self._store = store
        self._number = number
        self._window = -1
        self._tokens = 0
        self._saved: Future[None] | None = None
        self._brought: Future[None] | None = None

    def prefetch(self) -> None:
        """Start to bring the hidden states to the device; in the order of the `load` calls."""
        if self._brought is None and self._saved is not None:
            self._window = self._store.window()
            self._brought = self._store.move(self._number, self._bytes(), out=False)

    def load(self) -> Tensor:
        self.prefetch()
        assert self._brought is not None
        assert self._saved is not None
        start = self._store.copies.clock.now()
        self._join(self._saved, self._brought)
        self._store.wait_s += self._store.copies.clock.now() - start
        self._saved = self._brought = None
        return self._hidden()

    def store(self, hidden: Tensor) -> None:
        self._tokens = len(hidden)  # the first of the window, once there is one
        if self._window < 0:
            self._take_window()
            self._hidden().copy_(hidden)
        self._saved = self._store.move(self._number, self._bytes(), out=True)

    @property
    def by_jobs(self) -> bool:
        """Whether jobs may move them, between which nothing else does."""
        return self._store.by_jobs

    def moved_by_jobs(self, tokens: int) -> JobActivations:
        """The same for so many tokens, moved by jobs, once nothing moves any more."""
        self._tokens = tokens
        self._take_window()
        return JobActivations(self._store.copies, self._hidden(), self._home())

    def _take_window(self) -> None:
        self._window = self._store.window()
        # No earlier move touches a window any more when this one, of nothing, has ended.
        self._join(self._store.copies.call(lambda: None, 0, "host to device", "wait"))

    def _hidden(self) -> Tensor:
        """[tokens, hidden_size] in the window."""
        return self._rows(self._bytes())

    def _home(self) -> Tensor:
        """[tokens, hidden_size] on the host."""
        return self._rows(self._store.home(self._number)[: self._bytes().nbytes])

    def _rows(self, memory: Tensor) -> Tensor:
        return memory.view(self._store.dtype).view(self._tokens, -1)

    def _bytes(self) -> Tensor:
        nbytes = self._tokens * self._store.hidden_size * self._store.dtype.itemsize
        return self._store.windows[self._window][:nbytes]

    def _join(self, *moves: Future[None]) -> None:
        """Wait for moves. Raises what went wrong."""
        copies = self._store.copies
        lost = "hidden states: the thread that moves them died"
        copies.clock.join(moves, lambda: copies.alive, lost)
        for move in moves:
            move.result()


class JobActivations:
    """Hidden states that jobs move, here and now, between a window and their home."""

    def __init__(self, copies: Copies, window: Tensor, home: Tensor) -> None:
        self._copies, self._window, self._home = copies, window, home

    @property
    def addresses(self) -> tuple[int, int]:
        """What its jobs know."""
        return self._window.data_ptr(), self._home.data_ptr()

    def load(self) -> Tensor:
        self._copies.job(self._window, self._home)
        return self._window

    def store(self, hidden: Tensor) -> None:
        self._copies.job(self._home, hidden)

    def prefetch(self) -> None:
        """`load` brings them."""


def _regions(tokens: Sequence[int], hidden_size: int, dtype: torch.dtype) -> list[int]:
    return [round_up(count * hidden_size * dtype.itemsize, PAGE) for count in tokens]
