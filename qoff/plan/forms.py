"""How weights are quantized: all matrices alike, or some in more bits for a size."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qoff.checkpoint import QuantEntry
from qoff.memory.plan import Unit, local_names
from qoff.memory.plan.placement import spread_evenly
from qoff.quant import Format

from .sizes import Sizes

_EXPERT = re.compile(r"\.experts\.\d+\.")
_MANY_BITS = 8  # of the matrices that have more


@dataclass(frozen=True)
class WeightForm:
    """How weights are quantized, by the fields of `QuantConfig`.

    target_bits: a weight, if some matrices have more than `bits`: as many as make up for that.
    """

    bits: int
    group_size: int
    solver: str
    target_bits: float | None = None

    def __str__(self) -> str:
        if self.target_bits is not None:
            return (
                f"weights of {self.target_bits:g} bits a weight, {self.bits} or more in groups of "
                f"{self.group_size}, {self.solver}"
            )
        return f"weights of {self.bits} bits in groups of {self.group_size}, {self.solver}"

    @property
    def options(self) -> str:
        """Those of `qoff convert`."""
        bits = f"--bits {self.bits}"
        if self.target_bits is not None:  # beside which --bits is refused
            bits = f"--target-bits {self.target_bits:g}"
        return f"{bits} --group-size {self.group_size} --solver {self.solver}"

    def mixed(self, sizes: Sizes) -> dict[str, Format]:
        """Matrices that have 8 bits, by patterns; sizes: of a model whose matrices all have fewer.

        Only the weights tell which should have how many, so it is those kinds that have the fewest
        weights, in all layers or evenly spread; what they take together is right. All experts of a
        layer are alike. Without `target_bits` none.
        """
        if self.target_bits is None:
            return {}
        kinds = dict[str, dict[Unit, int]]()
        for layer, file in enumerate(sizes.checkpoint.layers):
            for name, local in local_names(layer, file.weights).items():
                entry = file.weights[name]
                if isinstance(entry, QuantEntry):
                    kind, matrix = (_EXPERT.sub(".experts.*.", part) for part in (local, name))
                    some = kinds.setdefault(kind, {})
                    some[matrix] = some.get(matrix, 0) + entry.shape[0] * entry.shape[1]
        share = (self.target_bits - stored_bits(self.bits, self.group_size)) / (
            _MANY_BITS - self.bits
        )
        left = int(share * sum(sum(some.values()) for some in kinds.values()))
        found, high = dict[str, Format](), Format(_MANY_BITS, self.group_size)
        for kind, some in sorted(kinds.items(), key=lambda one: sum(one[1].values())):
            whole = sum(some.values())
            if whole > left:
                found |= {str(name): high for name in spread_evenly(some, left)}
                break
            found[f"*.{kind}"] = high
            left -= whole
        return found


def stored_bits(bits: int, group: int) -> float:
    """Bits a weight, with a scale and a minimum of a byte each for a group."""
    return bits + 16 / group
