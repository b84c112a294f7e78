"""What transformers, accelerate and PEFT ask of a model's weights, where they are not torch's."""

from __future__ import annotations

import math
from functools import partialmethod
from typing import Any, NoReturn, Self

import torch
from torch import accelerator
from transformers import PreTrainedModel

from qoff.budgets import CPU
from qoff.errors import OpError, QoffError
from qoff.memory.plan import EMBEDDING, HEAD, LM_HEAD, row_tables, unit_files, unit_weights
from qoff.models.modules.decoder import ModuleDecoder
from qoff.models.runtime import Runtime
from qoff.units import format_size

from .budget import Budget


class PlacedModel(PreTrainedModel):
    """A model whose weights a `Runtime` holds: what it says of them, and what cannot be done."""

    runtime: Runtime
    budget: Budget | None = None
    kv: str = "float32"  # how its caches are kept, and why

    @property
    def device(self) -> torch.device:
        """Where token ids and logits are by default; weights are where `hf_device_map` says."""
        return CPU

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def hf_device_map(self) -> dict[str, str]:
        """Where weights are, as accelerate writes it: "" for the device, then what streams.

        A layer that streams in part is named with where the rest comes from, "cpu" or "disk". There
        is none if all are where a pipeline computes that is not told a device: transformers makes
        none then, and a pipeline takes no `device` for a model that has one.
        """
        places = self._places
        if len(places) == 1 and self._computes_on.type == "cpu" and not accelerator.is_available():
            raise AttributeError(f"all weights are on {self._computes_on}")
        return places

    @property
    def _places(self) -> dict[str, str]:
        plan, checkpoint = self.runtime.residency, self.runtime.checkpoint
        decoder = self.runtime.decoder
        path = decoder.layers_path if isinstance(decoder, ModuleDecoder) else "model.layers"
        on_disk = {tile.unit for tile in plan.tiles if tile not in plan.host}
        places = {"": str(self._computes_on)}
        for unit, file in unit_files(checkpoint).items():
            if not plan.resident.issuperset(unit_weights(unit, file)):
                tiled = unit in plan.tiled and unit not in on_disk
                source = "cpu" if unit in plan.host or tiled else "disk"
                places[LM_HEAD if unit == HEAD else f"{path}.{unit}"] = source
        tables = row_tables(checkpoint.outer)
        if EMBEDDING not in (*plan.resident, *tables):
            places[EMBEDDING] = places[LM_HEAD]
        for table in tables:
            if table not in plan.resident:
                places[table] = "cpu" if table in plan.host else "disk"
        return places

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """How many weights the checkpoint has; none can be trained. Tied ones count once."""
        if only_trainable:
            return 0
        files = unit_files(self.runtime.checkpoint).values()
        entries = {name: entry for file in files for name, entry in file.weights.items()}
        return sum(
            math.prod(entry.shape)
            for name, entry in entries.items()
            if not (exclude_embeddings and name.startswith(EMBEDDING))
        )

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of memory for weights: resident ones, and what others stream through."""
        plan, decoder = self.runtime.residency, self.runtime.decoder
        outer = decoder.outer_bytes if isinstance(decoder, ModuleDecoder) else 0
        return plan.weight_bytes + outer

    def extra_repr(self) -> str:
        plan, checkpoint = self.runtime.residency, self.runtime.checkpoint
        streamed = len(self._places) - 1
        there = "all of them"
        if streamed:
            there = f"{streamed} modules stream through {plan.slots} slots"
            if not plan.slots:
                there = f"{streamed} modules in host memory"
        if plan.expert_slots:
            there = f"experts one by one in {plan.expert_slots} slots, {plan.slots} other slots"
        return (
            f"{self.config.model_type}, {len(checkpoint.layers)} layers, "
            f"{self.num_parameters():,} weights of {checkpoint.path}\n"
            f"weights: {format_size(self.get_memory_footprint())} in memory, {there}\n"
            f"KV cache: {self.kv}\n"
            f"memory: {'as much as it takes' if self.budget is None else self.budget}"
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:  # type: ignore[override]  # a wrapper
        """Nothing where the model is there already; else OpError: weights stay where they are."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        decoder = self.runtime.decoder
        at = self._computes_on
        if device is not None and (
            device.type != at.type or device.index not in (None, at.index or 0)
        ):
            raise OpError(
                f"the model computes on {at} and cannot be moved to {device}; load it with "
                f"qoff.load(..., device={str(device)!r})"
            )
        if dtype not in (None, self.dtype, decoder.dtype):
            raise OpError(
                f"the model computes in {decoder.dtype} and cannot be cast to {dtype}; load it "
                f"with qoff.load(..., device='cuda', dtype={str(dtype).removeprefix('torch.')!r})"
            )
        return self

    def cuda(self, device: Any = None) -> Self:  # type: ignore[override]
        return self.to("cuda" if device is None else device)

    cpu = partialmethod(to, "cpu")
    half = partialmethod(to, torch.float16)
    float = partialmethod(to, torch.float32)
    double = partialmethod(to, torch.float64)
    bfloat16 = partialmethod(to, torch.bfloat16)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: kernels are compiled already, and dynamo would break the graph at each."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the weights are a checkpoint on disk already."""
        raise QoffError(
            f"nothing to save: the model is the directory {self.runtime.checkpoint.path}; copy it"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled or copied: threads, open files and buffers have no copy."""
        raise QoffError(
            "a model of qoff.load cannot be pickled or copied; load it again from "
            f"{self.runtime.checkpoint.path}, or use {self._in_torch}"
        )

    @property
    def peft_config(self) -> NoReturn:  # type: ignore[override]
        """What PEFT looks for first. Raises OpError: adapters need torch's modules."""
        self._refuse_modules()

    def _refuse_modules(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise OpError(
            "a model of qoff.load has no modules of torch that could be changed or have adapters; "
            f"use {self._in_torch}"
        )

    add_adapter = _refuse_modules
    load_adapter = _refuse_modules
    get_input_embeddings = _refuse_modules
    set_input_embeddings = _refuse_modules
    resize_token_embeddings = _refuse_modules
    gradient_checkpointing_enable = _refuse_modules

    @property
    def _computes_on(self) -> torch.device:
        return self.runtime.decoder.device

    @property
    def _in_torch(self) -> str:
        """How transformers loads a model with torch's modules of the same weights."""
        return f"AutoModelForCausalLM.from_pretrained({str(self.runtime.checkpoint.path)!r})"
