"""The memory of both tiers, in one arena each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .arena import Arena, map_pages
from .io.copy_stream import CopyStream


class TierArenas:
    """Arenas "device" and "host" of `nbytes`, by tier.

    device: "cpu", whose memory is both, or a GPU; then host memory is locked, so that it can be
    copied from and to while the GPU computes. Raises BudgetError for memory that cannot be had.
    """

    def __init__(self, device: torch.device, nbytes: Mapping[str, int]) -> None:
        self._stream: CopyStream | None = None
        self._locked: Tensor | None = None
        if device.type == "cuda":
            self._stream = CopyStream(device)
        allocate = map_pages if self._stream is None else self._stream.allocate
        self.arenas = {"device": Arena("device", nbytes["device"], allocate)}
        self.arenas["host"] = Arena("host", nbytes["host"], self._host_memory)

    def close(self) -> None:
        """Wait until a GPU uses neither any more and let go of them; may be repeated."""
        if self._stream is not None:
            self._stream.close()
            if self._locked is not None:
                self._stream.unpin(self._locked)
        self._stream = self._locked = None
        for arena in self.arenas.values():
            arena.close()

    def _host_memory(self, nbytes: int) -> Tensor:
        memory = map_pages(nbytes)
        if self._stream is not None and nbytes:
            self._stream.pin(memory)
            self._locked = memory
        return memory
