"""What the linear op does beside the product: the norm before it, and everything behind it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
XIELU = "xielu"  # the activation that takes numbers; not of a gate
GATES = ("", "sigmoid", "softplus")  # what the op `gate` multiplies by; "": the gate itself


class Norm(NamedTuple):
    """RMSNorm of rows (arXiv 1910.07467) or, `centered`, LayerNorm (arXiv 1607.06450).

    scale: what the weight is multiplied by.
    """

    weight: Tensor  # [K]
    eps: float
    bias: Tensor | None = None  # [K]
    centered: bool = False
    scale: float = 1.0


class Xielu(NamedTuple):
    """What xIELU (arXiv 2411.13010) of one layer has learned.

    It is alpha_p x^2 + beta x for x > 0, otherwise alpha_n (exp(min(x, eps)) - 1 - x) + beta x.
    """

    alpha_p: float
    alpha_n: float
    beta: float
    eps: float


class Ending(NamedTuple):
    """What follows a product z = x W^T + bias [M, N], in this order.

    activation: one of ACTIVATIONS, XIELU with what `xielu` has, or none. Where it is `gated`, rows
    of W alternate 16 of gate and 16 of up, and z becomes activation(gate) * up, [M, N / 2], with a
    limit that is not 0 min(activation(gate), limit) * up within -limit..limit. Then z becomes
    scale * sigmoid(score) * post_norm(z), and soft_cap * tanh(z / soft_cap) where that is not 0.
    The residual is added, the sum is multiplied by sum_scale, and sum_norm is of that.
    """

    activation: str = ""
    gated: bool = False
    post_norm: Norm | None = None
    scale: float = 1.0
    score: Tensor | None = None  # [M, 1]
    soft_cap: float = 0.0
    sum_norm: Norm | None = None
    sum_scale: float = 1.0
    limit: float = 0.0
    xielu: Xielu | None = None

    @property
    def by_element(self) -> Ending:
        """What comes before norms of whole rows."""
        if self.post_norm is not None:
            return Ending(self.activation, self.gated, limit=self.limit, xielu=self.xielu)
        return self._replace(sum_norm=None)

    @property
    def only_gated_silu(self) -> bool:
        """Whether nothing else follows than perhaps silu(gate) * up."""
        return self in (PLAIN, GATED_SILU)


PLAIN = Ending()
GATED_SILU = Ending("silu", gated=True)
