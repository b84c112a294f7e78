"""Which quantized checkpoints can be read, by the `quant_method` of their config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qoff.errors import UnsupportedModelError

from .awq import AWQ
from .bitsandbytes import BitsAndBytes
from .compressed_tensors import CompressedTensors
from .fp8 import FLOAT_QUANTIZED, FP8
from .gptq import GPTQ
from .mxfp4 import MXFP4
from .stored import Scheme, Settings


def _compressed(settings: Settings) -> Scheme:
    """Integers, or floats."""
    if settings.values.get("format") == FLOAT_QUANTIZED:
        return FP8.from_compressed(settings)
    return CompressedTensors.from_settings(settings)


SCHEMES: Mapping[str, Callable[[Settings], Scheme]] = {
    "awq": AWQ.from_settings,
    "bitsandbytes": lambda settings: BitsAndBytes(),  # whose tensors say how they are stored
    "compressed-tensors": _compressed,
    "fbgemm_fp8": lambda settings: FP8("weight_scale", columns=True),
    "fp8": FP8.from_settings,
    "gptq": GPTQ.from_settings,
    "mxfp4": lambda settings: MXFP4(),
}
_FLOATS = (BitsAndBytes, FP8, MXFP4)
# configs in a file of their own, as older versions wrote them
CONFIG_FILES: Mapping[str, str] = {"quantize_config.json": "gptq", "quant_config.json": "awq"}

CONFIG_KEYS = ("quantization_config", "compression_config")  # the latter of old compressed-tensors
_BESIDE = "expert_dtype"  # what DeepSeek V4 says beside them
_PARTS = ("text_config", "llm_config")  # of a model that sees, which may say it of its text alone


def stated(config: Mapping[str, Any]) -> tuple[str, object] | None:
    """Where a `config.json` says how a model is stored, and what it says; None: of floats."""
    parts = {"": config, **{f"{name}.": config.get(name) for name in _PARTS}}
    for where, part in parts.items():
        if isinstance(part, Mapping):
            for key in CONFIG_KEYS:
                if found := part.get(key):
                    if isinstance(found, Mapping) and _BESIDE in part:
                        found = {_BESIDE: part[_BESIDE], **found}
                    return f"{where}{key}.", found
    return None


def read_scheme(config: object, where: str, method: str | None = None) -> Scheme:
    """Read how a model is stored from the JSON object that describes its quantization.

    `where` is what errors call that object ("config.json: quantization_config."), `method` the
    method where the object does not say it. Raises UnsupportedModelError naming a key whose value
    has no implementation.
    """
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{where.rstrip('.: ')} is {config!r}; supported: an object")
    settings: dict[str, Any] = {"quant_method": method, **config}
    found = settings["quant_method"]
    if not isinstance(found, str) or found not in SCHEMES:
        raise UnsupportedModelError(
            f"{where}quant_method is {found!r}; supported: {', '.join(SCHEMES)}, and models that "
            f"are not quantized. Convert the original model"
        )
    return SCHEMES[found](Settings(where, settings))


def comes_as_floats(config: object, where: str) -> bool:
    """Whether all values of a model stored so are quantized anew. Raises as `read_scheme` does."""
    return isinstance(read_scheme(config, where), _FLOATS)
