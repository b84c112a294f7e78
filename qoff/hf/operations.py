"""What happens to tensors while transformers loads them: taken apart, packed, put into modules."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.quantizers_utils import should_convert_module

from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import CODES, SCALE_MIN
from qoff.errors import FormatError, QoffError, QuantizationError, UnsupportedModelError
from qoff.kernels.qtensor import QTensor
from qoff.models.spec import DecoderSpec
from qoff.quant import QuantConfig, quantize

from .install import install
from .packed_module import packing_for, qtensor_of
from .quantization_config import QoffConfig
from .stored import Stored, check_stored, stored_weights


class Operation(ConversionOps):
    """A step of transformers' loading, which fills modules itself.

    transformers would report an error as one of many and without its text, so the first of ours is
    kept in `errors` for the quantizer to raise when transformers is done; nothing more is loaded.
    """

    supports_many_to_many = True

    def __init__(self, errors: list[QoffError]) -> None:
        self._errors = errors

    def __deepcopy__(self, memo: dict[int, Any]) -> Operation:
        return self  # transformers copies its converters for each tensor

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **about: Any,
    ) -> dict[str, Any]:
        """Return what transformers shall store itself, by name; the rest is in its modules."""
        found = {key: x[0] if isinstance(x, list) else x for key, x in input_dict.items()}
        ordered = {key: found[key] for key in source_patterns if key in found} or found
        try:
            if not self._errors:
                name, missing = about["full_layer_name"], about["missing_keys"]
                return self.load(ordered, about["model"], name, missing)
        except QoffError as error:
            self._errors.append(error)
        about["missing_keys"].clear()
        return {}

    def load(
        self, found: dict[str, Tensor], model: PreTrainedModel, name: str, missing: set[str]
    ) -> dict[str, Tensor]:
        """Take tensors in the order of their patterns. name: the first parameter they become."""
        raise NotImplementedError

    @staticmethod
    def put(model: PreTrainedModel, parameter: str, packed: QTensor, missing: set[str]) -> None:
        here = packed.to_packing(packing_for(packed.device))
        missing -= install(model, parameter.removesuffix(".weight"), here)


class Unfuse(Operation):
    """A weight of a qoff checkpoint to the parameters that it was made of."""

    def __init__(self, stored: Stored, errors: list[QoffError]) -> None:
        super().__init__(errors)
        self._stored = stored

    def load(
        self, found: dict[str, Tensor], model: PreTrainedModel, name: str, missing: set[str]
    ) -> dict[str, Tensor]:
        stored, weight, tensors = self._stored, self._stored.weight, tuple(found.values())
        if weight.columns is None:
            parts = stored.split(tensors[0])
            dtypes = {key: model.get_parameter(key).dtype for key in parts}
            return {k: v.to(dtypes[k]) for k, v in parts.items() if isinstance(v, Tensor)}
        whole = qtensor_of(tensors[0], tensors[1], (weight.rows, weight.columns))
        for target, part in stored.split(whole).items():
            assert isinstance(part, QTensor)
            self.put(model, target, part, missing)
        return {}


class Place(Operation):
    """Codes and scales that were saved under the name of their module, to that module."""

    def load(
        self, found: dict[str, Tensor], model: PreTrainedModel, name: str, missing: set[str]
    ) -> dict[str, Tensor]:
        module = model.get_submodule(name.removesuffix(".weight"))
        if len(found) != 2 or not isinstance(module, nn.Linear | nn.Embedding):
            raise FormatError(
                f"{name}: a linear or an embedding has {CODES} and {SCALE_MIN}, but here is a "
                f"{type(module).__name__} with {len(found)} of them; save the model again"
            )
        (n, k), (codes, scale_min) = module.weight.shape, found.values()
        self.put(model, name, qtensor_of(codes, scale_min, (n, k)), missing)
        return {}


class Quantize(Operation):
    """A float weight, quantized as it arrives."""

    def __init__(self, quant: QuantConfig, bits: dict[str, int], errors: list[QoffError]) -> None:
        """bits: of each parameter."""
        super().__init__(errors)
        self._quant, self._bits = quant, bits

    def load(
        self, found: dict[str, Tensor], model: PreTrainedModel, name: str, missing: set[str]
    ) -> dict[str, Tensor]:
        quant = self._quant
        for key, weight in found.items():
            packed = quantize(
                weight,
                self._bits[key],
                quant.group_size,
                quant.solver,
                packing_for(weight.device),
                quant.scale_dtype,
                name=key,
            )
            self.put(model, key, packed, missing)
        return {}


def unfusing(model: PreTrainedModel, folder: str, errors: list[QoffError]) -> list[WeightConverter]:
    """A converter for each weight of the qoff checkpoint in a directory.

    Raises FormatError, or UnsupportedModelError for one that the model has no place for.
    """
    checkpoint = Checkpoint.open(folder)
    units = stored_weights(DecoderSpec.from_config(checkpoint.config), model)
    check_stored(checkpoint, units)
    return [_unfusing(stored, errors) for unit in units for stored in unit]


def placing(errors: list[QoffError]) -> list[WeightConverter]:
    """The converter for what `save_pretrained` wrote module by module."""
    return [WeightConverter([_end(CODES), _end(SCALE_MIN)], ".weight", [Place(errors)])]


def _unfusing(stored: Stored, errors: list[QoffError]) -> WeightConverter:
    parts = ("",) if stored.weight.columns is None else (CODES, SCALE_MIN)
    sources = ["^" + _end(stored.name + part) for part in parts]
    return WeightConverter(sources, list(stored.targets), [Unfuse(stored, errors)])


def _end(name: str) -> str:
    return re.escape(name) + "$"


def quantizable(model: PreTrainedModel, config: QoffConfig) -> dict[str, int]:
    """Bits by parameter. Raises QuantizationError where the group does not divide the columns."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 2 and "expert" in name:
            raise UnsupportedModelError(
                f"{name}: experts cannot be quantized while loading; use qoff convert, qoff.load"
            )
    head = model.get_output_embeddings()
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if not should_convert_module(name, config.modules_to_not_convert):
            continue
        if isinstance(module, nn.Embedding) or (module is head and type(module) is nn.Linear):
            found[f"{name}.weight"] = config.head_bits
        elif type(module) is nn.Linear:
            found[f"{name}.weight"] = config.bits
    for target, source in model.all_tied_weights_keys.items():
        if (target in found) != (source in found):  # one of two that share a weight stays as it is
            found.pop(target, None)
            found.pop(source, None)
    for name in found:
        columns = model.get_parameter(name).shape[1]
        if columns % config.group_size:
            raise QuantizationError(
                f"{name}: group_size {config.group_size} does not divide its {columns} columns; "
                "choose another, or name it in modules_to_not_convert"
            )
    return found
