"""`QoffConfig`: how transformers is told to quantize with qoff, and what config.json says of it."""

from __future__ import annotations

from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from qoff.checkpoint.layout import FORMAT_VERSION, QUANT_METHOD
from qoff.errors import FormatError, QuantizationError
from qoff.models.modules.configs import LAYOUT as MODULES
from qoff.quant import QuantConfig
from qoff.quant.matrix import CALIBRATED

# A qoff checkpoint, for its decoder or for modules; what save_pretrained writes otherwise.
LAYERS, STATE_DICT = "layers", "state_dict"
LAYER_BY_LAYER = (LAYERS, MODULES)
IMPORTED = "imported"  # the "solver" of codes that come from a GGUF file


class QoffConfig(QuantizationConfigMixin):
    """`quantization_config` of `from_pretrained`, and that of a checkpoint.

        AutoModelForCausalLM.from_pretrained(path, quantization_config=qoff.QoffConfig(bits=4))

    bits, group_size, solver: as in `qoff.QuantConfig`; head_bits: of embeddings and the head.
    modules_to_not_convert: names of modules, or ends of them, that stay as they are.
    layout: where the codes of a checkpoint are, "layers" or "modules" (a file a layer; what
    `qoff convert` writes, with fused rows where qoff has a decoder) or "state_dict" (under the
    names of transformers' modules). weights: what a checkpoint says of formats that were chosen for
    some of its matrices.
    Raises QuantizationError naming the key of a value that is not supported, FormatError for a
    checkpoint of another version.
    """

    def __init__(
        self,
        bits: int = 4,
        group_size: int = 32,
        solver: str = "hqq",
        head_bits: int = 6,
        modules_to_not_convert: list[str] | None = None,
        *,
        packing: str = "split32",
        version: int = FORMAT_VERSION,
        layout: str = LAYERS,
        weights: dict[str, dict[str, int]] | None = None,
        quant_method: str = QUANT_METHOD,
        **unknown: Any,
    ) -> None:
        if version != FORMAT_VERSION:
            raise FormatError(
                f"quantization_config: version is {version!r}; this qoff reads version "
                f"{FORMAT_VERSION}: use a newer qoff or convert the model again"
            )
        if unknown:
            raise QuantizationError(
                f"quantization_config: {min(unknown)} is unknown; leave it out, or use a newer qoff"
            )
        if layout not in (*LAYER_BY_LAYER, STATE_DICT):
            raise QuantizationError(
                f"layout {layout!r} is none that this qoff reads ({LAYERS}, {MODULES}, "
                f"{STATE_DICT}); use a newer qoff, or convert the model again"
            )
        found = modules_to_not_convert
        if found is not None and not (
            isinstance(found, list | tuple) and all(isinstance(x, str) for x in found)
        ):
            raise QuantizationError(f"modules_to_not_convert {found!r} is not a list of names")
        named = "hqq" if solver == IMPORTED else solver
        QuantConfig(bits, group_size, named, head_bits, packing)
        self.quant_method: Any = quant_method
        self.version, self.layout = version, layout
        self.bits, self.group_size, self.head_bits = bits, group_size, head_bits
        self.solver, self.packing = solver, packing
        if weights is not None:  # only then, as other checkpoints have no such key
            self.weights = weights
        self.modules_to_not_convert = None if found is None else list(found)

    def quant(self) -> QuantConfig:
        """How weights are quantized. Raises QuantizationError where only imported codes are."""
        if hasattr(self, "weights"):
            raise QuantizationError(
                "weights: from_pretrained gives all matrices one format; `qoff convert` mixes them"
            )
        if self.solver in CALIBRATED:
            raise QuantizationError(
                f"solver {self.solver!r} needs calibration, which `qoff convert` does; use hqq"
            )
        if self.solver == IMPORTED:
            raise QuantizationError(f"solver {IMPORTED!r} describes codes that are there; use hqq")
        return QuantConfig(self.bits, self.group_size, self.solver, self.head_bits)
