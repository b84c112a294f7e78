"""The quantizer that `from_pretrained` calls for qoff checkpoints and `QoffConfig`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.quantizers.base import HfQuantizer

from qoff.budgets import CPU, memory_bounds
from qoff.errors import ArgumentError, QoffError

from .config import LAYER_BY_LAYER, QoffConfig

if TYPE_CHECKING:  # transformers imports this module on the way to its PreTrainedModel
    from transformers import PreTrainedModel
    from transformers.core_model_loading import ConversionOps, WeightConverter

    from .streaming import Streaming

_OFFLOADED = ("cpu", "disk")


class QoffHfQuantizer(HfQuantizer):
    """Loads qoff checkpoints into modules of transformers, or quantizes weights as they arrive."""

    quantization_config: QoffConfig

    def __init__(self, quantization_config: QoffConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._bits: dict[str, int] = {}  # of what is quantized on the way
        self._converters: list[WeightConverter] = []
        self._errors: list[QoffError] = []
        self._device_map: dict[str, Any] = {}  # one that offloads
        self._open: Callable[[torch.device], Streaming] | None = None
        self._streaming: Streaming | None = None
        self._streams = False  # some layers of the model do

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Raise ArgumentError for weights that cannot stream, QuantizationError for a solver.

        transformers calls it again with the map that "auto" and `max_memory` come to.
        """
        given = device_map.values() if isinstance(device_map, dict) else [device_map]
        places = {str(place) for place in given}
        checkpoint = self.pre_quantized and self.quantization_config.layout in LAYER_BY_LAYER
        if _offloads(places) and (not checkpoint or len(places - set(_OFFLOADED)) > 1):
            raise ArgumentError(
                "device_map: not all weights fit on the device, and only those of a qoff "
                "checkpoint are offloaded to 'cpu' or 'disk' here, and for one device; "
                "qoff.load(..., device_memory='8GiB') streams what does not fit, or raise "
                "max_memory"
            )
        if not self.pre_quantized:
            self.quantization_config.quant()

    def update_device_map(self, device_map: Any) -> Any:
        """What is offloaded is taken from transformers, and has no place in its own map."""
        if not isinstance(device_map, dict) or not _offloads({str(x) for x in device_map.values()}):
            return device_map
        self._device_map = device_map
        devices = [place for place in device_map.values() if str(place) not in _OFFLOADED]
        on_gpu = "cpu" not in map(str, device_map.values()) and torch.cuda.is_available()
        return {"": devices[0] if devices else 0 if on_gpu else "cpu"}

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Let layers stream that do not fit one device; all others do, then.

        Raises BudgetError for memory that is too small for that, ArgumentError for a GPU's memory
        where there is none.
        """
        if not torch.accelerator.is_available():
            bounds = {place: int(n) for place, n in max_memory.items() if place != "disk"}
            memory_bounds(None, None, bounds, CPU)
        devices = [key for key, n in max_memory.items() if key not in _OFFLOADED and n > 0]
        if self._open is None or len(devices) > 1:
            return max_memory
        device = devices[0] if devices else "cpu"
        streaming = self._open(torch.device(device))
        places = streaming.within(int(max_memory[device]), int(max_memory.get("cpu", 0)))
        self._leave_out(streaming, places)
        return {**max_memory, device: 1 << 62}

    def _leave_out(self, streaming: Streaming, places: dict[int, str]) -> None:
        if places:
            streaming.leave_out(places)
            self._streaming, self._streams = streaming, True

    def _process_model_before_weight_loading(
        self,
        model: PreTrainedModel,
        checkpoint_files: list[str] | None = None,
        device_map: Any = None,
        **_: Any,
    ) -> None:
        from qoff.models.modules.text_part import keep_text, sees
        from qoff.models.names import MTP_PREFIX

        from . import operations
        from .streaming import Streaming
        from .wanted import quantizable

        config = self.quantization_config
        if not self.pre_quantized:
            self._bits = quantizable(model, config)
        elif config.layout not in LAYER_BY_LAYER:
            self._converters = operations.placing(model, self._errors)
        elif checkpoint_files:
            if sees(model.config.model_type):
                keep_text(model)  # the checkpoint has nothing else
            folder = checkpoint_files[0].rpartition("/")[0]
            self._converters = operations.unfusing(model, folder, self._errors)
            # A layer for multi-token prediction: transformers has no module for it.
            unused = {
                *(model._keys_to_ignore_on_load_unexpected or ()),
                f"^{re.escape(MTP_PREFIX)}",
            }
            model._keys_to_ignore_on_load_unexpected = unused
            self._open = partial(Streaming, model, folder, checkpoint_files)
            if self._device_map:
                streaming = self._open(torch.device(device_map[""]))
                self._leave_out(streaming, streaming.mapped(self._device_map))
        else:
            raise ArgumentError("state_dict: a qoff checkpoint is loaded from its directory")

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **_: Any
    ) -> PreTrainedModel:
        from qoff.hf.adapters import check_shapes, load_adapter
        from qoff.hf.packed.experts import QoffExperts
        from qoff.hf.packed.module import PackedModule

        from .model_methods import num_parameters
        from .save import save_pretrained

        if self._errors:
            raise self._errors[0]
        if self._streaming is not None:
            self._streaming.start()
        self._open = self._streaming = None  # they know the model
        model.__dict__["_weight_conversions"] = []  # what is saved needs none
        for method in (save_pretrained, load_adapter):
            own = _refuse if self._streams else MethodType(method, model)
            model.__dict__[method.__name__] = own
        model.__dict__["num_parameters"] = MethodType(num_parameters, model)
        model.register_load_state_dict_pre_hook(check_shapes)
        for module in model.modules():
            if isinstance(module, PackedModule | QoffExperts):
                module.requires_grad_(False)
        return model

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        return param_name in self._bits

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Any) -> float:
        """Bytes of one weight, codes, scale and minimum together, for `device_map="auto"`."""
        config = self.quantization_config
        module, _, name = param_name.rpartition(".")
        kept = tuple(config.modules_to_not_convert or ())
        packed = param_name in self._bits
        if self.pre_quantized:
            packed = not param_name.removesuffix(".weight").endswith(kept)
        if param.dim() < 2 or name == "bias" or not packed:
            return float(param.element_size())
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        sensitive = model.get_submodule(module) in ends
        from qoff.hf.packed.module import packing_for
        from qoff.kernels.layout.widening import read_bits

        bits = config.head_bits if sensitive else config.bits
        packing = packing_for(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        scale = 2 if self.pre_quantized else config.quant().scale_dtype.itemsize
        return read_bits(bits, packing) / 8 + 2 * scale / config.group_size

    def get_quantize_ops(self) -> ConversionOps:
        from .operations import Quantize

        return Quantize(self.quantization_config.quant(), self._bits, self._errors)

    def update_weight_conversions(self, weight_conversions: list[Any], *_: Any) -> list[Any]:
        """Those of a checkpoint with codes, which has no others."""
        return self._converters if self.pre_quantized else list(weight_conversions)

    def get_new_dtype(
        self, converter: Any, param: Any, dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """Codes and scales stay as they are, and vectors until norms are as the family has them."""
        from .operations import Operation

        ours = any(isinstance(x, Operation) for x in getattr(converter, "operations", ()))
        return None if ours else dtype

    def _dequantize(
        self, model: PreTrainedModel, dtype: torch.dtype | None = None
    ) -> PreTrainedModel:
        from .install import restore

        if self._streams:
            _refuse()
        restore(model, dtype or torch.float32)
        for name in ("save_pretrained", "load_adapter", "num_parameters"):
            model.__dict__.pop(name, None)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters are; packed weights have no gradient."""
        return True


def _offloads(places: set[str]) -> bool:
    """Whether weights at these places are not all on the device that computes."""
    return "disk" in places or ("cpu" in places and len(places) > 1)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ArgumentError(
        "layers of this model stream from its checkpoint; to save it, dequantize it or load "
        "adapters, load it without offloading"
    )
