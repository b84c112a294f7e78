"""The experts of a layer one by one: where each lies in its file, and how in a slot of a cache.

All experts of a layer lie alike in their slots, so that those in slots of one size, one behind the
other, are one `QExperts`. Where their files have them at the same distance from a page, a read is
straight into the slot; else it is of exactly their bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import TypeGuard

from torch import Tensor

from qoff.checkpoint import Checkpoint, QuantEntry, TensorEntry, WeightEntry, WeightFile
from qoff.errors import FormatError
from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.memory.arena import PAGE, round_up

from .image import Image, image_of, view
from .reads import FileRange
from .units import Expert, expert_matrix, is_expert

CPU_PACKING = "rows16"  # of experts that a CPU computes beside a GPU
_PASSING_BYTES = 64 << 20  # of experts that pass through the device together, about


def matrices(gated: bool) -> tuple[str, str]:
    """The names of an expert's matrices, in the order in which they are multiplied by."""
    return "gate_up_proj" if gated else "up_proj", "down_proj"


class LayerExperts:
    """The experts of one layer's file. Raises FormatError for experts of different forms."""

    def __init__(self, file: WeightFile, packing: str) -> None:
        self.file, self._packing = file, packing
        self._entries: dict[int, dict[str, QuantEntry]] = {}
        biases = [e for name, e in file.weights.items() if is_expert(name) and _dense(e)]
        for name, entry in file.weights.items():
            found = expert_matrix(name)
            if found is not None and isinstance(entry, QuantEntry):
                self._entries.setdefault(found[0], {})[name] = entry
        self.count = len(self._entries)  # 0 for a layer without experts
        self.image = cache(self._image)  # by the expert's number
        if self.count:
            self._first = image_of(file, self._entries[0], packing)
            self.nbytes = self._first.nbytes  # of a slot
            self.bias_bytes = sum(bias.nbytes for bias in biases) // self.count  # of one
            # Others may lie across one page more.
            self.staging_bytes = (self._first.raw_bytes + PAGE) * self._first.repacked

    def in_slots(self, memory: Tensor) -> tuple[QExperts, QExperts]:
        """The `matrices` of experts in slots, uint8 [slots, bytes]."""
        both: list[QExperts] = []
        for name in self.matrices:
            first = view(self.placed[name], memory[0])
            assert isinstance(first, QTensor)
            both.append(QExperts.repeated(first, *memory.shape))
        return both[0], both[1]

    @property
    def matrices(self) -> tuple[str, str]:
        """The names of those of an expert: see the function."""
        return matrices(gated="gate_up_proj" in self.placed)

    @property
    def placed(self) -> Mapping[str, QuantEntry]:
        """How the `matrices` of any expert lie in its slot."""
        return {
            found[1]: entry
            for name, entry in self._first.placed.items()
            if isinstance(entry, QuantEntry) and (found := expert_matrix(name)) is not None
        }

    @property
    def matrix_bytes(self) -> int:
        """Of the `matrices` of an expert, as kernels read them; 0 for a layer without experts."""
        return sum(entry.nbytes for entry in self.placed.values()) if self.count else 0

    @cached_property
    def lies(self) -> Hashable:
        """Alike for layers whose experts lie in their files alike."""
        entries = (e for some in self._entries.values() for e in some.values())
        return self.file.nbytes, *(
            (*_form(e), *_places(e), e.codes.nbytes, e.scale_min.nbytes) for e in entries
        )

    def _image(self, number: int) -> Image:
        entries = self._entries[number]
        image = image_of(self.file, entries, self._packing)
        lies = list(image.placed.values())
        wanted = list(self._first.placed.values())
        if [_form(entry) for entry in lies] != [_form(entry) for entry in wanted]:
            raise FormatError(f"{self.file.path}: expert {number} is not like the first one")
        same = [_places(entry) for entry in lies] == [_places(entry) for entry in wanted]
        if same and image.nbytes <= self.nbytes:
            return image
        raw, placed, ranges = {}, {}, list[FileRange]()
        for (name, entry), there in zip(entries.items(), wanted, strict=True):
            assert isinstance(there, QuantEntry)
            # Codes that are widened are read to the end of the memory that they take then.
            at = there.codes.offset + there.codes.nbytes - entry.codes.nbytes
            codes = replace(entry.codes, offset=at)
            parts = [(entry.codes, codes), (entry.scale_min, there.scale_min)]
            ranges += (FileRange(t.offset, t.nbytes, place.offset) for t, place in parts)
            raw[name] = replace(entry, codes=codes, scale_min=there.scale_min)
            placed[name] = replace(there, name=name)
        wide = any(placed[name].bits != entry.bits for name, entry in raw.items())
        return Image(
            self.file, tuple(ranges), raw, self.nbytes, placed if wide else raw, self.nbytes
        )


def are_uniform(checkpoint: Checkpoint) -> bool:
    """Whether all experts of a layer have one form, in every layer that has any."""
    for file in checkpoint.layers:
        forms: dict[str, set[Hashable]] = {}
        for name, entry in file.weights.items():
            found = expert_matrix(name)
            if found is not None:
                known = isinstance(entry, QuantEntry)
                forms.setdefault(found[1], set()).add(_form(entry) if known else None)
        if any(len(some) > 1 or None in some for some in forms.values()):
            return False
    return True


def layer_experts(checkpoint: Checkpoint, packing: str) -> list[LayerExperts]:
    """The experts of all layers, in their order."""
    return [LayerExperts(file, packing) for file in checkpoint.layers]


def passing_together(on_cpu: Iterable[LayerExperts]) -> int:
    """Experts for the CPU that pass through the device as one group: 64 MiB, or one.

    A link moves these at nearly its rate, and a group of any size costs as much of the host's time.
    """
    some = [experts for experts in on_cpu if experts.count]
    largest = max(experts.nbytes for experts in some)
    return max(1, min(_PASSING_BYTES // largest, max(experts.count for experts in some)))


def passing_parts(
    together: int, experts: Iterable[LayerExperts], on_cpu: Iterable[LayerExperts]
) -> tuple[int, int, int]:
    """Bytes of the device for groups of experts that pass through it.

    As they lie in host memory, one group while the other one comes, each; as kernels read them; and
    of their biases. experts, on_cpu: of all layers, in the device's and in the CPU's packing.
    """
    raw = max(experts.nbytes for experts in on_cpu if experts.count)
    some = [one for one in experts if one.count]
    bias = round_up(together * max(one.bias_bytes for one in some), PAGE)
    return together * raw, together * max(one.nbytes for one in some), bias


def passing_bytes_of(
    together: int, experts: Iterable[LayerExperts], on_cpu: Iterable[LayerExperts]
) -> int:
    """Bytes of the device that groups of `together` experts take, which pass through it."""
    raw, placed, bias = passing_parts(together, experts, on_cpu)
    return 2 * raw + placed + bias


def expert_units(experts: Iterable[LayerExperts]) -> list[Expert]:
    """All experts of all layers, in the order of their files."""
    return [
        Expert(layer, number) for layer, some in enumerate(experts) for number in range(some.count)
    ]


def _dense(entry: WeightEntry) -> TypeGuard[TensorEntry]:
    return isinstance(entry, TensorEntry)


def _form(entry: object) -> tuple[object, ...]:
    assert isinstance(entry, QuantEntry)
    scales = entry.scale_min
    return entry.shape, entry.bits, entry.group_size, entry.packing, scales.dtype, scales.shape


def _places(entry: object) -> tuple[int, int]:
    assert isinstance(entry, QuantEntry)
    return entry.codes.offset, entry.scale_min.offset
