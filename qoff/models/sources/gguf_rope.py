"""Rotary position embedding in GGUF: keys of the metadata, and tensors with factors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qoff.errors import FormatError, UnsupportedModelError

from .gguf_metadata import Metadata

LLAMA3, _LONG, _SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
TENSORS = (LLAMA3, _LONG, _SHORT)
# Llama 3.1 and later store the divisors of their frequencies; these are the constants behind them.
_LOW, _HIGHS, _ORIGINAL = 1.0, (4.0, 32.0), 8192  # Step 3.5 has the second of _HIGHS
_FACTOR = "rope.scaling.factor"
_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
}


def rope_parameters(
    metadata: Metadata, head_dim: int, partial: bool = False, dim: int | None = None
) -> dict[str, Any]:
    """Return transformers' `rope_parameters`.

    partial: whether a part of each head may turn. dim: of so many channels; None: as the file says,
    or else all. Raises UnsupportedModelError for a kind of
    scaling that is not known, FormatError for tensors that do not fit.
    """
    rope = {"rope_type": "default", "rope_theta": float(metadata.get("rope.freq_base", 10000.0))}
    dim = metadata.get("rope.dimension_count", head_dim) if dim is None else dim
    if not partial or dim > head_dim:
        metadata.only("rope.dimension_count", head_dim)
    else:  # 1.0, too: transformers' own default may be less
        part = dim / head_dim
        exact = int(head_dim * part) == dim
        rope["partial_rotary_factor"] = part if exact else math.nextafter(part, 1.0)
    if _LONG in metadata.tensors or _SHORT in metadata.tensors:
        return rope | _long(metadata, dim)
    scaled = rope | _scaling(metadata)
    if LLAMA3 in metadata.tensors:
        return rope | _llama3(metadata, dim, float(str(rope["rope_theta"])))
    return scaled


def _scaling(metadata: Metadata) -> dict[str, Any]:
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear", 0.0))
    kind = metadata.get("rope.scaling.type", "linear" if factor else "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{metadata.path}: {metadata.architecture}.rope.scaling.type is {kind!r}; "
            "supported: none, linear, yarn, and longrope with its factors"
        )
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {}
    found: dict[str, Any] = {"rope_type": kind, "factor": float(factor or metadata.need(_FACTOR))}
    if kind == "yarn":
        original = metadata.need("rope.scaling.original_context_length")
        found["original_max_position_embeddings"] = original
        for key, name in _YARN.items():
            if (value := metadata.get(key)) is not None:
                found[name] = float(value)
    return found


def _long(metadata: Metadata, dim: int) -> dict[str, Any]:
    """Phi-3's factors for short and for long texts; all are short where no limit is written."""
    original = metadata.get("rope.scaling.original_context_length", metadata.need("context_length"))
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": _factors(metadata, _SHORT, dim),
        "long_factor": _factors(metadata, _LONG, dim),
        "original_max_position_embeddings": original,
    }
    if (factor := metadata.get("rope.scaling.attn_factor")) is not None:
        found["attention_factor"] = float(factor)
    return found


def _llama3(metadata: Metadata, dim: int, theta: float) -> dict[str, Any]:
    """Of the divisors that Llama 3.1 and later store, what they were computed from.

    Raises UnsupportedModelError if they are not those of transformers' kind "llama3".
    """
    factors = torch.tensor(_factors(metadata, LLAMA3, dim), dtype=torch.float64)
    factor = float(factors.max())
    if bool((factors == 1).all()):
        return {}
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    between = (factors > 1.001) & (factors < 0.999 * factor)
    smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
    for high in _HIGHS:
        lengths = (wavelengths * (_LOW + smooth * (high - _LOW)))[between]
        for original in {_ORIGINAL, *(round(float(x)) for x in lengths[:1])}:
            divisors = _divisors(wavelengths, factor, original, high)
            if torch.allclose(factors, divisors, 1e-4, 0.0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": _LOW,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
    if (step := _step(wavelengths, factors, factor)) is not None:
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LOW,
            "high_freq_factor": _LOW,
            "original_max_position_embeddings": step,
        }
    raise UnsupportedModelError(
        f"{metadata.path}: {LLAMA3} does not hold the factors of rope_type 'llama3'; "
        "convert the model's safetensors checkpoint instead"
    )


def _step(wavelengths: Tensor, factors: Tensor, factor: float) -> int | None:
    """A length between those that are not divided and those that are; None: others are between.

    Llama 4 has no lengths in which the two are mixed.
    """
    short = int((factors == 1).sum())
    whole = bool((factors[:short] == 1).all() and (factors[short:] == factor).all())
    if not whole or not 0 < short < len(factors):
        return None
    low, high = (float(x) for x in wavelengths[short - 1 : short + 1])
    return _ORIGINAL if low < _ORIGINAL < high else round(math.sqrt(low * high))


def _divisors(wavelengths: Tensor, factor: float, original: int, high: float) -> Tensor:
    """What transformers' kind "llama3" divides the frequencies of wavelengths by."""
    smooth = ((original / wavelengths - _LOW) / (high - _LOW)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _factors(metadata: Metadata, tensor: str, dim: int) -> list[float]:
    values = metadata.vector(tensor)
    if {*values[dim // 2 :]} == {1.0}:  # of channels that do not turn, or not in all layers
        values = values[: dim // 2]
    if len(values) != dim // 2 or min(values) <= 0:
        raise FormatError(
            f"{metadata.path}: tensor {tensor} has {len(values)} numbers; expected {dim // 2}, "
            "all above 0"
        )
    return values
