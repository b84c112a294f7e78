"""Experts in the CPU's packing, repacked on the device that they were copied to."""

from __future__ import annotations

from qoff.errors import OpError

from .layout.qexperts import QExperts
from .layout.widening import read_bits


def repack_experts(packed: QExperts, into: QExperts) -> None:
    """Write E matrices of packing rows16 to memory for as many of split32, as kernels read them.

    packed, into: of one device, shape, group size and type of scales, every expert's parts at
    multiples of 4 bytes; `into` has the bits that a GPU reads (`widening.read_bits`). Bit for bit
    as `QTensor.for_kernels`. On a GPU it is one launch on the current stream, without memory of its
    own. Raises OpError.
    """
    wanted = (packed.count, packed.shape, packed.group_size, packed.scale_min.dtype, packed.device)
    found = (into.count, into.shape, into.group_size, into.scale_min.dtype, into.device)
    if wanted != found:
        raise OpError(f"experts to repack are {wanted}, and there is memory for {found}")
    if (packed.packing, into.packing) != ("rows16", "split32"):
        raise OpError(
            f"experts are repacked from rows16 to split32, not {packed.packing} to {into.packing}"
        )
    if into.bits != read_bits(packed.bits, "split32"):
        raise OpError(f"codes of {packed.bits} bits are not read as {into.bits} on a GPU")
    if packed.device.type == "cuda":
        from .triton.moe.repack import repack_experts as launch

        launch(packed, into)
        return
    for number in range(packed.count):
        found_one, place = packed.expert(number).for_kernels("split32"), into.expert(number)
        place.codes.copy_(found_one.codes)
        place.scale_min.copy_(found_one.scale_min)
