"""The quantizer that `from_pretrained` calls for qoff checkpoints and `QoffConfig`."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from transformers.quantizers.base import HfQuantizer

from qoff.errors import ArgumentError, QoffError

from .config import LAYERS, QoffConfig

if TYPE_CHECKING:  # transformers imports this module on the way to its PreTrainedModel
    from transformers import PreTrainedModel
    from transformers.core_model_loading import ConversionOps, WeightConverter

    from .wanted import Wanted


class QoffHfQuantizer(HfQuantizer):
    """Loads qoff checkpoints into modules of transformers, or quantizes weights as they arrive."""

    quantization_config: QoffConfig

    def __init__(self, quantization_config: QoffConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._wanted: Wanted | None = None  # what is quantized on the way
        self._converters: list[WeightConverter] = []
        self._errors: list[QoffError] = []

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Raise ArgumentError for offloaded weights, QuantizationError for a solver of none.

        transformers calls it again with the map that "auto" and `max_memory` come to.
        """
        given = device_map.values() if isinstance(device_map, dict) else [device_map]
        places = {str(place) for place in given}
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ArgumentError(
                "device_map: not all weights fit on the device, and packed modules are not "
                "offloaded to 'cpu' or 'disk' here; qoff.load(..., device_memory='8GiB') streams "
                "what does not fit, or raise max_memory"
            )
        if not self.pre_quantized:
            self.quantization_config.quant()

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        from . import operations
        from .wanted import quantizable

        config = self.quantization_config
        if not self.pre_quantized:
            self._wanted = quantizable(model, config)
        elif config.layout != LAYERS:
            self._converters = operations.placing(model, self._errors)
        elif checkpoint_files:
            folder = checkpoint_files[0].rpartition("/")[0]
            self._converters = operations.unfusing(model, folder, self._errors)
        else:
            raise ArgumentError("state_dict: a qoff checkpoint is loaded from its directory")

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **_: Any
    ) -> PreTrainedModel:
        from qoff.hf.adapters import check_shapes, load_adapter
        from qoff.hf.packed.experts import QoffExperts

        from .install import packed_modules
        from .save import save_pretrained

        if self._errors:
            raise self._errors[0]
        model.__dict__["_weight_conversions"] = []  # what is saved needs none
        model.__dict__["save_pretrained"] = MethodType(save_pretrained, model)
        model.__dict__["load_adapter"] = MethodType(load_adapter, model)
        model.register_load_state_dict_pre_hook(check_shapes)
        experts = [module for module in model.modules() if isinstance(module, QoffExperts)]
        for module in (*packed_modules(model).values(), *experts):
            module.requires_grad_(False)
        return model

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        """Whether a parameter is quantized as it arrives."""
        return self._wanted is not None and param_name in self._wanted.bits

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Any) -> float:
        """Bytes of one weight, codes, scale and minimum together, for `device_map="auto"`."""
        config = self.quantization_config
        module, _, name = param_name.rpartition(".")
        if param.dim() < 2 or name == "bias" or not self._packs(model, param_name):
            return float(param.element_size())
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        sensitive = model.get_submodule(module) in ends
        return (config.head_bits if sensitive else config.bits) / 8 + 4 / config.group_size

    def _packs(self, model: PreTrainedModel, param_name: str) -> bool:
        """Whether a matrix is packed, now or in the checkpoint."""
        if not self.pre_quantized:
            return self.param_needs_quantization(model, param_name)
        kept = self.quantization_config.modules_to_not_convert or ()
        return not any(param_name.removesuffix(".weight").endswith(name) for name in kept)

    def get_quantize_ops(self) -> ConversionOps:
        """What does that."""
        from .operations import Quantize

        assert self._wanted is not None
        return Quantize(self.quantization_config.quant(), self._wanted, self._errors)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
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

        restore(model, dtype or torch.float32)
        for name in ("save_pretrained", "load_adapter"):
            model.__dict__.pop(name, None)
        return model

    def is_serializable(self) -> bool:
        """Yes: see `save_pretrained`."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters are; packed weights have no gradient."""
        return True
