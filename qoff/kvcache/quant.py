"""How a KV cache is packed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Self

from qoff.errors import ArgumentError, OpError, UnsupportedModelError
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KV_BITS, KVFormat

KVBits = int | tuple[int, int] | str  # of K and V together, of each, or text as `KVQuant.of` reads
INDEX_BITS = 8  # of the keys of an index, whatever K and V have: they decide, and are few
SPARSE_TOP = 0.6  # of `attention_top`: loses less than 0.02 nats, see docs/accuracy.md
UNPACKED = 16  # "bits" of K and V in a layer that stays as it is

_PAIR = re.compile(r"\s*(\d{1,3})\s*(?:,\s*(\d{1,3})\s*)?")
_LAYERS = re.compile(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?")  # no model has 10,000
_GRAMMAR = "4, or 8,4 for K and V (2, 3, 4 or 8), or 4/0-3:8,4/9:8 with others for some layers"


class UnpackableError(OpError, UnsupportedModelError):
    """The KV cache of this model cannot be packed, or not as asked."""


@dataclass(frozen=True)
class KVQuant:
    """Bits of K (per channel over 64 tokens) and V (per token); what is never packed.

    layers: K's and V's bits of the layers that have others, by their numbers among those that have
    a KV cache (linear attention has none), from 0. Raises ArgumentError for other bits
    than 2, 3, 4 and 8 (or 16 for both: a layer that is not packed), and for a negative window or
    layer.
    """

    k_bits: int = 4
    v_bits: int = 4
    window: int = 64  # the newest tokens stay in float32
    layers: Mapping[int, tuple[int, int]] = field(default_factory=dict, hash=False)
    sinks: int = 0  # nor are the oldest so many, a multiple of 16
    values_rotated: bool = True  # V turned by a Hadamard matrix before it is packed
    attention_top: float = 1.0  # part of its packed blocks that a single new token attends to
    keeps: bool = False  # blocks that no layer will read, so that all tokens can be forgotten again

    def __post_init__(self) -> None:
        for k_bits, v_bits in ((self.k_bits, self.v_bits), *self.layers.values()):
            packed = k_bits in KV_BITS and v_bits in KV_BITS
            if not packed and (k_bits, v_bits) != (UNPACKED, UNPACKED):
                raise ArgumentError(f"a KV cache has 2, 3, 4 or 8 bits, not {k_bits} and {v_bits}")
        if self.layers and min(self.layers) < 0:
            raise ArgumentError(f"layers count from 0; there is no layer {min(self.layers)}")
        if not 0 < self.attention_top <= 1:
            raise ArgumentError(
                f"attention to {self.attention_top} of the packed blocks; use above 0, at most 1"
            )
        if self.window < 0:
            raise ArgumentError(f"a window of {self.window} tokens; use 0 or more")

    @classmethod
    def of(cls, bits: KVBits, window: int = 64, attention_top: float = 1.0) -> Self:
        """From a number, a pair for K and V, or text.

        Text is "4", "8,4" (K and V), or either with other bits for some layers after it, each
        after a slash: "4/0-3:8,4/9:8" is 8 and 4 bits in layers 0 to 3, 8 in layer 9, and 4 in the
        others. Raises ArgumentError for other text, and what the class does.
        """
        if isinstance(bits, int):
            return cls(bits, bits, window, attention_top=attention_top)
        if isinstance(bits, tuple) and len(bits) == 2:
            return cls(*bits, window, attention_top=attention_top)
        if not isinstance(bits, str):
            raise ArgumentError(
                f"KV bits are 2, 3, 4 or 8, (8, 4) or text like '4/0-3:8,4', not {bits!r}"
            )
        first, *others = bits.split("/")
        layers: dict[int, tuple[int, int]] = {}
        for other in others:
            where, _, what = other.partition(":")
            found = _LAYERS.fullmatch(where)
            if found is None:
                raise ArgumentError(f"KV bits are written like {_GRAMMAR}, not {bits!r}")
            begin, end = int(found[1]), int(found[2] or found[1])
            if end < begin or not layers.keys().isdisjoint(range(begin, end + 1)):
                raise ArgumentError(f"KV bits {bits!r}: layers {where} go backwards or come again")
            layers |= dict.fromkeys(range(begin, end + 1), _pair(what, bits))
        return cls(*_pair(first, bits), window, layers, attention_top=attention_top)

    def __str__(self) -> str:
        bits = f"{self.k_bits}-bit K, {self.v_bits}-bit V"
        others = f", {len(self.layers)} layers with other bits" if self.layers else ""
        return f"packed, {bits}{others}, the newest {self.window} tokens in floats"

    def frees(self, on_gpu: bool) -> bool:
        """Whether blocks that no layer will read are free.

        A CPU whose tokens attend to a part of the blocks keeps them.
        """
        return not self.keeps and (on_gpu or self.attention_top == 1)

    def bits(self, layer: int) -> tuple[int, int]:
        """K's and V's bits in a layer."""
        return self.layers.get(layer, (self.k_bits, self.v_bits))

    def form(self, shape: HeadShape, layer: int) -> KVFormat | None:
        """The form of a layer's blocks; None for a layer that is not packed.

        layer: layers of an index do not count, and have INDEX_BITS. Raises OpError for heads that
        cannot be packed.
        """
        bits = self.bits(layer)
        if shape.indexes and bits != (UNPACKED, UNPACKED):
            return _form(shape.head_dim, shape.latent, INDEX_BITS, INDEX_BITS)
        return _form(shape.head_dim, shape.latent, *bits)

    def forms(self, shapes: Sequence[HeadShape]) -> list[KVFormat | None]:
        """The forms of a model's layers, whose attention this is; None: not packed.

        Raises ArgumentError for bits of a layer there is not, OpError for heads that cannot be
        packed.
        """
        count = sum(not shape.indexes for shape in shapes)
        if self.layers and max(self.layers) >= count:
            raise ArgumentError(
                f"KV bits for layer {max(self.layers)}, but the model's {count} layers with "
                "a KV cache count from 0"
            )
        found, layer = list[KVFormat | None](), 0
        for shape in shapes:
            found.append(self.form(shape, layer))
            layer += not shape.indexes
        return found

    def packed_forms(self, shapes: Sequence[HeadShape]) -> list[KVFormat]:
        """The same where every layer has to be packed; ArgumentError too for one that is not."""
        found = self.forms(shapes)
        forms = [form for form in found if form is not None]
        if len(forms) < len(found):
            raise ArgumentError(
                f"layer {found.index(None)} has {UNPACKED} bits; here every layer's KV cache has "
                "2 to 8"
            )
        return forms


@cache
def _form(head_dim: int, latent: int, k_bits: int, v_bits: int) -> KVFormat | None:
    if k_bits == v_bits == UNPACKED:
        return None
    try:
        return KVFormat(head_dim, k_bits, v_bits, latent)
    except OpError as error:
        raise UnpackableError(str(error)) from error


def kv_quant(kv: KVQuant | KVBits | None) -> KVQuant | None:
    """What `load` takes as `kv`, packed caches; None for None and "none": K and V stay floats.

    Raises ArgumentError as `KVQuant.of` does.
    """
    if kv is None or kv == "none":
        return None
    return kv if isinstance(kv, KVQuant) else KVQuant.of(kv)


def _pair(text: str, whole: str) -> tuple[int, int]:
    """ "4" -> (4, 4), "8,4" -> (8, 4)."""
    found = _PAIR.fullmatch(text)
    if found is None:
        raise ArgumentError(f"KV bits are written like {_GRAMMAR}, not {whole!r}")
    return int(found[1]), int(found[2] or found[1])
