"""New packed blocks on their way from a device to where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.kvcache.store.base import BlockStore

PLACES = 2  # one is copied from while kernels fill another


@dataclass(frozen=True, eq=False)
class Place:
    """Memory on the device, and in host memory what is copied there; uint8, equally long."""

    memory: Tensor
    host: Tensor

    @classmethod
    def of(cls, nbytes: int, device: torch.device) -> Place:
        """New memory, on the host such that is copied to without waiting."""
        return cls(
            torch.empty(nbytes, dtype=torch.uint8, device=device),
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda"),
        )


@dataclass(eq=False)
class Parcel:
    """New blocks of one layer. records: where kernels write them, on the device."""

    layer: int
    blocks: tuple[int, ...]  # of the store
    records: Tensor  # uint8 [blocks, kv_heads, form.nbytes]
    place: Place
    arrived: torch.cuda.Event | None = None


class Outbox:
    """Takes blocks that kernels write on a device to a store in host memory, from one thread.

    A parcel is filled from `take` to `send`, and in the store when `deliver` or a later `take`
    returns. places: PLACES of a fixed size, enough for every parcel; without, memory grows to the
    most blocks of a layer that were on their way at once. poison: memory that holds no block is
    NaN.
    """

    def __init__(
        self,
        store: BlockStore,
        device: torch.device,
        poison: bool = False,
        places: Sequence[Place] = (),
    ) -> None:
        self._store = store
        self._device = device
        self._poison = poison
        self._stream: torch.cuda.Stream | None = None
        self._places = len(places)
        self._free = list(places)
        for place in places:
            self._wipe(place)
        self._taken: list[Parcel] = []
        self._sent: list[Parcel] = []  # oldest first
        self.nbytes = sum(2 * place.memory.nbytes for place in places)  # on both sides

    def take(self, layer: int, blocks: Sequence[int]) -> Parcel:
        """A parcel for these blocks of the store."""
        if not self._free and self._places >= PLACES and self._sent:
            self.deliver(self._sent[:1])
        form, heads = self._store.forms[layer], self._store.kv_heads[layer]
        wanted = len(blocks) * heads * form.nbytes
        place = self._free.pop() if self._free else None
        if place is None or place.memory.nbytes < wanted:
            self._places += place is None
            self.nbytes += 2 * (wanted - (0 if place is None else place.memory.nbytes))
            place = Place.of(wanted, self._device)
            self._wipe(place)
        records = place.memory[:wanted].view(len(blocks), heads, form.nbytes)
        parcel = Parcel(layer, tuple(blocks), records, place)
        self._taken.append(parcel)
        return parcel

    def send(self, parcel: Parcel) -> None:
        """Start the copy, behind the work of the current stream."""
        source, dest = parcel.records, _on_host(parcel)
        if self._device.type == "cuda":
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                dest.copy_(source, non_blocking=True)
                parcel.arrived = torch.cuda.Event()
                parcel.arrived.record()
        else:
            dest.copy_(source)
        self._taken.remove(parcel)
        self._sent.append(parcel)

    def deliver(self, parcels: Sequence[Parcel]) -> None:
        """Return when the blocks of those of these that were sent are in the store."""
        for parcel in [parcel for parcel in self._sent if parcel in parcels]:
            _wait(parcel)
            self._store.write(parcel.layer, parcel.blocks, _on_host(parcel))
            self._sent.remove(parcel)
            self._recycle(parcel.place)

    def drop(self, parcels: Sequence[Parcel]) -> None:
        """Forget those of these that are not in the store."""
        for waiting in (self._taken, self._sent):
            for parcel in [parcel for parcel in waiting if parcel in parcels]:
                _wait(parcel)
                waiting.remove(parcel)
                self._recycle(parcel.place)

    def _recycle(self, place: Place) -> None:
        self._wipe(place)
        self._free.append(place)

    def _wipe(self, place: Place) -> None:
        if self._poison:
            place.memory.fill_(0xFF)
            place.host.fill_(0xFF)


def _on_host(parcel: Parcel) -> Tensor:
    return parcel.place.host[: parcel.records.nbytes].view(parcel.records.shape)


def _wait(parcel: Parcel) -> None:
    if parcel.arrived is not None:
        parcel.arrived.synchronize()
