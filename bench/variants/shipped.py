"""All variants of all ops."""

from __future__ import annotations

from collections.abc import Iterable

from bench.variants import attention, elementwise, indexed, latent, linear, moe, recurrent
from bench.variants.variant import Variant


def shipped(capability: int, few: bool = False) -> Iterable[Variant]:
    """Every variant of every op for a compute capability.

    few: of each kernel the last with each type, set of traits and kind of scales only; later ones
    are larger.
    """
    found: dict[object, Variant] = {}
    for module in (linear, moe, elementwise, attention, latent, indexed, recurrent):
        for variant in module.variants(capability):
            like = (variant.kernel, variant.dtype, variant.traits, variant.compact)
            found[like if few else len(found)] = variant
    return found.values()
