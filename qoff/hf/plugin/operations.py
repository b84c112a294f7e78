"""What happens to tensors while transformers loads them: taken apart, packed, put into modules."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter

from qoff.checkpoint import Checkpoint, read_weight
from qoff.checkpoint.layout import CODES, SCALE_MIN, TensorEntry, WeightFile
from qoff.errors import FormatError, QoffError
from qoff.hf.packed.derived import is_router
from qoff.hf.packed.experts import DOWN, GATE_UP, UP, stacked
from qoff.hf.packed.module import packing_for, qtensor_of
from qoff.kernels.layout.qtensor import QTensor
from qoff.models.modules.structure import is_conv1d
from qoff.quant import QuantConfig, quantize

from .experts_form import experts_of
from .install import experts_module, install
from .units import StoredWeight, stored_units


@dataclass(frozen=True)
class Into:
    """Where tensors go. name: the first parameter that they become; missing: not loaded so far."""

    model: PreTrainedModel
    name: str = ""
    missing: set[str] = field(default_factory=set)

    def put(self, parameter: str, packed: QTensor) -> None:
        here = packed.for_kernels(packing_for(packed.device))
        self.missing.difference_update(install(self.model, parameter.removesuffix(".weight"), here))


class Operation(ConversionOps):
    """A step of transformers' loading, which fills modules itself.

    transformers would report an error as one of many and without its text, so the first of ours is
    kept in `errors` for the quantizer to raise when transformers is done; nothing more is loaded.
    """

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
        found = {key: self.given(x) for key, x in input_dict.items()}
        ordered = {key: found[key] for key in source_patterns if key in found} or found
        into = Into(about["model"], about["full_layer_name"], about["missing_keys"])
        try:
            if not self._errors:
                return self.load(ordered, into)
        except QoffError as error:
            self._errors.append(error)
        into.missing.clear()
        return {}

    def given(self, tensors: Any) -> Any:
        """What `load` gets of the tensors of a pattern: the only one there is."""
        return tensors[0] if isinstance(tensors, list) else tensors

    def load(self, found: dict[str, Any], into: Into) -> dict[str, Tensor]:
        """Take tensors in the order of their patterns; return what is to be stored, by name."""
        raise NotImplementedError


class Unfuse(Operation):
    """A weight of a qoff checkpoint to the parameters that it was made of."""

    def __init__(
        self, stored: StoredWeight, errors: list[QoffError], file: WeightFile | None = None
    ) -> None:
        """file: has the weight, which transformers before 5.21 may have rounded."""
        super().__init__(errors)
        self._stored, self._file = stored, file

    def load(self, found: dict[str, Any], into: Into) -> dict[str, Tensor]:
        stored, tensors = self._stored, tuple(found.values())
        if not stored.packed:
            parts = stored.split(self._vector(tensors[0]))
            dtypes = {key: into.model.get_parameter_or_buffer(key).dtype for key in parts}
            return {k: v.to(dtypes[k]) for k, v in parts.items() if isinstance(v, Tensor)}
        rows, columns = stored.shape
        whole = qtensor_of(tensors[0], tensors[1], (rows, columns))
        for target, part in stored.split(whole).items():
            assert isinstance(part, QTensor)
            into.put(target, part)
        return {}

    def _vector(self, given: Tensor) -> Tensor:
        """As the checkpoint has it: a norm's may lose its 1, and is rounded only then."""
        if self._file is None:
            return given
        entry = self._file.weights[self._stored.name]
        assert isinstance(entry, TensorEntry)
        if given.dtype == entry.dtype:
            return given
        return cast(Tensor, read_weight(self._file, entry)).to(given.device)


class PlaceExperts(Operation):
    """Codes and scales of all experts of a layer to their module."""

    def __init__(self, apart: bool, errors: list[QoffError]) -> None:
        """apart: those of each expert come alone, in their order; else stacked."""
        super().__init__(errors)
        self._apart = apart

    def given(self, tensors: Any) -> Any:
        return tensors if self._apart else super().given(tensors)

    def load(self, found: dict[str, Any], into: Into) -> dict[str, Tensor]:
        path, _, parameter = into.name.rpartition(".")
        module = experts_module(into.model, path)
        shape = module.dense_shape(parameter)
        parts = [list(x) for x in found.values()]
        if len(parts) != 2 or len(parts[0]) != shape[0] or len(parts[1]) != shape[0]:
            raise FormatError(
                f"{into.name}: {shape[0]} experts have {CODES} and {SCALE_MIN} each, but here are "
                f"those of {[len(x) for x in parts]}; convert or save the model again"
            )
        matrices = [qtensor_of(c, s, shape[1:]) for c, s in zip(*parts, strict=True)]
        module.hold(parameter, stacked(matrices))
        into.missing.discard(into.name)
        return {}


class PlaceTensors(Operation):
    """Codes and scales that were saved under the name of their module, to that module."""

    def load(self, found: dict[str, Any], into: Into) -> dict[str, Tensor]:
        module = into.model.get_submodule(into.name.removesuffix(".weight"))
        turned = is_conv1d(module)
        fits = isinstance(module, nn.Linear | nn.Embedding) or is_router(module) or turned
        if len(found) != 2 or not fits:
            raise FormatError(
                f"{into.name}: linears, embeddings and routers have {CODES} and {SCALE_MIN}, here "
                f"is a {type(module).__name__} with {len(found)} of them; save the model again"
            )
        (n, k), (codes, scale_min) = into.model.get_parameter(into.name).shape, found.values()
        into.put(into.name, qtensor_of(codes, scale_min, (k, n) if turned else (n, k)))
        return {}


class Quantize(Operation):
    """Float weights, quantized as they arrive. bits: of each, by name."""

    def __init__(self, quant: QuantConfig, bits: dict[str, int], errors: list[QoffError]) -> None:
        super().__init__(errors)
        self._quant, self._bits = quant, bits

    def load(self, found: dict[str, Any], into: Into) -> dict[str, Tensor]:
        for key, weight in found.items():
            if weight.dim() == 2:
                turned = is_conv1d(into.model.get_submodule(key.rpartition(".")[0]))
                into.put(key, self._packed(key, weight.T.contiguous() if turned else weight))
            else:
                self._experts(key, weight, into)
        return {}

    def _packed(self, name: str, weight: Tensor) -> QTensor:
        quant = self._quant
        return quantize(
            weight,
            self._bits[name],
            quant.group_size,
            quant.solver,
            packing_for(weight.device),
            quant.scale_dtype,
            name=name,
        )

    def _experts(self, name: str, weight: Tensor, into: Into) -> None:
        """weight: [experts, N, K], or [experts, K, N] where the module has them transposed."""
        path, _, parameter = name.rpartition(".")
        module = experts_module(into.model, path)
        order = module.packed_rows(parameter).argsort().to(weight.device)
        dense = (x.T if module.form.transposed else x for x in weight)
        module.hold(parameter, stacked([self._packed(name, x[order].contiguous()) for x in dense]))
        into.missing.discard(name)


def unfusing(model: PreTrainedModel, folder: str, errors: list[QoffError]) -> list[WeightConverter]:
    """A converter for each weight of the qoff checkpoint in a directory; one for all experts'.

    Raises FormatError, or UnsupportedModelError for one that the model has no place for.
    """
    checkpoint = Checkpoint.open(folder)
    found, of_experts = [], []
    of_files = zip(checkpoint.files, stored_units(checkpoint, model), strict=True)
    for file, stored in ((file, stored) for file, unit in of_files for stored in unit):
        parts = (CODES, SCALE_MIN) if stored.packed else ("",)
        if stored.expert is None:
            sources = ["^" + _end(stored.name + part) for part in parts]
            found.append(
                WeightConverter(sources, stored.targets[0], [Unfuse(stored, errors, file)])
            )
        elif stored.expert == 0:  # for the matrices of a layer that are like this one
            sources = [f"^{stored.of_experts}{_end(part)}" for part in parts]
            place: list[ConversionOps] = [PlaceExperts(True, errors)]
            of_experts.append(WeightConverter(sources, stored.targets[0], place))
    return found + of_experts


def placing(model: PreTrainedModel, errors: list[QoffError]) -> list[WeightConverter]:
    """The converters for what `save_pretrained` wrote module by module."""
    found = [WeightConverter([_end(CODES), _end(SCALE_MIN)], ".weight", [PlaceTensors(errors)])]
    for path in {name.rpartition(".")[2] for name in experts_of(model)}:
        places: list[ConversionOps] = [PlaceExperts(False, errors)]
        for name in (UP, GATE_UP, DOWN):  # the first converter that fits is taken
            target = f".{path}.{name}"
            sources = [_end(f"{target}{part}") for part in (CODES, SCALE_MIN)]
            found.insert(0, WeightConverter(sources, target, places))
    return found


def _end(name: str) -> str:
    return re.escape(name) + "$"
