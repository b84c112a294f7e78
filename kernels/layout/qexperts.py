"""QExperts: the matrices of all experts of a layer, one behind the other in memory.

An expert's weights are one range of the layer's file: codes and scales of gate_up, or of up alone,
then those of down. Its codes are therefore as far from the next expert's codes as its scales are
from the next one's scales, and all experts together are two strided tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qoff.errors import OpError

from . import ending
from .qtensor import QTensor

CLAMPED_SWIGLU = "clamped_swiglu"  # of a gate alone
ACTIVATIONS = (*ending.ACTIVATIONS, CLAMPED_SWIGLU)


@dataclass(frozen=True, eq=False)
class QExperts:
    """E quantized matrices of one shape, bits, group size and packing, a fixed distance apart.

    Each is contiguous, as `QTensor` has it; between two of them there may be anything. Raises
    OpError when the parts do not fit each other.
    """

    codes: Tensor  # uint8 [E, ...], each as `packing` lays out one matrix
    scale_min: Tensor  # as of a QTensor, [E, ...], likewise
    shape: tuple[int, int]  # (N, K) of one matrix
    bits: int  # one of `packing.BITS`
    group_size: int  # 32, 64 or 128
    packing: str  # "split32" or "rows16", see `packing`

    def __post_init__(self) -> None:
        if self.codes.dim() < 1 or not len(self.codes):
            raise OpError("there are no experts")
        self.expert(0)  # raises for parts that are not those of a matrix
        if len(self.codes) != len(self.scale_min):
            raise OpError(f"codes of {len(self.codes)} experts, scales of {len(self.scale_min)}")

    @staticmethod
    def of(matrices: Sequence[QTensor]) -> QExperts:
        """All of `matrices` as one, nothing copied.

        Raises OpError for none, for matrices of different forms, and for ones that are not a
        constant distance apart in one piece of memory.
        """
        if not matrices:
            raise OpError("there are no experts")
        first = matrices[0]
        form = _form(first)
        for i, matrix in enumerate(matrices):
            if _form(matrix) != form:
                raise OpError(f"expert {i} is {_form(matrix)}, the first is {form}")
        return QExperts(
            _strided("codes", [m.codes for m in matrices]),
            _strided("scales", [m.scale_min for m in matrices]),
            first.shape,
            first.bits,
            first.group_size,
            first.packing,
        )

    @staticmethod
    def repeated(first: QTensor, count: int, distance: int) -> QExperts:
        """The first of `count` matrices, each `distance` bytes behind the one before it."""

        def all_of(part: Tensor) -> Tensor:
            step = distance // part.element_size()
            return part.as_strided((count, *part.shape), (step, *part.stride()))

        return QExperts(
            all_of(first.codes),
            all_of(first.scale_min),
            first.shape,
            first.bits,
            first.group_size,
            first.packing,
        )

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(self.codes)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def strides(self) -> tuple[int, int]:
        """Bytes from an expert's codes, and from its scales, to those of the next."""
        scale_min = self.scale_min
        return self.codes.stride(0), scale_min.stride(0) * scale_min.element_size()

    def expert(self, number: int) -> QTensor:
        """One expert's matrix; it shares this one's memory."""
        return QTensor(
            self.codes[number],
            self.scale_min[number],
            self.shape,
            self.bits,
            self.group_size,
            self.packing,
        )


@dataclass(frozen=True, eq=False)
class ExpertsMlp:
    """The MLP of a layer's experts: down @ f(gate_up @ x + bias) + bias, each of E experts.

    Raises OpError for matrices that do not fit each other, and for an unknown activation. I is a
    multiple of 32, as groups divide it. weighs_input: a pair's weight multiplies what goes into
    gate_up, in place of what comes out of down. Where it is not `gated`, gate_up has the rows of up
    alone, [I, H], and f is of each of its outputs. limit: of gate and up, as `ending.Ending` has
    it; 0: none.
    """

    gate_up: QExperts  # E x [2I, H], rows in blocks of 16 of gate and of up in turn
    down: QExperts  # E x [H, I]
    activation: str  # f, one of ACTIVATIONS: see `reference.experts.activate`
    gate_up_bias: Tensor | None = None  # [E, 2I], in the order of the rows
    down_bias: Tensor | None = None  # [E, H]
    weighs_input: bool = field(default=False, kw_only=True)
    gated: bool = field(default=True, kw_only=True)
    limit: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        gate_up, down = self.gate_up, self.down
        (rows, hidden), (out, inner) = gate_up.shape, down.shape
        if rows != (1 + self.gated) * inner or out != hidden or gate_up.count != down.count:
            first = "gate_up is {} x [2I, H]" if self.gated else "up is {} x [I, H]"
            raise OpError(
                f"{first.format(gate_up.count)} and down {down.count} x [H, I], "
                f"not {[rows, hidden]} and {[out, inner]} of as many experts"
            )
        if gate_up.device != down.device:
            raise OpError(f"gate_up is on {gate_up.device}, down on {down.device}")
        if self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise OpError(f"unknown activation {self.activation!r}; known are {known}")
        if self.activation == CLAMPED_SWIGLU and not self.gated:
            raise OpError(f"{CLAMPED_SWIGLU} is of gate and up, and there is no gate")
        if self.limit and (self.activation == CLAMPED_SWIGLU or not self.gated):
            raise OpError(f"a limit is of gate and up, and not of {CLAMPED_SWIGLU}")


def _form(matrix: QTensor) -> tuple[object, ...]:
    """What all experts have in common."""
    scales, device = matrix.scale_min.dtype, matrix.device
    return matrix.shape, matrix.bits, matrix.group_size, matrix.packing, scales, device


def _strided(what: str, parts: list[Tensor]) -> Tensor:
    """One view [E, ...] of tensors of one shape at a constant distance in one storage."""
    first = parts[0]
    if len(parts) == 1:
        return first[None]
    start, size = first.data_ptr(), first.element_size()
    distance = parts[1].data_ptr() - start
    storage = first.untyped_storage().data_ptr()
    for i, part in enumerate(parts):
        if part.untyped_storage().data_ptr() != storage:
            raise OpError(f"{what} of expert {i} are in other memory than those of the first")
        if part.data_ptr() != start + i * distance:
            raise OpError(
                f"{what} of expert {i} are {part.data_ptr() - start} bytes from the first, not "
                f"{i} times {distance}: experts must be a constant distance apart"
            )
    if distance < first.nbytes or distance % size:
        raise OpError(
            f"{what} of experts are {distance} bytes apart, which is less than their "
            f"{first.nbytes} bytes, or no multiple of {size}"
        )
    return first.as_strided((len(parts), *first.shape), (distance // size, *first.stride()))
