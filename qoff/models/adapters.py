"""LoRA adapters that PEFT saved, as the native decoder adds them to its packed matrices.

A packed matrix may be several of the model's: its parts have factors of their own, and their rows
lie as the packed matrix's do (`names.Part`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from qoff.errors import ArgumentError, FormatError, UnsupportedModelError, raised_as
from qoff.kernels.cpu.linear.scratch import low_rank_bytes
from qoff.kernels.layout.low_rank import BLOCK
from qoff.kernels.processor import pool_threads
from qoff.schema import read_object, shown

from .adapter_layers import AdapterLayers, Factors, Place, Planned, kept_as, merged
from .families import module_names
from .families.family import TensorNames
from .forward_pass import AdaptedRows, mlp_tokens
from .layer_weights import layer_weights
from .names import Part, Weight
from .spec import DecoderSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _FACTOR = "base_model.model.", re.compile(r"(.+)\.lora_(A|B)\.weight")
_NOT_THERE = {  # what changes what an adapter computes, with what it is called
    "use_dora": "DoRA",
    "lora_bias": "biases of its own (lora_bias)",
    "modules_to_save": "whole modules (modules_to_save)",
    "trainable_token_indices": "rows of the embedding (trainable_token_indices)",
    "layer_replication": "layers that are there twice (layer_replication)",
    "alora_invocation_tokens": "aLoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
}


def adapter_config(path: str | PathLike[str]) -> dict[str, Any]:
    """What a folder that PEFT's `save_pretrained` wrote says of its adapter, without the model.

    Raises ArgumentError for no folder, FormatError for one without an adapter, and
    UnsupportedModelError for other kinds than LoRA.
    """
    if not Path(path).is_dir():
        raise ArgumentError(f"{path}: is no folder; give one that PEFT saved an adapter to")
    file = Path(path) / CONFIG
    config = read_object(file, "PEFT's save_pretrained writes it")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(f"{file}: peft_type is {shown(kind)}; supported: 'LORA'")
    for key, words in _NOT_THERE.items():
        if config.get(key):
            raise UnsupportedModelError(
                f"{file}: the adapter has {words}; supported: LoRA of linear layers"
            )
    if config.get("bias", "none") != "none":
        raise UnsupportedModelError(f"{file}: bias is {shown(config['bias'])}; supported: 'none'")
    patterns = [config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")]
    if not all(isinstance(one, dict) for one in patterns):
        raise FormatError(f"{file}: rank_pattern and alpha_pattern are objects, by module")
    if not (Path(path) / WEIGHTS).is_file():
        raise FormatError(f"{path}: has no {WEIGHTS}; save the adapter as safetensors, with PEFT")
    return config


class AdapterFile:
    """A folder that PEFT's `save_pretrained` wrote, checked, without its weights in memory.

    Raises FormatError where it is none, UnsupportedModelError for other kinds than LoRA of the
    linear layers of decoder layers, and for a matrix that is not whole blocks of 16 rows,
    ArgumentError for one of another model.
    """

    def __init__(self, path: str | PathLike[str], spec: DecoderSpec) -> None:
        self.path, self._config = Path(path), adapter_config(path)
        weights = self.path / WEIGHTS
        refused = raised_as(FormatError, f"{weights}: cannot be read", "save it as safetensors")
        with refused, safe_open(weights, "pt") as file:
            names = file.keys()
            slices = {name: file.get_slice(name) for name in names}
            shapes = {name: tuple(one.get_shape()) for name, one in slices.items()}
            self._dtypes = {name: one.get_dtype() for name, one in slices.items()}
        self._tensors, self._names = self._of_model(spec, shapes)
        self.layers = [self._plan(spec, layer, shapes) for layer in range(spec.num_layers)]

    def load(self, number: int, layers: AdapterLayers) -> None:
        """Read its factors into the memory of adapter `number`. Raises FormatError."""
        weights = self.path / WEIGHTS
        with raised_as(FormatError, f"{weights}: cannot be read"), safe_open(weights, "pt") as file:
            for layer, planned in enumerate(self.layers):
                for name, one in planned.items():
                    one.load(file, weights, layers.memory((layer, name), number))

    def _of_model(
        self, spec: DecoderSpec, shapes: Mapping[str, object]
    ) -> tuple[TensorNames, dict[str, str]]:
        """By which names it adapts the model, and `_modules`."""
        first, *others = module_names(spec.model_type)
        try:
            return first, self._modules(spec, first, shapes)
        except UnsupportedModelError:
            for names in others:
                with suppress(UnsupportedModelError):
                    return names, self._modules(spec, names, shapes)
            raise

    def _modules(
        self, spec: DecoderSpec, names: TensorNames, shapes: Mapping[str, object]
    ) -> dict[str, str]:
        """From the model's modules in the layers to what the adapter calls them."""
        there = {
            names.in_transformers(part.source).removesuffix(".weight"): part.source
            for layer in range(spec.num_layers)
            for weight in layer_weights(spec, layer, names)
            if weight.columns is not None and not weight.routes
            for part in weight.parts
            if part.expert is None
        }
        found: dict[str, str] = {}
        for name in shapes:
            match = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
            if match is None:
                raise UnsupportedModelError(
                    f"{self.path / WEIGHTS}: has {name[:200]}; supported: LoRA of linear layers"
                )
            called = match[1]
            # Models that a checkpoint is a part of have more in front, or less.
            mine = [x for x in there if f".{called}".endswith(f".{x}")]
            mine = mine or [x for x in there if x.endswith(f".{called}")]
            if not mine:
                raise UnsupportedModelError(
                    f"{self.path}: adapts {called[:200]}, which is no linear layer of this model's "
                    "decoder layers; supported are these, not embeddings, heads or experts"
                )
            if called.endswith(".kv_b_proj"):
                raise UnsupportedModelError(
                    f"{self.path}: adapts {called[:200]}, parts of which latent attention "
                    "multiplies by apart; supported are the other linear layers"
                )
            found[there[max(mine, key=len)].removesuffix(".weight")] = called
        return found

    def _plan(
        self, spec: DecoderSpec, layer: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Planned]:
        """What the matrices of a layer get."""
        found: dict[str, Planned] = {}
        for weight in layer_weights(spec, layer, self._tensors):
            if weight.columns is None or weight.routes:
                continue
            factors = [self._factors(part, weight.columns, shapes) for part in weight.parts]
            if any(factors):
                self._check_rows(weight)
                found[weight.name] = Planned(weight, factors, kept_as(self._dtypes_of(factors)))
        return found

    def _check_rows(self, weight: Weight) -> None:
        """Raise UnsupportedModelError for a matrix that is not whole blocks of rows."""
        if weight.rows % BLOCK:
            called = [
                self._names.get(x.source.removesuffix(".weight"), x.source) for x in weight.parts
            ]
            raise UnsupportedModelError(
                f"{self.path}: adapts {', '.join(called)[:200]}, a matrix of {weight.rows} rows; "
                f"supported are multiples of {BLOCK}; leave it out of target_modules"
            )

    def _dtypes_of(self, factors: Sequence[Factors | None]) -> set[str]:
        """What the file has the factors of a matrix in."""
        return {self._dtypes[name] for one in factors if one for name in (one.down, one.up)}

    def _factors(
        self, part: Part, columns: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> Factors | None:
        """Those of a part of a matrix, if there are."""
        called = self._names.get(part.source.removesuffix(".weight"))
        if called is None or part.expert is not None:
            return None
        prefix = _PREFIX if any(name.startswith(_PREFIX) for name in shapes) else ""
        down, up = (f"{prefix}{called}.lora_{which}.weight" for which in "AB")
        a, b = shapes.get(down), shapes.get(up)
        if a is None or b is None or len(a) != 2 or not a[0]:
            raise FormatError(f"{self.path / WEIGHTS}: {called} has no lora_A and lora_B")
        if (a, b) != ((a[0], columns), (part.rows, a[0])):
            raise ArgumentError(
                f"{self.path}: lora_A and lora_B of {called} are {list(a)} and {list(b)}, but this "
                f"model's matrix is [{part.rows}, {columns}]; the adapter is of another model"
            )
        return Factors(down, up, a[0], self._factor(called, a[0]))

    def _factor(self, called: str, rank: int) -> float:
        """What the product of both factors is multiplied by."""
        alpha = self._config.get("lora_alpha", 8)
        for pattern, value in (self._config.get("alpha_pattern") or {}).items():
            with raised_as(FormatError, f"{self.path / CONFIG}: alpha_pattern"):
                if re.fullmatch(rf"(.*\.)?({pattern})", called):  # as PEFT reads it
                    alpha = value
                    break
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e30:
            raise FormatError(f"{self.path / CONFIG}: alpha is {shown(alpha)}; expected a number")
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)


class Adapters:
    """Adapters by name, for the rows of one batch. They are in memory after `load`.

    Raises what `AdapterFile` does.
    """

    def __init__(self, paths: Mapping[str, str | PathLike[str]], spec: DecoderSpec) -> None:
        self.names = tuple(paths)
        self.folders = {name: Path(path) for name, path in paths.items()}
        self._files = [AdapterFile(path, spec) for path in paths.values()]
        self._spec = spec
        each = zip(*(file.layers for file in self._files), strict=True)
        self.layers = AdapterLayers([merged(one) for one in each])

    def work_bytes(self, tokens: int, recorded: int, tiled: bool, on_gpu: bool = False) -> int:
        """What a pass of `tokens` tokens takes beside, and recordings of `recorded` rows keep."""
        most = scratch = 0
        threads = pool_threads()
        for layer in range(self._spec.num_layers):
            for weight in layer_weights(self._spec, layer):
                planned = [x.layers[layer].get(weight.name) for x in self._files]
                rank = max((x.rank for x in planned if x is not None), default=0)
                if rank and weight.columns is not None:
                    of_mlp = weight.name.startswith("mlp.")
                    some = mlp_tokens(tokens, tiled, on_gpu) if of_mlp else tokens
                    rows, columns = weight.rows, weight.columns
                    if on_gpu:  # x while it is normalized, its products and sums; factors widened
                        floats = some * (3 * (columns + rows) + rank)
                        most = max(most, 4 * (floats + rank * (columns + 3 * rows)))
                        continue
                    most = max(most, 4 * rows * (some + recorded))
                    asked = low_rank_bytes(threads, some, columns, rank, normed=True)
                    scratch = max(scratch, asked)
        return most + scratch

    def load(self, near: Collection[Place], device: torch.device, through_slot: bool) -> None:
        """Read them. near, device, through_slot: see `AdapterLayers.allocate`. Raises FormatError.

        Raises OSError where there is no memory.
        """
        self.layers.allocate(near, device, through_slot)
        for number, one in enumerate(self._files):
            one.load(number, self.layers)
        self.layers.loaded()

    def number(self, name: str | None) -> int:
        """As `adapter_number`."""
        return adapter_number(self.names, name)

    def rows(self, numbers: Sequence[int]) -> AdaptedRows | None:
        """What a pass adds whose rows have these adapters; None where none has one."""
        key = tuple(numbers)
        if max(key, default=-1) < 0:
            return None
        return AdaptedRows(key, torch.tensor(key, dtype=torch.int64), self.layers)


def adapter_number(names: Sequence[str], name: str | None) -> int:
    """Of one of several adapters; -1 for none. Raises ArgumentError for one that is not there."""
    if name is None:
        return -1
    if name not in names:
        known = ", ".join(map(shown, names)) or "none"
        raise ArgumentError(f"there is no adapter {shown(name)}; there are: {known}")
    return names.index(name)
