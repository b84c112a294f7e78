"""Memory of inference and training by the standard formulas, and what bandwidth they need.

The formulas are those of ZeRO-Infinity (arXiv 2104.07857, sections 3 and 4): mixed precision with
Adam, 16-bit weights and gradients, and 12 bytes a parameter of 32-bit weights and moments.
"""

from __future__ import annotations

from dataclasses import dataclass

from qoff.errors import ArgumentError

_STATES = 12  # bytes a parameter: weights, momentum and variance in 32 bits


@dataclass(frozen=True)
class Training:
    """A step on micro-batches of `batch` sequences of `sequence` tokens; checkpoints every
    `checkpoint_every` layers. Raises ArgumentError for sizes below 1.
    """

    parameters: int
    layers: int
    hidden: int
    heads: int
    batch: int = 1
    sequence: int = 2048
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int or value < 1:
                raise ArgumentError(f"{name} is {value!r}; use a whole number from 1")

    def rows(self) -> dict[str, int]:
        """Bytes by purpose."""
        p, tokens = self.parameters, self.batch * self.sequence
        layer = tokens * (16 * self.hidden + 2 * self.heads * self.sequence)
        kept = -(-self.layers // self.checkpoint_every)
        return {
            "inference: weights, 16 bits": 2 * p,
            "inference: weights, 32 bits": 4 * p,
            "training: weights and gradients, 16 bits": 4 * p,
            "training: Adam's states, 32 bits": _STATES * p,
            "training: weights, gradients and states": (4 + _STATES) * p,
            "training: activations": layer * self.layers,
            "training: activations, checkpoints": 2 * tokens * self.hidden * kept,
            "training: activations, while they are computed again": layer * self.checkpoint_every,
            "training: working space of a layer's largest matrix": 4
            * self.hidden
            * 4
            * self.hidden,
        }

    def efficiency(self, bandwidth: float, peak: float) -> dict[str, float]:
        """Parts of the peak that are left where what is offloaded comes with such a bandwidth.

        ait * bandwidth / (ait * bandwidth + peak); bandwidth in bytes/s, peak in flop/s. ait:
        operations for each byte that moves.
        """
        tokens = self.batch * self.sequence
        ait = {
            "weights and gradients": tokens,
            "Adam's states": tokens / 4,
            "activations, checkpoints": 24 * self.hidden * self.checkpoint_every,
        }
        return {name: a * bandwidth / (a * bandwidth + peak) for name, a in ait.items()}
